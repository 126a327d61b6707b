"""Baselines in a process without the subject: a handicap that nobody looks for by name is found by what it costs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest

from flashmoe_science.proof.cost.cost import size_of
from flashmoe_science.proof.gates import run
from flashmoe_science.proof.judge.alone import drawn_cases
from flashmoe_science.proof.judge.consistency import check_alone
from flashmoe_science.proof.records.documents import parse_record, record_text
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.worker import run_task

from ..exhaustive import all_but
from .chain import HONEST, SHORT, FakeGpu, Recorder, gate_of, request_of, run_chain, statuses, until, write_subject

CASES = [replace(SHORT, seqlen_q=size) for size in (65, 66, 67, 68)]
ENOUGH = Settings(processes=3, rounds=10, times=["kernel", "graph"], seed=7)


def prove(*cases, recorder=None, settings=ENOUGH, **changes):
    return run_chain(request_of(HONEST, *(cases or CASES), settings=settings, **changes), recorder)


def asked(gpu):
    return [payload for name, payload in gpu.calls if name == "measure_alone"]


# The gate.


def test_a_baseline_that_is_slower_beside_the_subject_fails_gate_bench(gpu):
    gpu.slowed = 1.52
    record = prove(SHORT)
    assert statuses(record) == until("bench")
    gate = gate_of(record, "bench")
    assert gate.summary == (
        "sdpa takes 1.52 times as long beside the subject as alone in case b1_h3_s65_d64_fp16 (graph time, 2000 us "
        "against 1316 us): the subject's process slows it down; at most 1.2 is allowed (and 1 more)"
    )
    assert gate.hint.startswith("look at what its module leaves behind")
    assert [round(each.ratio, 6) for each in record.alone] == [1.52, 1.52]
    assert record.complete


@pytest.mark.parametrize(("slowed", "status"), [(0.5, "passed"), (1.19, "passed"), (1.21, "failed")])
def test_a_fifth_more_is_allowed(gpu, slowed, status):
    gpu.slowed = slowed
    record = prove(SHORT)
    assert gate_of(record, "bench").status.value == status
    said = f"sdpa takes {slowed:.2f} to {slowed:.2f} times as long beside the subject as alone, in 1 case"
    assert (said in gate_of(record, "bench").details) == (status == "passed")


def test_few_rounds_of_few_cases_are_taken_once_for_each_kind_of_process(gpu):
    record = prove()
    assert [payload["times"] for payload in asked(gpu)] == [["graph"], ["kernel"]]
    names = drawn_cases(record.cases, 7)
    assert len(names) == 3
    for payload in asked(gpu):
        assert [case["name"] for case in payload["cases"]] == names
        assert payload["baselines"] == ["sdpa"]
        assert payload["settings"]["rounds"] == 5
        assert (payload["seed"], payload["settings"]["seed"]) == (None, None)
    found = {(each.case, each.baseline, each.kind) for each in record.alone}
    assert found == {(name, "sdpa", kind) for name in names for kind in ("graph", "kernel")}
    assert all(len(each.seconds) == 5 for each in record.alone)


def test_other_seeds_draw_other_cases(gpu):
    cases = prove().cases
    assert len({tuple(drawn_cases(cases, seed)) for seed in range(50)}) == math.comb(4, 3)


def test_one_slow_process_is_no_handicap_and_all_are(gpu):
    def slow(processes):
        def change(payload, case):
            if payload["process"] in processes and payload["settings"]["rounds"] == 10:
                for times in case["rounds"]["seconds"].values():
                    times["sdpa"] = [1.6 * seconds for seconds in times["sdpa"]]
            return case

        return change

    gpu.change = slow({0, 2})
    assert gate_of(prove(), "bench").status.value == "passed"
    gpu.change = slow({0, 1, 2})
    assert "sdpa takes 1.60 times as long" in gate_of(prove(), "bench").summary


@pytest.mark.parametrize("changes", [{"settings": ENOUGH.model_copy(update={"processes": 2})}, {"baselines": []}])
def test_it_is_left_out_where_no_claim_can_follow(gpu, changes):
    record = prove(**changes)
    assert (asked(gpu), record.alone) == ([], [])
    assert statuses(record)["bench"] == "passed"
    assert '"alone"' not in record_text(record)


def test_a_process_that_ends_early_fails_the_gate_and_can_be_gone_on_with(gpu, monkeypatch):
    honest = gpu._measure_alone
    monkeypatch.setattr(gpu, "_measure_alone", lambda payload, on_event: replace(
        honest(payload, on_event), ok=False, data=None, reason="killed by SIGSEGV"
    ))  # fmt: skip
    record = prove()
    summary = gate_of(record, "bench").summary
    assert summary == "the process of graph time, without the subject: killed by SIGSEGV"
    assert (record.complete, record.alone) == (False, [])
    monkeypatch.setattr(gpu, "_measure_alone", honest)
    gpu.calls.clear()
    again = prove(resume=record)
    assert [name for name, _ in gpu.calls] == ["measure_alone", "measure_alone"]
    assert again.complete
    assert len(again.alone) == 6


def test_a_baseline_that_fails_without_the_subject_fails_the_gate(gpu, monkeypatch):
    gpu.seconds = {"fake_attention": 1e-3, "sdpa": 2e-3, "sdpa#2": 2e-3}
    honest = gpu._measure_alone

    def fails(payload, on_event):
        def failing(event):
            case = event["case"]
            arm = {**case["arms"][0], "status": "failed", "reason": "RuntimeError: no more"}
            on_event({**event, "case": {**case, "rounds": None, "arms": [arm]}})

        return honest(payload, failing)

    monkeypatch.setattr(gpu, "_measure_alone", fails)
    reason = "sdpa has no graph time without the subject in case b1_h3_s65_d64_fp16: RuntimeError: no more"
    assert gate_of(prove(SHORT), "bench").summary == reason


def test_a_run_that_was_cut_at_its_end_keeps_what_it_found(gpu):
    whole = prove()
    cut = whole.model_copy(update={"complete": False, "incomplete_reason": "the run has not ended"})
    gpu.calls.clear()
    assert prove(resume=cut).alone == whole.alone
    assert gpu.calls == []


def test_an_operator_that_imports_the_subject_is_noted(gpu, monkeypatch):
    honest = gpu._measure_alone
    monkeypatch.setattr(gpu, "_measure_alone", lambda *told: replace(honest(*told), data={"imported": True}))
    assert any("the operator's module imports the subject" in line for line in gate_of(prove(), "bench").details)


def test_its_processes_are_part_of_what_a_run_costs(gpu):
    record = prove()
    assert len({each.case for each in record.alone}) == 3
    plain = size_of(record.model_copy(update={"alone": []}))
    assert size_of(record) == replace(plain, workers=plain.workers + 2, cells=plain.cells + 6)


# The record.


def change_ratio(alone):
    alone[0]["ratio"] = 1.0001 * alone[0]["ratio"]


def change_a_sample(alone):
    alone[0]["seconds"] = [10 * seconds for seconds in alone[0]["seconds"]]


def hide_a_handicap(alone):
    alone[0]["seconds"] = [seconds / 2 for seconds in alone[0]["seconds"]]
    alone[0]["alone"] /= 2
    alone[0]["ratio"] *= 2


def leave_one_out(alone):
    del alone[0]


def tell_one_twice(alone):
    alone.append(alone[0])


def no_time(alone):
    alone[0]["seconds"][0] = 0.0


def another_case(alone):
    alone[0]["case"] = "elsewhere"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (change_ratio, "for ratio, and its samples show"),
        (change_a_sample, "for alone, and its samples show"),
        (hide_a_handicap, "gate bench passed, and sdpa takes 2.00 times as long"),
        (leave_one_out, "is not what the seed draws"),
        (tell_one_twice, "is not what the seed draws"),
        (another_case, "is not what the seed draws"),
        (no_time, "expected 5 times above 0"),
    ],
)
def test_an_edited_record_contradicts_itself(gpu, edit, said):
    document = json.loads(record_text(prove()))
    edit(document["alone"])
    (check,) = [each for each in check_alone(parse_record(json.dumps(document), "r.json")) if each.name == "alone"]
    assert check.result == "contradiction"
    assert said in check.detail


def test_a_genuine_record_and_one_of_before_pass(gpu):
    document = json.loads(record_text(prove()))
    for text in (json.dumps(document), json.dumps({k: v for k, v in document.items() if k != "alone"})):
        (check,) = [each for each in check_alone(parse_record(text, "r.json")) if each.name == "alone"]
        assert (check.result, check.detail) == ("passed", "")


def test_a_run_that_is_interrupted_between_two_kinds_of_process_measures_both_anew(gpu, monkeypatch):
    honest = gpu._measure_alone
    asked_for = []

    def cut(payload, on_event):
        asked_for.append(payload["times"])
        if len(asked_for) == 2:
            raise KeyboardInterrupt
        return honest(payload, on_event)

    monkeypatch.setattr(gpu, "_measure_alone", cut)
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        prove(recorder=recorder)
    assert recorder.saved[-1].alone == []
    monkeypatch.setattr(gpu, "_measure_alone", honest)
    record = prove(resume=recorder.saved[-1])
    (check,) = [each for each in check_alone(parse_record(record_text(record), "r.json")) if each.name == "alone"]
    assert (check.result, len(asked_for), statuses(record)["bench"]) == ("passed", 2, "passed")


# In workers, on the clock of a CPU.

OWN = """
from tests.proof.fake_operator import attend
"""

PATCHED = """
import time
from tests.proof import library
from tests.proof.fake_operator import attend


