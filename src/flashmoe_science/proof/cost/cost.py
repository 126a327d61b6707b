"""The cost of a run: how long it will hold a GPU, what an hour costs, and the budget that ends it."""

from __future__ import annotations

import datetime as dt
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ...errors import ProofError, RatesError, page
from ...gpu.specs import name_words
from ..records.evidence import GateName, GateStatus, Record
from ..records.files import user_folder
from ..records.ledger import GPU_GATES, Entry, dollars, paid_gates
from ..records.store import Archive
from ..records.toml_files import read_toml
from ..text import counted

# The rough model, within a factor of three of the runs in evidence/ on an H100 or H200 (a test checks it), in seconds:
# of a process, of each case and arm, of each of its rounds, and of a large case, whose right answer takes long. Gate
# correct knows no arms.
_MODEL: dict[GateName, tuple[float, float, float, float]] = {
    "launch": (12.0, 0.1, 0.0, 0.0),
    "correct": (8.0, 0.1, 0.0, 3.0),
    "quick": (6.0, 0.1, 0.005, 3.0),
    "bench": (6.0, 0.1, 0.005, 3.0),
}
_LARGE_FLOPS, _LARGE_BYTES = 1e11, 1e8  # a large case has as many operations, or as many bytes
QUICK_ROUNDS = 5
QUICK_CASES = 8  # the most, drawn by the seed of the run; older runs had all
_OVER_RANKS = 5.0  # times as long: they meet at each step, load more libraries, and share larger problems
_HISTORY = 10  # runs at most: the code changes, and old ones say little

FILE_NAME = "rates.toml"
PACKAGED = Path(str(resources.files("flashmoe_science") / FILE_NAME))


@dataclass(frozen=True)
class RunSize:
    """What decides how long a run holds a GPU."""

    cases: int  # that the subject serves and that are not finished
    arms: int  # subject, baselines and control
    rounds: int  # in each process
    workers: int  # processes of gate bench, those without the subject too
    cells: int  # pairs of a case and one of those processes
    gates: tuple[GateName, ...] = GPU_GATES  # that will run
    over_ranks: bool = False
    large: float = 0.0  # the part of the cases that is large


@dataclass(frozen=True)
class PastRun:
    """A run from which the next one is estimated."""

    size: RunSize
    gpu_seconds: Mapping[GateName, float]  # of the gates that passed


@dataclass(frozen=True)
class Estimate:
    """How long a run is going to hold a GPU."""

    gpu_seconds: Mapping[str, float]  # by gate, or by another use of a GPU
    source: str
    runs: int = 0  # earlier ones that it rests on; 0: the rough model alone

    @property
    def total(self) -> float:
        """Seconds of all gates."""
        return sum(self.gpu_seconds.values())


@dataclass(frozen=True)
class Budget:
    """The dollars that a run may cost. The gates of ``estimate`` are those that hold a GPU."""

    dollars: float
    dollars_per_hour: float
    estimate: Estimate = field(repr=False)

    def refusal(self, gate: str, spent_seconds: float) -> str:
        """Return why ``gate`` may not begin after so many seconds, or an empty text."""
        needed = self.estimate.gpu_seconds.get(gate, 0.0)
        spent, then = (dollars(s, self.dollars_per_hour) for s in (spent_seconds, spent_seconds + needed))
        if needed == 0.0 or then <= self.dollars:
            return ""
        return (
            f"the budget of {format_dollars(self.dollars)} would be exceeded: {format_dollars(spent)} are spent, "
            f"and {gate} takes about {format_dollars(then - spent)}"
        )

    def seconds_left(self, spent_seconds: float) -> float:
        """Return for how long the rest of the budget pays."""
        whole = self.dollars / self.dollars_per_hour * 3600 if self.dollars_per_hour else math.inf
        return max(0.0, whole - spent_seconds)


