"""Sizes of samples and orders of arms."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from flashmoe_science.proof.measure import schedule

MIB = 1 << 20


@pytest.mark.parametrize(
    ("bytes_per_set", "seconds", "count"),
    [
        (900 * MIB, 0.0, 2),
        (600 * MIB, 0.0, 2),
        (120 * MIB, 0.0, 10),
        (59 * MIB, 0.0, 21),
        (1024, 0.0, 64),
        (1024, 5e-3, 50),  # 0.25 s to write them all
        (1024, 1.0, 8),
        (0, 0.0, 64),
    ],
)
def test_input_sets_hold_twenty_times_the_cache_and_are_few(bytes_per_set, seconds, count):
    assert schedule.input_set_count(bytes_per_set, 60 * MIB, seconds) == count


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 28))
def test_input_sets_are_the_fewest_that_hold_twenty_times_the_cache(bytes_per_set, l2_bytes):
    count = schedule.input_set_count(bytes_per_set, l2_bytes, 0.0)
    assert 2 <= count <= schedule.MAX_INPUT_SETS
    assert count * bytes_per_set >= 20 * l2_bytes or count == schedule.MAX_INPUT_SETS
    assert count == 2 or (count - 1) * bytes_per_set < 20 * l2_bytes


@pytest.mark.parametrize(
    ("seconds", "sets", "calls"),
    [
        ([6e-6, 3e-6], 64, 64),  # 134 wanted: no set comes twice
        ([8e-6, 16e-6], 64, 50),  # the fastest arm decides
        ([8e-6], 16, 16),
        ([100e-6], 12, 4),
        ([5e-3], 12, 1),
        ([10e-6, 20e-3], 12, 2),  # 50 ms at the most
        ([3.0], 4, 1),  # one call may last longer
    ],
)
def test_graph_call_count(seconds, sets, calls):
    assert schedule.graph_call_count(seconds, sets, graph_seconds=4e-4, graph_calls=100) == calls


@pytest.mark.parametrize(("bytes_per_set", "sets"), [(2 << 30, 8), (3 << 30, 5), (30 << 30, 2), (1024, 8)])
def test_calls_over_ranks_have_eight_sets_where_an_eighth_of_the_memory_holds_them(bytes_per_set, sets):
    least = schedule.sets_over_ranks(bytes_per_set, 141 << 30)
    assert least == sets
    count = schedule.input_set_count(bytes_per_set, 60 * MIB, 0.0, at_least=least)
    assert count == max(sets, schedule.input_set_count(bytes_per_set, 60 * MIB, 0.0))
    assert count in schedule.known_set_counts(bytes_per_set, 60 * MIB, method=3, over_ranks=True)


@pytest.mark.parametrize("known", [{"method": 2, "over_ranks": True}, {"method": 3}])
def test_more_sets_than_the_cache_asks_for_are_known_over_ranks_alone_and_from_method_3_on(known):
    assert 8 not in schedule.known_set_counts(4 << 30, 60 * MIB, **known)
    assert 2 in schedule.known_set_counts(4 << 30, 60 * MIB, **known)


def test_blocks_over_ranks_are_longer():
    longest = schedule.LONGEST_BLOCK_OVER_RANKS_S
    assert schedule.block_call_count(0.012, 8, at_least=3, longest_s=longest) == 8
    assert schedule.block_call_count(0.012, 8, at_least=3) == 4


def test_blocks_make_up_for_few_sets_unless_calls_are_slow():
    assert schedule.wall_block_count(64, 100, 1e-5, seconds_per_set=1e-5) == 2
    assert schedule.wall_block_count(2, 100, 1e-5, seconds_per_set=1e-5) == 50
    assert schedule.wall_block_count(2, 100, 5e-3, seconds_per_set=1e-5) == 5
    assert schedule.wall_block_count(3, 100, 1.0, seconds_per_set=1e-5) == 1
    assert schedule.wall_block_count(2, 100, 1e-5, seconds_per_set=1e-2) == 12


@given(st.lists(st.floats(1e-7, 1e2), min_size=1, max_size=5), st.integers(1, 64), st.integers(1, 200))
def test_graph_call_count_stays_within_its_bounds(seconds, sets, graph_calls):
    calls = schedule.graph_call_count(seconds, sets, graph_seconds=4e-4, graph_calls=graph_calls)
    assert 1 <= calls <= min(graph_calls, sets)
    assert calls == 1 or calls * max(seconds) <= schedule.LONGEST_SAMPLE_S * (1 + 1e-9)


def test_replays_and_blocks_shrink_when_calls_are_slow():
    assert schedule.replay_count(4e-4, 5) == 5
    assert schedule.replay_count(0.1, 5) == 2
    assert schedule.replay_count(3.0, 5) == 1
    assert schedule.block_call_count(15e-6, 100, at_least=3) == 100
    assert schedule.block_call_count(1e-3, 100, at_least=3) == 50
    assert schedule.block_call_count(1.0, 100, at_least=3) == 3
    assert schedule.block_call_count(0.0, 100, at_least=3) == 100


@pytest.mark.parametrize("arms", range(1, 8))
def test_every_arm_stands_equally_often_in_every_place(arms):
    names = [f"arm{i}" for i in range(arms)]
    orders = schedule.balanced_orders(names, 2 * arms, seed="s")
    assert all(sorted(order) == names for order in orders)
    for place in range(arms):
        assert set(Counter(order[place] for order in orders).values()) == {2}


@pytest.mark.parametrize("arms", range(2, 8))
def test_every_arm_follows_every_other_equally_often(arms):
    names = [f"arm{i}" for i in range(arms)]
    orders = schedule.balanced_orders(names, 2 * arms, seed="s")
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == arms * (arms - 1)
    assert set(follows.values()) == {2}


def test_orders_depend_on_the_seed_alone():
    names = ["ours", "sdpa", "sdpa#2", "flex"]
    first = schedule.balanced_orders(names, 10, seed="0/1/case")
    assert first == schedule.balanced_orders(names, 10, seed="0/1/case")
    assert first != schedule.balanced_orders(names, 10, seed="0/2/case")
    assert len(first) == 10
    assert len({order[0] for order in first}) == 4  # no fixed order


def test_rows_follow_one_another_at_random():
    names = ["a", "b", "c", "d"]
    steps = set()
    for seed in range(20):
        first, second, *_ = schedule.balanced_orders(names, 4, seed=str(seed))
        steps.add(tuple(first.index(name) for name in second))  # the second order, seen from the first
    assert len(steps) == 3  # every other row of the square comes second at times


def test_derived_seeds_differ_and_repeat():
    seeds = {schedule.derived_seed(0, "case", process, index) for process in range(3) for index in range(64)}
    assert len(seeds) == 192
    assert schedule.derived_seed(0, "case", 1) == schedule.derived_seed(0, "case", 1)
    assert max(seeds) < 2**31


def test_clocks_are_settled_when_the_last_readings_agree():
    assert schedule.clocks_settled([345, 1980, 1980, 1975, 1980])
    assert not schedule.clocks_settled([1980, 1980, 1980])
    assert not schedule.clocks_settled([1980, 1980, 1980, 1755])
    assert not schedule.clocks_settled([None, 1980, 1980, 1980])
    assert not schedule.clocks_settled([])
