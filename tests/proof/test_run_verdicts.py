"""Tests of what one run says: its verdicts, its exit code, its last word."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.compare.compare import Effect, compare_records
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.judge.run_verdicts import conclude, expectation, last_word, run_exit_code
from flashmoe_science.proof.judge.staleness import Sources
from flashmoe_science.proof.records.evidence import Gate, GateStatus, Record

from .builders import build_gates, build_record
from .claim_builders import build_claim, claim_toml, suite_toml


def expecting(speedup, **changes):
    record = build_record(**changes)
    return record.model_copy(update={"subject": record.subject.model_copy(update={"expected_speedup": speedup})})


@pytest.fixture
def repository(tmp_path):
    """A repository with three claims, one of them about ``build_record(suite="made_up")``."""
    about = [{"id": "mine"}, {"id": "other", "suite": "standard"}, {"id": "b200", "gpu": "B200"}]
    for folder in ("claims", "suites"):
        (tmp_path / folder).mkdir()
    text = "\n".join(claim_toml(**{"suite": "made_up", "factor": 1.9, **changes}) for changes in about)
    (tmp_path / "claims" / "speed.toml").write_text(text)
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    return tmp_path


def run_of(**changes):
    return build_record(**{"suite": "made_up", "speedups": [2.0, 3.0], **changes})


def test_a_run_is_judged_by_the_claims_that_are_about_it(repository):
    (verdict,) = conclude(run_of(), repository)
    assert (verdict.claim.id, verdict.status) == ("mine", VerdictStatus.DEMONSTRATED)


def test_a_run_of_another_suite_of_this_name_demonstrates_nothing(repository):
    (verdict,) = conclude(run_of(speedups=[3.0]), repository)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert "the suite has cases that the record lacks or has other problems for: case1" in verdict.reason
    assert run_exit_code(run_of(speedups=[3.0]), [verdict]) == 4


def test_the_notes_end_the_reason(repository):
    (verdict,) = conclude(
        run_of(), repository, since=lambda _: Sources(notes=["1 of 3 sources changed since the run: a.py"])
    )
    assert verdict.reason.endswith("1 of 3 sources changed since the run: a.py")


@pytest.mark.parametrize(
    ("expected", "status"), [(1.7, VerdictStatus.DEMONSTRATED), (9.0, VerdictStatus.REFUTED), (None, None)]
)
def test_without_a_claim_the_expectation_is_judged(expected, status):
    verdict = conclude(expecting(expected, speedups=[2.0, 2.1]), None)[0]
    assert verdict.claim.factor == (expected or 1.0)
    assert verdict.status is (status or VerdictStatus.DEMONSTRATED)


def test_the_expectation_names_what_is_expected():
    claim = expectation(expecting(1.7, times=("kernel", "wall")))
    assert claim is not None
    assert (claim.factor, claim.baseline, claim.metric, claim.gpu) == (1.7, ("sdpa",), "kernel", ("NVIDIA H200",))
    assert claim.sentence.startswith(
        "On NVIDIA H200, flash_attention is at least 1.7 times as fast as sdpa in kernel time"
    )


def test_a_run_without_times_has_no_verdict(repository):
    assert conclude(run_of(gpu=None), repository) == []


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (build_record(), 0),
        (build_record(speedups=[1.2, 3.0]), 1),
        (build_record(gates=build_gates("correct")), 3),
        (build_record(speedups=[2.001]), 4),
        (build_record(gpu=None), 0),
    ],
    ids=["holds", "refuted", "gate failed", "inconclusive", "no GPU"],
)
def test_exit_codes_of_a_run(record, code):
    verdicts = [judge(build_claim(factor=1.99 if code == 0 else 2.0), record)] if record.environment.gpu else []
    assert run_exit_code(record, verdicts) == code


def test_the_last_word_where_timing_is_not_possible():
    word, sentence = last_word(build_record(gpu=None))
    assert word == "not timed"
    assert sentence == (
        "sources, build, import, correct passed; launch, quick, bench not possible here: made up: not possible here"
    )


def test_the_last_word_of_a_run_that_was_told_where_to_stop():
    gates = [
        Gate(name=gate.name, status=GateStatus.PASSED if i < 2 else GateStatus.NOT_REACHED)
        for i, gate in enumerate(build_gates())
    ]
    assert last_word(build_record(gates=gates, gpu=None))[1] == (
        "sources, build passed; the later gates were not asked for"
    )


def test_what_contradicts_itself_is_no_verdict_and_cannot_be_compared(repository):
    """As recorded, too, which is what ``show`` prints."""
    document = run_of().model_dump(mode="json")
    accuracy = document["cases"][0]["arms"][0]["accuracy"]
    accuracy["max_error"] = 5000 * accuracy["budget"]
    forged = Record.model_validate(document)
    for at, as_recorded in ((repository, False), (repository, True), (None, False)):
        (verdict,) = conclude(forged, at, as_recorded=as_recorded)
        assert verdict.status is VerdictStatus.INVALID
    sound = build_record(suite="made_up", speedups=[2.0, 3.0], day=1)
    for pair in ((forged, sound), (sound, forged)):
        found = compare_records(*pair)
        assert found.effect is Effect.UNDECIDED
        assert f"run {forged.id} is invalid: check accuracy: " in found.reason
    copied = compare_records(sound, sound.model_copy(update={"id": f"{sound.id}x"}))
    assert copied.effect is Effect.UNDECIDED
    assert "is invalid: check copied runs: " in copied.reason


def test_a_run_on_one_of_several_gpus_is_judged_for_that_one_and_says_so(repository):
    path = repository / "claims" / "speed.toml"
    path.write_text(claim_toml(id="mine", suite="made_up", factor=1.9, gpu=["L4", "H200"]))
    (verdict,) = conclude(run_of(), repository)
    assert verdict.status is VerdictStatus.DEMONSTRATED
    assert verdict.claim.gpu == ("H200",)
    assert verdict.notes == ["on NVIDIA H200 alone, and the claim is of L4 too"]


def test_a_run_shown_after_its_sources_changed_is_stale(repository):
    (verdict,) = conclude(run_of(), repository, since=lambda _: Sources("1 of 3, a.py"))
    assert verdict.status is VerdictStatus.STALE


def test_a_run_shown_when_it_is_too_old_demonstrates_nothing(repository):
    path = repository / "claims" / "speed.toml"
    path.write_text(claim_toml(id="mine", suite="made_up", factor=1.9, max_age_days=1))
    (verdict,) = conclude(run_of(), repository)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert "(max_age_days)" in verdict.reason
