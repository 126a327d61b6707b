"""What is read from a compiled library: from cuobjdump's text, and from machine code that Triton's own ptxas makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashmoe_science.errors import CompileError
from flashmoe_science.gpu import binary, cuobjdump
from flashmoe_science.gpu.binary import Binary, BinaryKernel, read_binary
from flashmoe_science.gpu.cuobjdump import Target, demangle, find_cuobjdump, parse_usage

# As printed by cuobjdump 13.0 for a library of two kernels.
USAGE = """
Fatbin elf code:
================
arch = sm_75
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0

Fatbin elf code:
================
arch = sm_89
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN5story2v113attend_kernelI6__halfEEvNS_4ArgsE:
  REG:40 STACK:0 SHARED:528 LOCAL:0 CONSTANT[0]:416 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN5story2v113attend_kernelI6__halfEEvNS_4ArgsE:
  REG:32 STACK:8 SHARED:1552 LOCAL:4 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
MANGLED = "_ZN5story2v113attend_kernelI6__halfEEvNS_4ArgsE"

BOUNDED_PTX = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry bounded() .maxntid 384, 1, 1 { ret; }
.visible .entry free() { ret; }
"""


def kernel(name="k", arch=90, kind="", **more):
    numbers = {"registers": 32, "stack_bytes": 0, "shared_memory_bytes": 0, "max_threads": None}
    return BinaryKernel(name=name, target=Target(arch, kind), **{**numbers, **more})


def test_registers_stack_and_static_shared_memory_are_read():
    old, new = parse_usage(USAGE)
    assert (old.symbol, old.target, old.registers, old.stack_bytes) == (MANGLED, Target(89), 40, 0)
    assert (new.symbol, new.target, new.registers, new.stack_bytes) == (MANGLED, Target(90, "a"), 32, 12)
    # The driver's own 1024 bytes of sm_90 are no part of what the kernel declares.
    assert (old.shared_memory_bytes, new.shared_memory_bytes) == (528, 528)


def test_names_are_shown_as_a_profiler_shows_them():
    shown = "void story::v1::attend_kernel<__half>(story::Args)"
    assert demangle([MANGLED, "_attend_kernel", "_Zwrong"]) == [shown, "_attend_kernel", "_Zwrong"]


@pytest.mark.parametrize(
    ("target", "serves", "refuses"),
    [
        (Target(80), [80, 86, 89], [75, 90, 100]),
        (Target(90), [90], [89, 100]),
        (Target(90, "a"), [90], [100]),
        (Target(100), [100, 103], [90, 120]),
        (Target(100, "f"), [100, 103], [120]),
        (Target(80, is_ptx=True), [80, 90, 120], [75]),
        (Target(90, "a", is_ptx=True), [90], [100]),
    ],
)
def test_which_gpus_can_run_which_code(target, serves, refuses):
    assert [target.serves(arch) for arch in serves] == [True] * len(serves)
    assert [target.serves(arch) for arch in refuses] == [False] * len(refuses)


def test_a_gpu_loads_the_newest_code_that_it_can_run():
    library = Binary((kernel(arch=80), kernel(arch=86), kernel(arch=90)), (Target(90, is_ptx=True),))
    assert [k.target.arch for k in library.kernels_for(89)] == [86]
    assert library.kernels_for(100) == []
    assert list(map(str, library.targets)) == ["sm_80", "sm_86", "sm_90", "compute_90"]


@pytest.mark.triton
def test_threads_of_launch_bounds_are_read_from_machine_code(tmp_path):
    ptxas = Path(find_cuobjdump() or "").with_name("ptxas")
    if not ptxas.exists():
        pytest.skip("there is no ptxas beside cuobjdump")
    (tmp_path / "a.ptx").write_text(BOUNDED_PTX)
    cubin = tmp_path / "a.1.sm_90.cubin"  # as cuobjdump names what it takes out of a library
    subprocess.run([ptxas, "-arch=sm_90", tmp_path / "a.ptx", "-o", cubin], check=True)
    assert list(binary._launch_bounds(cubin)) == [("sm_90", "bounded", 384)]
    with pytest.raises(CompileError, match="name the library or object file that holds it"):
        read_binary(cubin)


@pytest.mark.triton
def test_a_file_without_kernels_is_refused(tmp_path):
    (tmp_path / "a.so").write_text("no library")
    with pytest.raises(CompileError, match=r"a\.so cannot be read: .*'a\.so'"):
        read_binary(tmp_path / "a.so")


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cuobjdump, "find_cuobjdump", lambda: None)
    with pytest.raises(CompileError, match="cuobjdump is not here"):
        read_binary(tmp_path / "a.so")


def test_a_program_of_the_toolkit_is_found_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "no-such-compiler"
    program.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuobjdump.find_program("no-such-compiler") is None
    program.chmod(0o755)
    assert cuobjdump.find_program("no-such-compiler") == str(program)


def test_the_newest_cuobjdump_is_taken(tmp_path, monkeypatch):
    """An older toolkit on PATH may fail to read what a newer compiler wrote."""
    carried = find_cuobjdump.__wrapped__()
    if carried is None:
        pytest.skip("there is no cuobjdump here")
    program = tmp_path / "cuobjdump"
    monkeypatch.setattr(cuobjdump, "find_program", lambda name: str(program))
    for release, expected in (("9.2", carried), ("99.0", str(program))):
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        program.chmod(0o755)
        assert find_cuobjdump.__wrapped__() == expected
