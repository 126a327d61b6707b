"""What a study holds, and what its trials show. Nothing here measures.

A *trial* is one comparison of a kernel with itself, as ``flashmoe compare`` makes it of two revisions: interleaved
rounds in several processes, and the verdict of ``compare.compare_revisions``. The tolerance is 0 unless something else
was asked for, so that every interval that excludes "no difference" is a verdict: the most verdicts that there can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ...errors import EvidenceError
from ..compare import TOLERANCE, Effect, compare_revisions, effect_of
from ..evidence import (
    Arm,
    CaseRecord,
    Compared,
    Environment,
    Model,
    Moment,
    Record,
    RecordId,
    Revision,
    Rounds,
    Settings,
    SubjectInfo,
    documents_in,
    read_text,
    record_path,
    write_document,
)
from ..statistics import Interval, hodges_lehmann, log_ratios, proportion_interval
from ..words import counted

SCHEMA_VERSION = 1
FOLDER = "evidence/studies"

A, B = "a", "b"  # the arms: A is the baseline, B the subject; the control is a second copy of A
CONTROL = f"{A}#2"

_EXACT = 1e-6  # ratios that two versions of a library work out differ by less


class Series(Model):
    """Trials of one kind."""

    planted: float  # by what share of A's time B does more work; 0: none, and every verdict is wrong
    wanted: int  # sound trials
    # Of none planted the largest share of wrong verdicts, else the smallest share of trials that see it.
    required: float


SERIES = (
    Series(planted=0.0, wanted=200, required=0.05),
    Series(planted=0.03, wanted=20, required=0.95),
    Series(planted=0.01, wanted=20, required=0.5),
)


class Calibration(Model):
    """What a clock cycle of extra work takes here, by the harness's own graph time."""

    extra_cycles: int
    seconds: float  # a call of A, which has a short spin of its own in every trial with planted work
    seconds_with: float  # a call with so many cycles more

    @property
    def seconds_per_cycle(self) -> float:
        """Return what one more cycle takes."""
        return (self.seconds_with - self.seconds) / self.extra_cycles

    def cycles_for(self, share: float) -> int:
        """Return how many cycles make a call of A longer by ``share``."""
        return round(share * self.seconds / self.seconds_per_cycle)


class Trial(Model):
    """One comparison, and its verdict once all its processes have measured."""

    name: str
    batch: int  # trials of one batch share their processes
    planted: float
    extra_cycles: int = 0
    trouble: str = ""  # why an arm was not measured
    rounds: Rounds | None = None
    effect: Effect | None = None  # of B; None: it is not finished
    ratio: Interval | None = None  # A's time / B's; None: not finished, or unsound
    reason: str = ""  # why it is undecided or unsound

    @property
    def sound(self) -> bool:
        """Return whether it was measured, and its control held."""
        return self.ratio is not None


class Tally(Model):
    """What the trials of one kind show together."""

    planted: float
    required: float
    wanted: int
    sound: int  # trials that count
    unsound: int  # measured, and not counted: their control failed, or an arm did
    effects: dict[Effect, int]
    counted: int  # wrong verdicts where nothing was planted, else trials that see what was: "slower"
    share: Interval | None  # of those, with the interval of Clopper and Pearson; None: there are no sound trials
    # The same with the tolerance that compare has where none is given.
    counted_by_default: int
    slowdown: float | None = None  # as measured: B's time / A's over all rounds of all sound trials, less 1

    @property
    def holds(self) -> bool:
        """Return whether there are enough trials, and the share is as required."""
        if self.share is None or self.sound < self.wanted:
            return False
        share = self.share.estimate
        return share >= self.required if self.planted else share <= self.required


class Study(Model):
    """One study of one card."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["study"] = "study"
    id: RecordId
    created_at: Moment
    command: str
    complete: bool = False
    incomplete_reason: str = ""
    subject: SubjectInfo
    suite: str
    case: CaseRecord  # without arms and rounds
    environment: Environment
    settings: Settings
    tolerance: float = 0.0
    method: list[str] = Field(default_factory=list)  # in sentences, for a reader
    series: list[Series]
    batches: int
    calibration: Calibration | None = None
    gpu_seconds: float = 0.0  # that its processes took, their start included
    trials: list[Trial] = Field(default_factory=list)
    tallies: list[Tally] = Field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Return whether it is complete, and every kind of trial shows what is required."""
        return self.complete and bool(self.tallies) and all(tally.holds for tally in self.tallies)


def processes_of(study: Study, batch: int) -> range:
    """Return the processes of a batch: no two batches share one."""
    return range(batch * study.settings.processes, (batch + 1) * study.settings.processes)


def is_measured(study: Study, trial: Trial) -> bool:
    """Return whether every process of its batch has measured it, or it failed."""
    done = set(trial.rounds.process) if trial.rounds else set()
    return bool(trial.trouble) or done == set(processes_of(study, trial.batch))


def judged(study: Study) -> Study:
    """Return ``study`` with the verdicts of finished trials that have none yet, and with the tallies."""
    trials = [
        _judge(study, trial) if trial.effect is None and is_measured(study, trial) else trial for trial in study.trials
    ]
    study = study.model_copy(update={"trials": trials})
    return study.model_copy(update={"tallies": [_tally(study, series) for series in study.series]})


def _judge(study: Study, trial: Trial) -> Trial:
    """Return a trial with its verdict, which is that of ``compare``."""
    if trial.trouble:
        return trial.model_copy(update={"effect": Effect.UNDECIDED, "ratio": None, "reason": trial.trouble})
    (case,) = compare_revisions(as_record(study, trial), ["graph"], tolerance=study.tolerance).cases
    return trial.model_copy(update={"effect": case.effect, "ratio": case.ratio, "reason": case.reason})


