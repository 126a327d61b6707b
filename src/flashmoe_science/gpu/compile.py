"""Compile a kernel for any architecture, with no GPU present, and read what came out.

Triton's package carries ``ptxas`` and ``cuobjdump``, so registers, spills, shared memory and instructions can be read
on any machine. The same call makes the kernels that ``launch.py`` launches: what was checked is what runs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from ..errors import CompileError


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """One specialisation of one kernel: everything that decides its machine code but the architecture."""

    function: Any  # a triton.jit or gluon.jit function
    signature: tuple[tuple[str, str], ...]  # (argument, type) of every argument that is not a constant, in order
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


@functools.lru_cache(maxsize=4096)
def compile_kernel(source: KernelSource, arch: int) -> Any:
    """Return Triton's compiled kernel for ``sm_<arch>``.

    Raises:
        CompileError: Triton or ptxas refuses it, or it needs scratch memory that the launch path does not give.
    """
    names = list(source.function.arg_names)
    constants = dict(source.constants)
    types = dict(source.signature)
    missing = [name for name in names if name not in types and name not in constants]
    if missing:
        raise CompileError(f"{source.name}: arguments without a type or a value: {', '.join(missing)}")
    kind = GluonASTSource if isinstance(source.function, GluonJITFunction) else ASTSource
    unit = kind(
        source.function,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in source.aligned},
    )
    # Fused multiply-add is said here because its default flips in Triton 3.10, and bits must not depend on the version.
    options: dict[str, Any] = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": True,
        "maxnreg": source.max_registers,
    }
    try:
        kernel = triton.compile(unit, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise CompileError(f"{source.name} does not compile for sm_{arch}: {error}") from error
    if kernel.metadata.global_scratch_size:
        raise CompileError(
            f"{source.name} for sm_{arch} asks for {kernel.metadata.global_scratch_size} bytes of scratch memory"
        )
    return kernel


def read_resources(source: KernelSource, arch: int) -> Resources:
    """Compile ``source`` and read its registers, spills, shared memory and instructions."""
    start = time.monotonic()
    kernel = compile_kernel(source, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_cuobjdump()), "--dump-resource-usage", "--dump-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if usage is None or done.returncode:
        raise CompileError(
            f"cuobjdump cannot read {source.name} for sm_{arch}: {done.stderr.strip() or 'no usage printed'}"
        )
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", text, re.MULTILINE)
    return Resources(
        registers=int(usage[1]),
        spill_bytes=int(usage[2]) + int(usage[3]),
        shared_memory_bytes=kernel.metadata.shared,
        instructions=collections.Counter(opcodes),
        seconds=time.monotonic() - start,
    )


@functools.cache
def _cuobjdump() -> pathlib.Path:
    path = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise CompileError(f"Triton {triton.__version__} does not carry cuobjdump", hint="install Triton from a wheel")
    return path
