"""The rates that stand in a record are worked out anew when it is read: a file that says otherwise is an error."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.records.documents import parse_record, read_record, record_text
from flashmoe_science.proof.records.store import Store

from .builders import build_record


def altered(change):
    """Return the text of a record after ``change`` had its first case's first baseline."""
    document = json.loads(record_text(build_record(speedups=[2.0])))
    change(document["cases"][0], document["cases"][0]["arms"][0])
    return json.dumps(document)


def test_a_record_is_read_as_it_was_written():
    record = build_record(speedups=[2.0, 3.0])
    assert parse_record(record_text(record), "a record") == record


@pytest.mark.parametrize("kind", ["kernel", "graph", "wall"])
@pytest.mark.parametrize("name", ["seconds", "tokens_per_second", "tflops", "tbytes_per_second"])
def test_a_rate_that_its_samples_do_not_show_is_an_error(kind, name):
    def change(_, arm):
        arm["rates"][kind][name] *= 1.001

    message = rf"a\.json: case case0, arm sdpa, {kind} time: it says [\d.e+-]+ {name}, and its samples show [\d.e+-]+"
    with pytest.raises(EvidenceError, match=message):
        parse_record(altered(change), "a.json")


def test_samples_that_were_changed_are_found_by_the_rates():
    def change(case, arm):
        for rounds in case["rounds"]:
            rounds["seconds"] = {
                k: {**v, arm["name"]: [s * 2 for s in v[arm["name"]]]} for k, v in rounds["seconds"].items()
            }

    with pytest.raises(EvidenceError, match="and its samples show"):
        parse_record(altered(change), "a.json")


def test_work_that_was_changed_is_found_by_the_rates():
    def change(case, _):
        case["work"]["flops"] *= 10

    with pytest.raises(EvidenceError, match="tflops, and its samples show"):
        parse_record(altered(change), "a.json")


def test_rates_without_a_sample_are_an_error():
    def change(case, _):
        case["rounds"] = [
            {**r, "seconds": {k: v for k, v in r["seconds"].items() if k != "wall"}} for r in case["rounds"]
        ]

    with pytest.raises(EvidenceError, match=r"arm sdpa, wall time: it says [\d.e-]+ s, and has no samples of it"):
        parse_record(altered(change), "a.json")


def test_a_record_whose_arms_have_no_rates_is_read():
    def change(case, _):
        for arm in case["arms"]:
            arm["rates"] = {}

    assert parse_record(altered(change), "a.json").cases[0].arms[0].rates == {}


def test_a_file_and_a_store_are_read_so_too(tmp_path):
    def change(_, arm):
        arm["rates"]["graph"]["tflops"] *= 1000

    text = altered(change)
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(EvidenceError, match=r"a\.json: case case0"):
        read_record(path)
    record = build_record(speedups=[2.0])
    store = Store(str(tmp_path / "runs"))
    wrong = record.cases[0].arms[0].rates["graph"].model_copy(update={"tflops": 4e4})
    arm = record.cases[0].arms[0].model_copy(update={"rates": {"graph": wrong}})
    case = record.cases[0].model_copy(update={"arms": [arm, *record.cases[0].arms[1:]]})
    store.save(record.model_copy(update={"cases": [case]}))
    with pytest.raises(EvidenceError, match="it says 40000 tflops"):
        store.load(record.id)
