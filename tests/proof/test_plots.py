"""Tests of where plots put things: round ticks, labels that do not run into each other, everything inside the frame."""

from __future__ import annotations

import itertools
import re

import pytest

from flashmoe_science.proof.report.plots import Axis, Scale, Series, draw, draw_bar, draw_ruler, find_ruler, find_scale

PLAIN = Axis("x", lambda value: f"{value:g}")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("high", [1.1, 3, 20, 400, 1e5, 1e12])
def test_there_are_a_few_round_ticks_inside_the_frame(log, high):
    scale = find_scale(Axis("y", str, log=log), [1, high], 200.0, 26.0)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(26.0 <= scale.place(tick) <= 200.0 for tick in ticks)
    assert all(len(f"{tick:g}".strip("0").replace(".", "").partition("e")[0]) <= 4 for tick in ticks)


@pytest.mark.parametrize("values", [[5, 5], [0, 0], [-3, 4], [1e-9, 1]])
def test_any_values_find_a_place_inside_the_frame(values):
    scale = find_scale(PLAIN, values, 54.0, 328.0)
    assert all(54.0 <= scale.place(value) <= 328.0 for value in values)
    assert scale.low <= min(values) <= max(values) <= scale.high


def test_a_value_stands_where_its_share_of_the_scale_is():
    assert Scale(0.0, 10.0, 100.0, 200.0, log=False).place(2.5) == 125.0
    log = Scale(1.0, 100.0, 100.0, 0.0, log=True)
    assert [log.place(value) for value in (10.0, 0.0, 1e9)] == [50.0, 100.0, 0.0]


def test_labels_that_would_run_into_each_other_are_left_out():
    ticks = [10_000.0, 10_001.0, 12_000.0]
    points = [(at, 1.0 + at, "") for at in ticks]
    drawn = draw("p", "title", "what", [Series("arm", 0, points)], Axis("x", "{:.0f}".format, ticks=ticks), PLAIN)
    assert re.findall(r'text-anchor="middle">(\d+)<', drawn) == ["10000", "12000"]


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
