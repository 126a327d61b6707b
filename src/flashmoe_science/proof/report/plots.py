"""Plots as SVG. Colours come from the page's style sheet, so a plot is right on light and dark screens and on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..text import foreign

WIDTH = 340.0  # pixels of a plot, and around it: tick labels, the name of either axis
_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 12.0, 26.0, 40.0
_LETTER = 6.4  # pixels of a letter of a tick label, at most
_APART = 12.0  # per cent of a cell between two ticks of a ruler
_SHAPES = (  # of the marks of arms, around 0 0
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-4.8L4.6 3.6H-4.6Z",
    "M0-5.2L5.2 0L0 5.2L-5.2 0Z", "M0 4.8L4.6-3.6H-4.6Z", "M-1.5-4.6h3v3.1h3.1v3h-3.1v3.1h-3v-3.1h-3.1v-3h3.1z",
)  # fmt: skip


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
        low, high, at = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(self.start + min(1.0, max(0.0, (at - low) / (high - low))) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return round numbers inside, about three to seven."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def find_scale(axis: Axis, values: Iterable[float], start: float, end: float, *, margin: float = 1.12) -> Scale:
    """Return a scale that shows all ``values`` and the bounds of the axis; of equal ratios, with a margin."""
    shown = [*values, *(bound for bound in (axis.low, axis.high) if bound is not None)]
    if axis.log:
        shown = [value for value in shown if value > 0 and math.isfinite(value)] or [1.0]
        return Scale(min(shown) / margin, max(shown) * margin, start, end, log=True)
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
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    if decades < 0.45 and len(inside := [at for at in _linear_ticks(low, high) if at > 0]) > 1:
        return inside
    steps: Sequence[float] = (1,) if decades > 3 else (1, 3) if decades > 2 else (1, 2, 5)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1.2 else steps
    every = max(1, math.ceil(decades / 7))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers if power % every == 0 for step in steps]
    return [at for at in found if low <= at <= high]


def draw(
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
    height: float = 236.0,
) -> Markup:
    """Return a plot of at least one point: upright lines at ``rules``, short strokes at the foot at ``alarms``."""
    right, bottom = WIDTH - _RIGHT, height - _BOTTOM
    points = [point for each in series for point in each.points]
    xs = find_scale(x, [point[0] for point in points], _LEFT, right)
    ys = find_scale(y, [point[1] for point in points], bottom, _TOP)
    parts = [_tag("title", title, id=f"{name}-t"), _tag("desc", description, id=f"{name}-d")]
    for at in y.ticks or ys.ticks():
        parts.append(_line("grid", _LEFT, right, ys.place(at), ys.place(at)))
        parts.append(_tag("text", y.form(at), x=_LEFT - 6, y=ys.place(at) + 3.8, text_anchor="end"))
    parts += [_line("rule", xs.place(at), xs.place(at), _TOP, bottom) for at in rules]
    parts.append(_line("frame", _LEFT, right, bottom, bottom))
    free = -math.inf
    for at in sorted(x.ticks or xs.ticks()):
        place, half = xs.place(at), len(x.form(at)) * _LETTER / 2
        parts.append(_line("frame", place, place, bottom, bottom + 4))
        if place - half >= free:  # else it would run into the one before
            parts.append(_tag("text", x.form(at), x=place, y=bottom + 16, text_anchor="middle"))
            free = place + half + _LETTER
    parts.append(_tag("text", y.name, class_="name", x=0, y=12))
    parts.append(_tag("text", x.name, class_="name", x=right, y=height - 6, text_anchor="end"))
    parts += [_line("alarm", xs.place(at), xs.place(at), bottom - 7, bottom) for at in alarms]
    for guide in guides:
        placed = [(xs.place(a), ys.place(b)) for a, b in guide.points]
        at_x, at_y = placed[0 if guide.first else -1]
        parts.append(_tag("path", class_="guide", d=_path(placed)))
        anchor = "start" if guide.first else "end"
        parts.append(_tag("text", guide.text, class_="guide-text", x=at_x, y=at_y - 5, text_anchor=anchor))
    for each in series:
        places = [(xs.place(a), ys.place(b)) for a, b, _ in each.points]
        inside = [_tag("path", class_="line", d=_path(places))] if each.joined and len(places) > 1 else []
        told = zip(places, each.points, strict=True) if each.marked else ()
        inside += [draw_mark(each.slot, *place, said) for place, (_, _, said) in told]
        parts.append(_tag("g", *inside, class_=f"c{each.slot % 6}"))
    about = {"role": "img", "aria_labelledby": f"{name}-t {name}-d"}
    return _tag("svg", *parts, class_="chart", viewBox=f"0 0 {WIDTH:g} {height:g}", **about)


def draw_mark(slot: int, x: float = 0.0, y: float = 0.0, said: str = "") -> Markup:
    """Return the mark of an arm: colour and shape both tell arms apart."""
    title = [_tag("title", said)] if said else []
    shape = _SHAPES[(slot + slot // 6) % 6]
    return _tag("path", *title, class_="mark", transform=f"translate({x:g} {y:g})", d=shape)


def find_ruler(values: Iterable[float], lines: Iterable[float]) -> Scale:
    """Return the scale that the bars of a table share, in per cent of a cell, with all ``values`` and ``lines``."""
    return find_scale(Axis("", str, log=True), [*values, *lines], 3.0, 97.0, margin=1.03)


def draw_ruler(ruler: Scale) -> Markup:
    """Return the ticks of a ruler: those that are well apart, even in a narrow cell."""
    texts = [_tag("text", f"{at:g}x", x=f"{ruler.place(at)}%", y=12) for at in _thinned(ruler)]
    return _tag("svg", *texts, class_="ruler", aria_hidden="true")


def draw_bar(ruler: Scale, side: str, ends: tuple[float, float, float] | None, lines: Sequence[float]) -> Markup:
    """Return a cell with an interval (low, estimate, high), the ticks of its ruler and ``lines`` to read it by."""
    parts = [_upright("tick", ruler.place(at)) for at in _thinned(ruler)]
    parts += [_upright("one" if at == 1.0 else "claimed", ruler.place(at)) for at in lines]
    if ends is not None:
        low, middle, high = (f"{ruler.place(end)}%" for end in ends)
        parts.append(_line("range", low, high, "50%", "50%"))
        parts.append(_tag("circle", class_="middle", cx=middle, cy="50%", r=4.5))
    return _tag("svg", *parts, class_=f"bar {side}", aria_hidden="true")


def _thinned(ruler: Scale) -> list[float]:
    kept: list[float] = []
    for tick in ruler.ticks():
        if not kept or ruler.place(tick) - ruler.place(kept[-1]) >= _APART:
            kept.append(tick)
    return kept


def _upright(kind: str, percent: float) -> Markup:
    return _line(kind, f"{percent}%", f"{percent}%", "0", "100%")


def _line(kind: str, x1: object, x2: object, y1: object, y2: object) -> Markup:
    return _tag("line", class_=kind, x1=x1, x2=x2, y1=y1, y2=y2)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _tag(element: str, *content: str, **attributes: object) -> Markup:
    """Return an element. Texts and values are escaped, whoever wrote them; an underscore in a name is a hyphen."""
    said = Markup("").join(part if isinstance(part, Markup) else foreign(part, "html") for part in content)
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    shown = Markup("").join(Markup(' {}="{}"').format(name, foreign(str(value), "html")) for name, value in named)
    return Markup("<{0}{1}>{2}</{0}>").format(element, shown, said)