def size_of(record: Record) -> RunSize:
    """Return the size of the whole run behind ``record``, however far it came."""
    served = [c for c in record.cases if all(arm.role != "subject" or arm.status != "refused" for arm in c.arms)]
    settings = record.settings
    modes = len({kind == "kernel" for kind in settings.times})  # kernel time has processes of its own
    workers = settings.processes * modes
    arms = 1 + len(record.baselines) + bool(record.baselines)
    ranks = record.environment.ranks is not None
    large = sum(case.work.flops >= _LARGE_FLOPS or case.work.bytes >= _LARGE_BYTES for case in served) / max(
        1, len(served)
    )
    cells = len(served) * workers
    if drawn := len({each.case for each in record.alone}):  # in a process without the subject
        workers, cells = workers + modes, cells + modes * drawn
    return RunSize(len(served), arms, settings.rounds, workers, cells, over_ranks=ranks, large=large)


def past_run(record: Record) -> PastRun | None:
    """Return what ``record`` shows about the next run. None if it held no GPU, or not for a whole run of its size."""
    if record.environment.gpu is None or record.resumed or record.settings.width is not None:
        return None
    passed = {g.name: g.gpu_seconds for g in record.gates if g.status is GateStatus.PASSED and g.gpu_seconds > 0}
    return PastRun(size_of(record), passed) if passed else None


def past_runs(archive: Archive, record: Record) -> list[PastRun]:
    """Return the newest runs of the same subject, suite and GPU. Broken files are left out.

    Raises ``EvidenceError``: the store cannot be read.
    """
    gpu = record.environment.gpu
    if gpu is None:
        return []
    runs = archive.runs(subject=record.subject.name, suite=record.suite, gpu=gpu.name, on_trouble=lambda _: None)
    ids = [run.id for run in runs if run.gpu == gpu.name and run.id != record.id]
    found: list[PastRun] = []
    for run_id in ids:
        past = past_run(archive.load(run_id))
        found += [past] if past is not None else []
        if len(found) == _HISTORY:
            break
    return found


def model_seconds(gate: GateName, size: RunSize) -> float:
    """Return how long ``gate`` holds a GPU by the rough model."""
    if size.cases == 0 or gate not in size.gates:
        return 0.0
    start, case, case_round, large = _MODEL[gate]
    # Launch has no control; quick the subject, the first baseline and its control.
    arms = {"launch": max(1, size.arms - 1), "correct": 1, "quick": min(size.arms, 3)}.get(gate, size.arms)
    rounds = size.rounds if gate == "bench" else QUICK_ROUNDS
    cases = min(size.cases, QUICK_CASES) if gate == "quick" else size.cases
    workers, cells = (size.workers, size.cells) if gate == "bench" else (1, cases)
    seconds = workers * start + cells * (arms * (case + rounds * case_round) + size.large * large)
    return seconds * (_OVER_RANKS if size.over_ranks else 1.0)


def estimate(size: RunSize, history: Sequence[PastRun]) -> Estimate:
    """Return how long a run will hold a GPU: the model, scaled by runs of the same subject, suite and GPU.

    Each gate is scaled by the median of measured time over modelled time; a gate that no run passed, by that of all.
    """
    ratios: dict[GateName, list[float]] = {gate: [] for gate in GPU_GATES}
    for past in history:
        for gate, seconds in past.gpu_seconds.items():
            if (expected := model_seconds(gate, past.size)) > 0:
                ratios[gate].append(seconds / expected)
    known = [ratio for of_gate in ratios.values() for ratio in of_gate] or [1.0]
    seconds_of: dict[str, float] = {
        gate: seconds * statistics.median(ratios[gate] or known)
        for gate in GPU_GATES
        if (seconds := model_seconds(gate, size)) > 0
    }
    if not history:
        return Estimate(seconds_of, "a rough model: no run of this subject and suite on this GPU is known")
    return Estimate(seconds_of, f"{counted(len(history), 'run')} of this subject and suite on this GPU", len(history))


def spent_seconds(record: Record) -> float:
    """Return how long a run held a GPU."""
    return sum(paid_gates(record).values())


@dataclass
class Sum:
    """Costs together."""

    gpu_seconds: float = 0.0
    dollars: float = 0.0
    unpriced_seconds: float = 0.0  # of GPUs without a rate: not among the dollars


