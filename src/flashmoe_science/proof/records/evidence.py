"""Evidence: what one run showed, as one versioned JSON document with its raw samples.

A record is written once and never edited. Times are seconds, sizes bytes. A case whose correctness did not pass has no
rounds. The document is written atomically, and again after every finished case, so an interrupted run leaves the
finished cases, marked incomplete, or nothing. ``documents.py`` has the form of its file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence, Sized
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

METHOD, METHOD_OVER_RANKS = 2, 3  # of ``Settings``: a run made today

SCHEMA_VERSION = 2  # 1 had the launches in the arms

GateName = Literal["sources", "build", "import", "launch", "correct", "quick", "bench"]

GATE_NAMES: tuple[GateName, ...] = ("sources", "build", "import", "launch", "correct", "quick", "bench")

TimeKind = Literal["kernel", "graph", "wall"]

# Files are named by it, and a record can come from a machine that is not trusted: it names no other folder.
RecordId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]*$")]

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

_NAME_BYTES, _PATH_BYTES = 200, 2000  # of what a record names: any file system has them

CLOCK_SKEW = timedelta(days=1)
_FIRST_MOMENT = datetime(2000, 1, 1, tzinfo=timezone.utc)  # no run is older, and no zone takes it out of the calendar


def _moment_of_the_past(moment: datetime) -> datetime:
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    # The newest run decides: one of tomorrow would for ever.
    if not _FIRST_MOMENT <= moment <= datetime.now(timezone.utc) + CLOCK_SKEW:
        raise ValueError(f"expected a moment of the past, got {moment.isoformat()}")
    return moment


def _place(path: str) -> str:
    if len(path.encode()) > _PATH_BYTES or any(len(part.encode()) > 255 for part in PurePosixPath(path).parts):
        raise ValueError(f"expected a path that a file can have, got {path[:40]!r} ...")
    return path


def _name(name: str) -> str:
    if not name.strip() or len(name.encode()) > _NAME_BYTES:
        raise ValueError(f"expected a name of 1 to {_NAME_BYTES} bytes, got {name[:40]!r}")
    return name


def _folder_below(folder: str) -> str:
    path = PurePosixPath(_place(folder))
    if path.is_absolute() or ".." in path.parts or "\\" in folder or "\0" in folder:
        raise ValueError(f"expected a folder inside the repository, got {folder!r}")
    return folder


# Names and paths are looked for as files.
Name = Annotated[str, AfterValidator(_name)]
Place = Annotated[str, AfterValidator(_place)]
# Moments are compared with one another: one that names no zone is UTC.
Moment = Annotated[datetime, AfterValidator(_moment_of_the_past)]
FolderBelow = Annotated[str, AfterValidator(_folder_below)]


class Model(BaseModel):
    """Base of all records: unknown keys are errors, and a record does not change after it was made."""

    # A wrong answer can have an infinite error. JSON has no such number, so it is written as a string and read back.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class GateStatus(str, Enum):
    """How a gate ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible here"
    NOT_REACHED = "not reached"  # an earlier gate failed, or --until stopped before it


class Gate(Model):
    """One stage of the chain."""

    name: GateName
    status: GateStatus
    summary: str = ""  # one line: what was shown, or why not
    hint: str = ""  # what to do about a failure
    details: list[str] = Field(default_factory=list)  # further lines, one fact each
    seconds: float = 0.0  # host time that the gate took
    gpu_seconds: float = 0.0  # time that a GPU was held for it


def failed_gate(gates: Sequence[Gate]) -> Gate | None:
    """Return the gate that failed, or None."""
    return next((gate for gate in gates if gate.status is GateStatus.FAILED), None)


class Launch(Model):
    """One kernel that really ran in one call, as the profiler saw it."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int  # a thread
    shared_memory_bytes: int  # a block, static and dynamic
    count: int = 1  # launches of it in one call


class SourceFile(Model):
    """A file whose content decided the result. ``path`` is relative to the subject's folder."""

    path: Place
    sha256: str


