"""Shared state of the gates of one run: the request, the record so far, and the progress."""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, Protocol

from ...errors import ProofError, SuiteError
from ...gpu.specs import SPECS
from ..cost.cost import RunSize
from ..measure.environment import subject_tree
from ..measure.schedule import rounds_seed
from ..processes import TaskResult
from ..ranks.group import run_ranks
from ..records.evidence import (
    GATE_NAMES,
    METHOD,
    METHOD_OVER_RANKS,
    Alone,
    Arm,
    CaseRecord,
    Environment,
    Gate,
    GateName,
    GateStatus,
    Record,
    Resumed,
    Settings,
    SourceFile,
    SubjectInfo,
    TimeKind,
    TreeState,
    Work,
)
from ..spent import sum_up
from ..subject.failure_hints import without_own_frames
from ..subject.loading import operator_of
from ..subject.operator import Operator, ours, ranks_of
from ..subject.subject import PACKAGE_FOLDER, Subject
from ..subject.suites import Suite, check_operator
from ..subject.user_operator import raise_blamed
from ..text import counted
from ..worker import run_task

_TAIL_LINES = 24
_LONG_S = 10.0  # of a process, from which on a line of the log says where its seconds went
NO_GPU = "no NVIDIA GPU here"
_OF_RANKS = (
    "tasks:check_correct",
    "gpu_tasks:capture_launches",
    "gpu_tasks:measure",
    "gpu_tasks:measure_alone",
)  # what ranks do together
CHANGED_SOURCES = "changed while the run was going on"


class RunMeter(Protocol):
    """What knows what a run costs: ``meter.Meter``, or on a borrowed machine what asks the one that holds it."""

    def start(self, record: Record, size: RunSize) -> None:
        """Take note of the run that begins. Raises ``ProofError`` where it has a budget, and its GPU no rate."""

    def refusal(self, gate: GateName, record: Record) -> str:
        """Return why ``gate`` may not begin, or an empty text."""

    def seconds_left(self, record: Record) -> float | None:
        """Return for how long the run may still hold its GPU after the gates of ``record``; None: there is no end."""


class BudgetSpentError(Exception):
    """A gate was ended because the run's budget was spent. What it had shown is in the record."""


@dataclass(frozen=True)
class ProveRequest:
    """One run of the chain."""

    subject: Subject
    suite: Suite
    baselines: Sequence[str]
    gpus: Sequence[str] = ()  # to compile for; empty: one of every architecture known
    until: str | None = None  # the last gate to run
    expect: float | None = None  # speedup over the first baseline; None: what the subject says
    settings: Settings = field(default_factory=Settings)
    command: str = ""
    meter: RunMeter | None = None  # gets the size of the run, and is asked before every gate
    repository: Path | None = None  # holds claims and evidence; tells where the subject's folder lies in it
    resume: Record | None = None  # an interrupted run to go on with
    time_limit: float | None = None  # as --time-limit has it: the subject's limits say what it means here
    tree: TreeState | None = None  # that holds the subject's sources, where it is not here; None: it is
    run: str = ""  # the id of its record; empty: a new one
    borrowed: bool = False  # another machine has asked for it, by --host


def new_run_id(suite: str, subject: str, at: datetime) -> str:
    """Return an id that no other run has: the moment in UTC, what runs, and a number drawn by chance."""
    return f"{at:%Y%m%dT%H%M%SZ}-{suite}-{subject}-{secrets.token_hex(3)}"


