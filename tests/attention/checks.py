"""What every forward kernel is held to."""

from __future__ import annotations

import dataclasses
import math

import torch

from flashmoe_science.attention import reference
from flashmoe_science.attention.operator import OPERATOR
from flashmoe_science.attention.problem import AttentionProblem

from .cases import Case

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def make_inputs(case: Case, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q, k and v of a case."""
    inputs = OPERATOR.make_inputs(problem_of(case), seed=seed, device=device)
    return inputs["q"], inputs["k"], inputs["v"]


def problem_of(case: Case) -> AttentionProblem:
    """Return the problem of a case with contiguous tensors."""
    sizes = dataclasses.asdict(case)
    del sizes["why"]
    return AttentionProblem(**sizes)


def poison_allocator(nbytes: int) -> None:
    """Leave NaN in the memory that the next CUDA allocations will get."""
    sizes = (nbytes, nbytes // 2, 1 << 20, 4096, 512, 512)
    # Bytes of ones are NaN in every dtype.
    blocks = [torch.full((max(1, size),), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks


def assert_right(o, q, k, v, *, causal=False, softmax_scale=None, lse=None, name="output"):
    """Compare with fp64: within the budget that the eager run sets; LSE within 1e-3, -inf where a row sees no key."""
    exact, exact_lse = reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=torch.float64)
    low = reference.attention_low_precision(q, k, v, causal=causal, softmax_scale=softmax_scale)
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
