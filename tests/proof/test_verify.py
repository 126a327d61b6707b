"""A repository's claims are judged from its own evidence, and what changed since is said."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.judge import verify
from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.judge.judge import VerdictStatus, exit_code
from flashmoe_science.proof.judge.staleness import Sources, compare_sources
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.records.documents import read_record, write_record
from flashmoe_science.proof.records.evidence import SourceFile, SubjectInfo
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

from .builders import L4, build_gates, build_record
from .claim_builders import worded

CLAIM = """
[[claim]]
id = "{id}"
sentence = "made below"
subject = "flash_attention"
baseline = "sdpa"
suite = "mine"
metric = "graph"
factor = {factor}
gpu = {gpu}
scope = "each case"
"""

SUITE = """
name = "mine"
operator = "tests.proof.fake_operator"
description = "The shape of the made-up records."
[defaults]
origin = "made up"
batch = 1
heads = 16
seqlen_q = 512
head_dim = 64
[[cases]]
name = "case0"
[[cases]]
name = "case1"
"""


class Repository:
    """A repository in a temporary folder."""

    def __init__(self, root):
        self.root = root
        for folder in ("claims", "evidence", "suites"):
            (root / folder).mkdir()
        (root / "suites" / "mine.toml").write_text(SUITE)

    def claim(self, factor=2.0, more="", name="a", gpu='"H200"'):
        path = self.root / "claims" / f"{name}.toml"
        path.write_text(CLAIM.format(id=name, factor=factor, gpu=gpu) + more)
        claim = next(claim for claim in load_claims(path.parent) if claim.id == name)
        path.write_text(path.read_text().replace("made below", worded(claim).sentence))

    def record(self, name="run", **model):
        record = build_record(**{"suite": "mine", "speedups": [2.5, 2.6], **model})
        write_record(record, self.root / "evidence" / f"{name}.json")
        return record

    def verdict(self):
        (verdict,) = verify_claims(self.root)
        return verdict


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_claim_with_evidence_is_judged_and_its_file_named(repository):
    repository.claim()
    record = repository.record()
    verdict = repository.verdict()
    assert verdict.status is VerdictStatus.DEMONSTRATED
    assert (verdict.record, verdict.evidence) == (record.id, "evidence/run.json")
    assert ";" not in verdict.reason.partition("the lowest is")[2]  # nothing to add


def test_a_case_that_became_another_problem_leaves_the_claim_open(repository):
    repository.claim()
    repository.record()
    (repository.root / "suites" / "mine.toml").write_text(SUITE + "seqlen_q = 4096\n")
    assert "case1" in repository.verdict().reason
    assert repository.verdict().status is VerdictStatus.INCONCLUSIVE


def test_a_suite_that_is_not_known_here_leaves_the_claim_open(repository):
    repository.claim()
    repository.record()
    (repository.root / "suites" / "mine.toml").unlink()
    verdict = repository.verdict()
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert verdict.reason.startswith("suite mine is not known here")


def test_a_suite_file_that_is_wrong_leaves_its_claim_open_and_hides_no_other(repository):
    repository.claim()
    repository.claim(name="b", more='evidence = "evidence/gone.json"')
    repository.claim(name="c")
    path = repository.root / "claims" / "c.toml"
    path.write_text(path.read_text().replace('"mine"', '"seed"'))
    repository.record()
    repository.record("seed", suite="seed", seed=1)
    (repository.root / "suites" / "mine.toml").write_text("name = 3")
    wrong, gone, other = verify_claims(repository.root)
    assert wrong.status is VerdictStatus.INCONCLUSIVE
    assert wrong.reason.startswith(
        "suite mine cannot be read, so nobody compared its cases: suites/mine.toml: key name"
    )
    assert gone.reason.startswith("claim b: key evidence: expected the id or path of a record")
    assert other.evidence == "evidence/seed.json"
    assert other.reason.startswith("the suite has cases that the record lacks")


def test_the_record_that_speaks_most_against_a_claim_decides_among_those_pinned(repository):
    repository.claim(more='evidence = ["evidence/good.json", "evidence/bad.json"]')
    repository.record("good", day=1)
    repository.record("bad", day=0, speedups=[1.5, 2.5])
    verdict = repository.verdict()
    assert (verdict.status, verdict.evidence) == (VerdictStatus.REFUTED, "evidence/bad.json")


def test_a_newer_run_that_refutes_a_claim_is_said_when_the_claim_pins_an_older_one(repository):
    repository.claim(more='evidence = "evidence/good.json"')
    repository.record("older", day=0, speedups=[1.5, 2.5])
    repository.record("good", day=1)
    repository.record("confirms", day=2)
    repository.record("other", day=2, speedups=[1.5, 2.5], subject="another")
    assert repository.verdict().notes == []
    bad = repository.record("bad", day=3, speedups=[1.5, 2.5])
    verdict = repository.verdict()
    assert (verdict.status, verdict.evidence) == (VerdictStatus.DEMONSTRATED, "evidence/good.json")
    assert verdict.reason.endswith(f"; newer runs that it does not pin refute it: {bad.id}")


def test_a_run_older_than_the_newest_pinned_one_refutes_nothing(repository):
    repository.claim(more='evidence = ["evidence/first.json", "evidence/last.json"]')
    repository.record("first", day=0)
    repository.record("between", day=1, speedups=[1.5, 2.5])
    repository.record("last", day=2)
    assert repository.verdict().notes == []


def test_a_pinned_record_that_is_gone_leaves_the_claim_open(repository):
    repository.claim(more='evidence = "evidence/gone.json"')
    verdict = repository.verdict()
    assert (verdict.status, verdict.record) == (VerdictStatus.INCONCLUSIVE, None)
    said = "claim a: key evidence: expected the id or path of a record in evidence/, got 'evidence/gone.json'"
    assert verdict.reason == said


def test_a_newer_run_that_failed_a_gate_leaves_the_claim_open(repository):
    repository.claim()
    repository.record("good", day=1)
    newer = repository.record("newer", day=2, times=(), gates=build_gates("correct"))
    repository.record("other", day=3, times=(), gates=build_gates("build"), subject="another")
    verdict = repository.verdict()
    assert (verdict.status, verdict.evidence) == (VerdictStatus.INCONCLUSIVE, "evidence/good.json")
    assert verdict.reason.startswith(f"a newer run, {newer.id}, failed gate correct; of what was measured, every one")
    assert verdict.reason.count("failed gate") == 1


def test_a_newer_run_that_failed_a_gate_does_not_save_a_claim_from_being_refuted(repository):
    repository.claim(factor=9.0)
    repository.record("good", day=1)
    repository.record("newer", day=2, times=(), gates=build_gates("correct"))
    verdict = repository.verdict()
    assert verdict.status is VerdictStatus.REFUTED
    assert "failed gate correct" in verdict.reason


def test_an_older_run_that_failed_a_gate_is_history(repository):
    repository.claim()
    repository.record("older", day=0, times=(), gates=build_gates("correct"))
    repository.record("good", day=1)
    assert "failed gate" not in repository.verdict().reason


def test_a_broken_record_is_an_error_that_names_it(repository):
    repository.claim()
    (repository.root / "evidence" / "broken.json").write_text('{"gates": []}')
    with pytest.raises(EvidenceError, match=r"broken\.json: key "):
        verify_claims(repository.root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 3}, "it has schema 3, and this flashmoe reads up to 2"),
        ({"schema_version": 3, "suite": 3}, "it has schema 3, and this flashmoe reads up to 2"),
        ({"invented": 1}, "key invented: unknown key"),
    ],
)
def test_a_record_of_a_newer_flashmoe_is_said_to_be_one(repository, change, said):
    repository.record()
    path = repository.root / "evidence" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EvidenceError) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: {said}\nhint: a newer flashmoe made it: update this one")


def spoil(repository, name, **changes):
    """Make a record one that cannot be read, and which still says what it is of."""
    path = repository.root / "evidence" / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"invented": 1} | changes))


def test_a_record_that_cannot_be_read_leaves_open_what_may_rest_on_it(repository):
    repository.claim()
    repository.record()
    repository.record("other", day=1)
    troubles: list[EvidenceError] = []
    spoil(repository, "other")
    (verdict,) = verify_claims(repository.root, on_trouble=troubles.append)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    said = "evidence/other.json cannot be read, and may be of a run that decides it (key invented: unknown key)"
    assert verdict.reason.startswith(f"{said}; of what was measured, ")
    assert ["other.json" in str(trouble) for trouble in troubles] == [True]


@pytest.mark.parametrize(
    "of", [{"suite": "seed"}, {"subject": {"name": "mine"}}, {"environment": {"gpu": {"name": "NVIDIA L4"}}}]
)
def test_a_record_that_cannot_be_read_and_is_of_something_else_hides_no_verdict(repository, of):
    repository.claim()
    repository.record()
    repository.record("other", day=1)
    troubles: list[EvidenceError] = []
    spoil(repository, "other", **of)
    (verdict,) = verify_claims(repository.root, on_trouble=troubles.append)
    assert (verdict.status, len(troubles)) == (VerdictStatus.DEMONSTRATED, 1)


def test_a_record_that_tells_nothing_may_be_of_any_claim_and_saves_none_from_being_refuted(repository):
    repository.claim()
    repository.claim(factor=9.0, name="b")
    repository.record()
    (repository.root / "evidence" / "broken.json").write_text("{")
    found = verify_claims(repository.root, on_trouble=lambda _: None)
    assert [verdict.status for verdict in found] == [VerdictStatus.INCONCLUSIVE, VerdictStatus.REFUTED]


def test_a_pinned_record_that_cannot_be_read_leaves_the_claim_open_and_is_named(repository):
    repository.claim(more='evidence = "evidence/run.json"')
    repository.record()
    (repository.root / "evidence" / "run.json").write_text("{")
    (verdict,) = verify_claims(repository.root, on_trouble=lambda _: None)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert verdict.reason.startswith(
        "evidence/run.json, which it pins, cannot be read: is no record of a run: Invalid JSON"
    )


def test_a_claim_without_evidence_says_which_record_could_not_be_read(repository):
    repository.claim()
    repository.record()
    (repository.root / "evidence" / "run.json").write_text("{")
    (verdict,) = verify_claims(repository.root, on_trouble=lambda _: None)
    assert verdict.status is VerdictStatus.ASSERTED
    assert "; evidence/run.json cannot be read, and may be of a run" in verdict.reason


# Sources


def _subject(*sources, folder):
    subject = SubjectInfo(name="s", operator="attention", entry_point="m:f", sources=list(sources), folder=folder)
    record = build_record()
    environment = record.environment.model_copy(update={"commit": None})
    return record.model_copy(update={"subject": subject, "environment": environment})


def _source(path, text):
    return SourceFile(path=path, sha256=hashlib.sha256(text.encode()).hexdigest())


def test_sources_that_changed_or_went_are_named(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("same.cu", "changed.cu"):
        (tmp_path / "mine" / name).write_text("old")
    subject = _subject(*(_source(n, "old") for n in ("same.cu", "changed.cu", "gone.cu")), folder="mine")
    assert compare_sources(subject, tmp_path).changed == "1 of 3 (1 of them not in this repository), gone.cu"
    (tmp_path / "mine" / "changed.cu").write_text("new")
    assert (
        compare_sources(subject, tmp_path).changed == "2 of 3 (1 of them not in this repository), changed.cu, gone.cu"
    )


def test_a_folder_of_the_repository_that_is_gone_has_changed(tmp_path):
    assert compare_sources(_subject(_source("kernel.cu", "x"), folder="mine"), tmp_path) == Sources(
        "1 of 1 (1 of them not in this repository), kernel.cu"
    )


def test_sources_of_our_own_are_found_in_the_repository_before_the_installed_package(tmp_path):
    own = (PACKAGE_FOLDER / "errors.py").read_text()
    subject = _subject(_source("errors.py", own), folder=None)
    assert compare_sources(subject, tmp_path) == Sources()
    (tmp_path / "src" / PACKAGE_FOLDER.name).mkdir(parents=True)
    (tmp_path / "src" / PACKAGE_FOLDER.name / "errors.py").write_text("changed")
    assert compare_sources(subject, tmp_path) == Sources("1 of 1, errors.py")


def test_sources_that_are_elsewhere_are_said_to_be(tmp_path):
    assert compare_sources(_subject(folder=None), tmp_path) == Sources()
    found = compare_sources(_subject(_source("kernel.cu", "x"), folder=None), tmp_path)
    assert found == Sources(notes=["its sources are not in this repository, so nobody compared them"])


@pytest.fixture
def changed(repository):
    """Make a repository whose sources have changed since a run, with any speedups, and return the run's file."""
    own = repository.root / "src" / PACKAGE_FOLDER.name
    own.mkdir(parents=True)
    (own / "kernel.cu").write_text("new")

    def changed(**model):
        record = repository.record(**model)
        changes = {"sources": [_source("kernel.cu", "old")], "folder": f"src/{PACKAGE_FOLDER.name}"}
        subject = record.subject.model_copy(update=changes)
        write_record(record.model_copy(update={"subject": subject}), repository.root / "evidence" / "run.json")

    return changed


