"""What the controls of runs show of comparisons over whole suites: on made-up times, where the answer is known."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.evidence import Record
from flashmoe_science.proof.statistics import proportion_interval
from flashmoe_science.proof.study.suites import SuiteTally, suite_trials, tally_of

from .builders import build_record

CASES = (2.0,) * 13


def record_of(seed=0, *, times=("graph",), **changes):
    return build_record(speedups=CASES, seed=seed, times=times, **{"spread": 0.003, **changes})


def with_control_slower(record, name, by):
    """Make one case's copy of the baseline slower, though it is the same."""
    table = record.model_dump(mode="json")
    (case,) = (case for case in table["cases"] if case["name"] == name)
    column = case["rounds"][0]["seconds"]["graph"]["sdpa#2"]
    column[:] = [seconds * by for seconds in column]
    return Record.model_validate(table)


def test_equal_copies_over_a_suite_are_rarely_called_unequal():
    tally = tally_of(record_of(seed, process_spread=0.0015) for seed in range(60))
    assert (len(tally.trials), tally.runs) == (60, 60)
    assert tally.counted <= 3
    assert tally.share == proportion_interval(tally.counted, 60)


@pytest.mark.parametrize("by", [1.02, 0.98])
def test_one_wrong_case_makes_the_comparison_of_its_suite_wrong(by):
    record = with_control_slower(record_of(), "case7", by)
    (trial,) = suite_trials(record)
    assert (trial.run, trial.metric, trial.cases, trial.processes) == (record.id, "graph", 13, 3)
    assert trial.wrong == ["case7"]
    assert trial.same == 12
    tally = tally_of([record, record_of(1)])
    assert (tally.counted, tally.same, len(tally.trials)) == (1, 1, 2)


def test_each_kind_of_time_is_a_comparison_of_its_own():
    tally = tally_of([record_of(times=("kernel", "graph", "wall"))])
    assert [trial.metric for trial in tally.trials] == ["kernel", "graph", "wall"]
    assert tally.runs == 1


@pytest.mark.parametrize(
    "changes",
    [{"gpu": None}, {"processes": 1}, {"rounds": 1}, {"times": ("kernel",), "processes": 1}],
    ids=["no-gpu", "one-process", "few-rounds", "kernel-of-one-process"],
)
def test_runs_that_show_nothing_of_it_are_left_out(changes):
    tally = tally_of([record_of(**changes)])
    assert (tally.trials, tally.share, tally.holds) == ([], None, None)


def test_a_case_without_its_control_is_left_out_and_one_case_is_no_suite():
    table = record_of().model_dump(mode="json")
    for case in table["cases"][1:]:
        (control,) = (arm for arm in case["arms"] if arm["role"] == "control")
        control["status"] = "failed"
    assert suite_trials(Record.model_validate(table)) == []
    (control,) = (arm for arm in table["cases"][1]["arms"] if arm["role"] == "control")
    control["status"] = "measured"
    assert [trial.cases for trial in suite_trials(Record.model_validate(table))] == [2]


@pytest.mark.parametrize(
    ("wrong", "of", "holds"), [(0, 19, None), (0, 72, True), (1, 72, None), (2, 2, False), (5, 20, False)]
)
def test_too_few_comparisons_show_nothing_and_many_wrong_ones_that_it_does_not_hold(wrong, of, holds):
    tally = SuiteTally(trials=[], runs=of, counted=wrong, share=proportion_interval(wrong, of), same=0)
    assert tally.holds is holds
