"""The plots of a page, each with the table that says the same: how time grows with size, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..judge.roofline import Roofline, roofline_of
from ..judge.rows import format_rate, format_seconds
from ..judge.scaling import Sweep, find_sweeps
from ..records.evidence import CaseRecord, Rates, Record, TimeKind
from ..text import counted
from .plots import Axis, Guide, Plot, Series, place_plot


@dataclass(frozen=True)
class Table:
    """A table of words and numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # the first columns, which hold words; the others hold numbers


@dataclass(frozen=True)
class Figure:
    """Plots that are read together, and the table that says the same."""

    title: str
    note: str
    plots: Sequence[Plot]
    table: Table


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


def timed_arms(record: Record, kind: TimeKind) -> Arms:
    """Return the subject and the baselines with what was measured of them, without times that are no numbers."""
    names = [record.subject.name, *record.baselines]
    rates = {
        case.name: {
            arm.name: arm.rates[kind]
            for arm in case.arms
            if arm.name in names and kind in arm.rates and _plain(arm.rates[kind])
        }
        for case in record.cases
    }
    return Arms(names, kind, rates)


def _plain(rates: Rates) -> bool:
    return all(math.isfinite(value) and value > 0 for value in (rates.seconds, rates.tflops, rates.tbytes_per_second))


# Growth


def sweep_figures(record: Record, arms: Arms, prefix: str) -> list[Figure]:
    """Return time, and the share of the roofline, against every size that the cases vary alone (or with one other)."""
    timed = [case for case in record.cases if arms.rates[case.name]]
    return [
        _sweep_figure(record, arms, sweep, f"{prefix}-sweep{number}") for number, sweep in enumerate(find_sweeps(timed))
    ]


def _sweep_figure(record: Record, arms: Arms, sweep: Sweep, name: str) -> Figure:
    size, ticks = " = ".join(sweep.keys), [float(at) for at in sweep.sizes]
    title = ", ".join(_fixed_words(sweep)) or "everything else the same"
    note = (
        f"; {sweep.along[0]} changes along, from {sweep.along_sizes[0]} to {sweep.along_sizes[-1]}"
        if sweep.along
        else ""
    )
    x = Axis(size, _short_size, log=True, ticks=ticks)
    places = list(zip(ticks, sweep.cases, strict=True))
    about = f"against {size}, {counted(len(places), 'case')} with {title}"
    time = Axis(f"{arms.kind} time", _tick_seconds, log=True)
    plots = [_arm_plot(f"{name}-time", f"{arms.kind} time {about}", _SECONDS, arms, places, (x, time))]
    rooflines = _rooflines(record, sweep.cases)
    if rooflines:  # of one card, so of every case or of none
        shown = _Shown(lambda case, rates: _share_percent(case, rates, rooflines[case.name]), _percent)
        share = Axis("share of the roofline", lambda value: f"{value:g} %", low=0.0)
        title_of_share = f"share of the roofline {about}"
        plots.append(_arm_plot(f"{name}-share", title_of_share, shown, arms, places, (x, share), height=200.0))
    along = list(sweep.along[:1])
    columns = [size, *along, "arm", f"{arms.kind} time", *(["share of the roofline"] if rooflines else [])]
    rows = []
    for case, at in zip(sweep.cases, sweep.sizes, strict=True):
        for _, arm, rates in _measured(arms, case):
            cells = [str(at), *(str(case.problem[key]) for key in along), arm, format_seconds(rates.seconds)]
            rows.append([*cells, *([shown.form(shown.value(case, rates))] if rooflines else [])])
    words = 2 + len(along)
    return Figure(title, f"against {size}{note}", plots, Table(f"{arms.kind} time {about}", columns, rows, words))


def _fixed_words(sweep: Sweep) -> list[str]:
    return [
        (key if value else f"not {key}") if isinstance(value, bool) else f"{key} {value}"
        for key, value in sweep.fixed.items()
    ]


def work_figure(record: Record, arms: Arms, prefix: str) -> Figure | None:
    """Return time against work, when a case is in no sweep: then nothing else shows how its time compares in size."""
    timed = [case for case in record.cases if arms.rates[case.name] and case.work.flops > 0]
    drawn = {case.name for sweep in find_sweeps(timed) for case in sweep.cases}
    if all(case.name in drawn for case in timed):
        return None
    places = sorted(((case.work.flops, case) for case in timed), key=lambda place: place[0])
    axes = (Axis("FLOP of one call", _tick_power, log=True), Axis(f"{arms.kind} time", _tick_seconds, log=True))
    title = f"{arms.kind} time against the work of one call, {counted(len(places), 'case')}"
    plot = _arm_plot(f"{prefix}-work", title, _SECONDS, arms, places, axes, joined=False, height=266.0)
    rows = [
        [case.name, name, f"{flops:.3g}", format_seconds(rates.seconds)]
        for flops, case in places
        for _, name, rates in _measured(arms, case)
    ]
    columns = ("case", "arm", "FLOP of one call", f"{arms.kind} time")
    table = Table(f"{arms.kind} time against work", columns, rows, words=2)
    return Figure("all cases", "against the work of one call", [plot], table)


# Roofline