class OutputAccuracy(Model):
    """Error of one output against the exact one, and what was allowed."""

    max_error: float
    budget: float
    low_precision_error: float  # of the framework's own run in the same dtype
    # The largest part of what is allowed in an element, and in a row's mean square; None: not known.
    element_share: float | None = None
    row_share: float | None = None
    rms_share: float | None = None  # of the mean square of all elements, where that is too large

    @property
    def share(self) -> float:
        """The part of what is allowed that the error takes, by the test that it comes closest to: 1.0 is all of it.

        The budget is 0 where the framework's own run is exact, as attention with one key is.
        """
        of_budget = self.max_error / self.budget if self.budget else math.inf if self.max_error else 0.0
        return max(of_budget, self.element_share or 0.0, self.row_share or 0.0, self.rms_share or 0.0)

    @property
    def failed_test(self) -> str:
        """What the test is about that found the error too large, of those but the largest error; empty: none did."""
        shares = {"an element": self.element_share, "a row": self.row_share, "all elements": self.rms_share}
        too_large = {name: share for name, share in shares.items() if share is not None and share > 1.0}
        return "" if self.max_error > self.budget or not too_large else next(iter(too_large))


class Accuracy(OutputAccuracy):
    """Error of one arm on one case; of several outputs that of the one with the largest share."""

    deterministic: bool | None = None  # same input twice, same bits in all outputs; None: not tried
    output: str = ""  # which output it is of, where a call gives several by name
    outputs: dict[str, OutputAccuracy] = Field(default_factory=dict)  # then, of each the largest that was seen


class Rates(Model):
    """Medians of one arm's samples of one kind of time, and the rates that follow from the case's work."""

    seconds: float
    tokens_per_second: float
    tflops: float
    tbytes_per_second: float


class Arm(Model):
    """One implementation in one case."""

    name: str  # the subject's name, a baseline's name, or "<baseline>#2" for the control
    role: Literal["subject", "baseline", "control"]
    # "refused": it does not serve this problem; "unavailable": it is not installed here, so nothing is known of it
    status: Literal["measured", "failed", "refused", "unavailable", "not measured"]
    reason: str = ""  # why it was not measured
    version: str = ""
    speed_of_light: bool | None = None  # whether it does other work, such as a copy; None: an older record does not say
    launches: list[Launch] = Field(default_factory=list)
    code: str = ""  # of older records, and ignored: what ``identities`` replaced
    # For a subject of ours: the identity of each launch of a call, in order (``gpu/identity.py``), and hashes of what
    # a call runs of the package on the host (``host_files.py``). Empty: not known.
    identities: list[Hash] = Field(default_factory=list)
    host_files: dict[str, Hash] = Field(default_factory=dict)
    accuracy: Accuracy | None = None
    peak_bytes: int | None = None  # allocated by one call, beyond its inputs
    rank_launches: list[list[Launch]] = Field(default_factory=list)  # of ranks 1, 2, ...; ``launches`` are of rank 0
    rates: dict[TimeKind, Rates] = Field(default_factory=dict)


class RankRounds(Model):
    """What one of several ranks saw in the rounds of a case: its sensors, and its own seconds."""

    sm_clock_mhz: list[int | None]
    power_w: list[float | None]
    temperature_c: list[int | None]
    throttle: list[str | None]
    seconds: dict[TimeKind, dict[str, list[float]]]


