"""What the harness asks of attention with features: cases, inputs, answers, baselines."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.attention.inputs import problem_of
from flashmoe_science.operators.attention import OPERATOR
from flashmoe_science.operators.baselines.attention import BASELINES

TABLE: dict[str, Any] = {
    "batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 20, "seqlen_k": 33, "head_dim": 16, "head_dim_v": 16,
    "dtype": "bf16", "causal": True,
    "window": [9, -1], "softcap": 3.0, "sinks": "bf16", "alibi": "fp32", "bias": "fp16",
}  # fmt: skip


def test_a_case_comes_back_from_its_table():
    problem = OPERATOR.parse_case(TABLE)
    assert OPERATOR.as_table(problem) == TABLE
    assert OPERATOR.parse_case(json.loads(json.dumps(OPERATOR.as_table(problem)))) == problem
    plain = {
        key: value for key, value in TABLE.items() if key not in problem.extras and key not in ("window", "softcap")
    }
    assert OPERATOR.as_table(OPERATOR.parse_case(plain)) == plain  # as in records from before there were features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": [9]}, r"window must be two integers \(left, right\), .* got \[9\]"),
        ({"window": [9.0, 1]}, r"window must be two integers"),
        ({"sinks": "fp64"}, "the dtype of sinks must be one of fp16, bf16, fp32, got 'fp64'"),
        ({"softcap": -1.0}, "softcap must be 0"),
    ],
)
def test_bad_cases(change, message):
    with pytest.raises(InputError, match=message):
        OPERATOR.parse_case({**TABLE, **change})


def test_inputs_follow_the_seed_and_are_what_the_plan_is_for():
    problem = OPERATOR.parse_case(TABLE)
    inputs, same, other = (OPERATOR.make_inputs(problem, seed=seed, device="cpu") for seed in (1, 1, 2))
    assert list(inputs) == ["q", "k", "v", "sinks", "alibi", "bias"]
    for name, tensor in inputs.items():
        assert torch.equal(tensor, same[name])
        assert not torch.equal(tensor, other[name])
    assert (inputs["alibi"] > 0).all()
    assert (inputs["alibi"] <= 1).all()
    options: dict[str, Any] = {"window": (9, -1), "softcap": 3.0, **{name: inputs[name] for name in problem.extras}}
    called = problem_of(
        inputs["q"], inputs["k"], inputs["v"], causal=True, softmax_scale=None, return_lse=False, **options
    )
    assert called == problem


def test_answers_take_the_features_into_account():
    problem = OPERATOR.parse_case(TABLE)
    inputs = OPERATOR.make_inputs(problem, seed=1, device="cpu")
    exact, low = OPERATOR.exact(problem, inputs), OPERATOR.low_precision(problem, inputs)
    found = OPERATOR.bind(flash_attention, problem, inputs)()
    assert (found.double() - exact).abs().max() <= OPERATOR.error_budget(exact, low) < 0.1
    plain = reference.attention(inputs["q"], inputs["k"], inputs["v"], causal=True, dtype=torch.float64)[0]
    assert (plain - exact).abs().max() > 0.3
    assert OPERATOR.work(problem).bytes > 4 * 20 * 33 * 2
    wide = OPERATOR.parse_case({**TABLE, "window": [-1, -1]})
    assert OPERATOR.work(problem).flops < OPERATOR.work(wide).flops


def test_baselines_say_what_they_are_not_called_with():
    """None runs another problem in silence; SDPA takes a bias, and a speed of light leaves the features out."""
    problem = OPERATOR.parse_case({**TABLE, "dtype": "bf16"})
    for name, baseline in BASELINES.items():
        refused = baseline.refusal(problem)
        assert (refused is None) == (name == "without-features"), name
    assert BASELINES["fa2"].refusal(OPERATOR.parse_case({**TABLE, "bias": "", "alibi": ""})) == (
        "it is not called with a sliding window, a softcap, attention sinks"
    )
    plain = OPERATOR.parse_case({"batch": 1, "heads": 2, "seqlen_q": 64, "head_dim": 64, "dtype": "fp16"})
    assert BASELINES["sdpa"].refusal(plain) is None
    assert BASELINES["without-features"].refusal(plain) == "the case has no features"


def test_sdpa_gets_the_bias():
    table = {"batch": 2, "heads": 4, "seqlen_q": 20, "head_dim": 16, "dtype": "fp32", "bias": "fp32"}
    problem = OPERATOR.parse_case(table)
    assert BASELINES["sdpa"].refusal(problem) is None
    assert BASELINES["sdpa-flash"].refusal(problem) == "it is not called with a bias"
    assert (
        BASELINES["sdpa"].refusal(OPERATOR.parse_case({**table, "bias": "fp16"}))
        == "its bias has the dtype of the query"
    )
    assert BASELINES["sdpa"].refusal(OPERATOR.parse_case({**table, "causal": True})) is not None
    inputs = OPERATOR.make_inputs(problem, seed=1, device="cpu")
    found = OPERATOR.bind(BASELINES["sdpa"].load(), problem, inputs)()
    torch.testing.assert_close(found.double(), OPERATOR.exact(problem, inputs), rtol=1e-4, atol=1e-5)


def test_the_yardstick_leaves_the_features_out():
    problem = OPERATOR.parse_case({**TABLE, "dtype": "fp32"})
    inputs = OPERATOR.make_inputs(problem, seed=1, device="cpu")
    baseline = BASELINES["without-features"]
    call = OPERATOR.bind(baseline.load(), problem, inputs)
    assert isinstance(call, functools.partial)
    assert torch.equal(call(), flash_attention(inputs["q"], inputs["k"], inputs["v"], causal=True))
    assert baseline.speed_of_light
    assert baseline.version().startswith("flashmoe_science ")
