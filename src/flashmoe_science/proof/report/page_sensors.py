"""The card over a run, as plots and a table: clock, power and temperature, round by round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from ..records.evidence import Record, TimeKind
from ..text import counted
from .page_plots import Figure, Table
from .plots import Axis, Series, place_plot


class Round(NamedTuple):
    """One round of one case, with the sensors after it. None: not reported."""

    process: int
    kinds: tuple[TimeKind, ...]  # the times taken in it
    case: str
    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: str | None  # active reasons, "" for none

    @property
    def worker(self) -> tuple[int, bool]:
        """The worker process that took it: kernel time has processes of its own."""
        return self.process, "kernel" in self.kinds


def rounds_in_order(record: Record) -> list[Round]:
    """Return all rounds in the order in which gate bench takes them: by process, its kinds of time, case, round."""
    found = []
    for case in record.cases:
        for rounds in case.rounds:
            sensors = zip(rounds.sm_clock_mhz, rounds.power_w, rounds.temperature_c, rounds.throttle, strict=True)
            for process, (clock, power, temperature, throttle) in zip(rounds.process, sensors, strict=True):
                kinds = tuple(rounds.seconds)
                found.append(Round(process, kinds, case.name, clock, power, temperature, throttle))
    return sorted(found, key=lambda each: each.worker)  # stable: cases and rounds stay in their order


def sensor_figure(record: Record, prefix: str) -> Figure | None:
    """Return clock, power and temperature, round by round, or None where nothing was read."""
    rounds = rounds_in_order(record)
    workers = [list(group) for _, group in itertools.groupby(rounds, key=lambda each: each.worker)]
    boundaries = [float(end) for end in itertools.accumulate(map(len, workers))][:-1]
    alarms = [float(number) for number, each in enumerate(rounds) if each.throttle]
    wanted: list[tuple[str, str, Callable[[Round], float | None]]] = [
        ("clock", "SM clock, MHz", lambda each: each.sm_clock_mhz),
        ("power", "power, W", lambda each: each.power_w),
        ("temperature", "temperature, °C", lambda each: each.temperature_c),
    ]
    plots = []
    for key, name, read in wanted:
        points = [(float(number), value) for number, each in enumerate(rounds) if (value := read(each)) is not None]
        if not points:
            continue
        lowest, highest = min(y for _, y in points), max(y for _, y in points)
        plots.append(
            place_plot(
                f"{prefix}-{key}",
                f"{name}, over the rounds of the run",
                f"From {lowest:g} to {highest:g} in {counted(len(points), 'round')}; {len(alarms)} of them throttled.",
                [Series(name, 0, [(x, y, "") for x, y in _thinned(points)], marked=False)],
                Axis("round of the run", lambda value: f"{value:g}", low=0.0, high=float(len(rounds))),
                Axis(name, lambda value: f"{value:g}", low=0.0, high=highest * 1.1),
                rules=boundaries,
                alarms=alarms,
                height=200.0,
            )
        )
    if not plots:
        return None
    columns = ("process", "times", "rounds", *(name for _, name, _ in wanted), "throttled", "reasons")
    rows = []
    for worker in workers:
        reasons = [each.throttle for each in worker if each.throttle]
        times = ", ".join(dict.fromkeys(kind for each in worker for kind in each.kinds))
        ranges = [_range([value for each in worker if (value := read(each)) is not None]) for _, _, read in wanted]
        rows.append(
            (str(worker[0].process), times, str(len(worker)), *ranges, str(len(reasons)), ", ".join(sorted({*reasons})))
        )
    note = "Upright lines: another worker process begins."
    if alarms:
        note += " Red strokes at the foot: rounds in which the driver reported that it held the clock back."
    table = Table("lowest, median and highest", columns, rows, words=2)
    return Figure("clocks, power, temperature", note, plots, table)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without those in the middle of a level stretch: the line is the same."""
    kept = [
        here
        for before, here, after in zip(points, points[1:], points[2:], strict=False)
        if not before[1] == here[1] == after[1]
    ]
    return [points[0], *kept, points[-1]] if len(points) > 1 else [points[0]]


def _range(read: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in (min(read), median(read), max(read))) if read else ""
