"""The meter of one run: says what it will cost, holds it to its budget, and says what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ProofError
from .cost import Budget, Estimate, PastRun, RunSize, estimate, past_run, spent_seconds, together
from .evidence import GateName, Record
from .kinds import kinds_of
from .ledger import dollars
from .rates import Rates
from .store import Archive


@dataclass(frozen=True)
class Bill:
    """What a run on a GPU is going to cost, or has cost."""

    gpu: str
    dollars_per_hour: float | None  # None: no rate is known
    estimate: Estimate | None  # None: the run ended before there was one
    spent_seconds: float | None = None  # None: it has not begun

    def dollars(self, gpu_seconds: float) -> float | None:
        """Return the price of so much time, or None where no rate is known."""
        return None if self.dollars_per_hour is None else dollars(gpu_seconds, self.dollars_per_hour)


class Meter:
    """What the chain asks before each gate. A run that holds no GPU has no bill.

    Args:
        rates: What GPUs cost.
        history: Returns the runs of the same subject, suite and GPU as a record, the oldest first.
        budget: Dollars that the run may cost.
        announce: Told what the run is going to cost, before its first gate.
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
        self._budget: Budget | None = None
        self._estimate: Estimate | None = None

    def start(self, record: Record, size: RunSize) -> None:
        """Take note of the run that begins. Of a comparison, each revision begins one, and the bill is of both.

        Raises:
            ProofError: it has a budget, and its GPU no rate.
        """
        gpu = record.environment.gpu
        if gpu is None or not size.gates:
            return
        rate = rate_for(self._rates, gpu.name, self._dollars)
        found = estimate(size, self._history(record))
        if self._dollars is not None and rate is not None:
            self._budget = Budget(self._dollars, rate, found)
        self._estimate = found if self._estimate is None else together(self._estimate, found)
        self._announce(Bill(gpu.name, rate, found))

    @property
    def budget(self) -> Budget | None:
        """What holds the run that has started to its budget, or None where it has none or costs nothing."""
        return self._budget

    def refusal(self, gate: GateName, record: Record) -> str:
        """Return why ``gate`` may not begin, or an empty text."""
        return self._budget.refusal(gate, spent_seconds(record)) if self._budget else ""

    def seconds_left(self, record: Record) -> float | None:
        """Return for how long the run may still hold its GPU after the gates of ``record``; None: there is no end."""
        return self._budget.seconds_left(spent_seconds(record)) if self._budget else None

    def rate(self, record: Record) -> float | None:
        """Return what an hour of the run's GPU costs, or None where it has none or its price is not known."""
        gpu = record.environment.gpu
        return self._rates.dollars_per_hour(gpu.name) if gpu else None

    def bill(self, record: Record) -> Bill | None:
        """Return what a run has cost, or None where it held no GPU."""
        gpu, seconds = record.environment.gpu, spent_seconds(record)
        if gpu is None or (seconds == 0 and self._estimate is None):
            return None
        return Bill(gpu.name, self._rates.dollars_per_hour(gpu.name), self._estimate, seconds)


def rate_for(rates: Rates, gpu: str, budget: float | None) -> float | None:
    """Return what an hour of a GPU costs, or None where its price is not known.

    Raises:
        ProofError: there is a budget, which needs the price.
    """
    rate = rates.dollars_per_hour(gpu)
    if budget is not None and rate is None:
        hint = f'write its price to rates.toml: [gpu."{gpu}"] dollars_per_hour = ..., see docs/how-to/borrowed-gpus.md'
        raise ProofError(f"a budget needs a rate, and there is none for {gpu}", hint=hint)
    return rate


def history_of(archive: Archive, record: Record, *, most: int) -> list[PastRun]:
    """Return the newest runs of the same subject, suite and GPU, the oldest first. Files that are broken are left out.

    Raises:
        EvidenceError: the store cannot be read.
    """
    gpu = record.environment.gpu
    if gpu is None:
        return []
    found: list[PastRun] = []
    runs = archive.runs(subject=record.subject.name, suite=record.suite, gpu=gpu.name, on_trouble=lambda _: None)
    for run in runs:
        if run.gpu != gpu.name or run.id == record.id:
            continue
        known = archive.load(run.id)
        past = past_run(known, kinds_of(known))
        if past is not None:
            found.append(past)
        if len(found) == most:
            break
    return found[::-1]
