"""What a test needs and is not there skips it, and fails it where it is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .proof.processes import python_path
from .required import NAMES, VARIABLE

ROOT = Path(__file__).parents[1]

SESSION = """
import pytest
from tests.required import import_needed, missing

@pytest.fixture
def server():
    missing("nvcc", "needs a compiler")

def test_fixture(server): pass
@pytest.mark.needs("sshd", False, "needs an SSH server")
def test_mark(): pass
@pytest.mark.needs("nvcc", True, "needs nvcc")
def test_here(): pass
def test_module(): import_needed("no_such_module.part", "browser", "needs a driver")
"""


def run(folder, require):
    (folder / "test_needs.py").write_text(SESSION)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = needs\n")
    argv = [sys.executable, "-m", "pytest", "-p", "tests.required", "-p", "no:cacheprovider", "-rA", "--tb=line"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "src"), VARIABLE: require}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_without_it_tests_are_skipped_with_the_reason(tmp_path):
    done = run(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    assert "needs an SSH server" in done.stdout


def test_what_is_required_fails(tmp_path):
    done = run(tmp_path, "sshd, nvcc,browser")
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    assert "skipped" not in done.stdout
    for name, reason in (("nvcc", "a compiler"), ("sshd", "an SSH server"), ("browser", "a driver")):
        assert f"{VARIABLE} has {name}, and this test needs {reason}" in done.stdout


def test_what_is_not_required_is_still_skipped(tmp_path):
    done = run(tmp_path, "sshd")
    assert "1 passed, 2 skipped, 1 error" in done.stdout


def test_a_name_that_no_test_knows_is_an_error(tmp_path):
    done = run(tmp_path, "sshd,compiler")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{VARIABLE}: expected some of {', '.join(NAMES)}, got compiler" in done.stderr
