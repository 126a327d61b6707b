"""Gates quick and bench: expectations, impossible times, pooling, crashes. No time in here was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashmoe_science.errors import SuiteError
from flashmoe_science.proof.gates import chain
from flashmoe_science.proof.gates.speed import pool_rounds
from flashmoe_science.proof.records.documents import read_record, write_record
from flashmoe_science.proof.records.evidence import CaseRecord, Rounds, Settings, Work, rates_of

from .chain import (
    FEW,
    GPU,
    HONEST,
    SHORT,
    FakeGpu,
    Recorder,
    environment_with,
    gate_of,
    launch,
    request_of,
    run_chain,
    statuses,
    until,
)
from .fake_operator import Problem

LONGER = replace(SHORT, seqlen_q=66)


def prove(*problems, recorder=None, **changes):
    return run_chain(request_of(HONEST, *problems, **{"settings": FEW, **changes}), recorder)


def test_a_case_that_our_kernel_refuses_is_left_out_and_fails_no_gate(gpu):
    record = run_chain(request_of(replace(HONEST, builtin=True), SHORT, replace(SHORT, batch=7), settings=FEW))
    assert statuses(record)["bench"] == "passed"
    assert gate_of(record, "bench").summary.startswith("1 case, 6 rounds each")
    assert gate_of(record, "bench").summary.endswith("; 1 not served")
    assert [case.arms[0].status for case in record.cases] == ["measured", "refused"]
    assert gate_of(record, "launch").summary.endswith("; 1 not served")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"grid": (7, 1, 1)}, ""),  # it may follow the values
        ({"name": "another"}, "kernel another was timed, and gate launch saw none"),
        ({"registers": 250}, "attend_kernel was timed as another binary: 250 registers and"),
    ],
)
def test_kernels_that_are_timed_are_compared_with_those_of_gate_launch(gpu, changes, words):
    def change(_payload, case):
        case["arms"][0]["launches"] = [launch(**changes)]
        return case

    gpu.change = change
    record = prove()
    found = [each for each in gate_of(record, "bench").details if "timed" in each]
    assert len(found) == bool(words)
    assert words in "".join(found)
    assert [each.registers for each in record.cases[0].arms[0].launches] == [64]


@pytest.mark.parametrize("truth_s", [0.4, 0.6])
def test_one_process_of_gate_bench_is_drawn_to_work_out_what_takes_long(gpu, truth_s):
    gpu.truth_s = truth_s
    drawn = []
    for seed in range(20):
        gpu.calls.clear()
        gpu.replies.clear()
        record = prove(settings=Settings(processes=5, rounds=3, times=["wall"], seed=seed))
        payloads = [payload for name, payload in gpu.calls if name in ("measure", "measure_alone")]
        names = [record.cases[0].name] if truth_s > 0.5 else []
        assert [payload["slow"] for payload in payloads] == [names] * 7  # quick, five processes, and baselines alone
        told = [reply({"drawn": record.cases[0].name})["drawn"] for reply in gpu.replies]
        assert sum(told[1:6]) == 1
        drawn.append(told[1:6].index(True))
        said = "exact answers take long in 1 case: bench compares there after the rounds of one process"
        assert any(line.startswith(said) for line in gate_of(record, "bench").details) == bool(names)
    assert len(set(drawn)) > 2


# Gate quick.


@pytest.mark.parametrize(
    ("expected", "status"),
    [(None, "passed"), (0.99, "failed"), (1.01, "passed"), (2.0, "passed"), (3.99, "passed"), (4.01, "failed")],
)
def test_far_from_what_was_expected_fails_gate_quick(gpu, expected, status):
    record = prove(expect=expected)
    gate = gate_of(record, "quick")
    assert gate.status.value == status
    assert "about 2.00x of sdpa in graph time" in gate.summary
    assert gate.details == ["b1_h3_s65_d64_fp16: 2.00x"]
    assert record.subject.expected_speedup == expected
    assert statuses(record)["bench"] == ("not reached" if status == "failed" else "passed")


def test_subject_brings_its_own_expectation_and_expect_overrides_it(gpu):
    subject = replace(HONEST, expected_speedup=17.0)
    failed = run_chain(request_of(subject, settings=FEW))
    assert statuses(failed) == until("quick")
    assert gate_of(failed, "quick").summary.startswith("17.00x was expected, and it is about 2.00x")
    assert statuses(run_chain(request_of(subject, settings=FEW, expect=2.0)))["quick"] == "passed"


def test_expectation_is_about_the_geometric_mean(gpu):
    def slow_second(payload, case):
        if case["name"] == "b1_h3_s66_d64_fp16":
            for arms in case["rounds"]["seconds"].values():
                arms["fake_attention"] = [8e-3] * len(arms["fake_attention"])
        return case

    gpu.change = slow_second
    gate = gate_of(prove(SHORT, LONGER, expect=0.7), "quick")
    assert gate.status.value == "passed"
    assert "about 0.71x of sdpa" in gate.summary
    assert gate.details == ["b1_h3_s65_d64_fp16: 2.00x", "b1_h3_s66_d64_fp16: 0.25x"]


def test_quick_takes_five_rounds_in_one_process_and_leaves_no_times(gpu):
    record = prove(expect=9.0)
    settings = gpu.calls[-1][1]["settings"]
    assert (settings["rounds"], settings["processes"], settings["times"]) == (5, 1, ["graph"])
    assert gpu.calls[-1][1]["thorough"] is False
    assert record.cases[0].rounds == []


@pytest.mark.parametrize("kind", ["graph", "wall", "kernel"])
def test_bench_has_no_values_that_quick_has_had(gpu, kind):
    prove(settings=Settings(processes=3, rounds=10, times=[kind], seed=5))
    drawn = [reply({"seed": "values"})["seed"] for reply in gpu.replies for _ in range(9)]
    assert len(set(drawn)) == len(drawn)


def test_two_cases_of_one_shape_are_refused(gpu):
    request = request_of(HONEST, SHORT, LONGER, settings=FEW)
    again = replace(request.suite.cases[0], name="again")
    suite = replace(request.suite, cases=(*request.suite.cases, again))
    with pytest.raises(SuiteError, match=r": again has the shape of b1_"):
        run_chain(replace(request, suite=suite))


def test_quick_takes_some_cases_of_many_and_bench_all(gpu):
    many = [Problem(1, 3, length, 64) for length in range(60, 72)]
    record = prove(*many, settings=FEW)
    (quick, *bench) = [payload for name, payload in gpu.calls if name == "measure"]
    names = [case.name for case in record.cases]
    taken = [case["name"] for case in quick["cases"]]
    assert len(taken) == 8
    assert taken == [name for name in names if name in taken]
    assert all([case["name"] for case in payload["cases"]] == names for payload in bench)
    assert "(geometric mean of 8 of 12 cases)" in gate_of(record, "quick").summary


def test_an_impossible_time_of_a_case_that_quick_has_not_drawn_fails_gate_bench(gpu):
    many = [Problem(1, 3, length, 64) for length in range(60, 71)] + [Problem(1, 16, 8192, 64)]

    def change(payload, case):
        if "s8192" in case["name"]:
            for seconds in case["rounds"]["seconds"].values():
                seconds["fake_attention"] = [1e-6 for _ in seconds["fake_attention"]]
        return case

    gpu.change = change
    stopped = set()
    for seed in range(6):
        settings = Settings(processes=3, rounds=3, times=["graph"], seed=seed)
        gates = prove(*many, settings=settings).gates
        failed = next(gate for gate in gates if gate.status.value == "failed")
        stopped.add(failed.name)
        assert "s8192" in failed.summary
    assert stopped == {"quick", "bench"}


def test_impossible_time_fails_gate_quick(gpu):
    gpu.seconds = {"fake_attention": 1e-6, "sdpa": 2e-6}
    problem = Problem(1, 16, 8192, 64)  # 2.7e11 operations: 253 us at 1.07e15 a second
    record = prove(problem)
    assert statuses(record) == until("quick")
    summary = gate_of(record, "quick").summary
    assert summary.startswith("b1_h16_s8192_d64_fp16: 1.00 us a call (graph time); NVIDIA H200 needs at least 25")


@pytest.mark.parametrize("baselines", [["sdpa"], []])
def test_a_gpu_with_no_known_limits_leaves_times_unchecked_and_says_so(gpu, monkeypatch, baselines):
    unknown = GPU.model_copy(update={"name": "NVIDIA Unknown", "arch": 103})
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(unknown))
    summary = gate_of(prove(baselines=baselines), "quick").summary
    assert "impossible times were not checked in 1 of 1 case: NVIDIA Unknown has no known limits" in summary
    assert "no time is impossible" not in summary


# Gate bench.


def test_rounds_of_all_processes_are_pooled_by_mode(gpu, tmp_path):
    recorder = Recorder()
    record = prove(SHORT, LONGER, recorder=recorder)
    assert set(statuses(record).values()) == {"passed"}
    assert record.complete
    asked = [(p["process"], p["times"]) for name, p in gpu.calls[-4:] if name == "measure"]
    assert asked == [(0, ["graph", "wall"]), (0, ["kernel"]), (1, ["graph", "wall"]), (1, ["kernel"])]
    assert all(p["thorough"] for _, p in gpu.calls[-4:])
    together, alone = record.cases[0].rounds
    assert together.process == alone.process == [0, 0, 0, 1, 1, 1]
    assert set(together.seconds) == {"graph", "wall"}
    assert together.seconds["graph"]["sdpa"] == [2e-3] * 6
    arm = record.cases[0].arms[0]
    assert arm.status == "measured"
    assert set(arm.rates) == {"graph", "wall", "kernel"}
    assert arm.rates["kernel"].tokens_per_second == pytest.approx(65 / 1e-3)
    assert arm.launches[0].name == "attend_kernel"
    assert arm.accuracy is not None
    assert arm.accuracy.max_error == 1e-4
    assert [a.role for a in record.cases[0].arms] == ["subject", "baseline", "control"]
    assert record.cases[0].input_sets == 4
    assert recorder.steps[-1] == (8, 8, "b1_h3_s66_d64_fp16 (kernel time)")
    assert gate_of(record, "bench").gpu_seconds == 20.0
    write_record(record, tmp_path / "r.json")
    assert read_record(tmp_path / "r.json") == record


def test_record_is_saved_after_every_measured_case(gpu):
    recorder = Recorder()
    prove(SHORT, LONGER, recorder=recorder)
    measured = [[len(case.rounds) for case in record.cases] for record in recorder.saved]
    assert [1, 0] in measured
    assert [2, 1] in measured
    assert not any(record.complete for record in recorder.saved[:-1])


def test_crash_in_the_middle_keeps_finished_cases_marked_incomplete(gpu):
    def crash(payload, index):
        at = payload["process"] == 1 and payload["times"] == ["graph", "wall"] and index == 1
        return "GPU out of memory: OutOfMemoryError: CUDA out of memory" if at and payload["thorough"] else ""

    gpu.crash = crash
    record = prove(SHORT, LONGER)
    gate = gate_of(record, "bench")
    assert statuses(record) == until("bench")
    assert gate.summary.startswith("process 1 (graph and wall time): GPU out of memory")
    assert gate.details == ["last words"]
    assert not record.complete
    assert record.incomplete_reason == f"bench: {gate.summary}"
    assert [len(case.rounds[0].process) for case in record.cases] == [6, 3]


def test_arm_that_fails_in_one_process_stays_failed(gpu):
    def fail_once(payload, case):
        if payload["process"] == 0 and payload["times"] == ["kernel"]:
            case["arms"][0] |= {"status": "failed", "reason": "its work is not ordered with the stream"}
            case = {**case, "rounds": None}
        return case

    gpu.change = fail_once
    record = prove()
    assert statuses(record) == until("bench")
    assert gate_of(record, "bench").summary == "b1_h3_s65_d64_fp16: process 0: its work is not ordered with the stream"
    assert record.cases[0].arms[0].status == "failed"
    assert record.complete


def test_no_time_without_correctness(gpu, monkeypatch):
    def wrong(payload, on_event):
        result = FakeGpu._check_correct(gpu, payload, lambda event: None)
        case = {**result.data["cases"][0], "status": "failed", "reason": "the first call: NaN"}
        on_event({"event": "case", "case": case})
        return replace(result, data={"cases": [case], "seed": 1})

    monkeypatch.setattr(gpu, "_check_correct", wrong)
    record = prove()
    assert statuses(record) == until("correct")
    assert [name for name, _ in gpu.calls] == ["capture_launches", "check_correct"]
    assert record.cases[0].rounds == []
    assert gate_of(record, "correct").gpu_seconds == 2.0


def test_interrupt_in_gate_bench_keeps_what_was_measured(gpu):
    def interrupt(payload, index):
        if payload["process"] == 1:
            raise KeyboardInterrupt
        return ""

    gpu.crash = interrupt
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        prove(recorder=recorder)
    last = recorder.saved[-1]
    assert last.incomplete_reason == "interrupted in gate bench"
    assert [len(rounds.process) for rounds in last.cases[0].rounds] == [3, 3]
    assert statuses(last)["quick"] == "passed"
    assert gate_of(last, "bench").summary == "interrupted"


# Pure parts.


def rounds(process, **arms):
    n = len(next(iter(arms.values())))
    return Rounds(
        process=[process] * n,
        order=[list(arms)] * n,
        sm_clock_mhz=[None] * n,
        power_w=[None] * n,
        temperature_c=[None] * n,
        throttle=[None] * n,
        seconds={"graph": arms},
    )


def test_pooling_keeps_the_order_of_rounds():
    pooled = pool_rounds(rounds(0, a=[1.0, 2.0], b=[3.0, 4.0]), rounds(1, a=[5.0], b=[6.0]))
    assert pooled.process == [0, 0, 1]
    assert pooled.seconds == {"graph": {"a": [1.0, 2.0, 5.0], "b": [3.0, 4.0, 6.0]}}


def test_pooling_drops_an_arm_that_one_process_lacks():
    pooled = pool_rounds(rounds(0, a=[1.0], b=[3.0]), rounds(1, a=[5.0]))
    assert pooled.seconds == {"graph": {"a": [1.0, 5.0]}}


def worked(*of_processes):
    """Return a case of 4 TFLOP, 2 TB and 100 tokens with the rounds of some processes."""
    work = Work(flops=4e12, bytes=2e12, tokens=100)
    return CaseRecord(name="c", problem={}, origin="", work=work, correct=True, rounds=list(of_processes))


def test_rates_are_medians_and_what_follows_from_the_work():
    case = worked(rounds(0, a=[1.0, 2.0, 9.0]))
    rates = rates_of(case, "a")["graph"]
    assert (rates.seconds, rates.tokens_per_second, rates.tflops, rates.tbytes_per_second) == (2.0, 50.0, 2.0, 1.0)
    assert rates_of(case, "b") == {}


# Cases measured in more processes.


def unsteady(case_names, spread):
    """Return a change of the fake GPU: the subject's time varies from process to process in these cases."""

    def change(payload, case):
        if case["name"] in case_names:
            for kind in case["rounds"]["seconds"]:
                times = case["rounds"]["seconds"][kind]["fake_attention"]
                shift = 1 + spread * (-1) ** payload["process"]
                case["rounds"]["seconds"][kind]["fake_attention"] = [shift * time for time in times]
        return case

    return change


