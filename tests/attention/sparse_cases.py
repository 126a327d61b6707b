"""Calls of ``sparse_mla`` that must be right, each with its reason, and what each is held to."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science import pack_mla_rows, sparse_mla, unpack_mla_rows
from flashmoe_science.operators.attention_sparse import OPERATOR

from .checks import DTYPES


@dataclass(frozen=True)
class SparseCase:
    """Random tensors; ``why`` names the test. Rows that no index names are NaN, and so are pages that none leads to.

    In fp8 their bytes are 0x7F: NaN as e4m3, and near the largest number as fp32 and bf16.
    """

    why: str
    batch: int = 2
    heads: int = 16
    seqlen_q: int = 1
    seqlen_k: int = 64
    top_k: int = 40
    head_dim: int = 80
    head_dim_v: int = 64
    page_size: int = 0
    dtype: str = "fp16"
    none: float = 0.2  # share of indices that are -1
    sinks: bool = False
    num_splits: int = 0
    scale: float | None = None
    fp8: bool = False

    def __str__(self) -> str:
        return self.why


CASES = [
    SparseCase("plain"),
    SparseCase("pages-of-one", page_size=1),
    SparseCase("pages-of-16", page_size=16, sinks=True),
    SparseCase("pages-of-64", seqlen_k=128, page_size=64, top_k=100),
    SparseCase("few-heads", heads=3, head_dim=32, head_dim_v=32, seqlen_q=3),
    SparseCase("many-heads", heads=40, batch=1, top_k=17),
    SparseCase("prompt", batch=1, heads=8, seqlen_q=9, top_k=32, sinks=True),
    SparseCase("one-split", num_splits=1, top_k=50),
    SparseCase("many-splits", batch=1, num_splits=256, seqlen_k=320, top_k=300, sinks=True),
    SparseCase("one-index", top_k=1, none=0.0),
    SparseCase("no-index", top_k=0),
    SparseCase("all-none", none=1.0, sinks=True),
    SparseCase("all-none-without-sinks", none=1.0, num_splits=2),
    SparseCase("negative-scale", scale=-0.3),
    SparseCase("no-sequence", batch=0),
    SparseCase("no-query", seqlen_q=0),
]

IN_FP8 = SparseCase("fp8", batch=1, heads=3, seqlen_k=64, top_k=20, head_dim=576, head_dim_v=512, fp8=True)
FP8_CASES = [
    IN_FP8,
    dataclasses.replace(IN_FP8, why="fp8-pages-of-one", page_size=1, batch=2, scale=0.1),
    dataclasses.replace(IN_FP8, why="fp8-pages-of-16", page_size=16, sinks=True, seqlen_q=2),
    dataclasses.replace(IN_FP8, why="fp8-pages-of-64", page_size=64, seqlen_k=128, heads=20),
    dataclasses.replace(IN_FP8, why="fp8-splits", page_size=16, num_splits=3, top_k=40, sinks=True),
    dataclasses.replace(IN_FP8, why="fp8-two-sequences", batch=2, num_splits=2),
    dataclasses.replace(IN_FP8, why="fp8-one-index", top_k=1, none=0.0),
    dataclasses.replace(IN_FP8, why="fp8-all-none", none=1.0, sinks=True),
    dataclasses.replace(IN_FP8, why="fp8-no-index", top_k=0),
]


def make_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of 576 columns in fp8; in some the columns of a scale are 0, tiny or large."""
    latents = rows[..., :512].float().unflatten(-1, (4, 128))
    sizes = torch.ones(rows.shape[:-1].numel(), 4)
    for group, size in enumerate((0.0, 1e-4, 30.0)):
        sizes[group :: 4 + group, group] = size
    sizes[3::5] = 0.0
    latents = latents * sizes.view(*rows.shape[:-1], 4, 1)
    return pack_mla_rows(latents.flatten(-2), rows[..., 512:])


def make_call(case: SparseCase, device: str = "cpu") -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the arguments of a case."""
    generator = torch.Generator().manual_seed(0)
    c, dtype = case, DTYPES[case.dtype]
    q = torch.randn(c.batch, c.heads, c.seqlen_q, c.head_dim, generator=generator).to(dtype)
    indices = torch.rand(c.batch, c.seqlen_q, c.seqlen_k, generator=generator).argsort(-1)[..., : c.top_k].int()
    indices[torch.rand(indices.shape, generator=generator) < c.none] = -1
    if indices.numel():
        indices[0, 0] = -1  # this query sees nothing
    cache = torch.randn(c.batch, c.seqlen_k, 1, c.head_dim, generator=generator).to(dtype)
    cache, nowhere = (make_rows(cache), 0x7F) if c.fp8 else (cache, math.nan)
    for b in range(c.batch):
        unseen = torch.ones(c.seqlen_k, dtype=torch.bool)
        unseen[indices[b][indices[b] >= 0].long()] = False
        cache[b, unseen] = nowhere
    options: dict[str, Any] = {"head_dim_v": c.head_dim_v, "num_splits": c.num_splits, "softmax_scale": c.scale}
    if c.page_size:
        order = torch.randperm(c.batch * c.seqlen_k // c.page_size + 3, generator=generator)
        order = order[: c.batch * c.seqlen_k // c.page_size].view(c.batch, -1)
        pages = torch.full((order.numel() + 3, c.page_size, 1, cache.shape[-1]), nowhere, dtype=cache.dtype)
        pages[order.flatten()] = cache.view(-1, c.page_size, 1, cache.shape[-1])
        cache, options["page_table"] = pages, order.int()
    if c.sinks:
        options["sinks"] = torch.randn(c.heads, generator=generator)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return [x.to(device) for x in (q, cache, indices)], moved


def check_sparse(case: SparseCase, device: str, kernel: str = "sparse_mla_triton") -> None:
    """Compare a call with fp64 by the error rule, and its LSE; splits must not change what is right."""
    from flashmoe_science.attention.sparse import reference
    from flashmoe_science.attention.sparse.contract import SparseOptions, describe_sparse_call, sparse_problem_of

    (q, cache, indices), options = make_call(case, device)
    o, lse = sparse_mla(q, cache, indices, **options, return_lse=True, kernel=kernel)
    given = {"q": q, "kv_cache": cache, "indices": indices, **{n: options.get(n) for n in ("page_table", "sinks")}}
    own = {name: options[name] for name in ("head_dim_v", "softmax_scale")}
    call = describe_sparse_call(given, SparseOptions(**own))
    problem = sparse_problem_of(call)
    exact, exact_lse = reference.sparse_attention(problem, call.tensors, dtype=torch.float64)
    low = reference.sparse_attention(problem, call.tensors, dtype=q.dtype)[0]
    assert (o.shape, o.dtype, lse.dtype) == (exact.shape, q.dtype, torch.float32)
    if not o.numel():
        return
    error = (o.double() - exact).abs().max().item()
    budget = OPERATOR.error_budget(exact, low)
    assert error <= budget, f"{case.why}: error {error:.2e} is above {budget:.2e}"
    if case.fp8 and kernel != "auto":  # kernels round rows to the dtype of q
        given["kv_cache"] = unpack_mla_rows(cache, q.dtype)
        call = describe_sparse_call(given, SparseOptions(**own))
        exact_lse = reference.sparse_attention(sparse_problem_of(call), call.tensors, dtype=torch.float64)[1]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
