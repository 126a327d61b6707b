"""A claim made from a run says no more than its intervals, and is written beside those that are there."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from flashmoe_science.errors import ClaimError, InputError
from flashmoe_science.proof.judge.claims import add_claims, claim_sentence, load_claims
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.judge.new_claim import ClaimRequest, make_claims, round_below

from .builders import L4, build_record
from .claim_builders import build_claim, claim_toml
from .test_judge import _with_seconds


@pytest.mark.parametrize(
    ("value", "figure"),
    [
        (2.103, 2.0),
        (2.0, 1.9),  # below, and not at
        (1.678, 1.6),
        (1.0, 0.9),
        (1.0001, 1.0),
        (0.123, 0.12),
        (4.99, 4.5),
        (5.01, 5.0),
        (10.5, 10.0),
        (10.0, 9.0),
        (123.0, 120.0),
        (1.70000001, 1.7),
        (0.001, 0.0009),  # the float is a little above 1/1000
    ],
)
def test_the_largest_round_figure_below(value, figure):
    assert round_below(value) == figure


@given(st.floats(1e-3, 1e3))
def test_a_round_figure_is_below_near_and_short(value):
    figure = round_below(value)
    assert 0.79 * value < figure < value
    assert len(f"{figure:g}".replace(".", "").strip("0")) <= 2
    assert Fraction(f"{figure:g}") == Fraction(str(figure))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_there_is_no_figure_below_what_is_no_speedup(value):
    with pytest.raises(InputError, match="value must be positive and finite"):
        round_below(value)


def test_a_claim_is_what_the_run_demonstrates():
    record = build_record(speedups=[2.3, 3.0])
    (claim,) = make_claims(record, ClaimRequest())
    assert claim.id == "flash_attention-seed-graph-h200"
    assert (claim.baseline, claim.metric, claim.factor, claim.gpu) == (("sdpa",), "graph", 2.0, ("H200",))
    assert claim.sentence == claim_sentence(claim, record)
    assert judge(claim, record).status is VerdictStatus.DEMONSTRATED
    above = claim.model_copy(update={"factor": 2.5})
    assert judge(above, record).status is not VerdictStatus.DEMONSTRATED


def test_a_claim_holds_beside_a_baseline_that_is_not_the_fastest_but_varies():
    """The fastest baseline alone allows more than the other one does."""
    record = build_record(speedups=[2.3], baselines={"sdpa": 1.0, "fa3": 1.0})
    samples = sum(len(each.seconds.get("graph", {}).get("fa3", [])) for each in record.cases[0].rounds)
    slower = itertools.chain([0.9] * (samples // 3), itertools.repeat(1.6))  # in all processes but the first
    record = _with_seconds(record, "fa3", lambda s: next(slower) * s)
    (fastest,) = make_claims(record, ClaimRequest(baselines=["sdpa"]))
    (both,) = make_claims(record, ClaimRequest(baselines=["sdpa", "fa3"]))
    assert both.factor < fastest.factor == 2.0
    assert judge(both, record).status is VerdictStatus.DEMONSTRATED


def test_a_claim_for_each_kind_of_time_against_the_fastest_of_several():
    record = build_record(speedups=[2.3, 3.0], baselines={"sdpa": 1.0, "sdpa-cudnn": 0.7})
    claims = make_claims(record, ClaimRequest(kinds=["wall", "graph"], baselines=["sdpa", "sdpa-cudnn"]))
    assert [(claim.metric, claim.factor) for claim in claims] == [("graph", 1.6), ("wall", 1.6)]


def test_the_mean_and_some_cases_can_be_claimed():
    record = build_record(speedups=[1.2, 2.3, 2.31, 2.32])
    (mean,) = make_claims(record, ClaimRequest(scope="geometric mean", cases=["case[123]"]))
    assert (mean.scope, mean.cases) == ("geometric mean", ("case[123]",))
    assert judge(mean, record).status is VerdictStatus.DEMONSTRATED


def test_what_is_given_is_taken():
    record = build_record(speedups=[2.3], gpu=L4, baseline_seconds=2e-4)
    (claim,) = make_claims(record, ClaimRequest(factor=1.25, gpu="NVIDIA L4", id="mine"))
    assert (claim.id, claim.factor, claim.gpu) == ("mine", 1.25, ("NVIDIA L4",))


@pytest.mark.parametrize(
    ("record", "wish", "message"),
    [
        ({"gpu": None}, {}, "timed nothing, so it shows no speed"),
        ({"times": ("wall",)}, {"kinds": ["graph"]}, "time must be one of wall in run"),
        ({}, {"baselines": ["fa3"]}, "the record was not asked for baseline fa3"),
        ({}, {"gpu": "L4"}, "the record is of NVIDIA H200, the claim of L4"),
        ({}, {"cases": ["b9_*"]}, "no graph times of the cases that are claimed"),
        ({}, {"id": "Mine"}, "key id: expected an id of lower-case letters"),
        ({}, {"factor": 0.0}, "key factor: expected greater than 0, got 0.0"),
        ({}, {"kinds": ["graph", "wall"], "id": "a"}, "an id names one claim, expected one --time"),
        ({"rounds": 2}, {}, "has no interval to claim a factor by: 3 of 3 cases are inconclusive"),
        ({"control_bias": 0.2}, {}, "has no interval to claim a factor by: the control failed"),
    ],
)
def test_what_a_run_cannot_show_is_refused_with_the_reason(record, wish, message):
    with pytest.raises(ClaimError) as caught:
        make_claims(build_record(**record), ClaimRequest(**wish))
    assert message in str(caught.value)


OLD = f"# Why these claims.\n{claim_toml(id='old')}# the end, with no newline"


def test_claims_are_added_and_what_was_there_stays(tmp_path):
    (tmp_path / "a.toml").write_text(OLD)
    claim = build_claim(id="new", gpu=["H200", "L4"], versions={"torch": ">=2.9"}, sentence='A "quoted" \\ claim.')
    add_claims(tmp_path / "a.toml", [claim])
    assert (tmp_path / "a.toml").read_text().startswith(OLD)
    old, new = load_claims(tmp_path)
    assert (old.id, new) == ("old", claim)
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


@pytest.mark.parametrize("claims", [["old"], ["new", "new"]])
def test_an_id_that_is_taken_is_refused_and_nothing_written(tmp_path, claims):
    (tmp_path / "other.toml").write_text(OLD)
    with pytest.raises(ClaimError, match=f"there is a claim '{claims[-1]}' in {tmp_path.name}/ already"):
        add_claims(tmp_path / "a.toml", [build_claim(id=name) for name in claims])
    assert not (tmp_path / "a.toml").exists()


def test_a_file_to_which_no_table_can_be_added_is_left_alone(tmp_path):
    keys = ", ".join(line for line in claim_toml(id="old").splitlines()[1:] if line)
    inline = f"claim = [{{{keys}}}]\n"
    (tmp_path / "a.toml").write_text(inline)
    with pytest.raises(ClaimError, match=r"a\.toml: is not valid TOML"):
        add_claims(tmp_path / "a.toml", [build_claim(id="new")])
    assert (tmp_path / "a.toml").read_text() == inline