def test_a_claim_whose_sources_changed_since_is_stale(repository, changed):
    repository.claim()
    changed()
    verdict = repository.verdict()
    assert verdict.status is VerdictStatus.STALE
    assert verdict.notes == ["demonstrated at commit 000000000000, before its sources changed: 1 of 1, kernel.cu"]
    assert verdict.reason.startswith("every one of 2 cases is at least 2x")
    assert verdict.reason.endswith(f"; {verdict.notes[0]}")
    assert (exit_code([verdict]), exit_code([verdict], strict=True)) == (0, 4)


@pytest.mark.parametrize(
    ("speedups", "status"), [([1.5, 2.6], VerdictStatus.REFUTED), ([2.0, 2.6], VerdictStatus.INCONCLUSIVE)]
)
def test_what_was_never_demonstrated_does_not_become_stale(repository, changed, speedups, status):
    repository.claim()
    changed(speedups=speedups)
    verdict = repository.verdict()
    assert verdict.status is status
    assert verdict.notes == ["measured at commit 000000000000, before its sources changed: 1 of 1, kernel.cu"]


def test_a_doubt_weighs_more_than_changed_sources(repository, changed):
    repository.claim(more="max_age_days = 1\n")
    changed()
    assert repository.verdict().status is VerdictStatus.INCONCLUSIVE