def add_up(
    entries: Iterable[Entry], key: Callable[[Entry], str], rate: Callable[[str], float | None]
) -> dict[str, Sum]:
    """Return the sums of costs by ``key``. ``rate`` prices those without a price of their own."""
    sums: dict[str, Sum] = {}
    for entry in entries:
        total = sums.setdefault(key(entry), Sum())
        total.gpu_seconds += entry.gpu_seconds
        price = entry.dollars_per_hour if entry.dollars_per_hour is not None else rate(entry.gpu)
        if entry.dollars is not None:
            total.dollars += entry.dollars
        elif price is None:
            total.unpriced_seconds += entry.gpu_seconds
        else:
            total.dollars += dollars(entry.gpu_seconds, price)
    return sums


class Rate(BaseModel):
    """One price."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dollars_per_hour: float = Field(ge=0, allow_inf_nan=False, description="dollars an hour, a number of at least 0")
    source: str = Field(default="", description="where the price is from")
    date: dt.date | None = Field(default=None, description="the day on which it was read, e.g. 2026-11-20")


class RatesFile(BaseModel):
    """A ``rates.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: dict[str, Rate] = Field(default={}, description="a table [gpu.NAME] for each GPU")
    other: dict[str, Rate] = Field(default={}, description="a table [other.NAME] for anything else paid by the hour")


@dataclass(frozen=True)
class Rates:
    """All prices that are known here, by file in the order in which the files are asked."""

    files: Mapping[Path, RatesFile] = field(default_factory=dict)

    def dollars_per_hour(self, gpu: str) -> float | None:
        """Return the price of an hour of the GPU that the driver calls ``gpu``, or None where it is not known.

        A name fits when all its words are in the GPU's; within a file, the name with the most words wins. All other
        rates are added; a file replaces those of the same name in later files.
        """
        words = name_words(gpu)
        others = {name: rate for file in reversed(list(self.files.values())) for name, rate in file.other.items()}
        for file in self.files.values():
            if fitting := [name for name in file.gpu if name_words(name) <= words]:
                best = file.gpu[max(fitting, key=lambda name: len(name_words(name)))]
                return best.dollars_per_hour + sum(rate.dollars_per_hour for rate in others.values())
        return None


def load_rates(repository: Path | None) -> Rates:
    """Return the prices of the repository's ``rates.toml``, then the user's, then the packaged one.

    Raises ``RatesError``: a file is wrong; names file, key and what was expected.
    """
    config = user_folder("XDG_CONFIG_HOME", ".config")
    asked = [*([repository / FILE_NAME] if repository else []), config / "flashmoe" / FILE_NAME, PACKAGED]
    hint = f"the format is in {page('how-to/borrowed-gpus')}"
    return Rates({path: read_toml(path, RatesFile, RatesError, hint=hint) for path in asked if path.exists()})


def rate_for(rates: Rates, gpu: str, budget: float | None) -> float | None:
    """Return the price of an hour of a GPU, or None where it is not known.

    Raises ``ProofError``: there is a budget, which needs the price.
    """
    rate = rates.dollars_per_hour(gpu)
    if budget is not None and rate is None:
        hint = f'write its price to rates.toml: [gpu."{gpu}"] dollars_per_hour = ...'
        raise ProofError(f"a budget needs a rate, and there is none for {gpu}", hint=hint)
    return rate


