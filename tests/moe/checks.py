"""The rule by which answers of ``fused_moe`` are right."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashmoe_science import fused_moe
from flashmoe_science.moe import reference
from flashmoe_science.operators.moe import OPERATOR

from .cases import Case, options_of


def run(case: Case, tensors: dict[str, Any], **options: Any) -> torch.Tensor:
    return fused_moe(
        **tensors, **options_of(case), **{"kernel": case.kernel, "batch_invariant": case.batch_invariant, **options}
    )


def names_of_gradients(tensors: dict[str, Any]) -> list[str]:
    return [name for name in tensors if name != "topk_ids"]


def run_gradients(case: Case, tensors: dict[str, Any], do: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Return the output and all gradients, by way of autograd."""
    names = names_of_gradients(tensors)
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    kernel = "grouped_triton" if case.kernel == "auto" and not tensors["x"].is_cuda else case.kernel
    out = run(dataclasses.replace(case, kernel=kernel), {**tensors, **leaves}, **options)
    found = torch.autograd.grad(out, list(leaves.values()), do)
    return {"out": out.detach(), **dict(zip(names, found, strict=True))}


def eager_gradients(
    case: Case, tensors: dict[str, Any], do: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return them by autograd through the reference, each step in ``dtype``."""
    names = names_of_gradients(tensors)
    leaves = {name: tensors[name].detach().to(dtype).requires_grad_() for name in names}
    out = reference.fused_moe(**{**tensors, **leaves}, **options_of(case), dtype=dtype)
    found = torch.autograd.grad(out, list(leaves.values()), do.to(dtype))
    return {"out": out.detach(), **dict(zip(names, found, strict=True))}


def assert_gradients_right(case: Case, found: dict[str, Any], tensors: dict[str, Any], do: torch.Tensor) -> None:
    """Compare each gradient with fp64: within the budget that the eager run sets."""
    exact, low = (eager_gradients(case, tensors, do, dtype) for dtype in (torch.float64, tensors["x"].dtype))
    # In fp32 nothing is rounded between products: the two differ by the order of their sums, and by exp and erf.
    factor = 4 if case.dtype == "fp32" else 1
    for name, gradient in found.items():
        assert gradient.shape == exact[name].shape, name
        assert gradient.dtype == (tensors["x"] if name == "out" else tensors[name]).dtype, name
        assert torch.isfinite(gradient).all(), f"{name}: NaN or inf"
        if gradient.numel():
            rounded = low[name].to(gradient.dtype)
            budget = factor * OPERATOR.error_budget(exact[name], rounded)
            error = (gradient.double() - exact[name]).abs().max().item()
            assert error <= budget, f"gradient of {name}: max error {error:.2e} is above the budget {budget:.2e}"


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
