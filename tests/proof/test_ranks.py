"""Calls over two ranks of a CPU: the whole chain, and what goes wrong on one rank alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashmoe_science.errors import EvidenceError, ProofError
from flashmoe_science.proof.gates import ProveRequest, check_request, prove
from flashmoe_science.proof.judge.claims import why_not
from flashmoe_science.proof.judge.comparable import check_comparable
from flashmoe_science.proof.judge.consistency import check_alone, contradiction
from flashmoe_science.proof.judge.judge import VerdictStatus
from flashmoe_science.proof.judge.new_claim import ClaimRequest, make_claims
from flashmoe_science.proof.judge.run_verdicts import conclude
from flashmoe_science.proof.ranks.group import run_ranks
from flashmoe_science.proof.records.documents import parse_record, record_text
from flashmoe_science.proof.records.evidence import GateStatus, Launch, RankGroup, RankRounds, Settings
from flashmoe_science.proof.report.terminal import conditions
from flashmoe_science.proof.subject.subject import Subject
from flashmoe_science.proof.subject.suites import Suite, SuiteCase

from . import ranked
from .builders import H200, build_record
from .chain import Recorder

LAUNCH = Launch(name="of_rank_1", grid=(1, 1, 1), block=(32, 1, 1), registers=8, shared_memory_bytes=0)
CASE = {"name": "w2_n40", "problem": {"ranks": 2, "length": 40}}


def subject_of(entry, operator=ranked.OPERATOR.name):
    folder = Path(__file__).parent
    return Subject("ours", operator, f"{ranked.NAME}:{entry}", folder, ("ranked.py",), (), devices=("cuda", "cpu"))


def request_of(entry="right", lengths=(40,), ranks=(2,), **settings):
    problems = [ranked.Problem(each, length) for each in ranks for length in lengths]
    cases = tuple(SuiteCase(ranked.OPERATOR.describe(p), p, "made for a test") for p in problems)
    suite = Suite("made-up", ranked.OPERATOR.name, "Made for a test.", cases, Path("made-up.toml"))
    return ProveRequest(
        subject_of(entry), suite, ["plain", "late", "turned"], settings=Settings(processes=1, rounds=6, **settings)
    )


def run(task, entry, *, operator=ranked.OPERATOR.name, timeout_s=60.0, **payload):
    """Return how a task of both ranks ended, and the results of its cases."""
    payload = {"subject": subject_of(entry, operator).to_json(), "cases": [CASE], "device": "cpu", "seed": 1, **payload}
    cases = []

    def on_event(event):
        cases.extend([event["case"]] if event["event"] == "case" else [])

    result = run_ranks(task, payload, 2, timeout_s=timeout_s, replies=[None, None], on_event=on_event)
    return result, cases


@pytest.fixture(scope="module")
def record():
    return prove(request_of(), progress=Recorder(), save=lambda _: None)


def test_the_chain_proves_a_subject_over_two_ranks_as_far_as_a_cpu_can(record):
    gates = {gate.name: gate for gate in record.gates}
    assert gates["launch"].status is GateStatus.NOT_POSSIBLE
    others = [gate for name, gate in gates.items() if name != "launch"]
    assert all(gate.status is GateStatus.PASSED for gate in others), [gate.summary for gate in others]
    assert "on 2 ranks of the CPU" in gates["correct"].summary
    assert any("2 answers compared again" in line for line in gates["correct"].details)
    assert record.environment.ranks == RankGroup(count=2, backend="gloo", link="one CPU")
    assert record.environment.place == "2 ranks of a CPU"
    (case,) = record.cases
    assert {arm.name: arm.status for arm in case.arms} == dict.fromkeys(
        ("ours", "plain", "late", "turned", "plain#2"), "measured"
    )
    (verdict,) = conclude(record, None)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert "its times are those of a CPU: not a claim" in verdict.reason
    assert verdict.claim.sentence.startswith("On 2 ranks of a machine with no GPU, ours is at least as fast as plain")


def test_what_a_cpu_could_not_check_it_does_not_time():
    record = prove(request_of("needs_a_gpu"), progress=Recorder(), save=lambda _: None)
    gates = {gate.name: gate for gate in record.gates}
    assert gates["correct"].status is GateStatus.NOT_POSSIBLE
    for name in ("quick", "bench"):
        assert gates[name].status is GateStatus.NOT_POSSIBLE
        assert gates[name].summary == "no times without right answers: correct did not check w2_n40 here"


def test_a_late_rank_counts(record):
    (rounds,) = record.cases[0].rounds
    first, second = rounds.ranks
    assert list(rounds.seconds) == ["wall"]
    for arm, column in rounds.seconds["wall"].items():
        assert column == [
            max(pair) for pair in zip(first.seconds["wall"][arm], second.seconds["wall"][arm], strict=True)
        ]
    assert min(second.seconds["wall"]["late"]) > ranked.LATE_S
    assert rounds.seconds["wall"]["late"] != first.seconds["wall"]["late"]
    assert any("a time is that of the slowest rank" in line for line in conditions(record))


def test_a_record_of_ranks_is_read_back_and_checked(record):
    again = parse_record(record_text(record), "here")
    assert again == record
    assert contradiction(check_alone(record)) == ""


def test_an_answer_that_is_wrong_on_rank_1_only_is_caught_and_named(tmp_path):
    result, (case,) = run("check_correct", "wrong_on_rank_1", answers=str(tmp_path))
    assert result.ok, result.reason
    assert case["status"] == "failed"
    assert re.match(
        r"rank 1: the first call: error 1, allowed [\d.]+; wrong in 1 of 40 elements.*\[3\]", case["reason"]
    )


def test_a_baseline_that_is_wrong_on_rank_1_only_is_not_timed():
    settings = Settings(times=["wall"], processes=1, rounds=2, seed=1).model_dump(mode="json")
    more = {"settings": settings, "process": 0, "times": ["wall"], "baselines": ["wrong"], "control": False}
    result, (case,) = run("measure", "right", **more)
    assert result.ok, result.reason
    assert {arm["name"]: arm["status"] for arm in case["arms"]} == {"ours": "measured", "wrong": "failed"}
    assert case["arms"][1]["reason"].startswith("rank 1: its answer is off: error 1, allowed")
    assert list(case["rounds"]["seconds"]["wall"]) == ["ours"]


def test_baselines_of_two_ranks_are_timed_without_the_subject():
    settings = Settings(times=["wall"], processes=1, rounds=2, seed=1).model_dump(mode="json")
    more = {"settings": settings, "process": 6, "times": ["wall"], "baselines": ["plain", "late"]}
    result, (case,) = run("measure_alone", "right", **more)
    assert result.ok, result.reason
    assert result.data["imported"]  # one module holds the operator and the subject
    assert {arm["name"]: arm["status"] for arm in case["arms"]} == {"plain": "measured", "late": "measured"}
    assert set(case["rounds"]["seconds"]["wall"]) == {"plain", "late"}
    assert len(case["rounds"]["ranks"]) == 2


@pytest.mark.parametrize(
    ("entry", "timeout_s", "reason"),
    [
        ("dies_on_rank_1", 60.0, "rank 1: killed by SIGKILL; rank 0: "),
        (
            "hangs_on_rank_1",
            30.0,
            "rank 1: no answer within 30 s; rank 0: waited for it at the first call, with .*",
        ),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others_and_is_named(entry, timeout_s, reason):
    result, cases = run("check_correct", entry, timeout_s=timeout_s)
    assert not result.ok
    assert not cases
    assert re.match(reason, result.reason), result.reason
    assert result.timed_out == (entry == "hangs_on_rank_1")


@pytest.mark.exhaustive
def test_an_error_on_one_rank_is_that_of_all():
    """Rank 0 waits in the collective until that gives up, and then both know."""
    result, (case,) = run("check_correct", "raises_on_rank_1", timeout_s=30.0)
    assert result.ok, result.reason
    assert "rank 1: the first call: raised ValueError: no more" in case["reason"]


def test_ranks_that_disagree_on_the_case_are_found():
    result, _ = run("check_correct", "right", operator=ranked.OF_EACH_RANK.name)
    assert not result.ok
    case = "case w2_n40, {.*} on 2 ranks"
    assert re.search(f"ranks do not agree: rank 0 is at {case}, and rank 1 is at {case}", result.reason)
    assert '"length": 40' in result.reason
    assert '"length": 41' in result.reason


def test_a_run_is_of_one_number_of_ranks_and_takes_no_kernel_time():
    with pytest.raises(ProofError, match="all cases of a run must have as many ranks, got 2 and 4 in suite made-up"):
        check_request(request_of(ranks=(2, 4)))
    with pytest.raises(ProofError, match="kernel time is not taken over 2 ranks"):
        check_request(request_of(times=["kernel"]))


# Records of GPUs, made up


def seen_by(rank, rounds):
    """Return what a rank saw: rank 0 is the slowest, and the others are up to 6 % ahead."""
    sensors = {name: getattr(rounds, name) for name in RankRounds.model_fields}
    seconds = {
        kind: {arm: [s * (1 - 0.01 * (rank * i % 7)) for i, s in enumerate(column)] for arm, column in arms.items()}
        for kind, arms in rounds.seconds.items()
    }
    return RankRounds(**{**sensors, "seconds": seconds})


def record_of(ranks=2, link="NVLink"):
    """Return a made-up record of a subject that is 1.9 times as fast as one GPU."""
    record = build_record(speedups=(1.9, 1.9), baselines={"one-gpu": 1.0}, times=["wall"])
    gpus = [H200.model_copy(update={"uuid_hash": str(rank)}) for rank in range(ranks)]
    group = RankGroup(count=ranks, backend="nccl", link=link, links=18, gpus=gpus, nccl="2.27.3")
    environment = record.environment.model_copy(update={"ranks": group})
    cases = []
    for case in record.cases:
        (rounds,) = case.rounds
        each = [seen_by(rank, rounds) for rank in range(ranks)]
        arms = [arm.model_copy(update={"rank_launches": [[LAUNCH]] * (ranks - 1)}) for arm in case.arms]
        ranked_rounds = rounds.model_copy(update={"ranks": each})
        cases.append(case.model_copy(update={"rounds": [ranked_rounds], "arms": arms}))
    return record.model_copy(update={"environment": environment, "cases": cases})


def test_a_claim_says_on_how_many_gpus_and_what_share_of_one_it_is():
    record = record_of()
    (claim,) = make_claims(record, ClaimRequest(factor=1.8))
    assert (claim.ranks, claim.link) == (2, "NVLink")
    assert claim.sentence == (
        "On 2 H200 over NVLink, flash_attention is at least 1.8 times as fast as one-gpu in wall time "
        "(90 % of one GPU's rate on each), in each of the 2 cases of suite seed."
    )
    assert why_not(claim, record) is None
    assert why_not(claim, record_of(4)) == "the record is of 4 GPUs, the claim of 2"
    assert why_not(claim, record_of(link="PCIe")) == "the record is of GPUs over PCIe, the claim of NVLink"
    one = build_record(speedups=(1.9, 1.9), baselines={"one-gpu": 1.0}, times=["wall"])
    assert why_not(claim, one) == "the record is of 1 GPU, the claim of 2"
    (of_one,) = make_claims(one, ClaimRequest(factor=1.8))
    assert "ranks" not in of_one.model_dump(exclude_defaults=True)
    assert why_not(of_one, record) == "the record is of 2 GPUs, the claim of 1"


def test_runs_of_other_ranks_are_not_compared():
    with pytest.raises(EvidenceError, match="ranks is 2 over NVLink in A and 2 over PCIe in B"):
        check_comparable(record_of(), record_of(link="PCIe"), ["wall"])


def faults(change, check="ranks"):
    record = record_of()
    return [each.detail for each in check_alone(change(record)) if each.name == check and each.detail]


def with_rounds(record, **changes):
    case = record.cases[0]
    rounds = case.rounds[0].model_copy(update=changes)
    return record.model_copy(update={"cases": [case.model_copy(update={"rounds": [rounds]})]})


def test_what_a_record_says_of_its_ranks_has_to_agree():
    assert faults(lambda record: record) == []
    shorter = {
        "wall": {arm: [s / 2 for s in column] for arm, column in record_of().cases[0].rounds[0].seconds["wall"].items()}
    }
    assert "the wall times of" in faults(lambda record: with_rounds(record, seconds=shorter))[0]
    one = record_of().cases[0].rounds[0].ranks[:1]
    assert faults(lambda record: with_rounds(record, ranks=one)) == [
        "case case0: rounds of 1 ranks, and the calls were made by 2"
    ]

    def with_another_card(record):
        gpus = [record.environment.gpu, record.environment.gpu.model_copy(update={"name": "L4"})]
        group = record.environment.ranks.model_copy(update={"gpus": gpus})
        return record.model_copy(update={"environment": record.environment.model_copy(update={"ranks": group})})

    assert faults(with_another_card) == ["2 ranks of 2 cards, L4 and NVIDIA H200"]


def of_rank_1(**changes):
    """Return what changes what rank 1 saw in the first case, and nothing that is said of both ranks."""

    def change(record):
        first, second = record.cases[0].rounds[0].ranks
        return with_rounds(record, ranks=[first, second.model_copy(update=changes)])

    return change


def with_group(**changes):
    def change(record):
        group = record.environment.ranks.model_copy(update=changes)
        return record.model_copy(update={"environment": record.environment.model_copy(update={"ranks": group})})

    return change


def with_launches(launches):
    def change(record):
        case = record.cases[0]
        arms = [arm.model_copy(update={"rank_launches": launches}) for arm in case.arms]
        return record.model_copy(update={"cases": [case.model_copy(update={"arms": arms})]})

    return change


def columns_of(factor):
    rounds = record_of().cases[0].rounds[0]
    return {"wall": {arm: [factor * s for s in column] for arm, column in rounds.seconds["wall"].items()}}


@pytest.mark.parametrize(
    ("check", "change", "said"),
    [
        ("work", lambda record: record, "its calls were made by 2 ranks, and its problem needs 1"),
        ("ranks", with_group(gpus=[]), "2 ranks of 0 cards, NVIDIA H200"),
        ("ranks", with_group(gpus=[], backend="gloo"), "ranks that meet by gloo, on NVIDIA H200"),
        ("ranks", with_launches([]), "has launches of 1 of 2 ranks"),
        ("ranks", of_rank_1(sm_clock_mhz=[210] * 30), "its sm_clock_mhz is not that of the worst rank"),
        ("ranks", of_rank_1(throttle=["hw_thermal"] * 30), "its throttle is not that of the worst rank"),
        ("ranks", of_rank_1(seconds=columns_of(1.0)), "have one ratio between ranks 0 and 1 in every round"),
        ("ranks", of_rank_1(seconds=columns_of(0.9)), "have one ratio between ranks 0 and 1"),
        ("ranks", of_rank_1(seconds={}), "its ranks have times of other arms"),
        ("clocks", of_rank_1(sm_clock_mhz=[2500] * 30), "rank 1: case case0: a clock of 2500 MHz"),
        ("sensors", of_rank_1(temperature_c=[300] * 30), "rank 1: case case0: the card had 300 degrees Celsius"),
        ("launches", with_launches([[LAUNCH.model_copy(update={"block": (2048, 1, 1)})]]), "2048 threads in a block"),
    ],
)
def test_a_contradiction_on_one_rank_is_found(check, change, said):
    assert said in "".join(faults(change, check))


def test_an_arm_that_was_refused_has_launches_of_no_rank():
    def refuse(record):
        case = record.cases[0]
        more = case.arms[-1].model_copy(
            update={"name": "other", "status": "refused", "launches": [], "rank_launches": [[]]}
        )
        return record.model_copy(update={"cases": [case.model_copy(update={"arms": [*case.arms, more]})]})

    assert not faults(refuse, "ranks")


def test_a_record_of_one_rank_says_nothing_of_ranks():
    text = record_text(build_record())
    assert not re.search('"(ranks|rank_launches)"', text)
    assert '"rank_launches":[[' in record_text(record_of())
    assert parse_record(record_text(record_of()), "here").cases[0].arms[0].rank_launches == [[LAUNCH]]
