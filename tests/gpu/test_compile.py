"""Compiling without a GPU sees what would make a kernel slow or impossible: the build gate can fail."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl
from triton.backends.nvidia import compiler as nvidia_compiler

from flashmoe_science import CompileError
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig, Plan
from flashmoe_science.gpu.compile import KernelSource, compile_kernel, read_resources
from flashmoe_science.gpu.planning import PlannedLaunch
from flashmoe_science.gpu.specs import OLDEST_TRITON
from flashmoe_science.operators.attention import compile_plan

pytestmark = pytest.mark.triton


@triton.jit
def _hoard_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Hold a whole tile in registers: the maximum of a column is known only when all of it was read."""
    offs = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.exp(x - tl.max(x, 0)[None, :]))


@triton.jit
def _nonsense_kernel(x_ptr, SIZE: tl.constexpr):
    """Hold an instruction that no GPU has."""
    offs = tl.arange(0, SIZE)
    x = tl.inline_asm_elementwise("nonsense $0, $1;", "=r,r", [offs], tl.int32, is_pure=False, pack=1)
    tl.store(x_ptr + offs, x)


def hoard(rows: int, **more) -> KernelSource:
    pointers = (("x_ptr", "*fp32"), ("y_ptr", "*fp32"))
    return KernelSource(
        _hoard_kernel, pointers, (("ROWS", rows), ("COLS", 32)), frozenset({"x_ptr", "y_ptr"}), 1, **more
    )


def test_spills_are_seen():
    """One warp with 256 floats a thread has to put some of them away; with 32 it has not."""
    spilling, fitting = read_resources(hoard(256), 90), read_resources(hoard(32), 90)
    assert spilling.spill_bytes > 0
    assert fitting.spill_bytes == 0
    assert fitting.registers < 255


def test_instructions_are_counted():
    found = read_resources(hoard(32), 90)
    assert found.instructions["MUFU"] >= 32  # one exponential an element
    assert found.instructions["EXIT"] >= 1
    assert "HMMA" not in found.instructions
    assert found.seconds > 0


def test_registers_stay_below_a_limit_that_is_given():
    free, limited = read_resources(hoard(128), 90), read_resources(hoard(128, max_registers=64), 90)
    assert free.registers > 64
    assert limited.registers <= 64
    assert limited.spill_bytes > 0


@pytest.mark.parametrize("arch", OLDEST_TRITON)
def test_every_architecture_of_the_table_compiles(arch):
    installed = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if installed < OLDEST_TRITON[arch]:
        with pytest.raises(CompileError, match=f"'sm_{arch}a?' is not defined"):
            compile_kernel(hoard(32), arch)
    else:
        assert compile_kernel(hoard(32), arch).asm["cubin"]


def test_an_argument_without_type_or_value_is_named():
    source = dataclasses.replace(hoard(32), constants=(("ROWS", 32),))
    with pytest.raises(CompileError, match="_hoard_kernel: arguments without a type or a value: COLS"):
        compile_kernel(source, 90)


def test_what_triton_refuses_is_a_compile_error():
    with pytest.raises(CompileError, match="_hoard_kernel does not compile for sm_90"):
        compile_kernel(hoard(33), 90)  # not a power of two


def test_what_ptxas_refuses_is_told_without_the_ptx(capfd):
    """Triton would print all of the PTX to stdout, where a command's data goes."""
    constants, pointers = (("SIZE", 128),), (("x_ptr", "*fp32"),)
    with pytest.raises(CompileError) as caught:
        compile_kernel(
            KernelSource(_nonsense_kernel, pointers, constants, frozenset({"x_ptr"}), 1, max_registers=64), 90
        )
    message = str(caught.value)
    assert message.startswith("_nonsense_kernel does not compile for sm_90 with num_warps 1, num_stages 1,")
    assert "maxnreg 64: ptxas" in message
    assert "Not a name of any known instruction: 'nonsense'" in message
    assert "--gpu-name=sm_90a" in caught.value.hint
    assert len(message.splitlines()) <= 10
    assert ".visible .entry" not in message + capfd.readouterr().out


def test_a_flood_of_complaints_is_cut(monkeypatch):
    log = "\n".join(["ptxas info    : 0 bytes gmem", *(f"ptxas error : line {number}" for number in range(100))])
    text = f"PTXAS error: it failed\n`ptxas` stderr:\n{log}\n\nRepro command: ptxas --gpu-name=sm_90 x.ptx\n"

    def refuse(*_arguments, **_options):
        raise RuntimeError(text)

    monkeypatch.setattr(triton, "compile", refuse)
    with pytest.raises(CompileError) as caught:
        compile_kernel(hoard(16), 90)
    lines = str(caught.value).splitlines()
    assert len(lines) == 10
    assert lines[0].endswith("ptxas error : line 0")
    assert lines[-2] == "and 92 lines more"


def test_the_ptx_of_another_kernel_is_printed_as_ever(capsys):
    nvidia_compiler.print("`ptxas` stderr: of a kernel that is not ours")
    assert "not ours" in capsys.readouterr().out


def test_machine_code_that_cannot_be_read_is_a_compile_error(monkeypatch):
    monkeypatch.setattr(compile_kernel(hoard(32), 90), "asm", {"cubin": b"no machine code"})
    with pytest.raises(CompileError, match="_hoard_kernel for sm_90 cannot be read: "):
        read_resources(hoard(32), 90)


def test_resources_never_come_without_instructions():
    """Triton 3.6 compiles for sm_103, and its cuobjdump prints registers and then fails at the instructions."""
    with contextlib.suppress(CompileError):
        assert read_resources(hoard(32), 103).instructions["EXIT"] >= 1


def make_plan(arch: int, config: ForwardConfig, head_dim: int) -> Plan:
    problem = AttentionProblem(1, 1, 1, 1000, 1000, head_dim, head_dim, "fp16")
    launches = (PlannedLaunch("_forward_kernel", (1, 1, 1), (32 * config.num_warps, 1, 1)),)
    return Plan(problem, f"sm_{arch}", arch, "forward_triton", config, launches, "test")


def test_a_plan_that_spills_has_a_problem():
    (outcome,) = compile_plan(make_plan(80, ForwardConfig(128, 64, 4, 2), 256))
    assert outcome.spill_bytes > 0
    assert f"{outcome.spill_bytes} bytes of registers a thread spill to local memory, 0 are allowed" in outcome.problems


def test_a_plan_that_exceeds_shared_memory_has_a_problem():
    """A tile of Hopper on an L4."""
    (outcome,) = compile_plan(make_plan(89, ForwardConfig(64, 64, 8, 4), 256))
    assert outcome.shared_memory_bytes > 101376
    assert f"{outcome.shared_memory_bytes} bytes of shared memory a block, sm_89 allows 101376" in outcome.problems


def test_a_plan_without_the_matrix_instruction_has_a_problem():
    """The matrix instruction of sm_90 is one of four warps, and this block has two."""
    (outcome,) = compile_plan(make_plan(90, ForwardConfig(64, 64, 2, 2), 64))
    assert any("no HGMMA instruction: the matrix units are not used" in problem for problem in outcome.problems)


def test_a_good_plan_has_none():
    (outcome,) = compile_plan(make_plan(90, ForwardConfig(64, 64, 4, 2), 64))
    assert outcome.problems == ()
    assert outcome.instructions["HGMMA"] > 0