# Age, versions, several GPUs


def test_evidence_older_than_the_claim_allows_demonstrates_nothing(repository):
    repository.claim(more="max_age_days = 30\n")
    record = repository.record()

    def after(days):
        (verdict,) = verify_claims(repository.root, now=record.created_at + timedelta(days=days))
        return verdict

    assert after(29).status is VerdictStatus.DEMONSTRATED
    assert after(30).status is VerdictStatus.DEMONSTRATED
    assert after(41).status is VerdictStatus.INCONCLUSIVE
    assert after(41).reason.startswith("the evidence is 41 days old, and the claim allows 30 (max_age_days); of what")


def test_old_evidence_still_refutes(repository):
    repository.claim(factor=9.0, more="max_age_days = 1\n")
    repository.record()
    assert repository.verdict().status is VerdictStatus.REFUTED


def test_a_newer_failure_with_other_versions_is_not_one_of_this_claim(repository):
    repository.claim(more='versions = {torch = ">=2.10"}\n')
    repository.record("good", day=1)
    newer = repository.record("newer", day=2, times=(), gates=build_gates("correct"))
    assert repository.verdict().status is VerdictStatus.INCONCLUSIVE
    old = newer.environment.model_copy(update={"versions": {"torch": "2.9.1"}})
    write_record(newer.model_copy(update={"environment": old}), repository.root / "evidence" / "newer.json")
    assert repository.verdict().status is VerdictStatus.DEMONSTRATED


