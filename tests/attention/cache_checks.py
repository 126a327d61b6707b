"""What every call with a K/V cache is held to."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashmoe_science import flash_attention_with_kv_cache
from flashmoe_science.attention.decode import reference as cache_reference
from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.operators.attention import OPERATOR

from .cache_cases import CacheCase, Tensors

_POSITIONAL = ("q", "k_cache", "v_cache", "k", "v")


def call(tensors: Tensors, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Call it with its LSE."""
    named: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in _POSITIONAL}
    q, k_cache, v_cache = (tensors[name] for name in _POSITIONAL[:3])
    k, v = tensors.get("k"), tensors.get("v")
    pair: tuple[torch.Tensor, torch.Tensor] = flash_attention_with_kv_cache(
        q, k_cache, v_cache, k, v, **named, **options, return_lse=True
    )
    return pair


def clone(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_cache_right(case: CacheCase, tensors: Tensors, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare o, LSE and the caches with fp64, within the budget that the run in the dtype of the inputs sets."""
    expected, low, before = clone(tensors), clone(tensors), clone(tensors)
    problem = cache_problem_of(tensors, **case.options)
    exact, exact_lse = cache_reference.attention_with_kv_cache(problem, expected, dtype=torch.float64)
    # The same meaning, every step rounded to the dtype of the inputs.
    eager, _ = cache_reference.attention_with_kv_cache(problem, low, dtype=tensors["q"].dtype)
    o, lse = call(tensors, **case.options, **options)
    assert o.shape == exact.shape
    assert o.dtype == tensors["q"].dtype
    assert torch.isfinite(o).all(), "the output has NaN or inf"
    budget = OPERATOR.error_budget(exact, eager)
    error = (o.double() - exact).abs().max().item() if o.numel() else 0.0
    assert error <= budget, f"max error {error:.2e} is above the budget {budget:.2e}"
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    tolerance = 1e-5 if o.dtype == torch.float32 else 2e-3
    if "bias" in tensors:  # rows all of whose keys have the most negative number: the docstring says how near
        lowest = -2e38
        assert torch.equal(lse < lowest, exact_lse < lowest)
        lse, exact_lse = (torch.where(x < lowest, lowest, x) for x in (lse, exact_lse))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)
    check_caches(case, tensors, expected)
    for name in set(tensors) - {"k_cache", "v_cache", "k_scale", "v_scale"}:
        said = f"{name} was written"
        torch.testing.assert_close(tensors[name], before[name], rtol=0, atol=0, equal_nan=True, msg=said)
    return o, lse


def check_caches(case: CacheCase, tensors: Tensors, expected: Tensors) -> None:
    """Compare what the caches hold."""
    # A rotated key may differ by the rounding of one product; all else is copied, and what was there is left alone.
    for name in ("k_cache", "v_cache"):
        rounding = 2 * torch.finfo(tensors["q"].dtype).eps if name == "k_cache" and case.rotary_dim else 0.0
        one, other = tensors[name], expected[name]
        if case.fp8:  # a rotated key that lies between two numbers may be rounded to either
            one, other, rounding = one.float(), other.float(), 0.126 if rounding else 0.0
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding, equal_nan=True)
    for name in ("k_scale", "v_scale"):
        if name in tensors:
            torch.testing.assert_close(tensors[name], expected[name], rtol=1e-3, atol=0, equal_nan=True)
