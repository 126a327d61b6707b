"""What the worker's tasks find on a machine without a GPU: machine code of Triton and of libraries, and plans."""

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
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.diagnose import counters, tasks
from flashmoe_science.proof.diagnose.gather import Request, plan_for
from flashmoe_science.proof.diagnose.hypotheses import diagnose_case
from flashmoe_science.proof.diagnose.observations import Kernel
from flashmoe_science.proof.processes import TaskResult, run_command
from flashmoe_science.proof.subject.loading import load_operator, load_subject
from flashmoe_science.proof.subject.subject import Subject

from ..chain import SHORT, attention, suite_of, write_subject
from ..simulated import SimulatedTimer
from . import rows_operator


class InProcess:
    """Runs a task here."""

    def __call__(self, task, payload, *, timeout_s, on_event=None):
        data = getattr(tasks, task.rpartition(":")[2])(payload, on_event)
        return TaskResult(ok=True, data=data, reason="", seconds=1.0, output_tail="")


@pytest.fixture(autouse=True)
def fresh_imports(monkeypatch):
    """Let every written subject be imported anew: here it shares a process with the others."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("written_subject", None)


def plan(subject, case, gpu):
    wish = Request(subject, [case], (), seed=1)
    (found,) = plan_for(wish, find_gpu(gpu), "no GPU here", say=print, run=InProcess())
    return found, {each.hypothesis: each for each in diagnose_case(found).findings}


@pytest.mark.triton
def test_our_own_kernels_are_planned_and_compiled_for_a_gpu_that_is_not_here():
    found, told = plan(load_subject("forward_triton"), attention(1, 1, 512, 64), "L4")
    forward = found.kernels[0]
    assert (forward.name, forward.block) == ("_forward_kernel", (128, 1, 1))
    assert forward.code is not None
    assert forward.registers == forward.code.registers > 32
    assert told["no tensor-core instructions"].explanation.endswith("in _forward_kernel")
    assert told["spills and local memory"].status.value == "ruled out"
    assert told["launch-bound"].explanation == "no times: no GPU here"


def test_a_kernel_that_does_not_serve_the_gpu_says_why():
    _, told = plan(load_subject("forward_gluon_sm90"), attention(1, 1, 512, 64), "L4")
    assert "not served on L4" in told["grid too small"].explanation


PROMISING = """
[[launch.kernels]]
pattern = "attend_kernel"
grid = [8, 1, 1]
block = [128, 1, 1]
shared_memory_bytes = 163840
"""


def test_of_a_kernel_toml_the_promises_are_taken(tmp_path):
    subject = write_subject(tmp_path, "import torch\ndef attend(*args, **options): ...\n", tail=PROMISING)
    found, told = plan(subject, suite_of(SHORT).cases[0], "L4")
    assert found.kernels[0].blocks == 8
    capped = told["occupancy capped"]
    assert capped.status.value == "confirmed"
    assert "attend_kernel cannot be launched: 160.0 KiB shared memory a block, of which L4 gives 99.0 KiB" in (
        capped.explanation
    )
    assert "8 blocks of attend_kernel for 58 SMs: 86% of the SMs' time is idle" in told["grid too small"].explanation
    assert "registers and spills, from gate build" in told["spills and local memory"].explanation


@pytest.mark.triton
def test_kernels_that_triton_compiled_in_this_process_are_found():
    operator = load_operator("attention")
    planned = operator.planned_kernels("forward_triton", attention(1, 1, 64, 64).problem, "H200")  # type: ignore[attr-defined]
    shown = Kernel(
        name=planned[0].name,
        block=planned[0].block,
        registers=planned[0].code.registers,
        shared_memory_bytes=planned[0].shared_memory_bytes,
    )
    subject = load_subject("forward_triton")
    (found,) = tasks.with_code([shown.model_dump()], subject, tasks.mapped_libraries(), 90)
    assert found["code"] == tasks.summarize(planned[0].code).model_dump()
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_the_call_under_ncu_is_made_in_a_process_that_finds_the_subject(tmp_path):
    """A stand-in for ncu runs what ncu would run: it comes as far as asking for the GPU."""
    (tmp_path / "ncu").write_text(f'#!/bin/sh\nwhile [ "$1" != "{sys.executable}" ]; do shift; done\nexec "$@"\n')
    (tmp_path / "ncu").chmod(0o755)
    tails = []

    def run(argv, **options):
        result = run_command(argv, **options)
        tails.append(result.output_tail)
        return result

    case = attention(1, 1, 64, 64)
    payload = {"subject": load_subject("forward_triton").to_json(), "seed": 1}
    payload["case"] = {"problem": load_operator("attention").as_table(case.problem)}
    kernels, why = counters.read_counters(payload, [Kernel(name="a")], run=run, ncu=str(tmp_path / "ncu"))
    assert (kernels, why) == ([Kernel(name="a")], "ncu exited with status 1")
    assert "call_once" in tails[0]
    assert "make_inputs" in tails[0]
