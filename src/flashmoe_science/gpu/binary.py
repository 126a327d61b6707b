"""Read what a compiled CUDA library holds, with no GPU present: its kernels, and what each of them takes.

``cuobjdump`` tells registers, stack and static shared memory; the threads a block that ``__launch_bounds__`` allows
stand in the machine code's own notes. How much dynamic shared memory a launch asks for is in no binary.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cuobjdump import Target, demangle, parse_target, parse_usage, run_cuobjdump

_MAX_THREADS, _WITH_SIZE = 0x05, 0x04  # of a note in .nv.info: EIATTR_MAX_THREADS, EIFMT_SVAL
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class BinaryKernel:
    """One kernel's machine code for one architecture."""

    name: str  # as a profiler shows it
    target: Target
    registers: int  # a thread
    stack_bytes: int  # a thread, in local memory: spilled registers, and arrays that no register holds
    shared_memory_bytes: int  # a block, static
    max_threads: int | None  # a block, by __launch_bounds__; None: not said


@dataclass(frozen=True)
class Binary:
    """The device code of one library."""

    kernels: tuple[BinaryKernel, ...]
    ptx: tuple[Target, ...]

    @property
    def targets(self) -> list[Target]:
        """Everything that there is code for, in order."""
        found = {kernel.target for kernel in self.kernels} | set(self.ptx)
        return sorted(found, key=lambda target: (target.is_ptx, target.arch, target.kind))

    def kernels_for(self, arch: int) -> list[BinaryKernel]:
        """Return the machine code that a GPU of ``sm_<arch>`` loads: of each kernel the newest that it can run."""
        best: dict[str, BinaryKernel] = {}
        for kernel in self.kernels:
            known = best.get(kernel.name)
            newer = known is None or (kernel.target.arch, kernel.target.kind) > (known.target.arch, known.target.kind)
            if kernel.target.serves(arch) and newer:
                best[kernel.name] = kernel
        return list(best.values())


def read_binary(path: Path) -> Binary:
    """Read the kernels of a shared object, an object file or an executable.

    Raises:
        CompileError: there is no ``cuobjdump`` here, it finds no device code in the file, or the file is a cubin.
    """
    used = list(parse_usage(run_cuobjdump("--dump-resource-usage", str(path))))
    with tempfile.TemporaryDirectory(prefix="flashmoe-cubins-") as folder:
        run_cuobjdump("--extract-elf", "all", str(path.resolve()), folder=folder, may_fail=True)
        bounds = {
            (arch, symbol): threads
            for cubin in sorted(Path(folder).glob("*.cubin"))
            for arch, symbol, threads in _launch_bounds(cubin)
        }
    kernels = [
        BinaryKernel(
            name=name,
            target=usage.target,
            registers=usage.registers,
            stack_bytes=usage.stack_bytes,
            shared_memory_bytes=usage.shared_memory_bytes,
            max_threads=bounds.get((str(usage.target), usage.symbol)),
        )
        for usage, name in zip(used, demangle([usage.symbol for usage in used]), strict=True)
    ]
    ptx = re.findall(r"\.(sm_\w+)\.ptx", run_cuobjdump("--list-ptx", str(path), may_fail=True))
    return Binary(tuple(kernels), tuple(dict.fromkeys(parse_target(arch, is_ptx=True) for arch in ptx)))


def _launch_bounds(cubin: Path) -> Iterator[tuple[str, str, int]]:
    """Yield architecture, mangled name and threads a block of each kernel in a cubin with ``__launch_bounds__``."""
    named = re.search(r"\.(sm_\w+)\.cubin$", cubin.name)  # as cuobjdump names what it extracts
    data = cubin.read_bytes()
    if named is None or not data.startswith(b"\x7fELF"):
        return
    headers_at = struct.unpack_from("<Q", data, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(data, headers_at + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_at, _, _, _, start, length, *_ in headers:
        name = data[names_at + name_at : data.index(b"\0", names_at + name_at)].decode()
        if name.startswith(".nv.info.") and (threads := _max_threads(data[start : start + length])) is not None:
            yield named[1], name.removeprefix(".nv.info."), threads


def _max_threads(notes: bytes) -> int | None:
    """Return the threads a block that one kernel's notes allow. A note: kind of value, attribute, value."""
    at = 0
    while at + 4 <= len(notes):
        kind, attribute, size = struct.unpack_from("<BBH", notes, at)
        if kind == _WITH_SIZE and attribute == _MAX_THREADS:
            x, y, z = struct.unpack_from("<III", notes, at + 4)
            return int(x * y * z)
        at += 4 + (size if kind == _WITH_SIZE else 0)  # any other kind has its value where the size would be
    return None
