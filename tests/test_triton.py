"""The Triton that is installed does what the tests of kernels count on, at both ends of the range that is admitted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

pytestmark = pytest.mark.triton

PROBE = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, repeats, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(tl.cdiv(repeats, 2), repeats):
        acc = tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), acc)
    tl.store(c_ptr + offs, acc)


a, b = torch.randn(2, 16, 16).to(torch.float16)
c = torch.empty(16, 16)
kernel[(1,)](a, b, c, 4, BLOCK=16)
torch.testing.assert_close(c, 2 * (a.float() @ b.float()))
"""


def test_this_is_the_triton_that_was_asked_for() -> None:
    import triton

    expected = os.environ.get("FLASHMOE_EXPECTED_TRITON", "")
    assert f"{triton.__version__}.".startswith(f"{expected}.") or not expected


def test_the_interpreter_runs_loops_bounded_at_run_time(tmp_path) -> None:
    """Triton 3.6 with NumPy 2.4 does not: see the bound on NumPy in pyproject.toml."""
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(probe)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
