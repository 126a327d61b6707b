"""Tests of where runs are kept and found again, and of the files that they are kept in."""

from __future__ import annotations

import fcntl
import gzip
import json
import math
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.records.documents import parse_record, read_record, record_path, record_text, write_record
from flashmoe_science.proof.records.evidence import Accuracy, Launch
from flashmoe_science.proof.records.ledger import Entry
from flashmoe_science.proof.records.store import (
    Archive,
    Store,
    default_folder,
    evidence_files,
    find_repository,
    summarize,
)

from .builders import build_gates, build_record
from .processes import python_path

ROOT = Path(__file__).parents[2]
FIRST = "20260101T000000Z-seed-flash_attention-000000"
SECOND = "20260102T000000Z-seed-flash_attention-000000"


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "deep" / "runs")


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository" / "evidence").mkdir(parents=True)
    return tmp_path / "repository"


# one file


def build_launch(name):
    return Launch(name=name, grid=(3, 2, 1), block=(128, 1, 1), registers=64, shared_memory_bytes=1024)


def with_launches(record):
    """Give every arm two launches, of which all arms share one."""

    def arm_with(arm):
        return arm.model_copy(update={"launches": [build_launch("shared"), build_launch(f"of_{arm.name}")]})

    cases = [case.model_copy(update={"arms": [arm_with(arm) for arm in case.arms]}) for case in record.cases]
    return record.model_copy(update={"cases": cases})


def test_a_launch_is_written_once_and_read_back_everywhere():
    record = with_launches(build_record(speedups=[2.0, 3.0]))
    document = json.loads(record_text(record))
    names = [launch["name"] for launch in document["launches"]]
    assert sorted(names) == sorted(["shared", *(f"of_{arm.name}" for arm in record.cases[0].arms)])
    assert {type(index) for case in document["cases"] for arm in case["arms"] for index in arm["launches"]} == {int}
    assert parse_record(record_text(record), "a record") == record


def test_a_record_of_schema_1_is_read_as_if_it_were_written_now():
    record = with_launches(build_record(speedups=[2.0]))
    document = json.loads(record.model_dump_json()) | {"schema_version": 1}
    assert parse_record(json.dumps(document, indent=1), "an old record") == record


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d.update(launches=d["launches"][:1]), "case case0: launch 1 of 1 does not exist"),
        (lambda d: d["cases"][0]["arms"][0]["launches"].append(-1), "case case0: launch -1 of "),
        (lambda d: d["launches"][1].pop("grid"), "launches.1.grid: Field required"),
        (lambda d: d["cases"][0]["arms"][0].update(launches=0), "key cases.0.arms.0.launches: "),
    ],
    ids=["cut off", "negative", "half a launch", "no list"],
)
def test_a_launch_that_is_wrong_or_missing_is_an_error(change, error):
    document = json.loads(record_text(with_launches(build_record(speedups=[2.0]))))
    change(document)
    with pytest.raises(EvidenceError) as raised:
        parse_record(json.dumps(document), "a record")
    assert error in str(raised.value)


def test_equal_records_give_equal_files_however_they_are_named(tmp_path):
    record = build_record(speedups=[2.0])
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        write_record(record, tmp_path / name)
        assert read_record(tmp_path / name) == record
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "c.json").read_bytes()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b[:40] + b"\0" * 8 + b[48:]], ids=["cut off", "overwritten"]
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "a.json.gz"
    write_record(build_record(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EvidenceError, match=r"a\.json\.gz: cannot be read"):
        read_record(path)


def test_an_error_that_is_no_number_is_kept_as_valid_json(store):
    record = build_record(gpu=None)
    accuracy = Accuracy(max_error=math.inf, budget=1e-3, low_precision_error=5e-4)
    arm = record.cases[0].arms[0].model_copy(update={"accuracy": accuracy})
    record = record.model_copy(update={"cases": [record.cases[0].model_copy(update={"arms": [arm]})]})
    store.save(record)
    assert store.load(record.id).cases[0].arms[0].accuracy == accuracy
    json.loads(record_text(record), parse_constant=pytest.fail)


# the store


def test_saving_again_replaces_the_record(store):
    record = build_record()
    store.save(record.model_copy(update={"complete": False, "cases": record.cases[:1]}))
    store.save(record)
    assert store.load(record.id) == record
    assert [run.cases for run in store.runs()] == [3]


def test_a_unique_prefix_is_enough(store):
    for day in (0, 1):
        store.save(build_record(day=day))
    assert store.load("20260102").id == SECOND
    with pytest.raises(EvidenceError, match=f"'2026' begins 2 ids: {SECOND}, {FIRST}\nhint: give more of the id"):
        store.load("2026")


def test_an_id_that_begins_another_id_is_found(store):
    record = build_record()
    store.save(record)
    store.save(record.model_copy(update={"id": record.id + "1"}))
    assert store.load(record.id).id == record.id


def test_an_unknown_id_suggests_the_nearest(store):
    store.save(build_record())
    with pytest.raises(EvidenceError, match=f"hint: did you mean {FIRST}?"):
        store.load(FIRST.replace("seed", "sede"))


def test_reading_creates_nothing(store, tmp_path):
    assert (store.runs(), store.costs()) == ([], [])
    with pytest.raises(EvidenceError, match="there is no run"):
        store.load("2026")
    assert list(tmp_path.iterdir()) == []


def test_runs_come_newest_first_and_filtered(store):
    store.save(build_record(day=1, suite="standard"))
    store.save(build_record(day=0))
    store.save(build_record(day=2, subject="mine", gpu=None))
    archive = Archive(store, None)
    found = [(run.subject, run.suite) for run in archive.runs()]
    assert found == [("mine", "seed"), ("flash_attention", "standard"), ("flash_attention", "seed")]
    assert [run.suite for run in archive.runs(suite="standard")] == ["standard"]
    assert [run.subject for run in archive.runs(subject="mine")] == ["mine"]
    assert len(archive.runs(gpu="h200")) == 2


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (build_record(gates=build_gates("launch")), ("NVIDIA H200", "launch failed", 3, 3)),
        (build_record(gpu=None), ("", "4 of 7 gates passed", 3, 0)),
        (build_record(speedups=[2.0, 3.0]), ("NVIDIA H200", "7 of 7 gates passed", 2, 2)),
    ],
    ids=["failed", "no GPU", "measured"],
)
def test_a_summary_is_the_same_of_a_record_and_of_its_file(store, record, expected):
    store.save(record)
    (run,) = store.runs()
    assert run == summarize(record)
    assert (run.gpu, run.result, run.cases, run.measured) == expected


