"""Gathering on a simulated GPU: the worker's tasks run in this process, and the findings follow from what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe_science.errors import InputError, SuiteError
from flashmoe_science.proof.diagnose import tasks
from flashmoe_science.proof.diagnose.gather import CannotObserveError, Request, choose_cases, diagnose, observe_here
from flashmoe_science.proof.diagnose.hypotheses import diagnose_case
from flashmoe_science.proof.diagnose.observations import Code, Kernel
from flashmoe_science.proof.measure.rounds import Case, Plan, measure_case
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.subject.subject import KernelPromise, Subject
from flashmoe_science.proof.subject.suites import Suite, SuiteCase

from ..builders import H200
from ..chain import environment_with
from ..simulated import SimulatedTimer, implementation, loaded, make_baseline
from . import rows_operator
from .rows_operator import GridGpu, Problem, row_loop

SUBJECT = Subject("ours", rows_operator.RowsOperator.name, "m:f", Path(__file__).parent, (), python_path=())
CASE = SuiteCase("r8_n64", Problem(8, 64), "made for a test")


class InProcess:
    """Runs the tasks of a diagnosis here, on the simulated GPU."""

    def __init__(self, gpu, entry, baseline=None, crash_in=""):
        self.gpu, self.crash_in = gpu, crash_in
        self.arms = [loaded("ours", entry, role="subject")]
        self.baselines = [] if baseline is None else [baseline]
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, task, payload, *, timeout_s, on_event=None):
        assert on_event is not None
        name = task.rpartition(":")[2]
        self.calls.append(
            (name + "/" + "+".join(payload.get("times", [])), [each["name"] for each in payload["cases"]])
        )
        if name == self.crash_in:
            return TaskResult(ok=False, data=None, reason="killed by SIGKILL", seconds=1.0, output_tail="last words\n")
        timer, operator = SimulatedTimer(self.gpu), rows_operator.OPERATOR
        for table in payload["cases"]:
            case = Case(table["name"], operator, operator.parse_case(table["problem"]))
            if name == "observe_launches":
                subject = Subject.from_json(payload["subject"])
                found = tasks.observe_case(case, subject, self.arms[0], timer, seed=payload["seed"])
            else:
                settings = Settings.model_validate(payload["settings"])
                assert (payload["control"], payload["thorough"]) == (False, False)  # nothing is claimed
                plan = Plan(settings, payload["times"], 0, control=False, thorough=False)
                arms = [*self.arms, *self.baselines]
                found = measure_case(case, arms, plan, timer, on_round=lambda done, total: None)
            on_event({"event": "case", "case": found})
        return TaskResult(ok=True, data={}, reason="", seconds=1.0, output_tail="")


class Observer:
    """Observes one case on a simulated GPU."""

    def __init__(self, monkeypatch):
        self.gpu = GridGpu()
        self.lines: list[str] = []
        self.monkeypatch = monkeypatch

    def __call__(self, entry, *, subject=SUBJECT, case=CASE, baselines=(), operator=None, counters=False, **changes):
        if operator is not None:
            self.monkeypatch.setattr(rows_operator, "OPERATOR", operator)
        process = InProcess(self.gpu, entry, **changes)
        wish = Request(subject, [case], baselines, seed=1, counters=counters)
        (found,) = observe_here(wish, H200, say=self.lines.append, run=process)
        return found, process


@pytest.fixture
def observe(monkeypatch):
    return Observer(monkeypatch)


def test_a_serial_loop_on_a_small_grid_is_found(observe):
    observations, process = observe(row_loop(observe.gpu))
    assert [name for name, _ in process.calls] == ["observe_launches/", "measure/graph+wall", "measure/kernel"]
    assert process.calls[2][1] == ["r8_n64"]  # the longer calls have graph time: they need no profiler
    assert observations.times.graph == pytest.approx(66e-6)
    assert observations.times.wall == pytest.approx(76e-6)
    blocks = {(run.axis, run.factor): run.blocks for run in observations.scaled}
    assert blocks == {("length", 2): 8, ("length", 4): 8, ("rows", 2): 16, ("rows", 4): 32, ("rows", 16): 128}
    case = diagnose_case(observations)
    assert case.causes[:2] == ["grid too small", "serial loop"]
    shares = {each.hypothesis: each.share for each in case.findings}
    assert shares["grid too small"] == pytest.approx((1 - 8 / 132) * 66 / 76, abs=0.01)


def test_a_baseline_is_timed_beside_it(observe):
    fast = implementation(observe.gpu, seconds=4e-6, name="library")
    observations, _ = observe(
        row_loop(observe.gpu), baselines=["sdpa"], baseline=loaded("sdpa", fast, baseline=make_baseline("sdpa"))
    )
    (found,) = observations.baselines
    assert (found.name, found.times.graph) == ("sdpa", pytest.approx(4e-6))


def test_a_call_that_no_graph_can_hold_is_compared_by_kernel_time(observe):
    loop = row_loop(observe.gpu)

    def entry(x):
        if observe.gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return loop(x)

    observations, process = observe(entry)
    assert (observations.clock, observations.times.graph) == ("kernel", None)
    assert len(process.calls[2][1]) == 6  # of all calls
    assert diagnose_case(observations).causes[:2] == ["grid too small", "serial loop"]


def test_a_longer_call_that_the_kernel_does_not_take_says_why(observe):
    loop = row_loop(observe.gpu)

    def entry(x):
        if x.shape != (8, 64):
            raise ValueError("only 8 rows of 64")
        return loop(x)

    observations, _ = observe(entry)
    assert observations.times.graph == pytest.approx(66e-6)
    assert all("only 8 rows of 64" in run.reason and run.seconds is None for run in observations.scaled)
    told = {each.hypothesis: each for each in diagnose_case(observations).findings}
    assert told["serial loop"].status.value == "cannot tell"
    assert "only 8 rows of 64" in told["serial loop"].explanation


def test_a_wrong_answer_has_no_times_and_says_why(observe):
    wrong = implementation(observe.gpu, change=lambda out: out + 1)
    observations, _ = observe(wrong)
    assert observations.times.call is None
    assert "its answer is off: error" in observations.missing["times"]
    case = diagnose_case(observations)
    assert "its answer is off: error" in case.findings[1].explanation


def test_broken_promises_are_the_first_cause(observe):
    subject = replace(SUBJECT, kernels=(KernelPromise("row_loop", block=(384, 1, 1)),))
    observations, _ = observe(row_loop(observe.gpu), subject=subject)
    case = diagnose_case(observations)
    assert case.causes[0] == "another kernel than promised"
    assert "block (128, 1, 1), promised (384, 1, 1)" in case.findings[0].explanation


def test_a_process_that_dies_leaves_what_the_others_said(observe):
    observations, _ = observe(row_loop(observe.gpu), crash_in="measure")
    assert observations.missing["times"] == "the process: killed by SIGKILL"
    assert [kernel.blocks for kernel in observations.kernels] == [8]
    assert "the process: killed by SIGKILL" in observe.lines


def test_a_subject_that_cannot_be_loaded_is_said_with_its_last_words(observe):
    with pytest.raises(CannotObserveError) as caught:
        observe(row_loop(observe.gpu), crash_in="observe_launches")
    gate = caught.value.gate
    assert (gate.name, gate.summary, gate.details) == ("import", "the process: killed by SIGKILL", ["last words"])


def request(**changes):
    return Request(**{"subject": SUBJECT, "cases": [CASE], "baselines": [], **changes})


def test_no_gpu_and_none_named_is_an_error():
    with pytest.raises(InputError, match="there is no NVIDIA GPU here") as caught:
        diagnose(request(), environment_with(None), say=print)
    assert "--gpu H200" in caught.value.hint


def test_cases_are_chosen_by_name():
    suite = Suite("made-up", SUBJECT.operator, "Made for a test.", (CASE, replace(CASE, name="b")), Path("a.toml"))
    assert [each.name for each in choose_cases(suite, SUBJECT, ["b"])] == ["b"]
    assert [each.name for each in choose_cases(suite, SUBJECT, [])] == ["r8_n64", "b"]
    with pytest.raises(SuiteError, match="suite made-up has no case 'c'"):
        choose_cases(suite, SUBJECT, ["c"])
    with pytest.raises(SuiteError, match="suite made-up is of operator 'other'"):
        choose_cases(replace(suite, operator="other"), SUBJECT, [])


def test_code_is_matched_by_name_and_among_several_by_the_launch():
    from flashmoe_science.gpu.machine_code import KernelCode

    def code(name, registers):
        return KernelCode(name, 90, registers, 0, 0, {"HMMA": registers}, {})

    wanted = Kernel(name="void attend<64>(float*)", block=(128, 1, 1), registers=40, shared_memory_bytes=8)
    several = [(code("void attend<64>(float*)", 40), 256, 8), (code("void attend<64>(float*)", 40), 128, 8)]
    found = tasks.match_code(wanted, [(code("void attend<32>(float*)", 40), 128, 8), *several])
    assert found is several[1][0]
    assert tasks.match_code(wanted, [(code("void attend<32>(float*)", 40), 128, 8)]) is None
    assert tasks.match_code(wanted.model_copy(update={"name": "*attend<64>*"}), several[:1]) is several[0][0]
    assert tasks.summarize(code("a", 40)) == Code(
        registers=40, local_bytes=0, instructions=40, tensor_core=40, tensor_core_in_loops=0, local=0, local_in_loops=0
    )
