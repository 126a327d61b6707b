"""The error scale of attention is the same by kernels and by PyTorch's operations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.gpu.compile import KernelSource, read_resources
from flashmoe_science.operators.attention_scale import errors_triton, scale, step_scale

from .scale_cases import LARGE, SMALL, ScaleCase, compare

GPU_CASES = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in SMALL + LARGE for dtype in case.dtypes]


@pytest.mark.triton
def test_kernels_in_the_interpreter_give_what_torch_does():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "tests.operators.interpreted_scale"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert found.stdout.split() == ["right"], found.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), GPU_CASES)
def test_kernels_on_a_gpu_give_what_torch_does(case: ScaleCase, dtype: torch.dtype) -> None:
    compare(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), GPU_CASES)
def test_a_gpu_allows_what_a_cpu_does(case: ScaleCase, dtype: torch.dtype) -> None:
    """A GPU multiplies by TF32 where a scale then errs by less than a thousandth."""
    on_cpu, on_gpu = (case.make(dtype, device) for device in ("cpu", "cuda"))
    expected = step_scale(*on_cpu[0], **on_cpu[1])
    found = step_scale(*on_gpu[0], **on_gpu[1])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([each.cpu() for each in one], [*other], rtol=1e-3, atol=2.0**-63)


@pytest.mark.triton
@pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.exhaustive) for arch in (80, 86, 89, 100, 120))]
)
def test_kernels_compile_without_spills(arch, monkeypatch):
    sources: set[KernelSource] = set()
    monkeypatch.setattr(errors_triton, "interpret", lambda kernel, _: sources.add(kernel.source))
    forms = errors_triton.p_with_errors, errors_triton.ds_with_errors
    monkeypatch.setattr(scale, "_forms", lambda _: forms)
    for case in SMALL:
        tensors, options = case.make(torch.bfloat16, "cpu")
        step_scale(*tensors, **options)
    assert {source.name for source in sources} == {"_p_kernel", "_ds_kernel"}
    assert [source for source in sources if read_resources(source, arch).spill_bytes] == []
