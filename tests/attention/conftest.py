"""What tests of attention share: a child process that runs kernels in Triton's interpreter, and plans with shares."""

from __future__ import annotations

import dataclasses
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


@pytest.fixture
def share(monkeypatch):
    """Return a function that lets programs share the heads of a group, and walk over some of theirs together."""
    from flashmoe_science.attention.backward import autograd, plan as backward_plan
    from flashmoe_science.attention.backward.plan_sm90 import hopper_backward_config

    def share(shares: int, together: int, in_turns: int = 16) -> None:
        def config(problem, gpu):
            return dataclasses.replace(
                hopper_backward_config(problem, gpu), programs=gpu.sms, shares=shares, heads_together=together,
                heads_per_group=in_turns,
            )  # fmt: skip

        monkeypatch.setattr(backward_plan, "hopper_backward_config", config)
        autograd._prepared.clear()

    yield share
    autograd._prepared.clear()
