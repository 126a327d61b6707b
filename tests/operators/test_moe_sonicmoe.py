"""SonicMoE as a baseline: a stand-in that keeps its contract is given what the library asks for."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from flashmoe_science.operators.baselines.moe_backward import Autograd
from flashmoe_science.operators.baselines.moe_sonicmoe import SonicMoe
from flashmoe_science.operators.moe import OPERATOR
from flashmoe_science.operators.moe_backward import OPERATOR as GRADIENTS

from ..moved import assert_answers_wholly

TABLE = {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 16, "inter": 24, "dtype": "bf16"}
SHARED = {**TABLE, "shared_experts": 1, "shared_inter": 8}
BIASES = {**TABLE, "bias_gate_up": True, "bias_down": True}
INTERLEAVED = {**BIASES, "interleaved": True}


class ActivationType(enum.Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SILU = "silu"


def sort(ids: Tensor, experts: int, counts: Tensor, offsets: Tensor, rows: Tensor, order: Tensor, back: Tensor) -> None:
    """Fill the last five: pairs of each expert, their ends, and the tokens, pairs and places in the expert's order."""
    flat, made = ids.flatten(), (counts, offsets, rows, order, back)
    sizes = (experts, experts + 1, len(flat), len(flat), len(flat))
    assert [(tensor.dtype, tensor.shape) for tensor in made] == [(torch.int32, (size,)) for size in sizes]
    counts.copy_(torch.bincount(flat, minlength=experts))
    offsets.copy_(F.pad(counts.cumsum(0), (1, 0)))
    order.copy_(torch.argsort(flat, stable=True))
    back.copy_(torch.argsort(order))
    rows.copy_(order // ids.shape[1])


def grouped(rows: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows in the expert's order by weights ``[out, in, E]``."""
    assert weights.stride(1) == 1
    parts = []
    for e in range(weights.shape[2]):
        of_expert = rows[offsets[e] : offsets[e + 1]]
        parts.append(F.linear(of_expert, weights[:, :, e], None if bias is None else bias[e]))
    return torch.cat(parts)


class Library:
    """Its two functions; as there, the gradient goes through the kept product, and inference keeps none."""

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.activation = ActivationType.SWIGLU

    def activate(self, product: Tensor, activation: ActivationType) -> Tensor:
        gate, up = product[:, ::2], product[:, 1::2]
        return up * (F.silu(gate) if activation is ActivationType.SWIGLU else F.gelu(gate, approximate="tanh"))

    def up(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, offsets: Tensor, pairs: int, top_k: int, rows: Tensor,
        order: Tensor, back: Tensor, of_tokens: Tensor | None, variable: bool, activation: ActivationType,
        inference: bool, concat_layout: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert (of_tokens, variable, pairs) == (None, False, len(rows))
        assert torch.equal(rows, order // top_k)
        assert torch.equal(back[order], torch.arange(pairs, dtype=torch.int32))
        product = grouped(x[rows], w1, offsets, b1)
        if concat_layout:
            product = torch.stack(product.chunk(2, -1), -1).flatten(1)
        self.kept.append(not inference)
        return self.activate(product, activation).detach(), None if inference else product

    def down(
        self, hidden: Tensor, product: Tensor | None, w2: Tensor, b2: Tensor | None, scores: Tensor, offsets: Tensor,
        tokens: int, top_k: int, rows: Tensor, order: Tensor, back: Tensor, of_tokens: Tensor | None, variable: bool,
        activation: ActivationType,
    ) -> Tensor:  # fmt: skip
        assert (of_tokens, variable, len(rows), len(order)) == (None, False, tokens * top_k, tokens * top_k)
        assert scores.dtype == torch.float32  # its gradient is written into one of its dtype, and is fp32
        y = grouped(hidden if product is None else self.activate(product, activation), w2, offsets, b2)
        return (y[back].float().view(tokens, top_k, -1) * scores[..., None]).sum(1).to(hidden.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    modules: dict[str, Any] = {
        "sonicmoe": ModuleType("sonicmoe"),
        "sonicmoe.enums": SimpleNamespace(ActivationType=ActivationType),
        "sonicmoe.functional": SimpleNamespace(
            _UpProjection=SimpleNamespace(apply=made.up), _DownProjection=SimpleNamespace(apply=made.down)
        ),
        "sonicmoe.functional.triton_kernels": SimpleNamespace(TC_topk_router_metadata_triton=sort),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(
    "table",
    [TABLE, BIASES, INTERLEAVED, {**TABLE, "activation": "geglu_tanh"}, SHARED],
    ids=["swiglu", "biases", "interleaved", "geglu", "shared"],
)  # fmt: skip
def test_it_is_given_what_it_asks_for(library, table):
    case = OPERATOR.parse_case(table)
    assert SonicMoe().refusal(case) is None
    inputs = OPERATOR.make_inputs(case, seed=3, device="cpu")
    found = OPERATOR.bind(SonicMoe().load(), case, inputs)()
    exact = OPERATOR.exact(case, inputs)
    assert found.dtype == torch.bfloat16
    budget = OPERATOR.error_budget(exact, OPERATOR.low_precision(case, inputs))
    assert (found.double() - exact).abs().max() <= budget
    assert library.kept == [False]
    assert_answers_wholly(OPERATOR, SonicMoe(), table, follows=True)


@pytest.mark.parametrize("table", [TABLE, INTERLEAVED], ids=["swiglu", "interleaved"])
def test_it_has_gradients(library, table):
    case = GRADIENTS.parse_case(table)
    inputs = GRADIENTS.make_inputs(case, seed=3, device="cpu")
    inputs["topk_weights"] = inputs["topk_weights"].bfloat16()
    found = GRADIENTS.bind(Autograd(SonicMoe()).load(), case, inputs)()
    assert library.kept == [True]
    wanted, eager = GRADIENTS.exact(case, inputs), GRADIENTS.low_precision(case, inputs)
    for name, mine, exact, low in zip(GRADIENTS.outputs(case), found, wanted, eager, strict=True):
        # Other orders of the same roundings, so no closer than a few of them.
        allowed = max(GRADIENTS.error_budget(exact, low), 4 * torch.finfo(low.dtype).eps * exact.abs().max().item())
        assert (mine.double() - exact).abs().max() <= allowed, name


def test_it_says_what_it_does_not_serve():
    def refusal(**change: Any) -> str | None:
        return SonicMoe().refusal(OPERATOR.parse_case({**TABLE, **change}))

    assert refusal() is None
    assert refusal(dtype="fp16") is None
    assert refusal(dtype="fp32") == "it serves 16-bit operands, got fp32"
    assert refusal(activation="relu2", batch_invariant=True) == "it has no relu2, batch invariance"
    assert refusal(activation="swiglu_clamped") == "it has no swiglu_clamped"
    assert refusal(bias_down=True) == "it has biases of both products, or of none"
    assert refusal(inter=20) == "it serves sizes that are multiples of 8, got 16 and 20"
    assert refusal(tokens=0) == "it serves one token or more"
    passed = "it adds up rows with 32-bit offsets, which 1048576 rows of 4096 pass"
    assert refusal(tokens=2**19, hidden=4096) == passed


def test_its_version_names_what_its_products_are_from(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata, "version", {"sonic-moe": "1", "quack-kernels": "2", "nvidia-cutlass-dsl": "3"}.get
    )
    assert SonicMoe().version() == "sonic-moe 1, quack-kernels 2, nvidia-cutlass-dsl 3"
