"""One study from its request to its tallies. What is finished is saved after every process, so it can be gone on with.

Trials come in batches. All trials of a batch share its processes, as the cases of a suite share those of a run, and
stand in another random order in each; no two batches share a process. A trial whose control fails is unsound and does
not count, as a run whose control fails does not; where too few are left, further batches make up for them.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ...errors import EvidenceError, InputError, ProofError
from ..evidence import CaseRecord, Environment, Rounds, Settings, SubjectInfo, Work
from ..gates.speed import pool_rounds
from ..loading import operator_of
from ..poolable import FIELDS
from ..subject import PACKAGE_FOLDER, Subject, hash_sources
from ..suites import SuiteCase
from ..words import counted
from ..worker import TaskResult, run_task
from .trials import (
    SERIES,
    A,
    B,
    Calibration,
    Series,
    Study,
    Trial,
    as_record,
    is_measured,
    judged,
    processes_of,
)

BASE_CYCLES = 2_000  # A spins too where B has extra work: the launch of a second kernel is then the same in both
CALIBRATION_CYCLES = 40_000  # 20 us at 2 GHz
SPARE = 0.05  # of the trials wanted, so that few unsound ones need no further batch
MOST_FURTHER_BATCHES = 2

_TIMEOUT_S = 600.0  # of silence
_TASK = f"{__package__}.tasks:measure_trials"

_METHOD = (
    (
        "A trial is one comparison of a kernel with itself as `flashmoe compare` makes it: graph time, rounds of A, B "
        "and a second copy of A in balanced random order, several processes, its interval and its verdict."
    ),
    (
        "Where nothing is planted, A and B are the same function, captured apart. Where work is planted, both spin on "
        "the GPU after the kernel, B for more clock cycles; how long a cycle takes is measured before, by graph time."
    ),
    (
        "Every trial has inputs, closures, captures and orders of its own. What trials of one batch share is their "
        "processes, so an offset of a process can favour several of them alike; batches share only the card."
    ),
    "A trial whose control fails is unsound: it has no verdict, and is counted apart. Further batches replace it.",
)


@dataclass(frozen=True)
class StudyRequest:
    """What to study."""

    subject: Subject
    suite: str
    case: SuiteCase
    series: Sequence[Series] = SERIES
    settings: Settings = field(default_factory=lambda: Settings(times=["graph"]))
    batches: int = 3
    tolerance: float = 0.0
    seconds: float | None = None  # of a GPU: no process begins that would pass it
    process_seconds: float = 0.0  # that a process is expected to take, before one has shown it
    command: str = ""
    resume: Study | None = None


def run_study(
    request: StudyRequest,
    environment: Environment,
    *,
    say: Callable[[str], None],
    save: Callable[[Study], None],
    run: Callable[..., TaskResult] = run_task,
) -> Study:
    """Measure until there are enough sound trials of every kind, or the time is spent.

    Args:
        request: what to study, and the study to go on with.
        environment: of this machine.
        say: told what is going on, a line each.
        save: gets the study after every process; each replaces the one before.
        run: runs a task in a process of its own.

    Returns:
        The study; ``incomplete_reason`` says why it did not come to its end.

    Raises:
        InputError: there is no GPU here, or the kernel does not run on one.
        EvidenceError: the study to go on with is of another kernel, card or software.
        ProofError: what a clock cycle takes cannot be measured.
        KeyboardInterrupt: after what was finished has been saved.
    """
    if environment.gpu is None:
        raise InputError("there is no NVIDIA GPU here, and a study is of one", hint="`flashmoe doctor` says more")
    if "cuda" not in request.subject.devices:
        raise InputError(f"{request.subject.name} runs on the CPU only, and a study is of a GPU")
    runner = _Runner(request, _start(request, environment), say, save, run)
    try:
        runner.run()
    except KeyboardInterrupt:
        runner.stop("interrupted")
        raise
    return runner.study


def _start(request: StudyRequest, environment: Environment) -> Study:
    """Return the study to go on with, or a new one."""
    operator, subject, case = operator_of(request.subject), request.subject, request.case
    settings = request.settings
    if settings.seed is None:
        settings = settings.model_copy(update={"seed": secrets.randbits(31)})
    now = datetime.now(timezone.utc)
    work = operator.work(case.problem)
    new = Study(
        id=f"{now:%Y%m%dT%H%M%SZ}-study-{subject.name}-{secrets.token_hex(3)}",
        created_at=now,
        command=request.command,
        incomplete_reason="the study has not ended",
        subject=SubjectInfo(
            name=subject.name,
            operator=subject.operator,
            entry_point=subject.entry_point,
            sources=hash_sources(subject),
        ),
        suite=request.suite,
        case=CaseRecord(
            name=case.name,
            problem=operator.as_table(case.problem),
            origin=case.origin,
            work=Work(
                flops=work.flops,
                bytes=work.bytes,
                tokens=work.tokens,
                peak=operator.peak_tflops_key(case.problem),
            ),
        ),
        environment=environment,
        settings=settings,
        tolerance=request.tolerance,
        method=list(_METHOD),
        series=list(request.series),
        batches=request.batches,
    )
    if request.resume is None:
        return new
    _check_resumable(request.resume, new)
    return request.resume.model_copy(update={"complete": False, "incomplete_reason": new.incomplete_reason})


def _check_resumable(old: Study, new: Study) -> None:
    """Raise ``EvidenceError`` where the trials of two studies would not be of one kernel on one card."""
    probe = Trial(name="probe", batch=0, planted=0.0)
    pairs: dict[str, tuple[object, object]] = {
        name: (get(as_record(old, probe)), get(as_record(new, probe))) for name, get in FIELDS.items()
    }
    was_card, now_card = (study.environment.gpu.uuid_hash if study.environment.gpu else "" for study in (old, new))
    pairs |= {
        "card": (was_card, now_card),
        "sources": (old.subject.sources, new.subject.sources),
        "case": (old.case.problem, new.case.problem),
    }
    for name, (was, now) in pairs.items():
        if was != now:
            raise EvidenceError(
                f"study {old.id} cannot be gone on with: {name} is another one here", hint="begin a new one"
            )


class _Runner:
    """A study as it grows."""

    def __init__(
        self,
        request: StudyRequest,
        study: Study,
        say: Callable[[str], None],
        save: Callable[[Study], None],
        run: Callable[..., TaskResult],
    ) -> None:
        self.study = study
        self._subject = request.subject
        self._limit = request.seconds
        self._say, self._save, self._run_task = say, save, run
        self._spent, self._longest = 0.0, request.process_seconds  # seconds of this session's processes

    def run(self) -> None:
        """Calibrate, and measure batch after batch."""
        if self.study.calibration is None and any(series.planted for series in self.study.series):
            self._calibrate()
        batch = 0
        while (trials := self._plan(batch)) is not None:
            self._update(trials=[*self.study.trials, *trials])
            for process in processes_of(self.study, batch):
                if not self._measure(batch, process):
                    return
            batch += 1
        short = [tally for tally in self.study.tallies if tally.sound < tally.wanted]
        if short:
            what = ", ".join(f"{t.sound} of {t.wanted} at {t.planted:.0%}" for t in short)
            self.stop(f"too many trials were unsound: there are {what}")
        else:
            self._update(complete=True, incomplete_reason="")
            self._save(self.study)

    def stop(self, reason: str) -> None:
        """Save what is finished, and say why that is not all."""
        self._update(complete=False, incomplete_reason=reason)
        self._save(self.study)

    def _update(self, **changes: Any) -> None:
        self.study = judged(self.study.model_copy(update=changes))

    def _plan(self, batch: int) -> list[Trial] | None:
        """Return the trials to add for a batch, none where it is there already; None: there is no further batch."""
        study = self.study
        if any(trial.batch == batch for trial in study.trials):
            return []
        if batch < study.batches:
            counts = {s.planted: math.ceil(s.wanted * (1 + SPARE) / study.batches) for s in study.series}
        else:
            counts = {t.planted: t.wanted - t.sound for t in study.tallies if t.sound < t.wanted}
            counts = {planted: count + math.ceil(SPARE * count) for planted, count in counts.items()}
            if not counts or batch >= study.batches + MOST_FURTHER_BATCHES:
                return None
        return [
            Trial(name=f"{batch}-{planted:g}-{number}", batch=batch, planted=planted, extra_cycles=cycles)
            for planted, count in counts.items()
            for cycles in [self._cycles(planted)]
            for number in range(count)
        ]

    def _cycles(self, planted: float) -> int:
        if not planted:
            return 0
        assert self.study.calibration is not None
        return self.study.calibration.cycles_for(planted)

    def _measure(self, batch: int, process: int) -> bool:
        """Measure the trials of a batch that this process lacks. Returns whether the study can go on."""
        todo = [trial for trial in self.study.trials if trial.batch == batch and _lacks(trial, process)]
        if not todo:
            return True
        if self._limit is not None and self._spent + self._longest > self._limit:
            left = self._limit - self._spent
            self.stop(f"a further process would pass its {self._limit:.3g} s of a GPU, of which {left:.3g} s are left")
            return False
        random.Random(f"{self.study.settings.seed}/{process}/trials").shuffle(todo)
        cases: list[dict[str, Any]] = []
        try:
            result = self._run(todo, process, cases)
        finally:
            self._add(cases)
        if not result.ok:
            self.stop(f"process {process}: {result.reason.replace(str(PACKAGE_FOLDER), 'flashmoe_science')}")
            return False
        self._save(self.study)
        self._say(self._line(process))
        return True

    def _run(self, trials: Sequence[Trial], process: int, cases: list[dict[str, Any]]) -> TaskResult:
        """Run one process; what it measures is appended to ``cases`` as it comes."""
        study = self.study
        payload = {
            "subject": self._subject.to_json(),
            "problem": study.case.problem,
            "trials": [{"name": trial.name, "cycles": _both(trial)} for trial in trials],
            "settings": study.settings.model_dump(mode="json"),
            "process": process,
        }

        def on_event(event: dict[str, Any]) -> None:
            cases.append(event["case"])

        result = self._run_task(_TASK, payload, timeout_s=_TIMEOUT_S, on_event=on_event)
        self._spent += result.seconds
        self._longest = max(self._longest, result.seconds)
        self.study = study.model_copy(update={"gpu_seconds": study.gpu_seconds + result.seconds})
        return result

    def _add(self, cases: Sequence[dict[str, Any]]) -> None:
        """Add what one process measured."""
        found = {case["name"]: case for case in cases}
        if not found:
            return
        first = next(iter(found.values()))
        sets = {key: first[key] for key in ("input_sets", "input_set_bytes")}
        case = CaseRecord(**{**dict(self.study.case), **sets})
        trials = [_with(trial, found[trial.name]) if trial.name in found else trial for trial in self.study.trials]
        self._update(trials=trials, case=case)

    def _line(self, process: int) -> str:
        done = sum(is_measured(self.study, trial) for trial in self.study.trials)
        gpu = f"{self._spent:.0f} s of the GPU"
        return f"process {process}: {done} of {counted(len(self.study.trials), 'trial')} finished, {gpu}"

    def _calibrate(self) -> None:
        """Measure what a clock cycle takes: A, and B with many cycles more. Raises ``ProofError``."""
        trial = Trial(name="calibration", batch=0, planted=1.0, extra_cycles=CALIBRATION_CYCLES)
        cases: list[dict[str, Any]] = []
        result = self._run([trial], -1, cases)
        if not result.ok:
            raise ProofError(f"what a clock cycle takes cannot be measured: {result.reason}")
        trial = _with(trial, cases[0])
        if trial.trouble or trial.rounds is None:
            raise ProofError(f"what a clock cycle takes cannot be measured: {trial.trouble}")
        a, b = (statistics.median(trial.rounds.seconds["graph"][arm]) for arm in (A, B))
        if b <= a:
            raise ProofError(
                f"{CALIBRATION_CYCLES} clock cycles more must take longer, got {b:.4g} s with and {a:.4g} s without"
            )
        found = Calibration(extra_cycles=CALIBRATION_CYCLES, seconds=a, seconds_with=b)
        self._update(calibration=found)
        self._say(f"a call takes {a * 1e6:.2f} us with a short spin, and a clock cycle {found.seconds_per_cycle:.3g} s")


def _lacks(trial: Trial, process: int) -> bool:
    return not trial.trouble and (trial.rounds is None or process not in trial.rounds.process)


def _both(trial: Trial) -> tuple[int, int]:
    """Return the cycles that A and B spin for: none in either where nothing is planted."""
    return (BASE_CYCLES, BASE_CYCLES + trial.extra_cycles) if trial.planted else (0, 0)


def _with(trial: Trial, case: dict[str, Any]) -> Trial:
    """Return a trial with what one more process measured of it."""
    failed = [arm for arm in case["arms"] if arm["status"] != "measured"]
    if failed or case["rounds"] is None:
        reason = "; ".join(f"{arm['name']}: {arm['reason'] or arm['status']}" for arm in failed) or "nothing was timed"
        return trial.model_copy(update={"trouble": reason, "rounds": None})
    new = Rounds.model_validate(case["rounds"])
    return trial.model_copy(update={"rounds": new if trial.rounds is None else pool_rounds(trial.rounds, new)})


def asked(series: Sequence[Series], *, same: int, planted: int) -> list[Series]:
    """Return the same kinds of trials, with other numbers of them."""
    return [each.model_copy(update={"wanted": planted if each.planted else same}) for each in series]
