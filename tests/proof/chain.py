"""Help to run the chain in tests: requests, a machine with or without a GPU, and stand-ins for what needs one."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.proof.gates import ProveRequest, prove
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.evidence import Environment, Gate, GateStatus, Gpu, Record, Settings
from flashmoe_science.proof.subject.loading import load_subject
from flashmoe_science.proof.subject.subject import Subject
from flashmoe_science.proof.subject.suites import Suite, SuiteCase

from .builders import H200
from .fake_operator import OPERATOR, Problem

SUBJECTS = Path(__file__).parents[1] / "subjects"

OPERATOR_NAME = "tests.proof.fake_operator"

SHORT = Problem(1, 3, 65, 64)

HONEST = Subject(
    name="fake_attention",
    operator=OPERATOR_NAME,
    entry_point=f"{OPERATOR_NAME}:attend",
    folder=Path(__file__).parent,
    sources=("fake_operator.py",),
    python_path=(),
    deterministic=True,
    devices=("cuda", "cpu"),
)


def suite_of(*problems: Problem) -> Suite:
    """Return a suite of these problems."""
    cases = tuple(SuiteCase(OPERATOR.describe(p), p, "made for a test") for p in problems)
    return Suite("made-up", OPERATOR_NAME, "Made for a test.", cases, Path("made-up.toml"))


def request_of(subject: Subject = HONEST, *problems: Problem, **changes: Any) -> ProveRequest:
    """Return a request for ``subject`` on ``problems`` (default: one short case)."""
    request = ProveRequest(subject, suite_of(*(problems or (SHORT,))), baselines=["sdpa"], command="flashmoe prove")
    return replace(request, **changes)


def attention(batch: int, heads: int, seqlen_q: int, head_dim: int, **more: Any) -> SuiteCase:
    """Return a case of the real operator."""
    from flashmoe_science.operators.attention import OPERATOR as ATTENTION

    table = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "head_dim": head_dim, "dtype": "fp16", **more}
    problem = ATTENTION.parse_case(table)
    return SuiteCase(ATTENTION.describe(problem), problem, "made for a test")


def attention_request(name: str, *cases: SuiteCase, **changes: Any) -> ProveRequest:
    """Return a request for the subject ``tests/subjects/name``, or one of ours, on cases of attention."""
    subject = load_subject(str(SUBJECTS / name) if (SUBJECTS / name).exists() else name)
    suite = Suite("made-up", subject.operator, "Made for a test.", cases, Path("made-up.toml"))
    return replace(ProveRequest(subject, suite, baselines=["sdpa"], command="flashmoe prove"), **changes)


def write_subject(folder: Path, code: str, *, head: str = "", tail: str = "") -> Subject:
    """Return a subject whose module holds ``code``; ``head`` goes below [subject], ``tail`` to the end of the file."""
    (folder / "kernel.toml").write_text(f"""
[subject]
name = "written"
operator = "{OPERATOR_NAME}"
entry_point = "written_subject:attend"
sources = ["written_subject.py"]
devices = ["cuda", "cpu"]
{head}
{tail}
""")
    (folder / "written_subject.py").write_text(code)
    return load_subject(str(folder))


def environment_with(gpu: Gpu | None) -> Environment:
    """Return a made-up environment."""
    return Environment(
        gpu=gpu, driver=None, cuda=None, python="3.11", platform="Linux-x86_64", versions={}, commit=None, dirty=None
    )


@dataclass
class Recorder:
    """A progress and a place to save in, which remember everything."""

    started: list[str] = field(default_factory=list)
    finished: list[Gate] = field(default_factory=list)
    steps: list[tuple[int, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    saved: list[Record] = field(default_factory=list)

    def start(self, gate: str) -> None:
        self.started.append(gate)

    def advance(self, done: int, total: int, label: str) -> None:
        self.steps.append((done, total, label))

    def note(self, line: str) -> None:
        self.notes.append(line)

    def finish(self, gate: Gate) -> None:
        self.finished.append(gate)

    def save(self, record: Record) -> None:
        self.saved.append(record)


def run_chain(request: ProveRequest, recorder: Recorder | None = None) -> Record:
    """Run the chain and return its record."""
    recorder = recorder or Recorder()
    return prove(request, progress=recorder, save=recorder.save)


def run_here(task: str, payload: dict[str, Any], *, on_event: Any = None, **_: Any) -> TaskResult:
    """Run a task in this process, in place of a worker of its own. What the task raises is raised here."""
    module, name = task.split(":")
    known, begun = set(sys.modules), time.monotonic()
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # put back what the task leaves
        data = getattr(importlib.import_module(module), name)(json.loads(json.dumps(payload)), on_event or _ignore)
    for new in set(sys.modules) - known:  # subjects, with what they keep: the next task imports them anew
        if str(getattr(sys.modules[new], "__file__", "")).startswith(str(SUBJECTS)):
            del sys.modules[new]
    return TaskResult(ok=True, data=data, reason="", seconds=time.monotonic() - begun, output_tail="")


def _ignore(_event: dict[str, Any]) -> None:
    """Take an event that nobody asked for."""


def statuses(record: Record) -> dict[str, str]:
    """Return gate -> status as one word."""
    words = {GateStatus.NOT_POSSIBLE: "not possible", GateStatus.NOT_REACHED: "not reached"}
    return {gate.name: words.get(gate.status, gate.status.value) for gate in record.gates}


def gate_of(record: Record, name: str) -> Gate:
    """Return the gate of this name, which every record of the chain has."""
    gate = record.gate(name)
    assert gate is not None
    return gate


def until(name: str, status: str = "failed") -> dict[str, str]:
    """Return the statuses of a chain that ended at gate ``name``, on a machine where all before it passed."""
    names = ["sources", "build", "import", "launch", "correct", "quick", "bench"]
    at = names.index(name)
    return {n: "passed" if i < at else status if i == at else "not reached" for i, n in enumerate(names)}


def story(record: Record) -> str:
    """Return what every gate said, for a test that fails."""
    lines = [(f"{gate.name}: {gate.status.value}: {gate.summary}", *gate.details) for gate in record.gates]
    return "\n".join(("", *(line for gate in lines for line in gate)))


def launch(name: str = "attend_kernel", **changes: Any) -> dict[str, Any]:
    """Return one launch as a capturing task tells it."""
    table: dict[str, Any] = {"name": name, "grid": [4, 1, 1], "block": [128, 1, 1], "registers": 64}
    return {**table, "shared_memory_bytes": 4096, "count": 1, **changes}


def captured(name: str, role: str, launches: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return one arm as a capturing task tells it."""
    table = {
        "name": name,
        "role": role,
        "status": "captured",
        "reason": "",
        "version": "1",
        "identities": [],
        "host_files": {},
        "launches": launches,
    }
    return {**table, "graph_launches": launches, "graph_reason": "", "promises": [], "patterns": [], **changes}


