"""Borrowed machines, over a real SSH server on this machine. In place of the chain there runs a stub, but for one test.

The stub tells what it was told to, so that these tests are about the connection: what comes when it holds, is stopped,
is cut or falls silent.
"""

from __future__ import annotations

import io
import json
import os
import queue
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from flashmoe_science.errors import EvidenceError, InputError, MachineLostError, ProofError, RemoteError
from flashmoe_science.proof.cost import Budget, Estimate, RunSize
from flashmoe_science.proof.evidence import Record, Settings, read_record
from flashmoe_science.proof.remote import Host, HostResult, RemoteRequest, far_side, prove_on
from flashmoe_science.proof.remote.agent import BUDGET
from flashmoe_science.proof.remote.session import _Listener, _Said, _Session
from flashmoe_science.proof.remote.wheels import REQUIREMENTS, platforms

from .builders import build_record
from .processes import is_alive, python_path, wait_for
from .sshd import WHY_NOT, Proxy, Server, is_possible
from .test_interruption import CODE, ROOT, SUBJECT, SUITE

SSH = pytest.mark.needs("sshd", is_possible(), WHY_NOT)

# What is sent in place of the package. The record that it tells travels there as the one to resume.
STUB = """
import json, os, sys, time
def run_request(table, tree, send, receive):
    what, marks = table["command"], table["folder"]
    record = table["resume"]
    print('{"event": "start", "gate": "a subject prints"}')
    if what == "fail":
        raise ValueError("no such thing")
    send({"event": "start", "gate": "correct"})
    if what == "tell":
        import made_up
        send({"event": "note", "line": f"made_up {made_up.VERSION}"})
    if what == "ask":
        send({"event": "begin", "record": json.dumps(record), "size": table["gpus"] and json.loads(table["gpus"][0])})
        answer, _ = receive()
        send({"event": "note", "line": json.dumps(answer)})
    if what == "meet":
        name = os.environ["MACHINE"]
        open(f"{marks}/{name}", "w").close()
        end = time.monotonic() + 60
        while len(os.listdir(marks)) < 2:
            assert time.monotonic() < end, "the other machine never came"
            time.sleep(0.02)
        record["id"] = name
    nonsense = what == "one tells nonsense"
    if what.startswith("one ") and os.environ["MACHINE"] == "one":
        what = "wait"
    if what == "wait":
        with open(f"{marks}/pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{marks}/pid.new", f"{marks}/pid")
    try:
        send({"event": "record", "record": json.dumps(record)})
        if nonsense and what == "wait":
            send({"event": "finish", "gate": '{"name": 3}'})
        while what == "wait":
            time.sleep(0.1)
    except KeyboardInterrupt:
        record["incomplete_reason"] = "interrupted in gate correct"
        send({"event": "record", "record": json.dumps(record)})
        raise
"""


class StubTree:
    """A tree that holds the stub, and a file of so many bytes."""

    package = "package"

    def __init__(self, more=0):
        self.more = more

    def pack(self):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name in ("", "proof/", "proof/remote/"):
                tar.addfile(tarfile.TarInfo(f"package/flashmoe_science/{name}__init__.py"))
            files = {"package/flashmoe_science/proof/remote/agent.py": STUB.encode(), "tree/more": bytes(self.more)}
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()


