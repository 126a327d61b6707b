"""Training on two ranks: the gradients of DDP and of FSDP2 are those of all sequences on one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..exhaustive import all_but

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
        ],
    ),
]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "model"),
    all_but(
        itertools.product(("ddp", "fsdp2"), ("fp32", "bf16-64", "bf16-128")), "('ddp', 'fp32')", "('fsdp2', 'bf16-64')"
    ),
)
def test_two_ranks(how: str, model: str, device: str, tmp_path: Path) -> None:
    """In fp32 with sinks, and in bf16 as Hopper's kernels serve it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.attention.parallel_step", how, model, device]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for out, err in answers:
        assert out.strip() == "right", err