class Rounds(Model):
    """The raw samples of one case for one or more kinds of time, as columns: entry ``i`` belongs to round ``i``."""

    process: list[int]  # which worker process
    order: list[list[str]]  # arm names in the order in which they ran
    sm_clock_mhz: list[int | None]
    power_w: list[float | None]
    temperature_c: list[int | None]
    throttle: list[str | None]  # active throttle reasons, "" for none
    seconds: dict[TimeKind, dict[str, list[float]]]  # kind -> arm -> seconds of one call
    # which run took it: 0 is the record's own, n the n-th of its ``resumed``; empty: all are its own
    session: list[int] = Field(default_factory=list)
    # One entry a rank, where there are several: ``seconds`` are the slowest rank's, sensors above the worst card's.
    ranks: list[RankRounds] = Field(default_factory=list)

    @model_validator(mode="after")
    def _columns_are_equally_long(self) -> Rounds:
        columns: dict[str, Sized] = {"order": self.order}
        seen: list[tuple[str, Rounds | RankRounds]] = [("", self)]
        seen += [(f"ranks.{rank}.", each) for rank, each in enumerate(self.ranks)]
        for place, each in seen:
            sensors: dict[str, Sized] = {"sm_clock_mhz": each.sm_clock_mhz, "power_w": each.power_w}
            sensors |= {"temperature_c": each.temperature_c, "throttle": each.throttle}
            sensors |= {f"seconds.{kind}.{arm}": s for kind, arms in each.seconds.items() for arm, s in arms.items()}
            columns |= {f"{place}{name}": column for name, column in sensors.items()}
        columns |= {"session": self.session} if self.session else {}
        for name, column in columns.items():
            if len(column) != len(self.process):
                raise ValueError(f"column {name} has {len(column)} entries, expected {len(self.process)}")
        return self

    def skew(self, kind: TimeKind, arm: str) -> list[float]:
        """Return the seconds of the slowest rank less those of the fastest, round by round; of one rank nothing."""
        columns = [each.seconds[kind][arm] for each in self.ranks if arm in each.seconds.get(kind, {})]
        return [max(row) - min(row) for row in zip(*columns, strict=True)]


class Work(Model):
    """What one call has to do at the least."""

    flops: float
    bytes: float  # every input read once, every output written once
    tokens: int
    peak: str = ""  # which of a GPU's peak rates bounds it, e.g. fp16; "": not known, then the highest counts


class CaseRecord(Model):
    """One case of the suite. ``rounds`` has an entry per measuring mode: kernel time has processes of its own."""

    name: str
    problem: dict[str, Any]  # the operator's own description, e.g. batch, heads, seqlen_q, dtype
    origin: str
    work: Work
    correct: bool | None = None  # of the subject itself; None: not checked
    stand_in: str = (
        ""  # what gate correct ran on the CPU in the subject's place, and why; it leaves ``correct`` at None
    )
    stress_draws: list[str] = Field(default_factory=list)  # that gate correct tried besides, all of which passed
    input_sets: int = Field(default=1, ge=1)  # sets of inputs that the graph and wall times rotate over
    input_set_bytes: int = Field(default=0, ge=0)  # of one of them; 0: not known
    arms: list[Arm] = Field(default_factory=list)
    rounds: list[Rounds] = Field(default_factory=list)

    @model_validator(mode="after")
    def _no_time_without_correctness(self) -> CaseRecord:
        if self.rounds and self.correct is not True:
            raise ValueError(f"case {self.name} has times but its correctness did not pass")
        return self


class Alone(Model):
    """What a call of a baseline takes in a process that never imported the subject, and beside it, in seconds."""

    case: str
    baseline: str
    kind: TimeKind
    seconds: list[float]  # a sample for each round of the process without the subject
    alone: float  # their median
    beside: float  # the least of the medians of the processes that hold the subject
    ratio: float  # of beside to alone


class Settings(Model):
    """The measuring protocol of a run."""

    # How times are taken: 2 has new values for each timed call, and no line that stays in L2. 3 is for
    # calls over ranks alone: they follow one another in longer blocks.
    method: Literal[1, 2, 3] = 1
    times: list[TimeKind] = ["kernel", "graph", "wall"]  # pydantic copies defaults
    processes: int = 3
    rounds: int = 10  # in each process
    width: float | None = (
        None  # half an interval, as a share, beyond which a case is measured in as many processes again
    )
    cache: Literal["cold", "rotating"] = "cold"  # for kernel time; graph and wall always rotate over the input sets
    graph_seconds: float = 4e-4  # calls are captured until one replay lasts this long ...
    graph_calls: int = 100  # ... but no more than this
    graph_replays: int = 5  # a graph sample is the median of this many replays of a fresh capture
    wall_calls: int = 100
    seed: int | None = None  # of inputs and orders; None: every run draws one, and its record says which


