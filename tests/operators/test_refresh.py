"""New values for each timed call: every operator of ours writes them in place, as its inputs are drawn."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.operators import MODULES
from flashmoe_science.proof.subject.operator import Refreshing
from flashmoe_science.proof.subject.outputs import parts
from flashmoe_science.proof.subject.registry import find_operator

_ATTENTION = {"batch": 2, "heads": 4, "seqlen_q": 32, "head_dim": 16, "dtype": "fp32"}
_MOE = {"tokens": 16, "experts": 4, "top_k": 2, "hidden": 64, "inter": 48, "dtype": "fp32"}
CASES = {
    "attention": {**_ATTENTION, "heads_kv": 2, "causal": True},
    "attention_backward": _ATTENTION,
    "attention_masked": {**_ATTENTION, "mask": "prefix", "amount": 9},
    "attention_sparse": {
        **_ATTENTION,
        "seqlen_q": 9,
        "seqlen_k": 40,
        "top_k": 32,
        "head_dim": 24,
        "head_dim_v": 16,
    },
    "attention_mixed": {"lengths": [5, 40], "heads": 4, "head_dim": 16, "dtype": "fp32", "page_size": 8},
    "attention_train": _ATTENTION,
    "attention_varlen": {"lengths": [5, 40], "heads": 4, "head_dim": 16, "dtype": "fp32"},
    "attention_varlen_backward": {"lengths": [5, 40], "heads": 4, "head_dim": 16, "dtype": "fp32"},
    "attention_cache": {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_k": 64, "head_dim": 16, "dtype": "fp32"},
    "context_parallel": {"ranks": 2, "lengths": [5, 43], "heads": 4, "heads_kv": 2, "head_dim": 16, "dtype": "fp32"},
    "expert_parallel": {**_MOE, "ranks": 2},
    "moe": _MOE,
    "moe_backward": _MOE,
}


def test_every_operator_is_tried():
    assert set(CASES) == set(MODULES)


@pytest.mark.parametrize("name", CASES)
def test_values_are_new_and_drawn_alike(name):
    operator = find_operator(name)
    problem = operator.parse_case(CASES[name])
    inputs, again = (operator.make_inputs(problem, seed=3, device="cpu") for _ in range(2))
    assert isinstance(operator, Refreshing)
    operator.refresh(problem, inputs, seed=5)
    fresh = [each for each in vars(type(operator))["fresh"] if each in inputs]
    assert fresh
    for each, tensor in inputs.items():
        if each in fresh:
            assert (tensor != again[each]).float().mean() > 0.99
            assert tensor.std() == pytest.approx(float(again[each].std()), rel=0.2), each
        else:
            assert torch.equal(tensor, again[each])
    before, after = (parts(operator.exact(problem, each)) for each in (again, inputs))
    for old, new in zip(before, after, strict=True):
        assert (old != new).double().mean() > 0.99
        assert new.std() == pytest.approx(float(old.std()), rel=0.3)
    operator.refresh(problem, again, seed=5)
    assert all(torch.equal(again[each], inputs[each]) for each in inputs)


def test_rows_in_fp8_are_written_in_place():
    operator = find_operator("attention_sparse")
    case = {**CASES["attention_sparse"], "head_dim": 576, "head_dim_v": 512, "fp8": True}
    problem = operator.parse_case(case)
    inputs, again = (operator.make_inputs(problem, seed=3, device="cpu") for _ in range(2))
    address = inputs["kv_cache"].data_ptr()
    assert isinstance(operator, Refreshing)
    operator.refresh(problem, inputs, seed=5)
    assert inputs["kv_cache"].data_ptr() == address
    assert torch.equal(inputs["indices"], again["indices"])
    drawn = operator.make_inputs(problem, seed=5, device="cpu")
    for name in ("q", "kv_cache"):
        assert torch.equal(inputs[name], drawn[name])
        assert (inputs[name] != again[name]).float().mean() > 0.9
