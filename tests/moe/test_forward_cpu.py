"""Every kernel of the experts in Triton's interpreter against fp64, and the reference against an independent one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import fused_moe, route
from flashmoe_science.moe import reference

from ..exhaustive import all_but
from .cases import CASES, EMPTY_CASES, Case, make_tensors, options_of

# Every activation, and in the backward pass its slope too; ids of no expert, shared experts, gates side by side.
USUAL = (
    "gpt-oss", "shared experts", "ids of no expert", "top_k above one step of the sum",
    *(f"activation {name}" for name in ("geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh")),
    "prime sizes", "many rows of one expert", "more tokens than a tile has rows", "one token, parts of experts",
    "all on one expert", "no tokens", "few tokens of more experts than pairs",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(CASES + EMPTY_CASES, *USUAL), ids=str)
def test_every_case(case, interpreted):
    interpreted(case)


@pytest.mark.triton
def test_a_token_has_the_same_bits_in_any_company(interpreted):
    interpreted(Case("alone", 20, 4, 2, dtype="fp16", shared=1, shared_inter=16, batch_invariant=True))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("experts", "pairs"),
    all_but([(1, 1), (5, 33), (128, 700), (14, 1100), (3, 4097), (200, 5000)], "(5, 33)", "(3, 4097)"),
)
def test_sorting(experts, pairs, interpreted):
    """In one kernel up to 4,096 pairs, in three beyond."""
    interpreted((experts, pairs))


@pytest.mark.triton
def test_routing(interpreted):
    interpreted(3)


def dense(tensors, activation) -> torch.Tensor:
    """Let every expert see every token, in fp64, and weigh: no gathering, no loop over experts that have tokens."""
    x, up, down = (tensors[name].double() for name in ("x", "w_gate_up", "w_down"))
    product = torch.einsum("th,enh->ten", x, up) + tensors["bias_gate_up"].double()
    y = torch.einsum("ten,ehn->teh", activation(product), down) + tensors["bias_down"].double()
    weights = torch.zeros(x.shape[0], up.shape[0], dtype=torch.float64)
    weights.scatter_add_(1, tensors["topk_ids"].long(), tensors["topk_weights"].double())
    return torch.einsum("te,teh->th", weights, y)


ACTIVATIONS = {
    "swiglu": lambda p: F.silu(p[..., :24]) * p[..., 24:],
    "swiglu_clamped": lambda p: (
        (p[..., 24:].clamp(-7, 7) + 1) * (g := p[..., :24].clamp(max=7)) / (1 + torch.exp(-1.702 * g))
    ),
    "geglu": lambda p: p[..., :24] * 0.5 * (1 + torch.erf(p[..., :24] / 2**0.5)) * p[..., 24:],
    "relu2": lambda p: p.clamp(min=0) ** 2,
    "silu": lambda p: p / (1 + torch.exp(-p)),
    "gelu": lambda p: p * 0.5 * (1 + torch.erf(p / 2**0.5)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_is_the_sum_over_experts(activation):
    case = Case("reference", activation=activation, bias=True)
    tensors = make_tensors(case)
    tensors["x"] = tensors["x"] * 5  # beyond the limit too
    exact = reference.fused_moe(**tensors, activation=activation, dtype=torch.float64)
    torch.testing.assert_close(exact, dense(tensors, ACTIVATIONS[activation]), rtol=1e-12, atol=1e-12)


def test_interleaved_gates_are_the_same_rows_in_another_order():
    case = Case("interleaved", activation="swiglu_clamped", bias=True)
    tensors = make_tensors(case)
    out = fused_moe(**tensors, **options_of(case))
    order = torch.arange(2 * case.inter).view(2, -1).t().reshape(-1)
    turned = {name: tensors[name][:, order] for name in ("w_gate_up", "bias_gate_up")}
    assert torch.equal(fused_moe(**{**tensors, **turned}, activation=case.activation, interleaved=True), out)


def test_permuting_tokens_permutes_the_output():
    case = Case("permuted", 12)
    tensors = make_tensors(case)
    order = torch.randperm(12)
    moved = {name: tensors[name][order] for name in ("x", "topk_weights", "topk_ids")}
    torch.testing.assert_close(fused_moe(**{**tensors, **moved}), fused_moe(**tensors)[order])


def test_shared_experts_are_experts_that_all_tokens_go_to():
    tensors = make_tensors(Case("shared", shared=2, shared_inter=24, weighted=True))
    weights = tensors.pop("shared_weights")
    up, down = tensors.pop("shared_gate_up"), tensors.pop("shared_down")
    out = fused_moe(**tensors, shared_gate_up=up, shared_down=down, shared_weights=weights)
    ids = torch.tensor([5, 6], dtype=torch.int32).expand(9, 2)
    as_routed = {
        "x": tensors["x"],
        "w_gate_up": torch.cat((tensors["w_gate_up"], up)),
        "w_down": torch.cat((tensors["w_down"], down)),
        "topk_weights": torch.cat((tensors["topk_weights"], weights), 1),
        "topk_ids": torch.cat((tensors["topk_ids"], ids), 1),
    }
    torch.testing.assert_close(fused_moe(**as_routed), out)


def test_routing_of_the_models():
    """Mixtral: softmax over the two best. DeepSeek-V3: groups by their two best, weights without the bias."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    weights, ids = route(logits, 2)
    best = logits.topk(2)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, torch.softmax(best.values, -1))
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, -5.0, 0.0, 0.0])
    weights, ids = route(logits, 2, score="sigmoid", renormalize=False, bias=bias, groups=4, top_groups=1, scale=2.0)
    choice = torch.sigmoid(logits) + bias
    groups = choice.view(6, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(ids.long() // 2, groups[:, None].expand(6, 2))
    torch.testing.assert_close(weights, 2 * torch.sigmoid(logits).gather(1, ids.long()))


def test_routing_weights_have_a_gradient_on_the_cpu():
    logits = torch.randn(4, 6, requires_grad=True)
    weights, _ = route(logits, 2)
    weights[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "groups": 4, "top_groups": 2}], ids=str)
def test_no_tokens_are_routed_to_nobody(options):
    logits = torch.zeros(0, 8, requires_grad=True)
    weights, ids = route(logits, 3, **options)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((0, 3), torch.float32, (0, 3), torch.int32)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.shape == (0, 8)
