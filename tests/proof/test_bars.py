"""Tests of where bars put things: round ticks that are apart, everything inside the cell."""

from __future__ import annotations

import itertools
import re

import pytest

from flashmoe_science.proof.report.bars import Ruler, draw_bar, draw_ruler, find_ruler


@pytest.mark.parametrize("high", [1.1, 3, 20, 400, 1e5])
def test_there_are_a_few_round_ticks_inside_the_cell(high):
    ruler = find_ruler([1, high], [])
    ticks = ruler.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(3.0 <= ruler.place(tick) <= 97.0 for tick in ticks)
    assert all(len(f"{tick:g}".strip("0").replace(".", "").partition("e")[0]) <= 4 for tick in ticks)


def test_a_value_stands_where_its_share_of_the_scale_is():
    assert [Ruler(1.0, 100.0).place(value) for value in (10.0, 0.0, 1e9)] == [50.0, 3.0, 97.0]


def test_a_ruler_shows_every_interval_and_line_inside_the_cell():
    ruler = find_ruler([0.012, 0.015, 8.2], [1.0, 2.0])
    bar = draw_bar(ruler, "slower", (0.012, 0.0135, 0.015), [1.0, 2.0])
    ((low, high),) = re.findall(r'class="range" x1="([\d.]+)%" x2="([\d.]+)%"', bar)
    (middle,), (one,), (two,) = (
        re.findall(rf'{place}="([\d.]+)%"', bar) for place in ("cx", 'class="one" x1', 'class="claimed" x1')
    )
    assert 0 < float(low) < float(middle) < float(high) < float(one) < float(two) < 100
    ticks = [float(at) for at in re.findall(r'x="([\d.]+)%"', draw_ruler(ruler))]
    assert all(0 <= tick <= 100 for tick in ticks)
    assert all(after - before >= 12 for before, after in itertools.pairwise(ticks))
