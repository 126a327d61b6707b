"""What the intervals promise, shown on simulated noise, and exact answers worked out by hand."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flashmoe_science.errors import InputError, TooFewRoundsError
from flashmoe_science.proof.judge.familywise import unpaired_intervals
from flashmoe_science.proof.judge.statistics import (
    Interval,
    clustered_interval,
    clustered_smallest_effect,
    family_intervals,
    hodges_lehmann,
    interval,
    log_ratios,
    processes_needed,
    rounds_needed,
    shift_interval,
    smallest_effect,
    suite_interval,
)

FINITE = st.floats(-10, 10, allow_nan=False)

# Three standard errors of a share of 0.95 among 2000 simulations are 0.015.
SIMULATIONS = 2000
SLACK = 0.015


def _groups(rng, *, processes=3, rounds=10, spread=1.0, process_spread=0.0, bias=0.0):
    offsets = rng.normal(bias, process_spread, (processes, 1))
    return (offsets + rng.normal(0.0, spread, (processes, rounds))).tolist()


def _pooled(groups):
    return [value for group in groups for value in group]


def _coverage(make_interval, draw, truth=0.0, simulations=SIMULATIONS):
    return sum(make_interval(draw()).contains(truth) for _ in range(simulations)) / simulations


# One sample


def test_hodges_lehmann_is_the_median_of_all_pairwise_means():
    # Pairs with themselves 1, 2, 6; means of two 1.5, 3.5, 4: the median of 1, 1.5, 2, 3.5, 4, 6 is 2.75.
    assert hodges_lehmann([1.0, 6.0, 2.0]) == pytest.approx(2.75)
    assert hodges_lehmann([0.3]) == 0.3


@pytest.mark.parametrize("n", [6, 7, 8, 10, 200])
def test_interval_holds_exactly_the_values_that_the_exact_wilcoxon_test_does_not_reject(n):
    from scipy.stats import wilcoxon  # takes 0.6 s

    values = np.random.default_rng(n).normal(size=n)
    found = interval(values.tolist())
    nudge = 1e-9
    for inside in (found.low + nudge, found.high - nudge):
        assert wilcoxon(values - inside, method="exact").pvalue > 0.05
    for outside in (found.low - nudge, found.high + nudge):
        assert wilcoxon(values - outside, method="exact").pvalue <= 0.05


def test_interval_of_six_values_reaches_from_the_smallest_to_the_largest():
    found = interval([5.0, 1.0, 2.0, 9.0, 4.0, 3.0])
    assert (found.low, found.high, found.n) == (1.0, 9.0, 6)


@pytest.mark.parametrize(("n", "confidence"), [(5, 0.95), (1, 0.95), (10, 0.999)])
def test_too_few_rounds_are_an_error_and_never_an_interval(n, confidence):
    with pytest.raises(TooFewRoundsError, match=f"{n} rounds cannot give"):
        interval([0.1 * i for i in range(n)], confidence)


def test_the_error_names_the_fewest_rounds_that_would_do():
    with pytest.raises(TooFewRoundsError, match="at least 11"):
        interval([0.0] * 10, 0.999)
    assert interval([0.1 * i for i in range(11)], 0.999).n == 11


@pytest.mark.parametrize("bad", [[], [1.0, math.nan, 2.0, 3.0, 4.0, 5.0], [math.inf] * 6], ids=["empty", "nan", "inf"])
def test_values_that_are_no_numbers_are_refused(bad):
    with pytest.raises(InputError, match="finite"):
        interval(bad)


def test_the_normal_limit_joins_the_exact_distribution_without_a_step():
    values = np.random.default_rng(5).normal(size=400)
    half = [(interval(values[:n].tolist()).high - interval(values[:n].tolist()).low) / 2 for n in (200, 201)]
    assert half[0] == pytest.approx(half[1], rel=0.02)


@given(st.lists(FINITE, min_size=6, max_size=25), FINITE)
def test_interval_moves_with_the_values_and_mirrors_with_their_sign(values, shift):
    plain, moved, mirrored = interval(values), interval([v + shift for v in values]), interval([-v for v in values])
    assert plain.low <= plain.estimate <= plain.high
    assert moved.low == pytest.approx(plain.low + shift, abs=1e-9)
    assert (mirrored.low, mirrored.high) == pytest.approx((-plain.high, -plain.low))


@pytest.mark.parametrize("rounds", [10, 20, 30])
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "one in ten is ten times as noisy"])
def test_interval_covers_the_truth_as_often_as_it_says(rounds, noise):
    rng = np.random.default_rng(rounds)

    def draw():
        if noise == "heavy tails":
            return rng.standard_t(3, rounds).tolist()
        scale = np.where(rng.random(rounds) < 0.1, 10.0, 1.0) if noise.startswith("one") else 1.0
        return (scale * rng.normal(size=rounds)).tolist()

    assert _coverage(interval, draw) == pytest.approx(0.95, abs=SLACK)


def test_log_ratios_refuse_a_time_that_cannot_be():
    assert log_ratios([2.0, 4.0], [1.0, 1.0]) == pytest.approx([math.log(2), math.log(4)])
    for above, below in product([[0.0], [-1.0], [math.nan], [math.inf]], [[1.0]]):
        with pytest.raises(InputError, match="positive and finite"):
            log_ratios(above, below)
    with pytest.raises(InputError, match="same length"):
        log_ratios([1.0, 2.0], [1.0])


def test_an_interval_of_log_ratios_becomes_one_of_ratios():
    ratio = Interval(math.log(2), math.log(1.9), math.log(2.2), 30).widened(math.log(1.1)).exp()
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((1.9 / 1.1, 2.0, 2.2 * 1.1))


# Clustered by process


@pytest.mark.parametrize("process_spread", [0.0, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("processes", [3, 5])
def test_clustered_interval_covers_whatever_the_processes_offsets(processes, process_spread):
    rng = np.random.default_rng([processes, int(10 * process_spread)])
    coverage = _coverage(clustered_interval, lambda: _groups(rng, processes=processes, process_spread=process_spread))
    assert coverage >= 0.95 - SLACK


@pytest.mark.parametrize(
    ("slow", "processes", "percent"), [(0.5, 3, 23.5), (0.5, 5, 6.8), (0.1, 3, 7.8), (0.1, 5, 17.5)]
)
def test_two_modes_are_missed_as_often_as_the_page_says(slow, processes, percent):
    """docs/explanation/statistics.md: so a new claim needs five processes."""
    rng, runs, missed = np.random.default_rng(7), 600, 0
    for _ in range(runs):
        offsets = 3.0 * (rng.random((processes, 1)) < slow)
        found = clustered_interval((offsets + rng.normal(0.0, 1.0, (processes, 10))).tolist())
        missed += not found.contains(3.0 * slow)
    share = percent / 100
    assert abs(missed / runs - share) < 4 * (share * (1 - share) / runs) ** 0.5


def test_rounds_alone_would_not_cover_when_processes_have_offsets():
    """Why the rounds alone are not asked: the figure of docs/explanation/statistics.md."""
    rng = np.random.default_rng(18)
    coverage = _coverage(lambda groups: interval(_pooled(groups)), lambda: _groups(rng, process_spread=0.5))
    assert coverage < 0.85


def test_clustered_interval_is_never_narrower_than_that_of_the_rounds():
    rng = np.random.default_rng(19)
    for _ in range(50):
        groups = _groups(rng)
        by_round, clustered = interval(_pooled(groups)), clustered_interval(groups)
        assert clustered.low <= by_round.low
        assert by_round.high <= clustered.high
        assert clustered.estimate == by_round.estimate


def test_more_processes_narrow_the_interval_more_than_more_rounds():
    rng = np.random.default_rng(20)

    def width(processes, rounds):
        drawn = [clustered_interval(_groups(rng, processes=processes, rounds=rounds)) for _ in range(300)]
        return sum(i.high - i.low for i in drawn) / len(drawn)

    assert width(6, 10) < 0.75 * width(3, 20)


def test_one_process_gives_the_interval_of_its_rounds():
    values = np.random.default_rng(21).normal(size=10).tolist()
    assert clustered_interval([values]) == interval(values)


# A planted slowdown, at a spread of 1 %


@pytest.mark.parametrize(("slowdown", "least"), [(0.03, 0.99), (0.01, 0.7)])
def test_a_planted_slowdown_is_seen(slowdown, least):
    rng = np.random.default_rng(22)
    seen = sum(clustered_interval(_groups(rng, spread=0.01, bias=-slowdown)).high < 0 for _ in range(SIMULATIONS))
    assert seen / SIMULATIONS >= least


def test_no_slowdown_is_seen_where_there_is_none():
    rng = np.random.default_rng(23)
    seen = sum(not clustered_interval(_groups(rng, spread=0.01)).contains(0.0) for _ in range(SIMULATIONS))
    assert seen / SIMULATIONS <= 0.03


# A family of controls


def _false_alarms(rng, *, cases=13, runs=400, one_case_bias=0.0, **noise):
    alarms = 0
    for _ in range(runs):
        drawn = [_groups(rng, bias=one_case_bias if case == 0 else 0.0, **noise) for case in range(cases)]
        alarms += any(not i.contains(0.0) for i in family_intervals(drawn))
    return alarms / runs


@pytest.mark.parametrize("process_spread", [0.0, 0.3, 1.0])
def test_thirteen_controls_give_a_false_alarm_in_at_most_one_run_of_twenty(process_spread):
    # Three standard errors of 0.05 among 400 runs are 0.033.
    assert _false_alarms(np.random.default_rng(31), process_spread=process_spread) <= 0.05 + 0.033


def test_thirteen_controls_judged_one_by_one_would_alarm_in_half_of_the_runs():
    rng = np.random.default_rng(32)
    alarms = [any(not interval(_pooled(_groups(rng))).contains(0.0) for _ in range(13)) for _ in range(300)]
    assert 0.35 < sum(alarms) / len(alarms) < 0.6


def test_a_bias_of_one_spread_in_one_of_thirteen_controls_is_seen():
    assert _false_alarms(np.random.default_rng(33), runs=200, one_case_bias=1.0) > 0.85


def test_a_family_of_one_is_judged_at_the_plain_level():
    groups = [[0.1, 0.2, 0.3, 0.4, 0.5] for _ in range(3)]  # the processes agree exactly
    assert family_intervals([groups]) == [interval(_pooled(groups))]
    assert family_intervals([]) == []


def test_too_few_rounds_for_the_family_are_an_error():
    with pytest.raises(TooFewRoundsError):
        family_intervals([_groups(np.random.default_rng(1), processes=1, rounds=6)] * 13)


# A suite


@pytest.mark.parametrize(
    ("case_spread", "shared", "least"),
    [(0.3, 0.0, 0.92), (0.01, 0.005, 0.94), (0.0, 0.005, 0.94), (0.0, 0.0, 0.95)],
    ids=["cases differ much", "cases and processes differ", "only processes differ", "only noise"],
)
def test_suite_interval_covers_the_mean_over_cases_like_these(case_spread, shared, least):
    rng = np.random.default_rng(41)

    def draw():
        offsets = rng.normal(0.0, shared, (1, 3, 1))  # of a process, the same in every case
        values = rng.normal(0.0, case_spread, (13, 1, 1)) + offsets + rng.normal(0.0, 0.01, (13, 3, 10))
        return values.tolist()

    assert _coverage(lambda cases: suite_interval(cases, resamples=500), draw, simulations=400) >= least - 0.03


def test_suite_interval_is_the_same_for_the_same_seed():
    cases = [_groups(np.random.default_rng(s)) for s in range(5)]
    assert suite_interval(cases) == suite_interval(cases)
    assert suite_interval(cases) != suite_interval(cases, seed=1)


def test_suite_interval_takes_a_process_that_is_missing_in_one_case():
    cases = [_groups(np.random.default_rng(s), bias=1.0, spread=0.01) for s in range(5)]
    cases[2][1] = []
    assert suite_interval(cases).estimate == pytest.approx(1.0, abs=0.01)


def test_no_process_of_a_suite_counts_more_than_another():
    rng = np.random.default_rng(42)
    cases = [[rng.normal(offset, 0.01, 10).tolist() for offset in (-1.0, 0.0, 0.0, 0.0)] for _ in range(5)]
    forward, backward = suite_interval(cases), suite_interval([groups[::-1] for groups in cases])
    assert forward.low == pytest.approx(backward.low, abs=0.02)
    assert forward.high == pytest.approx(backward.high, abs=0.02)
    assert forward.low < -0.25 < forward.high


def test_suite_interval_needs_two_cases_with_rounds():
    groups = _groups(np.random.default_rng(1))
    with pytest.raises(TooFewRoundsError, match="at least 2 cases"):
        suite_interval([groups])
    with pytest.raises(TooFewRoundsError, match="no rounds at all"):
        suite_interval([groups, [[], [], []]])


# What a run can see


@pytest.mark.parametrize(("rounds", "percent"), [(3, 3.10), (10, 1.0), (20, 0.66), (50, 0.41)])
def test_smallest_effect_at_a_spread_of_one_percent_is_that_of_the_protocol(rounds, percent):
    values = np.random.default_rng(rounds).normal(size=rounds)
    values = 0.01 * (values - values.mean()) / values.std(ddof=1)
    assert 100 * smallest_effect(values.tolist()) == pytest.approx(percent, abs=0.01)


def test_the_smallest_effect_is_seen_in_about_four_of_five_runs():
    rng = np.random.default_rng(51)
    rounds, effect = 20, 0.0066
    seen = sum(interval(rng.normal(effect, 0.01, rounds).tolist()).low > 0 for _ in range(SIMULATIONS))
    assert seen / SIMULATIONS == pytest.approx(0.8, abs=0.04)


def test_rounds_needed_is_the_smallest_count_that_sees_the_effect():
    values = np.random.default_rng(52).normal(0.0, 0.01, 30)
    needed = rounds_needed(values.tolist(), 0.004) or 0

    def detectable(n):
        """The smallest effect of n rounds with the spread of ``values``."""
        tiled = np.resize(values, n)
        return smallest_effect((tiled * (values.std(ddof=1) / tiled.std(ddof=1))).tolist())

    assert detectable(needed) <= 0.004 < detectable(needed - 1)
    assert rounds_needed(values.tolist(), 0.0) is None
    with pytest.raises(TooFewRoundsError):
        rounds_needed([0.1], 0.01)


def test_processes_that_disagree_need_more_processes_and_see_less():
    agree = [[-0.01, 0.0, 0.01, -0.02, 0.02] for _ in range(3)]
    disagree = [[value + offset for value in group] for group, offset in zip(agree, (-0.02, 0.0, 0.02), strict=True)]
    assert clustered_smallest_effect(disagree) > 1.5 * smallest_effect(_pooled(disagree))
    assert clustered_smallest_effect(agree) == smallest_effect(_pooled(agree))
    centres = [hodges_lehmann(group) for group in disagree]
    assert processes_needed(disagree, 0.01) == rounds_needed(centres, 0.01)
    assert processes_needed(agree, 0.01) == math.ceil((rounds_needed(_pooled(agree), 0.01) or 0) / 5)
    assert processes_needed(agree, 0.0) is None


def test_one_process_needs_rounds():
    values = np.random.default_rng(53).normal(0.0, 0.01, 30).tolist()
    assert clustered_smallest_effect([values]) == smallest_effect(values)
    assert processes_needed([values], 0.004) == rounds_needed(values, 0.004)


@pytest.mark.parametrize(("m", "n"), [(4, 4), (5, 5), (6, 4), (4, 7)])
def test_the_interval_of_a_shift_is_that_of_the_mann_whitney_test(m, n):
    """Counted over every order of two samples: each end leaves out as many differences as 2.5 % of orders allow."""
    sums = sorted(sum(places) - m * (m - 1) // 2 for places in combinations(range(m + n), m))
    dropped = sum(sums.index(u) + sums.count(u) <= 0.025 * len(sums) for u in set(sums))
    above, below = [2.0**i for i in range(m)], [0.3**i for i in range(n)]
    differences = sorted(a - b for a, b in product(above, below))
    found = shift_interval(above, below)
    assert (found.low, found.high) == (differences[dropped - 1], differences[-dropped])
    assert found.estimate == np.median(differences)


def test_a_shift_of_few_values_has_no_interval():
    with pytest.raises(TooFewRoundsError, match="3 and 3 rounds cannot give an interval"):
        shift_interval([1.0, 2.0, 3.0], [0.0, 0.5, 0.9])


def test_two_processes_that_are_alike_need_more_of_them_for_rounds_alone():
    rounds = np.random.default_rng(0).normal(0.0, 1.0, 10).tolist()
    needed = rounds_needed([*rounds, *rounds], 0.1)
    assert needed is not None
    assert processes_needed([rounds, rounds], 0.1) == math.ceil(needed / 10)


def test_one_process_on_a_side_leaves_two_runs_to_their_rounds():
    """It says nothing of how processes differ, so nothing is said for the other side either."""
    rng = np.random.default_rng(5)
    one, two = _groups(rng, processes=1), _groups(rng, processes=2)
    (found,) = unpaired_intervals([(one, two)])
    assert found == shift_interval(_pooled(one), _pooled(two))
