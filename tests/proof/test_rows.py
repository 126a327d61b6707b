"""Tests of a record as rows, of numbers as text, and of CSV."""

from __future__ import annotations

import csv
import io

import pytest

from flashmoe_science.proof.judge.judge import check_control, judge
from flashmoe_science.proof.judge.rows import (
    CSV_COLUMNS,
    accuracy_rows,
    arm_rows,
    commit_words,
    csv_text,
    lowest_case,
)
from flashmoe_science.proof.judge.statistics import Interval
from flashmoe_science.proof.records.evidence import TreeState
from flashmoe_science.proof.report.terminal import figure

from .builders import build_record
from .claim_builders import build_claim


def interval_of(row):
    assert row.ratio is not None
    return row.ratio.interval


def test_rows_hold_the_subject_first_and_the_control_last():
    record = build_record(speedups=[2.0, 3.0], baselines={"sdpa": 1.0, "sdpa-cudnn": 1.5})
    rows = arm_rows(record, "graph")
    assert [row.arm.name for row in rows[:4]] == ["flash_attention", "sdpa", "sdpa-cudnn", "sdpa#2"]
    assert [row.case.name for row in rows] == ["case0"] * 4 + ["case1"] * 4


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        ({}, ("1.0e-04", "1.0e-03", "10%")),
        ({"max_error": 2e-3, "element_share": 3.0}, ("2.0e-03", "1.0e-03", "300%")),
        ({"element_share": 3.0, "row_share": 2.0}, ("3x", "1x, of an element", "300%")),
        ({"element_share": 0.5, "rms_share": 1.25}, ("1.25x", "1x, of all elements", "125%")),
    ],
)
def test_a_wrong_case_shows_the_figure_and_the_limit_of_the_test_that_found_it(shares, shown):
    record = build_record(speedups=[2.0])
    arm = next(arm for arm in record.cases[0].arms if arm.role == "subject")
    assert arm.accuracy is not None
    found = arm.accuracy.model_copy(update=shares)
    case = record.cases[0].model_copy(update={"arms": [arm.model_copy(update={"accuracy": found})]})
    (row,) = accuracy_rows(record.model_copy(update={"cases": [case]}))
    assert (row.error, row.allowed, row.said) == shown


def test_the_ratio_of_a_baseline_is_what_the_subject_gains_over_it():
    record = build_record(speedups=[2.0], baselines={"sdpa": 1.0, "sdpa-cudnn": 1.5})
    subject, sdpa, cudnn, control = arm_rows(record, "graph")
    assert subject.ratio is None
    assert interval_of(sdpa).contains(2.0)
    assert interval_of(cudnn).contains(3.0)
    assert interval_of(control).contains(1.0)


def test_the_table_and_the_judge_give_the_same_intervals():
    record = build_record(seed=4)
    assert any(check_control(record, "graph").biases.values()), "the control should widen an interval here"
    verdict = judge(build_claim(metric="graph"), record)
    rows = arm_rows(record, "graph")
    assert [interval_of(row) for row in rows if row.arm.role == "baseline"] == [c.interval for c in verdict.cases]
    ratios = check_control(record, "graph").ratios
    assert {row.case.name: interval_of(row) for row in rows if row.arm.role == "control"} == ratios


def test_too_few_rounds_give_a_ratio_without_an_interval():
    record = build_record(speedups=[2.0], processes=1, rounds=5)
    ratio = arm_rows(record, "graph")[1].ratio
    assert ratio is not None
    assert (ratio.interval, ratio.rounds) == (None, 5)
    assert ratio.estimate == pytest.approx(2.0, rel=0.05)


def test_the_lowest_case_is_that_of_the_lowest_lower_end():
    verdict = judge(build_claim(), build_record(speedups=[2.5, 2.1, 3.0]))
    assert lowest_case(verdict) == verdict.cases[1]
    assert lowest_case(judge(build_claim(), None)) is None


def read_csv(record):
    return list(csv.DictReader(io.StringIO(csv_text([record]))))


def test_csv_has_a_line_for_every_case_arm_and_kind():
    record = build_record(speedups=[2.0, 3.0])
    lines = read_csv(record)
    assert len(lines) == 2 * 3 * 3
    assert set(lines[0]) == set(CSV_COLUMNS)
    line = next(line for line in lines if (line["case"], line["arm"], line["kind"]) == ("case1", "sdpa", "wall"))
    assert float(line["seconds"]) == record.cases[1].arms[0].rates["wall"].seconds
    assert float(line["ratio_low"]) < 3.0 < float(line["ratio_high"])
    assert line["run"] == record.id


def test_a_record_names_the_commit_of_the_subjects_sources():
    record = build_record()
    harness = record.environment.model_copy(update={"commit": "b" * 40, "dirty": True})

    def words(tree):
        subject = record.subject.model_copy(update={"tree": tree})
        return commit_words(record.model_copy(update={"environment": harness, "subject": subject}), letters=4)

    assert words(None) == "bbbb with uncommitted changes"  # ours lie in the harness's tree
    assert words(TreeState(commit="a" * 40, dirty=False)) == "aaaa"
    assert words(TreeState(commit=None, dirty=None)) == "none: no git repository holds the sources"


def test_the_case_that_decides_is_called_the_lowest_only_where_it_is():
    verdict = judge(build_claim(), build_record(speedups=[2.5, 2.6]))
    assert figure(verdict).startswith("lowest of 2 cases 2.5")
    wide = verdict.cases[1].model_copy(update={"interval": Interval(2.6, 2.1, 3.0, 10)})
    assert figure(verdict.model_copy(update={"cases": [verdict.cases[0], wide]})).startswith(
        "lowest interval of 2 cases"
    )
