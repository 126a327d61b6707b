"""Gate build with a command of the user's: what it needs, what it is told, and what is in the library that it makes."""

from __future__ import annotations

import os
import sys

import pytest

from flashmoe_science.gpu.binary import Binary, BinaryKernel
from flashmoe_science.gpu.cuobjdump import Target
from flashmoe_science.proof.gates import chain, library

from .chain import environment_with, gate_of, request_of, run_chain, statuses, write_subject

CODE = "def attend(q, k, v, *, causal=False, softmax_scale=None): return q\n"
BUILD = "[build]\ncommand = ['{python}', '-c', 'open(\"made.so\", \"w\")']\nbinaries = ['made.so']\ngpus = ['L4']\n"
PROMISE = "[[launch.kernels]]\npattern = '*attend_kernel*'\nblock = [384, 1, 1]\nshared_memory_bytes = 40960\n"


def kernel(name="attend_kernel", **more):
    numbers = {"registers": 78, "stack_bytes": 0, "shared_memory_bytes": 0, "max_threads": 384}
    return BinaryKernel(f"void story::{name}<__half>(story::Args)", **{"target": Target(89), **numbers, **more})


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Run gate build on a library of these kernels; return the gate and the statuses of all."""
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(None))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a subject's folder is put there

    def build(*kernels, ptx=(), tail=BUILD + PROMISE, **changes):
        monkeypatch.setattr(library, "read_binary", lambda path: Binary(kernels, ptx))
        request = request_of(write_subject(tmp_path, CODE, tail=tail), **{"until": "import", **changes})
        record = run_chain(request)
        return gate_of(record, "build"), statuses(record)

    return build


def test_what_the_library_holds_is_told(build):
    gate, _ = build(kernel(), kernel("merge_kernel", registers=20, stack_bytes=16, shared_memory_bytes=528))
    assert gate.summary == (
        "2 kernels for sm_89 (L4): at most 78 registers a thread, 528 bytes static shared memory a block, "
        "1 with a stack of up to 16 bytes"
    )
    line = "sm_89: story::merge_kernel<__half>: 20 registers a thread, 16 bytes of stack, "
    assert f"{line}528 bytes of static shared memory, at most 384 threads a block" in gate.details


def test_a_kernel_that_fits_by_name_alone_is_noted(build):
    gate, all_gates = build(kernel(), kernel("v1::attend_kernel", max_threads=128))
    assert all_gates["build"] == "passed"
    assert gate.summary.endswith(
        "no spills; story::v1::attend_kernel takes at most 128 threads a block (__launch_bounds__), 384 are promised: "
        "should it run, gate launch will say so on a GPU"
    )


@pytest.mark.parametrize(
    ("kernels", "summary", "hint"),
    [
        ([kernel(max_threads=128)], "story::attend_kernel takes at most 128 threads", "__launch_bounds__ must allow"),
        ([kernel(shared_memory_bytes=49152)], "has 49152 bytes of static shared memory a block, and 40960", "together"),
        ([kernel(registers=255)], "takes 255 registers a thread on L4: 384 threads need 98304", "__launch_bounds__("),
        ([kernel("other")], "no kernel fits *attend_kernel*; what there is: story::other<__half>", "the pattern"),
        ([kernel(target=Target(90))], "there is no code for L4 (sm_89); what there is: sm_90", "LIST=8.9"),
    ],
)
def test_a_library_that_cannot_keep_the_promise_fails(build, kernels, summary, hint):
    gate, all_gates = build(*kernels)
    assert all_gates["build"] == "failed"
    assert summary in gate.summary
    assert hint in gate.hint


def test_a_library_that_nothing_can_read_is_no_failure(build, monkeypatch):
    monkeypatch.setattr(library, "find_cuobjdump", lambda: None)
    gate, all_gates = build(kernel("other"))
    assert all_gates["build"] == "passed"
    assert any("cuobjdump is not here" in line for line in gate.details)


def test_without_the_compiler_nothing_after_the_build_is_possible(build):
    gate, all_gates = build(tail=BUILD.replace("[build]\n", "[build]\nneeds = ['nvcc-of-no-machine']\n"), until=None)
    assert gate.summary == "the build command needs nvcc-of-no-machine, which is not here"
    assert gate.hint == "install it, or put its folder on PATH"
    assert list(all_gates.values()) == ["passed", *["not possible"] * 6]


def test_too_much_shared_memory_is_found_before_anything_is_built(build, tmp_path):
    gate, _ = build(tail=BUILD + PROMISE.replace("40960", "163840"))
    assert gate.summary == "*attend_kernel*: 163840 bytes of shared memory a block promised, L4 has 101376"
    assert gate.hint.startswith("smaller tiles or fewer stages: a block of the L4 can have 99 KiB, and 48 KiB where")
    assert gate.hint.endswith("160 KiB fit A100, H100, B200")
    assert not (tmp_path / "made.so").exists()


def test_too_many_threads_are_found_before_anything_is_built(build, tmp_path):
    gate, _ = build(tail=BUILD + PROMISE.replace("[384, 1, 1]", "[1024, 2, 1]"))
    assert gate.summary == "*attend_kernel*: 2048 threads a block promised, at most 1024 are possible"
    assert not (tmp_path / "made.so").exists()


SAY = "[build]\ncommand = ['{python}', '-c', 'import os; print(os.environ.get(\"TORCH_CUDA_ARCH_LIST\")); exit(1)']\n"


@pytest.mark.parametrize(
    ("tail", "gpus", "expected"),
    [
        (SAY, ["L4", "H200"], "8.9;9.0"),
        (SAY + "gpus = ['B200']", [], "10.0"),
        (SAY + "gpus = ['B200']", ["A100"], "8.0"),
        (SAY, [], "8.0;8.6;8.9;9.0;10.0;12.0"),
    ],
)
def test_the_build_command_is_told_the_architectures(build, monkeypatch, tail, gpus, expected):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert build(tail=tail, gpus=gpus)[0].details == [expected]


def test_a_program_that_the_build_needs_is_on_its_path(build, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "no-such-compiler").write_text("#!/bin/sh\necho 'a.cu(3): error: found'; exit 2\n")
    (tmp_path / "bin" / "no-such-compiler").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    gate, _ = build(tail="[build]\ncommand = \"sh -c no-such-compiler\"\nneeds = ['no-such-compiler']\n")
    assert gate.summary == "the build command exited with status 2: a.cu(3): error: found"
    assert "no-such-compiler" not in os.environ["PATH"]
