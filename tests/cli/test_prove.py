"""Tests of the verb prove. The chain itself is tested in tests/proof; here a made-up run stands in for it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree as ET

import pytest

from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import SourceFile, SubjectInfo
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_gates, build_record
from ..proof.claim_builders import suite_toml
from .conftest import SENTENCE


@pytest.fixture
def requests():
    """Return what the chain was asked to prove."""
    return []


@pytest.fixture
def prove_with(run, monkeypatch, requests):
    """Run ``flashmoe prove`` with a chain that gives back ``record``."""

    def prove_with(record, *args, interrupt=False, chain=None):
        def whole(request, *, progress, save):
            requests.append(request)
            for gate in record.gates:
                progress.start(gate.name)
                progress.advance(1, 2, "half")
                progress.finish(gate)
            save(record)
            if interrupt:
                raise KeyboardInterrupt
            return record

        monkeypatch.setattr("flashmoe_science.proof.gates.prove", chain or whole)
        return run("prove", *args)

    return prove_with


def test_prove_prints_gates_table_verdict_and_where_the_record_is(prove_with, repository):
    record = build_record(speedups=[2.3, 3.0], day=1)
    code, out, err = prove_with(record)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "proving flash_attention on suite seed (13 cases), against sdpa"
    assert [line.split()[0] for line in lines[1:8]] == [gate.name for gate in record.gates]
    assert "case and arm" in out
    assert lines[-3].startswith(
        "demonstrated  On NVIDIA H200, flash_attention is at least as fast as sdpa in a CUDA graph"
    )
    assert lines[-1] == f"record: evidence/{record.id}.json.gz"
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()
    assert Store().load(record.id) == record


def test_prove_is_judged_by_the_claims_of_the_repository(prove_with):
    code, out, _ = prove_with(build_record(speedups=[1.2, 3.0], suite="made_up", day=1))
    assert code == 1
    assert f"refuted       {SENTENCE} (seed-graph) | lowest of 2 cases 1.20x" in out


def test_prove_passes_on_what_was_asked(prove_with, requests):
    prove_with(
        build_record(),
        *("--suite", "standard", "-b", "sdpa,sdpa-flash", "-b", "sdpa-cudnn", "--gpu", "L4", "--until", "quick"),
        *("--expect", "1.7", "--time", "wall", "--processes", "2", "--rounds", "7", "--seed", "5"),
    )
    request = requests[0]
    assert request.suite.name == "standard"
    assert list(request.baselines) == ["sdpa", "sdpa-flash", "sdpa-cudnn"]
    assert (list(request.gpus), request.until, request.expect) == (["L4"], "quick", 1.7)
    settings = request.settings
    assert (settings.times, settings.processes, settings.rounds, settings.seed) == (["wall"], 2, 7, 5)
    assert request.command.startswith("flashmoe prove --suite standard -b sdpa,sdpa-flash")


def test_the_command_in_the_record_names_no_folder_of_this_machine(prove_with, requests, repository, tmp_path):
    (tmp_path / "away.toml").write_text(suite_toml("away", "case0"))
    (repository / "mine").mkdir()
    (repository / "mine" / "kernel.toml").write_text(
        '[subject]\nname = "mine"\noperator = "tests.proof.fake_operator"\nentry_point = "m:f"\nsources = ["m.py"]\n'
    )
    kernel, csv = repository / "mine" / "kernel.toml", tmp_path / "a.csv"
    prove_with(build_record(), str(kernel), "--suite", str(tmp_path / "away.toml"), f"--csv={csv}")
    assert requests[0].command == "flashmoe prove mine/kernel.toml --suite away.toml --csv=a.csv"
    prove_with(build_record(), "mine/kernel.toml", "--suite", "../away.toml")
    assert requests[1].command == "flashmoe prove mine/kernel.toml --suite ../away.toml"


def test_the_command_in_the_record_names_no_store(prove_with, requests, tmp_path):
    record = build_record(day=1)
    name = str(tmp_path / "mine")
    prove_with(record, "--seed", "1", "--store", name, "--rounds", "7")
    prove_with(record, f"--store={name}", "--seed", "2")
    assert [request.command for request in requests] == [
        "flashmoe prove --seed 1 --rounds 7",
        "flashmoe prove --seed 2",
    ]
    assert Store(name).load(record.id) == record
    assert Store().runs() == []


def test_prove_with_no_gpu_ends_with_the_verdicts_of_verify(prove_with):
    code, out, _ = prove_with(build_record(gpu=None, day=1))
    assert code == 0
    lines = out.splitlines()
    assert "not timed     sources, build, import, correct passed; launch, quick, bench not possible here" in out
    assert lines[-7] == "The claims of this repository about flash_attention, by the evidence that it carries:"
    assert lines[-5].startswith(f"demonstrated  {SENTENCE}")
    assert lines[-3] == "1 claim: 1 demonstrated"


def test_prove_writes_gates_and_claims_as_junit(prove_with, repository):
    record = build_record(speedups=[1.2, 3.0], suite="made_up", day=1)
    assert prove_with(record, "--junit", "out/junit.xml")[0] == 1
    root = ET.parse(repository / "out" / "junit.xml").getroot()
    assert (root.get("tests"), root.get("failures")) == ("8", "1")
    assert prove_with(build_record(gates=build_gates("launch"), times=(), day=2), "--junit", "junit.xml")[0] == 3
    failed = ET.parse(repository / "junit.xml").getroot().find(".//testcase[@name='launch']/failure")
    assert failed is not None


def test_prove_returns_3_for_a_failed_gate_and_says_it_last(prove_with):
    code, out, _ = prove_with(build_record(gates=build_gates("launch"), times=(), day=1))
    assert code == 3
    assert out.splitlines()[-3] == "gate failed   launch: made up: failed"


def test_prove_as_json_has_the_log_on_stderr(prove_with):
    record = build_record(suite="made_up", speedups=[2.3, 3.0], day=1)
    code, out, err = prove_with(record, "--json", "--csv", "times.csv")
    document = json.loads(out)
    assert document["exit_code"] == code == 0
    assert document["record"]["id"] == record.id
    assert document["path"] == f"evidence/{record.id}.json.gz"
    assert document["verdicts"][0]["claim"]["id"] == "seed-graph"
    assert "launch   passed" in err
    assert Path("times.csv").read_text().count("\n") == 1 + 2 * 3 * 3


def test_prove_that_is_interrupted_says_where_the_finished_cases_are(prove_with):
    record = build_record(complete=False, day=1)
    code, out, err = prove_with(record, interrupt=True)
    assert code == 130
    hint = f"hint: flashmoe prove --resume {record.id} goes on from here"
    assert err == f"what was finished is in evidence/{record.id}.json.gz\n{hint}\nerror: interrupted\n"
    assert "Traceback" not in out


@pytest.mark.parametrize(("gates", "begun"), [(["correct"], 0), (["correct", "quick", "bench"], 1)])
def test_a_run_is_entered_into_the_ledger_before_its_first_sample(prove_with, repository, gates, begun):
    record = build_record(speedups=[2.3, 3.0], suite="made_up", day=1)
    seen = []

    def chain(request, *, progress, save):
        for gate in gates:
            seen.append(len(Store().begun()))
            progress.start(gate)
            save(record)
        return record

    prove_with(record, chain=chain)
    assert seen == [0, 0, 1][: len(gates)]
    assert [(run.run, list(run.factors)) for _, run in Store().begun()] == [(record.id, [2.0])] * begun
    kept = read_record(repository / "evidence" / f"{record.id}.json.gz")
    assert (kept.begun.count if kept.begun else 0) == begun


def test_prove_goes_on_when_the_store_cannot_be_written(prove_with, repository, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", str(repository / "README.md" / "runs"))
    record = build_record(speedups=[2.3], day=1)
    code, _, err = prove_with(record)
    assert code == 0
    assert err.startswith("warning: run store")
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()


def test_a_run_whose_file_cannot_be_written_ends(prove_with, repository, monkeypatch):
    record = build_record(speedups=[2.3], day=1)

    def chain(request, *, progress, save):
        save(record)
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr("flashmoe_science.cli.run_shared.write_record", Mock(side_effect=full))
        save(record)
        pytest.fail("it went on")

    code, _, err = prove_with(record, chain=chain)
    assert code == 2
    assert "cannot be written: No space left on device" in err
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()  # the last that was kept


def test_a_time_limit_reaches_the_subject(prove_with, requests):
    prove_with(build_record(day=1), "--time-limit", "7")
    assert (requests[0].subject.limits.launch_s, requests[0].time_limit) == (7.0, 7.0)


def test_a_resumed_run_whose_suite_is_not_here_says_how_to_name_it(run):
    record = build_record(suite="away", complete=False, day=1)
    Store().save(record)
    code, _, err = run("prove", "--resume", record.id)
    assert code == 2
    assert f"the file of suite away, which run {record.id} is of, is not known here" in err
    assert f"hint: name its file: flashmoe prove --resume {record.id} --suite FILE" in err


def test_prove_outside_of_a_repository_writes_to_the_current_folder(prove_with, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    record = build_record(speedups=[2.3])
    assert prove_with(record)[0] == 0
    assert (tmp_path / "evidence" / f"{record.id}.json.gz").exists()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["flash_atention"], "did you mean flash_attention, "),
        (["--suite", "sede"], "did you mean seed?"),
        (["--baseline", "sdap"], "did you mean sdpa?"),
        (["--until", "corect"], "did you mean correct?"),
        (["--gpu", "H20"], "no other is known"),
        (["missing.toml"], "missing.toml: cannot be read: No such file or directory"),
        (["--csv", "no/such/folder.csv"], "no/such/folder.csv: cannot be written: "),  # before anything runs
        (["--junit", "."], ".: cannot be written: . is a folder"),
    ],
)
def test_prove_suggests_the_nearest_name(run, args, error):
    code, out, err = run("prove", *args)
    assert (code, out) == (2, "")
    assert error in err


# Going on with an interrupted run.


@pytest.fixture
def interrupted(repository):
    """Return an interrupted run that lies in the evidence of the repository."""
    record = build_record(suite="seed", baselines={"sdpa-flash": 1.0}, processes=4, rounds=8, complete=False, day=1)
    (repository / "evidence" / f"{record.id}.json.gz").write_text(record.model_dump_json())
    return record


def test_resume_takes_from_the_run_what_is_not_given(prove_with, requests, interrupted):
    prove_with(build_record(day=2), "--resume", interrupted.id[:16])
    request = requests[0]
    assert request.resume == interrupted
    assert (request.subject.name, request.suite.name, request.baselines) == ("flash_attention", "seed", ["sdpa-flash"])
    assert request.settings == interrupted.settings
    assert request.command == f"flashmoe prove --resume {interrupted.id[:16]}"


def test_resume_finds_the_files_of_a_users_own_subject_and_suite(prove_with, requests, interrupted, repository):
    folder = repository / "mine"
    folder.mkdir()
    (folder / "kernel.toml").write_text(
        '[subject]\nname = "mine"\noperator = "tests.proof.fake_operator"\nentry_point = "m:f"\nsources = ["m.py"]\n'
    )
    (repository / "suites" / "own.toml").write_text(
        'name = "own"\noperator = "tests.proof.fake_operator"\ndescription = "One."\n[[cases]]\norigin = "here"\n'
        "batch = 1\nheads = 1\nseqlen_q = 8\nhead_dim = 8\n"
    )
    sources = [SourceFile(path="kernel.toml", sha256="0"), SourceFile(path="m.py", sha256="1")]
    subject = SubjectInfo(name="mine", operator="o", entry_point="m:f", sources=sources, folder="mine")
    record = interrupted.model_copy(update={"subject": subject, "suite": "own", "baselines": ["sdpa"]})
    (repository / "evidence" / f"{record.id}.json.gz").write_text(record.model_dump_json())
    prove_with(build_record(day=2), "--resume", record.id)
    assert (requests[0].subject.name, requests[0].suite.name) == ("mine", "own")
