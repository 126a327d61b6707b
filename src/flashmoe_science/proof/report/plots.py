"""Plots as plain shapes, in pixels or per cent: where things are drawn, and nothing about what they mean.

A template makes SVG of them, with colours from the page's style sheet, so that one plot is right on a light screen, on
a dark one and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 12.0, 26.0, 40.0  # pixels around the plot: tick labels, the name of either axis
_LETTER = 6.4  # pixels of a letter of a tick label, at most


@dataclass(frozen=True)
class Axis:
    """One axis of a plot.

    Args:
        name: What is on it, with the unit.
        form: Value -> text of a tick.
        log: Whether equal distances are equal ratios.
        ticks: Where to put ticks. Default: round numbers.
        low, high: What it has to show at least, beside the values.
    """

    name: str
    form: Callable[[float], str]
    log: bool = False
    ticks: Sequence[float] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Values of one arm. ``slot`` chooses its colour and its mark everywhere on the page."""

    name: str
    slot: int
    points: Sequence[tuple[float, float, str]]  # x, y, what a reader who points at it is told
    joined: bool = True
    marked: bool = True


@dataclass(frozen=True)
class Guide:
    """A line of reference, e.g. the roofline. Its text is above its end, or, with ``first``, its beginning."""

    text: str
    points: Sequence[tuple[float, float]]
    first: bool = False


@dataclass(frozen=True)
class Mark:
    """A point, placed."""

    x: float
    y: float
    said: str


@dataclass(frozen=True)
class Line:
    """A series, placed. ``path`` is its line as SVG path data, or nothing."""

    name: str
    slot: int
    path: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Label:
    """A text and where it stands: along its axis for a tick."""

    at: float
    text: str


@dataclass(frozen=True)
class PlacedGuide:
    """A guide, placed."""

    path: str
    text: str
    x: float
    y: float
    anchor: str


@dataclass(frozen=True)
class Plot:
    """Everything placed, in pixels."""

    id: str
    title: str
    description: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_name: str
    y_name: str
    x_ticks: Sequence[Label]
    y_ticks: Sequence[Label]
    lines: Sequence[Line]
    guides: Sequence[PlacedGuide] = ()
    rules: Sequence[float] = ()  # x of upright lines
    alarms: Sequence[float] = ()  # x of short strokes at the foot
    size: str = field(default="")  # a class of the style sheet


def place_plot(
    name: str,
    title: str,
    description: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    guides: Sequence[Guide] = (),
    rules: Sequence[float] = (),
    alarms: Sequence[float] = (),
    width: float = 340.0,
    height: float = 236.0,
    size: str = "",
) -> Plot:
    """Place a plot of at least one point."""
    points = [point for each in series for point in each.points]
    xs = _scale(x, [point[0] for point in points], _LEFT, width - _RIGHT)
    ys = _scale(y, [point[1] for point in points], height - _BOTTOM, _TOP)
    lines = [
        Line(
            each.name,
            each.slot,
            _path([(xs.place(px), ys.place(py)) for px, py, _ in each.points]) if each.joined else "",
            [Mark(_round(xs.place(px)), _round(ys.place(py)), said) for px, py, said in each.points]
            if each.marked
            else [],
        )
        for each in series
    ]
    return Plot(
        id=name,
        title=title,
        description=description,
        width=width,
        height=height,
        left=_LEFT,
        right=width - _RIGHT,
        top=_TOP,
        bottom=height - _BOTTOM,
        x_name=x.name,
        y_name=y.name,
        x_ticks=_spaced([Label(_round(xs.place(at)), x.form(at)) for at in x.ticks or xs.ticks()]),
        y_ticks=[Label(_round(ys.place(at)), y.form(at)) for at in y.ticks or ys.ticks()],
        lines=lines,
        guides=[_place_guide(guide, xs, ys) for guide in guides],
        rules=[_round(xs.place(at)) for at in rules],
        alarms=[_round(xs.place(at)) for at in alarms],
        size=size,
    )


