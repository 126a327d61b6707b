"""Machines that a chain of proof meets: one without a GPU, and one whose GPU is played by stand-ins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashmoe_science.proof.gates import chain, run

from . import forked
from .chain import GPU, FakeGpu, environment_with


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