@dataclass(frozen=True)
class Bill:
    """What a run on a GPU will cost, or has cost."""

    gpu: str
    dollars_per_hour: float | None  # None: no rate is known
    estimate: Estimate | None  # None: the run ended before there was one
    spent_seconds: float | None = None  # None: it has not begun

    def dollars(self, gpu_seconds: float) -> float | None:
        """Return the price of so much time, or None where no rate is known."""
        return None if self.dollars_per_hour is None else dollars(gpu_seconds, self.dollars_per_hour)

    def announcement(self) -> str:
        """Return the estimated cost of a run, and its source."""
        assert self.estimate is not None  # it is announced when it was made
        seconds = self.estimate.total
        price = f" at {format_dollars(self.dollars_per_hour)} an hour" if self.dollars_per_hour is not None else ""
        return f"cost: about {self._priced(seconds, price)}, by {self.estimate.source}"

    def receipt(self) -> str:
        """Return the cost of a run."""
        text = f"cost: {self._priced(self.spent_seconds or 0.0)}"
        if self.estimate is None:
            return text
        about = self.dollars(self.estimate.total)
        return f"{text}; estimated {format_duration(self.estimate.total) if about is None else format_dollars(about)}"

    def _priced(self, seconds: float, price: str = "") -> str:
        amount, time = self.dollars(seconds), f"{format_duration(seconds)} of {self.gpu}{price}"
        return f"{time} (no rate for it in rates.toml)" if amount is None else f"{format_dollars(amount)} ({time})"

    def as_plain(self) -> dict[str, Any]:
        """Return plain JSON values."""
        spent, expected = self.spent_seconds or 0.0, self.estimate
        about = expected and {
            "gpu_seconds": expected.total,
            "dollars": self.dollars(expected.total),
            "gates": dict(expected.gpu_seconds),
            "source": expected.source,
            "runs": expected.runs,
        }
        price = {"gpu": self.gpu, "dollars_per_hour": self.dollars_per_hour}
        return {**price, "gpu_seconds": spent, "dollars": self.dollars(spent), "estimate": about}


class Meter:
    """What the chain asks before each gate. A run that holds no GPU has no bill.

    Args:
        rates: The prices of GPUs.
        history: Returns the runs of the same subject, suite and GPU as a record.
        budget: Dollars that the run may cost.
        announce: Gets the bill before the first gate.
    """

    def __init__(
        self,
        rates: Rates,
        history: Callable[[Record], Sequence[PastRun]],
        *,
        budget: float | None = None,
        announce: Callable[[Bill], None] = lambda _: None,
    ) -> None:
        self._rates = rates
        self._history = history
        self._dollars = budget
        self._announce = announce
        self.budget: Budget | None = None  # of the run that has started; None: it has none, or costs nothing
        self._estimate: Estimate | None = None

    def start(self, record: Record, size: RunSize) -> None:
        """Take note of the run that begins. Each revision of a comparison begins one; the bill adds them up.

        Raises ``ProofError``: it has a budget, and its GPU no rate.
        """
        gpu = record.environment.gpu
        if gpu is None or not size.gates:
            return
        rate = rate_for(self._rates, gpu.name, self._dollars)
        found = estimate(size, self._history(record))
        if self._dollars is not None and rate is not None:
            self.budget = Budget(self._dollars, rate, found)
        before = dict(self._estimate.gpu_seconds) if self._estimate else {}
        both = before | {gate: before.get(gate, 0.0) + seconds for gate, seconds in found.gpu_seconds.items()}
        self._estimate = replace(found, gpu_seconds=both)
        self._announce(Bill(gpu.name, rate, found))

    def refusal(self, gate: GateName, record: Record) -> str:
        """Return why ``gate`` may not begin, or an empty text."""
        return self.budget.refusal(gate, spent_seconds(record)) if self.budget else ""

    def seconds_left(self, record: Record) -> float | None:
        """Return for how long the run may still hold its GPU after the gates of ``record``; None: without end."""
        return self.budget.seconds_left(spent_seconds(record)) if self.budget else None

    def bill(self, record: Record) -> Bill | None:
        """Return what a run has cost, or None where it held no GPU."""
        gpu, seconds = record.environment.gpu, spent_seconds(record)
        if gpu is None or (seconds == 0 and self._estimate is None):
            return None
        return Bill(gpu.name, self._rates.dollars_per_hour(gpu.name), self._estimate, seconds)


def format_dollars(amount: float) -> str:
    """Return an amount for a reader: cents, and below a dollar tenths of a cent."""
    sign, size = "-" if amount < 0 else "", abs(amount)
    return f"{sign}${size:,.2f}" if size == 0 or size >= 0.9995 else f"{sign}${size:.3f}"


def format_duration(seconds: float) -> str:
    """Return a time for a reader, e.g. ``8.4 s``, ``1 min 56 s`` and ``3 h 07 min``."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
