"""Bars of intervals as SVG, a cell of a table each, on one scale of equal ratios. Colours come from the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..text import foreign

_APART = 12.0  # per cent of a cell between two ticks


@dataclass(frozen=True)
class Ruler:
    """The scale that the bars of a table share, in per cent of a cell."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where ``value`` stands, at the nearer end where it is outside."""
        share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return round(3.0 + min(1.0, max(0.0, share)) * 94.0, 1)

    def ticks(self) -> list[float]:
        """Return round numbers inside that are well apart, even in a narrow cell."""
        kept: list[float] = []
        for tick in _ticks(self.low, self.high):
            if not kept or self.place(tick) - self.place(kept[-1]) >= _APART:
                kept.append(tick)
        return kept


def find_ruler(values: Iterable[float], lines: Iterable[float]) -> Ruler:
    """Return a ruler with all ``values`` and ``lines``, and a margin."""
    shown = [*values, *lines]
    return Ruler(min(shown) / 1.03, max(shown) * 1.03)


def _ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    if decades < 0.45 and len(inside := _linear_ticks(low, high)) > 1:
        return inside
    steps: Sequence[float] = (1,) if decades > 3 else (1, 3) if decades > 2 else (1, 2, 5)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1.2 else steps
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [at for power in powers for step in steps if low <= (at := step * 10.0**power) <= high]


def _linear_ticks(low: float, high: float) -> list[float]:
    """Return multiples of the round step that divides the span into about four."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(s for s in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if (high - low) / s <= 5)
    return [number * step for number in range(max(1, math.ceil(low / step)), math.floor(high / step) + 1)]


def draw_ruler(ruler: Ruler) -> Markup:
    """Return the ticks of a ruler."""
    texts = [_tag("text", f"{at:g}x", x=f"{ruler.place(at)}%", y=12) for at in ruler.ticks()]
    return _tag("svg", *texts, class_="ruler", aria_hidden="true")


def draw_bar(ruler: Ruler, side: str, ends: tuple[float, float, float] | None, lines: Sequence[float]) -> Markup:
    """Return a cell with an interval (low, estimate, high), the ticks of its ruler and ``lines`` to read it by."""
    parts = [_upright("tick", ruler.place(at)) for at in ruler.ticks()]
    parts += [_upright("one" if at == 1.0 else "claimed", ruler.place(at)) for at in lines]
    if ends is not None:
        low, middle, high = (f"{ruler.place(end)}%" for end in ends)
        parts.append(_tag("line", class_="range", x1=low, x2=high, y1="50%", y2="50%"))
        parts.append(_tag("circle", class_="middle", cx=middle, cy="50%", r=4.5))
    return _tag("svg", *parts, class_=f"bar {side}", aria_hidden="true")


def _upright(kind: str, percent: float) -> Markup:
    return _tag("line", class_=kind, x1=f"{percent}%", x2=f"{percent}%", y1="0", y2="100%")


def _tag(element: str, *content: str, **attributes: object) -> Markup:
    """Return an element. Texts and values are escaped, whoever wrote them; an underscore in a name is a hyphen."""
    said = Markup("").join(part if isinstance(part, Markup) else foreign(part, "html") for part in content)
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    shown = Markup("").join(Markup(' {}="{}"').format(name, foreign(str(value), "html")) for name, value in named)
    return Markup("<{0}{1}>{2}</{0}>").format(element, shown, said)
