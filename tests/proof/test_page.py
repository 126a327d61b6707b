"""Tests of what a page says, whatever form it gets: verdict first, every arm, nothing where nothing was measured."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.records.evidence import Launch
from flashmoe_science.proof.report.page import Judged, build_page, launch_groups

from .builders import build_record
from .claim_builders import build_claim
from .test_report_terminal import with_arm, with_case


def run_of(record, *verdicts, kind=None):
    return build_page([Judged(record, list(verdicts))], kind).runs[0]


def test_one_verdict_is_the_headline_and_several_are_counted():
    record = build_record(speedups=[2.3])
    holds, refuted = judge(build_claim(), record), judge(build_claim(factor=4.0), record)
    one = run_of(record, holds)
    assert (one.headline.word, one.headline.sentence) == ("demonstrated", build_claim().sentence)
    several = run_of(record, holds, refuted)
    assert several.headline.sentence == "2 claims: 1 demonstrated, 1 refuted"
    assert several.headline.kind == "refuted"
    assert [verdict.word for verdict in several.verdicts] == ["demonstrated", "refuted"]


def test_a_run_without_times_has_gates_and_accuracy_and_no_figures():
    part = run_of(build_record(gpu=None))
    assert (part.title, part.headline.word) == ("flash_attention on a machine with no GPU", "not timed")
    assert (part.speeds, part.growth, part.roofline, part.sensors, part.control) == ([], [], None, None, None)
    assert [name for name, _ in part.sections] == [
        *("gates", "launches", "memory", "accuracy", "environment", "raw"),
    ]


def test_speeds_have_a_row_for_every_case_and_baseline_in_the_kind_that_is_shown_first():
    record = build_record(speedups=[0.5, 2.0], baselines={"sdpa": 1.0, "fa3": 0.5})
    part = run_of(record, kind="wall")
    assert [speeds.kind for speeds in part.speeds] == ["wall", "kernel", "graph"]
    rows = part.speeds[0].rows
    assert [(row.case, row.baseline, row.side) for row in rows] == [
        ("case0", "sdpa", "slower"),
        ("case0", "fa3", "slower"),
        ("case1", "sdpa", "faster"),
        ("case1", "fa3", "even"),
    ]
    assert all(row.bar for row in rows)
    assert rows[2].said.startswith("2.0")


def test_an_arm_that_was_not_measured_is_named_with_its_reason():
    record = with_arm(build_record(speedups=[2.0, 2.0]), 1, "sdpa", status="failed", reason="out of memory", rates={})
    case = record.cases[1]
    rounds = [
        r.model_copy(
            update={"seconds": {k: {a: s for a, s in arms.items() if a != "sdpa"} for k, arms in r.seconds.items()}}
        )
        for r in case.rounds
    ]
    part = run_of(with_case(record, 1, rounds=rounds))
    assert [(each.arm, each.reason, each.where) for each in part.unmeasured] == [("sdpa", "out of memory", "case1")]
    row = part.speeds[0].rows[1]
    assert (row.said, row.bar, row.side, row.theirs) == ("failed", None, "open", "")


def sized(record, sizes):
    """Return the record with these positions in its cases, and the work that belongs to them."""
    for number, size in enumerate(sizes):
        case = record.cases[number]
        work = case.work.model_copy(update={"flops": 4096.0 * size * size, "bytes": 8192.0 * size, "peak": "fp16"})
        record = with_case(record, number, problem={**case.problem, "seqlen_q": size}, work=work)
    return record


def test_time_and_share_of_the_roofline_stand_against_the_size_that_varies():
    record = sized(build_record(speedups=[2.0] * 3), [512, 1024, 2048])
    (figure,) = run_of(record).growth
    assert [plot.y_name for plot in figure.plots] == ["graph time", "share of the roofline"]
    assert [tick.text for tick in figure.plots[0].x_ticks] == ["512", "1k", "2k"]
    assert list(figure.table.columns) == ["seqlen_q", "arm", "graph time", "share of the roofline"]
    assert [row[:2] for row in figure.table.rows[:2]] == [["512", "flash_attention"], ["512", "sdpa"]]
    case = record.cases[2]
    seconds = next(arm.rates["graph"].seconds for arm in case.arms if arm.role == "subject")
    limit = max(case.work.flops / 989e12, case.work.bytes / 4.8e12)
    assert float(figure.table.rows[4][3].removesuffix(" %")) == pytest.approx(limit / seconds * 100, rel=5e-3)


def test_several_runs_have_an_index_and_stand_side_by_side():
    runs = [build_record(), build_record(suite="other", day=1), build_record(gpu=None, day=2)]
    page = build_page([Judged(run, []) for run in runs])
    assert page.index is not None
    assert [row[-1] for row in page.index.rows] == [run.id for run in runs]
    title, table = page.beside[1]
    assert title == "graph time against sdpa"
    assert table.columns == ["case", "speedup, run 1", "speedup, run 2", *(f"flash_attention, run {n}" for n in (1, 2))]
    assert "differ" not in table.caption
    assert len({run.anchor for run in page.runs}) == 3


def test_memory_is_the_subjects_bytes_over_each_baselines():
    record = build_record(speedups=[2.0], baselines={"sdpa": 1.0, "fa3": 1.0})
    for arm, size in (("flash_attention", 512), ("sdpa", 2048), ("fa3", 0)):
        record = with_arm(record, 0, arm, peak_bytes=size)
    memory = build_page([Judged(record, [])]).runs[0].memory
    assert memory is not None
    assert memory.rows == [["case0", "512 B", "2.0 KiB", "0.25x", "0 B", ""]]


def test_a_kernel_stands_once_with_the_grids_of_its_cases():
    record = build_record(speedups=[2.0, 2.0, 2.0])
    kernel = record.cases[0].arms[0].launches[0]
    record = with_arm(record, 1, "flash_attention", launches=[kernel.model_copy(update={"grid": (7, 1, 1)})])
    record = with_arm(record, 2, "flash_attention", launches=[kernel.model_copy(update={"registers": 255})])
    ours = [group for group in launch_groups(record) if group.arm.name == "flash_attention"]
    assert [group.grids for group in ours] == [{"case0": (16, 1, 1), "case1": (7, 1, 1)}, {"case2": (16, 1, 1)}]
    assert [group.arm.role for group in launch_groups(record)] == ["subject", "subject", "baseline"]


def test_two_launches_of_one_call_stay_two():
    record = build_record(speedups=[2.0])
    kernel = Launch(name="k", grid=(1, 1, 1), block=(32, 1, 1), registers=8, shared_memory_bytes=0)
    record = with_arm(record, 0, "flash_attention", launches=[kernel, kernel])
    assert [g.launch.name for g in launch_groups(record) if g.arm.role == "subject"] == ["k", "k"]
