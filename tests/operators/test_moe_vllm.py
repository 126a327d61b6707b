"""vLLM as a baseline: what its function is given, and what is not asked of it. The library is a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science import InputError
from flashmoe_science.moe import reference
from flashmoe_science.operators.baselines.moe_vllm import Vllm
from flashmoe_science.operators.moe import OPERATOR

from ..moved import assert_answers_wholly

TABLE = {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 16, "inter": 24, "dtype": "fp16"}
GPT_OSS = {**TABLE, "activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True}
ROOM = "vllm.model_executor.layers.fused_moe"
# Its activations, as its documentation has them, in our words.
MEANT: dict[str, dict[str, Any]] = {
    "silu": {"activation": "swiglu"},
    "gelu": {"activation": "geglu"},
    "swigluoai": {"activation": "swiglu_clamped", "alpha": 1.702, "limit": 7.0, "interleaved": True},
    "silu_no_mul": {"activation": "silu"},
    "gelu_no_mul": {"activation": "gelu"},
    "relu2_no_mul": {"activation": "relu2"},
}


@pytest.fixture
def stand_in(monkeypatch):
    """Put its modules in place, with its order of arguments; return what biases were described."""
    described = []

    def biased_moe_quant_config(w1_bias, w2_bias):
        described.append((w1_bias, w2_bias))
        return SimpleNamespace(w1_bias=w1_bias, w2_bias=w2_bias)

    def fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, inplace=False, activation=None,
        apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None, quant_config=None,
    ):  # fmt: skip
        assert (inplace, apply_router_weight_on_input, global_num_experts, expert_map) == (False, False, -1, None)
        kind, called = activation
        assert kind == "MoEActivation"
        biases = {"bias_gate_up": quant_config.w1_bias, "bias_down": quant_config.w2_bias}
        return reference.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, **MEANT[called], **biases)

    for part in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    experts = SimpleNamespace(fused_experts=fused_experts, MoEActivation=lambda value: ("MoEActivation", value))
    monkeypatch.setitem(sys.modules, ROOM, experts)
    config = SimpleNamespace(biased_moe_quant_config=biased_moe_quant_config)
    monkeypatch.setitem(sys.modules, f"{ROOM}.config", config)
    return described


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation": "geglu"},
        {"activation": "relu2", "bias_gate_up": True},
        {"activation": "silu"},
        {"activation": "gelu", "bias_down": True},
        GPT_OSS,
        {"shared_experts": 2, "shared_inter": 8, "shared_weights": "fp32"},
        {**GPT_OSS, "shared_experts": 1, "shared_inter": 8},
    ],
    ids=["swiglu", "geglu", "relu2", "silu", "gelu", "gpt-oss", "shared", "gpt-oss-shared"],
)
def test_it_is_given_what_it_asks_for(stand_in, change):
    case = OPERATOR.parse_case({**TABLE, **change})
    assert Vllm().refusal(case) is None
    inputs = OPERATOR.make_inputs(case, seed=3, device="cpu")
    bound = OPERATOR.bind(Vllm().load(), case, inputs)
    torch.testing.assert_close(bound(), OPERATOR.low_precision(case, inputs))
    torch.testing.assert_close(bound(), OPERATOR.low_precision(case, inputs))  # the second call is the first again
    assert stand_in == [(inputs.get("bias_gate_up"), inputs.get("bias_down"))]  # described once, before any call
    assert_answers_wholly(OPERATOR, Vllm(), {**TABLE, **change}, follows=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "geglu_tanh"}, "it has no geglu_tanh"),
        ({"activation": "gelu_tanh"}, "it has no gelu_tanh"),
        ({"interleaved": True}, "it has no interleaved gates of swiglu"),
        ({"activation": "swiglu_clamped"}, "it has no swiglu_clamped without interleaved gates"),
        ({**GPT_OSS, "alpha": 1.5}, "it has no alpha and limit but 1.702 and 7"),
        ({**GPT_OSS, "limit": 5.0}, "it has no alpha and limit but 1.702 and 7"),
        ({"batch_invariant": True}, "it has no batch invariance of a single call"),
        ({"dtype": "fp32"}, "it has no products of fp32 but as tf32"),
        (
            {"dtype": "fp32", "activation": "geglu", "interleaved": True},
            "it has no interleaved gates of geglu, products of fp32 but as tf32",
        ),
    ],
)
def test_it_says_what_it_does_not_serve(change, reason):
    assert Vllm().refusal(OPERATOR.parse_case({**TABLE, **change})) == reason


def test_it_is_bound_by_the_operator_and_not_called(stand_in):
    with pytest.raises(InputError, match=r"operator\.bind"):
        Vllm().load()(1)
    assert stand_in == []
