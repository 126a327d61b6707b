"""The causes: their order, and how far their shares may be added."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.diagnose.hypotheses import diagnose_case
from flashmoe_science.proof.diagnose.observations import Status, Times

from .made_up import PLAIN, kernel, observe, scaled, serial_story


def test_the_causes_of_the_story_come_in_the_order_of_the_time_they_explain():
    case = diagnose_case(serial_story())
    assert case.causes == ["grid too small", "serial loop", "no tensor-core instructions"]
    assert case.overlap.startswith("The shares of grid too small, serial loop, no tensor-core instructions overlap")
    assert "must not be added" in case.overlap


def test_another_kernel_than_promised_comes_before_all_causes():
    observations = serial_story().model_copy(update={"promised": True, "broken_promises": ["kernel old ran"]})
    assert diagnose_case(observations).causes[0] == "another kernel than promised"


def test_what_the_kernels_do_explains_no_more_than_their_part_of_a_call():
    """A call of 20 us with 5 us of kernels, whose grid is too small: 23 % of the call, and 75 % are the host's."""
    runs = [scaled("batch", 4, 5e-6, 32), scaled("batch", 16, 5e-6, 128)]
    case = diagnose_case(observe(kernels=[kernel(8)], device=5e-6, wall=20e-6, runs=runs, flops=1e6))
    shares = {each.hypothesis: each.share for each in case.findings if each.status is Status.CONFIRMED}
    assert case.causes == ["launch-bound", "grid too small"]
    assert shares["launch-bound"] == pytest.approx(0.75)
    assert shares["grid too small"] == pytest.approx(0.25 * 15 / 16)
    assert "different parts of a call" in case.overlap
    grid = next(each for each in case.findings if each.hypothesis == "grid too small")
    assert grid.most == pytest.approx(20 / (15 + 5 * 8 / 132))  # the host's part stays


def test_shares_add_to_no_more_than_a_call_or_it_is_said_that_they_overlap():
    story = diagnose_case(serial_story())
    shares = [each.share or 0.0 for each in story.findings if each.status is Status.CONFIRMED]
    assert sum(shares) > 1
    assert "overlap" in story.overlap
    assert "between 93% and 99%" in story.overlap


def test_a_good_kernel_has_no_cause():
    """Full rounds of blocks, tensor cores, and nothing that copies of the work find idle."""
    runs = [scaled("batch", 2, 1e-3, 4224), scaled("keys", 2, 1e-3, 2112), scaled("keys", 4, 2e-3, 2112)]
    assert diagnose_case(observe(runs=runs)).causes == []


def test_without_a_gpu_only_what_the_code_and_the_launch_say_is_said():
    why = dict.fromkeys(("launches", "times", "wall", "scaled", "counters", "sensors"), "no GPU here")
    spilling = PLAIN.model_copy(update={"local": 9, "local_in_loops": 9})
    observations = observe(
        device=None, kernels=[kernel(8, code=spilling)], missing=why, broken_promises=None, times=Times(), clock=None
    )
    case = diagnose_case(observations)
    assert case.causes == ["no tensor-core instructions", "spills and local memory"]
    untold = [each for each in case.findings if each.status is Status.CANNOT_TELL]
    assert len(untold) >= 7
    assert all("no GPU here" in each.explanation for each in untold if each.hypothesis != "throttled clocks")
    assert all(each.share is None and each.most is None for each in case.findings)