class Progress(Protocol):
    """How a run tells what it is doing. Nothing that a run needs comes back."""

    def start(self, gate: str) -> None:
        """A gate begins."""

    def advance(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps of the gate are finished; ``label`` is the one under way."""

    def note(self, line: str) -> None:
        """Something worth a line of log happened."""

    def finish(self, gate: Gate) -> None:
        """A gate ended."""


@dataclass(frozen=True)
class Outcome:
    """How one gate ended; the chain adds its name and its seconds."""

    status: GateStatus
    summary: str
    hint: str = ""
    details: Sequence[str] = ()


def passed(summary: str, *, details: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a gate that showed what it had to show."""
    return Outcome(GateStatus.PASSED, summary, details=details)


def failed(summary: str, *, hint: str = "", details: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a gate that stops the chain."""
    return Outcome(GateStatus.FAILED, summary, hint, details)


def not_possible(reason: str, *, hint: str = "", details: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a gate that cannot show anything on this machine."""
    return Outcome(GateStatus.NOT_POSSIBLE, reason, hint, details)


def no_timing(run: Run) -> Outcome:
    """Return the outcome of a gate that needs a GPU where it can show nothing."""
    hint = "" if run.has_gpu else "`flashmoe doctor` says what this machine lacks"
    return not_possible(run.no_timing_reason or NO_GPU, hint=hint)


def first_of(problems: Sequence[str]) -> str:
    """Return the first problem, and how many there are besides."""
    return f"{problems[0]} (and {len(problems) - 1} more)" if len(problems) > 1 else problems[0]


def work_of(operator: Operator, problem: Any) -> Work:
    """Return the least work of one call."""
    work = operator.work(problem)
    return Work(flops=work.flops, bytes=work.bytes, tokens=work.tokens, peak=operator.peak_tflops_key(problem))


class Run:
    """One run as far as it has got. ``record`` can be asked for at any moment."""

    def __init__(
        self, request: ProveRequest, *, environment: Environment, progress: Progress, save: Callable[[Record], None]
    ) -> None:
        self.request = request
        self.subject = request.subject
        self.ranks = environment.ranks.count if environment.ranks is not None else 1
        method = METHOD if self.ranks == 1 else METHOD_OVER_RANKS
        self.settings = request.settings.model_copy(update={"method": method})
        if self.settings.seed is None:  # values that are known beforehand could be answered beforehand
            self.settings = self.settings.model_copy(update={"seed": secrets.randbits(31)})
        self.environment = environment
        self.progress = progress
        self.operator = operator_of(request.subject)
        if self.ranks > 1:  # busy time of a GPU counts waiting for another one: it is no time of a call
            of_ranks = [kind for kind in self.settings.times if kind == "wall" or (kind == "graph" and self.has_gpu)]
            self.settings = self.settings.model_copy(update={"times": of_ranks})
        self.tree = request.tree or subject_tree(request.subject)
        self.sources: list[SourceFile] = []
        self.gates = {name: Gate(name=name, status=GateStatus.NOT_REACHED) for name in GATE_NAMES}
        self.cases = {case.name: self._new_case(case) for case in request.suite.cases}
        self.incomplete_reason = "the run has not ended"
        self.not_built = ""  # why there is nothing to import, where the build is not possible here
        self.lost = ""  # why cases are lacking although the chain came to its end
        self.resumed: list[Resumed] = []
        self.alone: list[Alone] = []
        self.slow: set[str] = set()  # cases whose exact answers take long, as gate correct saw
        self.finished: set[str] = set()  # cases that a resumed run brought whole
        self.timed_otherwise: dict[str, str] = {}  # by case, how timed kernels differ from those of gate launch
        self.kept_gates: dict[GateName, Gate] = {}  # those that it passed
        self.gate_began = 0.0  # on the clock of time.monotonic()
        self.holds_gpu = False  # whether the gate under way does, and so costs
        self.gpu_seconds = 0.0  # that its tasks have held the GPU for
        self.created_at = datetime.now(timezone.utc)
        self.id = request.run or new_run_id(request.suite.name, self.subject.name, self.created_at)
        self._save = save
        self.refusals = self._find_refusals(self.gpus, request.suite)
        here = [environment.gpu.name] if environment.gpu is not None else self.gpus
        self._mark_refused(self._find_refusals(here, request.suite))

    def _find_refusals(self, gpus: Sequence[str], suite: Suite) -> dict[str, dict[str, str]]:
        """Return why our own subject does not serve a case: GPU -> case -> reason. What others serve, they show."""
        if not self.subject.builtin:
            return {gpu: {} for gpu in gpus}
        name, refusal = self.subject.name, ours(self.operator).refusal
        return {
            gpu: {case.name: reason for case in suite.cases if (reason := refusal(name, case.problem, gpu))}
            for gpu in gpus
        }

    def _mark_refused(self, refusals: dict[str, dict[str, str]]) -> None:
        """Record which cases the subject refuses on every one of the GPUs of ``refusals``."""
        some = [refused for refused in refusals.values() if len(refused) < len(self.cases)]  # of GPUs that it serves
        for case in self.cases:
            reasons = [refused.get(case, "") for refused in some or refusals.values()]
            if all(reasons):
                self.update_arm(case, self.subject.name, status="refused", reason="; ".join(dict.fromkeys(reasons)))
                for baseline in self.request.baselines:
                    self.update_arm(case, baseline, reason=f"{self.subject.name} does not serve it")

    def _new_case(self, case: Any) -> CaseRecord:
        names: list[tuple[str, Literal["subject", "baseline"]]] = [(self.subject.name, "subject")]
        names += [(name, "baseline") for name in self.request.baselines]
        return CaseRecord(
            name=case.name,
            problem=self.operator.as_table(case.problem),
            origin=case.origin,
            work=work_of(self.operator, case.problem),
            arms=[Arm(name=name, role=role, status="not measured") for name, role in names],
        )

    @property
    def expected_speedup(self) -> float | None:
        """What the request or the subject expects over the first baseline."""
        return self.subject.expected_speedup if self.request.expect is None else self.request.expect

    @property
    def gpus(self) -> list[str]:
        """The GPUs to compile for: those asked for, those the subject names, or one of every architecture known."""
        by_arch = {spec.arch: spec.name for spec in reversed(SPECS.values())}
        return list(self.request.gpus or self.subject.gpus) or [by_arch[arch] for arch in sorted(by_arch)]

    @property
    def served(self) -> list[str]:
        """The cases that the subject does not refuse here."""
        return [name for name, case in self.cases.items() if not self._refused(case)]

    @property
    def todo(self) -> list[str]:
        """The cases that are served here and not finished by a run that this one goes on with."""
        return [name for name in self.served if name not in self.finished]

    @property
    def modes(self) -> list[list[TimeKind]]:
        """The kinds of time that share a process: kernel time has processes of its own."""
        together: list[TimeKind] = [kind for kind in self.settings.times if kind != "kernel"]
        alone: list[TimeKind] = [kind for kind in self.settings.times if kind == "kernel"]
        return [mode for mode in (together, alone) if mode]

    def _refused(self, case: CaseRecord) -> str:
        """Return why the subject refuses ``case``, or an empty text."""
        return next((arm.reason for arm in case.arms if arm.role == "subject" and arm.status == "refused"), "")

    @property
    def not_served_reason(self) -> str:
        """Why there is nothing to run, where the subject serves no case here, or an empty text."""
        if self.served:
            return ""
        reasons = list(dict.fromkeys(self._refused(case) for case in self.cases.values()))
        return f"{self.subject.name} serves none of these cases: {first_of(reasons)}"

    @property
    def not_served_note(self) -> str:
        """What a summary says of the cases that are refused, and of those kept, or an empty text."""
        refused = len(self.cases) - len(self.served)
        kept = f"; {counted(len(self.finished), 'case')} kept from {self.resumed[0].run}" if self.finished else ""
        return (f"; {refused} not served" if refused else "") + kept

    @property
    def has_gpu(self) -> bool:
        """Whether this machine has a GPU that torch can use."""
        return self.environment.gpu is not None

    @property
    def device(self) -> Literal["cuda", "cpu"] | None:
        """Where the subject's results can be checked here, or None."""
        if self.has_gpu and "cuda" in self.subject.devices:
            return "cuda"
        return "cpu" if "cpu" in self.subject.devices else None

    @property
    def no_timing_reason(self) -> str:
        """Why nothing can be launched and timed here, or an empty text."""
        if not self.has_gpu and (self.ranks == 1 or self.device is None):
            return NO_GPU
        if self.not_built:
            return self.not_built
        if not self.has_gpu:  # clocks of a CPU show that calls over ranks work, and no speed
            return self.not_served_reason
        return self.not_served_reason if "cuda" in self.subject.devices else "this subject runs on the CPU only"

    def worker_env(self) -> dict[str, str]:
        """Return what a worker's environment needs: with no GPU, Triton's kernels are interpreted."""
        return {"TRITON_INTERPRET": "1"} if self.device == "cpu" else {}

    def payload(self, **more: Any) -> dict[str, Any]:
        """Return what every task of this run gets. Its cases are those still to do here."""
        return {
            "subject": self.subject.to_json(),
            "operator": self.subject.operator,
            "cases": [self.case_table(name) for name in self.todo],
            "baselines": list(self.request.baselines),
            "settings": self.settings.model_dump(mode="json"),
            "process": 0,
            "times": [],
            "seed": self.settings.seed,
            **more,
        }

    def case_table(self, name: str) -> dict[str, Any]:
        """Return one case as tasks get it."""
        case = self.cases[name]
        return {"name": case.name, "problem": case.problem, "origin": case.origin}

    def run_task(
        self,
        task: str,
        payload: dict[str, Any],
        *,
        timeout_s: float,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> TaskResult:
        """Run a task of this package in a worker process.

        Raises:
            BudgetSpentError: the budget ended it.
            OperatorError: the user's own operator did.
        """
        asks = payload.get("times")
        replies = [self._give_seeds(payload["process"], asks) if asks else None for _ in range(self.ranks)]
        shared: dict[str, Any] = {
            "timeout_s": timeout_s,
            "limit_s": self._seconds_left(),
            "on_event": on_event,
            "env": self.worker_env(),
        }
        if self.ranks > 1 and task in _OF_RANKS:
            result = run_ranks(task.partition(":")[2], payload, self.ranks, replies=replies, **shared)
        else:
            name = f"{__package__.rpartition('.')[0]}.measure.{task}"
            result = run_task(name, payload, reply=replies[0], **shared)
        if result.seconds >= _LONG_S and result.spent:
            whole = f"{task.partition(':')[2]} took {result.seconds:.0f} s"
            self.progress.note(f"{whole}: {sum_up(result.spent, result.seconds)}")
        if result.limit_reached:
            raise BudgetSpentError("the budget is spent")
        if self.holds_gpu:
            self.gpu_seconds += result.seconds
        raise_blamed(result.reason)
        return result

    def _give_seeds(self, process: int, times: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return what gives a process its seeds, one at a time: none is there before what it is for begins."""
        following = random.Random(f"{self.settings.seed}/{process}/{'+'.join(times)}/values")

        def give(question: dict[str, Any]) -> dict[str, Any]:
            if "drawn" in question:
                drawn = random.Random(f"{self.settings.seed}/{question['drawn']}/{'+'.join(times)}/exact")
                return {"drawn": drawn.randrange(self.settings.processes) == process}
            if question["seed"] == "values":
                return {"seed": following.getrandbits(31)}
            seed, method = self.settings.seed, self.settings.method
            return {"seed": rounds_seed(seed, question["case"], process, times, method=method)}

        return give

    def run_cases(
        self,
        task: str,
        payload: dict[str, Any],
        on_case: Callable[[dict[str, Any]], None],
        *,
        timeout_s: float,
        done: int = 0,
        total: int | None = None,
        note: str = "",
    ) -> tuple[TaskResult, str]:
        """Run a task over cases; return its result, and the case that was under way when it ended, if any.

        ``on_case`` gets each finished case. ``done`` of ``total`` cases were finished before, for the progress.
        """
        under_way = ""

        def on_event(event: dict[str, Any]) -> None:
            nonlocal done, under_way
            if event["event"] == "start":
                under_way = event["name"]
            elif event["event"] == "case":
                done, under_way = done + 1, ""
                on_case(event["case"])
                self.progress.advance(done, total or len(payload["cases"]), f"{event['case']['name']}{note}")

        return self.run_task(task, payload, timeout_s=timeout_s, on_event=on_event), under_way

    def _seconds_left(self) -> float | None:
        """Return for how long this gate may still hold the GPU; None: it holds none, or there is no end."""
        meter = self.request.meter
        left = meter.seconds_left(self.record()) if meter is not None and self.holds_gpu else None
        return None if left is None else max(0.0, left - (time.monotonic() - self.gate_began))

    def update_case(self, name: str, **changes: Any) -> None:
        """Change fields of one case; the new record is validated."""
        self.cases[name] = CaseRecord(**{**dict(self.cases[name]), **changes})

    def update_arm(self, case: str, arm: str, **changes: Any) -> None:
        """Change fields of one arm of a case, or add the arm."""
        arms = {a.name: a for a in self.cases[case].arms}
        arms[arm] = Arm(**{**(dict(arms[arm]) if arm in arms else {"name": arm}), **changes})
        self.update_case(case, arms=list(arms.values()))

    def drop_times(self, name: str) -> None:
        """Take the times out of a case that turned out to be wrong: there is no time without correctness."""
        for arm in self.cases[name].arms:
            if arm.status == "measured":
                self.update_arm(name, arm.name, status="not measured", rates={})
        self.update_case(name, rounds=[])

    def how_it_ended(self, result: TaskResult, under_way: str) -> str:
        """Return why a worker gave no answer, after the case in which it did not."""
        return f"{f'case {under_way}: ' if under_way else ''}{self.hide_paths(result.reason)}"

    def explain_crash(self, result: TaskResult, limit: str = "") -> tuple[str, list[str]]:
        """Return hint and last output lines of a worker that did not answer; ``limit`` is the key of its limit."""
        # Python's dump of the stack has its innermost call first: the import machinery and the list of modules hide it.
        noise = ("<frozen importlib", "Extension modules:")
        lines = self.hide_paths(result.output_tail).strip().splitlines()
        said = [line for line in lines if line.strip() and not any(word in line for word in noise)]
        tail = without_own_frames(said)[-_TAIL_LINES:]
        hint = ""
        if result.reason == "killed by SIGKILL":
            hint = "the system may have run out of memory: `dmesg` tells"
        elif self.device == "cpu" and result.reason in ("killed by SIGSEGV", "killed by SIGBUS", "killed by SIGABRT"):
            hint = "the kernel may have read or written outside of its tensors, e.g. a tl.load or tl.store without mask"
        elif result.reason.startswith("GPU out of memory"):
            hint = "a smaller suite, or a GPU with more memory"
        elif result.timed_out:
            hint = "the last lines of its output say where it hung"
            hint += f"; [limits] {limit}, or --time-limit, allows more" if limit else ""
        return hint, tail

    def hide_paths(self, text: str) -> str:
        """Take this machine's folders out of ``text``: a record is read elsewhere."""
        folders = {str(self.subject.folder): ".", str(PACKAGE_FOLDER): "flashmoe_science"}
        if self.subject.checkout is not None:
            folders[str(self.subject.checkout.shared)] = "<checkout>"
        folders |= {sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~"}
        for folder in sorted(folders, key=len, reverse=True):
            if len(folder) > 1:
                text = text.replace(folder, folders[folder])
        return text

    def save(self) -> None:
        """Hand the record on as it is now."""
        self._save(self.record())

    def record(self) -> Record:
        """Return the record as it is now."""
        return Record(
            id=self.id,
            created_at=self.created_at,
            command=self.request.command,
            complete=self.incomplete_reason == "",
            incomplete_reason=self.incomplete_reason,
            subject=SubjectInfo(
                name=self.subject.name,
                operator=self.subject.operator,
                entry_point=self.subject.entry_point,
                sources=self.sources,
                folder=self._folder_in_repository(),
                tree=self.tree,
                expected_speedup=self.expected_speedup,
            ),
            suite=self.request.suite.name,
            baselines=list(self.request.baselines),
            environment=self.environment,
            settings=self.settings,
            gates=list(self.gates.values()),
            cases=list(self.cases.values()),
            resumed=self.resumed,
            alone=self.alone,
        )

    def _folder_in_repository(self) -> str | None:
        root = self.request.repository
        if root is None or not self.subject.folder.is_relative_to(root.resolve()):
            return None
        return self.subject.folder.relative_to(root.resolve()).as_posix()


def ranks_asked(request: ProveRequest) -> int:
    """Return how many ranks make each call of a run. Raises ``ProofError``: cases differ, or nothing can be timed."""
    operator = operator_of(request.subject)
    asked = {ranks_of(operator, case.problem) for case in request.suite.cases}
    if len(asked) > 1:
        numbers = " and ".join(map(str, sorted(asked)))
        raise ProofError(f"all cases of a run must have as many ranks, got {numbers} in suite {request.suite.name}")
    (ranks,) = asked
    if ranks > 1 and set(request.settings.times) == {"kernel"}:
        raise ProofError(
            f"kernel time is not taken over {ranks} ranks: a GPU is busy while it waits for another one",
            hint="--time graph or --time wall",
        )
    return ranks


def check_request(request: ProveRequest) -> None:
    """Refuse a request that cannot be carried out, before anything runs.

    Raises:
        ProofError: a suite of another operator, two cases of one shape, cases of different ranks, or arms of one name.
    """
    check_operator(request.suite, request.subject)
    seen: dict[Any, str] = {}
    for case in request.suite.cases:
        if (first := seen.setdefault(case.problem, case.name)) != case.name:
            message = f"suite {request.suite.name}: {case.name} has the shape of {first}"
            raise SuiteError(message, hint="a claim counts its cases: have each shape once")
    ranks_asked(request)
    names = [request.subject.name, *request.baselines]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ProofError(f"subject and baselines need names of their own, got {', '.join(twice)} twice")