def longer():
    time.sleep(6 * library.SECONDS)


library.wait = longer
"""

# All its frames are Python's own, so it is no thread of the subject by name.
BUSY = """
import collections, heapq, itertools, threading
from tests.proof.fake_operator import attend

endless = heapq.merge(itertools.count(), itertools.count())
threading.Thread(target=collections.deque, args=(endless, 0), daemon=True).start()
"""


@dataclass
class Clock(FakeGpu):
    """Answers as a GPU but for times, which workers take from a CPU."""

    def run(self, task, payload, **options):
        name = task.rpartition(":")[2]
        if name not in ("measure", "measure_alone"):
            return super().run(task, payload, **options)
        result = run_task(f"tests.proof.library_operator:{name}", payload, **options)
        self.calls.append((name, result.data or {}))
        return result


@pytest.mark.usefixtures("gpu", "own_path")
# Where other work slows the clock's process down, only the largest handicap is beyond doubt.
@pytest.mark.parametrize(("code", "handicap"), [(PATCHED, "patch"), *all_but([(OWN, ""), (BUSY, "thread")])])
def test_a_handicap_that_no_comparison_of_state_sees_is_caught(monkeypatch, tmp_path, code, handicap):
    clock = Clock(subject="written")
    monkeypatch.setattr(run, "run_task", clock.run)
    subject = write_subject(tmp_path, code)
    subject = replace(subject, operator="tests.proof.library_operator")
    settings = Settings(processes=3, rounds=3, times=["wall"], wall_calls=4)
    request = request_of(subject, SHORT, settings=settings)
    request = replace(request, suite=replace(request.suite, operator=subject.operator))
    record = run_chain(request, Recorder())
    gate = gate_of(record, "bench")
    assert {arm.name: arm.status for arm in record.cases[0].arms} == {
        "written": "measured",
        "sdpa": "measured",
        "sdpa#2": "measured",
    }, gate.summary
    (told,) = [data for name, data in clock.calls if name == "measure_alone"]
    assert told["imported"] is False
    (found,) = record.alone
    assert (found.ratio > 1.2) == bool(handicap), found
    assert gate.status.value == ("failed" if handicap else "passed")
    if handicap:
        assert gate.summary.startswith(
            f"sdpa takes {found.ratio:.2f} times as long beside the subject as alone in case"
        )
