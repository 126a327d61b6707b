"""Tests of ``flashmoe prove`` with several subjects: a record each, a line each at the end, the worst exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flashmoe_science.proof.records.documents import write_record

from ..proof.builders import build_gates, build_record

TOML = '[subject]\nname = "{name}"\noperator = "tests.proof.fake_operator"\nentry_point = "m:f"\nsources = ["m.py"]\n'
ARGS = ("--suite", "fake.toml", "--baseline", "sdpa")


@pytest.fixture
def prove_all(run, repository, monkeypatch):
    """Run ``flashmoe prove`` with a chain that gives each subject the record of its name."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # a subject's folder is put there
    case = 'batch = 1\nheads = 1\nseqlen_q = 4\nhead_dim = 4\norigin = "made up"\n'
    head = 'name = "fake"\noperator = "tests.proof.fake_operator"\ndescription = "Made up."\n'
    (repository / "fake.toml").write_text(f"{head}[[cases]]\n{case}")

    def prove_all(records, *args):
        proved = []

        def chain(request, *, progress, save):
            record = records[request.subject.name]
            proved.append(request.subject.name)
            save(record)
            return record

        for name in records:
            (repository / f"{name}.toml").write_text(TOML.format(name=name))
        monkeypatch.setattr("flashmoe_science.proof.gates.prove", chain)
        return (*run("prove", *(f"{name}.toml" for name in records), *ARGS, *args), proved)

    return prove_all


def records():
    return {
        "slow": build_record(subject="slow", speedups=[0.5], day=1),
        "broken": build_record(subject="broken", gates=build_gates("import"), times=(), day=2),
        "good": build_record(subject="good", speedups=[2.0], day=3),
    }


def test_each_subject_gets_its_record_and_a_line_at_the_end(prove_all, repository):
    code, out, err, proved = prove_all(records())
    assert (code, err, proved) == (3, "", ["slow", "broken", "good"])
    for record in records().values():
        assert (repository / "evidence" / f"{record.id}.json.gz").exists()
        assert f"record: evidence/{record.id}.json.gz" in out
    slow, broken, good = out.splitlines()[-3:]
    assert slow.startswith("slow    refuted       On NVIDIA H200, slow is at least as fast as sdpa")
    assert ": lowest of 1 case 0.50" in slow
    assert broken == "broken  gate failed   import: made up: failed"
    assert good.startswith("good    demonstrated  On NVIDIA H200, good is at least as fast as sdpa")


def test_the_document_of_several_holds_each(prove_all):
    code, out, _, _ = prove_all(records(), "--json", "--csv", "times.csv")
    document = json.loads(out)
    assert document["exit_code"] == code == 3
    assert [run["exit_code"] for run in document["runs"]] == [1, 3, 0]
    assert [run["record"]["subject"]["name"] for run in document["runs"]] == ["slow", "broken", "good"]
    lines = Path("times.csv").read_text().splitlines()
    assert {line.partition("-")[0] for line in lines[1:]} == {
        record.id.partition("-")[0] for record in records().values()
    }


def test_to_go_on_with_a_run_is_asked_for_one_subject(prove_all, repository):
    record = build_record(subject="slow", complete=False)
    write_record(record, repository / "evidence" / f"{record.id}.json.gz")
    code, _, err, proved = prove_all(records(), "--resume", record.id)
    assert (code, proved) == (2, [])
    assert "resume goes on with one run, got 3 subjects" in err
