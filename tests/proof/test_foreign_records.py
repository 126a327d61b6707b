"""Records and TOML files that somebody else wrote: none outranks another by a trick, none ends a reading verb."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from datetime import datetime, timedelta, timezone

import pytest

from flashmoe_science.errors import ClaimError, EvidenceError
from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.judge.judge import VerdictStatus
from flashmoe_science.proof.judge.staleness import compare_sources
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.records import store
from flashmoe_science.proof.records.documents import open_document, read_record, record_text, write_record
from flashmoe_science.proof.records.evidence import SourceFile
from flashmoe_science.proof.records.store import Archive, Store

from .builders import build_record
from .test_verify import Repository


@pytest.fixture
def repository(tmp_path):
    found = Repository(tmp_path)
    found.claim()
    return found


def judged(repository):
    said: list[str] = []

    def tell(error):
        said.append(str(error))

    (verdict,) = verify_claims(repository.root, on_trouble=tell, on_wrong_claims=tell)
    return verdict.status, "\n".join(said)


def test_a_copy_with_the_same_id_that_shows_the_opposite_is_an_error(repository):
    repository.record("a", speedups=[1.2, 1.3])
    assert judged(repository)[0] is VerdictStatus.REFUTED
    record = repository.record("z", speedups=[2.5, 2.6])
    status, said = judged(repository)
    assert status is not VerdictStatus.DEMONSTRATED
    assert f"different records have one id, {record.id}" in said
    assert "a.json" in said
    assert "z.json" in said
    with pytest.raises(EvidenceError, match="different records have one id"):
        verify_claims(repository.root)
    with pytest.raises(EvidenceError, match="different records have one id"):
        Archive(Store(repository.root / "store"), repository.root).load(record.id)


def test_the_same_record_twice_is_no_error(repository):
    record = repository.record("a", speedups=[2.5, 2.6])
    write_record(record, repository.root / "evidence" / "b.json.gz")
    assert judged(repository) == (VerdictStatus.DEMONSTRATED, "")


def test_a_file_with_two_ids_is_an_error(repository):
    record = repository.record("a", speedups=[2.5, 2.6])
    text = record_text(record)
    (repository.root / "evidence" / "a.json").write_text(text.rstrip()[:-1] + ',"id":"another"}')
    assert "key id: expected one id" in judged(repository)[1]


@pytest.mark.parametrize("days", [2, 365 * 70])
def test_a_record_of_the_future_is_an_error(repository, days):
    repository.record("a", speedups=[1.2, 1.3])
    future = datetime.now(timezone.utc) + timedelta(days=days)
    document = json.loads(record_text(build_record(suite="mine", speedups=[2.5, 2.6], day=1)))
    (repository.root / "evidence" / "z.json").write_text(json.dumps({**document, "created_at": future.isoformat()}))
    status, said = judged(repository)
    assert status is not VerdictStatus.DEMONSTRATED
    assert "z.json: key created_at: expected a moment of the past, got " in said


def test_clocks_may_differ_by_hours(tmp_path):
    soon = datetime.now(timezone.utc) + timedelta(hours=20)
    document = json.loads(record_text(build_record(speedups=[2.5])))
    (tmp_path / "a.json").write_text(json.dumps({**document, "created_at": soon.isoformat()}))
    assert read_record(tmp_path / "a.json").created_at == soon


def test_of_two_records_of_one_moment_the_one_that_refutes_decides(repository):
    repository.record("b", speedups=[2.5, 2.6])
    record = build_record(suite="mine", speedups=[1.2, 1.3], seed=1)
    for name in ("a", "z"):
        write_record(record.model_copy(update={"id": name}), repository.root / "evidence" / f"{name}.json")
        assert judged(repository)[0] is VerdictStatus.REFUTED
        (repository.root / "evidence" / f"{name}.json").unlink()


@pytest.mark.parametrize("folder", ["/tmp/elsewhere", "../elsewhere", "a/../../b", "a\\b"])
def test_a_folder_outside_of_the_repository_is_an_error(tmp_path, folder):
    document = json.loads(record_text(build_record(speedups=[2.5])))
    document["subject"]["folder"] = folder
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match=r"key subject.folder: expected a folder inside the repository"):
        read_record(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"gates": ' + "[" * 3000 + "]" * 3000 + "}"])
def test_nested_json_is_one_line_with_the_file_and_the_others_go_on(repository, text):
    repository.record("b", speedups=[2.5, 2.6])
    (repository.root / "evidence" / "deep.json").write_text(text)
    _, said = judged(repository)
    assert "deep.json: " in said
    assert "\n" not in said.partition("\nhint: ")[0]
    found: list[EvidenceError] = []
    runs = Archive(Store(repository.root / "store"), repository.root).runs(on_trouble=found.append)
    assert (len(runs), len(found)) == (1, 1)


TIMES = ("cases", 0, "rounds", 1, "seconds", "graph", "sdpa")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("cases",), 2**64, "key cases: "),
        (("cases",), {"a": 1}, "key cases: "),
        (("created_at",), "0001-01-01T00:00:00", "key created_at: expected a moment of the past"),
        (("created_at",), "0001-01-01T00:00:00+23:59", "key created_at: expected a moment of the past"),
        (("cases", 0, "input_sets"), 0, "key cases.0.input_sets: "),
        ((*TIMES, 3), 1e308, "case case0, arm sdpa, graph time: expected 1e-12 to 1e+09 s, got 1e+308"),
        ((*TIMES, 3), -1e308, "got -1e+308"),
        ((*TIMES, 3), 5e-324, "got 4.94066e-324"),
        (("suite",), " ", "key suite: expected a name of 1 to 200 bytes, got ' '"),
        (("suite",), "\u00e9" * 300, "key suite: expected a name of 1 to 200 bytes"),
        (("subject", "name"), "", "key subject.name: expected a name"),
        (("baselines", 0), "", "key baselines.0: expected a name"),
        (("subject", "folder"), "a" * 300, "key subject.folder: expected a path that a file can have"),
        (("subject", "sources"), [{"path": "a/" * 3000, "sha256": ""}], "key subject.sources.0.path: expected a path"),
        ((*TIMES, 3), "Infinity", ""),
        ((*TIMES, 3), 0, ""),
        (("id",), "20269901T256199Z-x", ""),
    ],
)
def test_a_value_that_no_run_has_ends_nothing(repository, place, value, said):
    document = json.loads(record_text(repository.record("a", speedups=[2.5, 2.6])))
    for arm in (arm for case in document["cases"] for arm in case["arms"]):
        del arm["rates"]  # which would not follow from the samples
    *path, last = place
    table = document
    for key in path:
        table = table[key]
    table[last] = value
    (repository.root / "evidence" / "a.json").write_text(json.dumps(document))
    status, errors = judged(repository)
    assert status is not VerdictStatus.DEMONSTRATED
    assert said in errors
    assert ("a.json: " in errors) == bool(said)


def test_a_bomb_is_read_up_to_a_limit(repository, monkeypatch):
    class Bounded:
        def __init__(self, file):
            self.file = open_document(file)

        def read(self, size=-1):
            assert size > 0
            return self.file.read(size)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    (repository.root / "evidence" / "bomb.json.gz").write_bytes(gzip.compress(b" " * (4 << 20)))
    monkeypatch.setattr(store, "open_document", Bounded)
    assert "bomb" in store.evidence_files(repository.root)


def test_a_record_names_no_source_outside_of_its_repository(repository, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_text("x")
    record = repository.record("a", speedups=[2.5, 2.6])
    for path in (str(outside), os.path.relpath(outside, repository.root)):
        source = SourceFile(path=path, sha256=hashlib.sha256(b"x").hexdigest())
        subject = record.subject.model_copy(update={"folder": ".", "sources": [source]})
        changed = compare_sources(record.model_copy(update={"subject": subject}), repository.root).changed
        assert "1 of them not in" in changed


def test_a_link_to_a_device_is_no_record(repository):
    (repository.root / "evidence" / "zero.json").symlink_to("/dev/zero")
    assert "zero.json: cannot be read: it is no file" in judged(repository)[1]


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "{b=" * 100_000,
        ".".join(["a"] * 100_000) + " = 1",
        "[" + ".".join(["a"] * 100_000) + "]",
        " . ".join(['"a"'] * 100_000) + " = 1",
        "x" * (2 << 20),
    ],
)
def test_nested_toml_is_one_line_with_the_file_at_once(repository, text):
    (repository.root / "claims" / "deep.toml").write_text(text)
    began = time.monotonic()
    with pytest.raises(ClaimError, match=r"deep.toml: (cannot be read: )?expected at most") as caught:
        load_claims(repository.root / "claims")
    assert time.monotonic() - began < 5
    assert len(str(caught.value)) < 500


def test_a_wrong_claim_file_does_not_hide_the_others(repository):
    repository.record("b", speedups=[2.5, 2.6])
    (repository.root / "claims" / "deep.toml").write_text("a = " + "[" * 1000)
    assert judged(repository)[0] is VerdictStatus.DEMONSTRATED


def test_texts_with_many_dots_and_brackets_are_not_deep(repository):
    text = 'sentence = "' + "a.b[" * 100 + '" # ' + "[." * 100 + "\nx = '''" + "[[.\n" * 100 + "'''"
    (repository.root / "claims" / "wide.toml").write_text(text)
    with pytest.raises(ClaimError, match="unknown key"):
        load_claims(repository.root / "claims")
