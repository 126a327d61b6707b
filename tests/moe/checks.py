"""The rule by which answers of ``fused_moe`` are right."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science import fused_moe
from flashmoe_science.moe import reference
from flashmoe_science.moe.operator import OPERATOR

from .cases import Case, options_of


def run(case: Case, tensors: dict[str, Any], **options: Any) -> torch.Tensor:
    return fused_moe(
        **tensors, **options_of(case), **{"kernel": case.kernel, "batch_invariant": case.batch_invariant, **options}
    )


def assert_right(case: Case, out: torch.Tensor, tensors: dict[str, Any]) -> None:
    """Compare with fp64: within the budget that the eager run sets."""
    exact = reference.fused_moe(**tensors, **options_of(case), dtype=torch.float64)
    low = reference.fused_moe(**tensors, **options_of(case))
    assert out.shape == exact.shape
    assert out.dtype == tensors["x"].dtype
    assert torch.isfinite(out).all(), "NaN or inf"
    budget = OPERATOR.error_budget(exact, low)
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    assert error <= budget, f"max error {error:.2e} is above the budget {budget:.2e}"
