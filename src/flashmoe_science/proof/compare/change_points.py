"""Where a series of runs changes its level: pure functions on floats. They know nothing of records or causes.

Binary segmentation: the place that splits a series best is tested against what permuted series show, and where it
stands out, both sides are looked at in the same way. Whether there is a change is decided by the largest standardised
difference of mean ranks over all places, so that one run far off does not decide; where it is, by the least absolute
deviations from the medians of both sides. A permutation test is exact for any distribution of independent runs; the
first test holds the false alarms of a series without change at its level.

Sources: A. N. Pettitt, A non-parametric approach to the change-point problem, Applied Statistics 28 (1979); D. S.
Matteson and N. A. James, A nonparametric approach for multiple change point analysis of multivariate data, JASA 109
(2014), for the permutation test in binary segmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

LEVEL = 0.05
FEWEST_RUNS = 8  # of seven, 3 below 4 is not rare enough: 2 of 35 ways to split them are as extreme, which is 5.7 %
FEWEST_IN_SEGMENT = 2  # one run that is off is an outlier, not a level

_PERMUTATIONS = 1999

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class ChangePoint:
    """A new level that begins at ``place``: the index of the first run that has it."""

    place: int
    chance: float  # p-value: how often a series without change shows a place as clear


def change_points(values: Sequence[float], *, level: float = LEVEL, seed: int = 0) -> list[ChangePoint]:
    """Return where ``values``, in the order of time, change their level; nothing where they are too few to tell.

    ``level`` is the chance of a false alarm in a series without change; ``seed`` is that of the permutations. Raises
    ``InputError`` where a value is not finite.
    """
    series = np.asarray(values, dtype=np.float64)
    if not np.all(np.isfinite(series)):
        raise InputError("values must be finite numbers")
    return sorted(_split(series, 0, level, np.random.default_rng(seed)), key=lambda point: point.place)


def segments(points: Sequence[ChangePoint], count: int) -> list[range]:
    """Return the stretches of one level, as ranges of indices, of a series of ``count`` values."""
    places = [0, *(point.place for point in points), count]
    return [range(first, last) for first, last in pairwise(places)]


def _split(series: _Array, offset: int, level: float, rng: np.random.Generator) -> list[ChangePoint]:
    if len(series) < FEWEST_RUNS:
        return []
    from scipy.stats import rankdata  # takes a second to import, and most verbs need no ranks

    ranks: _Array = np.asarray(rankdata(series), dtype=np.float64)
    observed = float(_contrasts(ranks[None, :]).max())
    shuffled = rng.permuted(np.tile(ranks, (_PERMUTATIONS, 1)), axis=1)
    as_clear = int(np.sum(_contrasts(shuffled).max(axis=1) >= observed * (1 - 1e-12)))
    chance = (1 + as_clear) / (1 + _PERMUTATIONS)
    if chance > level:
        return []
    place = _clearest_place(series)
    return [
        ChangePoint(offset + place, chance),
        *_split(series[:place], offset, level, rng),
        *_split(series[place:], offset + place, level, rng),
    ]


def _clearest_place(series: _Array) -> int:
    """Return where two levels, one before and one after, leave the least absolute deviations."""

    def deviations(side: _Array) -> float:
        return float(np.abs(side - np.median(side)).sum())

    places = range(FEWEST_IN_SEGMENT, len(series) - FEWEST_IN_SEGMENT + 1)
    return min(places, key=lambda place: deviations(series[:place]) + deviations(series[place:]))


def _contrasts(rows: _Array) -> _Array:
    """Return for each row and place the size of the standardised difference between the means on either side."""
    n = rows.shape[1]
    left = np.arange(FEWEST_IN_SEGMENT, n - FEWEST_IN_SEGMENT + 1)
    sums = np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1)[:, left - 1]
    contrasts: _Array = np.abs(sums) / np.sqrt(left * (n - left) / n)
    return contrasts