@dataclass(frozen=True)
class Scale:
    """A stretch of values on a stretch of pixels (or per cent)."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        """Return where ``value`` stands, at the nearer end where it is outside."""
        if self.log and value <= 0:
            return self.start
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = (at - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers inside, about three to seven."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def log_scale(values: Iterable[float], start: float, end: float, *, margin: float = 1.06) -> Scale:
    """Return a scale of equal ratios that shows all ``values``, with a margin."""
    values = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    return Scale(min(values) / margin, max(values) * margin, start, end, log=True)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    shown = [*values, *(bound for bound in (axis.low, axis.high) if bound is not None)]
    if axis.log:
        return log_scale(shown, start, end, margin=1.12)
    low, high = min(shown), max(shown)
    if low == high:
        low, high = low - (abs(low) * 0.05 or 1.0), high + (abs(high) * 0.05 or 1.0)
    step = _step(high - low)
    above = high if high == axis.high else math.ceil(high / step - 1e-9) * step
    below = low if low == axis.low else math.floor(low / step + 1e-9) * step
    return Scale(below, above, start, end, log=False)


def _step(span: float) -> float:
    """Return the round step that divides ``span`` into about four."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if span / step <= 5)


def _linear_ticks(low: float, high: float) -> list[float]:
    step = _step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    steps: Sequence[float] = (1,) if decades > 3 else (1, 3) if decades > 2 else (1, 2, 5)
    if decades < 1.2:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    if decades < 0.45:
        inside = [at for at in _linear_ticks(low, high) if at > 0]
        if len(inside) > 1:
            return inside
    every = max(1, math.ceil(decades / 7))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [power for power in range(first, last + 1) if power % every == 0]
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def _spaced(labels: Sequence[Label]) -> list[Label]:
    """Return the labels without the text of those that would run into the one before."""
    spaced: list[Label] = []
    free = -math.inf
    for label in sorted(labels, key=lambda label: label.at):
        half = len(label.text) * _LETTER / 2
        fits = label.at - half >= free
        spaced.append(label if fits else Label(label.at, ""))
        free = label.at + half + _LETTER if fits else free
    return spaced


def _place_guide(guide: Guide, xs: Scale, ys: Scale) -> PlacedGuide:
    placed = [(xs.place(x), ys.place(y)) for x, y in guide.points]
    x, y = placed[0] if guide.first else placed[-1]
    return PlacedGuide(_path(placed), guide.text, _round(x), _round(y - 5), "start" if guide.first else "end")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_round(x):g} {_round(y):g}" for x, y in points) if len(points) > 1 else ""


def _round(value: float) -> float:
    return round(value, 1) + 0.0  # no negative zero


@dataclass(frozen=True)
class Bar:
    """An interval in the row of a table, in per cent of the cell."""

    low: float
    estimate: float
    high: float


@dataclass(frozen=True)
class Ruler:
    """The scale that the bars of a table share, in per cent: its ticks, and upright lines to read them by."""

    scale: Scale
    ticks: Sequence[Label]
    lines: Sequence[Label]

    def bar(self, low: float, estimate: float, high: float) -> Bar:
        """Place an interval."""
        return Bar(*(round(self.scale.place(value), 2) for value in (low, estimate, high)))


def place_ruler(values: Iterable[float], lines: Sequence[tuple[float, str]]) -> Ruler:
    """Return a ruler of equal ratios for ``values``, with upright ``lines`` at some of them."""
    scale = log_scale([*values, *(at for at, _ in lines)], 3.0, 97.0, margin=1.03)
    ticks = [Label(round(scale.place(at), 2), f"{at:g}x") for at in scale.ticks()]
    return Ruler(scale, _thinned(ticks), [Label(round(scale.place(at), 2), text) for at, text in lines])


def _thinned(ticks: Sequence[Label]) -> list[Label]:
    """Return ticks that are well apart, even in a narrow cell."""
    kept: list[Label] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= 12:
            kept.append(tick)
    return kept
