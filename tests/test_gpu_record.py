"""The record of ``make test-gpu`` holds what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .proof.processes import python_path

SESSION = """
import pytest


@pytest.fixture
def broken_teardown():
    yield
    raise RuntimeError


def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="no second GPU")
def test_skipped(): pass
def test_left_a_mess(broken_teardown): pass
"""

CONFTEST = """
from pathlib import Path

from tests.gpu_record import GpuRecord


def pytest_configure(config):
    environment = {"gpu": {"name": "NVIDIA H200"}, "commit": "abc"}
    config.pluginmanager.register(GpuRecord(Path("records"), lambda: environment))
"""


def run_session(folder: Path, *arguments: str) -> int:
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_session.py").write_text(SESSION, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = " + str(Path(__file__).parent.parent), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True).returncode


def test_every_outcome_is_recorded(tmp_path) -> None:
    assert run_session(tmp_path) == 1
    (path,) = (tmp_path / "records").iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert path.name.endswith("Z-nvidia-h200.json")
    assert record["kind"] == "gpu-tests"
    assert record["complete"] is True
    assert record["environment"]["commit"] == "abc"
    assert record["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert record["passed"] == ["test_session.py::test_good"]
    assert record["failed"] == ["test_session.py::test_bad", "test_session.py::test_left_a_mess"]
    assert record["skipped"] == {"test_session.py::test_skipped": "no second GPU"}


def test_a_session_that_stopped_early_is_incomplete(tmp_path) -> None:
    (tmp_path / "test_a_interrupted.py").write_text("def test(): pass\ndef test_stop(): raise KeyboardInterrupt\n")
    assert run_session(tmp_path) == 2
    (path,) = (tmp_path / "records").iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["complete"] is False
    assert record["passed"] == ["test_a_interrupted.py::test"]


def test_a_session_without_tests_leaves_nothing(tmp_path) -> None:
    assert run_session(tmp_path, "-k", "no_such_test") == 5
    assert not (tmp_path / "records").exists()
