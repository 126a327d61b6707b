"""What tests of attention share: a child process that runs kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .cases import Case, Gradients, Ordering, VarlenCase
from .mask_cases import MaskCase
from .mixed_cases import Mixed


@pytest.fixture(scope="session")
def interpreted():
    """Return a check of one case in a child process, which Triton's interpreter needs (it is chosen at import)."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.attention.interpreted"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def check(case: Case | VarlenCase | Gradients | Ordering | MaskCase | Mixed) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(repr(case) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer == "right", answer

    yield check
    child.communicate(timeout=30)
