"""Tests of where plots put things: round ticks, labels that do not run into each other, everything inside the frame."""

from __future__ import annotations

import itertools
import math

import pytest

from flashmoe_science.proof.plots import Axis, Guide, Series, place_plot, place_ruler

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


def test_zero_stands_at_the_low_end_of_equal_ratios():
    log = Axis("x", lambda value: f"{value:g}", log=True)
    for sizes in ([0, 1, 8], [0, 0]):
        found = plot([(size, 1, "") for size in sizes], x=log)
        assert found.lines[0].marks[0].x == found.left
        assert all(found.left <= mark.x <= found.right for mark in found.lines[0].marks)


def test_equal_ratios_are_equal_distances():
    log = Axis("x", lambda value: f"{value:g}", log=True)
    one, two, three = plot([(8, 1, ""), (16, 2, ""), (32, 4, "")], x=log, y=log).lines[0].marks
    assert two.x - one.x == pytest.approx(three.x - two.x, abs=0.2)
    assert one.y - two.y == pytest.approx(two.y - three.y, abs=0.2)


def test_labels_that_would_run_into_each_other_lose_their_text_and_keep_their_tick():
    sizes = [32.0, 64.0, 65.0, 128.0]
    axis = Axis("x", lambda value: f"{value:g}", log=True, ticks=sizes)
    ticks = plot([(size, 1, "") for size in sizes], x=axis).x_ticks
    assert [tick.text for tick in ticks] == ["32", "64", "", "128"]
    assert len({tick.at for tick in ticks}) == 4


def test_a_guide_is_said_at_its_end_or_its_beginning():
    guides = [Guide("high", [(0, 1), (1, 2)]), Guide("low", [(0, 1), (1, 1)], first=True)]
    end, beginning = plot([(0, 1, ""), (1, 2, "")], guides=guides).guides
    assert (end.anchor, beginning.anchor) == ("end", "start")
    assert end.x > beginning.x
    assert end.path.startswith("M")


def test_a_single_point_has_no_line():
    assert plot([(1, 1, "")]).lines[0].path == ""


def test_a_ruler_shows_every_interval_and_line_inside_the_cell():
    ruler = place_ruler([0.012, 0.015, 8.2], [(1.0, ""), (2.0, "2x claimed")])
    bar = ruler.bar(0.012, 0.0135, 0.015)
    assert 0 < bar.low < bar.estimate < bar.high < 100
    one, two = (line.at for line in ruler.lines)
    assert bar.high < one < two < 100
    assert all(math.isfinite(tick.at) and 0 <= tick.at <= 100 for tick in ruler.ticks)
    assert all(after.at - before.at >= 12 for before, after in itertools.pairwise(ruler.ticks))
