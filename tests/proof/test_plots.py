"""Tests of where plots put things: round ticks, labels that do not run into each other, everything inside the frame."""

from __future__ import annotations

import itertools
import math

import pytest

from flashmoe_science.proof.report.plots import Axis, Series, place_plot, place_ruler

PLAIN = Axis("x", lambda value: f"{value:g}")


def plot(points, x=PLAIN, y=PLAIN, **more):
    return place_plot("p", "title", "description", [Series("arm", 0, points)], x, y, **more)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("high", [1.1, 3, 20, 400, 1e5, 1e12])
def test_there_are_a_few_round_ticks_inside_the_frame(log, high):
    axis = Axis("y", lambda value: f"{value:g}", log=log)
    found = plot([(1, 1, ""), (2, high, "")], y=axis)
    assert 2 <= len(found.y_ticks) <= 8
    assert all(found.top <= tick.at <= found.bottom for tick in found.y_ticks)
    assert all(len(tick.text.strip("0").replace(".", "").partition("e")[0]) <= 4 for tick in found.y_ticks)


@pytest.mark.parametrize("values", [[5, 5], [0, 0], [-3, 4], [1e-9, 1]])
def test_any_values_find_a_place_inside_the_frame(values):
    found = plot([(at, value, "") for at, value in enumerate(values)])
    for mark in found.lines[0].marks:
        assert found.left <= mark.x <= found.right
        assert found.top <= mark.y <= found.bottom


def test_a_ruler_shows_every_interval_and_line_inside_the_cell():
    ruler = place_ruler([0.012, 0.015, 8.2], [(1.0, ""), (2.0, "2x claimed")])
    bar = ruler.bar(0.012, 0.0135, 0.015)
    assert 0 < bar.low < bar.estimate < bar.high < 100
    one, two = (line.at for line in ruler.lines)
    assert bar.high < one < two < 100
    assert all(math.isfinite(tick.at) and 0 <= tick.at <= 100 for tick in ruler.ticks)
    assert all(after.at - before.at >= 12 for before, after in itertools.pairwise(ruler.ticks))
