"""Runs on borrowed machines, over a real SSH server on this machine. In place of the chain there runs a stub, but once.

The stub tells what it was told to, so that these tests are about the connection: what comes when it holds, is stopped,
is cut or falls silent.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from flashmoe_science.errors import EvidenceError, MachineLostError, ProofError, RemoteError
from flashmoe_science.proof.cost.cost import Budget, Estimate, RunSize
from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import Record
from flashmoe_science.proof.remote import Host, prove_on
from flashmoe_science.proof.remote.agent import BUDGET
from flashmoe_science.proof.remote.session import _Session

from ..builders import build_record
from ..processes import is_alive, python_path, wait_for
from ..test_interruption import CODE, ROOT, SUBJECT, SUITE
from .stub import SSH, Lines, StubTree, request, run


def as_sent(what, run_id):
    """Return the record that the stub sends under this id."""
    return request(what).resume.model_copy(update={"id": run_id})


@SSH
def test_what_a_run_tells_comes_here_whatever_else_is_printed(machine, python):
    saved = []
    noisy = python('echo "{\\"event\\": 1" Welcome', 'echo "last login" >&2')
    (result,), lines = run("finish", python=noisy, save=lambda name, record: saved.append((name, record)))
    assert (result.error, result.stopped) == (None, False)
    assert saved == [("gpu", as_sent("finish", saved[0][1].id))]
    assert result.record == saved[0][1]
    assert lines.started == ["correct"]
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": "another"}, "key id: expected 20260101T000000Z-seed-flash_attention-000000, got another"),
        ({"id": "../escaped"}, "key id: String should match pattern"),
        ({"created_at": 1e9, "gates": 1}, "key gates"),
    ],
)
def test_a_record_that_a_run_there_cannot_have_is_not_saved_and_nothing_after_it(changes, why):
    table = build_record(speedups=[2.0], gpu=None).model_dump(mode="json")
    asked = request("stop").model_copy(update={"run": table["id"]})
    session = _Session(Host("gpu"), queue.Queue(), asked, {}, b"", 1.0)
    found = [session.take(json.dumps(record)) for record in (table, table, table | changes, table)]
    session.settle()
    assert [record and record.id for record in found] == [table["id"], table["id"], None, None]
    result = session.result
    assert isinstance(result.error, RemoteError)
    assert f"a record from gpu: {why}" in str(result.error)
    assert result.record is not None
    assert result.record.id == table["id"]


SIZE = RunSize(cases=2, arms=3, rounds=10, workers=6, cells=12, gates=("launch", "bench"))


def ask(python, begin, save=lambda *_: None):
    """Run what says how large it is, and waits for what holds it to a budget."""
    lines = Lines()
    (result,) = prove_on(
        [Host("gpu", python)],
        request("ask").model_copy(update={"gpus": [json.dumps(asdict(SIZE))]}),
        StubTree(),
        progress={"gpu": lines},
        save=save,
        begin=begin,
        requirements={},
    )
    return result, lines


@SSH
@pytest.mark.parametrize("budget", [None, Budget(0.5, 4.0, Estimate({"launch": 3.0, "bench": 60.0}, "a rough model"))])
def test_a_run_there_says_how_large_it_is_and_is_held_to_a_budget_from_here(machine, python, budget):
    begun = []

    def begin(name, record, size):
        begun.append((name, record.id, size))
        return budget

    result, lines = ask(python(), begin)
    assert result.error is None
    assert begun == [("gpu", result.record.id, SIZE)]
    answer = json.loads(lines.notes[-1])
    assert BUDGET.validate_python(answer["budget"]) == budget


@SSH
def test_a_budget_without_a_rate_ends_the_run_there_before_it_costs_anything(machine, python):
    def begin(name, record, size):
        raise ProofError("a budget needs a rate, and there is none for NVIDIA L4", hint="write it")

    saved = []
    result, _ = ask(python(), begin, lambda *found: saved.append(found))
    assert "a budget needs a rate" in str(result.error)
    assert saved == []


@SSH
def test_what_fails_there_is_told_here(machine, python):
    (result,), _ = run("fail", python=python())
    assert isinstance(result.error, RemoteError)
    assert str(result.error) == "gpu: ValueError: no such thing"


@SSH
def test_the_folder_there_goes_with_the_run(machine, python, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen = []

    def begin(*_):  # the run there waits for the answer: it still has its folder
        seen.extend(scratch.iterdir())

    result, _ = ask(python(f'export TMPDIR="{scratch}"'), begin)
    assert result.error is None
    assert len(seen) == 1
    assert list(scratch.iterdir()) == []


@SSH
def test_several_machines_run_at_the_same_time(server, monkeypatch, python, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("FLASHMOE_SSH", server.command(one={}, two={}, away={"Port": 1}))
    each = python("export MACHINE=$$")  # the process's number stands for the machine
    saved: dict[str, Record] = {}
    results, _ = run("meet", marks, python=each, save=saved.__setitem__, names=("one", "two", "away"))
    assert len({record.id for record in saved.values()}) == 2
    assert [result.error is None for result in results] == [True, True, False]
    assert set(saved) == {"one", "two"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Let every machine be this one, without a server."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\nexport MACHINE="$1"\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("FLASHMOE_SSH", str(ssh))


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("what", "fault", "kind", "said"),
    [
        ("one tells nonsense", None, RemoteError, "one: a finish came that cannot be read: ValidationError: "),
        ("one waits", EvidenceError("a.json: cannot be written"), EvidenceError, "a.json: cannot be written"),
        ("one waits", FULL, EvidenceError, "one: the record cannot be kept: No space left on device"),
    ],
)
def test_what_goes_wrong_with_one_machine_ends_the_run_there_alone(here, python, tmp_path, what, fault, kind, said):
    saved = []

    def save(name, record):
        if name == "one" and fault is not None:
            raise fault
        saved.append(name)

    (one, two), _ = run(what, tmp_path, python=python(), save=save, names=("one", "two"))
    assert type(one.error) is kind
    assert str(one.error).startswith(said)
    pid = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: not is_alive(pid), 60)  # it was told to stop, and not cut off: it told what it had
    assert one.record is not None
    assert one.record.incomplete_reason == "interrupted in gate correct"
    assert (two.error, two.record, two.stopped) == (None, as_sent(what, two.record.id), False)
    assert "two" in saved


# The connection ends early.


@SSH
def test_ctrl_c_stops_the_run_there_and_brings_what_is_done(machine, python, tmp_path):
    saved = []

    def save(name, record):
        saved.append(record)
        if len(saved) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("wait", tmp_path, python=python(), save=save)
    assert [record.incomplete_reason for record in saved] == ["interrupted", "interrupted in gate correct"]
    pid = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: not is_alive(pid), 30)


@SSH
@pytest.mark.parametrize("how", ["cut", "fall_silent"])
def test_a_lost_connection_leaves_what_came_and_ends_the_run_there(machine, proxy, python, tmp_path, monkeypatch, how):
    machine(Port=proxy.port)
    ssh = "ssh -o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    monkeypatch.setenv("FLASHMOE_SSH", re.sub("^ssh", ssh, os.environ["FLASHMOE_SSH"]))
    saved = []

    def save(name, record):
        saved.append(record)
        getattr(proxy, how)()

    (result,), _ = run("wait", tmp_path, python=python(), save=save, heartbeat_s=0.2, silence_s=3.0)
    assert isinstance(result.error, MachineLostError)
    assert result.record == saved[0]
    text = str(result.error)
    assert text.startswith("gpu: the run ended early in gate correct: ")
    assert text.endswith(f"hint: flashmoe prove --host gpu --resume {saved[0].id}")
    pid = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: not is_alive(pid), 60), "the run there outlived its connection"


@SSH
def test_a_run_that_is_killed_there_says_in_which_gate(machine, python, tmp_path):
    def save(name, record):
        subprocess.run(["kill", "-9", (tmp_path / "pid").read_text()], check=True)

    (result,), _ = run("wait", tmp_path, python=python(), save=save)
    assert isinstance(result.error, MachineLostError)
    assert "ended early in gate correct" in str(result.error)


@SSH
def test_a_machine_that_is_told_to_stop_saves_first(machine, python, tmp_path):
    saved = []

    def save(name, record):
        saved.append(record.incomplete_reason)
        if len(saved) == 1:
            subprocess.run(["kill", "-TERM", (tmp_path / "pid").read_text()], check=True)

    (result,), _ = run("wait", tmp_path, python=python(), save=save)
    assert saved == ["interrupted", "interrupted in gate correct"]
    assert "this machine is about to stop" in str(result.error)


# All of it: the command, the chain, a connection that is cut, and the run that goes on with it.


@SSH
def test_a_real_run_is_cut_and_gone_on_with(server, proxy, tmp_path):
    folder = tmp_path / "a repository"
    (folder / "evidence").mkdir(parents=True)
    (folder / "my kernel").mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "a suite.toml").write_text(SUITE.replace("tests.proof.fake_operator", "ops.fake"))
    (folder / "my kernel" / "kernel.toml").write_text(SUBJECT.replace("tests.proof.fake_operator", "ops.fake"))
    # In its second case it stops until a file is there, so that the connection is cut at a known place.
    go = tmp_path / "go"
    code = CODE.replace("tests.proof.fake_operator", "ops.fake").replace(
        "time.sleep(0.2)", f"while q.shape[2] == 65 and not os.path.exists({str(go)!r}): time.sleep(0.02)"
    )
    (folder / "my kernel" / "slow_subject.py").write_text(code)
    (folder / "my kernel" / "ops").mkdir()
    (folder / "my kernel" / "ops" / "__init__.py").write_text("")
    operator = (Path(__file__).parents[1] / "fake_operator.py").read_text()
    (folder / "my kernel" / "ops" / "fake.py").write_text(operator.replace("tests.proof.fake_operator", "ops.fake"))
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT / "src"),
        "FLASHMOE_STORE": str(tmp_path / "runs"),
        "FLASHMOE_SSH": server.command(rented={}, cut={"Port": proxy.port}),
        "FLASHMOE_COMMIT": "c" * 40,
    }

    def records():
        return [read_record(path) for path in sorted((folder / "evidence").glob("*.json.gz"))]

    def prove(*more, meanwhile=lambda: None):
        argv = [sys.executable, "-m", "flashmoe_science", "prove", "my kernel/kernel.toml", "--suite", "a suite.toml"]
        argv += ["--python", sys.executable, *more]
        with subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            meanwhile()
            return process.communicate(timeout=180)[0], process.returncode

    def cut():
        done = wait_for(lambda: any(case.correct for record in records() for case in record.cases), 120)
        proxy.cut()
        assert done

    output, code = prove("--host", "cut", meanwhile=cut)
    assert code == 4, output
    (old,) = records()
    assert [case.correct for case in old.cases] == [True, None, None]
    assert f"hint: flashmoe prove --host cut --resume {old.id}" in output

    go.touch()
    output, code = prove("--host", "rented", "--resume", old.id)
    assert code == 0, output
    record = next(record for record in records() if record.id != old.id)
    assert record.complete
    assert [case.correct for case in record.cases] == [True] * 3
    assert record.cases[0].arms[0].accuracy == old.cases[0].arms[0].accuracy
    assert [resumed.run for resumed in record.resumed] == [old.id]
    assert record.environment.commit == "c" * 40
    assert record.command == f"flashmoe prove 'my kernel/kernel.toml' --suite 'a suite.toml' --resume {old.id}"
    plain = record.model_dump_json()
    assert "rented" not in plain
    assert str(tmp_path) not in plain
    assert json.loads(plain)["subject"]["folder"] == "my kernel"
