"""Faster, slower, same, undecided: on made-up records whose truth is known, and how often a verdict is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.compare.compare import (
    Effect,
    compare_records,
    compare_revisions,
    effect_of,
    exit_code,
)
from flashmoe_science.proof.judge.familywise import comparison_intervals, unpaired_intervals
from flashmoe_science.proof.judge.statistics import Interval, clustered_interval
from flashmoe_science.proof.records.evidence import Compared, Gate, GateStatus, Record, Revision

from .builders import H200, L4, build_gates, build_record

A, B = "flash_attention@aaaaaaaaaaaa", "flash_attention@bbbbbbbbbbbb"


def compared(*ratios, gates_of_a=(), tolerance=0.01, **changes):
    """Return the record of two revisions whose true ratios A / B are these."""
    settings: dict[str, Any] = {"spread": 0.005, "times": ("graph",), "processes": 3, "rounds": 10}
    record = build_record(speedups=ratios, subject=B, baselines={A: 1.0}, **(settings | changes))
    a, b = (
        Revision(label=name, commit=letter * 40, arm=arm) for name, letter, arm in (("main", "a", A), ("HEAD", "b", B))
    )
    a = a.model_copy(update={"gates": list(gates_of_a)})
    return record.model_copy(update={"compared": Compared(a=a, b=b, tolerance=tolerance)})


def effects(comparison):
    return [case.effect.value for case in comparison.cases]


# One interval


@pytest.mark.parametrize(
    ("low", "high", "effect"),
    [
        (0.02, 0.04, Effect.FASTER),
        (0.001, 0.02, Effect.FASTER),  # it may matter, and it is one
        (-0.04, -0.02, Effect.SLOWER),
        (-0.005, 0.005, Effect.SAME),
        (0.001, 0.005, Effect.SAME),  # a difference that does not matter
        (-0.0099, 0.0099, Effect.SAME),
        (-0.001, 0.02, Effect.UNDECIDED),
        (-0.02, 0.02, Effect.UNDECIDED),
        (0.0, 0.02, Effect.UNDECIDED),
    ],
)
def test_same_needs_an_interval_within_the_tolerance_and_a_difference_one_without_zero(low, high, effect):
    assert effect_of(Interval((low + high) / 2, low, high, 30), 0.01) is effect


def test_of_two_runs_a_difference_has_to_lie_beyond_the_tolerance_as_a_whole():
    small, large = Interval(0.015, 0.001, 0.03, 30), Interval(0.03, 0.02, 0.04, 30)
    assert [effect_of(found, 0.01, paired=False) for found in (small, large)] == [Effect.UNDECIDED, Effect.FASTER]
    mirrored = (Interval(-found.estimate, -found.high, -found.low, 30) for found in (small, large))
    assert [effect_of(found, 0.01, paired=False) for found in mirrored] == [Effect.UNDECIDED, Effect.SLOWER]


# Two revisions of one run


@pytest.mark.parametrize(
    ("ratios", "expected", "overall", "code"),
    [
        ([1.10, 1.0, 1.05], ["faster", "same", "faster"], "faster", 0),
        ([1.10, 1.0, 0.95], ["faster", "same", "slower"], "slower", 1),
        ([1.0, 1.0, 1.0], ["same", "same", "same"], "same", 0),
    ],
)
def test_the_verdict_on_every_case_and_in_all(ratios, expected, overall, code):
    comparison = compare_revisions(compared(*ratios))
    assert effects(comparison) == expected
    assert (comparison.effect.value, exit_code(comparison)) == (overall, code)
    assert comparison.paired
    for case, truth in zip(comparison.cases, ratios, strict=True):
        assert case.ratio is not None
        assert case.ratio.contains(truth)


def test_what_is_too_noisy_is_undecided_and_says_how_wide_its_interval_is():
    comparison = compare_revisions(compared(1.0, 1.0, spread=0.05))
    assert (effects(comparison), exit_code(comparison)) == (["undecided"] * 2, 4)
    assert "too wide for the same" in comparison.cases[0].reason
    assert "2 undecided" in comparison.reason


def test_a_control_that_fails_leaves_everything_undecided():
    comparison = compare_revisions(compared(1.5, 1.5, control_bias=0.05))
    assert effects(comparison) == ["undecided"] * 2
    assert "a second copy of the baseline took other times" in comparison.reason


def test_a_revision_that_fails_a_gate_is_no_slower_one():
    failed = Gate(name="correct", status=GateStatus.FAILED, summary="wrong in 1 of 3 cases")
    comparison = compare_revisions(compared(0.5, gpu=None, gates_of_a=[failed]))
    assert (comparison.effect, exit_code(comparison)) == (Effect.UNDECIDED, 3)
    assert comparison.reason == "main (aaaaaaaaaaaa) failed gate correct: wrong in 1 of 3 cases"
    of_b = compare_revisions(compared(0.5, gpu=None, gates=build_gates("launch")))
    assert of_b.reason.startswith("HEAD (bbbbbbbbbbbb) failed gate launch")
    assert exit_code(of_b) == 3


def test_with_no_gpu_it_says_what_was_shown_and_nothing_of_speed():
    comparison = compare_revisions(compared(1.0, gpu=None))
    assert (comparison.effect, exit_code(comparison)) == (Effect.UNDECIDED, 4)
    assert comparison.reason.startswith("nothing was timed: launch is not possible here")
    assert "both revisions passed sources, build, import, correct" in comparison.reason


def test_an_incomplete_run_shows_no_sameness_but_what_is_slower_is_slower():
    comparison = compare_revisions(compared(1.0, 1.0, complete=False))
    assert (comparison.effect, comparison.reason) == (Effect.UNDECIDED, "2 same, but not everything was measured")
    assert compare_revisions(compared(1.0, 0.9, complete=False)).effect is Effect.SLOWER


def test_a_case_without_times_of_a_is_undecided_with_the_reason():
    record = compared(1.1, 1.1)
    table = record.model_dump(mode="json")
    table["cases"][1]["arms"] = [
        arm | ({"status": "refused", "reason": "not known"} if arm["name"] == A else {})
        for arm in table["cases"][1]["arms"]
    ]
    comparison = compare_revisions(Record.model_validate(table))
    assert effects(comparison) == ["faster", "undecided"]
    assert comparison.cases[1].reason == f"{A} was not measured: refused, not known"
    assert comparison.effect is Effect.UNDECIDED


@pytest.mark.parametrize(("processes", "rounds", "reason"), [(1, 10, "rounds in 1 process"), (2, 2, "4 rounds cannot")])
def test_too_few_rounds_or_processes_leave_it_undecided(processes, rounds, reason):
    comparison = compare_revisions(compared(1.5, processes=processes, rounds=rounds))
    assert effects(comparison) == ["undecided"]
    assert reason in comparison.cases[0].reason


def test_a_comparison_is_no_evidence_on_the_subject_itself(tmp_path):
    from flashmoe_science.proof.judge.claims import why_not
    from flashmoe_science.proof.judge.run_verdicts import expectation

    record = compared(1.1)
    claim = expectation(build_record(speedups=[2.0]))
    assert claim is not None
    assert why_not(claim, record) == f"the record is of subject {B}, the claim of flash_attention"


# Two runs


def run(*speedups, day=0, seed=0, **changes):
    return build_record(speedups=speedups, day=day, seed=seed, spread=0.005, times=("graph",), **changes)


def test_two_runs_are_compared_by_their_ratio_to_a_common_baseline():
    # The second card is a tenth slower in all it does: only the ratio to the baseline may be compared.
    b = run(2.2, 2.0, 1.8, day=1, seed=1, baseline_seconds=22e-6)
    comparison = compare_records(run(2.0, 2.0, 2.0), b)
    assert effects(comparison) == ["faster", "same", "slower"]
    assert (comparison.effect, comparison.paired) == (Effect.SLOWER, False)
    assert "sdpa" in comparison.quantity
    assert any("two runs cannot show it" in note for note in comparison.notes)


def test_cases_in_one_run_only_are_counted_and_left_out():
    comparison = compare_records(run(2.0, 2.0, 2.0), run(2.0, 2.0, day=1, seed=1))
    assert [case.name for case in comparison.cases] == ["case0", "case1"]
    assert "1 case in one run only" in comparison.notes


VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}


def change(record, **environment):
    return record.model_copy(update={"environment": record.environment.model_copy(update=environment)})


def changed_settings(record, **settings):
    return record.model_copy(update={"settings": record.settings.model_copy(update=settings)})


@pytest.mark.parametrize(
    ("field", "b", "told"),
    [
        ("gpu", run(2.0, gpu=L4), "gpu is NVIDIA H200 in A and NVIDIA L4 in B"),
        ("driver", change(run(2.0), driver="590"), "driver is 580.00 in A and 590 in B"),
        ("triton", change(run(2.0), versions={"torch": "2.11.0"}), "triton is 3.6.0 in A and None in B"),
        ("cache", changed_settings(run(2.0), cache="rotating"), "cache is cold in A and rotating in B"),
        ("power_limit", change(run(2.0), gpu=H200.model_copy(update={"power_limit_w": 300.0})), "300.0 in B"),
        ("variables", change(run(2.0), settings={"CUDA_X": "1"}), "variables is  in A and CUDA_X=1 in B"),
        (
            "harness",
            change(run(2.0), versions={**VERSIONS, "flashmoe-science": "9"}),
            "harness is None in A and 9 in B",
        ),
        ("method", run(2.0).model_copy(update={"method": "f00"}), "method is 1 in A and 1 f00 in B"),
        ("method", changed_settings(run(2.0), method=2), "method is 1 in A and 2 in B"),
        ("uncommitted", change(run(2.0), dirty=True), "uncommitted is none in A and some changes in B"),
        ("uncommitted", change(run(2.0), dirty=None), "uncommitted is none in A and not known in B"),
        ("uncommitted", change(run(2.0), commit=None), "uncommitted is none in A and not known in B"),
        ("subject", run(2.0, subject="forward_triton"), "subject is flash_attention in A and forward_triton in B"),
    ],
)
def test_runs_that_differ_are_refused_with_the_field_unless_it_is_allowed(field, b, told):
    with pytest.raises(EvidenceError) as refused:
        compare_records(run(2.0), b)
    assert told in str(refused.value)
    assert f"--allow-different {field}" in refused.value.hint
    allowed = refused.value.hint.replace("--allow-different", "").partition(":")[2].split()
    comparison = compare_records(run(2.0), b, allowed=allowed)
    assert any(told in note for note in comparison.notes)


def test_two_runs_of_unknown_trees_are_not_called_the_same():
    a, b = (change(run(2.0, seed=seed), dirty=None) for seed in (0, 1))
    with pytest.raises(EvidenceError, match="uncommitted is not known in A and not known in B"):
        compare_records(a, b)


def test_cpu_and_python_count_for_wall_time_only():
    a, b = (build_record(speedups=[2.0], spread=0.005, seed=seed) for seed in (0, 1))
    b = change(b, cpu="another")
    compare_records(a, b, ["graph"])
    with pytest.raises(EvidenceError, match="cpu is"):
        compare_records(a, b, ["wall"])


def test_without_a_common_baseline_absolute_times_are_compared_on_one_card_only():
    card = H200.model_copy(update={"uuid_hash": "abc"})
    b = run(2.0, day=1, seed=1, gpu=card, baselines={"cudnn": 1.0})
    comparison = compare_records(run(2.0, gpu=card), b)
    assert (comparison.quantity, effects(comparison)) == ("A's time / B's, on one card", ["same"])
    with pytest.raises(EvidenceError, match="absolute times belong to a card"):
        compare_records(run(2.0, gpu=card), run(2.0, day=1, seed=1, baselines={"cudnn": 1.0}))


def impossible(record):
    """Return ``record`` with times that the GPU cannot reach."""
    rounds = [
        r.model_copy(
            update={
                "seconds": {
                    kind: {arm: [t * 1e-4 for t in column] for arm, column in arms.items()}
                    for kind, arms in r.seconds.items()
                }
            }
        )
        for r in record.cases[0].rounds
    ]
    return record.model_copy(update={"cases": [record.cases[0].model_copy(update={"rounds": rounds})]})


def with_no_time(record):
    """Return ``record`` with a time of 0 s, of which there is no ratio."""
    table = record.model_dump(mode="json")
    table["cases"][0]["rounds"][0]["seconds"]["graph"]["sdpa"][0] = 0.0
    return Record.model_validate(table)


@pytest.mark.parametrize("broken_is_b", [False, True])
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (run(3.0, day=1, control_bias=0.05), "a second copy of the baseline took other times"),
        (impossible(run(3.0, day=1)), "an impossible graph time"),
        (with_no_time(run(3.0, day=1)), "took 0.0 s"),
    ],
)
def test_an_invalid_run_is_neither_faster_nor_slower_whatever_it_shows(broken, why, broken_is_b):
    pair = (run(2.0), broken) if broken_is_b else (broken, run(2.0))
    comparison = compare_records(*pair)
    assert (effects(comparison), exit_code(comparison)) == (["undecided"], 4)
    assert f"run {broken.id} is invalid: " in comparison.reason
    assert why in comparison.reason


@pytest.mark.parametrize("broken_is_b", [False, True])
def test_a_run_that_failed_a_gate_is_not_compared(broken_is_b):
    broken = run(3.0, day=1, gates=build_gates("bench"))
    comparison = compare_records(*((run(2.0), broken) if broken_is_b else (broken, run(2.0))))
    assert (comparison.effect, comparison.gate_failed, exit_code(comparison)) == (Effect.UNDECIDED, "bench", 3)
    assert comparison.reason == f"run {broken.id} failed gate bench: made up: failed"


def test_impossible_times_of_a_revision_leave_it_undecided():
    comparison = compare_revisions(impossible(compared(1.5)))
    assert (effects(comparison), exit_code(comparison)) == (["undecided"], 4)
    assert "an impossible graph time" in comparison.reason


# How often a verdict is wrong

RUNS = 200
DIFFERS = (Effect.FASTER, Effect.SLOWER)


def draw(rng, *, bias, spread, process_spread):
    return (rng.normal(bias, process_spread, (3, 1)) + rng.normal(0.0, spread, (3, 10))).tolist()


@pytest.mark.parametrize(("cases", "offset"), [(1, 0.5), (2, 1.0), (13, 0.5)])
def test_of_comparisons_of_a_revision_with_itself_at_most_1_in_20_sees_a_difference(cases, offset):
    rng = np.random.default_rng(cases)
    wrong = 0
    for _ in range(RUNS):
        sample = [draw(rng, bias=0.0, spread=0.05, process_spread=0.05 * offset) for _ in range(cases)]
        wrong += any(effect_of(found, 0.01) in DIFFERS for found in comparison_intervals(sample))
    assert wrong / RUNS <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / RUNS)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_of_two_runs_of_the_same_at_most_1_in_20_sees_a_difference(offset):
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(RUNS):
        sample = [
            tuple(draw(rng, bias=0.0, spread=0.05, process_spread=0.05 * offset) for _ in range(2)) for _ in range(3)
        ]
        wrong += any(effect_of(found, 0.0, paired=False) in DIFFERS for found in unpaired_intervals(sample))
    assert wrong / RUNS <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / RUNS)


@pytest.mark.parametrize(("slowdown", "fewest"), [(0.03, 0.95), (0.01, 0.5)])
def test_planted_slowdowns_are_seen_at_the_spread_that_graph_time_has(slowdown, fewest):
    """PROTOCOL: 0.14 to 0.8 % for a paired log-ratio of graph time. One of 13 cases is slower, the others the same."""
    rng = np.random.default_rng(11)
    seen = 0
    for _ in range(100):
        biases = [-math.log1p(slowdown)] + [0.0] * 12
        sample = [draw(rng, bias=bias, spread=0.008, process_spread=0.002) for bias in biases]
        seen += effect_of(comparison_intervals(sample)[0], 0.01) is Effect.SLOWER
    assert seen / 100 >= fewest


def test_a_true_difference_beyond_the_tolerance_is_hardly_ever_called_the_same():
    rng = np.random.default_rng(13)
    wrong = 0
    for _ in range(RUNS):
        sample = [draw(rng, bias=math.log(1.0101), spread=0.004, process_spread=0.002) for _ in range(3)]
        wrong += any(effect_of(found, 0.01) is Effect.SAME for found in comparison_intervals(sample))
    assert wrong / RUNS <= 0.05


# Offsets of a process that all its cases share


def draw_common(rng, cases, *, offset, spread=0.008, loads=None):
    """Return cases of 3 x 10 rounds; a process is off by the same in each of them, times the case's load."""
    loads = np.ones(cases) if loads is None else np.asarray(loads)
    offsets = loads[:, None, None] * rng.normal(0.0, offset * spread, (1, 3, 1))
    return (offsets + rng.normal(0.0, spread, (cases, 3, 10))).tolist()


