"""Change points of simulated series whose truth is known: false alarms within what is stated, planted changes found."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from flashmoe_science.errors import InputError
from flashmoe_science.proof.compare.change_points import FEWEST_RUNS, change_points, segments

SERIES = 80


def places(values):
    return [point.place for point in change_points(values)]


@pytest.mark.parametrize("noise", ["normal", "heavy tails", "two cards"])
@pytest.mark.parametrize("runs", [8, 30])
def test_a_series_without_change_gives_a_false_alarm_at_most_1_in_20_times(runs, noise):
    rng = np.random.default_rng(runs)
    draws = {
        "normal": lambda: rng.normal(size=runs),
        "heavy tails": lambda: rng.standard_t(2, runs),
        "two cards": lambda: rng.choice([0.0, 10.0], runs) + rng.normal(size=runs),
    }
    alarms = sum(bool(places(draws[noise]())) for _ in range(SERIES))
    assert alarms / SERIES <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / SERIES)


@pytest.mark.parametrize("at", [4, 10, 17])
def test_a_planted_change_of_3_percent_is_found_where_it_is(at):
    rng = np.random.default_rng(at)
    found = []
    for _ in range(SERIES):
        values = rng.normal(0.0, 0.005, 20)
        values[at:] -= math.log(1.03)
        found.append(places(values))
    assert sum(at in each for each in found) / SERIES >= 0.9
    assert sum(len(each) > 1 for each in found) / SERIES <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / SERIES)


def test_two_planted_changes_are_both_found_and_cut_the_series_into_three_levels():
    rng = np.random.default_rng(3)
    values = rng.normal(0.0, 0.001, 36)
    values[12:] += 0.03
    values[24:] -= 0.05
    points = change_points(values.tolist())
    assert [point.place for point in points] == [12, 24]
    assert [list(stretch)[:: len(stretch) - 1] for stretch in segments(points, 36)] == [[0, 11], [12, 23], [24, 35]]
    assert all(point.chance <= 0.05 for point in points)


def test_one_run_far_off_is_no_new_level():
    values = [0.0, 0.1, -0.1, 0.05, 0.0, 9.0, 0.1, -0.05, 0.02, -0.1]
    assert places(values) == []


def test_too_few_runs_never_tell_however_clear_they_look():
    assert FEWEST_RUNS == 8
    assert places([0.0] * 3 + [9.0] * 4) == []
    assert places([0.0] * 4 + [9.0] * 4) == [4]
    assert places([]) == []
    # Why 8: of seven runs in any order, more than 1 in 20 orders are split as clearly as 3 low before 4 high.
    clear = sum(set(order[:3]) == {0, 1, 2} or set(order[4:]) == {0, 1, 2} for order in permutations(range(7)))
    assert clear / math.factorial(7) > 0.05


def test_the_same_series_gives_the_same_answer_and_ties_are_no_trouble():
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert change_points(values) == change_points(values)
    assert places(values) == [5]
    assert places([1.0] * 12) == []


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="finite"):
        change_points([1.0] * 9 + [math.nan])
