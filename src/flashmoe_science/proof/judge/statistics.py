"""Intervals for paired log-ratios: pure functions on floats. They know nothing of records, times or claims.

A *value* is the log-ratio of two arms' times in one round. The rounds of one worker process form a *group*: within a
group they are close to independent, but a process may have an offset of its own. So an interval looks at both: at the
rounds (Hodges-Lehmann with the exact Wilcoxon signed-rank interval) and at the processes (Student's t on one value for
each), and takes the further end on either side. ``docs/explanation/statistics.md`` gives the simulated coverage of
each function, and says why nothing narrower is honest with three processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from ...errors import InputError, TooFewRoundsError

Values = Sequence[float]
Groups = Sequence[Values]  # one entry for each process: the values of its rounds

_Array = NDArray[np.float64]

_EXACT_ROUNDS = 200  # up to here the signed-rank distribution is counted; beyond, its normal limit is exact to 1e-3
_MOST_ROUNDS = 1_000_000  # rounds_needed gives up here: no run is that long
_RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval. ``n`` is the number of values behind it."""

    estimate: float
    low: float
    high: float
    n: int
    confidence: float = 0.95

    def exp(self) -> Interval:
        """Return the same interval as a ratio, when this one is of log-ratios."""
        return replace(self, estimate=math.exp(self.estimate), low=math.exp(self.low), high=math.exp(self.high))

    def widened(self, by: float) -> Interval:
        """Return the interval with both ends moved outwards."""
        return replace(self, low=self.low - by, high=self.high + by)

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies in the interval, ends included."""
        return self.low <= value <= self.high


def log_ratios(above: Values, below: Values) -> list[float]:
    """Return ``log(above / below)``, round by round.

    Raises ``InputError``: the columns differ in length, or hold a time that is not positive and finite.
    """
    if len(above) != len(below):
        raise InputError(f"the columns must have the same length, got {len(above)} and {len(below)}")
    for seconds in (*above, *below):
        if not 0 < seconds < math.inf:
            raise InputError(f"seconds must be positive and finite, got {seconds}")
    return [math.log(a / b) for a, b in zip(above, below, strict=True)]


def hodges_lehmann(values: Values) -> float:
    """Return the median of the means of all pairs of values, each with itself included."""
    return _hodges_lehmann(tuple(values))


def interval(values: Values, confidence: float = 0.95) -> Interval:
    """Return the Hodges-Lehmann estimate with the exact Wilcoxon signed-rank interval.

    Raises ``TooFewRoundsError``: no interval of this confidence exists; 95 % needs at least 6 values.
    """
    values = _checked(values)
    dropped = _dropped_averages(len(values), confidence)
    if dropped == 0:
        fewest = math.ceil(math.log2(2 / (1 - confidence)))
        raise TooFewRoundsError(
            f"{len(values)} rounds cannot give an interval of {confidence:.4g} confidence, expected at least {fewest}",
            hint="run more rounds",
        )
    return _between(_walsh_averages(values), dropped, len(values), confidence)


def clustered_interval(groups: Groups, confidence: float = 0.95) -> Interval:
    """Return an interval that holds whether or not processes have offsets of their own.

    Each end is the further one of two: ``interval`` over all rounds, and Student's t over the processes' own
    Hodges-Lehmann estimates. With one process there is only the first, which says nothing about other processes.
    """
    by_round = interval([value for group in groups for value in group], confidence)
    if len(groups) < 2:
        return by_round
    low, high = _student(np.array([hodges_lehmann(group) for group in groups]), confidence)
    return replace(by_round, low=min(by_round.low, low), high=max(by_round.high, high))


def family_intervals(cases: Sequence[Groups], confidence: float = 0.95) -> list[Interval]:
    """Return one interval for each case, such that all of them hold together with ``confidence``.

    Bonferroni's level for each case, over its rounds. With few processes one case can hardly tell whether processes
    have offsets; all cases together can. So the variance between processes is set against the variance within them,
    averaged over the cases, and where it is larger every interval is widened accordingly, with Student's t for the
    degrees of freedom that the cases have together.
    """
    if not cases:
        return []
    level = 1 - (1 - confidence) / len(cases)
    intervals = [interval([value for group in groups for value in group], level) for groups in cases]
    ratios = [ratio for groups in cases if (ratio := between_to_within(groups)) is not None]
    excess = float(np.mean(ratios)) if ratios else 1.0  # without offsets it is 1
    if excess <= 1:
        return intervals
    degrees, upper = sum(len(groups) - 1 for groups in cases if len(groups) > 1), (1 + level) / 2
    factor = math.sqrt(excess) * float(stdtrit(degrees, upper) / ndtri(upper))
    return [
        replace(i, low=i.estimate - factor * (i.estimate - i.low), high=i.estimate + factor * (i.high - i.estimate))
        for i in intervals
    ]


def shift_interval(above: Values, below: Values, confidence: float = 0.95) -> Interval:
    """Return the median of all differences between two samples, with the exact interval of the Mann-Whitney test.

    Raises ``TooFewRoundsError``: no interval of this confidence exists; 95 % needs at least 4 values on either side.
    """
    above, below = _checked(above), _checked(below)
    dropped = _dropped_differences(len(above), len(below), confidence)
    if dropped == 0:
        raise TooFewRoundsError(
            f"{len(above)} and {len(below)} rounds cannot give an interval of {confidence:.4g} confidence",
            hint="run more rounds",
        )
    differences = np.subtract.outer(np.asarray(above), np.asarray(below)).ravel()
    return _between(differences, dropped, min(len(above), len(below)), confidence)


def _between(values: _Array, dropped: int, n: int, confidence: float) -> Interval:
    """Return the median of ``values``, and as interval what is left without those ``dropped`` at either end."""
    ordered = np.sort(values)
    return Interval(_median(ordered), float(ordered[dropped - 1]), float(ordered[-dropped]), n, confidence)


def suite_interval(
    cases: Sequence[Groups], confidence: float = 0.95, *, resamples: int = _RESAMPLES, seed: int = 0
) -> Interval:
    """Return the mean over cases with a bootstrap interval clustered by case and process.

    Cases and processes are drawn with replacement, independently of each other, so a process that was slow in every
    case counts once. The percentile interval is widened to Student's t for the number of cases, and, as in
    ``clustered_interval``, never narrower than what the processes' own means over the suite show.

    Args:
        cases: For each case its processes, each with its values. Process ``i`` is the same process in every case;
            an empty one was not measured in that case and counts as the mean of the others.
        confidence: Confidence of the interval.
        resamples: Draws of the bootstrap.
        seed: Seed of the draws; the same seed gives the same interval.

    Raises:
        TooFewRoundsError: there are fewer than two cases.
    """
    if len(cases) < 2:
        raise TooFewRoundsError(
            f"a suite needs at least 2 cases for an interval over cases, got {len(cases)}",
            hint="use the interval of the case itself",
        )
    centres = _centres(cases)
    n_cases, n_processes = centres.shape
    rng = np.random.default_rng(seed)
    drawn_cases = rng.integers(0, n_cases, (resamples, n_cases))
    drawn_processes = rng.integers(0, n_processes, (resamples, n_processes))
    means = centres[drawn_cases[:, :, None], drawn_processes[:, None, :]].mean(axis=(1, 2))

    estimate = float(centres.mean())
    upper = (1 + confidence) / 2
    low, high = (float(end) for end in np.quantile(means, [1 - upper, upper]))
    # The percentile bootstrap of a mean of n has the variance of n, not n - 1, and the tails of the normal, not of t.
    factor = math.sqrt(n_cases / (n_cases - 1)) * float(stdtrit(n_cases - 1, upper) / ndtri(upper))
    low, high = estimate - factor * (estimate - low), estimate + factor * (high - estimate)
    if n_processes > 1:
        process_low, process_high = _student(centres.mean(axis=0), confidence)
        low, high = min(low, process_low), max(high, process_high)
    return Interval(estimate, low, high, n_cases, confidence)


def smallest_effect(values: Values, confidence: float = 0.95, power: float = 0.8) -> float:
    """Return the smallest true effect that as many values of this spread tell from zero with chance ``power``."""
    return _detectable(_spread(values), len(values), confidence, power)


def rounds_needed(values: Values, effect: float, confidence: float = 0.95, power: float = 0.8) -> int | None:
    """Return how many rounds with the spread of ``values`` see ``effect``; None: more than any run has."""
    spread = _spread(values)
    return _fewest(lambda n: _detectable(spread, n, confidence, power) <= effect)


def _spread(values: Values) -> float:
    if len(_checked(values)) < 2:
        raise TooFewRoundsError("one round has no spread, expected at least 2", hint="run more rounds")
    return float(np.std(values, ddof=1))


def clustered_smallest_effect(groups: Groups, confidence: float = 0.95, power: float = 0.8) -> float:
    """Return the smallest true effect that ``clustered_interval`` tells from zero with probability ``power``."""
    over_rounds = smallest_effect([value for group in groups for value in group], confidence, power)
    if len(groups) < 2:
        return over_rounds
    return max(over_rounds, smallest_effect([hodges_lehmann(group) for group in groups], confidence, power))


def processes_needed(groups: Groups, effect: float, confidence: float = 0.95, power: float = 0.8) -> int | None:
    """Return how many processes, each with as many rounds as these, let ``clustered_interval`` see ``effect``.

    None: more than any run has. The answer is as uncertain as the spread that these groups show.
    """
    values = [value for group in groups for value in group]
    rounds = rounds_needed(values, effect, confidence, power)
    if rounds is None or len(groups) < 2:
        return rounds
    by_process = rounds_needed([hodges_lehmann(group) for group in groups], effect, confidence, power)
    by_round = math.ceil(rounds * len(groups) / len(values))
    return None if by_process is None else max(by_process, by_round)


def _checked(values: Values) -> Values:
    """Return ``values`` if there are any and all are finite."""
    if not len(values) or not np.all(np.isfinite(values)):
        raise InputError(f"values must be finite numbers and at least one, got {list(values)}")
    return values


@lru_cache(maxsize=1 << 14)  # many claims are about the same rounds
def _hodges_lehmann(values: tuple[float, ...]) -> float:
    return _median(np.sort(_walsh_averages(_checked(values))))


def _median(ordered: _Array) -> float:
    """Return the median of sorted values; ``np.median`` takes several times as long for so few."""
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _walsh_averages(values: Values) -> _Array:
    """Return the means of all pairs, each with itself included."""
    array = np.asarray(values, dtype=np.float64)
    first, second = _pairs(len(array))
    averages: _Array = (array[first] + array[second]) / 2
    return averages


_pairs = lru_cache(maxsize=256)(np.triu_indices)  # by the number of values


@lru_cache(maxsize=256)
def _dropped_averages(n: int, confidence: float) -> int:
    """Return how many of the sorted Walsh averages lie up to and including each end of the interval; 0: none exists."""
    tail = (1 - confidence) / 2
    if n > _EXACT_ROUNDS:
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        return max(0, math.floor(mean - float(ndtri(1 - tail)) * math.sqrt(variance)))
    chances: _Array = np.ones(1)  # of each signed-rank sum
    for rank in range(1, n + 1):
        longer = np.zeros(chances.size + rank)
        longer[: chances.size] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    return int(np.searchsorted(np.cumsum(chances), tail * (1 + 1e-12), side="right"))


@lru_cache(maxsize=256)
def _dropped_differences(m: int, n: int, confidence: float) -> int:
    """Return how many of the sorted differences lie up to and including each end of the interval; 0: none exists."""
    tail = (1 - confidence) / 2
    if m + n > 2 * _EXACT_ROUNDS:
        mean, variance = m * n / 2, m * n * (m + n + 1) / 12
        return max(0, math.floor(mean - float(ndtri(1 - tail)) * math.sqrt(variance)))
    counts: _Array = np.zeros(m * n + 1)  # of each Mann-Whitney sum: the coefficients of a Gaussian binomial
    counts[0] = 1.0
    for i in range(1, m + 1):
        counts[n + i :] -= counts[: -(n + i)].copy() if n + i < len(counts) else 0.0
        for start in range(i):
            counts[start::i] = np.cumsum(counts[start::i])
    return int(np.searchsorted(np.cumsum(counts), tail * math.comb(m + n, m) * (1 + 1e-12), side="right"))


def _student(values: _Array, confidence: float) -> tuple[float, float]:
    """Return the ends of Student's interval for the mean."""
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def between_to_within(groups: Groups) -> float | None:
    """Return the variance between processes over what the rounds within explain; 1 is expected without offsets."""
    degrees = sum(len(group) for group in groups) - len(groups)
    if len(groups) < 2 or degrees <= 2:
        return None
    within = sum(len(group) * float(np.var(group)) for group in groups) / degrees
    if within == 0:
        return None
    sizes = np.array([len(group) for group in groups])
    centres = np.array([hodges_lehmann(group) for group in groups])
    between = float(np.sum(sizes * (centres - np.average(centres, weights=sizes)) ** 2)) / (len(groups) - 1)
    # The mean of this ratio is that of F, times the variance of Hodges-Lehmann against the mean (normal noise: pi / 3).
    return between / within * (degrees - 2) / degrees * 3 / math.pi


def _centres(cases: Sequence[Groups]) -> _Array:
    """Return the Hodges-Lehmann estimate of every case and process, [cases, processes]."""
    table = np.full((len(cases), max(len(groups) for groups in cases)), np.nan)
    for row, groups in enumerate(cases):
        for column, group in enumerate(groups):
            if len(group):
                table[row, column] = hodges_lehmann(group)
    if np.isnan(table).all(axis=1).any():
        raise TooFewRoundsError("a case has no rounds at all, expected at least one process with rounds")
    return np.where(np.isnan(table), np.nanmean(table, axis=1, keepdims=True), table)


def _detectable(spread: float, n: int, confidence: float, power: float) -> float:
    """Return the smallest effect that n values of this spread see, by Student's t."""
    return float(stdtrit(n - 1, (1 + confidence) / 2) + stdtrit(n - 1, power)) * spread / math.sqrt(n)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """Return the smallest n from 2 on for which ``enough``, which stays true once it is; None: beyond all bounds."""
    high = 2
    while not enough(high):
        high *= 2
        if high > _MOST_ROUNDS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