def wrong_verdicts(samples):
    return [any(effect_of(found, 0.01) in DIFFERS for found in comparison_intervals(sample)) for sample in samples]


# At their worst 2.8 % of many runs (docs/explanation/statistics.md). Degrees of freedom that count the processes of
# every case give more.
@pytest.mark.parametrize(("cases", "runs", "most"), [(5, 150, 0.05), (13, 100, 0.05)])
def test_an_offset_that_a_process_has_in_all_cases_makes_no_more_than_1_wrong_run_in_20(cases, runs, most):
    rng = np.random.default_rng(cases)
    wrong = wrong_verdicts(draw_common(rng, cases, offset=1.0) for _ in range(runs))
    assert sum(wrong) / runs <= most


def test_an_offset_that_only_one_of_many_cases_has_is_seen_there():
    rng = np.random.default_rng(3)
    wrong = wrong_verdicts(draw_common(rng, 13, offset=2.0, loads=[1] + [0] * 12) for _ in range(80))
    assert sum(wrong) / 80 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 80)


def test_two_kinds_of_time_have_offsets_of_their_own():
    """Processes off by 5 % in every wall time say nothing of graph time, and the other way round."""
    rng = np.random.default_rng(17)
    quiet, loud = draw_common(rng, 5, offset=0.0), draw_common(rng, 5, offset=6.0)
    together = comparison_intervals([*quiet, *loud], ["graph"] * 5 + ["wall"] * 5)
    mixed = comparison_intervals([*quiet, *loud])
    assert max(found.high - found.low for found in together[:5]) < min(found.high - found.low for found in mixed[:5])


def test_no_interval_is_narrower_than_that_of_its_case_alone():
    rng = np.random.default_rng(23)
    for cases in (1, 2, 4, 13):
        sample = draw_common(rng, cases, offset=0.5)
        for groups, found in zip(sample, comparison_intervals(sample), strict=True):
            alone = clustered_interval(groups)
            assert found.low <= alone.low + 1e-12
            assert alone.high <= found.high + 1e-12
