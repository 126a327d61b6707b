"""Tests of ``prove --host``: what is printed and returned. The connection itself is tested in tests/proof."""

from __future__ import annotations

import subprocess
from xml.etree import ElementTree as ET

import pytest

from flashmoe_science.errors import EvidenceError, MachineLostError, RemoteError
from flashmoe_science.proof.cost.cost import Budget, size_of
from flashmoe_science.proof.remote import HostResult

from ..proof.builders import build_record
from .conftest import RUN_ID

LOST = MachineLostError("b: the run ended early in gate bench: cut", hint="flashmoe prove --host b --resume X")


BUDGETS: list[Budget | None] = []  # that runs there were held to


@pytest.fixture
def on_host(run, repository, monkeypatch):
    """Run ``flashmoe prove --host`` with a machine that answers with this record and error."""
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)

    def on_host(record, error, *args, interrupt=False):
        def prove_on(host, request, tree, *, progress, save, begin):
            if record is not None:
                BUDGETS.append(begin(record, size_of(record)))
                progress.start("bench")
                progress.finish(record.gates[-1])
                save(record)
            if interrupt:
                raise KeyboardInterrupt
            return HostResult(host, record, error)

        monkeypatch.setattr("flashmoe_science.cli.remote.prove_on", prove_on)
        return run("prove", "--host", "me@gpu", *args)

    return on_host


def test_a_borrowed_machine_looks_like_this_one(on_host, repository):
    record = build_record(speedups=[2.3, 3.0], day=1)
    code, out, _ = on_host(record, None)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "proving flash_attention on suite seed (13 cases), against sdpa"
    assert lines[1].startswith("cost: about $")
    assert lines[2].startswith("bench    passed")
    assert lines[-4].startswith("demonstrated  ")
    assert "; estimated $" in lines[-2]
    assert lines[-1] == f"record: evidence/{record.id}.json.gz"
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()


def paid(record, *seconds):
    gates = [
        gate.model_copy(update={"gpu_seconds": held}) for gate, held in zip(record.gates[-4:], seconds, strict=True)
    ]
    return record.model_copy(update={"gates": [*record.gates[:-4], *gates]})


def test_a_lost_machine_is_inconclusive_and_says_how_to_go_on(on_host, repository):
    record = build_record(complete=False, day=1)
    code, _, err = on_host(record, LOST)
    assert code == 4
    assert err.endswith("error: b: the run ended early in gate bench: cut\nhint: flashmoe prove --host b --resume X\n")
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()


def test_a_lost_machine_is_in_the_junit_file(on_host, repository):
    record = build_record(speedups=[2.0, 3.0], day=1)
    assert on_host(record, LOST, "--junit", "out.xml")[0] == 4
    root = ET.parse(repository / "out.xml").getroot()
    runs = [value.get("value") for value in root.iter("property") if value.get("name") == "run"]
    assert runs == [record.id]
    machines = root.find("testsuite[@name='flashmoe.machines']")
    assert machines is not None
    assert [(case.get("name"), case[0].tag, case[0].get("message")) for case in machines] == [
        ("me@gpu", "error", "b: the run ended early in gate bench: cut")
    ]
    assert (root.get("errors"), root.get("failures")) == ("1", "0")


def test_a_machine_that_cannot_be_reached_is_an_error(on_host):
    code, _, err = on_host(None, RemoteError("a cannot be reached: no", hint="look"))
    assert code == 2
    assert err.endswith("error: a cannot be reached: no\nhint: look\n")


def test_ctrl_c_says_where_the_record_is(on_host):
    record = build_record(complete=False, day=1)
    code, _, err = on_host(record, None, interrupt=True)
    assert code == 130
    assert f"what was finished is in evidence/{record.id}.json.gz\n" in err


def test_a_budget_holds_there_too(on_host):
    assert on_host(build_record(speedups=[2.0, 3.0], day=1), None, "--budget", "3")[0] == 0
    budget = BUDGETS[-1]
    assert budget is not None
    assert budget.dollars == 3


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--host", "-oProxyCommand=x"], "host must be user@machine or a name from ~/.ssh/config"),
        (["--python", "python3"], "--python is for a borrowed machine, and --host names none"),
    ],
)
def test_what_makes_no_sense_is_refused(run, repository, args, error):
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    code, _, err = run("prove", *args)
    assert code == 2
    assert error in err


@pytest.mark.parametrize("where", ["evidence", "evidence under another name", "store"])
def test_a_machine_whose_run_has_the_id_of_another_one_replaces_nothing(run, repository, monkeypatch, where):
    """Its first record has an id that it chose: nothing else says which run it is of."""
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    path = repository / "evidence" / f"{RUN_ID}.json.gz"
    record = build_record(speedups=[9.0, 9.0], suite="made_up")
    assert record.id == RUN_ID
    if where == "evidence under another name":
        path = path.rename(path.with_name("h200.json.gz"))
    if where == "store":
        assert run("import", str(path))[0] == 0
        path.unlink()
    before = run("show", RUN_ID)[1]

    def prove_on(host, request, tree, *, progress, save, begin):
        try:
            save(record)
        except EvidenceError as error:
            return HostResult(host, record, error)
        return HostResult(host, record, None)

    monkeypatch.setattr("flashmoe_science.cli.remote.prove_on", prove_on)
    code, _, err = run("prove", "--host", "a")
    assert code == 2
    assert f"error: there is a run {RUN_ID} already, and no other one replaces it" in err
    assert path.exists() == (where != "store")
    assert len(list(path.parent.glob("*.json.gz"))) == (where != "store")
    assert run("show", RUN_ID)[1] == before
