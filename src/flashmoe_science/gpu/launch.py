"""The lean launch path of a compiled kernel: the driver's own launch call, with everything but the pointers prepared.

``kernel[grid](...)`` of Triton inspects every argument of every call to find a specialisation, and takes three times as
long as the launch itself. Here a problem is matched once (``attention/api.py``), its kernel loaded once, and a call
writes four or five addresses into a prepared parameter block. No C compiler is needed: Triton's launcher is not built.

Measured on an H200's host: Triton's call 45 us, its compiled kernel called directly 14.6 us, this 6.8 us, of which the
driver takes 3.9 (an empty kernel).
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CompileError, LaunchError
from .compile import KernelSource, compile_kernel

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU yet
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
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
def _driver() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter lock: a launch takes microseconds, giving the lock away and back costs one of them.
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    driver.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return driver


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
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current in this thread
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
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
    attributes = (ctypes.addressof(dependent), 1) if source.dependent_launch else (None, 0)
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
                torch.cuda.set_device(device)
                code = cu_launch(config_at, function, parameters_at, None)
        if code:
            _check(code, f"cannot launch {source.name}")

    launch.keep_alive = (values, parameters, dependent)  # type: ignore[attr-defined] # the driver reads their memory
    return launch
