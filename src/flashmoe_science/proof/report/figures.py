"""The figures of a page, each with the table that says the same: time against size, the roofline, and the sensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from markupsafe import Markup

from ..judge.roofline import Roofline, roofline_of
from ..judge.rows import format_rate, format_seconds
from ..judge.scaling import Sweep, find_sweeps
from ..records.evidence import CaseRecord, Rates, Record, TimeKind
from ..text import counted
from .plots import Axis, Guide, Series, draw

_Places = Sequence[tuple[float, CaseRecord]]


@dataclass(frozen=True)
class Table:
    """A table of words and numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # the first columns, which hold words; the others hold numbers
    fold: str = ""  # what unfolds it; empty: it is open
    ruler: Markup | None = None  # of the bars; None: it has none
    bars: Sequence[Markup] = ()  # a drawing for each row
    kind: str = "table"


@dataclass(frozen=True)
class Figure:
    """Plots that are read together, and the table that says the same."""

    title: str
    note: str
    plots: Sequence[Markup]
    table: Table
    legend: Sequence[tuple[int, str]] = ()  # slot and name of the arms
    kind: str = "figure"


@dataclass(frozen=True)
class Arms:
    """The arms whose times a page shows, the subject first: their place decides colour and mark."""

    names: Sequence[str]
    kind: TimeKind
    rates: Mapping[str, Mapping[str, Rates]]  # case -> arm

    @property
    def slots(self) -> list[tuple[int, str]]:
        """Slot and name of each arm that was measured anywhere."""
        return [(slot, name) for slot, name in enumerate(self.names) if any(name in r for r in self.rates.values())]

    def measured(self, case: CaseRecord) -> list[tuple[str, Rates]]:
        """Return name and rates of the arms that were measured in a case."""
        return [(name, self.rates[case.name][name]) for name in self.names if name in self.rates[case.name]]


def timed_arms(record: Record, kind: TimeKind) -> Arms:
    """Return the subject and the baselines with what was measured of them, without times that are no numbers."""
    names = [record.subject.name, *record.baselines]
    rates = {
        case.name: {
            arm.name: arm.rates[kind]
            for arm in case.arms
            if arm.name in names and kind in arm.rates and _is_plain(arm.rates[kind])
        }
        for case in record.cases
    }
    return Arms(names, kind, rates)


def _is_plain(rates: Rates) -> bool:
    return all(math.isfinite(value) and value > 0 for value in (rates.seconds, rates.tflops, rates.tbytes_per_second))


def growth_figures(record: Record, arms: Arms, prefix: str) -> list[Figure]:
    """Return time, and the share of the roofline, against every size that the cases vary alone (or with one other).

    Time against work follows when a case is in no sweep: then nothing else shows how its time compares in size.
    """
    timed = [case for case in record.cases if arms.rates[case.name]]
    sweeps = find_sweeps(timed)
    found = [_sweep_figure(record, arms, sweep, f"{prefix}-sweep{number}") for number, sweep in enumerate(sweeps)]
    drawn = {case.name for sweep in sweeps for case in sweep.cases}
    working = [case for case in timed if case.work.flops > 0]
    return found if all(case.name in drawn for case in working) else [*found, _work_figure(arms, working, prefix)]


def _sweep_figure(record: Record, arms: Arms, sweep: Sweep, name: str) -> Figure:
    size, other = " = ".join(sweep.keys), list(sweep.along[:1])
    note = f"; {other[0]} changes along, from {sweep.along_sizes[0]} to {sweep.along_sizes[-1]}" if other else ""
    title = ", ".join(_fixed_words(sweep)) or "everything else the same"
    places = [(float(at), case) for at, case in zip(sweep.sizes, sweep.cases, strict=True)]
    about = f"against {size}, {counted(len(places), 'case')} with {title}"
    x = Axis(size, _short_size, log=True, ticks=[at for at, _ in places])
    time = Axis(f"{arms.kind} time", _tick_seconds, log=True)
    plots = [_arm_plot(f"{name}-time", f"{time.name} {about}", _SECONDS, arms, places, (x, time))]
    columns = [size, *other, "arm", time.name]
    rooflines = _rooflines(record, sweep.cases)
    if rooflines:  # of one card, so of every case or of none
        shown = _Shown(lambda case, rates: rooflines[case.name].seconds(case.work) / rates.seconds * 100, _percent)
        share = Axis("share of the roofline", lambda value: f"{value:g} %", low=0.0)
        plots.append(_arm_plot(f"{name}-share", f"{share.name} {about}", shown, arms, places, (x, share), height=200.0))
        columns.append(share.name)
    rows = []
    for at, case in places:
        for arm, rates in arms.measured(case):
            cells = [f"{at:.0f}", *(str(case.problem[key]) for key in other), arm, format_seconds(rates.seconds)]
            rows.append([*cells, *([shown.form(shown.value(case, rates))] if rooflines else [])])
    table = Table(f"{time.name} {about}", columns, rows, words=2 + len(other))
    return Figure(title, f"against {size}{note}", plots, table, arms.slots)


