"""Baselines that are libraries: each is given what it asks for, by stand-ins that keep the library's own contract."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from flashmoe_science.operators.baselines.moe import BASELINES as OF_PYTORCH
from flashmoe_science.operators.moe import OPERATOR

from ..moved import assert_answers_wholly

BASELINES = OPERATOR.baselines()
TABLE = {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 16, "inter": 24, "dtype": "bf16"}
GPT_OSS = {**TABLE, "activation": "swiglu_clamped", "bias_gate_up": True, "bias_down": True, "alpha": 1.5, "limit": 0.5}
SHARED = {**TABLE, "shared_experts": 1, "shared_inter": 8}


def stand_in(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Install modules, ``_`` for the dot in their names, below packages that hold nothing."""
    for name, module in modules.items():
        parts = name.split("__")
        for length in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[0]))
        monkeypatch.setitem(sys.modules, ".".join(parts), module)


def assert_right(name: str, table: dict[str, Any]) -> None:
    case = OPERATOR.parse_case(table)
    inputs = OPERATOR.make_inputs(case, seed=3, device="cpu")
    exact = OPERATOR.exact(case, inputs)
    budget = OPERATOR.error_budget(exact, OPERATOR.low_precision(case, inputs))
    assert BASELINES[name].refusal(case) is None
    found = OPERATOR.bind(BASELINES[name].load(), case, inputs)()
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= budget


def flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sorted_ids, order = torch.sort(expert_idxs.flatten())
    return sorted_ids, order, expert_idxs.flatten().bincount(minlength=num_experts).cumsum(-1)