@pytest.mark.parametrize(
    ("on_l4", "status", "decides"),
    [
        ([2.5, 2.6], VerdictStatus.DEMONSTRATED, None),
        ([1.5, 2.6], VerdictStatus.REFUTED, "L4"),
        (None, VerdictStatus.ASSERTED, "L4"),
    ],
)
def test_a_claim_for_several_gpus_needs_evidence_of_each_and_the_weakest_decides(repository, on_l4, status, decides):
    repository.claim(gpu='["H200", "L4"]')
    repository.record("h200")
    if on_l4:
        repository.record("l4", gpu=L4, speedups=on_l4, baseline_seconds=2e-4, seed=1)
    verdict = repository.verdict()
    assert verdict.status is status
    assert verdict.claim.gpu == ("H200", "L4")
    found = {part.claim.gpu[0]: part for part in verdict.by_gpu}
    assert set(found) == {"H200", "L4"}
    assert (found["H200"].status, found["H200"].evidence) == (VerdictStatus.DEMONSTRATED, "evidence/h200.json")
    assert f"L4: {status.value}, " in verdict.reason
    if decides:
        assert verdict.by_gpu[0].claim.gpu == (decides,)
        assert verdict.evidence == found[decides].evidence


def test_of_several_gpus_each_is_judged_by_the_records_pinned_for_it(repository):
    repository.claim(more='evidence = ["evidence/h200.json"]\n', gpu='["H200", "L4"]')
    path = repository.root / "claims" / "a.toml"
    repository.record("h200")
    repository.record("l4", gpu=L4, baseline_seconds=2e-4, seed=1)
    assert repository.verdict().status is VerdictStatus.ASSERTED
    path.write_text(path.read_text().replace('["evidence/h200.json"]', '["evidence/h200.json", "evidence/l4.json"]'))
    assert repository.verdict().status is VerdictStatus.DEMONSTRATED