def _fixed_words(sweep: Sweep) -> list[str]:
    return [
        (key if value else f"not {key}") if isinstance(value, bool) else f"{key} {value}"
        for key, value in sweep.fixed.items()
    ]


def _work_figure(arms: Arms, cases: Sequence[CaseRecord], prefix: str) -> Figure:
    places = sorted(((case.work.flops, case) for case in cases), key=lambda place: place[0])
    axes = (Axis("FLOP of one call", _tick_power, log=True), Axis(f"{arms.kind} time", _tick_seconds, log=True))
    title = f"{arms.kind} time against the work of one call, {counted(len(places), 'case')}"
    plot = _arm_plot(f"{prefix}-work", title, _SECONDS, arms, places, axes, joined=False)
    rows = [
        [case.name, name, f"{flops:.3g}", format_seconds(rates.seconds)]
        for flops, case in places
        for name, rates in arms.measured(case)
    ]
    table = Table(title, ("case", "arm", *(axis.name for axis in axes)), rows, words=2)
    return Figure("all cases", "against the work of one call", [plot], table, arms.slots)


def roofline_figure(record: Record, arms: Arms, prefix: str) -> Figure | None:
    """Return TFLOP/s and TB/s against arithmetic intensity, with what the card can do by its datasheet."""
    timed = [case for case in record.cases if arms.rates[case.name] and case.work.flops > 0 and case.work.bytes > 0]
    rooflines = _rooflines(record, timed)
    if not rooflines:
        return None
    lines = list({each.peak: each for each in rooflines.values()}.values())
    places = sorted(((case.work.flops / case.work.bytes, case) for case in timed), key=lambda place: place[0])
    low, high = min([places[0][0], *(r.knee / 4 for r in lines)]), max([places[-1][0], *(r.knee * 4 for r in lines)])
    computed = [
        Guide(
            f"{each.gpu} {each.peak}: {each.flops_per_s / 1e12:g} TFLOP/s",
            [(at, each.flops_at(at) / 1e12) for at in (low, each.knee, high)],
        )
        for each in lines
    ]
    first = lines[0]
    ends = [(at, first.flops_at(at) / at / 1e12) for at in (low, first.knee, high)]
    moved = [Guide(f"{first.gpu} memory: {first.bytes_per_s / 1e12:g} TB/s", ends, first=True)]
    x = Axis("arithmetic intensity, FLOP / byte", _tick_plain, log=True, low=low, high=high)
    halves: list[tuple[str, _Shown, float, list[Guide]]] = [
        ("TFLOP/s", _Shown(lambda _, rates: rates.tflops, format_rate), max(r.flops_per_s for r in lines), computed),
        ("TB/s", _Shown(lambda _, rates: rates.tbytes_per_second, format_rate), first.bytes_per_s, moved),
    ]
    plots = [
        _arm_plot(
            f"{prefix}-roofline{number}",
            f"{unit} against arithmetic intensity, {arms.kind} time",
            shown,
            arms,
            places,
            (x, Axis(unit, _tick_plain, log=True, high=most / 1e12 * 1.5)),
            joined=False,
            guides=guides,
        )
        for number, (unit, shown, most, guides) in enumerate(halves)
    ]
    rows = []
    for intensity, case in places:
        limit = rooflines[case.name]
        for name, rates in arms.measured(case):
            speed = [format_rate(rates.tflops), format_rate(limit.flops_at(intensity) / 1e12)]
            share = _percent(limit.seconds(case.work) / rates.seconds * 100)
            rows.append([case.name, name, format_rate(intensity), *speed, format_rate(rates.tbytes_per_second), share])
    columns = ("case", "arm", "FLOP / byte", "TFLOP/s", "limit, TFLOP/s", "TB/s", "share of the roofline")
    note = (
        f"In {arms.kind} time. Lines: the datasheet's rates at the boost clock. Work and bytes are the fewest that a "
        "call needs, every byte moved once; a case whose inputs stay in L2 may lie above the memory line."
    )
    return Figure("", note, plots, Table(f"rates in {arms.kind} time", columns, rows, words=2), arms.slots)


