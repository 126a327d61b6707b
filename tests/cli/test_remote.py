"""Tests of ``prove --host``: what is printed and returned. The connection itself is tested in tests/proof."""

from __future__ import annotations

import json
import subprocess
from xml.etree import ElementTree as ET

import pytest

from flashmoe_science.errors import EvidenceError, MachineLostError, RemoteError
from flashmoe_science.proof.cost.cost import Budget, size_of
from flashmoe_science.proof.records.store import Store
from flashmoe_science.proof.remote import HostResult

from ..proof.builders import L4, build_record
from .conftest import RUN_ID

LOST = MachineLostError("b: the run ended early in gate bench: cut", hint="flashmoe prove --host b --resume X")


@pytest.fixture
def budgets() -> dict[str, Budget | None]:
    """Return what each machine was held to."""
    return {}


@pytest.fixture
def on_hosts(run, repository, monkeypatch, budgets):
    """Run ``flashmoe prove --host`` with machines that answer with these records and errors."""
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)

    def on_hosts(answers, *args, interrupt=False, reached=False):
        def prove_on(hosts, request, tree, *, progress, save, begin):
            results = []
            for host, (record, error) in zip(hosts, answers.values(), strict=True):
                if record is not None:
                    budgets[host.name] = begin(host.name, record, size_of(record))
                    progress[host.name].start("bench")
                    progress[host.name].finish(record.gates[-1])
                    save(host.name, record)
                results.append(HostResult(host, record, error, seconds=90.0, reached=reached))
            if interrupt:
                raise KeyboardInterrupt
            return results

        monkeypatch.setattr("flashmoe_science.cli.remote.prove_on", prove_on)
        return run("prove", *(word for name in answers for word in ("--host", name)), *args)

    return on_hosts


def test_one_machine_looks_like_this_one(on_hosts, repository):
    record = build_record(speedups=[2.3, 3.0], day=1)
    code, out, _ = on_hosts({"me@gpu": (record, None)})
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "proving flash_attention on suite seed (13 cases), against sdpa"
    assert lines[1].startswith("me@gpu: cost: about $")
    assert lines[2].startswith("bench    passed")
    assert lines[3].startswith("set-up: $")
    assert lines[-4].startswith("demonstrated  ")
    assert "; estimated $" in lines[-2]
    assert lines[-1] == f"record: evidence/{record.id}.json.gz"
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()


def set_ups() -> list[tuple[str, str, float]]:
    return [(row.run, row.gpu, row.gpu_seconds) for row in Store().costs() if row.gate == "set-up"]


def paid(record, *seconds):
    gates = [
        gate.model_copy(update={"gpu_seconds": held}) for gate, held in zip(record.gates[-4:], seconds, strict=True)
    ]
    return record.model_copy(update={"gates": [*record.gates[:-4], *gates]})


def test_all_the_time_that_a_machine_was_held_is_booked(on_hosts, run):
    record = paid(build_record(speedups=[2.3, 3.0], day=1), 4, 3, 2, 21)
    out = on_hosts({"me@gpu": (record, None)})[1]
    assert set_ups() == [(record.id, "NVIDIA H200", 60.0)]  # of 90 s, less the 30 of its gates
    assert "set-up: $" in out
    assert sum(entry.gpu_seconds for entry in Store().costs()) == 90.0
    assert any(line.split()[:3] == ["set-up", "60", "s"] for line in run("cost")[1].splitlines())


def test_a_machine_that_was_lost_before_its_first_gate_is_booked_too(on_hosts):
    on_hosts({"b": (None, LOST)}, reached=True)
    ((run_id, gpu, seconds),) = set_ups()
    assert (run_id.startswith("set-up-"), gpu, seconds) == (True, "", 90.0)  # which GPU it has was never heard


def test_several_machines_make_one_table(on_hosts):
    first = build_record(speedups=[2.0, 3.0], day=1)
    second = build_record(speedups=[1.5, 4.0], gpu=L4, baseline_seconds=200e-6, day=2)
    code, out, _ = on_hosts({"a": (first, None), "b": (second, None)})
    table = [line.split("  ") for line in out.splitlines() if line.startswith(("case ", "case0", "case1"))]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert code == 0
    assert cells[0] == [
        "case",
        "a: NVIDIA H200, graph, speedup over sdpa",
        "b: NVIDIA L4, graph, speedup over sdpa",
    ]
    assert [line[0] for line in cells[1:]] == ["case0", "case1"]
    assert [cell.partition("x")[0] for cell in cells[1][1:]] == ["10.00 us, 2.00", "133.5 us, 1.50"]
    assert [cell.partition("x")[0] for cell in cells[2][1:]] == ["6.670 us, 3.01", "50.04 us, 3.99"]
    assert [line for line in out.splitlines() if "bench    passed" in line][1].startswith("b: bench    passed ")
    for name, gpu, record in (("a", "NVIDIA H200", first), ("b", "NVIDIA L4", second)):
        assert f"\n{name}:\ndemonstrated  On {gpu}, flash_attention is at least as fast as sdpa" in out
        assert f"record: evidence/{record.id}.json.gz\n" in out


