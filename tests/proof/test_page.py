"""Tests of what a page says, whatever form it gets: verdict first, every arm, nothing where nothing was measured."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.records.evidence import Launch
from flashmoe_science.proof.report.page import Judged, build_page

from .builders import build_record, with_arm, with_case
from .claim_builders import build_claim


def run_of(record, *verdicts, kind=None):
    return build_page([Judged(record, list(verdicts))], kind).runs[0]


def blocks_of(record, section, kind="table", metric=None):
    """Return the blocks of one kind in a section of the page about one run."""
    (found,) = [each for each in run_of(record, kind=metric).sections if each.id == section]
    return [block for block in found.blocks if block.kind == kind]


def test_one_verdict_is_the_headline_and_several_are_counted():
    record = build_record(speedups=[2.3])
    holds, refuted = judge(build_claim(), record), judge(build_claim(factor=4.0), record)
    one = run_of(record, holds)
    assert (one.headline.word, one.headline.sentence) == ("demonstrated", build_claim().sentence)
    several = run_of(record, holds, refuted)
    assert several.headline.sentence == "2 claims: 1 demonstrated, 1 refuted"
    assert several.headline.kind == "refuted"
    assert [verdict.word for verdict in several.sections[0].blocks] == ["demonstrated", "refuted"]


def test_a_run_without_times_has_gates_and_accuracy_and_no_figures():
    part = run_of(build_record(gpu=None))
    assert (part.title, part.headline.word) == ("flash_attention on a machine with no GPU", "not timed")
    assert [section.id for section in part.sections] == ["gates", "launches", "memory", "accuracy", "environment"]


def test_speeds_have_a_row_for_every_case_and_baseline_in_the_kind_that_is_shown_first():
    record = build_record(speedups=[0.5, 2.0], baselines={"sdpa": 1.0, "fa3": 0.5})
    first, *others, _ = blocks_of(record, "speed", metric="wall")
    assert first.caption.startswith("wall time")
    assert [table.fold for table in others] == ["kernel time", "graph time"]
    sides = [bar.partition('class="bar ')[2].partition('"')[0] for bar in first.bars]
    assert [(*row[:2], side) for row, side in zip(first.rows, sides, strict=True)] == [
        ("case0", "sdpa", "slower"),
        ("case0", "fa3", "slower"),
        ("case1", "sdpa", "faster"),
        ("case1", "fa3", "even"),
    ]
    assert first.rows[2][-1].startswith("2.0")


def test_an_arm_that_was_not_measured_is_named_with_its_reason():
    record = with_arm(build_record(speedups=[2.0, 2.0]), 1, "sdpa", status="failed", reason="out of memory", rates={})
    case = record.cases[1]
    rounds = [
        r.model_copy(
            update={"seconds": {k: {a: s for a, s in arms.items() if a != "sdpa"} for k, arms in r.seconds.items()}}
        )
        for r in case.rounds
    ]
    record = with_case(record, 1, rounds=rounds)
    notes = [(note.word, note.text) for note in blocks_of(record, "speed", "note")]
    assert ("sdpa failed", "out of memory (case1)") in notes
    table = blocks_of(record, "speed")[0]
    assert table.rows[1][3:] == ("", "failed")
    assert 'class="bar open"' in table.bars[1]
    assert "circle" not in table.bars[1]


def sized(record, sizes):
    """Return the record with these positions in its cases, and the work that belongs to them."""
    for number, size in enumerate(sizes):
        case = record.cases[number]
        work = case.work.model_copy(update={"flops": 4096.0 * size * size, "bytes": 8192.0 * size, "peak": "fp16"})
        record = with_case(record, number, problem={**case.problem, "seqlen_q": size}, work=work)
    return record


def test_every_arm_has_its_share_of_the_roofline():
    record = sized(build_record(speedups=[2.0] * 3), [512, 1024, 2048])
    (table,) = blocks_of(record, "roofline")
    assert [row[:2] for row in table.rows[:2]] == [("case0", "flash_attention"), ("case0", "sdpa")]
    case = record.cases[2]
    seconds = next(arm.rates["graph"].seconds for arm in case.arms if arm.role == "subject")
    limit = max(case.work.flops / 989e12, case.work.bytes / 4.8e12)
    assert float(table.rows[4][-1].removesuffix(" %")) == pytest.approx(limit / seconds * 100, rel=5e-3)


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
    (memory,) = blocks_of(record, "memory")
    assert memory.rows == [["case0", "512 B", "2.0 KiB", "0.25x", "0 B", ""]]


def test_a_kernel_stands_once_for_each_configuration_with_its_cases_and_grids():
    record = build_record(speedups=[2.0, 2.0, 2.0])
    kernel = record.cases[0].arms[0].launches[0]
    record = with_arm(record, 1, "flash_attention", launches=[kernel.model_copy(update={"grid": (7, 1, 1)})])
    record = with_arm(record, 2, "flash_attention", launches=[kernel.model_copy(update={"registers": 255})])
    (table,) = blocks_of(record, "launches")
    assert [(row[0], row[2], row[4], row[6]) for row in table.rows] == [
        ("flash_attention", "case0, case1", "2 grids", str(kernel.registers)),
        ("flash_attention", "case2", "16 x 1 x 1", "255"),
        ("sdpa", "every case", "16 x 1 x 1", str(kernel.registers)),
    ]


def test_two_launches_of_one_call_stay_two():
    record = build_record(speedups=[2.0])
    kernel = Launch(name="k", grid=(1, 1, 1), block=(32, 1, 1), registers=8, shared_memory_bytes=0)
    record = with_arm(record, 0, "flash_attention", launches=[kernel, kernel])
    assert [row[1] for row in blocks_of(record, "launches")[0].rows if row[0] == "flash_attention"] == ["k", "k"]


def test_sensors_are_summed_up_by_process_without_what_was_not_read():
    record = build_record(speedups=[2.0, 2.0], processes=2, rounds=1)
    (table,) = blocks_of(record, "sensors")
    assert [row[:3] for row in table.rows] == [
        (process, times, "2") for process in ("0", "1") for times in ("graph, wall", "kernel")
    ]
    record = build_record(speedups=[2.0], processes=1, rounds=3, times=("graph",))
    read = (
        record.cases[0]
        .rounds[0]
        .model_copy(update={"sm_clock_mhz": [1500, None, 1980], "throttle": ["", "sw_power_cap", None]})
    )
    (table,) = blocks_of(with_case(record, 0, rounds=[read]), "sensors")
    (row,) = table.rows
    assert row[:4] == ("0", "graph", "3", "1500 / 1740 / 1980")
    assert row[-2:] == ("1", "sw_power_cap")