class Gpu(Model):
    """The card that a run used."""

    name: str  # as the driver names it
    arch: int  # 90 for sm_90
    sms: int
    l2_bytes: int
    memory_bytes: int
    uuid_hash: str = ""  # tells two cards apart without naming either
    max_sm_clock_mhz: int | None = None
    power_limit_w: float | None = None


class RankGroup(Model):
    """The ranks of one host that made each call together."""

    count: int
    backend: Literal["nccl", "gloo"]
    link: str  # the weakest kind between two of their cards: NVLink, PCIe with or without peer access; or one CPU
    links: int = 0  # NVLinks of a card that are up
    gpus: list[Gpu] = Field(default_factory=list)  # by rank
    nccl: str = ""  # version; its variables are among the environment's settings


class Environment(Model):
    """Where a run took place."""

    gpu: Gpu | None
    driver: str | None
    cuda: str | None
    python: str
    platform: str  # e.g. Linux-x86_64
    cpu: str = ""
    versions: dict[str, str]  # torch, triton, numpy, cudnn, flashmoe-science, ...
    commit: str | None  # of the harness's tree, which holds our own subjects too
    dirty: bool | None  # uncommitted changes in it
    settings: dict[str, str] = Field(default_factory=dict)  # environment variables and flags that change results
    ranks: RankGroup | None = None  # None: one process made each call

    @property
    def gpu_name(self) -> str:
        """The name of the GPU; empty: there is none."""
        return self.gpu.name if self.gpu else ""

    @property
    def place(self) -> str:
        """The GPU, or the GPUs of all ranks and what links them; empty: there is none."""
        name = self.gpu_name
        if self.ranks is None:
            return name
        return f"{self.ranks.count} x {name} over {self.ranks.link}" if name else f"{self.ranks.count} ranks of a CPU"


class TreeState(Model):
    """Which state of a repository ran."""

    commit: str | None  # None: no repository holds the files
    dirty: bool | None  # uncommitted changes in them


class SubjectInfo(Model):
    """What was on trial."""

    name: Name
    operator: str
    entry_point: str
    sources: list[SourceFile] = Field(default_factory=list)
    folder: FolderBelow | None = None  # of the sources, relative to the repository; None: outside of it
    tree: TreeState | None = None  # that holds the sources; None: the harness's, or not recorded
    expected_speedup: float | None = None


class Resumed(Model):
    """An interrupted run that a record goes on with: what it had finished is part of the record."""

    run: RecordId  # its id
    created_at: Moment


class Begun(Model):
    """The line of the ledger of runs begun (``begun.py``) that was written before the run took a sample."""

    ledger: str  # SHA-256 of its first line, which tells two ledgers apart
    line: str  # SHA-256 of the run's own
    count: int  # of runs of this subject, suite and GPU begun until then, this one included


class Revision(Model):
    """One side of a comparison of two revisions."""

    label: str  # as it was asked for, e.g. main
    commit: str
    arm: str  # its arm in every case
    sources: list[SourceFile] = Field(default_factory=list)
    gates: list[Gate] = Field(default_factory=list)  # of A, up to correct; those of B are the record's


class Compared(Model):
    """What a run compared: B was the subject, A the baseline."""

    a: Revision
    b: Revision
    tolerance: float  # the smallest effect that matters, as a share: 0.01 is 1 %