def parallel_linear(
    inputs: Tensor, expert_weights: Tensor, k: int, sorted_ids: Tensor, order: Tensor, offsets: Tensor,
    expert_biases: Tensor | None = None, gates: Tensor | None = None, grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:  # fmt: skip
    """ScatterMoE's product: weights ``[E, in, out]``; rows by expert where grouped, else by token."""
    assert offsets[-1] == len(order)
    rows = inputs if grouped_in else inputs[order // k]
    out = torch.stack([row @ expert_weights[e] for row, e in zip(rows, sorted_ids.tolist(), strict=True)])
    if expert_biases is not None:
        out = out + expert_biases[sorted_ids]
    if not grouped_out:
        out = torch.zeros_like(out).index_copy(0, order, out)
    return out if gates is None else (gates.unsqueeze(1) @ out.view(*gates.shape, -1)).squeeze(1)


@pytest.mark.parametrize(
    "table", [TABLE, GPT_OSS, {**GPT_OSS, "interleaved": True}, {**TABLE, "activation": "relu2"}, SHARED],
    ids=["swiglu", "gpt-oss", "interleaved", "relu2", "shared"],
)  # fmt: skip
def test_scattermoe_is_given_what_it_asks_for(monkeypatch, table):
    library = SimpleNamespace(flatten_sort_count=flatten_sort_count, parallel_linear=parallel_linear)
    stand_in(monkeypatch, scattermoe__parallel_experts=library)
    assert_right("scattermoe", table)


def test_scattermoe_follows_its_inputs(monkeypatch):
    library = SimpleNamespace(flatten_sort_count=flatten_sort_count, parallel_linear=parallel_linear)
    stand_in(monkeypatch, scattermoe__parallel_experts=library)
    assert_answers_wholly(OPERATOR, BASELINES["scattermoe"], SHARED, follows=True)


def test_scattermoe_says_what_it_does_not_serve():
    def refusal(**change: Any) -> str | None:
        return BASELINES["scattermoe"].refusal(OPERATOR.parse_case({**TABLE, **change}))

    assert refusal() is None
    assert refusal(dtype="fp32") == "it serves 16-bit operands"
    assert refusal(batch_invariant=True) == "its tiles hold rows of several experts, so it is not batch-invariant"
    assert refusal(tokens=2**15, hidden=2**15 - 1) is None
    assert refusal(tokens=2**15, hidden=2**15) == "it has 32-bit offsets, which t32768_e4_k2_h32768_i24_bf16 passes"
    assert str(refusal(experts=256, hidden=7168, inter=2048)).startswith("it has 32-bit offsets")


@dataclass
class RoutingData:
    """The fields of triton_kernels, in its order."""

    gate_scal: Tensor
    expt_hist: Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: Any = None


@dataclass
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]
    fn_arg_do_not_specialize: tuple[str, ...] = ()
    reduction_n: int = 1


@dataclass
class FusedActivation:
    specs: FnSpecs
    fn_args: tuple[float, ...] = field(default=())


def topk(x: Tensor, k: int, apply_softmax: bool = True, dim: int = 1, y_indx: Tensor | None = None) -> Any:
    assert (dim, apply_softmax) == (1, False)
    assert y_indx is not None
    assert y_indx.shape[1] == k
    # It counts by a mask of bits, which it makes in the type of the ids.
    bits = torch.ones_like(y_indx) << (y_indx % 32)
    masks = torch.zeros(len(y_indx), -(-x.shape[1] // 32), dtype=torch.int32)
    masks.scatter_add_(1, (y_indx // 32).long(), bits.int())
    columns = torch.arange(x.shape[1])
    counts = (masks[:, columns // 32] >> (columns % 32) & 1).sum(0)
    ids = y_indx.long().flatten()
    order = torch.argsort(ids, stable=True)
    metadata = SimpleNamespace(col_sum=counts, col_sorted_indx=order, row_sorted_indx=torch.argsort(order))
    return SimpleNamespace(vals=x.gather(1, y_indx.long()), indx=y_indx, mask_metadata=metadata)


def matmul_ogs(
    x: Tensor, w: Tensor, bias: Tensor | None, routing_data: RoutingData, gather_indx: Any = None,
    scatter_indx: Any = None, gammas: Tensor | None = None, fused_activation: FusedActivation | None = None,
) -> Tensor:  # fmt: skip
    """Multiply rows by expert, ``w`` ``[E, in, out]``; gather by token before, add the rows of a token after."""
    assert routing_data.expt_hist.sum() == len(routing_data.gate_scal)
    rows = x if gather_indx is None else x[gather_indx.src_indx // routing_data.n_expts_act]
    ids = torch.repeat_interleave(torch.arange(routing_data.n_expts_tot), routing_data.expt_hist)
    out = torch.stack([row.float() @ w[e].float() for row, e in zip(rows, ids.tolist(), strict=True)])
    if bias is not None:
        assert bias.dtype == torch.float32
        out = out + bias[ids]
    if fused_activation is not None:
        gate, value = out[:, ::2], out[:, 1::2]
        assert fused_activation.specs.reduction_n == 2
        if fused_activation.specs.fn_arg_names == ("alpha", "limit"):
            alpha, limit = fused_activation.fn_args
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit) + 1
            out = gate * torch.sigmoid(alpha * gate) * value
        else:
            out = F.silu(gate) * value
    out = out.to(x.dtype)
    if gammas is not None:
        out = (out * gammas[:, None]).to(x.dtype)
    if scatter_indx is not None:
        out = out[scatter_indx.src_indx].unflatten(0, (-1, routing_data.n_expts_act)).sum(1)
    return out


def install_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def indices(src_indx: Tensor, dst_indx: Tensor) -> Any:
        return SimpleNamespace(src_indx=src_indx, dst_indx=dst_indx)

    ogs = SimpleNamespace(
        matmul_ogs=matmul_ogs, RoutingData=RoutingData, FnSpecs=FnSpecs, FusedActivation=FusedActivation,
        GatherIndx=indices, ScatterIndx=indices,
    )  # fmt: skip
    tensor = SimpleNamespace(make_ragged_tensor_metadata=lambda sizes, _rows: SimpleNamespace(slice_sizes=sizes))
    stand_in(
        monkeypatch, triton_kernels__matmul_ogs=ogs, triton_kernels__topk=SimpleNamespace(topk=topk),
        triton_kernels__tensor=tensor, triton_kernels__swiglu=SimpleNamespace(swiglu_fn=None),
    )  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize(
    "table",
    [TABLE, GPT_OSS, {**GPT_OSS, "interleaved": True}, {**SHARED, **GPT_OSS}, {**TABLE, "experts": 70, "top_k": 8}],
    ids=["swiglu", "gpt-oss", "interleaved", "shared", "70-experts"],
)
def test_triton_kernels_is_given_what_it_asks_for(monkeypatch, table):
    install_triton_kernels(monkeypatch)
    assert_right("triton_kernels", table)
    assert_answers_wholly(OPERATOR, BASELINES["triton_kernels"], table, follows=False)


def test_triton_kernels_says_what_it_does_not_serve():
    def refusal(**change: Any) -> str | None:
        return BASELINES["triton_kernels"].refusal(OPERATOR.parse_case({**TABLE, **change}))

    assert refusal() is None
    assert refusal(activation="relu2") == "it fuses swiglu and gpt-oss's swiglu, got relu2"
    assert refusal(dtype="fp32") == "it serves 16-bit operands"
    assert refusal(batch_invariant=True) == "its tiles go by the number of tokens, so it is not batch-invariant"
    assert refusal(top_k=3) == "its routing serves powers of two as top_k, got 3"


@pytest.mark.parametrize("name", sorted(set(BASELINES) - set(OF_PYTORCH)))
def test_a_library_that_is_not_there_is_named(name):
    module = name.partition("-")[0]
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ImportError, match=module):
        BASELINES[name].load()
