"""Each verdict comes exactly when its rule says so, with its reason, and is wrong as rarely as promised."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from flashmoe_science.proof.judge.claims import Claim
from flashmoe_science.proof.judge.judge import (
    Verdict,
    VerdictStatus,
    check_control,
    deciding_baseline,
    exit_code,
    judge,
)
from flashmoe_science.proof.judge.statistics import Interval
from flashmoe_science.proof.records.evidence import Gate, GateStatus
from flashmoe_science.proof.text import counted

from .builders import L4, build_gates, build_record, with_arm, with_case

DEMONSTRATED, REFUTED, INCONCLUSIVE, ASSERTED, INVALID = (
    VerdictStatus.DEMONSTRATED,
    VerdictStatus.REFUTED,
    VerdictStatus.INCONCLUSIVE,
    VerdictStatus.ASSERTED,
    VerdictStatus.INVALID,
)


def build_claim(**changes):
    keys = {"id": "a", "sentence": "It is fast.", "subject": "flash_attention", "baseline": "sdpa", "suite": "seed"}
    return Claim.model_validate(
        {**keys, "metric": "graph", "factor": 2.0, "gpu": "H200", "scope": "each case", **changes}
    )


def _with_seconds(record, arm, change, *, case=0, metric="graph"):
    """Return ``record`` with the times of one arm changed."""
    rounds = []
    for old in record.cases[case].rounds:
        seconds = {kind: dict(arms) for kind, arms in old.seconds.items()}
        if metric in seconds:
            seconds[metric][arm] = [change(s) for s in seconds[metric][arm]]
        rounds.append(old.model_copy(update={"seconds": seconds}))
    return with_case(record, case, rounds=rounds)


# A claim about each case


def test_demonstrated_when_every_interval_lies_above():
    verdict = judge(build_claim(), build_record(speedups=[2.1, 2.5, 3.0]))
    assert verdict.status is DEMONSTRATED
    assert [case.status for case in verdict.cases] == [DEMONSTRATED] * 3
    assert verdict.cases[0].interval is not None
    assert verdict.cases[0].interval.estimate == pytest.approx(2.1, rel=0.01)
    assert "every one of 3 cases is at least 2x; the lowest is case0" in verdict.reason
    assert verdict.record == build_record().id


def test_the_deciding_case_is_the_one_whose_interval_begins_lowest():
    draw = random.Random(1)
    noisy = _with_seconds(
        build_record(speedups=[2.4, 2.5, 3.0]), "sdpa", lambda s: s * draw.uniform(0.85, 1.15), case=1
    )
    verdict = judge(build_claim(), noisy)
    assert verdict.status is DEMONSTRATED
    assert "; the deciding one is case1, 2.4" in verdict.reason


def test_refuted_when_one_interval_lies_below():
    verdict = judge(build_claim(), build_record(speedups=[1.9, 2.5, 3.0]))
    assert verdict.status is REFUTED
    assert [case.status for case in verdict.cases] == [REFUTED, DEMONSTRATED, DEMONSTRATED]
    assert "1 of 3 cases are below 2x: case0 1.9" in verdict.reason


def test_inconclusive_when_one_interval_holds_the_factor_and_says_what_it_lacks():
    verdict = judge(build_claim(), build_record(speedups=[2.003, 2.5, 3.0]))
    assert verdict.status is INCONCLUSIVE
    case = verdict.cases[0]
    assert case.status is INCONCLUSIVE
    assert case.rounds_needed is not None
    assert case.rounds_needed >= 10
    assert case.smallest_effect is not None
    assert 0.002 < case.smallest_effect < 0.05
    assert f"about {case.rounds_needed} rounds more" in case.reason
    assert "case0" in verdict.reason


def test_the_lower_end_on_the_factor_itself_is_enough():
    record = build_record(speedups=[2.0], spread=0.0)
    exact = {arm: 1.0 if arm == "flash_attention" else 2.0 for arm in ("flash_attention", "sdpa", "sdpa#2")}
    for arm, seconds in exact.items():
        record = _with_seconds(record, arm, lambda _, seconds=seconds: seconds)
    assert judge(build_claim(), record).status is DEMONSTRATED
    assert judge(build_claim(factor=2.0000001), record).status is REFUTED


def test_a_refuted_case_outweighs_an_open_one():
    assert judge(build_claim(), build_record(speedups=[2.0, 1.8])).status is REFUTED


def test_each_metric_is_judged_by_its_own_times():
    record = _with_seconds(build_record(speedups=[2.5]), "flash_attention", lambda s: 2 * s, metric="wall")
    verdicts = {metric: judge(build_claim(metric=metric), record).status for metric in ("kernel", "graph", "wall")}
    assert verdicts == {"kernel": DEMONSTRATED, "graph": DEMONSTRATED, "wall": REFUTED}


# Evidence that cannot demonstrate


def test_no_record_is_asserted():
    verdict = judge(build_claim(), None)
    assert verdict.status is ASSERTED
    assert verdict.record is None
    assert "flash_attention is at least 2 times as fast as sdpa" in verdict.reason


def test_an_incomplete_record_cannot_demonstrate_but_can_refute():
    verdict = judge(build_claim(), build_record(complete=False, speedups=[2.5]))
    assert verdict.status is INCONCLUSIVE
    assert "the run is incomplete: interrupted" in verdict.reason
    assert judge(build_claim(), build_record(complete=False, speedups=[1.5])).status is REFUTED


@pytest.mark.parametrize("gate", ["sources", "correct", "bench"])
def test_a_failed_gate_is_never_a_win_and_never_a_loss(gate):
    for speedup in (1.0, 3.0):
        verdict = judge(build_claim(), build_record(speedups=[speedup], gates=build_gates(gate)))
        assert verdict.status is INCONCLUSIVE
        assert verdict.gate_failed == gate
        assert verdict.reason.startswith(f"gate {gate} failed: made up")


def test_every_gate_has_to_pass_for_a_win():
    for gates in (build_gates(not_possible=["build"]), build_gates()[:-1], build_gates()[1:]):
        verdict = judge(build_claim(), build_record(speedups=[3.0], gates=gates))
        assert verdict.status is INCONCLUSIVE
        assert "did not pass" in verdict.reason
    not_reached = [Gate(name=g.name, status=GateStatus.NOT_REACHED) for g in build_gates()]
    assert judge(build_claim(), build_record(speedups=[3.0], gates=not_reached)).status is INCONCLUSIVE


def test_another_gpu_shows_nothing():
    verdict = judge(build_claim(), build_record(gpu=L4, speedups=[3.0]))
    assert verdict.status is INCONCLUSIVE
    assert "NVIDIA L4, the claim of H200" in verdict.reason


@pytest.mark.parametrize(("processes", "rounds"), [(2, 20), (3, 9), (1, 30)])
def test_fewer_rounds_or_processes_than_a_claim_needs_leave_it_open(processes, rounds):
    for speedup in (1.0, 3.0):
        record = build_record(speedups=[speedup], processes=processes, rounds=rounds)
        verdict = judge(build_claim(), record)
        assert verdict.status is INCONCLUSIVE
        said = f"{processes * rounds} rounds in {counted(processes, 'process')}"
        assert f"it has {said}, expected at least 30" in verdict.reason


def test_a_case_of_the_suite_that_the_record_lacks_leaves_the_claim_open():
    record = build_record(speedups=[3.0, 3.0])
    suite = {case.name: case.problem for case in record.cases}
    assert judge(build_claim(), record, suite=suite).status is DEMONSTRATED
    verdict = judge(build_claim(), record, suite={**suite, "case9": {"batch": 1}})
    assert verdict.status is INCONCLUSIVE
    assert "cases that the record lacks or has other problems for: case9" in verdict.reason
    changed = judge(build_claim(), record, suite={**suite, "case1": {"batch": 7}})
    assert changed.status is INCONCLUSIVE
    assert "case1" in changed.reason


def test_a_case_without_correctness_or_times_leaves_the_claim_open():
    record = with_case(build_record(speedups=[3.0, 3.0]), 1, rounds=[], correct=None)
    verdict = judge(build_claim(), record)
    assert verdict.status is INCONCLUSIVE
    assert "1 of 2 cases are inconclusive: case1 its correctness was not shown" in verdict.reason
    no_times = judge(build_claim(), with_case(build_record(speedups=[3.0, 3.0]), 1, rounds=[]))
    assert no_times.status is INCONCLUSIVE
    assert "case1 it has 0 rounds" in no_times.reason


@pytest.mark.parametrize("status", ["failed", "refused", "unavailable", "not measured"])
@pytest.mark.parametrize("arm", ["sdpa", "flash_attention"])
def test_a_case_whose_arm_was_not_measured_leaves_the_claim_open_with_the_reason(arm, status):
    record = with_arm(build_record(speedups=[3.0, 3.0, 3.0]), 1, arm, status=status, reason="out of memory")
    verdict = judge(build_claim(), record)
    assert verdict.status is INCONCLUSIVE
    assert f"case1 {arm} was not measured: {status}, out of memory" in verdict.reason
    assert verdict.geometric_mean is None


def test_a_case_without_a_control_leaves_the_claim_open():
    record = with_arm(build_record(speedups=[3.0, 3.0]), 1, "sdpa#2", status="failed")
    verdict = judge(build_claim(), record)
    assert verdict.status is INCONCLUSIVE
    assert "case1 it has no control" in verdict.reason


def test_uncommitted_changes_and_notes_are_said_in_the_reason():
    record = build_record(speedups=[3.0])
    dirty = record.model_copy(update={"environment": record.environment.model_copy(update={"dirty": True})})
    verdict = judge(build_claim(), dirty, notes=["2 of 9 sources changed since the run: a.py, b.py"])
    assert verdict.status is DEMONSTRATED
    assert verdict.reason.endswith("uncommitted changes; 2 of 9 sources changed since the run: a.py, b.py")
    assert verdict.reason.count("uncommitted") == 1  # the harness lies in the same tree


# The control


def test_a_run_whose_control_failed_is_invalid_whatever_it_shows():
    for speedup in (1.0, 3.0):
        verdict = judge(build_claim(), build_record(speedups=[speedup] * 3, control_bias=0.02))
        assert verdict.status is INVALID
        assert "the control failed in 3 of 3 cases" in verdict.reason
        assert verdict.cases == []


def test_a_control_that_failed_in_another_metric_or_case_set_does_not_count():
    record = _with_seconds(build_record(speedups=[3.0] * 3), "sdpa#2", lambda s: 1.05 * s, metric="wall")
    assert judge(build_claim(metric="graph"), record).status is DEMONSTRATED
    assert judge(build_claim(metric="wall"), record).status is INVALID


def _with_shown_bias(record, bias):
    """Return ``record`` with a control of case 0 that is off by ``bias``."""
    values = [math.log(copy / first) for first, copy in _pairs(record, "sdpa", "sdpa#2")]
    return _with_seconds(record, "sdpa#2", lambda s: s * math.exp(bias - float(np.median(values))))


def test_a_bias_that_the_control_shows_widens_the_interval_of_its_case():
    """A bias too small to fail 13 controls together still counts where its own control shows it."""
    record = build_record(speedups=[2.5] * 13, seed=5)
    plain, wide = judge(build_claim(), record), judge(build_claim(), _with_shown_bias(record, 0.0045))
    assert wide.status is DEMONSTRATED
    assert wide.control is not None
    bias = wide.control.biases["case0"]
    assert bias == pytest.approx(0.0045, rel=0.2)
    before, after = plain.cases[0].interval, wide.cases[0].interval
    assert before is not None
    assert after is not None
    assert after.low == pytest.approx(before.low * math.exp(-bias))
    assert after.high == pytest.approx(before.high * math.exp(bias))


def test_a_bias_widens_the_geometric_mean_by_its_share():
    record = build_record(speedups=[2.5] * 13, seed=5)
    plain, wide = judge(build_claim(), record), judge(build_claim(), _with_shown_bias(record, 0.0045))
    assert plain.control is not None
    assert wide.control is not None
    more = (wide.control.biases["case0"] - plain.control.biases["case0"]) / 13
    assert more > 0
    assert plain.geometric_mean is not None
    assert wide.geometric_mean is not None
    assert wide.geometric_mean.low == pytest.approx(plain.geometric_mean.low * math.exp(-more), rel=1e-9)


def test_no_number_of_rounds_decides_a_difference_below_the_bias():
    record = _with_shown_bias(build_record(speedups=[2.5] * 13, seed=5), 0.0045)
    case = judge(build_claim(factor=2.498), record).cases[0]
    assert case.status is INCONCLUSIVE
    assert case.rounds_needed is None
    assert "no number of rounds would decide" in case.reason


def _pairs(record, below, above, case=0):
    columns = next(rounds.seconds["graph"] for rounds in record.cases[case].rounds if "graph" in rounds.seconds)
    return list(zip(columns[below], columns[above], strict=True))


def test_check_control_leaves_out_cases_with_too_few_rounds():
    control = check_control(build_record(rounds=5), "graph")
    assert control.passed
    assert control.ratios == {}


# Impossible numbers


@pytest.mark.parametrize("seconds", [0.0, -1e-6, math.nan, math.inf])
@pytest.mark.parametrize("arm", ["flash_attention", "sdpa", "sdpa#2"])
def test_a_time_that_cannot_be_makes_the_run_invalid(arm, seconds):
    verdict = judge(build_claim(), _with_seconds(build_record(), arm, lambda _: seconds))
    assert verdict.status is INVALID
    assert f"case case0 has an impossible graph time: {arm} took {seconds} s" in verdict.reason


@pytest.mark.parametrize("arm", ["flash_attention", "sdpa"])
def test_a_time_below_the_roofline_makes_the_run_invalid(arm):
    verdict = judge(build_claim(), _with_seconds(build_record(), arm, lambda s: s * 1e-3))
    assert verdict.status is INVALID
    assert "no kernel can take less than" in verdict.reason


def test_a_baseline_that_the_claim_does_not_name_may_be_impossible():
    record = build_record(speedups=[2.5], baselines={"sdpa": 1.0, "fa3": 1.0})
    assert judge(build_claim(), _with_seconds(record, "fa3", lambda s: s * 1e-3)).status is DEMONSTRATED


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (103, "impossible times were not looked for: the limits of NVIDIA H200X are not known"),
        (90, "held against the SMs of NVIDIA H200X alone: the limits of its memory are not known"),
    ],
)
def test_a_gpu_whose_limits_are_not_known_is_said(arch, said):
    record = build_record(speedups=[2.5])
    gpu = record.environment.gpu
    assert gpu is not None
    unknown = gpu.model_copy(update={"name": "NVIDIA H200X", "sms": 7, "arch": arch})
    changed = record.model_copy(update={"environment": record.environment.model_copy(update={"gpu": unknown})})
    assert said in judge(build_claim(), changed).reason


# The fastest of several baselines


def test_the_fastest_baseline_decides_in_each_case():
    record = build_record(speedups=[2.2, 2.2], baselines={"sdpa": 1.0, "fa3": 1.0})
    record = _with_seconds(record, "fa3", lambda s: 0.8 * s, case=1)
    verdict = judge(build_claim(baseline=["sdpa", "fa3"]), record)
    assert verdict.status is REFUTED
    assert [case.status for case in verdict.cases] == [DEMONSTRATED, REFUTED]
    assert verdict.cases[1].baseline == "fa3"
    assert judge(build_claim(baseline="sdpa"), record).status is DEMONSTRATED


@pytest.mark.parametrize(
    ("factor", "status", "baseline"), [(1.0, DEMONSTRATED, "sdpa"), (2.4, INCONCLUSIVE, "fa3"), (2.8, REFUTED, "sdpa")]
)
def test_an_interval_is_that_of_one_baseline_that_decides(factor, status, baseline):
    """One whose times differ between processes may leave a case open, though another is the fastest."""
    record = build_record(speedups=[2.5], baselines={"sdpa": 1.0, "fa3": 1.0})
    samples = sum(len(each.seconds.get("graph", {}).get("fa3", [])) for each in record.cases[0].rounds)
    slower = itertools.chain([0.8] * (samples // 3), itertools.repeat(1.6))  # in all processes but the first
    record = _with_seconds(record, "fa3", lambda s: next(slower) * s)
    case = judge(build_claim(baseline=["sdpa", "fa3"], factor=factor), record).cases[0]
    assert (case.status, case.baseline) == (status, baseline)
    assert f"against {baseline}" in case.reason
    alone = judge(build_claim(baseline=[baseline], factor=factor), record).cases[0]
    assert (case.interval, case.status) == (alone.interval, status)


@pytest.mark.parametrize(
    ("target", "decides"), [(0.5, "quick"), (0.95, "spread"), (1.1, "quick"), (1.25, "steady"), (2.0, "quick")]
)
def test_of_the_baselines_with_the_weakest_result_the_fastest_decides(target, decides):
    intervals = {
        "steady": Interval(1.2, 1.19, 1.21, 9), "quick": Interval(1.1, 1.0, 1.3, 9),
        "spread": Interval(1.4, 0.9, 1.9, 9),
    }  # fmt: skip
    assert deciding_baseline(intervals, target) == decides


def test_a_baseline_that_does_not_serve_a_problem_is_left_out_there_and_named():
    record = build_record(speedups=[2.5, 2.5], baselines={"sdpa": 1.0, "fa3": 1.0})
    refused = with_arm(record, 0, "fa3", status="refused", reason="head size 4")
    verdict = judge(build_claim(baseline=["sdpa", "fa3"]), refused)
    assert verdict.status is DEMONSTRATED
    assert "fa3 does not serve it" in verdict.cases[0].reason
    both = with_arm(refused, 0, "sdpa", status="refused", reason="head size 4")
    assert judge(build_claim(baseline=["sdpa", "fa3"]), both).status is INCONCLUSIVE


def test_a_baseline_that_is_not_installed_leaves_the_claim_open():
    record = build_record(speedups=[2.5], baselines={"sdpa": 1.0, "fa3": 1.0})
    absent = with_arm(record, 0, "fa3", status="unavailable", reason="no module named fa3")
    verdict = judge(build_claim(baseline=["sdpa", "fa3"]), absent)
    assert verdict.status is INCONCLUSIVE
    assert "fa3 was not measured: unavailable, no module named fa3" in verdict.reason


# A claim about the geometric mean


def test_the_geometric_mean_may_hold_where_a_case_does_not():
    record = build_record(speedups=[1.9, 2.6, 2.7, 2.8, 2.6, 2.7])
    verdict = judge(build_claim(scope="geometric mean"), record)
    assert verdict.status is DEMONSTRATED
    assert verdict.cases[0].status is REFUTED
    assert verdict.geometric_mean is not None
    assert verdict.geometric_mean.estimate == pytest.approx(math.prod([1.9, 2.6, 2.7, 2.8, 2.6, 2.7]) ** (1 / 6), 0.01)


def _with_more_processes(record, case, factor):
    """Return ``record`` with as many processes again in one case, the subject ``factor`` times as slow in them."""
    rounds = []
    for old in record.cases[case].rounds:
        more = [process + 3 for process in old.process]
        seconds = {
            kind: {
                arm: [*times, *((factor if arm == record.subject.name else 1) * t for t in times)]
                for arm, times in arms.items()
            }
            for kind, arms in old.seconds.items()
        }
        twice = {
            name: 2 * getattr(old, name) for name in ("order", "sm_clock_mhz", "power_w", "temperature_c", "throttle")
        }
        rounds.append(old.model_copy(update={"process": [*old.process, *more], "seconds": seconds, **twice}))
    return with_case(record, case, rounds=rounds)


def test_processes_that_few_cases_have_do_not_count_in_the_geometric_mean():
    record = build_record(speedups=[2.5, 2.6, 2.7, 2.8])
    claim = build_claim(scope="geometric mean")
    plain, more = judge(claim, record), judge(claim, _with_more_processes(record, 0, 1.5))
    assert more.geometric_mean == plain.geometric_mean
    assert plain.cases[0].interval is not None
    assert more.cases[0].interval is not None
    assert more.cases[0].interval.low < plain.cases[0].interval.low


def test_the_geometric_mean_is_refuted_or_open_by_its_own_interval():
    claim = build_claim(scope="geometric mean")
    assert judge(claim, build_record(speedups=[1.5, 1.6, 1.7, 1.6])).status is REFUTED
    verdict = judge(claim, build_record(speedups=[1.2, 2.0, 3.5]))
    assert verdict.status is INCONCLUSIVE
    assert "2x lies inside" in verdict.reason


def test_a_missing_case_leaves_the_geometric_mean_open():
    record = with_arm(build_record(speedups=[3.0, 3.1, 3.2]), 1, "sdpa", status="failed", reason="out of memory")
    verdict = judge(build_claim(scope="geometric mean"), record)
    assert verdict.status is INCONCLUSIVE
    assert "1 of 3 cases have no speedup: case1 sdpa was not measured: failed, out of memory" in verdict.reason


def test_a_mean_over_one_case_is_no_mean():
    verdict = judge(build_claim(scope="geometric mean"), build_record(speedups=[3.0]))
    assert verdict.status is INCONCLUSIVE
    assert verdict.geometric_mean is None


# How often it is wrong


def _statuses(n, claim, **model):
    return [judge(claim, build_record(times=("graph",), seed=seed, **model)).status for seed in range(n)]


def test_a_planted_slowdown_of_three_percent_is_seen_in_nineteen_of_twenty_runs():
    found = _statuses(60, build_claim(factor=1.0), speedups=[0.97], spread=0.01)
    assert found.count(REFUTED) >= 57
    assert found.count(DEMONSTRATED) == 0


def test_a_speedup_of_three_percent_is_demonstrated_in_nineteen_of_twenty_runs():
    found = _statuses(60, build_claim(factor=1.0), speedups=[1.03], spread=0.01)
    assert found.count(DEMONSTRATED) >= 57
    assert found.count(REFUTED) == 0


@pytest.mark.parametrize("process_spread", [0.0, 0.005, 0.02])
def test_a_kernel_compared_with_itself_is_hardly_ever_faster_or_slower(process_spread):
    """At most one in twenty; three standard errors of that among 200 runs are 0.046."""
    found = _statuses(200, build_claim(factor=1.0), speedups=[1.0], spread=0.01, process_spread=process_spread)
    assert (found.count(REFUTED) + found.count(DEMONSTRATED)) / len(found) <= 0.05 + 0.046


def test_a_sound_run_of_thirteen_cases_is_seldom_invalid():
    found = _statuses(100, build_claim(factor=1.0), speedups=[1.5] * 13, spread=0.01, process_spread=0.003)
    assert found.count(INVALID) <= 11  # 5 expected at most, and three standard errors
    assert found.count(DEMONSTRATED) == len(found) - found.count(INVALID)


# Exit codes


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([], 4),
        ([DEMONSTRATED, DEMONSTRATED], 0),
        ([DEMONSTRATED, INCONCLUSIVE], 4),
        ([DEMONSTRATED, ASSERTED], 4),
        ([DEMONSTRATED, INVALID], 4),
        ([INCONCLUSIVE, REFUTED, ASSERTED], 1),
        (["gate", DEMONSTRATED, INCONCLUSIVE], 3),
        (["gate", REFUTED], 1),
    ],
)
def test_exit_codes_are_those_of_the_protocol(statuses, code):
    verdicts = [
        Verdict(claim=build_claim(), status=INCONCLUSIVE, reason="", gate_failed="launch")
        if status == "gate"
        else Verdict(claim=build_claim(), status=status, reason="")
        for status in statuses
    ]
    assert exit_code(verdicts) == code


def test_a_verdict_survives_being_written_as_json():
    for record in (None, build_record(speedups=[1.9, 2.004, 3.0]), build_record(control_bias=0.05)):
        verdict = judge(build_claim(), record)
        assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


# Some cases of a suite


def test_a_claim_about_some_cases_is_judged_by_these_alone():
    record = build_record(speedups=[1.5, 2.5, 3.0])
    assert judge(build_claim(), record).status is REFUTED
    verdict = judge(build_claim(cases=["case1", "case2"]), record)
    assert verdict.status is DEMONSTRATED
    assert [case.name for case in verdict.cases] == ["case1", "case2"]
    assert judge(build_claim(cases="case[01]"), record).status is REFUTED


def test_a_case_that_the_suite_gained_matters_only_to_claims_about_it():
    record = build_record(speedups=[2.5, 3.0])
    suite = {case.name: case.problem for case in record.cases} | {"new": {}}
    assert judge(build_claim(), record, suite=suite).status is INCONCLUSIVE
    assert judge(build_claim(cases="case*"), record, suite=suite).status is DEMONSTRATED
    assert judge(build_claim(cases=["case*", "new"]), record, suite=suite).status is INCONCLUSIVE


def test_a_pattern_that_fits_no_case_leaves_the_claim_open():
    verdict = judge(build_claim(cases=["case*", "b9_*"]), build_record(speedups=[2.5, 3.0]))
    assert verdict.status is INCONCLUSIVE
    assert verdict.reason.startswith("no case of the suite fits b9_*, of the claim's cases")
    verdict = judge(build_claim(cases=["case0", "caes1"]), build_record(speedups=[2.5, 3.0]))
    assert "no case of the suite fits caes1, of the claim's cases: did you mean case1?" in verdict.reason


def test_the_control_of_a_case_that_is_not_claimed_counts():
    record = build_record(speedups=[2.5, 3.0, 3.0])
    slower = _with_seconds(record, "sdpa#2", lambda seconds: seconds * 1.1, case=0)
    assert judge(build_claim(cases=["case1"]), slower).status is INVALID


def test_one_record_demonstrates_no_claim_for_two_gpus():
    verdict = judge(build_claim(gpu=["H200", "L4"]), build_record(speedups=[2.5, 3.0]))
    assert verdict.status is INCONCLUSIVE
    assert verdict.reason.startswith("one record shows one GPU, and the claim is of H200, L4")


# How many rounds are still needed


def test_the_rounds_that_a_claim_needs_are_those_of_its_neediest_case():
    verdict = judge(build_claim(), build_record(speedups=[2.006, 2.008, 3.0]))
    few, many = sorted(case.rounds_needed for case in verdict.cases if case.rounds_needed is not None)
    assert few < many
    assert verdict.rounds_needed == many


def test_where_something_else_is_missing_no_rounds_would_decide():
    assert judge(build_claim(), build_record(speedups=[2.5, 3.0], rounds=5)).rounds_needed is None
    assert judge(build_claim(), build_record(speedups=[2.5, 3.0])).rounds_needed is None
    assert judge(build_claim(), None).rounds_needed is None