def as_record(study: Study, trial: Trial) -> Record:
    """Return the record that a comparison of two revisions would have left of this trial."""
    roles: tuple[tuple[str, Literal["subject", "baseline", "control"]], ...] = (
        (B, "subject"),
        (A, "baseline"),
        (CONTROL, "control"),
    )
    arms = [Arm(name=name, role=role, status="measured") for name, role in roles]
    rounds = [trial.rounds] if trial.rounds else []
    # An arm whose answers were wrong, before or after it was timed, is a trouble, and never gets here.
    case = CaseRecord(**{**dict(study.case), "name": trial.name, "correct": True, "arms": arms, "rounds": rounds})
    return Record(
        id=study.id,
        created_at=study.created_at,
        command=study.command,
        complete=True,
        subject=study.subject,
        suite=study.suite,
        baselines=[A],
        environment=study.environment,
        settings=study.settings,
        cases=[case],
        compared=Compared(
            a=Revision(label="A", commit="", arm=A),
            b=Revision(label="B", commit="", arm=B),
            tolerance=study.tolerance,
        ),
    )


def _tally(study: Study, series: Series) -> Tally:
    done = [trial for trial in study.trials if trial.planted == series.planted and trial.effect is not None]
    sound = [trial for trial in done if trial.sound]
    effects = {effect: sum(trial.effect is effect for trial in sound) for effect in Effect}
    by_default = [effect_of(_log(trial.ratio), TOLERANCE) for trial in sound if trial.ratio]
    found = _count(series, [trial.effect for trial in sound])
    samples = [value for trial in sound if trial.rounds for value in _log_slowdowns(trial.rounds)]
    return Tally(
        planted=series.planted,
        required=series.required,
        wanted=series.wanted,
        sound=len(sound),
        unsound=len(done) - len(sound),
        effects=effects,
        counted=found,
        share=proportion_interval(found, len(sound)) if sound else None,
        counted_by_default=_count(series, by_default),
        slowdown=math.expm1(_centre(samples)) if samples else None,
    )


def _count(series: Series, effects: Iterable[Effect | None]) -> int:
    """Return how many verdicts are wrong, or see what was planted. What was planted makes B slower, never faster."""
    looked_for = (Effect.SLOWER,) if series.planted else (Effect.FASTER, Effect.SLOWER)
    return sum(effect in looked_for for effect in effects)


def _log_slowdowns(rounds: Rounds) -> list[float]:
    columns = rounds.seconds["graph"]
    return log_ratios(columns[B], columns[A])


def _centre(values: Sequence[float]) -> float:
    """Return the Hodges-Lehmann estimate; of very many values that of the means of tens, which is near enough."""
    tens = [math.fsum(values[i : i + 10]) / len(values[i : i + 10]) for i in range(0, len(values), 10)]
    return hodges_lehmann(tens)


def _log(ratio: Interval) -> Interval:
    estimate, low, high = (math.log(value) for value in (ratio.estimate, ratio.low, ratio.high))
    return Interval(estimate, low, high, ratio.n, ratio.confidence)


def write_study(study: Study, folder: Path) -> Path:
    """Write ``study`` into ``folder``, and return its file."""
    path = record_path(folder, study.id)
    try:
        write_document(path, study.model_dump_json() + "\n")
    except OSError as error:
        hint = "run it in a folder that you may write"
        raise EvidenceError(f"{path}: cannot be written: {error.strerror}", hint=hint) from error
    return path


def read_study(path: Path) -> Study:
    """Read a study, and see that what it says follows from its samples.

    Raises:
        EvidenceError: with the file, and what is wrong.
    """
    try:
        study = Study.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(document)"
        raise EvidenceError(f"{path}: key {key}: {first['msg']}") from error
    bare = [trial.model_copy(update={"effect": None, "ratio": None, "reason": ""}) for trial in study.trials]
    anew = judged(study.model_copy(update={"trials": bare}))
    for said, shown in zip(study.trials, anew.trials, strict=True):
        if (said.effect, said.sound) != (shown.effect, shown.sound) or not _near(said.ratio, shown.ratio):
            raise EvidenceError(f"{path}: trial {said.name} says {_word(said)}, and its samples show {_word(shown)}")
    for tally, tally_anew in zip(study.tallies, anew.tallies, strict=True):
        if (tally.counted, tally.sound) != (tally_anew.counted, tally_anew.sound):
            what = f"{tally_anew.counted} of {counted(tally_anew.sound, 'trial')}"
            raise EvidenceError(f"{path}: it counts {tally.counted} of {tally.sound}, and its samples show {what}")
    if study.complete and (short := next((t for t in anew.tallies if t.sound < t.wanted), None)):
        raise EvidenceError(f"{path}: it is said to be complete with {short.sound} of {short.wanted} sound trials")
    return study.model_copy(update={"tallies": anew.tallies})


def _near(one: Interval | None, other: Interval | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = ((one.estimate, other.estimate), (one.low, other.low), (one.high, other.high))
    return all(math.isclose(a, b, rel_tol=_EXACT) for a, b in pairs)


def _word(trial: Trial) -> str:
    found = trial.ratio
    return f"{trial.effect.value if trial.effect else 'nothing'}{f' at {found.estimate:.5f}' if found else ''}"


def is_study(path: Path) -> bool:
    """Return whether a file says of itself that it is a study."""
    return path.is_file() and '"kind":"study"' in read_text(path)[:200].replace(" ", "")


def study_files(repository: Path) -> list[Path]:
    """Return the studies that a repository carries, the oldest first."""
    return documents_in(repository / FOLDER)
