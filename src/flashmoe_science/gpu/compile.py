"""Compile a kernel for any architecture, with no GPU present, and read what came out.

Triton's package carries ``ptxas`` and ``cuobjdump``, so registers, spills, shared memory and instructions can be read
on any machine. The same call makes the kernels that ``launch.py`` launches: what was checked is what runs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from ..errors import CompileError
from . import machine_code
from .machine_code import KernelCode
from .specs import find_gpu, shared_memory_limit

_PTXAS_LINES = 8  # of its complaints in an error's message: the first is mostly the cause of the others
ALIGNMENT = [["tt.divisibility", 16]]  # of an argument of ``aligned``
_compiling = threading.local()  # ``here`` while this thread compiles a kernel of ours


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """One specialisation of one kernel: everything that decides its machine code but the architecture."""

    function: Any  # a triton.jit or gluon.jit function
    # (argument, type) of every argument that is not a constant, in order. A field of a group is "group.field".
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: frozenset[str]  # arguments that are multiples of 16 (bytes for pointers)
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None  # a thread; None leaves it to ptxas
    dependent_launch: bool = False  # it waits for the kernel before it by itself (griddepcontrol.wait), sm_90 and newer

    @property
    def name(self) -> str:
        """The kernel's name in a profiler."""
        return str(self.function.__name__)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    registers: int  # a thread
    spill_bytes: int  # local memory a thread
    shared_memory_bytes: int  # a block
    instructions: Mapping[str, int]  # opcode without modifiers -> count in the machine code
    seconds: float  # what compiling took


def compile_options(source: KernelSource) -> dict[str, Any]:
    """Return the options that Triton is given."""
    # Fused multiply-add is said here because its default flips in Triton 3.10, and bits must not depend on the version.
    return {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": True,
        "maxnreg": source.max_registers,
    }


