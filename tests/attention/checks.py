"""What every forward kernel is held to."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_science.attention import reference
from flashmoe_science.attention.operator import OPERATOR
from flashmoe_science.attention.problem import AttentionProblem

from .cases import Case, FeatureCase, VarlenCase

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def make_inputs(case: Case, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q, k and v of a case."""
    inputs = OPERATOR.make_inputs(problem_of(case), seed=seed, device=device)
    return inputs["q"], inputs["k"], inputs["v"]


def problem_of(case: Case) -> AttentionProblem:
    """Return the problem of a case with contiguous tensors."""
    fields = [field.name for field in dataclasses.fields(Case) if field.name != "why"]
    return AttentionProblem(**{name: getattr(case, name) for name in fields})


def poison_allocator(nbytes: int) -> None:
    """Leave NaN in the memory that the next CUDA allocations will get."""
    sizes = (nbytes, nbytes // 2, 1 << 20, 4096, 512, 512)
    # Bytes of ones are NaN in every dtype.
    blocks = [torch.full((max(1, size),), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks


@contextlib.contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """Let torch raise at any synchronisation with the GPU; afterwards it does what it did before, whatever happened."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch says so each time that the mode is set.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def make_features(case: FeatureCase | VarlenCase, device: str) -> dict[str, Any]:
    """Return the options of a call that asks for the features of a case; random numbers go on from the inputs'."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int, dtype: str) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype])

    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    batch = case.batch if isinstance(case, FeatureCase) else len(case.seqlens_q)
    if case.sinks:
        options["sinks"] = draw(case.heads, dtype=case.sinks)
    if case.alibi:
        shape = (case.heads,) if case.alibi_axes == 1 else (batch, case.heads)
        options["alibi"] = draw(*shape, dtype=case.alibi).abs()
    if isinstance(case, FeatureCase):
        options["softmax_scale"] = case.scale
        if case.bias:
            own_batch, own_heads = case.bias_heads
            sizes = (batch if own_batch else 1, case.heads if own_heads else 1, case.seqlen_q, case.seqlen_k)
            options["bias"] = bias = draw(*sizes, dtype=case.bias)
            bias[:, :, :, 1::5] = -math.inf  # keys that it hides
            bias[:, :, case.seqlen_q // 2] = -math.inf  # and a row that sees none
    return options


def make_packed(case: VarlenCase, device: str) -> dict[str, Any]:
    """Return q, k, v and lengths; keys that nobody may read are NaN."""
    generator = torch.Generator(device).manual_seed(0)
    dims = {
        "q": (case.heads, case.head_dim),
        "k": (case.heads_kv, case.head_dim),
        "v": (case.heads_kv, case.head_dim_v),
    }
    inputs: dict[str, Any] = {}
    for name, shape in dims.items():
        lengths = case.seqlens_q if name == "q" else case.seqlens_k
        tensor = torch.randn(sum(lengths) + case.tail, *shape, generator=generator, device=device)
        inputs[name] = tensor.to(DTYPES[case.dtype])
    for side, lengths, used in (("q", case.seqlens_q, case.seqused_q), ("k", case.seqlens_k, case.seqused_k)):
        starts = [0, *itertools.accumulate(lengths)]
        inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        inputs[f"max_seqlen_{side}"] = max(lengths, default=0) + case.spare
        if used is not None:
            inputs[f"seqused_{side}"] = torch.tensor(used, dtype=torch.int32, device=device)
        for start, length, end in zip(starts, used or lengths, starts[1:], strict=False):
            for name in "kv" if side == "k" else "q":
                inputs[name][start + length : end] = math.nan
        for name in "kv" if side == "k" else "q":
            inputs[name][starts[-1] :] = math.nan
    return inputs


def assert_varlen_right(o, lse, inputs, options):
    """Hold every sequence against ``assert_right``, and rows behind ``seqused_q`` against 0 and -inf."""
    starts_q, starts_k = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
    q, k, v = (inputs[name] for name in "qkv")
    assert o.shape == (*q.shape[:2], v.shape[2])
    assert lse.shape == (q.shape[1], q.shape[0])
    used = {
        side: inputs[f"seqused_{side}"].tolist() if f"seqused_{side}" in inputs else [None] * (len(starts) - 1)
        for side, starts in (("q", starts_q), ("k", starts_k))
    }
    for b, start_q in enumerate(starts_q[:-1]):
        end_q = starts_q[b + 1] if used["q"][b] is None else start_q + used["q"][b]
        end_k = starts_k[b + 1] if used["k"][b] is None else starts_k[b] + used["k"][b]
        rows, keys = slice(start_q, end_q), slice(starts_k[b], end_k)
        one = {**options}
        if "alibi" in one and one["alibi"].dim() == 2:
            one["alibi"] = one["alibi"][b]
        parts = (tensor.transpose(0, 1)[None] for tensor in (o[rows], q[rows], k[keys], v[keys]))
        assert_right(*parts, lse=lse[None, :, rows], name=f"sequence {b}", **one)
        unused = slice(end_q, starts_q[b + 1])
        assert torch.equal(o[unused], torch.zeros_like(o[unused]))
        assert torch.equal(lse[:, unused], torch.full_like(lse[:, unused], -math.inf))


def assert_right(o, q, k, v, *, lse=None, name="output", **options):
    """Compare with fp64: within the budget that the eager run sets; LSE within 1e-3, -inf where a row sees no key."""
    exact, exact_lse = reference.attention(q, k, v, dtype=torch.float64, **options)
    low = reference.attention_low_precision(q, k, v, **options)
    assert o.shape == exact.shape
    assert o.dtype == q.dtype
    assert torch.isfinite(o).all(), f"{name} has NaN or inf"
    budget = OPERATOR.error_budget(exact, low)
    error = (o.double() - exact).abs().max().item() if o.numel() else 0.0
    assert error <= budget, f"{name}: max error {error:.2e} is above the budget {budget:.2e}"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
        tolerance = 1e-5 if q.dtype == torch.float32 else 1e-3
        torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)
