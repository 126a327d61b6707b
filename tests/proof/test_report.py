"""Tests of what a reader sees in the terminal: complete, within 100 columns, the same without colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from flashmoe_science.proof.evidence import Gate, GateStatus, Launch
from flashmoe_science.proof.judge import judge
from flashmoe_science.proof.report import (
    case_table,
    count_line,
    gate_lines,
    head_lines,
    last_lines,
    launch_table,
    run_table,
    unmeasured_lines,
    verdict_lines,
)
from flashmoe_science.proof.store import summarize

from .builders import build_gates, build_record
from .claim_builders import SENTENCE, build_claim

LONGEST_NAME = "b16_h16_s1024_d128_bf16_causal"  # of the suites that are packaged


def render(thing, *, width=100, colour=False):
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=colour, color_system="standard" if colour else None).print(thing)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def with_case(record, number, **changes):
    cases = list(record.cases)
    cases[number] = cases[number].model_copy(update=changes)
    return record.model_copy(update={"cases": cases})


def with_arm(record, number, name, **changes):
    arms = [arm.model_copy(update=changes) if arm.name == name else arm for arm in record.cases[number].arms]
    return with_case(record, number, arms=arms)


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


def test_the_case_table_fits_100_columns_with_the_longest_names():
    record = with_case(build_record(speedups=[0.0152]), 0, name=LONGEST_NAME)
    text = render(case_table(record))
    assert LONGEST_NAME in text
    assert max(map(len, render(case_table(record, "kernel"), width=200).splitlines()[:6])) <= 100


def test_another_kind_of_time_can_be_asked_for():
    assert "speedup, wall" in render(case_table(build_record(), "wall"))


def test_the_legend_says_what_is_in_cache():
    said = "kernel: L2 was flushed before each call; graph and wall: call after call over rotating inputs"
    assert said in render(case_table(build_record(speedups=[2.0])), width=200)
    assert "flushed" not in render(case_table(build_record(speedups=[2.0], times=("graph",))), width=200)


def test_kinds_that_were_not_taken_have_no_column():
    header = render(case_table(build_record(times=("wall",)))).splitlines()[0]
    assert header.split()[3:6] == ["wall", "speedup,", "wall"]


def test_an_arm_without_times_says_why_and_where():
    record = with_arm(build_record(), 0, "sdpa", status="failed", reason="out of GPU memory", rates={})
    assert "failed" in render(case_table(record)).splitlines()[4]
    assert render(unmeasured_lines(record)) == "sdpa failed: out of GPU memory (case0)"
    assert unmeasured_lines(build_record()) is None


def test_throttled_rounds_are_said():
    record = build_record()
    rounds = [r.model_copy(update={"throttle": ["SwPowerCap", *r.throttle[1:]]}) for r in record.cases[0].rounds]
    assert "throttled in 2 of 180 rounds: SwPowerCap" in render(case_table(with_case(record, 0, rounds=rounds)))


def test_a_run_without_times_shows_what_was_checked():
    record = with_case(build_record(gpu=None), 1, correct=None)
    lines = render(case_table(record)).splitlines()
    assert lines[3].endswith("the same")
    assert lines[2].split() == ["case0", "yes", "1.0e-04", "1.0e-03", "no", "GPU"]
    assert lines[3].startswith("case1  not shown")


def test_a_run_that_checked_nothing_says_so_once():
    record = build_record(gpu=None)
    for number in range(3):
        record = with_case(record, number, correct=None)
    assert render(case_table(record)) == "none of 3 cases was checked: no GPU"


def test_a_passed_gate_is_one_line():
    gate = Gate(name="build", status=GateStatus.PASSED, summary="48 kernels for 6 GPUs", seconds=12.34, details=["a"])
    assert render(gate_lines(gate)) == "build    passed               12.3 s  48 kernels for 6 GPUs"
    assert render(gate_lines(gate, verbose=True)).splitlines()[1].strip() == "a"


def test_a_failed_gate_shows_its_facts_and_its_hint():
    details = [f"fact {number}" for number in range(15)]
    gate = Gate(name="launch", status=GateStatus.FAILED, summary="wrong block", hint="look here", details=details)
    lines = [line.strip() for line in render(gate_lines(gate)).splitlines()]
    assert lines[0].endswith("wrong block")
    assert lines[1:] == [*details[:8], "... and 7 more lines in the record", "hint: look here"]
    assert "fact 14" in render(gate_lines(gate, verbose=True))


def test_a_fact_that_the_summary_says_is_not_repeated():
    details = ["case0: wrong", "case1: wrong"]
    gate = Gate(name="correct", status=GateStatus.FAILED, summary="wrong in 2 cases; case0: wrong", details=details)
    assert render(gate_lines(gate)).count("case0: wrong") == 1
    assert render(gate_lines(gate)).count("case1: wrong") == 1


def test_a_hint_that_was_said_is_not_repeated():
    gate = Gate(name="quick", status=GateStatus.NOT_POSSIBLE, summary="no GPU", hint="look here")
    assert "hint: look here" in render(gate_lines(gate))
    assert "hint" not in render(gate_lines(gate, said={"look here"}))


def test_a_long_summary_stays_in_its_column():
    gate = Gate(name="launch", status=GateStatus.FAILED, summary="word " * 40)
    lines = render(gate_lines(gate)).splitlines()
    assert len(lines) > 2
    assert all(line.startswith(" " * 38) for line in lines[1:])


def test_the_head_says_what_ran_where():
    text = render(head_lines(build_record(complete=False)))
    for part in (
        "NVIDIA H200, driver 580.00",
        "torch 2.11.0",
        "against sdpa",
        "incomplete: interrupted",
        "000000000000",
    ):
        assert part in text


def test_a_verdict_is_one_line_in_a_pipe():
    verdict = judge(build_claim(), build_record(speedups=[2.3, 3.0]))
    line = render(verdict_lines(verdict, one_line=True), width=1000)
    assert line == (
        f"demonstrated  {SENTENCE} | lowest of 2 cases 2.30x [2.29, 2.31]; 20260101T000000Z-seed-flash_attention-000000"
    )


def test_a_verdict_that_is_not_good_says_why():
    refuted = render(
        verdict_lines(judge(build_claim(factor=2.9), build_record(speedups=[2.3])), one_line=True), width=1000
    )
    assert refuted.startswith("refuted")
    assert "below 2.9x" in refuted
    asserted = render(verdict_lines(judge(build_claim(), None), one_line=True), width=1000)
    assert asserted.startswith(f"asserted      {SENTENCE} | there is no evidence: no record shows")


def test_the_figure_of_a_mean_is_the_mean():
    claim = build_claim(scope="geometric mean")
    text = render(verdict_lines(judge(claim, build_record(speedups=[2.9, 3.0, 3.1]))))
    assert "geometric mean of 3 cases 3.00x" in text


def test_why_gives_the_reason_of_a_good_verdict_too():
    verdict = judge(build_claim(), build_record(speedups=[2.3]))
    assert verdict.reason not in render(verdict_lines(verdict, one_line=True), width=1000)
    assert verdict.reason in render(verdict_lines(verdict, one_line=True, why=True), width=1000)


def test_a_good_verdict_says_what_it_should_not_be_read_without():
    verdict = judge(build_claim(), build_record(speedups=[2.3, 3.0]), notes=["sources changed since the run: a.py"])
    line = render(verdict_lines(verdict, one_line=True), width=1000)
    assert "demonstrated" in line
    assert line.rstrip().endswith("sources changed since the run: a.py")


def test_a_note_that_was_said_is_not_listed_again():
    note = "sources changed since the run: a.py"
    verdict = judge(build_claim(), build_record(speedups=[2.3, 3.0]), notes=[note])
    for why in (False, True):
        text = render(verdict_lines(verdict, why=why, said={note}), width=400)
        assert "sources changed since the run, as above" in text
        assert "a.py" not in text


def test_the_count_of_verdicts():
    good, bad, open_ = (judge(build_claim(factor=f), build_record(speedups=[2.0])) for f in (1.5, 3.0, 2.001))
    assert count_line([good, bad, good, open_]) == "4 claims: 2 demonstrated, 1 refuted, 1 inconclusive"
    assert count_line([good]) == "1 claim: 1 demonstrated"
    assert count_line([]) == "0 claims"


def test_the_last_lines_of_a_run_without_a_verdict():
    assert render(last_lines(build_record(gates=build_gates("launch")))) == "gate failed   launch: made up: failed"


def test_the_kernels_that_ran():
    launch = Launch(
        name="attend", grid=(16, 2, 1), block=(384, 1, 1), registers=168, shared_memory_bytes=163840, count=2
    )
    record = with_arm(build_record(speedups=[2.0]), 0, "flash_attention", launches=[launch])
    lines = render(launch_table(record)).splitlines()
    assert lines[3].split() == ["flash_attention", "2", "x", "attend", "16,2,1", "384,1,1", "168", "160.0", "KiB"]


def test_a_long_kernel_name_is_cut():
    launch = Launch(name="z" * 900, grid=(1, 1, 1), block=(1, 1, 1), registers=1, shared_memory_bytes=0)
    text = render(launch_table(with_arm(build_record(speedups=[2.0]), 0, "flash_attention", launches=[launch])))
    assert (text.count("z"), text.count("...")) == (117, 1)


def test_the_list_of_runs():
    failed = build_record(gates=build_gates("launch"), complete=False)
    lines = render(run_table([summarize(build_record(gpu=None)), summarize(failed)])).splitlines()
    assert " ".join(lines[2].split()[1:]) == "none 4 of 7 gates passed 0 of 3 store"
    assert "launch failed, incomplete" in lines[3]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("thing", [case_table, head_lines, lambda record: gate_lines(record.gates[0]), launch_table])
def test_colour_adds_nothing_but_colour(thing):
    record = build_record(speedups=[0.5, 2.0])
    coloured = render(thing(record), colour=True)
    assert "\033[" in coloured
    without = Text.from_ansi(coloured).plain
    assert "\n".join(line.rstrip() for line in without.splitlines()) == render(thing(record))