@functools.lru_cache(maxsize=4096)
def compile_kernel(source: KernelSource, arch: int) -> Any:
    """Return Triton's compiled kernel for ``sm_<arch>``.

    Raises:
        CompileError: Triton or ptxas refuses it, or it needs scratch memory that the launch path does not give.
    """
    groups = parameter_groups(source.function)
    constants, types = dict(source.constants), dict(source.signature)
    places = {
        name: place
        for i, (parameter, group) in enumerate(groups.items())
        for name, place in _places_of(parameter, i, group)
    }
    missing = [name for name in places if name not in types and name not in constants]
    if missing:
        raise CompileError(f"{source.name}: arguments without a type or a value: {', '.join(missing)}")

    def type_of(name: str) -> str:
        return "constexpr" if name in constants else types[name]

    kind = GluonASTSource if isinstance(source.function, GluonJITFunction) else ASTSource
    unit = kind(
        source.function,
        {
            name: group(*(type_of(f"{name}.{field}") for field in group._fields)) if group else type_of(name)
            for name, group in groups.items()
        },
        {places[name]: value for name, value in constants.items()},
        {place: ALIGNMENT for name, place in places.items() if name in source.aligned},
    )
    options = compile_options(source)
    _compiling.here = True
    try:
        kernel = triton.compile(unit, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        what, hint = _what_failed(str(error))
        given = ", ".join(f"{name} {value}" for name, value in options.items())
        raise CompileError(f"{source.name} does not compile for sm_{arch} with {given}: {what}", hint=hint) from error
    finally:
        _compiling.here = False
    if kernel.metadata.global_scratch_size:
        raise CompileError(
            f"{source.name} for sm_{arch} asks for {kernel.metadata.global_scratch_size} bytes of scratch memory"
        )
    return kernel


def parameter_groups(function: Any) -> dict[str, Any]:
    """Return the parameters of a kernel in order, each with the ``NamedTuple`` of its fields, or None."""
    annotations = function.fn.__annotations__
    groups = {}
    for name in function.arg_names:
        kind = annotations.get(name)
        kind = function.fn.__globals__.get(kind) if isinstance(kind, str) else kind
        groups[name] = kind if hasattr(kind, "_fields") else None
    return groups


def parameter_names(function: Any) -> tuple[str, ...]:
    """Return the names of a kernel's parameters in order; of a group its fields, ``group.field``."""
    return tuple(
        name for parameter, group in parameter_groups(function).items() for name, _ in _places_of(parameter, 0, group)
    )


def _places_of(parameter: str, index: int, group: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names of a parameter's values, and where Triton looks for each."""
    if group is None:
        return [(parameter, (index,))]
    return [(f"{parameter}.{field}", (index, i)) for i, field in enumerate(group._fields)]


def grouped(function: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a kernel from values by name, with those of a group in its ``NamedTuple``."""
    return {
        name: group(*(values[f"{name}.{field}"] for field in group._fields)) if group else values[name]
        for name, group in parameter_groups(function).items()
    }


def _what_failed(text: str) -> tuple[str, str]:
    """Return what ptxas complained of and how to repeat it; any other text as it is."""
    said = re.search(r"`ptxas` stderr:\n(.*?)\n\s*Repro command: ([^\n]*)", text, re.DOTALL)
    if said is None:
        return text, ""
    lines = [line for line in said[1].splitlines() if line.strip() and not re.match(r"ptxas\S* info", line)]
    more = [f"and {len(lines) - _PTXAS_LINES} lines more"] if len(lines) > _PTXAS_LINES else []
    return "\n".join([*lines[:_PTXAS_LINES], *more]), f"the PTX is kept, and this repeats it: {said[2]}"


def _print_without_ptx(*values: object, **options: Any) -> None:
    """Print for Triton's compiler, but not the whole PTX of a kernel of ours that ptxas refused."""
    if not (getattr(_compiling, "here", False) and any("`ptxas` stderr:" in str(value) for value in values)):
        print(*values, **options)  # noqa: T201 - Triton's own printing


# Triton prints it to stdout, thousands of lines, beside raising an error. Other threads' kernels are printed as ever.
nvidia_compiler.print = _print_without_ptx


def read_resources(source: KernelSource, arch: int) -> Resources:
    """Compile ``source`` and read its registers, spills, shared memory and instructions."""
    start = time.monotonic()
    kernel = compile_kernel(source, arch)
    code = read_code(kernel, source.name, arch)
    return Resources(
        registers=code.registers,
        spill_bytes=code.local_bytes,
        shared_memory_bytes=kernel.metadata.shared,
        instructions=code.opcodes,
        seconds=time.monotonic() - start,
    )


def read_code(kernel: Any, name: str, arch: int) -> KernelCode:
    """Return the machine code of a kernel that ``compile_kernel`` made. Raises ``CompileError``."""
    found = machine_code.read_cubin(kernel.asm["cubin"], f"{name} for sm_{arch}")
    if len(found) != 1:
        raise CompileError(f"cuobjdump cannot read {name} for sm_{arch}: {len(found)} kernels, expected 1")
    return found[0]


@dataclasses.dataclass(frozen=True)
class KernelOutcome:
    """What compiling one kernel for one GPU showed."""

    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    seconds: float
    problems: tuple[str, ...]
    instructions: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)


def check_kernel(
    source: KernelSource, arch: int, gpu: str, *, most_spilled: int = 0, instruction: str = ""
) -> KernelOutcome:
    """Compile a kernel, and compare it with what a block gets and what is promised.

    Args:
        source: the kernel.
        arch: 90 for sm_90.
        gpu: what messages call the GPU.
        most_spilled: bytes of local memory a thread that it may use.
        instruction: opcode without modifiers that it has to have, as an fnmatch pattern; empty for none.

    Raises:
        CompileError: it does not compile.
    """
    found, limit = read_resources(source, arch), shared_memory_limit(arch)
    problems = []
    if found.spill_bytes > most_spilled:
        problems.append(
            f"{found.spill_bytes} bytes of registers a thread spill to local memory, {most_spilled} are allowed"
        )
    if found.shared_memory_bytes > limit:
        problems.append(f"{found.shared_memory_bytes} bytes of shared memory a block, {gpu} allows {limit}")
    if instruction and not fnmatch.filter(found.instructions, instruction):
        problems.append(f"no {instruction.strip('*')} instruction: the matrix units are not used")
    return KernelOutcome(
        found.registers,
        found.spill_bytes,
        found.shared_memory_bytes,
        found.seconds,
        tuple(problems),
        found.instructions,
    )


@dataclasses.dataclass(frozen=True)
class KernelJob:
    """One kernel to compile for one GPU: what ``compile_jobs`` returns for kernels in Triton and Gluon."""

    label: str  # e.g. "my_kernel fp16 BLOCK=1024"
    gpu: str  # e.g. "L4"
    source: KernelSource
    most_spilled: int = 0  # bytes of local memory a thread that it may use
    instruction: str = ""  # that it has to have, as ``check_kernel`` takes it

    def run(self) -> KernelOutcome:
        """Compile it, and compare it with what the GPU gives a block. Raises ``CompileError``."""
        spec = find_gpu(self.gpu)
        return check_kernel(
            self.source, spec.arch, spec.name, most_spilled=self.most_spilled, instruction=self.instruction
        )
