"""Calls with a K/V cache that must be right, each with its reason, and the tensors of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .checks import DTYPES

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CacheCase:
    """One call; ``why`` names the test. What is not part of a sequence is NaN in the cache."""

    why: str
    lengths: tuple[int, ...] = (37,)  # keys before the new ones, one a sequence
    capacity: int = 70
    heads: int = 4
    heads_kv: int = 2
    seqlen_q: int = 1
    head_dim: int = 32
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "fp16"
    page_size: int = 0
    new: int = 0
    padding: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()  # first keys of each sequence that no row's window reaches: NaN, and without pages
    rows: tuple[int, ...] = ()  # of the cache: cache_batch_idx
    full: bool = False  # no cache_seqlens: every cache is full
    rotary_dim: int = 0
    shared: bool = False  # values are the first columns of the keys
    q_size: float = 1.0
    fp8: str = ""  # caches are e4m3: "none", or what has a scale, "all", "head" or "token"
    sinks: bool = False
    alibi: str = ""  # "heads" or "batch"
    bias: str = ""  # its dtype; " shared" behind it: of all sequences and heads; " across": columns are far
    # apart; " lowest": keys are hidden by the most negative number
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.why


def make_tensors(case: CacheCase, device: str = "cpu", seed: int = 0) -> Tensors:
    """Return the arguments of a call: sequences of standard normal values, NaN around them, pages in random order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPES[case.dtype])

    batch, wide = len(case.lengths), case.head_dim_v or case.head_dim
    tensors: Tensors = {"q": normal(batch, case.heads, case.seqlen_q, case.head_dim) * case.q_size}
    for name, values in (("cache_seqlens", case.lengths), ("leftpad_k", case.padding), ("cache_batch_idx", case.rows)):
        if values and not (case.full and name == "cache_seqlens"):
            tensors[name] = torch.tensor(values, dtype=torch.int32)
    if case.new:
        tensors["k"] = normal(batch, case.heads_kv, case.new, case.head_dim)
        tensors["v"] = normal(batch, case.heads_kv, case.new, wide)
    if case.rotary_dim:
        angles = 9 * torch.rand(case.capacity + case.seqlen_q, case.rotary_dim // 2, generator=generator)
        tensors["rotary_cos"], tensors["rotary_sin"] = angles.cos(), angles.sin()
    if case.sinks:
        tensors["sinks"] = torch.randn(case.heads, generator=generator)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "heads" else (batch, case.heads)
        tensors["alibi"] = torch.rand(shape, generator=generator)
    fill_caches(case, tensors, generator)
    if case.fp8:
        quantise_caches(case, tensors, generator)
    if case.bias:
        tensors["bias"] = make_bias(case, tensors, generator)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    if case.shared:
        tensors["v_cache"] = tensors["k_cache"][..., :wide]
    return tensors


def make_bias(case: CacheCase, tensors: Tensors, generator: torch.Generator) -> torch.Tensor:
    """Return what is added to the scores: some keys are hidden, and what lies behind the last key is NaN."""
    dtype, _, how = case.bias.partition(" ")
    columns = tensors["k_cache"].shape[1] * (tensors["page_table"].shape[1] if case.page_size else 1)
    batch, heads = (1, 1) if how == "shared" else (len(case.lengths), case.heads)
    bias = torch.randn(batch, heads, case.seqlen_q, columns, generator=generator)
    if how == "lowest":  # of a few keys of every row, of all keys of the last row, of all but one in the first
        bias[..., 0, 1:], bias[..., -1, :] = torch.finfo(DTYPES[dtype]).min, torch.finfo(DTYPES[dtype]).min
    else:
        bias[bias > 1] = -math.inf
    bias[..., max(case.lengths) + case.new :] = math.nan
    bias = bias.to(DTYPES[dtype])
    return bias.transpose(2, 3).contiguous().transpose(2, 3) if how == "across" else bias


def fill_caches(case: CacheCase, tensors: Tensors, generator: torch.Generator) -> None:
    """Add caches that are NaN but where sequences lie, and a page table that names no page behind them."""
    assert all(keys <= case.capacity for keys in case.lengths), f"{case.lengths} do not fit {case.capacity}"
    batch, length = len(case.lengths), case.page_size or case.capacity
    pages = max(case.rows, default=batch - 1) + 1
    table = torch.arange(pages)[list(case.rows)] if case.rows else torch.arange(batch)
    table = table[:, None]
    if case.page_size:
        a_sequence = -(-case.capacity // length)
        pages = batch * a_sequence + 3
        table = torch.randperm(pages, generator=generator)[: batch * a_sequence].reshape(batch, a_sequence)
    for name, columns in (("k_cache", case.head_dim), ("v_cache", case.head_dim_v or case.head_dim)):
        cache = torch.full((pages, length, case.heads_kv, columns), math.nan)
        for b, keys in enumerate(case.lengths):
            for n in range(case.padding[b] if case.padding else case.gone[b] if case.gone else 0, keys):
                cache[table[b, n // length], n % length] = torch.randn(cache.shape[2:], generator=generator)
        tensors[name] = cache.to(DTYPES[case.dtype])
    if case.page_size:
        tensors["page_table"] = table.int()
        for b, keys in enumerate(case.lengths):
            tensors["page_table"][b, -(-(keys + case.new) // length) :] = 2**31 - 1
            if case.gone:
                tensors["page_table"][b, : case.gone[b] // length] = -1


def quantise_caches(case: CacheCase, tensors: Tensors, generator: torch.Generator) -> None:
    """Make the caches fp8, with scales; those of tokens are NaN where the cache is."""
    for side in "kv":
        cache = tensors[f"{side}_cache"].float()
        scale = torch.ones(())
        if case.fp8 == "token":
            scale = cache.abs().amax(-1) / 448
        elif case.fp8 != "none":
            scale = 0.005 + 0.02 * torch.rand((case.heads_kv,) if case.fp8 == "head" else (), generator=generator)
        cache /= scale[..., None] if scale.dim() else scale
        tensors[f"{side}_cache"] = cache.clamp(-448, 448).to(torch.float8_e4m3fn)
        if case.fp8 != "none" and not (case.shared and side == "v"):
            tensors[f"{side}_scale"] = scale


FEATURES = {"causal": True, "window": (9, 1), "softcap": 4.0, "softmax_scale": -0.3}
CACHE_CASES = [
    CacheCase("one-sequence"),
    CacheCase("full", lengths=(70, 70), full=True),
    CacheCase("lengths", lengths=(0, 1, 70, 33, 16)),
    CacheCase("page-1", lengths=(37, 5), page_size=1),
    CacheCase("page-3", lengths=(37, 70), page_size=3, head_dim=40),
    CacheCase("page-16", lengths=(48, 0, 17), page_size=16),
    CacheCase("page-48", lengths=(37, 70), page_size=48),
    CacheCase("batch-idx", lengths=(37, 20), rows=(3, 1)),
    CacheCase("leftpad", lengths=(37, 20, 9), padding=(20, 0, 9)),
    CacheCase("leftpad-paged", lengths=(37, 20), padding=(20, 3), page_size=8),
    CacheCase("append", lengths=(37, 0), new=1),
    CacheCase("append-paged", lengths=(37, 15, 16), new=3, seqlen_q=3, page_size=16, options={"causal": True}),
    CacheCase("append-rows", lengths=(37, 4), new=2, rows=(0, 2)),
    CacheCase("append-too-much", lengths=(69, 70), new=3),
    CacheCase("rotary", lengths=(37, 8), new=2, seqlen_q=2, rotary_dim=32, options={"causal": True}),
    CacheCase(
        "rotary-pairs", lengths=(37, 8), padding=(5, 0), new=1, rotary_dim=12, page_size=16,
        options={"rotary_interleaved": True},
    ),
    CacheCase("rotary-one-position", lengths=(37,), new=3, seqlen_q=3, rotary_dim=16),
    CacheCase("many-rows", lengths=(60, 31), heads=16, seqlen_q=5, options={"causal": True}),
    CacheCase("window", lengths=(60, 3), seqlen_q=3, page_size=3, heads=16, options={"window": (10, 1)}),
    CacheCase(
        "window-pages-gone", lengths=(60, 33), gone=(49, 22), seqlen_q=2, new=1, page_size=16,
        options={"causal": True, "window": (10, -1)},
    ),
    CacheCase("window-small-pages-gone", lengths=(60, 33), gone=(49, 22), page_size=3, options={"window": (10, -1)}),
    CacheCase("window-keys-gone", lengths=(60, 5), gone=(49, 0), options={"window": (10, -1)}),
    CacheCase("more-rows-than-keys", lengths=(2, 0), seqlen_q=5, options={"causal": True}),
    CacheCase("features", lengths=(50, 11), seqlen_q=3, sinks=True, alibi="batch", options=FEATURES),
    CacheCase("bias", lengths=(50, 11, 0), seqlen_q=3, bias="fp16", options={"causal": True}),
    CacheCase("bias-shared", lengths=(50, 11), seqlen_q=2, new=2, page_size=16, bias="bf16 shared"),
    CacheCase(
        "bias-across", lengths=(50, 11), heads=10, seqlen_q=3, page_size=3, bias="fp32 across", alibi="heads",
        sinks=True, options={**FEATURES, "num_splits": 3},
    ),
    CacheCase("bias-lowest", lengths=(50, 11), seqlen_q=3, dtype="fp32", bias="fp32 lowest", options={"num_splits": 2}),
    # Shares of other lengths: in rows that see the most negative number alone, keys of each count alike.
    CacheCase(
        "bias-lowest-shares", lengths=(700, 300), capacity=700, seqlen_q=3, dtype="fp32", bias="fp32 lowest",
        options={"num_splits": 3},
    ),
    CacheCase("bias-lowest-bf16", lengths=(50, 11), seqlen_q=2, bias="bf16 lowest"),
    CacheCase("softcap-far-above-the-scores", lengths=(50, 11), dtype="fp32", options={"softcap": 50.0}),
    CacheCase("sinks-no-keys", lengths=(0, 5), sinks=True, alibi="heads", options={"num_splits": 3}),
    CacheCase("fp32-unequal-widths", lengths=(37, 5), dtype="fp32", head_dim=24, head_dim_v=40),
    CacheCase("splits", lengths=(70, 3), options={"num_splits": 4}),
    CacheCase("invariant", lengths=(300, 40), capacity=600, options={"batch_invariant": True}),
    CacheCase("many-rows-paged", lengths=(61, 31), page_size=3, heads=16, seqlen_q=5, options={"causal": True}),
    CacheCase("merge-in-steps", lengths=(300,), capacity=300, heads=64, heads_kv=1, options={"num_splits": 19}),
    CacheCase("many-sequences", lengths=(*(12 * (70,)), 1, 40), heads=1, heads_kv=1),
    CacheCase(
        "shared", lengths=(70, 3, 0), heads=20, heads_kv=1, head_dim=48, head_dim_v=32, page_size=16, shared=True,
    ),
    CacheCase(
        "shared-rest-of-7", lengths=(37,), seqlen_q=2, head_dim=31, head_dim_v=24, shared=True,
        options={"causal": True},
    ),
    CacheCase("shared-whole", lengths=(37, 20), shared=True),
    CacheCase("mqa-one-column", lengths=(20,), heads=5, heads_kv=1, head_dim=1),
    CacheCase("fp8", lengths=(37, 20), new=1, fp8="none"),
    CacheCase("fp8-all", lengths=(37, 0, 69), new=1, page_size=16, fp8="all"),
    CacheCase("fp8-head", lengths=(37, 70), seqlen_q=2, page_size=3, head_dim=40, fp8="head", options={"causal": True}),
    CacheCase("fp8-token", lengths=(37, 15, 0), new=3, seqlen_q=3, page_size=16, fp8="token", options={"causal": True}),
    CacheCase("fp8-token-rows", lengths=(37, 4), new=2, rows=(0, 2), head_dim=24, head_dim_v=40, fp8="token"),
    CacheCase("fp8-fp32", lengths=(60, 31), dtype="fp32", padding=(5, 0), heads=16, seqlen_q=2, fp8="token"),
    CacheCase(
        "fp8-features", lengths=(50, 11), seqlen_q=3, sinks=True, alibi="batch", page_size=16, fp8="token",
        options={**FEATURES, "num_splits": 3},
    ),
    CacheCase("fp8-softcap-bias", lengths=(50, 11), bias="fp16", fp8="head", options={"softcap": 4.0}),
    CacheCase(
        "fp8-rotary", lengths=(37, 8), new=2, seqlen_q=2, rotary_dim=16, fp8="head", options={"causal": True},
    ),
    CacheCase("fp8-rotary-token", lengths=(37, 8), new=2, rotary_dim=16, page_size=8, fp8="token"),
    CacheCase("fp8-odd-columns", lengths=(37, 9), seqlen_q=2, head_dim=21, head_dim_v=19, fp8="token"),
    CacheCase(
        "fp8-large-queries", lengths=(37, 9), seqlen_q=2, q_size=3e3, fp8="all", options={"softmax_scale": 2e-4},
    ),
    CacheCase(
        "fp8-small-queries", lengths=(37, 9), q_size=2e-4, page_size=16, fp8="token", options={"softmax_scale": 3e3},
    ),
    CacheCase(
        "fp8-shared", lengths=(70, 3, 0), heads=20, heads_kv=1, head_dim=48, head_dim_v=32, page_size=16, shared=True,
        fp8="all",
    ),
    CacheCase(
        "fp8-shared-token", lengths=(37, 9), seqlen_q=2, heads_kv=1, head_dim=48, head_dim_v=32, page_size=3,
        shared=True, fp8="token", options={"causal": True},
    ),
]  # fmt: skip
EMPTY_CACHE_CASES = [
    CacheCase("no-sequences", lengths=(), capacity=4),
    CacheCase("no-queries", lengths=(3,), seqlen_q=0, new=1),
    CacheCase("no-capacity", lengths=(0,), capacity=0),
    CacheCase("no-heads", lengths=(3,), heads=0, heads_kv=0),
]