class Lines:
    """A progress that remembers."""

    def __init__(self):
        self.started, self.notes, self.finished = [], [], []

    def start(self, gate):
        self.started.append(gate)

    def advance(self, done, total, label):
        pass

    def note(self, line):
        self.notes.append(line)

    def finish(self, gate):
        self.finished.append(gate)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start one server for all tests of a process."""
    # A login knows nothing of a PYTHONPATH, by which this process may have found its packages.
    server = Server(tmp_path_factory.mktemp("ssh") / "server", environment={"PYTHONPATH": python_path()})
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def machine(server, monkeypatch):
    """Let ``ssh`` know the machine ``gpu``; arguments change how it is reached."""

    def machine(**changes):
        monkeypatch.setenv("FLASHMOE_SSH", server.command(gpu=changes))

    machine()
    return machine


@pytest.fixture
def python(tmp_path):
    """Make a Python of the borrowed machine, in a place with a name that has to be quoted."""
    there = tmp_path / "there"
    there.mkdir()

    def python(*lines, name='it\'s a $HOME "python"', flags=""):
        path = tmp_path / name
        path.write_text(
            "\n".join(["#!/bin/sh", f"export TMPDIR='{there}'", *lines, f'exec "{sys.executable}" {flags} "$@"', ""])
        )
        path.chmod(0o755)
        return str(path)

    return python


def request(what, folder=Path(), record=None):
    record = record or build_record(speedups=[2.0], complete=False, gpu=None)
    return RemoteRequest(
        subject="s", suite="s", baselines=[], settings=Settings(), command=what, folder=str(folder), resume=record
    )


def run(
    what, folder=Path(), *, python, save=lambda name, record: None, names=("gpu",), requirements=None, tree=None, **more
):
    """Run the stub on the machines; return their results and the progress of the first."""
    lines = {name: Lines() for name in names}
    results = prove_on(
        [Host(name, python) for name in names],
        request(what, folder),
        tree or StubTree(),
        progress=lines,
        save=save,
        requirements=requirements or {},
        **more,
    )
    return results, lines[names[0]]


@SSH
def test_what_a_run_tells_comes_here_whatever_else_is_printed(machine, python):
    saved = []
    noisy = python('echo "{\\"event\\": 1" Welcome', 'echo "last login" >&2')
    (result,), lines = run("finish", python=noisy, save=lambda name, record: saved.append((name, record)))
    assert (result.error, result.stopped) == (None, False)
    assert saved == [("gpu", request("finish").resume)]
    assert result.record == saved[0][1]
    assert lines.started == ["correct"]
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": "another"}, "key id: expected 20260101T000000Z-seed-flash_attention-000000, got another"),
        ({"id": "../escaped"}, "key id: String should match pattern"),
        ({"created_at": 0.5, "gates": 1}, "key gates"),
    ],
)
def test_a_record_that_a_run_there_cannot_have_is_not_saved_and_nothing_after_it(changes, why):
    said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
    saved, results = [], [HostResult(Host("gpu"))]
    session = _Session(results[0].host, 0, said, request("stop"), {}, b"", 1.0)
    listener = _Listener([session], results, said, {"gpu": Lines()}, lambda name, record: saved.append(record.id))
    table = build_record(speedups=[2.0], gpu=None).model_dump(mode="json")
    for record in (table, table, table | changes, table):
        said.put(_Said(0, "record", {"record": json.dumps(record)}))
    said.put(_Said(0, "ended"))
    listener._drain()
    assert saved == [table["id"]] * 2
    assert isinstance(results[0].error, RemoteError)
    assert f"a record from gpu: {why}" in str(results[0].error)
    assert results[0].record is not None
    assert results[0].record.id == table["id"]


SIZE = RunSize(cases=2, arms=3, rounds=10, workers=6, cells=12, gates=("launch", "bench"))


def asking(size=SIZE):
    """Return a request for a run that says how large it is, and waits for what holds it to a budget."""
    return request("ask").model_copy(update={"gpus": [json.dumps(asdict(size))]})


@SSH
@pytest.mark.parametrize("budget", [None, Budget(0.5, 4.0, Estimate({"launch": 3.0, "bench": 60.0}, "a rough model"))])
def test_a_run_there_says_how_large_it_is_and_is_held_to_a_budget_from_here(machine, python, budget):
    begun = []

    def begin(name, record, size):
        begun.append((name, record.id, size))
        return budget

    lines = Lines()
    (result,) = prove_on(
        [Host("gpu", python())],
        asking(),
        StubTree(),
        progress={"gpu": lines},
        save=lambda *_: None,
        begin=begin,
        requirements={},
    )
    assert result.error is None
    assert begun == [("gpu", result.record.id, SIZE)]  # type: ignore[union-attr]
    answer = json.loads(lines.notes[-1])
    assert BUDGET.validate_python(answer["budget"]) == budget


@SSH
def test_a_budget_without_a_rate_ends_the_run_there_before_it_costs_anything(machine, python):
    def begin(name, record, size):
        raise ProofError("a budget needs a rate, and there is none for NVIDIA L4", hint="write it")

    saved = []
    (result,) = prove_on(
        [Host("gpu", python())],
        asking(),
        StubTree(),
        progress={"gpu": Lines()},
        save=lambda *found: saved.append(found),
        begin=begin,
        requirements={},
    )
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

    here = python(f'export TMPDIR="{scratch}"')
    (result,) = prove_on(
        [Host("gpu", here)],
        asking(),
        StubTree(),
        progress={"gpu": Lines()},
        save=lambda *_: None,
        begin=begin,
        requirements={},
    )
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
    assert (two.error, two.record, two.stopped) == (None, request(what).resume, False)
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


# What cannot be reached or used.


@SSH
@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"UserKnownHostsFile": "no_hosts"}, "has a host key that is not known here", "fingerprint"),
        ({"UserKnownHostsFile": "other_hosts"}, "has another host key than the one that is known", "ssh-keygen -R"),
        ({"IdentityFile": "stranger_key"}, "refuses the login: ", "IdentityFile in ~/.ssh/config"),
        ({"Port": 1}, "cannot be reached: ssh: connect to host 127.0.0.1 port 1: Connection refused", "as ssh sees it"),
        ({"HostName": "nowhere.invalid"}, "cannot be reached: ssh: Could not resolve hostname", "as ssh sees it"),
    ],
)
def test_a_machine_that_cannot_be_reached_says_why(machine, server, python, changes, said, hint):
    places = {
        name: server.folder / value if isinstance(value, str) and "_" in value else value
        for name, value in changes.items()
    }
    machine(**places)
    before = (server.folder / "no_hosts").read_text()
    (result,), lines = run("finish", python=python())
    assert str(result.error).startswith(f"gpu {said}")
    assert hint in result.error.hint
    assert not isinstance(result.error, MachineLostError)
    assert (server.folder / "no_hosts").read_text() == before == "", "a key was accepted unseen"
    assert lines.started == []


@SSH
def test_a_machine_without_torch_says_which_pythons_it_has(machine, python):
    bare = python(flags="-S -E")
    (result,), _ = run("finish", python=bare)
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert str(result.error).startswith(f"gpu: no Python there can run this: {bare}: {version} has no torch and no tri")
    assert "--python" in result.error.hint


@SSH
def test_a_python_that_is_not_there_is_named(machine, tmp_path):
    (result,), _ = run("finish", python=str(tmp_path / "no python"))
    assert f"there is no {tmp_path}/no python" in str(result.error)


@SSH
@pytest.mark.parametrize(("limit", "said"), [(0, "No usable temporary directory"), (1, "File too large")])
def test_a_machine_without_space_says_so(machine, python, limit, said):
    (result,), _ = run("finish", python=python(f"ulimit -f {limit}"), tree=StubTree(1 << 20))
    assert str(result.error).startswith("gpu: the tree cannot be unpacked: ")
    assert said in str(result.error)
    assert "let TMPDIR name a folder that has some" in str(result.error)


@pytest.mark.parametrize("name", ["", "-oProxyCommand=reboot", "two words", "a\nb"])
def test_a_host_that_ssh_would_take_for_something_else_is_refused(name):
    with pytest.raises(InputError, match="host must be user@machine"):
        Host(name)


def test_a_machine_without_ssh_is_told_so(monkeypatch):
    monkeypatch.setenv("FLASHMOE_SSH", "no-such-ssh -F x")
    with pytest.raises(RemoteError, match="no-such-ssh cannot be started: No such file") as caught:
        run("finish", python="python3")
    assert "FLASHMOE_SSH" in caught.value.hint


# Packages.


@pytest.fixture
def wheels(tmp_path):
    """Make a folder with a wheel of a package that is nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "made_up-3.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_up.py", "VERSION = '3.1'\n")
        wheel.writestr("made_up-3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 3.1\n")
        wheel.writestr("made_up-3.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("made_up-3.1.dist-info/RECORD", "")
    return folder


NEEDED = {"no_such_module|made_up": "made-up>=3", "json|no_such_module": "never-asked-for>=1"}
NO_INDEX = "export PIP_NO_INDEX=1"


@SSH
def test_missing_packages_come_from_the_index_that_the_machine_has(machine, python, wheels):
    there = python(NO_INDEX, f"export PIP_FIND_LINKS='{wheels}'")
    (result,), lines = run("tell", python=there, requirements=NEEDED)
    assert result.error is None
    assert lines.notes == ["installing made-up>=3 for this run", "made_up 3.1"]


@SSH
def test_wheels_travel_to_a_machine_without_an_index(machine, python, wheels, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (result,), lines = run("tell", python=python(NO_INDEX, "unset PIP_FIND_LINKS"), requirements=NEEDED)
    assert result.error is None
    assert "no package index there" in lines.notes[1]
    assert lines.notes[2:] == ["sending made_up-3.1-py3-none-any.whl", "made_up 3.1"]


def test_wheels_travel_to_a_machine_whose_index_does_not_answer(tmp_path, wheels, monkeypatch):
    assert far_side._PIP_TIMEOUT_S <= 60
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(far_side, "_PIP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    bundle = io.BytesIO()
    with zipfile.ZipFile(bundle, "w") as archive:
        for wheel in wheels.iterdir():
            archive.write(wheel, wheel.name)
    sent: list[dict[str, object]] = []

    class Link(far_side.Link):
        def __init__(self):  # no connection
            pass

        def send(self, event):
            sent.append(event)

        def receive(self):
            return {"do": "wheels"}, bundle.getvalue()

    far_side._add_packages(Link(), {"made_up": "made-up>=3"}, tmp_path / "run")
    assert [event["event"] for event in sent] == ["note", "wheels wanted"]
    assert sent[1]["why"] == "pip did not end within 0.2 s"
    assert (tmp_path / "run" / "packages" / "made_up.py").exists()
    assert sys.path[0] == str(tmp_path / "run" / "packages")


@SSH
def test_packages_that_nobody_has_end_the_run_with_a_hint(machine, python, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (result,), lines = run("tell", python=python(NO_INDEX), requirements=NEEDED)
    assert "wheels for that machine cannot be downloaded here: " in str(result.error)
    assert result.error.hint == "install them there: pip install 'made-up>=3'"
    assert lines.started == []


def test_what_is_installed_there_is_what_pyproject_says():
    text = (ROOT / "pyproject.toml").read_text()
    for module, requirement in REQUIREMENTS.items():
        marker = "; python_version < '3.11'" if "tomli" in module else ""
        assert f'"{requirement}{marker}"' in text


def test_wheels_are_for_the_glibc_of_that_machine():
    found = platforms("x86_64", [2, 19])
    assert found == [*(f"manylinux_2_{minor}_x86_64" for minor in (19, 18, 17)), "manylinux2014_x86_64", "linux_x86_64"]
    assert platforms("aarch64", []) == ["linux_aarch64"]


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
    operator = (Path(__file__).parent / "fake_operator.py").read_text()
    (folder / "my kernel" / "ops" / "fake.py").write_text(operator.replace("tests.proof.fake_operator", "ops.fake"))
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT / "src"),
        "FLASHMOE_STORE": str(tmp_path / "runs.sqlite"),
        "FLASHMOE_SSH": server.command(rented={}, cut={"Port": proxy.port}),
        "FLASHMOE_COMMIT": "c" * 40,
    }

    def records():
        return [read_record(path) for path in sorted((folder / "evidence").glob("*.json"))]

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
