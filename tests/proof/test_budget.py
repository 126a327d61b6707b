"""Tests of the chain with a meter: what a run will cost is said first, and a budget ends it between two gates."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flashmoe_science.proof.cost.cost import Bill, Meter, PastRun, Rate, Rates, RatesFile, past_run, size_of
from flashmoe_science.proof.gates import chain, run
from flashmoe_science.proof.judge.run_verdicts import last_word, run_exit_code
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.documents import parse_record
from flashmoe_science.proof.records.evidence import GateName, Record
from flashmoe_science.proof.remote.agent import BUDGET, SIZE, _Asked

from .chain import (
    FEW,
    GPU,
    HONEST,
    SHORT,
    Recorder,
    gate_of,
    measured,
    request_of,
    run_chain,
    statuses,
    until,
)

CASES = [replace(SHORT, seqlen_q=size) for size in (65, 66, 67)]
SECONDS: dict[GateName, float] = {
    "launch": 2.0,
    "correct": 3.0,
    "quick": 5.0,
    "bench": 20.0,
}  # that the stand-ins say they held the GPU for
DOLLARS_A_SECOND = 0.001


@pytest.fixture
def bills() -> list[Bill]:
    """Return what was announced."""
    return []


@pytest.fixture
def meter(bills, tmp_path):
    """Return a meter that knows one earlier run, of exactly the seconds that the stand-ins take."""
    rates = Rates({tmp_path: RatesFile(gpu={GPU.name: Rate(dollars_per_hour=DOLLARS_A_SECOND * 3600)})})

    def history(record):
        return [PastRun(size_of(record), SECONDS)]

    def meter(budget=None):
        return Meter(rates, history, budget=budget, announce=bills.append)

    return meter


def past_of(record: Record) -> PastRun:
    past = past_run(record)
    assert past is not None
    return past


def run_with(meter, recorder=None, **changes):
    return run_chain(request_of(HONEST, *CASES, settings=FEW, meter=meter, **changes), recorder)


def test_what_a_run_will_cost_is_said_before_its_first_gate(gpu, meter, bills):
    class Order(Recorder):
        def start(self, gate):
            assert bills
            super().start(gate)

    record = run_with(meter(), Order())
    (bill,) = bills
    assert (bill.gpu, bill.dollars(1.0)) == (GPU.name, DOLLARS_A_SECOND)
    assert bill.estimate.gpu_seconds == pytest.approx(SECONDS)
    assert {gate.name: gate.gpu_seconds for gate in record.gates if gate.gpu_seconds} == SECONDS


@pytest.mark.parametrize(
    ("seconds", "stopped"),
    [(0.0, "launch"), (4.9, "correct"), (9.9, "quick"), (10.1, "bench"), (29.9, "bench"), (30.1, None)],
)
def test_a_budget_ends_the_run_before_the_gate_that_would_pass_it(gpu, meter, seconds, stopped):
    record = run_with(meter(budget=seconds * DOLLARS_A_SECOND))
    if stopped is None:
        assert record.complete
        assert set(statuses(record).values()) == {"passed"}
        return
    assert statuses(record) == until(stopped, "not reached")
    assert not record.complete
    assert record.incomplete_reason.startswith(f"stopped before gate {stopped}: the budget of $0.0")
    assert gate_of(record, stopped).summary in record.incomplete_reason
    assert gate_of(record, stopped).hint == f"flashmoe prove --resume {record.id} goes on from here"
    assert sum(gate.gpu_seconds for gate in record.gates) <= seconds
    assert run_exit_code(record, []) == 4
    assert last_word(record) == ("incomplete", record.incomplete_reason)


def test_a_gate_that_takes_longer_than_expected_is_ended_where_the_budget_is(gpu, meter, monkeypatch):
    asked = []

    def answer(task, payload, *, limit_s, **more):
        asked.append(limit_s)
        if task.endswith(":measure") and len(payload["times"]) == 2:  # gate bench
            on_case = more["on_event"]
            on_case({"event": "start", "name": payload["cases"][0]["name"]})
            on_case({"event": "case", "case": measured(payload, payload["cases"][0], gpu.seconds)})
            return TaskResult(False, None, "stopped after 21 s", 21.0, "", limit_reached=True)
        return gpu.run(task, payload, limit_s=limit_s, **more)

    monkeypatch.setattr(run, "run_task", answer)
    recorder = Recorder()
    record = run_with(meter(budget=31 * DOLLARS_A_SECOND), recorder)
    assert [round(seconds) for seconds in asked] == [31, 29, 29, 26, 21]
    assert statuses(record) == until("bench", "not reached")
    assert record.incomplete_reason == "stopped in gate bench: the budget is spent"
    gate = gate_of(record, "bench")
    assert gate.summary.startswith("the budget is spent: ended after ")
    assert gate.hint == f"flashmoe prove --resume {record.id} goes on from here"
    assert gate.gpu_seconds > 0
    assert [bool(case.rounds) for case in record.cases] == [True, False, False]
    assert recorder.saved[-1] == record
    assert run_exit_code(record, []) == 4


@pytest.mark.parametrize(("seconds", "limited"), [(None, []), (31, ["capture_launches"])])
def test_without_a_budget_no_gate_is_ended_and_one_that_holds_no_gpu_never(gpu, meter, monkeypatch, seconds, limited):
    asked = {}

    def answer(task, payload, *, limit_s, **more):
        asked[task.rpartition(":")[2]] = limit_s
        if task.endswith(":import_subject"):
            return TaskResult(ok=True, data={}, reason="", seconds=0.0, output_tail="")
        return gpu.run(task, payload, limit_s=limit_s, **more)

    def import_entry(this):
        this.run_task("tasks:import_subject", {}, timeout_s=1.0)
        return run.passed("made up")

    monkeypatch.setattr(run, "run_task", answer)
    monkeypatch.setitem(chain._GATES, "import", import_entry)
    run_with(meter(budget=None if seconds is None else seconds * DOLLARS_A_SECOND), until="launch")
    assert set(asked) == {"import_subject", "capture_launches"}
    assert [name for name, limit in asked.items() if limit is not None] == limited


@pytest.fixture
def borrowed(meter):
    """Run on a borrowed machine: what is asked travels as text, and a meter on the other side answers."""

    def borrowed(budget, **changes):
        asked: list[dict[str, Any]] = []

        def receive():
            used = meter(budget)
            document = json.loads(json.dumps(asked[-1]))
            used.start(parse_record(document["record"], "there"), SIZE.validate_python(document["size"]))
            return {"do": "begin", "budget": json.loads(BUDGET.dump_json(used.budget))}, b""

        there = _Asked(asked.append, receive)
        settings = FEW.model_copy(update={"seed": 7})
        request = request_of(HONEST, *CASES, settings=settings, meter=there, borrowed=True, **changes)
        record = run_chain(request)
        assert [each["event"] for each in asked] == ["begin"]
        return record

    return borrowed


def test_a_borrowed_machine_is_held_to_a_budget_that_is_known_elsewhere(gpu, borrowed, bills):
    stopped = borrowed(11 * DOLLARS_A_SECOND)
    assert statuses(stopped) == until("bench", "not reached")
    assert gate_of(stopped, "bench").hint == f"flashmoe prove --resume {stopped.id} --host MACHINE goes on from here"
    rest = borrowed(1.0, resume=stopped)
    assert rest.complete
    assert [bill.estimate.total for bill in bills] == pytest.approx([30.0, 25.0])  # gate quick passed already
    assert borrowed(None).complete


def test_a_run_that_its_budget_stopped_goes_on(gpu, meter, bills):
    settings = FEW.model_copy(update={"seed": 7})
    stopped = run_chain(request_of(HONEST, *CASES, settings=settings, meter=meter(budget=11 * DOLLARS_A_SECOND)))
    rest = run_chain(request_of(HONEST, *CASES, settings=settings, meter=meter(budget=1.0), resume=stopped))
    assert rest.complete
    assert "quick" not in bills[-1].estimate.gpu_seconds  # it passed already
    assert gate_of(rest, "quick").gpu_seconds == 0.0


def test_an_interrupted_gate_is_paid_for(gpu, meter):
    def interrupt(payload, case):
        raise KeyboardInterrupt

    gpu.change = interrupt
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        run_with(meter(), recorder)
    gate = gate_of(recorder.saved[-1], "quick")
    assert gate.status == "not reached"
    assert gate.gpu_seconds == gate.seconds > 0
    assert past_of(recorder.saved[-1]).gpu_seconds.keys() == {"launch", "correct"}