def test_a_gate_that_failed_on_one_of_several_gpus_is_that_of_the_claim(repository):
    repository.claim(gpu='["H200", "L4"]')
    repository.record("h200", control_bias=0.1)  # invalid, which is weaker
    failed = repository.record("l4", gpu=L4, seed=1, baseline_seconds=60e-6)
    gates = {"gates": build_gates("bench")}
    write_record(failed.model_copy(update=gates), repository.root / "evidence" / "l4.json")
    verdict = repository.verdict()
    assert (verdict.status, verdict.gate_failed) == (VerdictStatus.INVALID, "bench")
    assert exit_code([verdict]) == 3


def test_a_newer_failure_of_another_subject_of_this_name_is_not_one_of_this(repository):
    repository.claim()
    repository.record("good", day=1)
    newer = repository.record("newer", day=2, times=(), gates=build_gates("correct"))
    subject = newer.subject.model_copy(update={"entry_point": "mine:fast", "folder": "mine"})
    write_record(newer.model_copy(update={"subject": subject}), repository.root / "evidence" / "newer.json")
    assert repository.verdict().status is VerdictStatus.DEMONSTRATED


def test_twenty_claims_read_each_of_ten_records_once(repository, monkeypatch):
    for number in range(10):
        repository.record(f"run{number}", day=number)
    for number in range(20):
        repository.claim(name=f"c{number}")
    read = []

    def read_and_count(path):
        read.append(path.stem)
        return read_record(path)

    monkeypatch.setattr(verify, "read_record", read_and_count)
    assert len(verify_claims(repository.root)) == 20
    assert sorted(read) == [f"run{number}" for number in range(10)]