def measured(payload: dict[str, Any], case: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Return one case as a measuring task tells it: every round the same."""
    n, roles = payload["settings"]["rounds"], {"fake_attention": "subject", "sdpa": "baseline", "sdpa#2": "control"}
    none = [None] * n
    told = {"status": "measured", "reason": "", "identities": []}  # a whole ``Arm``, as the task tells it
    arms = [{"name": arm, "role": roles.get(arm, "subject"), **told} for arm in seconds]
    rounds = {
        "process": [payload["process"]] * n,
        "order": [list(seconds)] * n,
        "sm_clock_mhz": none,
        "power_w": none,
        "temperature_c": none,
        "throttle": none,
        "seconds": {kind: {arm: [s] * n for arm, s in seconds.items()} for kind in payload["times"]},
    }
    return {"name": case["name"], "input_sets": 4, "input_set_bytes": 4096, "arms": arms, "rounds": rounds}


@dataclass
class FakeGpu:
    """Stand-ins for the tasks that need a GPU. Set what they answer; ``calls`` says what they were asked."""

    subject: str = "fake_attention"
    launches: list[dict[str, Any]] = field(default_factory=lambda: [launch()])
    capture: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"fake_attention": 1e-3, "sdpa": 2e-3, "sdpa#2": 2e-3})
    change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda payload, case: case
    crash: Callable[[dict[str, Any], int], str] = lambda payload, index: ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    slowed: float = 1.0  # how many times as long a baseline takes beside the subject as alone
    truth_s: float = 0.0  # that an exact answer takes
    replies: list[Callable[[dict[str, Any]], dict[str, Any]]] = field(
        default_factory=list
    )  # to workers that take times

    def run(
        self,
        task: str,
        payload: dict[str, Any],
        *,
        timeout_s: float,
        limit_s: float | None,
        on_event: Any,
        env: Any,
        reply: Any = None,
    ) -> TaskResult:
        """Answer in place of a worker."""
        name = task.rpartition(":")[2]
        self.calls.append((name, payload))
        if reply is not None:
            self.replies.append(reply)
        result: TaskResult = getattr(self, f"_{name}")(payload, on_event)
        return result

    def _capture_launches(self, payload, on_event):
        default = [captured(self.subject, "subject", self.launches)]
        default += [captured(name, "baseline", [launch("fmha")]) for name in payload["baselines"]]
        arms = self.capture(payload) if self.capture else default
        cases = [{"name": case["name"], "arms": arms} for case in payload["cases"]]
        for case in cases:
            on_event({"event": "case", "case": case})
        return TaskResult(ok=True, data={"cases": cases}, reason="", seconds=2.0, output_tail="")

    def _check_correct(self, payload, on_event):
        accuracy = {"max_error": 1e-4, "budget": 1e-3, "low_precision_error": 5e-4, "deterministic": True}
        row: dict[str, Any] = {
            "status": "passed",
            "reason": "",
            "accuracy": accuracy,
            "stand_in": "",
            "stress_draws": [],
        }
        row["truth_s"] = self.truth_s
        cases = [{"name": case["name"], **row} for case in payload["cases"]]
        for case in cases:
            on_event({"event": "case", "case": case})
        return TaskResult(ok=True, data={"cases": cases, "seed": 1}, reason="", seconds=2.0, output_tail="")

    def _check_answers(self, payload, on_event):
        assert payload["answers"]
        data = {"wrong": {}, "left_out": [], "beside": False}
        return TaskResult(ok=True, data=data, reason="", seconds=1.0, output_tail="")

    def _measure_alone(self, payload, on_event):
        seconds = {name: self.seconds[name] / self.slowed for name in payload["baselines"] if name in self.seconds}
        for case in payload["cases"]:
            on_event({"event": "case", "case": measured(payload, case, seconds)})
        return TaskResult(ok=True, data={"imported": False}, reason="", seconds=1.0, output_tail="")

    def _measure(self, payload, on_event):
        for index, case in enumerate(payload["cases"]):
            if reason := self.crash(payload, index):
                return TaskResult(ok=False, data=None, reason=reason, seconds=1.0, output_tail="last words\n")
            on_event({"event": "case", "case": self.change(payload, measured(payload, case, self.seconds))})
        return TaskResult(ok=True, data={}, reason="", seconds=5.0, output_tail="")


FEW = Settings(processes=2, rounds=3)

GPU = H200
