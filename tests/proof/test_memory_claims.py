"""A claim about memory is judged by the peak bytes in a record: counted, so without rounds, and with its control."""

from __future__ import annotations

import pytest

from flashmoe_science.errors import ClaimError
from flashmoe_science.proof.judge.claims import why_not
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.judge.new_claim import ClaimRequest, make_claims
from flashmoe_science.proof.report.readme import case_section

from .builders import build_gates, build_record
from .claim_builders import build_claim

MIB = 1 << 20


def record_with(*cases, baselines=("sdpa",), **model):
    """Return a record whose cases have these peak bytes: of the subject, the baselines, and the control."""
    record = build_record(speedups=[2.0] * len(cases), baselines=dict.fromkeys(baselines, 1.0), **model)
    made = []
    for case, peaks in zip(record.cases, cases, strict=True):
        named = dict(zip(("flash_attention", *baselines, f"{baselines[0]}#2"), peaks, strict=True))
        arms = [arm.model_copy(update={"peak_bytes": named[arm.name]}) for arm in case.arms]
        made.append(case.model_copy(update={"arms": arms}))
    return record.model_copy(update={"cases": made})


def memory_claim(**changes):
    return build_claim(**{"metric": "memory", "factor": 1.5, **changes})


@pytest.mark.parametrize(
    ("cases", "status"),
    [
        ([(2 * MIB, 3 * MIB, 3 * MIB), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.DEMONSTRATED),
        ([(2 * MIB, 3 * MIB - 1, 3 * MIB - 1), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.REFUTED),
        ([(2 * MIB, 3 * MIB, 3 * MIB + 512), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.INCONCLUSIVE),
        ([(MIB, 3 * MIB, 3 * MIB + 512), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.DEMONSTRATED),
        ([(0, 3 * MIB, 3 * MIB), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.INCONCLUSIVE),
        ([(MIB, 0, 0), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.INCONCLUSIVE),
        ([(MIB, 3 * MIB, None), (MIB, 2 * MIB, 2 * MIB)], VerdictStatus.INCONCLUSIVE),
    ],
)
def test_the_bytes_of_each_case_decide(cases, status):
    assert judge(memory_claim(), record_with(*cases)).status is status


def test_the_figure_is_the_ratio_of_the_bytes_and_says_against_what():
    verdict = judge(memory_claim(), record_with((MIB, 3 * MIB, 3 * MIB), (MIB, 2 * MIB, 2 * MIB)))
    first, second = (case.interval for case in verdict.cases)
    assert first is not None
    assert second is not None
    assert (first.estimate, first.low, first.high) == pytest.approx((3.0, 3.0, 3.0))
    assert second.estimate == pytest.approx(2.0)
    assert "the lowest is case1, 2.000x (2.000 to 2.000) against sdpa" in verdict.reason


def test_of_several_baselines_the_thriftiest_decides():
    record = record_with((MIB, 4 * MIB, 2 * MIB, 4 * MIB), baselines=("sdpa", "fa3"))
    verdict = judge(memory_claim(baseline=["sdpa", "fa3"]), record)
    (case,) = verdict.cases
    assert case.interval is not None
    assert (case.baseline, round(case.interval.low, 3)) == ("fa3", 2.0)


def test_a_mean_over_the_cases_can_be_claimed():
    record = record_with((MIB, MIB, MIB), *[(MIB, 4 * MIB, 4 * MIB)] * 5)
    mean = memory_claim(scope="geometric mean")
    assert judge(mean, record).status is VerdictStatus.DEMONSTRATED
    assert judge(memory_claim(), record).status is VerdictStatus.REFUTED


def test_times_that_were_bad_say_nothing_of_bytes_and_gates_do():
    cases = [(MIB, 2 * MIB, 2 * MIB)] * 2
    assert judge(memory_claim(), record_with(*cases, control_bias=0.2)).status is VerdictStatus.DEMONSTRATED
    assert judge(memory_claim(), record_with(*cases, gates=build_gates("bench"))).gate_failed == "bench"
    assert judge(memory_claim(), record_with(*cases, complete=False)).status is VerdictStatus.INCONCLUSIVE


def test_a_record_without_counted_bytes_is_no_evidence():
    record = record_with((None, None, None))
    assert why_not(memory_claim(), record) == "the record has no peak memory"
    with pytest.raises(ClaimError, match="the record has no peak memory"):
        make_claims(record, ClaimRequest(kinds=["memory"]))


def test_claim_new_claims_the_largest_round_factor():
    (claim,) = make_claims(record_with((2 * MIB, 3 * MIB + 9, 3 * MIB + 9)), ClaimRequest(kinds=["memory"]))
    assert (claim.metric, claim.factor, claim.id) == ("memory", 1.5, "flash_attention-seed-memory-h200")


def test_the_table_of_speeds_shows_the_bytes():
    record = record_with((2 * MIB, 3 * MIB, 3 * MIB))
    verdict = judge(memory_claim(), record).model_copy(update={"evidence": "evidence/a.json"})
    section = case_section([verdict], {"evidence/a.json": record})
    assert "| case | flash_attention, memory | sdpa, memory | times less memory |" in section
    assert "| case0 | 2.0 MiB | 3.0 MiB | 1.50x [1.50, 1.50] |" in section
