"""Read what a compiled CUDA library holds, with no GPU present: its kernels, and what each of them takes.

``cuobjdump`` tells registers, stack and static shared memory; the threads a block that ``__launch_bounds__`` allows
stand in the machine code's own notes. How much dynamic shared memory a launch asks for is in no binary.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError

# From sm_90 on, the driver keeps 1 KiB of each block's shared memory for itself, and compilers count it as static.
# It is no part of the limits in specs.py, and no profiler shows it (seen with ptxas 12.8, 12.9 and 13.0).
_RESERVED_BYTES = 1024
_RESERVED_FROM_ARCH = 90
_MAX_THREADS, _WITH_SIZE = 0x05, 0x04  # of a note in .nv.info: EIATTR_MAX_THREADS, EIFMT_SVAL
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_CUDA_FOLDERS = ("CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Target:
    """What some code in a library was made for."""

    arch: int  # 90 for sm_90
    kind: str = ""  # "a": this architecture alone; "f": its family
    is_ptx: bool = False  # the driver compiles it for any architecture from this one on

    def serves(self, arch: int) -> bool:
        """Return whether a GPU of ``sm_<arch>`` can run it."""
        if self.kind == "a":
            return self.arch == arch
        return self.arch <= arch and ((self.is_ptx and not self.kind) or self.arch // 10 == arch // 10)

    def __str__(self) -> str:
        return f"{'compute' if self.is_ptx else 'sm'}_{self.arch}{self.kind}"


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


def find_program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, or of any on PATH; None where there is none.

    The toolkit is looked for on PATH, in ``CUDA_HOME`` and ``CUDA_PATH``, and where its installer puts it.
    """
    folders = [Path(os.environ[key]) / "bin" for key in _CUDA_FOLDERS if os.environ.get(key)]
    places = [*folders, Path("/usr/local/cuda/bin")]
    return shutil.which(name) or next((str(p / name) for p in places if os.access(p / name, os.X_OK)), None)


def find_cuobjdump() -> str | None:
    """Return the path of ``cuobjdump``: the toolkit's, or the one that Triton carries."""
    if (found := find_program("cuobjdump")) is not None:
        return found
    spec = importlib.util.find_spec("triton")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    carried = [Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump" for folder in folders]
    return next((str(path) for path in carried if os.access(path, os.X_OK)), None)


def read_binary(path: Path) -> Binary:
    """Read the kernels of a shared object, an object file or an executable.

    Raises:
        CompileError: there is no ``cuobjdump`` here, it finds no device code in the file, or the file is a cubin.
    """
    usage = _cuobjdump("--dump-resource-usage", str(path))
    with tempfile.TemporaryDirectory(prefix="flashmoe-cubins-") as folder:
        _cuobjdump("--extract-elf", "all", str(path.resolve()), folder=folder, may_fail=True)
        bounds = {
            (arch, kernel): threads
            for cubin in sorted(Path(folder).glob("*.cubin"))
            for arch, kernel, threads in _launch_bounds(cubin)
        }
    kernels = list(_kernels(usage, bounds))
    names = demangle([kernel.name for kernel in kernels])
    ptx = re.findall(r"\.(sm_\w+)\.ptx", _cuobjdump("--list-ptx", str(path), may_fail=True))
    return Binary(
        tuple(BinaryKernel(**{**vars(kernel), "name": name}) for kernel, name in zip(kernels, names, strict=True)),
        tuple(dict.fromkeys(_target(arch, is_ptx=True) for arch in ptx)),
    )


def _kernels(usage: str, bounds: dict[tuple[str, str], int]) -> Iterator[BinaryKernel]:
    """Yield the kernels in the output of ``cuobjdump --dump-resource-usage``, with mangled names."""
    arch = ""
    line = re.compile(r"arch = (sm_\w+)|Function ([^\s:]+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
    for found in line.finditer(usage):
        if found[1]:
            arch = found[1]
            continue
        target = _target(arch)
        reserved = _RESERVED_BYTES if target.arch >= _RESERVED_FROM_ARCH else 0
        yield BinaryKernel(
            name=found[2],
            target=target,
            registers=int(found[3]),
            stack_bytes=int(found[4]) + int(found[6]),
            shared_memory_bytes=max(0, int(found[5]) - reserved),
            max_threads=bounds.get((arch, found[2])),
        )


def _target(arch: str, *, is_ptx: bool = False) -> Target:
    """Return ``sm_90a`` as a target."""
    found = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if found is None:  # of a cubin by itself cuobjdump tells none
        hint = "a cubin is not enough: name the library or object file that holds it"
        raise CompileError(f"an architecture must read like sm_90 or sm_90a, got {arch!r}", hint=hint)
    return Target(int(found[1]), found[2], is_ptx)


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


def _cuobjdump(*arguments: str, folder: str | None = None, may_fail: bool = False) -> str:
    """Run ``cuobjdump`` and return what it prints."""
    program = find_cuobjdump()
    if program is None:
        raise CompileError("cuobjdump is not here, which reads what was compiled", hint="install the CUDA toolkit")
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"cuobjdump ended with status {done.returncode}"]
        raise CompileError(f"{Path(arguments[-1]).name} cannot be read: {_said(said[0])}")
    return done.stdout


def _said(line: str) -> str:
    """Return a complaint of cuobjdump without its own name and the file's folders."""
    return re.sub(r"'[^']*/([^'/]+)'", r"'\1'", line.partition(": ")[2].strip() or line)


def demangle(names: list[str]) -> list[str]:
    """Return C++ names as a profiler shows them; a name that is none of C++ stays, and all where nothing can."""
    function = _demangler()
    if function is None:
        return names
    shown = []
    for name in names:
        status = ctypes.c_int(-1)
        text = function(name.encode(), None, None, ctypes.byref(status)) if name.startswith("_Z") else None
        shown.append(ctypes.string_at(text).decode() if text and status.value == 0 else name)
        if text:
            ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return shown


@functools.cache
def _demangler() -> Any:
    """Return ``__cxa_demangle`` of the C++ library that torch needs anyway."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("stdc++") or "libstdc++.so.6")
    except OSError:
        return None
    function = library["__cxa_demangle"]
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return function
