"""What tests of borrowed machines share: an SSH server on this machine, ways to it, and a Python behind it."""

from __future__ import annotations

import sys

import pytest

from ..processes import python_path
from ..sshd import Proxy, Server


@pytest.fixture(scope="session")
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
