"""Run ``cuobjdump`` of the CUDA toolkit or of Triton, and read the resources that it tells of each kernel."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError

# From sm_90 on, the driver keeps 1 KiB of each block's shared memory for itself, and compilers count it as static.
# It is no part of the limits in specs.py, and no profiler shows it (seen with ptxas 12.8, 12.9 and 13.0).
_RESERVED_BYTES = 1024
_RESERVED_FROM_ARCH = 90
_CUDA_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
_TIMEOUT_S = 120.0


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
class Usage:
    """What one kernel takes on one architecture."""

    target: Target
    symbol: str  # its name in the file: mangled, of C++
    registers: int  # a thread
    stack_bytes: int  # a thread, in local memory: spilled registers, and arrays that no register holds
    shared_memory_bytes: int  # a block, static


def find_program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, or of any on PATH; None where there is none.

    The toolkit is looked for on PATH, in ``CUDA_HOME`` and ``CUDA_PATH``, and where its installer puts it.
    """
    folders = [Path(os.environ[key]) / "bin" for key in _CUDA_FOLDERS if os.environ.get(key)]
    places = [*folders, Path("/usr/local/cuda/bin")]
    return shutil.which(name) or next((str(p / name) for p in places if os.access(p / name, os.X_OK)), None)


@functools.cache
def find_cuobjdump() -> str | None:
    """Return the path of the newest ``cuobjdump`` among the toolkit's and the one that Triton carries; None without.

    An older one may fail to read what a newer compiler wrote, and not the other way round.
    """
    spec = importlib.util.find_spec("triton")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    carried = [Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump" for folder in folders]
    found = [str(path) for path in carried if os.access(path, os.X_OK)]
    if (of_toolkit := find_program("cuobjdump")) is not None:
        found.append(of_toolkit)
    return max(found, key=_release, default=None)


def _release(program: str) -> tuple[int, ...]:
    """Return the release that a program of the toolkit says it is of; nothing where it does not say."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return tuple(map(int, release.groups())) if release else ()


def run_cuobjdump(*arguments: str, folder: str | None = None, may_fail: bool = False, what: str = "") -> str:
    """Run ``cuobjdump`` and return what it prints.

    Args:
        arguments: options; the last one is the file.
        folder: to run it in, where it extracts files to.
        may_fail: whether a file that it cannot read, or that holds no device code, is no error.
        what: the file's name in errors, if another than its own.

    Raises:
        CompileError: there is none here, it takes too long, or it fails.
    """
    program, name = find_cuobjdump(), what or Path(arguments[-1]).name
    if program is None:
        hint = "install the CUDA toolkit, or Triton from a wheel"
        raise CompileError("cuobjdump is not here, which reads what was compiled", hint=hint)
    command = [program, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"cuobjdump did not read {name} within {_TIMEOUT_S:g} s") from error
    if done.returncode and not may_fail:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CompileError(f"{name} cannot be read: {_said(lines[0]) if lines else f'status {done.returncode}'}")
    return done.stdout


def _said(line: str) -> str:
    """Return a complaint of cuobjdump without its own name and the file's folders."""
    return re.sub(r"'[^']*/([^'/]+)'", r"'\1'", line.partition(": ")[2].strip() or line)


_LINE = re.compile(r"arch = (sm_\w+)|Function ([^\s:]+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def parse_usage(text: str, of: Target | None = None) -> Iterator[Usage]:
    """Yield the kernels in what ``cuobjdump --dump-resource-usage`` printed.

    Args:
        text: what it printed.
        of: what the file was made for, where the text does not say: of a cubin by itself it does not.
    """
    target = of
    for found in _LINE.finditer(text):
        if found[1]:
            target = parse_target(found[1])
            continue
        if target is None:
            hint = "a cubin is not enough: name the library or object file that holds it"
            raise CompileError("an architecture must read like sm_90 or sm_90a, got ''", hint=hint)
        reserved = _RESERVED_BYTES if target.arch >= _RESERVED_FROM_ARCH else 0
        yield Usage(
            target=target,
            symbol=found[2],
            registers=int(found[3]),
            stack_bytes=int(found[4]) + int(found[6]),
            shared_memory_bytes=max(0, int(found[5]) - reserved),
        )


def parse_target(arch: str, *, is_ptx: bool = False) -> Target:
    """Return ``sm_90a`` as a target. Raises ``CompileError``."""
    found = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if found is None:
        raise CompileError(f"an architecture must read like sm_90 or sm_90a, got {arch!r}")
    return Target(int(found[1]), found[2], is_ptx)


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
