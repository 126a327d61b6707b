"""Gradients of the experts: the kernels in Triton's interpreter against fp64, the reference against autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashmoe_science import UnsupportedError, fused_moe, route
from flashmoe_science.moe import reference

from ..exhaustive import all_but
from .cases import GRADIENT_CASES, Case, make_tensors, options_of
from .checks import assert_gradients_right, eager_gradients, run_gradients

# Every activation, and in the backward pass its slope too; ids of no expert, shared experts, gates side by side.
USUAL = (
    "grouped", "shared", "clamps", "strange ids", "many column tiles",
    *(f"activation {name}" for name in ("geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh")),
    "odd sizes", "one expert", "one token",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(GRADIENT_CASES, *USUAL), ids=str)
def test_every_case(case, interpreted):
    interpreted(case)


@pytest.mark.parametrize("kernel", ["few_triton", "grouped_triton"])
def test_the_order_of_tokens_and_experts_does_not_matter(kernel, interpreted):
    case = Case("permuted", 20, 4, 2, 24, 16, kernel=kernel, bias=True, shared=1, shared_inter=16, weighted=True)
    interpreted(dataclasses.replace(case, permuted=True, gradients=kernel == "grouped_triton"))


OVERWRITTEN = [
    Case("halves", 20, 3, 2, 40, 72, shared=1, shared_inter=24),
    Case("interleaved", 9, 3, 2, 24, 40, activation="swiglu_clamped", interleaved=True, bias=True),
    Case("no gate", 9, 3, 2, 24, 40, activation="relu2"),
]


@pytest.mark.parametrize("case", all_but(OVERWRITTEN, "interleaved"), ids=str)  # compared with itself
def test_the_last_backward_pass_writes_where_the_products_are(case, interpreted):
    interpreted(dataclasses.replace(case, overwritten=True))


@pytest.mark.exhaustive
def test_a_last_backward_pass_that_fails_is_repeated_or_refused(interpreted):
    interpreted(Case("failing", 12, 3, 2, 24, 16, shared=1, shared_inter=16, failing=True))


PARTS = [
    Case("halves", 150, 1, 1, 70, 72),
    Case("interleaved", 160, 1, 1, 70, 70, activation="swiglu_clamped", interleaved=True, bias=True),
    Case("no gate", 110, 1, 1, 100, 72, dtype="fp16", activation="relu2", bias=True),
]


@pytest.mark.parametrize("case", all_but(PARTS, "no gate"), ids=str)  # compared with itself
def test_gradients_in_parts_have_the_same_bits(case, interpreted):
    interpreted(dataclasses.replace(case, narrow=True))


def draw_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)).to(tensor.dtype)


ACTIVATIONS = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_has_the_gradients_of_autograd(activation):
    case = Case("reference", 12, 4, 3, activation=activation, bias=True, ids="none")
    tensors = make_tensors(case)
    tensors["x"] = tensors["x"] * 5  # beyond the limit too
    do = draw_like(tensors["x"])
    exact = eager_gradients(case, tensors, do, torch.float64)
    found = reference.moe_gradients(do, **tensors, **options_of(case), dtype=torch.float64)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-10, atol=1e-10, msg=name)


def test_autograd_through_the_reference_is_right_by_finite_differences():
    tensors = make_tensors(Case("numbers", 4, 3, 2, 6, 5, bias=True))
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items() if name != "topk_ids"}

    def call(*values: torch.Tensor) -> torch.Tensor:
        named: dict[str, Any] = dict(zip(leaves, values, strict=True))
        return reference.fused_moe(**named, topk_ids=tensors["topk_ids"])

    assert torch.autograd.gradcheck(call, list(leaves.values()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cpu_tensors_have_gradients(dtype):
    case = Case("cpu", 12, dtype=dtype, shared=1, shared_inter=16, weighted=True, kernel="reference")
    tensors = make_tensors(case)
    do = draw_like(tensors["x"])
    assert_gradients_right(case, run_gradients(case, tensors, do), tensors, do)


def test_gradients_that_are_not_asked_for_are_not_made():
    tensors = make_tensors(Case("some", bias=True))
    tensors["w_down"].requires_grad_()
    out = fused_moe(**tensors)
    out.sum().backward()
    assert tensors["w_down"].grad is not None
    assert all(tensor.grad is None for name, tensor in tensors.items() if name != "w_down")


def test_no_tokens_give_no_gradients():
    tensors = make_tensors(Case("none", 0))
    tensors["w_down"].requires_grad_()
    fused_moe(**tensors).sum().backward()
    assert not tensors["w_down"].grad.any()


def test_second_order_gradients_are_refused():
    tensors = make_tensors(Case("twice"))
    tensors["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(fused_moe(**tensors).square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(UnsupportedError, match="no second-order gradients of fused_moe"):
        gradient.sum().backward()


@pytest.mark.parametrize("kernel", ["gemv_triton", "few_triton"])
def test_kernels_that_keep_nothing_are_refused(kernel, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors = make_tensors(Case("forced", 1))
    tensors["x"].requires_grad_()
    with pytest.raises(UnsupportedError, match="it keeps nothing for gradients"):
        fused_moe(**tensors, kernel=kernel)


def test_operators_pass_opcheck():
    tensors = make_tensors(Case("opcheck", bias=True))
    names = ("x", "w_gate_up", "w_down", "topk_weights")
    leaves = {name: tensors[name].requires_grad_() for name in names}
    arguments = (
        *leaves.values(), tensors["topk_ids"], tensors["bias_gate_up"], tensors["bias_down"], None, None, None,
        "swiglu", None, None, False, False, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe_kept.default, arguments)
    given = [tensor.detach() if isinstance(tensor, torch.Tensor) else tensor for tensor in arguments]
    nothing = torch.empty(0, 0)
    backward = (draw_like(tensors["x"]), nothing, nothing, *given, [0, 1, 2, 3, 4, 5])
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe_backward.default, backward)
    logits = torch.randn(9, 5, requires_grad=True)
    options = ("softmax", True, 1, 1, 1.0)
    torch.library.opcheck(torch.ops.flashmoe_science.moe_route.default, (logits, None, 2, *options))
    weights, ids = route(logits.detach(), 2)
    backward = (weights, logits.detach(), ids, "softmax", True, 1.0)
    torch.library.opcheck(torch.ops.flashmoe_science.moe_route_backward.default, backward)


def test_torch_compile_makes_one_graph_with_gradients():
    tensors = make_tensors(Case("compiled", bias=True))
    do = draw_like(tensors["x"])

    def step(**given: Any) -> torch.Tensor:
        return fused_moe(**given) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = []
    for function in (step, compiled):
        leaf = tensors["w_gate_up"].detach().requires_grad_()
        out = function(**{**tensors, "w_gate_up": leaf})
        found.append((out.detach(), torch.autograd.grad(out, leaf, do)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_routing_weights_have_a_gradient():
    """Through the operator, as compiled graphs and GPUs have it, and as autograd has it through the reference."""
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"score": "sigmoid", "scale": 2.5}, {"renormalize": False}):
        found = []
        for function in (route, reference.route):
            leaf = logits.clone().requires_grad_()
            weights, _ = function(leaf, 2, **options)
            (weights * torch.arange(10.0).view(5, 2)).sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found)


def test_second_order_gradients_of_routing_are_refused():
    leaf = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(route(leaf, 2)[0].square().sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second-order gradients of route"):
        gradient.sum().backward()


def test_a_layer_learns_through_routing_in_one_graph():
    tensors = make_tensors(Case("layer"))
    for name in ("topk_weights", "topk_ids"):
        del tensors[name]

    def step(logits: torch.Tensor, **given: Any) -> torch.Tensor:
        weights, ids = route(logits, 2)
        return fused_moe(topk_weights=weights, topk_ids=ids, **given).square().sum()

    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))
    gradients = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        function(leaf, **tensors).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)