def roofline_figure(record: Record, arms: Arms, prefix: str) -> Figure | None:
    """Return TFLOP/s and TB/s against arithmetic intensity, with what the card can do by its datasheet."""
    timed = [case for case in record.cases if arms.rates[case.name] and case.work.flops > 0 and case.work.bytes > 0]
    rooflines = _rooflines(record, timed)
    if not rooflines:
        return None
    lines = list({each.peak: each for each in rooflines.values()}.values())
    places = sorted(((_intensity(case), case) for case in timed), key=lambda place: place[0])
    low, high = min([places[0][0], *(r.knee / 4 for r in lines)]), max([places[-1][0], *(r.knee * 4 for r in lines)])
    x = Axis("arithmetic intensity, FLOP / byte", _tick_plain, log=True, low=low, high=high)

    def flops_guide(each: Roofline) -> Guide:
        peak = each.flops_per_s / 1e12
        ends = [(low, each.flops_at(low) / 1e12), (each.knee, peak), (high, peak)]
        return Guide(f"{each.gpu} {each.peak}: {peak:g} TFLOP/s", ends)

    def bytes_guide(each: Roofline) -> Guide:
        ends = [(at, each.flops_at(at) / at / 1e12) for at in (low, each.knee, high)]
        return Guide(f"{each.gpu} memory: {each.bytes_per_s / 1e12:g} TB/s", ends, first=True)

    flops = Axis("TFLOP/s", _tick_plain, log=True, high=max(r.flops_per_s for r in lines) / 1e12 * 1.5)
    moved = Axis("TB/s", _tick_plain, log=True, high=lines[0].bytes_per_s / 1e12 * 1.5)
    halves: list[tuple[str, str, _Shown, Axis, list[Guide]]] = [
        ("flops", "TFLOP/s", _TFLOPS, flops, [flops_guide(each) for each in lines]),
        ("bytes", "TB/s", _TBYTES, moved, [bytes_guide(each) for each in lines[:1]]),
    ]
    plots = [
        _arm_plot(
            f"{prefix}-{half}-{size}",
            f"{unit} against arithmetic intensity, {arms.kind} time",
            shown,
            arms,
            places,
            (x, y),
            joined=False,
            guides=guides,
            width=width,
            height=height,
            size=size,
        )
        for size, width, height in (("large", 510.0, 320.0), ("small", 340.0, 260.0))
        for half, unit, shown, y, guides in halves
    ]
    rows = []
    for intensity, case in places:
        limit = rooflines[case.name]
        for _, name, rates in _measured(arms, case):
            speed = [format_rate(rates.tflops), format_rate(limit.flops_at(intensity) / 1e12)]
            memory = [format_rate(rates.tbytes_per_second), _percent(_share_percent(case, rates, limit))]
            rows.append([case.name, name, format_rate(intensity), *speed, *memory])
    columns = ("case", "arm", "FLOP / byte", "TFLOP/s", "limit, TFLOP/s", "TB/s", "share of the roofline")
    note = (
        "Lines: the datasheet's rates at the boost clock. Work and bytes are the fewest that a call needs, every byte "
        "moved once; a case whose inputs stay in L2 may lie above the memory line."
    )
    return Figure("roofline", note, plots, Table(f"rates in {arms.kind} time", columns, rows, words=2))


def _rooflines(record: Record, cases: Sequence[CaseRecord]) -> dict[str, Roofline]:
    gpu = record.environment.gpu
    found = {case.name: roofline_of(case.work, gpu) for case in cases} if gpu else {}
    return {name: each for name, each in found.items() if each is not None}


def _intensity(case: CaseRecord) -> float:
    return case.work.flops / case.work.bytes


# What the figures have in common


@dataclass(frozen=True)
class _Shown:
    """What is drawn of an arm in a case: a number, and how it is written."""

    value: Callable[[CaseRecord, Rates], float]
    form: Callable[[float], str]


_SECONDS = _Shown(lambda _, rates: rates.seconds, format_seconds)
_TFLOPS = _Shown(lambda _, rates: rates.tflops, lambda value: f"{format_rate(value)} TFLOP/s")
_TBYTES = _Shown(lambda _, rates: rates.tbytes_per_second, lambda value: f"{format_rate(value)} TB/s")


def _arm_plot(
    name: str,
    title: str,
    shown: _Shown,
    arms: Arms,
    places: Sequence[tuple[float, CaseRecord]],
    axes: tuple[Axis, Axis],
    *,
    joined: bool = True,
    guides: Sequence[Guide] = (),
    height: float = 236.0,
    width: float = 340.0,
    size: str = "",
) -> Plot:
    """Return a plot with a series for each arm, the subject last, so that it is drawn on top."""
    series, described = [], []
    for slot, arm in arms.slots:
        points = [
            (x, shown.value(case, rates), case)
            for x, case in places
            if (rates := arms.rates[case.name].get(arm)) is not None
        ]
        if points:
            said = [(x, y, f"{arm}, {case.name}: {shown.form(y)}") for x, y, case in points]
            series.append(Series(arm, slot, said, joined=joined))
            low, high = (shown.form(end(y for _, y, _ in points)) for end in (min, max))
            described.append(f"{arm} from {low} to {high}")
    description = "; ".join(described) + ". The table has every value."
    return place_plot(
        name, title, description, series[::-1], *axes, guides=guides, width=width, height=height, size=size
    )


def _measured(arms: Arms, case: CaseRecord) -> list[tuple[int, str, Rates]]:
    """Return slot, name and rates of the arms that were measured in a case."""
    return [(slot, name, arms.rates[case.name][name]) for slot, name in arms.slots if name in arms.rates[case.name]]


def _share_percent(case: CaseRecord, rates: Rates, roofline: Roofline) -> float:
    return roofline.seconds(case.work) / rates.seconds * 100


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
