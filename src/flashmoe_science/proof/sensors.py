"""What the card reported while a run was timed, in the order of the rounds: clock, power, temperature, throttling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .evidence import Record, TimeKind


@dataclass(frozen=True)
class Round:
    """One round of one case, as the card saw it."""

    process: int
    kinds: tuple[TimeKind, ...]  # what was timed in it
    case: str
    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: str | None  # active reasons, "" for none

    @property
    def alone(self) -> bool:
        """Whether it was taken in one of the processes that take kernel time and nothing else."""
        return "kernel" in self.kinds


@dataclass(frozen=True)
class Range:
    """Lowest, median and highest of what was read."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class ProcessSummary:
    """The rounds of one worker process. None: nothing was read."""

    process: int
    kinds: tuple[TimeKind, ...]
    rounds: int
    sm_clock_mhz: Range | None
    power_w: Range | None
    temperature_c: Range | None
    throttled: int
    reasons: tuple[str, ...]


def rounds_in_order(record: Record) -> list[Round]:
    """Return all rounds in the order in which gate bench takes them: by process, its kinds of time, case, round."""
    keyed = []
    for place, case in enumerate(record.cases):
        for rounds in case.rounds:
            for number, process in enumerate(rounds.process):
                found = Round(
                    process=process,
                    kinds=tuple(rounds.seconds),
                    case=case.name,
                    sm_clock_mhz=rounds.sm_clock_mhz[number],
                    power_w=rounds.power_w[number],
                    temperature_c=rounds.temperature_c[number],
                    throttle=rounds.throttle[number],
                )
                keyed.append(((process, found.alone, place, number), found))
    return [found for _, found in sorted(keyed, key=lambda item: item[0])]


def starts(rounds: Sequence[Round]) -> list[int]:
    """Return where in ``rounds`` another worker process begins, the first one included."""
    keys = [(found.process, found.alone) for found in rounds]
    return [number for number, key in enumerate(keys) if number == 0 or key != keys[number - 1]]


def summarize_processes(rounds: Sequence[Round]) -> list[ProcessSummary]:
    """Return one summary for each worker process, in order."""
    bounds = [*starts(rounds), len(rounds)]
    return [_summary(rounds[first:last]) for first, last in itertools.pairwise(bounds)]


def _summary(rounds: Sequence[Round]) -> ProcessSummary:
    reasons = [found.throttle for found in rounds if found.throttle]
    return ProcessSummary(
        process=rounds[0].process,
        kinds=tuple(dict.fromkeys(kind for found in rounds for kind in found.kinds)),
        rounds=len(rounds),
        sm_clock_mhz=_range([found.sm_clock_mhz for found in rounds]),
        power_w=_range([found.power_w for found in rounds]),
        temperature_c=_range([found.temperature_c for found in rounds]),
        throttled=len(reasons),
        reasons=tuple(sorted(set(reasons))),
    )


def _range(values: Sequence[float | None]) -> Range | None:
    read = [value for value in values if value is not None]
    return Range(min(read), median(read), max(read)) if read else None
