"""A run on a GPU that is interrupted while it measures, and the run that goes on with it, here and over SSH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import Record

from .processes import heed_signals, python_path, wait_for
from .sshd import WHY_NOT, Server, is_possible
from .test_interruption import ROOT

pytestmark = pytest.mark.gpu  # not timing: what the times say is not the question here

PROCESSES, ROUNDS = 2, 3
BUILT = ("--gpu", "H100")  # not for every kind: what runs here is compiled when it is first called

SUITE = """
name = "three"
operator = "attention"
description = "Three cases."
[defaults]
batch = 1
heads = 4
head_dim = 64
dtype = "fp16"
origin = "made for a test"
[[cases]]
seqlen_q = 64
[[cases]]
seqlen_q = 128
[[cases]]
seqlen_q = 256
"""


@pytest.fixture
def folder(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "three.toml").write_text(SUITE)
    (tmp_path / "evidence").mkdir()
    return tmp_path


def records(folder) -> list[Record]:
    return [read_record(path) for path in sorted((folder / "evidence").glob("*.json.gz"))]


def start(folder, ssh, *args):
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src"), "FLASHMOE_SSH": ssh}
    environment |= {"FLASHMOE_COMMIT": "c" * 40, "FLASHMOE_STORE": str(folder.parent / "runs")}
    return subprocess.Popen(
        [sys.executable, "-m", "flashmoe_science", "prove", *args],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,  # noqa: PLW1509 - no other thread starts processes here
    )


def interrupt_and_resume(folder, ssh, *where):
    few = ("--processes", str(PROCESSES), "--rounds", str(ROUNDS), *BUILT)  # of either there is more than one
    process = start(folder, ssh, "flash_attention", "--suite", "suites/three.toml", *few, *where)

    def is_timed():
        return any(case.rounds for record in records(folder) for case in record.cases)

    wait_for(lambda: is_timed() or process.poll() is not None, 300)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert len(records(folder)) == 1, output
    (old,) = records(folder)
    assert old.incomplete_reason == "interrupted in gate bench", (old.incomplete_reason, output)
    resumed = start(folder, ssh, "--resume", old.id, *BUILT, *where)
    output = resumed.communicate(timeout=600)[0]
    assert resumed.returncode in (0, 1, 4), output
    record = next(record for record in records(folder) if record.id != old.id)
    assert record.complete, output
    assert {gate.status.value for gate in record.gates} == {"passed"}, output
    for case in record.cases:
        processes = [process for process in range(PROCESSES) for _ in range(ROUNDS)]
        assert [rounds.process for rounds in case.rounds] == [processes] * 2
    sessions = {s for case in record.cases for rounds in case.rounds for s in rounds.session or [0]}
    assert sessions == {0, 1}


def test_an_interrupted_run_is_gone_on_with_on_the_same_gpu(folder):
    interrupt_and_resume(folder, "ssh")


def visible():
    """Return what lets a login of this machine find the packages and the GPU that this process has found."""
    names = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "PATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)} | {"PYTHONPATH": python_path()}


@pytest.mark.needs("sshd", is_possible(), WHY_NOT)
def test_an_interrupted_run_over_ssh_is_gone_on_with(folder, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("ssh") / "server", environment=visible())
    server.start()
    try:
        interrupt_and_resume(folder, server.command(rented={}), "--host", "rented", "--python", sys.executable)
    finally:
        server.stop()
