"""What attention offers to a diagnosis: longer problems, and its kernels on a GPU that is not here."""

from __future__ import annotations

import pytest

from flashmoe_science.operators.attention import OPERATOR
from flashmoe_science.proof.subject.operator import Scalable

TABLE = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 96, "head_dim": 64, "dtype": "fp16", "softmax_scale": 0.5}


def test_attention_offers_what_a_diagnosis_may_ask_for():
    assert isinstance(OPERATOR, Scalable)


@pytest.mark.parametrize(
    ("axis", "longer"),
    [
        ("keys", {"seqlen_k": 288}),
        ("length", {"seqlen_q": 288, "seqlen_k": 288}),
        ("batch", {"batch": 6}),
        ("heads", {"heads": 12, "heads_kv": 6}),
    ],
)
def test_an_axis_makes_a_problem_longer_and_leaves_the_rest(axis, longer):
    problem = OPERATOR.parse_case(TABLE)
    scaled = OPERATOR.scaled(problem, axis, 3)
    assert scaled is not None
    assert OPERATOR.as_table(scaled) == {**OPERATOR.as_table(problem), **longer}
    assert OPERATOR.work(scaled).flops == (9 if axis == "length" else 3) * OPERATOR.work(problem).flops


def test_every_axis_can_be_asked_for_and_is_of_one_kind():
    problem = OPERATOR.parse_case(TABLE)
    assert [axis.kind for axis in OPERATOR.axes()] == ["sequential", "sequential", "parallel", "parallel"]
    assert all(OPERATOR.scaled(problem, axis.name, 2) is not None for axis in OPERATOR.axes())


def test_more_keys_are_not_in_proportion_under_a_causal_mask():
    problem = OPERATOR.parse_case({**TABLE, "causal": True})
    assert OPERATOR.scaled(problem, "keys", 2) is None
    assert OPERATOR.scaled(problem, "length", 2) is not None


@pytest.mark.triton
def test_planned_kernels_are_those_of_the_plan_with_their_code():
    problem = OPERATOR.parse_case({**TABLE, "batch": 1, "heads": 1, "heads_kv": 1, "seqlen_q": 512})
    forward, merge = OPERATOR.planned_kernels("forward_triton", problem, "L4")
    assert (forward.name, merge.name) == ("_forward_kernel", "_merge_partials_kernel")
    assert forward.code.arch == 89
    assert forward.code.opcodes["HMMA"] > 0
    assert forward.shared_memory_bytes > merge.shared_memory_bytes == 0
