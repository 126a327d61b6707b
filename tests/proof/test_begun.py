"""The ledger of runs begun: every run is counted, and a line that is changed or taken out is found."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.judge.consistency import Consistency
from flashmoe_science.proof.judge.limits import UNKNOWN_RUNS, runs_begun
from flashmoe_science.proof.records.begun import FIRST
from flashmoe_science.proof.records.documents import parse_record, record_text
from flashmoe_science.proof.records.evidence import Resumed
from flashmoe_science.proof.records.store import Store

from .builders import L4, build_record


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_a_line_has_what_the_run_was_to_measure_and_the_hash_of_the_line_before(store):
    record = build_record(speedups=[2.0, 3.0], seed=7)
    first = store.begin(record, [1.5, 2.0])
    second = store.begin(build_record(seed=8))
    (one, begun), (two, after) = store.begun()
    assert (begun.previous, after.previous) == (FIRST, one)
    assert (begun.run, begun.seed, list(begun.cases)) == (record.id, 7, ["case0", "case1"])
    assert (list(begun.factors), begun.processes, begun.rounds) == ([1.5, 2.0], 3, 10)
    assert (first.ledger, first.line, first.count) == (one, one, 1)
    assert (second.ledger, second.line, second.count) == (one, two, 2)


def test_only_runs_of_one_kind_are_counted_and_a_resumed_run_once(store):
    assert store.begin(build_record(seed=1)).count == 1
    assert store.begin(build_record(seed=2, suite="standard")).count == 1
    assert store.begin(build_record(seed=3, gpu=L4)).count == 1
    interrupted = build_record(seed=4)
    assert store.begin(interrupted).count == 2
    resumed = Resumed(run=interrupted.id, created_at=interrupted.created_at)
    again = build_record(seed=4, day=1).model_copy(update={"resumed": [resumed]})
    assert store.begin(again).count == 2
    assert store.begin(build_record(seed=5)).count == 3


@pytest.mark.parametrize(
    "forge",
    [
        lambda lines: [lines[0].replace('"seed": 0', '"seed": 9'), *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0].replace(": ", ":", 1), *lines[1:]],
        lambda lines: ["{}", *lines],
    ],
    ids=["edited", "taken out", "the first taken out", "in another order", "twice", "another blank", "no run"],
)
def test_a_line_that_was_changed_or_taken_out_is_found(store, forge):
    for seed in range(3):
        store.begin(build_record(seed=seed))
    path = store.folder / "begun.jsonl"
    path.write_text("\n".join(forge(path.read_text().splitlines())) + "\n")
    with pytest.raises(EvidenceError, match=r"begun.jsonl:\d: "):
        store.begun()
    before = path.read_bytes()
    with pytest.raises(EvidenceError, match=r"begun.jsonl:\d: "):
        store.begin(build_record(seed=9))
    assert path.read_bytes() == before


def begin_some(folder, first):
    for seed in range(first, first + 10):
        Store(folder).begin(build_record(speedups=[2.0], seed=seed))


def test_processes_that_share_a_store_make_one_chain(store):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=begin_some, args=(store.folder, 10 * number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(store.begun()) == 30


def test_reading_creates_nothing(store):
    assert store.begun() == []
    assert not store.folder.exists()


def begun_records(store, count):
    """Return so many kept runs, which are the last of as many more that were begun."""
    for seed in range(count):
        store.begin(build_record(seed=100 + seed))
    records = [build_record(seed=seed) for seed in range(count)]
    return {r.id: r.model_copy(update={"begun": store.begin(r)}) for r in records}


def test_a_verdict_says_how_many_runs_were_begun_and_kept(store):
    records = begun_records(store, 3)
    first = next(iter(records.values()))
    assert runs_begun(first, records) == "6 runs of its kind were begun, and 3 kept"
    assert runs_begun(first, {first.id: first}) == "4 runs of its kind were begun, and 1 kept"
    assert runs_begun(build_record(), records) == UNKNOWN_RUNS


def test_records_that_are_of_no_ledger_or_another_are_not_counted_as_kept(store, tmp_path):
    records = begun_records(store, 2)
    first = next(iter(records.values()))
    older = build_record(seed=7)
    other = build_record(seed=8)
    other = other.model_copy(update={"begun": Store(tmp_path / "other").begin(other)})
    told = runs_begun(first, {**records, older.id: older})
    assert told == "4 runs of its kind were begun, and 2 kept; of how many runs 1 more is, is not known"
    assert runs_begun(first, {**records, older.id: older, other.id: other}).endswith("2 more are, is not known")


def test_the_line_of_another_run_is_found(store):
    one, other = begun_records(store, 2).values()
    forged = other.model_copy(update={"begun": one.begun})
    checks = {check.name: check.result for check in Consistency(None, {"a": one, "b": forged}).of(forged)}
    assert checks["runs begun"] == "contradiction"
    sound = {check.name: check.result for check in Consistency(None, {"a": one, "b": other}).of(other)}
    assert sound["runs begun"] == "passed"


def check_of(record, store):
    checks = Consistency(None, {"a": record}, store.begun()).of(record)
    return next((check.result, check.detail) for check in checks if check.name == "runs begun")


def test_a_record_is_compared_with_its_line(store):
    record = build_record(speedups=[2.0, 3.0])
    record = record.model_copy(update={"begun": store.begin(record)})
    assert check_of(record, store) == ("passed", "")
    others = record.model_copy(update={"cases": record.cases[:1]})
    said = "cases: ['case0', 'case1'] before its first sample, and ['case0'] now"
    assert check_of(others, store) == ("contradiction", said)
    reseeded = record.model_copy(update={"settings": record.settings.model_copy(update={"seed": 5})})
    assert check_of(reseeded, store) == ("contradiction", "seed: 0 before its first sample, and 5 now")


def test_a_line_at_the_end_that_was_taken_out_is_missed_by_its_record(store):
    store.begin(build_record(seed=1))
    record = build_record()
    record = record.model_copy(update={"begun": store.begin(record)})
    path = store.folder / "begun.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert check_of(record, store) == ("contradiction", "the ledger of runs begun lacks its line: it was taken out")


def test_the_ledger_that_is_here_counts_runs_that_came_later(store):
    record = build_record()
    begun = store.begin(record)
    record = record.model_copy(update={"begun": begun})
    store.begin(build_record(seed=1))
    assert runs_begun(record, {}, store.begun()) == "2 runs of its kind were begun, and 1 kept"
    other = record.model_copy(update={"begun": begun.model_copy(update={"ledger": "f" * 64})})
    assert runs_begun(other, {}, store.begun()) == "1 run of its kind was begun, and 1 kept"


def test_a_record_keeps_its_line_and_one_of_before_the_ledger_has_none(store):
    record = build_record()
    record = record.model_copy(update={"begun": store.begin(record)})
    assert parse_record(record_text(record), "a.json").begun == record.begun
    document = json.loads(record_text(record))
    del document["begun"]
    assert parse_record(json.dumps(document), "a.json").begun is None