ENOUGH = Settings(processes=3, rounds=10, times=["kernel", "graph"])


def processes_of(record):
    return [sorted({p for rounds in case.rounds for p in rounds.process}) for case in record.cases]


def bench_cells(gpu):
    """Return process, kinds of time and cases of every measuring task behind quick."""
    tasks = [payload for name, payload in gpu.calls if name == "measure"][1:]
    return [(task["process"], tuple(task["times"]), [case["name"] for case in task["cases"]]) for task in tasks]


def test_a_wide_interval_is_measured_in_as_many_processes_again(gpu):
    names = [case.name for case in prove(SHORT, LONGER).cases]
    gpu.calls.clear()
    gpu.change = unsteady(names[1:], 0.05)
    record = prove(SHORT, LONGER, settings=ENOUGH.model_copy(update={"width": 0.02}))
    assert processes_of(record) == [[0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert bench_cells(gpu)[6:] == [(p, kinds, names[1:]) for p in (3, 4, 5) for kinds in (("graph",), ("kernel",))]
    assert "2 cases, 30 rounds each in 3 processes" in gate_of(record, "bench").summary
    expected = "; 1 of them in as many again: their intervals were wider than 2.0% to either side"
    assert gate_of(record, "bench").summary.endswith(expected)


@pytest.mark.parametrize("width", [None, 0.5])
def test_no_width_or_a_generous_one_asks_for_no_more_processes(gpu, width):
    gpu.change = unsteady([case.name for case in prove(SHORT).cases], 0.05)
    record = prove(SHORT, settings=ENOUGH.model_copy(update={"width": width}))
    assert processes_of(record) == [[0, 1, 2]]
    assert "again" not in gate_of(record, "bench").summary