def _rooflines(record: Record, cases: Sequence[CaseRecord]) -> dict[str, Roofline]:
    gpu = record.environment.gpu
    found = {case.name: roofline_of(case.work, gpu) for case in cases} if gpu else {}
    return {name: each for name, each in found.items() if each is not None}


@dataclass(frozen=True)
class _Shown:
    """What is drawn of an arm in a case: a number, and how it is written."""

    value: Callable[[CaseRecord, Rates], float]
    form: Callable[[float], str]


_SECONDS = _Shown(lambda _, rates: rates.seconds, format_seconds)


def _arm_plot(
    name: str,
    title: str,
    shown: _Shown,
    arms: Arms,
    places: _Places,
    axes: tuple[Axis, Axis],
    *,
    joined: bool = True,
    guides: Sequence[Guide] = (),
    height: float = 236.0,
) -> Markup:
    """Return a plot with a series for each arm, the subject last, so that it is drawn on top."""
    series, described = [], []
    for slot, arm in arms.slots:
        of_arm = [(x, case, arms.rates[case.name][arm]) for x, case in places if arm in arms.rates[case.name]]
        points = [(x, shown.value(case, rates), case.name) for x, case, rates in of_arm]
        if points:
            said = [(x, y, f"{arm}, {case}: {shown.form(y)}") for x, y, case in points]
            series.append(Series(arm, slot, said, joined=joined))
            low, high = (shown.form(end(y for _, y, _ in points)) for end in (min, max))
            described.append(f"{arm} from {low} to {high}")
    description = "; ".join(described) + ". The table has every value."
    return draw(name, title, description, series[::-1], *axes, guides=guides, height=height)


def sensor_figure(record: Record, prefix: str) -> Figure | None:
    """Return clock, power and temperature, round by round as gate bench takes them; None where nothing was read."""
    names = ("SM clock, MHz", "power, W", "temperature, °C")
    workers: dict[tuple[int, bool], list[tuple[str, tuple[float | None, ...], str | None]]] = {}
    for case in record.cases:
        for rounds in case.rounds:
            sensors = zip(rounds.sm_clock_mhz, rounds.power_w, rounds.temperature_c, strict=True)
            for process, read, reason in zip(rounds.process, sensors, rounds.throttle, strict=True):
                of_worker = workers.setdefault((process, "kernel" in rounds.seconds), [])  # kernel time has its own
                of_worker.append((", ".join(rounds.seconds), read, reason))
    in_order = [workers[key] for key in sorted(workers)]
    every = [each for worker in in_order for each in worker]
    alarms = [float(number) for number, (_, _, reason) in enumerate(every) if reason]
    rules = [float(end) for end in accumulate(map(len, in_order))][:-1]
    plots = []
    for place, name in enumerate(names):
        points = [(float(n), value) for n, (_, read, _) in enumerate(every) if (value := read[place]) is not None]
        if points:
            lowest, highest = min(y for _, y in points), max(y for _, y in points)
            said = (
                f"From {lowest:g} to {highest:g} in {counted(len(points), 'round')}; {len(alarms)} of them throttled."
            )
            axes = (
                Axis("round of the run", lambda value: f"{value:g}", low=0.0, high=float(len(every))),
                Axis(name, lambda value: f"{value:g}", low=0.0, high=highest * 1.1),
            )
            line = Series(name, 0, [(x, y, "") for x, y in points], marked=False)
            title = f"{name}, over the rounds of the run"
            plot = draw(f"{prefix}-sensor{place}", title, said, [line], *axes, rules=rules, alarms=alarms, height=200.0)
            plots.append(plot)
    if not plots:
        return None
    rows = []
    for (process, _), worker in sorted(workers.items()):
        reasons = [reason for _, _, reason in worker if reason]
        columns = zip(*(read for _, read, _ in worker), strict=True)
        ranges = [_range([value for value in column if value is not None]) for column in columns]
        times = ", ".join(dict.fromkeys(kinds for kinds, _, _ in worker))
        rows.append((str(process), times, str(len(worker)), *ranges, str(len(reasons)), ", ".join(sorted({*reasons}))))
    note = "Upright lines: another worker process begins."
    if alarms:
        note += " Red strokes at the foot: rounds in which the driver reported that it held the clock back."
    headings = ("process", "times", "rounds", *names, "throttled", "reasons")
    return Figure("", note, plots, Table("lowest, median and highest", headings, rows, words=2))


def _range(read: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in (min(read), median(read), max(read))) if read else ""


def _percent(value: float) -> str:
    return f"{format_rate(value)} %"


def _tick_seconds(value: float) -> str:
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def _tick_plain(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _tick_power(value: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.999 * size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def _short_size(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
