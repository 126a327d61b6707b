"""The card over a run, as plots and a table: clock, power and temperature, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .evidence import Record
from .page_plots import Figure, Table
from .plots import Axis, Series, place_plot
from .sensors import Range, Round, rounds_in_order, starts, summarize_processes
from .words import counted


def sensor_figure(record: Record, prefix: str) -> Figure | None:
    """Return clock, power and temperature, round by round, or None where nothing was read."""
    rounds = rounds_in_order(record)
    boundaries = [float(start) for start in starts(rounds)[1:]]
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
    columns = ("process", "times", "rounds", "SM clock, MHz", "power, W", "temperature, °C", "throttled", "reasons")
    rows = [
        (
            str(each.process),
            ", ".join(each.kinds),
            str(each.rounds),
            _range(each.sm_clock_mhz),
            _range(each.power_w),
            _range(each.temperature_c),
            str(each.throttled),
            ", ".join(each.reasons),
        )
        for each in summarize_processes(rounds)
    ]
    note = "Upright lines: another worker process begins."
    if alarms:
        note += " Red strokes at the foot: rounds in which the driver reported that it held the clock back."
    return Figure(
        "clocks, power, temperature", note, plots, Table("lowest, median and highest", columns, rows, words=2)
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without those in the middle of a level stretch: the line is the same."""
    kept = [
        here
        for before, here, after in zip(points, points[1:], points[2:], strict=False)
        if not before[1] == here[1] == after[1]
    ]
    return [points[0], *kept, points[-1]] if len(points) > 1 else [points[0]]


def _range(found: Range | None) -> str:
    return " / ".join(f"{value:.0f}" for value in (found.low, found.middle, found.high)) if found else ""
