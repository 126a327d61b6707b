"""Tests of where runs are kept and found again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof import store as store_module
from flashmoe_science.proof.evidence import Accuracy, write_record
from flashmoe_science.proof.store import Archive, Store, default_url, evidence_files, find_repository, summarize

from .builders import build_gates, build_record

FIRST = "20260101T000000Z-seed-flash_attention-000000"
SECOND = "20260102T000000Z-seed-flash_attention-000000"


@pytest.fixture
def store(tmp_path):
    return Store(f"sqlite:///{tmp_path / 'deep' / 'runs.sqlite'}")


def test_a_record_comes_back_as_it_was_saved(store):
    record = build_record()
    store.save(record)
    assert store.load(record.id) == record


def test_saving_again_replaces_the_record(store):
    record = build_record()
    store.save(record.model_copy(update={"complete": False, "cases": record.cases[:1]}))
    store.save(record)
    assert store.load(record.id).complete
    assert [run.cases for run in store.runs()] == [3]


def test_a_unique_prefix_is_enough(store):
    for day in (0, 1):
        store.save(build_record(day=day))
    assert store.load("20260102").id == SECOND


def test_an_ambiguous_prefix_names_what_it_could_mean(store):
    for day in (0, 1):
        store.save(build_record(day=day))
    with pytest.raises(EvidenceError, match=f"'2026' begins 2 ids: {SECOND}, {FIRST}\nhint: give more of the id"):
        store.load("2026")


def test_an_id_that_begins_another_id_is_found(store):
    record = build_record()
    store.save(record)
    store.save(record.model_copy(update={"id": record.id + "1"}))
    assert store.load(record.id).id == record.id


def test_wildcards_of_sql_are_plain_characters(store):
    store.save(build_record())
    with pytest.raises(EvidenceError, match="there is no run '2026%'"):
        store.load("2026%")


def test_an_unknown_id_suggests_the_nearest(store):
    store.save(build_record())
    with pytest.raises(EvidenceError, match=f"hint: did you mean {FIRST}?"):
        store.load(FIRST.replace("seed", "sede"))


def test_a_path_is_read_from_the_file(store, tmp_path):
    record = build_record()
    write_record(record, tmp_path / "mine.json")
    assert store.load(str(tmp_path / "mine.json")) == record


def test_reading_creates_no_database(store, tmp_path):
    assert store.runs() == []
    with pytest.raises(EvidenceError, match="there is no run"):
        store.load("2026")
    assert list(tmp_path.iterdir()) == []


def test_runs_come_newest_first_and_filtered(store):
    store.save(build_record(day=1, suite="standard"))
    store.save(build_record(day=0))
    store.save(build_record(day=2, subject="mine", gpu=None))
    assert [(run.subject, run.suite) for run in store.runs()] == [
        ("mine", "seed"),
        ("flash_attention", "standard"),
        ("flash_attention", "seed"),
    ]
    assert [run.suite for run in store.runs(suite="standard")] == ["standard"]
    assert [run.subject for run in store.runs(subject="mine")] == ["mine"]
    assert len(store.runs(gpu="h200")) == 2
    assert len(store.runs(limit=1)) == 1


def test_a_summary_says_which_gate_failed(store):
    store.save(build_record(gates=build_gates("launch")))
    assert store.runs()[0].result == "launch failed"


def test_a_summary_of_a_run_without_gpu(store):
    run = summarize(build_record(gpu=None))
    assert (run.gpu, run.result, run.cases, run.measured) == ("", "4 of 7 gates passed", 3, 0)


def test_a_store_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(EvidenceError, match="hint: set FLASHMOE_STORE"):
        Store(f"sqlite:///{tmp_path / 'file' / 'runs.sqlite'}").save(build_record())


def test_a_store_that_is_no_database_says_so(tmp_path):
    (tmp_path / "runs.sqlite").write_text("not a database, and long enough to be told from an empty file" * 20)
    with pytest.raises(EvidenceError, match=r"runs\.sqlite: file is not a database"):
        Store(f"sqlite:///{tmp_path / 'runs.sqlite'}").runs()


def test_a_wrong_url_says_so():
    with pytest.raises(EvidenceError, match="cannot be used"):
        Store("nosuchdatabase://x")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLASHMOE_STORE": "/data/my.sqlite"}, "sqlite:////data/my.sqlite"),
        ({"FLASHMOE_STORE": "postgresql://host/runs"}, "postgresql://host/runs"),
        ({"XDG_DATA_HOME": "/data"}, "sqlite:////data/flashmoe/runs.sqlite"),
        ({"XDG_DATA_HOME": "relative"}, "sqlite:////home/me/.local/share/flashmoe/runs.sqlite"),
        ({}, "sqlite:////home/me/.local/share/flashmoe/runs.sqlite"),
    ],
)
def test_where_the_default_store_is(monkeypatch, variables, expected):
    for name in ("FLASHMOE_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_url() == expected


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository" / "evidence").mkdir(parents=True)
    return tmp_path / "repository"


def test_the_archive_shows_the_evidence_of_the_repository_too(store, repository):
    store.save(build_record(day=0))
    record = build_record(day=1)
    write_record(record, repository / "evidence" / f"{record.id}.json")
    archive = Archive(store, repository)
    assert [(run.id, run.origin) for run in archive.runs()] == [
        (SECOND, f"evidence/{SECOND}.json"),
        (FIRST, "store"),
    ]
    assert archive.load("20260102") == record
    assert [run.id for run in archive.runs(subject="other")] == []


def test_a_run_in_both_places_is_listed_once_and_read_from_the_file(store, repository):
    record = build_record()
    store.save(record.model_copy(update={"complete": False}))
    write_record(record, repository / "evidence" / f"{record.id}.json")
    archive = Archive(store, repository)
    assert [run.origin for run in archive.runs()] == [f"evidence/{record.id}.json"]
    assert archive.load(record.id[:10]).complete


def test_a_renamed_evidence_file_is_found_by_its_id(store, repository):
    record = build_record()
    write_record(record, repository / "evidence" / "seed-h200.json")
    assert Archive(store, repository).load(record.id[:12]) == record


def test_a_broken_evidence_file_is_named_and_hides_no_other(store, repository):
    write_record(build_record(), repository / "evidence" / "good.json")
    (repository / "evidence" / "broken.json").write_text('{"schema_version": 1, "gates"')
    troubles: list[EvidenceError] = []
    runs = Archive(store, repository).runs(on_trouble=troubles.append)
    assert [run.id for run in runs] == [FIRST]
    assert "broken.json" in str(troubles[0])
    with pytest.raises(EvidenceError, match=r"broken\.json"):
        Archive(store, repository).runs()


def test_documents_that_are_no_records_are_left_out(repository):
    (repository / "evidence" / "gpu-tests.json").write_text('{"passed": 3}')
    assert evidence_files(repository) == {}


def test_the_repository_is_the_nearest_folder_with_claims_or_evidence(repository, tmp_path):
    deep = repository / "src" / "deep"
    deep.mkdir(parents=True)
    assert find_repository(deep) == repository
    assert find_repository(tmp_path) is None


def test_a_record_survives_the_round_trip_through_two_stores(tmp_path):
    first, second = (Store(f"sqlite:///{Path(tmp_path) / name}") for name in ("a.sqlite", "b.sqlite"))
    first.save(build_record())
    second.save(first.load(FIRST))
    assert second.load(FIRST) == build_record()


def test_an_error_that_is_no_number_is_kept_as_valid_json(store, tmp_path):
    record = build_record(gpu=None)
    accuracy = Accuracy(max_error=math.inf, budget=1e-3, low_precision_error=5e-4)
    arm = record.cases[0].arms[0].model_copy(update={"accuracy": accuracy})
    record = record.model_copy(update={"cases": [record.cases[0].model_copy(update={"arms": [arm]})]})
    store.save(record)
    write_record(record, tmp_path / "record.json")
    for loaded in (store.load(record.id), store.load(str(tmp_path / "record.json"))):
        assert loaded.cases[0].arms[0].accuracy == accuracy
    json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)


def test_a_file_of_evidence_is_read_for_its_id_once_until_it_changes(store, tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    (repository / "evidence").mkdir(parents=True)
    first, second = build_record(), build_record(day=1)
    path = repository / "evidence" / "copy.json"
    write_record(first, path)
    read: list[str] = []
    real = store_module._run_id

    def run_id(path):
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(store_module, "_run_id", run_id)
    archive = Archive(store, repository)
    for _ in range(3):
        assert archive.load(first.id) == first
    assert read == ["copy.json"]
    write_record(second.model_copy(update={"command": "flashmoe prove anew"}), path)
    assert (archive.has(first.id), archive.has(second.id)) == (False, True)
    assert read == ["copy.json"] * 2
