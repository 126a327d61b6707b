"""Tests of runs beside one another: the same problems, and nothing computed from two runs together."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.compare.side_by_side import side_by_side
from flashmoe_science.proof.judge.rows import arm_rows

from .builders import L4, build_record, with_case


def test_runs_share_problems_for_every_kind_of_time_and_baseline():
    runs = [build_record(speedups=[2.0], seed=1), build_record(speedups=[3.0], seed=2, day=1)]
    found = side_by_side(runs)
    assert [(each.kind, each.baseline) for each in found] == [("kernel", "sdpa"), ("graph", "sdpa"), ("wall", "sdpa")]
    (case,) = found[1].cases
    expected = [next(row for row in arm_rows(run, "graph") if row.arm.name == "sdpa").ratio for run in runs]
    assert [row.ratio for row in case.rows if row] == expected
    assert case.seconds[0] == pytest.approx(10e-6, rel=0.02)


def test_a_problem_is_the_same_whatever_its_case_is_called():
    one, two = build_record(speedups=[2.0]), build_record(speedups=[2.0], day=1)
    assert side_by_side([one, with_case(two, 0, name="another name")])
    other = with_case(two, 0, problem={**two.cases[0].problem, "heads": 8})
    assert side_by_side([one, other]) == []


def test_what_absolute_times_depend_on_is_named():
    assert side_by_side([build_record(), build_record(day=1)])[0].differing == []
    assert side_by_side([build_record(), build_record(gpu=L4)])[0].differing == ["GPU"]
    assert side_by_side([build_record(), build_record(rounds=11)])[0].differing == ["protocol"]