class Record(Model):
    """One run."""

    schema_version: int = SCHEMA_VERSION
    id: RecordId  # e.g. 20261120T235959Z-seed-flash_attention-1a2b3c
    created_at: Moment
    command: str
    complete: bool
    incomplete_reason: str = ""
    subject: SubjectInfo
    suite: Name
    baselines: list[Name]
    environment: Environment
    settings: Settings
    method: str = ""  # of older records, and ignored: a hash of the source that took times
    gates: list[Gate] = Field(default_factory=list)
    cases: list[CaseRecord] = Field(default_factory=list)
    resumed: list[Resumed] = Field(default_factory=list)  # the runs that it goes on with, the latest first
    begun: Begun | None = None  # None: it took no sample, or is of before the ledger
    compared: Compared | None = None  # of `flashmoe compare` with two revisions
    alone: list[Alone] = Field(default_factory=list)  # of drawn cases; empty: not taken, as before this was done

    @model_validator(mode="before")
    @classmethod
    def _read_older_schemas(cls, data: Any) -> Any:
        """Put launches that are given by index in their place: one object serves all arms that have it."""
        if not isinstance(data, dict):
            return data
        document = dict(data)
        if document.get("schema_version") in range(1, SCHEMA_VERSION):
            document["schema_version"] = SCHEMA_VERSION
        if "launches" in document:
            table = _launch_table(document.pop("launches"))
            if isinstance(cases := document.get("cases"), list):  # else validation names what is wrong
                document["cases"] = [_with_launches(case, table) for case in cases]
        return document

    @property
    def kind(self) -> tuple[str, str, str]:
        """Its subject, suite and GPU: runs of one kind are counted, and estimated, together."""
        return self.subject.name, self.suite, self.environment.gpu_name

    @property
    def tree(self) -> TreeState:
        """The state of the repository that holds the subject's sources."""
        return self.subject.tree or TreeState(commit=self.environment.commit, dirty=self.environment.dirty)

    @property
    def failed_gate(self) -> Gate | None:
        """The gate that failed, or None."""
        return failed_gate(self.gates)

    def gate(self, name: str) -> Gate | None:
        """Return the gate of this name, if the run reached the point of recording it."""
        return next((gate for gate in self.gates if gate.name == name), None)


_LAUNCHES = TypeAdapter(list[Launch])
_INDICES = TypeAdapter(list[list[int]], config={"strict": True})  # made once: a record has hundreds of arms


def _launch_table(listed: Any) -> list[Launch]:
    try:
        return _LAUNCHES.validate_python(listed)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("launches", *first["loc"]))
        raise ValueError(f"{where}: {first['msg']}") from error


def _with_launches(case: Any, table: Sequence[Launch]) -> Any:
    """Return a case of a document with the launches of its arms in place of their indices."""
    if not isinstance(case, dict) or not isinstance(case.get("arms"), list):
        return case  # validation names what is wrong
    return {**case, "arms": [_arm_with_launches(arm, table, case.get("name")) for arm in case["arms"]]}


def _arm_with_launches(arm: Any, table: Sequence[Launch], case: object) -> Any:
    try:
        lists = _INDICES.validate_python([arm.get("launches", []), *arm.get("rank_launches", [])])
    except (AttributeError, TypeError, ValidationError):
        return arm  # the same
    if wrong := [index for each in lists for index in each if not 0 <= index < len(table)]:
        raise ValueError(f"case {case}: launch {wrong[0]} of {len(table)} does not exist")
    launches, *others = ([table[index] for index in each] for each in lists)
    return {**arm, "launches": launches, "rank_launches": others}


def rates_of(case: CaseRecord, arm: str) -> dict[TimeKind, Rates]:
    """Return the medians of an arm's samples, and the rates that follow from the case's work."""
    samples: dict[TimeKind, list[float]] = {}
    for rounds in case.rounds:  # several have the same kind where processes took different kinds
        for kind, arms in rounds.seconds.items():
            samples.setdefault(kind, []).extend(arms.get(arm, []))
    medians = {kind: statistics.median(values) for kind, values in samples.items() if values}
    return {
        kind: Rates(
            seconds=seconds,
            tokens_per_second=case.work.tokens / seconds,
            tflops=case.work.flops / seconds / 1e12,
            tbytes_per_second=case.work.bytes / seconds / 1e12,
        )
        for kind, seconds in medians.items()
        if seconds > 0  # of a time that cannot be, the judge says so
    }
