"""One head of K and V, or some queries, drawn at random: what is right for them is part of what is right for all."""

from __future__ import annotations

import importlib

import pytest
import torch

from flashmoe_science.operators import MODULES
from flashmoe_science.proof.measure.allowed_error import Whole
from flashmoe_science.proof.measure.arms import fault_of
from flashmoe_science.proof.measure.fresh_values import FreshValues
from flashmoe_science.proof.subject.operator import sample_of
from flashmoe_science.proof.subject.outputs import parts

HEADS = {"heads": 6, "heads_kv": 3, "head_dim": 16, "dtype": "fp16"}
FIXED = {**HEADS, "batch": 2, "seqlen_q": 9, "seqlen_k": 13, "causal": True}
PACKED = {**HEADS, "lengths": [3, 0, 7], "causal": True}
CASES = {
    "attention": {**FIXED, "sinks": "fp32", "alibi": "fp32", "bias": "fp16"},
    "attention_backward": {**FIXED, "softcap": 5.0},
    "attention_train": FIXED,
    "attention_varlen": PACKED,
    "attention_varlen_backward": PACKED,
    "attention_mixed": {**PACKED, "lengths": [1, 1, 7], "lengths_k": [9, 3, 17], "page_size": 4},
    "attention_masked": {**HEADS, "batch": 2, "seqlen_q": 128, "mask": "documents", "amount": 32},
}


def made(name, **changes):
    operator = importlib.import_module(f"flashmoe_science.operators.{MODULES[name]}").OPERATOR
    problem = operator.parse_case({**CASES[name], **changes})
    return operator, problem, operator.make_inputs(problem, seed=3, device="cpu")


def drawn(operator, problem, inputs, seed):
    one = sample_of(operator, problem, inputs, seed=seed)
    assert one is not None
    return one


def expected_of(operator, one):
    return Whole(operator, one.problem, one.inputs, one.pick).expected(None)


SPARSE = {"batch": 3, "heads": 4, "seqlen_k": 48, "top_k": 7, "head_dim": 48, "head_dim_v": 32, "dtype": "fp16"}


@pytest.mark.parametrize(
    ("changes", "parts_there"),
    [
        ({}, 3),
        ({"page_size": 4, "padding": 2}, 3),
        ({"fp8": True, "head_dim": 576, "head_dim_v": 512}, 3),
        ({"batch": 1, "seqlen_q": 40}, 3),
        ({"seqlen_q": 18}, 6),
    ],
)
def test_the_answer_to_some_queries_is_part_of_the_answer(changes, parts_there):
    operator = importlib.import_module(f"flashmoe_science.operators.{MODULES['attention_sparse']}").OPERATOR
    problem = operator.parse_case({**SPARSE, **changes})
    inputs = operator.make_inputs(problem, seed=3, device="cpu")
    places = set()
    for seed in range(8):
        one = drawn(operator, problem, inputs, seed)
        assert one.parts == parts_there
        whole = operator.exact(problem, inputs)
        torch.testing.assert_close(one.pick(whole), operator.exact(one.problem, one.inputs))
        (scale,), (part,) = (operator.error_scale(*call) for call in ((problem, inputs), (one.problem, one.inputs)))
        for each, its in zip(scale, part, strict=True):
            torch.testing.assert_close(one.pick(each), its)
        right = whole.to(torch.float16)
        assert not fault_of(right, expected_of(operator, one))
        wrong = right.clone()
        one.pick(wrong)[0, 1, 0, 3] += 0.5
        assert fault_of(wrong, expected_of(operator, one))
        places.add(float(one.pick(right)[0, 0, 0, 0]))
    assert len(places) > 1


def test_of_few_queries_of_one_sequence_there_is_no_part():
    operator = importlib.import_module(f"flashmoe_science.operators.{MODULES['attention_sparse']}").OPERATOR
    problem = operator.parse_case({**SPARSE, "batch": 1, "seqlen_q": 16})
    assert sample_of(operator, problem, operator.make_inputs(problem, seed=3, device="cpu"), seed=0) is None


