"""The lean launch path of a compiled kernel: the driver's own launch call, with everything but the pointers prepared.

``kernel[grid](...)`` of Triton inspects every argument of every call to find a specialisation, and takes three times as
long as the launch itself. Here a problem is matched once (``attention/api.py``), its kernel loaded once, and a call
writes four or five addresses into a prepared parameter block. No C compiler is needed: Triton's launcher is not built.

Measured on one H200's host in one run (lab/launch_path.txt): Triton's call 45 us, its compiled kernel called directly
14.6 us, this 7.1 us.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import CompileError, LaunchError
from .compile import KernelSource, compile_kernel

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU yet
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DEPENDENT_LAUNCH_IN_GRAPHS = 12030
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CTYPES: dict[str, Callable[..., Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of the driver API."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_memory_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` of the driver API: an id and a union of 64 bytes, of which an int is used here."""

    _fields_ = (("id", ctypes.c_uint), ("_pad", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_byte * 60))


@functools.cache
def _driver() -> ctypes.CDLL:
    # CDLL gives the interpreter lock away: a launch waits where the GPU's queue is full.
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    driver.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    driver.cuDevicePrimaryCtxRetain.argtypes = [ctypes.c_void_p, ctypes.c_int]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    driver.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.c_void_p]
    driver.cuDriverGetVersion.argtypes = [ctypes.c_void_p]
    driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return driver


@functools.cache
def _driver_version() -> int:
    """Return the CUDA version of the driver, e.g. 13000 for 13.0."""
    version = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(version)), "cannot ask the driver for its version")
    return version.value


@functools.cache
def _primary_context(device: int) -> int:
    """Return the context of ``device`` that torch uses too; it is kept for the life of the process."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), f"there is no CUDA device {device}")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"cannot use CUDA device {device}")
    return context.value or 0


@contextlib.contextmanager
def _current_context(device: int) -> Iterator[None]:
    """Make ``device`` current in this thread, and then again what was."""
    before = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(before)), "cannot ask for the current CUDA context")
    _check(_driver().cuCtxSetCurrent(_primary_context(device)), f"cannot use CUDA device {device}")
    try:
        yield
    finally:
        _driver().cuCtxSetCurrent(before)


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread load a module while one of its streams is captured: loading touches no stream."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cannot relax the capture mode")
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{what}: {text.value.decode() if text.value else 'unknown error'} (CUDA error {code})")


@functools.lru_cache(maxsize=4096)
def _load_function(source: KernelSource, arch: int, device: int) -> tuple[int, int]:
    """Load the machine code on ``device`` and return (function handle, shared memory bytes)."""
    kernel = compile_kernel(source, arch)
    count_parameters(source, kernel.asm["ptx"])
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _current_context(device), _relaxed_capture():
        _check(_driver().cuModuleLoadData(ctypes.byref(module), kernel.asm["cubin"]), f"cannot load {source.name}")
        name = kernel.metadata.name.encode()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name), f"cannot find {source.name}")
        shared = kernel.metadata.shared
        _check(
            _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, shared),
            f"{source.name} needs {shared} bytes of shared memory a block",
        )
    return function.value or 0, shared


def count_parameters(source: KernelSource, ptx: str) -> None:
    """Check that the kernel takes the arguments of ``source.signature`` and Triton's two scratch pointers, no more.

    Raises:
        CompileError: a version of Triton that lays parameters out in another way.
    """
    header = ptx[ptx.index(".entry") :]
    found = re.findall(r"\.param\s+\.([a-z]+\d+)", header[: header.index(")")])
    sizes = {"i32": "32", "i64": "64", "fp32": "32"}
    expected = [sizes.get(kind, "64") for _, kind in source.signature] + ["64", "64"]
    if [kind.lstrip("abcdefghijklmnopqrstuvwxyz") for kind in found] != expected:
        raise CompileError(
            f"{source.name}: expected parameters of {expected} bits, the compiled kernel has {found}",
            hint="this version of Triton passes arguments in another way; please report it",
        )


MAX_POINTERS = 5


def prepare_launch(
    source: KernelSource, arch: int, device: int, grid: tuple[int, int, int], scalars: Sequence[float]
) -> Callable[..., None]:
    """Return ``launch(stream, p0, p1, p2, p3, p4=0)`` for a fixed grid and fixed scalars.

    Args:
        source: the kernel; its pointer arguments come first in its signature, ``MAX_POINTERS`` at the most.
        arch: 90 for sm_90.
        device: index of the CUDA device.
        grid: blocks in x, y and z.
        scalars: values of the arguments after the pointers, in order.

    Returns:
        A function of the raw stream handle and the device addresses of the kernel's pointers. Thread-safe. The device
        must be the current one.

    Raises:
        LaunchError: the driver refuses the kernel; from the returned function, the launch.
    """
    function, shared = _load_function(source, arch, device)
    kinds = [kind for _, kind in source.signature]
    pointers = sum(kind.startswith("*") for kind in kinds)
    values: list[Any] = [_CTYPES[kind](value) for kind, value in zip(kinds[pointers:], scalars, strict=True)]
    values += [ctypes.c_void_p(0), ctypes.c_void_p(0)]  # Triton's scratch pointers: unused
    addresses = (ctypes.c_uint64 * MAX_POINTERS)()  # those that the kernel does not have are written and not passed
    first = ctypes.addressof(addresses)
    parameters = (ctypes.c_void_p * (pointers + len(values)))(
        *[first + 8 * i for i in range(pointers)], *[ctypes.addressof(value) for value in values]
    )
    dependent = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    # Before 12.3 a driver cannot capture such a launch into a graph; without it the kernel's wait returns at once.
    early = source.dependent_launch and _driver_version() >= _DEPENDENT_LAUNCH_IN_GRAPHS
    attributes = (ctypes.addressof(dependent), 1) if early else (None, 0)
    config = _LaunchConfig(*grid, 32 * source.num_warps, 1, 1, shared, 0, *attributes)

    lock = threading.Lock()  # the parameter block is shared by all threads
    pack_into = struct.Struct(f"{MAX_POINTERS}Q").pack_into
    config_at, parameters_at = ctypes.addressof(config), ctypes.addressof(parameters)
    cu_launch = _driver().cuLaunchKernelEx

    def launch(stream: int, p0: int, p1: int, p2: int, p3: int, p4: int = 0) -> None:
        with lock:
            pack_into(addresses, 0, p0, p1, p2, p3, p4)
            config.stream = stream
            code = cu_launch(config_at, function, parameters_at, None)
            if code == _INVALID_CONTEXT:
                _check(_driver().cuCtxSetCurrent(_primary_context(device)), f"cannot use CUDA device {device}")
                code = cu_launch(config_at, function, parameters_at, None)
        if code:
            _check(code, f"cannot launch {source.name}")

    launch.keep_alive = (values, parameters, dependent)  # type: ignore[attr-defined] # the driver reads their memory
    return launch
