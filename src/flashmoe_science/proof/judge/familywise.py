"""Familywise intervals: for many cases, all of them hold together, whatever offsets processes have.

Pure functions on floats. A process may have an offset that all cases share, such as a slow worker. Then the cases are
not independent: three processes are three values, even with 36 cases. So the error of a case is split. The part that a
process adds to all cases has the degrees of freedom of the processes; it moves all cases alike and needs no correction
for many cases. The rest belongs to the case, has the degrees of freedom of all cases, and uses Bonferroni's level. An
interval is as wide as both together. ``docs/explanation/statistics.md`` gives the simulated coverage.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from .statistics import Groups, Interval, between_to_within, hodges_lehmann, interval, shift_interval

# Up to this many cases Bonferroni costs less than splitting the error, and holds whatever the cases share.
_FEW_CASES = 3

_Array = NDArray[np.float64]
_Samples = tuple[Groups, ...]  # one of a paired comparison; of two runs that of either


def comparison_intervals(
    cases: Sequence[Groups], shared: Sequence[Hashable] | None = None, confidence: float = 0.95
) -> list[Interval]:
    """Return one interval for each case, such that all of them hold together, however few the cases are.

    For one case it is ``clustered_interval``, and for no case narrower than that. ``shared`` has a label for each case:
    those of one label were measured in the same processes, in the same order, and by one kind of time; by default all
    were. Raises ``TooFewRoundsError``: no interval of this confidence exists.
    """
    return _familywise([(groups,) for groups in cases], shared, confidence)


def unpaired_intervals(
    cases: Sequence[tuple[Groups, Groups]], shared: Sequence[Hashable] | None = None, confidence: float = 0.95
) -> list[Interval]:
    """Return by how much the first of two independent samples lies above the second, for each case; all hold together.

    The Hodges-Lehmann shift with the exact Mann-Whitney interval over rounds, and processes as in
    ``comparison_intervals``. What differs from run to run is not in it.

    Raises:
        TooFewRoundsError: no interval of this confidence exists.
    """
    return _familywise(cases, shared, confidence)


def _familywise(cases: Sequence[_Samples], shared: Sequence[Hashable] | None, confidence: float) -> list[Interval]:
    """Return intervals that hold together, of paired values or of two samples each."""
    if not cases:
        return []
    labels = shared if shared is not None else [None] * len(cases)
    level = 1 - (1 - confidence) / len(cases)
    found = [_over_rounds(samples, level) for samples in cases]
    blocks: dict[Hashable, list[int]] = {}
    for number, (label, samples) in enumerate(zip(labels, cases, strict=True)):
        blocks.setdefault((label, *map(len, samples)), []).append(number)
    large = [block for block in blocks.values() if len(block) > _FEW_CASES]
    for block in blocks.values():
        few = block not in large
        each = level if few else 1 - (1 - confidence) / len(large)
        samples_of = [cases[number] for number in block]
        if not few:
            for number, one in zip(block, _decomposed(samples_of, level, each), strict=True):
                found[number] = one
        for number in block:
            found[number] = _with_own_processes(found[number], cases[number], each)
    return found


def _over_rounds(samples: _Samples, confidence: float) -> Interval:
    """Return the interval that treats all rounds as independent."""
    pooled = [[value for group in groups for value in group] for groups in samples]
    return interval(pooled[0], confidence) if len(pooled) == 1 else shift_interval(pooled[0], pooled[1], confidence)


def _with_own_processes(found: Interval, samples: _Samples, confidence: float) -> Interval:
    """Return an interval that is no narrower than Student's t over the processes of this case alone."""
    centres = [_centres(groups) for groups in samples]
    if (half := _student_half(centres, confidence)) is None:
        return found
    middle = float(centres[0].mean() - (centres[1].mean() if len(centres) > 1 else 0.0))
    return replace(found, low=min(found.low, middle - half), high=max(found.high, middle + half))


def _decomposed(cases: Sequence[_Samples], level: float, confidence: float) -> list[Interval]:
    """Return the intervals of cases that share their processes: a common part and a part of each case."""
    count = len(cases)
    centred = [[_centres(groups) - _centres(groups).mean() for groups in sample] for sample in zip(*cases, strict=True)]
    common: list[_Array] = [np.mean(sample, axis=0) for sample in centred]
    half = _student_half(common, confidence)
    residuals: list[_Samples] = [
        tuple(_without_offsets(groups, offsets) for groups, offsets in zip(samples, common, strict=True))
        for samples in cases
    ]
    if half is None:  # one process says nothing of others
        return [_over_rounds(samples, level) for samples in cases]
    # The mean over the cases contains 1 / count of each case's own part.
    ratios = [ratio for samples in residuals for groups in samples if (ratio := between_to_within(groups)) is not None]
    excess = max(1.0, float(np.mean(ratios)) * count / (count - 1)) if ratios else 1.0
    degrees = (count - 1) * sum(len(offsets) - 1 for offsets in common)
    upper = (1 + level) / 2
    factor = math.sqrt(excess) * float(stdtrit(degrees, upper) / ndtri(upper))
    found = []
    for raw, samples in zip(cases, residuals, strict=True):
        estimate, rest = _over_rounds(raw, level), _over_rounds(samples, level)
        below, above = rest.estimate - rest.low, rest.high - rest.estimate
        low, high = estimate.estimate - half - factor * below, estimate.estimate + half + factor * above
        found.append(replace(estimate, low=low, high=high))
    return found


def _centres(groups: Groups) -> _Array:
    return np.array([hodges_lehmann(group) for group in groups])


def _without_offsets(groups: Groups, offsets: _Array) -> list[list[float]]:
    """Return the values of each process without its offset."""
    return [[value - offset for value in group] for group, offset in zip(groups, offsets.tolist(), strict=True)]


def _student_half(samples: Sequence[_Array], confidence: float) -> float | None:
    """Return half of Student's interval for a mean, or of Welch's for the difference of two; None: one value only."""
    sizes = [len(values) for values in samples]
    if min(sizes) < 2:
        return None
    errors = [float(values.var(ddof=1)) / size for values, size in zip(samples, sizes, strict=True)]
    total = sum(errors)
    if total == 0:
        return 0.0
    degrees = total**2 / sum(error**2 / (size - 1) for error, size in zip(errors, sizes, strict=True))
    return float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(total)
