"""Tests of what a reader sees in the terminal: complete, within 100 columns, the same without colour."""

from __future__ import annotations

import io

from rich.console import Console

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.judge.limits import not_seen
from flashmoe_science.proof.records.evidence import Gate, GateStatus
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.markdown import render_markdown
from flashmoe_science.proof.report.page import Judged, build_page
from flashmoe_science.proof.report.terminal import (
    case_table,
    gate_lines,
    last_lines,
    unmeasured_lines,
    verdict_lines,
)
from flashmoe_science.proof.text import as_sentence

from .builders import build_gates, build_record, with_arm, with_case
from .claim_builders import SENTENCE, build_claim


def render(thing, *, width=100, colour=False):
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=colour, color_system="standard" if colour else None).print(thing)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_the_case_table_has_a_row_for_every_case_and_arm():
    record = build_record(speedups=[0.12, 2.3], baselines={"sdpa": 1.0, "sdpa-cudnn": 1.2})
    lines = render(case_table(record)).splitlines()
    assert " ".join(lines[0].split()) == "case and arm kernel graph wall speedup, graph TFLOP/s TB/s"
    assert [line.strip().split("  ")[0] for line in lines[2:12]] == [
        *("case0", "flash_attention", "sdpa", "sdpa-cudnn", "sdpa#2 (control)"),
        *("case1", "flash_attention", "sdpa", "sdpa-cudnn", "sdpa#2 (control)"),
    ]
    assert "0.120x [0.119, 0.121]" in lines[4]
    assert "2.30x [2.27, 2.32]" in lines[9]


def test_each_view_of_times_says_what_they_cannot_show():
    said = (
        "not seen: a slow mode of one process in ten, in 73% of runs with 3 processes; "
        "what a subject changes and undoes within a call"
    )
    record = build_record()
    assert said in " ".join(render(case_table(record)).split())
    page = build_page([Judged(record, [judge(build_claim(), record)])])
    assert as_sentence(said) in render_html(page)
    assert as_sentence(said) in render_markdown(page)
    assert "59% of runs with 5 processes" in not_seen(build_record(processes=5))
    assert not_seen(build_record(gpu=None)) == ""


def test_an_arm_without_times_says_why_and_where():
    record = with_arm(build_record(), 0, "sdpa", status="failed", reason="out of GPU memory", rates={})
    assert "failed" in render(case_table(record)).splitlines()[4]
    assert render(unmeasured_lines(record)) == "sdpa failed: out of GPU memory (case0)"
    assert unmeasured_lines(build_record()) is None


def test_a_run_without_times_shows_what_was_checked():
    record = with_case(build_record(gpu=None), 1, correct=None)
    lines = render(case_table(record)).splitlines()
    assert lines[3].endswith("the same")
    assert lines[2].split() == ["case0", "yes", "1.0e-04", "1.0e-03", "no", "GPU"]
    assert lines[3].startswith("case1  not shown")


def test_a_failed_gate_shows_its_facts_and_its_hint():
    details = [f"fact {number}" for number in range(15)]
    gate = Gate(name="launch", status=GateStatus.FAILED, summary="wrong block", hint="look here", details=details)
    lines = [line.strip() for line in render(gate_lines(gate)).splitlines()]
    assert lines[0].endswith("wrong block")
    assert lines[1:] == [*details[:8], "... and 7 more lines in the record", "hint: look here"]
    assert "fact 14" in render(gate_lines(gate, verbose=True))


def test_the_last_line_of_a_failed_run_does_not_say_all_of_it_again():
    gates = [
        gate.model_copy(update={"summary": "wrong in 1 of 2 cases; a: NaN"} if gate.name == "correct" else {})
        for gate in build_gates("correct")
    ]
    said = render(last_lines(build_record(gates=gates, times=())), width=1000)
    assert " ".join(said.split()) == "gate failed correct: wrong in 1 of 2 cases"


def test_a_verdict_that_is_not_good_says_why():
    refuted = render(
        verdict_lines(judge(build_claim(factor=2.9), build_record(speedups=[2.3])), one_line=True), width=1000
    )
    assert refuted.startswith("refuted")
    assert "below 2.9x" in refuted
    asserted = render(verdict_lines(judge(build_claim(), None), one_line=True), width=1000)
    assert asserted.startswith(f"asserted      {SENTENCE} (seed-graph) | there is no evidence: no record shows")
