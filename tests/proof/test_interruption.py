"""A run that is killed at any moment leaves a record that can be read and says that it is incomplete, or nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import Record

from .chain import OPERATOR_NAME
from .processes import heed_signals, is_alive, python_path, wait_for

ROOT = Path(__file__).parents[2]

SUITE = f"""
name = "three"
operator = "{OPERATOR_NAME}"
description = "Three cases."
[defaults]
batch = 1
heads = 2
head_dim = 32
origin = "made for a test"
[[cases]]
seqlen_q = 64
[[cases]]
seqlen_q = 65
[[cases]]
seqlen_q = 66
"""

SUBJECT = f"""
[subject]
name = "slow"
operator = "{OPERATOR_NAME}"
entry_point = "slow_subject:attend"
sources = ["slow_subject.py"]
devices = ["cpu"]
"""

CODE = """
import os, time
from tests.proof.fake_operator import attend as honest
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
def attend(q, k, v, *, causal, softmax_scale):
    time.sleep(0.2)
    return honest(q, k, v, causal=causal)
"""

# The chain with stand-ins for the GPU, over and over: nearly all its time goes into writing records.
BUSY = """
from unittest import mock
from pathlib import Path
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.gates import chain, prove, run
from tests.proof import chain as help
from tests.proof.fake_operator import Problem
fake, recorder = help.FakeGpu(), help.Recorder()
problems = [Problem(1, 1, s, 64) for s in range(1, 20)]
request = help.request_of(help.HONEST, *problems, settings=help.FEW)
save = lambda record: write_record(record, Path("evidence") / f"{record.id}.json.gz")
with mock.patch.object(chain, "_read_environment", lambda: help.environment_with(help.GPU)), \\
     mock.patch.object(run, "run_task", fake.run), \\
     mock.patch.dict(chain._GATES, {"import": lambda _: run.passed("left out")}):
    print("started", flush=True)
    while True:
        prove(request, progress=recorder, save=save)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "kernel.toml").write_text(SUBJECT)
    (tmp_path / "slow_subject.py").write_text(CODE)
    (tmp_path / "evidence").mkdir()
    return tmp_path


def start(folder, *argv, **kwargs):
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT / "src", ROOT),
        "FLASHMOE_STORE": str(folder / "runs"),
    }
    environment["FLASHMOE_COMMIT"] = "a" * 40  # what is tested does not hang on whether this tree is clean
    options = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "preexec_fn": heed_signals, **kwargs}
    return subprocess.Popen([sys.executable, *argv], **options)


def start_prove(folder, *more):
    argv = ("-m", "flashmoe_science", "prove", *(more or ("kernel.toml",)), "--suite", "suite.toml")
    return start(folder, *argv, stderr=subprocess.STDOUT)


def records(folder) -> list[Record]:
    """Read every record in the folder. A broken one raises."""
    return [read_record(path) for path in sorted((folder / "evidence").glob("*.json.gz"))]


@pytest.mark.parametrize("moment", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 4))])
def test_kill_while_records_are_written(folder, moment):
    process = start(folder, "-c", BUSY)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    assert wait_for(lambda: any((folder / "evidence").glob("*.json.gz")), 120)
    time.sleep(random.Random(moment).uniform(0.05, 1.0))
    process.kill()
    process.communicate()
    found = records(folder)
    assert found
    assert sum(not record.complete for record in found) <= 1
    for record in found:
        assert record.complete == (record.incomplete_reason == "")


@pytest.mark.exhaustive  # the run that is gone on with below is killed too
@pytest.mark.parametrize("moment", ["import", "first case", "second case"])
def test_kill_of_a_real_run_leaves_what_was_finished(folder, moment):
    process = start_prove(folder)
    cases = {"import": 0, "first case": 1, "second case": 2}[moment]

    def reached():
        found = records(folder)
        if not found:
            return False
        done = sum(case.correct is True for case in found[0].cases)
        return done >= cases and len((folder / "pids").read_text().split() if (folder / "pids").exists() else []) >= 1

    assert wait_for(reached, 120), process.communicate(timeout=60)
    process.kill()
    process.communicate()
    (record,) = records(folder)
    assert not record.complete
    assert record.incomplete_reason == "the run has not ended"
    assert [case.correct for case in record.cases][:cases] == [True] * cases
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    assert wait_for(lambda: not any(is_alive(pid) for pid in pids), 30), "a worker outlived the run"


def test_an_interrupted_run_says_so_and_is_gone_on_with_and_its_finished_cases_are_kept(folder):
    process = start_prove(folder)
    assert wait_for(lambda: any(case.correct for record in records(folder) for case in record.cases), 120)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    (old,) = records(folder)
    assert process.returncode != 0
    assert not old.complete
    assert old.incomplete_reason == "interrupted in gate correct"
    assert old.cases[0].correct is True
    kept = [case.name for case in old.cases if case.correct]
    resumed = start_prove(folder, "--resume", old.id)
    output = resumed.communicate(timeout=120)[0].decode()
    assert resumed.returncode == 0, output
    record = next(record for record in records(folder) if record.id != old.id)
    assert record.complete
    assert [case.correct for case in record.cases] == [True] * 3
    accuracies = [[case.arms[0].accuracy for case in run.cases[: len(kept)]] for run in (old, record)]
    assert accuracies[0] == accuracies[1]  # inputs are drawn anew in every check: the same error is that of then
    assert [r.run for r in record.resumed] == [old.id]
    assert f"going on with {old.id}: {len(kept)} of 3 cases finished" in output
    assert "3 of 3 cases on the CPU" in output


BUILD = """
[build]
command = "{python} build.py"
"""

BUILD_CODE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids.new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(600)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM, signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)),
    ],
)  # fmt: skip
def test_a_build_ends_with_the_run_whatever_the_signal(folder, number):
    (folder / "kernel.toml").write_text(SUBJECT + BUILD)
    (folder / "build.py").write_text(BUILD_CODE)
    process = start_prove(folder)
    assert wait_for((folder / "pids").exists, 120)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert wait_for(lambda: not any(map(is_alive, pids)), 20)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        (record,) = records(folder)
        assert not record.complete
        assert record.incomplete_reason == "interrupted in gate build"
        assert f"build command: {sys.executable} build.py" in said.decode()
