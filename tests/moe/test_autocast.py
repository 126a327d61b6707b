"""Experts under autocast: parameters of fp32, products in the dtype of the region."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science import InputError, explain_moe, fused_moe

from .cases import Case, make_tensors

CASE = Case("autocast", bias=True, shared=1, shared_inter=16, weighted=True)


def leaves() -> dict[str, Any]:
    tensors = make_tensors(CASE)
    return {name: t if name == "topk_ids" else t.requires_grad_() for name, t in tensors.items()}


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_call_with_all_of_it_cast(x_dtype):
    """Outputs in the dtype of the region, gradients in that of the leaves."""
    tensors = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_moe(**{**tensors, "x": tensors["x"].to(x_dtype)})
        assert explain_moe(**tensors).problem.dtype == "bf16"
    weights = ("topk_ids", "topk_weights", "shared_weights")
    cast = {name: t if name in weights else t.bfloat16() for name, t in tensors.items()}
    expected = fused_moe(**cast)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    names = [name for name in tensors if name != "topk_ids"]
    found = torch.autograd.grad(out.float().square().sum(), [tensors[name] for name in names])
    exact = torch.autograd.grad(expected.float().square().sum(), [tensors[name] for name in names])
    for name, mine, theirs in zip(names, found, exact, strict=True):
        assert mine.dtype == torch.float32, name
        assert torch.equal(mine, theirs), name


def test_it_compiles_to_one_graph():
    torch.compiler.reset()  # it may have given up on the function in another test
    tensors = make_tensors(CASE)
    compiled = torch.compile(fused_moe, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(**tensors), fused_moe(**tensors))


def test_without_it_dtypes_have_to_agree():
    tensors = make_tensors(CASE)
    tensors["x"] = tensors["x"].bfloat16()
    with pytest.raises(InputError, match=r"w_gate_up must have the dtype of x, torch.bfloat16, got torch.float32"):
        fused_moe(**tensors)