@pytest.mark.parametrize("name", CASES)
def test_the_answer_of_a_part_is_part_of_the_answer(name):
    operator, problem, inputs = made(name)
    for seed in range(4):
        one = drawn(operator, problem, inputs, seed)
        assert one.parts == 3
        for what, tolerance in (("exact", 1e-12), ("low_precision", 2e-3), ("error_scale", 1e-4)):
            whole, part = (getattr(operator, what)(*call) for call in ((problem, inputs), (one.problem, one.inputs)))
            if what == "error_scale":
                whole, part = (tuple(largest for largest, _ in scales) for scales in (whole, part))
            for each, its in zip(parts(whole), parts(part), strict=True):
                torch.testing.assert_close(one.pick(each), its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [[16], [7, 3, 22]])
def test_over_ranks_a_part_has_a_head_for_each(lengths):
    operator = importlib.import_module("flashmoe_science.operators.ranks.context_parallel").OPERATOR
    sizes = {"heads": 8, "heads_kv": 4, "head_dim": 16, "dtype": "fp16", "causal": True}
    problem = operator.parse_case({"ranks": 2, "lengths": lengths, **sizes})
    inputs = operator.make_inputs(problem, seed=3, device="cpu")
    for seed in range(4):
        one = drawn(operator, problem, inputs, seed)
        assert one.parts == 2
        assert one.inputs["k"].shape[1] == 2
        for whole, part in zip(operator.exact(problem, inputs), operator.exact(one.problem, one.inputs), strict=True):
            torch.testing.assert_close(one.pick(whole), part)
            for layout in ("auto", "chunks"):  # a rank's tokens of these heads are these heads of its tokens
                for rank in range(2):
                    its = operator.shard(problem, layout, rank, "o", whole)
                    torch.testing.assert_close(one.pick(its), operator.shard(one.problem, layout, rank, "o", part))


def test_of_one_head_there_is_no_part():
    operator, problem, inputs = made("attention", heads_kv=1)
    assert sample_of(operator, problem, inputs, seed=0) is None


def test_each_head_is_drawn_and_a_fault_in_one_is_found():
    operator, problem, inputs = made("attention")
    o = operator.exact(problem, inputs)
    right = o.to(torch.float16)
    wrong = right.clone()
    wrong[1, 5, 8] *= 1.2  # of the third head of K and V
    found = []
    for seed in range(20):
        expected = expected_of(operator, drawn(operator, problem, inputs, seed))
        assert not fault_of(right, expected)
        found.append(bool(fault_of(wrong, expected)))
    assert 0 < sum(found) < 20


def test_nan_outside_of_the_part_is_a_fault():
    operator, problem, inputs = made("attention")
    answer = operator.exact(problem, inputs).to(torch.float16)
    for head in range(6):
        spoilt = answer.clone()
        spoilt[0, head, 0, 0] = torch.nan
        assert fault_of(spoilt, expected_of(operator, drawn(operator, problem, inputs, 1))) == "it has NaN"


def test_timed_values_are_compared_by_parts_where_that_is_asked_for():
    operator, problem, inputs = made("attention")
    for sampled, heads in ((True, 2), (False, 6)):
        values = FreshValues(operator, problem, [inputs], "cpu", sampled=sampled)
        values.begin_round(7)
        seen = set()
        for _ in range(12):
            values.write([0])
            (expected,) = values.expected(0)
            assert expected.exact.shape[1] == heads
            assert values.expected(0)[0] is expected  # the next arm is compared with the same part
            answer = operator.exact(problem, inputs).to(torch.float16)
            assert not fault_of(answer, (expected,))
            seen.add(float(answer[0, 0, 0, 0]) if expected.pick is None else float(expected.pick(answer)[0, 0, 0, 0]))
        assert len(seen) == 12
        assert values.parts == (3 if sampled else 1)
