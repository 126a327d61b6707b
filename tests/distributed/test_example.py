"""The example that trains the small model on several ranks: its loss curve is that of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from statistics import fmean

import pytest

from ..proof.processes import python_path
from .ranks import ROOT


@pytest.mark.parametrize("split", ["cp", "ep"])
def test_the_loss_curve_is_that_of_one_process(split: str) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("examples/train_on_several_gpus.py", split, "--tiny", "--device", "cpu", "--steps", "20", "--length", "32"),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"largest difference between the curves: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 1e-4
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10
    assert fmean(losses[5:]) < fmean(losses[:5])  # one batch of 64 bytes may be harder than another
