"""Reading machine code: of a cubin with what cuobjdump prints, and of a library that nvcc makes where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from flashmoe_science import CompileError
from flashmoe_science.gpu import machine_code
from flashmoe_science.gpu.machine_code import TENSOR_CORE_OPCODES, KernelCode

PRINTED = """
Fatbin elf code:
================
arch = sm_80
code version = [1,7]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z5scalePf:
  REG:40 STACK:16 SHARED:64 LOCAL:8 CONSTANT[0]:372 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_80
\t\tFunction : _Z5scalePf
\t.headerflags\t@"EF_CUDA_SM80"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;  /* 0x00000a00ff017624 */
                                                                            /* 0x000fe400078e00ff */
        /*0010*/                   STL [R1], R4 ;                           /* 0x0000680000057a13 */
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;         /* 0x0000000000047919 */
        /*0030*/                   LDL.64 R4, [R1] ;                        /* 0x0000000000047919 */
        /*0040*/              @!P0 BRA 0x20 ;                               /* 0x0000299000008947 */
        /*0050*/               @P1 EXIT ;                                   /* 0x000000000000794d */
        /*0060*/                   BRA 0x60;                                /* 0xfffffff000007947 */
\t\t..........

Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Function _Z5scalePf:
  REG:24 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:372 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_90a
\t\tFunction : _Z5scalePf
        /*0000*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ; /* 0x00000a00ff017624 */
        /*0010*/                   EXIT ;                                    /* 0x000000000000794d */
"""


def test_what_cuobjdump_prints_is_read_by_architecture():
    old, new = machine_code.parse(PRINTED)
    assert (old.name, old.arch, old.registers, old.local_bytes, old.shared_memory_bytes) == (
        "scale(float*)", 80, 40, 24, 64
    )  # fmt: skip
    assert old.opcodes == {"IMAD": 1, "STL": 1, "HMMA": 1, "LDL": 1, "BRA": 2, "EXIT": 1}
    assert (new.arch, new.registers, new.count(TENSOR_CORE_OPCODES)) == (90, 24, 1)
    assert new.shared_memory_bytes == 0  # the driver's own KiB is no part of it


def test_instructions_between_a_jump_backwards_and_its_target_are_in_a_loop():
    """The jump to itself that ends a kernel is none."""
    old, new = machine_code.parse(PRINTED)
    assert old.looped == {"HMMA": 1, "LDL": 1, "BRA": 1}
    assert (old.count({"LDL", "STL"}), old.count({"LDL", "STL"}, in_loops=True)) == (2, 1)
    assert new.looped == {}


@pytest.mark.parametrize(("arch", "expected"), [(90, 90), (86, 80), (80, 80), (100, None), (75, None)])
def test_a_gpu_runs_the_newest_code_of_its_generation(arch, expected):
    found = machine_code.for_arch(machine_code.parse(PRINTED), arch)
    assert [kernel.arch for kernel in found] == ([] if expected is None else [expected])


def code(name: str, arch: int, kind: str = "") -> KernelCode:
    return KernelCode(name, arch, 32, 0, 0, {}, {}, kind)


def test_each_kernel_has_the_newest_code_of_its_own_that_the_gpu_can_run():
    everywhere, old, special = code("everywhere", 89), code("old", 80), code("special", 100, "a")
    kernels = [code("everywhere", 80), everywhere, old, special, code("both", 90), code("both", 90, "a")]
    assert machine_code.for_arch(kernels, 89) == [everywhere, old]
    assert machine_code.for_arch(kernels, 100) == [special]
    assert machine_code.for_arch(kernels, 103) == []
    assert [kernel.kind for kernel in machine_code.for_arch(kernels, 90)] == ["a"]


def test_code_for_one_architecture_alone_is_read_as_such():
    assert [kernel.kind for kernel in machine_code.parse(PRINTED) if kernel.arch == 90] == ["a"]


def test_a_file_that_is_no_library_is_an_error_and_one_without_kernels_has_none(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(CompileError, match=r"text\.so cannot be read"):
        machine_code.read_file(tmp_path / "text.so")
    program = shutil.which("true")
    assert program is not None
    shutil.copy(program, tmp_path / "host_only")
    assert machine_code.read_file(tmp_path / "host_only") == []


SOURCE = """
__global__ void spill(float* x, int n) {
    float local[64];
    for (int i = 0; i < 64; i++) local[i] = x[i];
    for (int j = 0; j < n; j++) local[(j * n) % 64] += x[j];  // an index known at run time only: local memory
    for (int i = 0; i < 64; i++) x[i] = local[i];
}
template <int N> __global__ void plain(float* x) { x[threadIdx.x] *= N; }
void launch(float* x) { spill<<<1, 32>>>(x, 4); plain<3><<<1, 32>>>(x); }
"""


@pytest.mark.needs("nvcc", shutil.which("nvcc") is not None, "needs nvcc")
def test_a_library_of_nvcc_is_read(tmp_path):
    (tmp_path / "spill.cu").write_text(SOURCE)
    target = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"]
    command = ["nvcc", *target, "-shared", "-Xcompiler", "-fPIC", "-o", "spill.so", "spill.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = machine_code.for_arch(machine_code.read_file(tmp_path / "spill.so"), 90)
    kernels = {kernel.name: kernel for kernel in found}
    spill, plain = kernels["spill(float*, int)"], kernels["void plain<3>(float*)"]
    assert spill.local_bytes >= 256
    assert spill.count({"LDL", "STL"}, in_loops=True) > 0
    assert (plain.local_bytes, plain.count({"LDL", "STL"})) == (0, 0)
