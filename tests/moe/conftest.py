"""What tests of the experts share: a child process that runs kernels in Triton's interpreter, and the way to a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashmoe_science.gpu import launch
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import api, calls
from flashmoe_science.moe.backward import autograd as gradients

from .cases import Case


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let calls on CPU tensors take the way of those on an H200, up to the driver."""
    for module in (api, gradients):
        monkeypatch.setattr(module, "gpu_of", lambda _tensor: SPECS["H200"])
        monkeypatch.setattr(module, "_prepared", {})
    monkeypatch.setattr(calls, "_interpreter_run", lambda made: calls._cuda_run(made, torch.device("cuda", 0)))
    monkeypatch.setattr(calls, "_raw_stream", lambda _index: 0)
    monkeypatch.setattr(launch, "prepare_launch", lambda *_given: lambda *_addresses: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture(scope="session")
def interpreted():
    """Return a check in a child process, which Triton's interpreter needs (it is chosen at import)."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.moe.interpreted"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def check(what: Case | int | tuple[int, int]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(repr(what) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer == "right", answer

    yield check
    child.communicate(timeout=30)
