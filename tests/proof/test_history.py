"""The history of a subject on made-up runs: which changes of level are found, and what they are put down to."""

from __future__ import annotations

import math

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.compare.history import look_back
from flashmoe_science.proof.records.evidence import SourceFile

from .builders import H200, L4, build_gates, build_record

LOSS = 0.95


def run(day, *, speedup=2.0, code="a", card="one", **changes):
    """Return the run of a day: two cases that are ``speedup`` times as fast as the baseline."""
    gpu = changes.pop("gpu", H200.model_copy(update={"uuid_hash": card}))
    environment = changes.pop("environment", {})
    made = build_record(
        speedups=[speedup, speedup],
        times=("graph",),
        spread=0.004,
        day=day,
        seed=day,
        gpu=gpu,
        sources=[SourceFile(path="kernel.py", sha256=code), SourceFile(path="other.py", sha256="same")],
        **changes,
    )
    environment = made.environment.model_copy(update={"commit": code * 40, **environment})
    return made.model_copy(update={"environment": environment})


def ten(**changed):
    """Return ten runs, the last five slower and with ``changed``."""
    return [run(day) for day in range(5)] + [run(day, speedup=2.0 * LOSS, **changed) for day in range(5, 10)]


@pytest.mark.parametrize(
    ("changed", "label", "reason"),
    [
        ({"code": "b"}, "code", "1 of 2 sources (kernel.py), commit aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        ({"environment": {"driver": "590.00"}}, "hardware", "driver 580.00 -> 590.00"),
        ({"card": "two"}, "hardware", "card one -> two"),
        ({"gpu": L4}, "hardware", "gpu NVIDIA H200 -> NVIDIA L4"),
        ({"environment": {"versions": {"torch": "3.0"}}}, "method", "torch 2.11.0 -> 3.0"),
        ({"processes": 4}, "method", "rounds 3 x 10 -> 4 x 10"),
        ({}, "unexplained", "nothing that is recorded separates the runs before from those after"),
        ({"code": "b", "card": "two"}, "code or hardware", "they changed together, so they cannot be told apart"),
    ],
)  # fmt: skip
def test_a_new_level_is_put_down_to_what_changed_with_it(changed, label, reason):
    history = look_back(ten(**changed), "graph")
    (change,) = history.changes
    assert change.label == label
    assert reason in change.reason
    assert change.shift == pytest.approx(LOSS, rel=5e-3)
    assert change.interval is not None
    assert change.interval.contains(LOSS)
    assert (history.verdict, history.enough) == ("1 change of level in 10 runs", True)
    assert [point.level for point in history.points] == [0] * 5 + [1] * 5


def test_a_card_that_is_found_on_both_sides_explains_nothing():
    runs = ten(code="b")
    for place, card in ((1, "two"), (6, "two")):
        environment = runs[place].environment
        gpu = environment.gpu.model_copy(update={"uuid_hash": card})
        runs[place] = runs[place].model_copy(update={"environment": environment.model_copy(update={"gpu": gpu})})
    history = look_back(runs, "graph")
    assert [change.label for change in history.changes] == ["code"]


def test_too_few_runs_cannot_tell_whatever_they_look_like():
    history = look_back([run(0), run(1, speedup=1.0, code="b")], "graph")
    assert history.verdict == "2 runs cannot tell: a change of level needs at least 8 to stand out"
    assert (history.enough, history.changes) == (False, [])


def test_runs_that_say_nothing_of_it_are_left_out_and_counted():
    runs = [*ten(code="b"), run(11, suite="other"), run(12, baselines={"cudnn": 1.0})]
    del runs[-1]
    others = [build_record(day=13, gpu=None), build_record(day=14, times=("wall",))]
    history = look_back([*others, *runs[:10]], "graph")
    assert len(history.points) == 10
    assert history.notes == ["2 runs left out: no graph times, or another suite, baseline or entry point"]
    assert look_back([run(0), *runs], "graph").suite == "other"  # that of the newest


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"control_bias": 0.05}, "a second copy of the baseline took other times"),
        ({"gates": build_gates("bench")}, "gate bench failed: made up: failed"),
        ({"baseline_seconds": 20e-10}, "an impossible graph time"),
    ],
)
def test_runs_that_do_not_count_are_no_points_and_each_is_named(broken, why):
    sound = [run(day) for day in range(8)]
    invalid = run(8, speedup=3.0, **broken)
    history = look_back([*sound, invalid], "graph")
    assert [point.run for point in history.points] == [record.id for record in sound]
    (note,) = history.notes
    assert note.startswith(f"run {invalid.id} left out: ")
    assert why in note
    with pytest.raises(EvidenceError, match=r"none of 1 run has graph times that count: run \S+ left out"):
        look_back([invalid], "graph")


def test_one_case_can_be_looked_at_alone():
    runs = [build_record(speedups=[2.0, 2.0 if day < 5 else 2.4], day=day, seed=day) for day in range(10)]
    assert look_back(runs, "graph", case="case0").verdict == "no change of level in 10 runs"
    history = look_back(runs, "graph", case="case1")
    assert history.cases == ["case1"]
    assert history.changes[0].shift == pytest.approx(1.2, rel=1e-2)
    with pytest.raises(EvidenceError, match="case must be one that all 10 runs have"):
        look_back(runs, "graph", case="case7")


def test_the_speedup_is_the_geometric_mean_of_the_cases_that_all_runs_have():
    runs = [build_record(speedups=[2.0, 8.0, 5.0][: 2 + day % 2], day=day, seed=day) for day in range(2)]
    history = look_back(runs, "graph")
    assert history.cases == ["case0", "case1"]
    assert [point.speedup for point in history.points] == pytest.approx([math.sqrt(16)] * 2, rel=1e-2)
