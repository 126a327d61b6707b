"""What the worker's tasks find on a machine without a GPU: machine code of Triton and of libraries."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.gpu.compile import compile_kernel, read_code
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.diagnose import tasks
from flashmoe_science.proof.diagnose.observations import Kernel
from flashmoe_science.proof.subject.loading import load_operator, load_subject
from flashmoe_science.proof.subject.subject import Subject

from ..chain import attention
from ..simulated import SimulatedTimer
from . import rows_operator


@pytest.fixture(autouse=True)
def fresh_imports(monkeypatch):
    """Let every written subject be imported anew: here it shares a process with the others."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("written_subject", None)


@pytest.mark.triton
def test_kernels_that_triton_compiled_in_this_process_are_found():
    problem, spec = attention(1, 1, 64, 64).problem, find_gpu("H200")
    launch, *_ = load_operator("attention").launches("forward_triton", problem, spec)  # type: ignore[attr-defined]
    compiled = compile_kernel(launch.source, spec.arch)
    code = read_code(compiled, launch.source.name, spec.arch)
    shared = compiled.metadata.shared
    shown = Kernel(
        name=code.name,
        block=(32 * compiled.metadata.num_warps, 1, 1),
        registers=code.registers,
        shared_memory_bytes=shared,
    )
    subject = load_subject("forward_triton")
    (found,) = tasks.with_code([shown.model_dump()], subject, tasks.mapped_libraries(), 90)
    assert found["code"] == tasks.summarize(code).model_dump()
    (absent,) = tasks.with_code(
        [shown.model_copy(update={"name": "absent"}).model_dump()], subject, tasks.mapped_libraries(), 90
    )
    assert absent["code"] is None
    assert "neither Triton's nor in a library" in absent["code_missing"]


SOURCE = """
__global__ void attend_kernel(float* x, int n) { for (int i = 0; i < n; i++) x[threadIdx.x] += x[i]; }
extern "C" void launch(float* x) { attend_kernel<<<8, 128>>>(x, 4); }
"""


@pytest.mark.needs("nvcc", shutil.which("nvcc") is not None, "needs nvcc")
def test_kernels_of_a_library_that_came_with_the_subject_are_found(tmp_path):
    (tmp_path / "a.cu").write_text(SOURCE)
    command = ["nvcc", "-gencode=arch=compute_90,code=sm_90", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared"]
    subprocess.run([*command, "-o", "a.so", "a.cu"], cwd=tmp_path, check=True, capture_output=True)
    before = tasks.mapped_libraries()
    try:
        library = ctypes.CDLL(str(tmp_path / "a.so"))
    except OSError as error:  # it wants the CUDA runtime
        pytest.skip(f"the library cannot be loaded here: {error}")
    problems: list[str] = []
    subject = Subject("ours", "attention", "m:f", tmp_path, ())
    (code,) = tasks.find_library_code(subject, before, 90, problems)
    assert library is not None
    assert (code.name, problems) == ("attend_kernel(float*, int)", [])
    assert tasks.find_library_code(subject, before, 80, problems) == []
    (problem,) = problems
    assert problem.startswith("a.so has machine code for sm_90 and none for sm_80: what ran, the driver made of")
    assert problem.endswith("build it with -gencode=arch=compute_80,code=sm_80")
    elsewhere = replace(subject, folder=tmp_path / "elsewhere")
    assert tasks.find_library_code(elsewhere, tasks.mapped_libraries(), 90, problems) == []  # it was there before


def test_launches_are_observed_case_by_case_with_code_where_it_is_asked_for(monkeypatch):
    """The whole task on the simulated GPU: what it emits is plain JSON, and goes through a pipe."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tasks, "CudaTimer", lambda: SimulatedTimer(rows_operator.GPU))
    monkeypatch.setattr(torch, "set_grad_enabled", lambda on: None)  # of the worker process, not of this one
    module = rows_operator.__name__
    subject = Subject("ours", module, f"{module}:on_simulated_gpu", Path(__file__).parent, (), python_path=())
    tables = [
        {"name": f"r{rows}", "problem": {"rows": rows, "length": 64}, "origin": "", "code": rows == 8}
        for rows in (8, 16)
    ]
    emitted: list[dict[str, Any]] = []
    answer = tasks.observe_launches({"subject": subject.to_json(), "cases": tables, "seed": 1}, emitted.append)
    assert json.loads(json.dumps(answer)) == {"cases": [event["case"] for event in emitted]}
    small, large = (Kernel.model_validate(case["kernels"][0]) for case in answer["cases"])
    assert (small.name, small.blocks, large.blocks) == ("row_loop", 8, 16)
    assert small.seconds == pytest.approx(66e-6)
    assert (small.code, large.code, large.code_missing) == (None, None, "")
    assert small.code_missing == "it is neither Triton's nor in a library that the subject loaded"


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_nothing_is_launched():
    payload = {"subject": load_subject("forward_triton").to_json(), "cases": [], "seed": 1}
    with pytest.raises(ProofError, match="no NVIDIA GPU here that torch can use"):
        tasks.observe_launches(payload, lambda event: None)
