"""Machines that a chain of proof meets: one without a GPU, and one whose GPU is played by stand-ins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashmoe_science.proof.gates import chain, run

from . import forked
from .chain import GPU, FakeGpu, environment_with, run_here


@pytest.fixture(autouse=True)
def forked_workers(request, monkeypatch):
    """Fork workers from a process that has imported torch, except where a GPU is to be used."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(subprocess, "Popen", forked.popen)


@pytest.fixture
def own_path(monkeypatch):
    """Put ``sys.path`` back: an operator of a user's own adds the folder of its subject."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def import_left_out(monkeypatch):
    """Leave gate import out: those after it import the subject too, and each process takes seconds on a GPU."""
    monkeypatch.setitem(chain._GATES, "import", lambda _: run.passed("left out"))


@pytest.fixture
def in_this_process(monkeypatch, own_path):
    """Run tasks in this process, for subjects that do it no harm: on a GPU a new one takes some seven seconds.

    Tasks of gates quick and bench ask their parent, and cannot.
    """
    monkeypatch.setattr(run, "run_task", run_here)


@pytest.fixture
def no_gpu(monkeypatch, own_path):
    """Run the chain on a machine without a GPU."""
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(None))


@pytest.fixture
def gpu(monkeypatch):
    """Run the chain on a GPU that answers as it is told, and leave the import out. Returns it."""
    fake = FakeGpu()
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(GPU))
    monkeypatch.setattr(run, "run_task", fake.run)
    monkeypatch.setitem(chain._GATES, "import", lambda _: run.passed("left out"))
    return fake