def test_a_store_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(EvidenceError, match="hint: set FLASHMOE_STORE"):
        Store(tmp_path / "file" / "runs").save(build_record())


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_url_or_a_file_is_no_store(tmp_path, monkeypatch, how):
    (tmp_path / "runs.sqlite").write_text("a store of an earlier version")
    named = {"postgresql://ada:abcdef@host/db": "the URL postgresql://...", str(tmp_path / "runs.sqlite"): "the file /"}
    for name, said in named.items():
        monkeypatch.setenv("FLASHMOE_STORE", name)
        with pytest.raises(EvidenceError) as raised:
            Store(name if how == "argument" else None).runs()
        assert str(raised.value).startswith(f"the store must be a folder, got {said}")
        assert "abcdef" not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLASHMOE_STORE": "/data/runs"}, "/data/runs"),
        ({"XDG_DATA_HOME": "/data"}, "/data/flashmoe/runs"),
        ({"XDG_DATA_HOME": "relative"}, "/home/me/.local/share/flashmoe/runs"),
        ({}, "/home/me/.local/share/flashmoe/runs"),
    ],
)
def test_where_the_default_store_is(monkeypatch, variables, expected):
    for name in ("FLASHMOE_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(expected)


# the ledger


def study(run="s", **changes) -> Entry:
    return replace(Entry("2026-01-01", run, "study", "mine", "seed", "H200", gpu_seconds=60.0), **changes)


def test_a_line_that_is_no_row_is_named(store):
    store.book(study())
    with (store.folder / "ledger.jsonl").open("a") as file:
        file.write('{"run": 3}\n')
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl:2: is no row of a ledger"):
        store.costs()


def test_processes_that_share_a_store_lose_no_row(store):
    code = (
        "import sys\nfrom flashmoe_science.proof.records.ledger import Entry\n"
        "from flashmoe_science.proof.records.store import Store\n"
        "for n in range(15): Store(sys.argv[1]).book(Entry('2026', f'{sys.argv[2]}-{n}', 'study', '', '', '', 1.0))"
    )
    command = [sys.executable, "-c", code, str(store)]
    environment = {"PYTHONPATH": python_path(ROOT / "src")}
    running = [subprocess.Popen([*command, str(number)], env=environment) for number in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(store.costs()) == 45


def test_a_line_that_another_process_is_writing_is_waited_for(store):
    store.book(study("first"))
    line = json.dumps(asdict(study("second"))) + "\n"
    found = []
    reader = threading.Thread(target=lambda: found.extend(store.costs()))
    with (store.folder / "ledger.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line[:20])
        file.flush()
        reader.start()
        reader.join(0.2)
        file.write(line[20:])
    reader.join()
    assert [entry.run for entry in found] == ["first", "second"]


# the evidence of a repository


def test_the_archive_shows_the_evidence_of_the_repository_too(store, repository):
    store.save(build_record(day=0))
    record = build_record(day=1)
    write_record(record, record_path(repository / "evidence", record.id))
    archive = Archive(store, repository)
    assert [(run.id, run.origin) for run in archive.runs()] == [
        (SECOND, f"evidence/{SECOND}.json.gz"),
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


@pytest.mark.parametrize("name", ["seed-h200.json", "seed-h200.json.gz"])
def test_a_renamed_evidence_file_is_found_by_its_id(store, repository, name):
    record = build_record()
    write_record(record, repository / "evidence" / name)
    archive = Archive(store, repository)
    assert archive.load(record.id[:12]) == record
    assert (archive.has(FIRST), archive.has(SECOND)) == (True, False)


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