def test_a_lost_machine_is_inconclusive_and_says_how_to_go_on(on_hosts, repository):
    record = build_record(complete=False, day=1)
    code, _, err = on_hosts({"b": (record, LOST)})
    assert code == 4
    assert err.endswith("error: b: the run ended early in gate bench: cut\nhint: flashmoe prove --host b --resume X\n")
    assert (repository / "evidence" / f"{record.id}.json.gz").exists()


def test_one_of_several_that_is_lost_costs_the_others_nothing(on_hosts):
    record = build_record(speedups=[2.0, 3.0], day=1)
    away = RemoteError("c cannot be reached: no", hint="look")
    code, out, err = on_hosts({"a": (record, None), "b": (None, LOST), "c": (None, away)}, "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert [run["exit_code"] for run in document["runs"]] == [0, 4, 2]
    assert [run["path"] for run in document["runs"]] == [f"evidence/{record.id}.json.gz", None, None]
    assert document["runs"][0]["record"]["id"] == record.id
    assert "warning: c cannot be reached: no\nhint: look\n" in err


def test_every_machine_is_in_the_junit_file(on_hosts, repository):
    first, second = (build_record(speedups=[2.0, 3.0], day=day) for day in (1, 2))
    code, _, _ = on_hosts({"a": (first, None), "b": (second, LOST), "c": (None, LOST)}, "--junit", "out.xml")
    assert code == 4
    root = ET.parse(repository / "out.xml").getroot()
    runs = [value.get("value") for value in root.iter("property") if value.get("name") == "run"]
    assert runs == [first.id, second.id]
    machines = root.find("testsuite[@name='flashmoe.machines']")
    assert machines is not None
    assert [(case.get("name"), case[0].tag, case[0].get("message")) for case in machines] == [
        (name, "error", "b: the run ended early in gate bench: cut") for name in "bc"
    ]
    assert (root.get("errors"), root.get("failures")) == ("2", "0")
    assert int(root.get("tests", "")) == len(list(root.iter("testcase"))) > len(first.gates) * 2


def test_a_machine_that_cannot_be_reached_is_an_error(on_hosts):
    code, _, err = on_hosts({"a": (None, RemoteError("a cannot be reached: no", hint="look"))})
    assert code == 2
    assert err.endswith("error: a cannot be reached: no\nhint: look\n")


def test_ctrl_c_says_where_every_record_is(on_hosts):
    records = [build_record(complete=False, day=day) for day in (1, 2)]
    code, _, err = on_hosts({"a": (records[0], None), "b": (records[1], None)}, interrupt=True)
    assert code == 130
    for record in records:
        assert f"what was finished is in evidence/{record.id}.json.gz\n" in err


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--host", "a", "--host", "a"], "host must be given once, got a twice"),
        (["--host", "-oProxyCommand=x"], "host must be user@machine or a name from ~/.ssh/config"),
        (["--python", "python3"], "--python is for a borrowed machine, and --host names none"),
        (["forward_triton", "flash_attention", "--host", "a"], "--host takes one subject, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused(run, repository, args, error):
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    code, _, err = run("prove", *args)
    assert code == 2
    assert error in err


def test_several_machines_share_one_budget(on_hosts, budgets):
    records = {name: (build_record(speedups=[2.0, 3.0], day=day), None) for day, name in enumerate("ab", 1)}
    assert on_hosts(records, "--budget", "3")[0] == 0
    assert {name: budget.dollars for name, budget in budgets.items() if budget} == {"a": 1.5, "b": 1.5}


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

    def prove_on(hosts, request, tree, *, progress, save, begin):
        try:
            save(hosts[0].name, record)
        except EvidenceError as error:
            return [HostResult(hosts[0], record, error, seconds=90.0)]
        return [HostResult(hosts[0], record, None, seconds=90.0)]

    monkeypatch.setattr("flashmoe_science.cli.remote.prove_on", prove_on)
    code, _, err = run("prove", "--host", "a")
    assert code == 2
    assert f"error: there is a run {RUN_ID} already, and no other one replaces it" in err
    assert path.exists() == (where != "store")
    assert len(list(path.parent.glob("*.json.gz"))) == (where != "store")
    assert run("show", RUN_ID)[1] == before
