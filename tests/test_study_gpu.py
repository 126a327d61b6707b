"""A study of a few trials on a real GPU: the work that was planted is the work that is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_study import study

TOOL = Path(__file__).parents[1] / "tools" / "study.py"


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.unpoisoned
def test_planted_work_is_what_was_planted(tmp_path):
    options = ("--same", "4", "--planted", "2", "--batches", "1", "--output", tmp_path)
    done = subprocess.run([sys.executable, TOOL, *options], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # so few trials decide nothing
    (path,) = tmp_path.iterdir()
    same, one, three = study.tallies(study.Study.model_validate_json(study.read_text(path)))
    assert abs(same.slowdown) < 0.005
    assert three.slowdown == pytest.approx(0.03, abs=0.005)
    assert one.slowdown == pytest.approx(0.01, abs=0.004)
    assert three.counted == three.sound
