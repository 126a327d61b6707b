"""The lean launch path of a compiled kernel: the driver's own launch call, with everything but the pointers prepared.

``kernel[grid](...)`` of Triton inspects every argument of every call to find a specialisation, and takes three times as
long as the launch itself. Here a problem is matched once (``attention/api.py``), its kernel loaded once, and a call
writes four to six addresses into a prepared parameter block. No C compiler is needed: Triton's launcher is not built.

Measured on one H200's host in one run (lab/launch_path.txt): Triton's call 45 us, its compiled kernel called directly
14.6 us, this 7.1 us.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import CompileError, LaunchError
from .compile import KernelSource, compile_kernel
from .tensor_map import MAP_ALIGNMENT, MAP_BYTES, TensorMap, encode_without_address

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
def current_context(device: int) -> Iterator[None]:
    """Make ``device`` current in this thread, and then again what was."""
    before = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(before)), "cannot ask for the current CUDA context")
    _check(_driver().cuCtxSetCurrent(_primary_context(device)), f"cannot use CUDA device {device}")
    try:
        yield
    finally:
        _driver().cuCtxSetCurrent(before)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
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


def driver_call(name: str, *arguments: Any, what: str) -> None:
    """Call a function of the driver. Raises ``LaunchError``: ``what``, and the driver's reason."""
    _check(getattr(_driver(), name)(*arguments), what)


@functools.lru_cache(maxsize=4096)
def _load_function(source: KernelSource, arch: int, device: int) -> tuple[int, int, int]:
    """Load the machine code on ``device`` and return (function handle, shared memory bytes, threads a block)."""
    kernel = compile_kernel(source, arch)
    count_parameters(source, kernel.asm["ptx"])
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with current_context(device), relaxed_capture():
        _check(_driver().cuModuleLoadData(ctypes.byref(module), kernel.asm["cubin"]), f"cannot load {source.name}")
        name = kernel.metadata.name.encode()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name), f"cannot find {source.name}")
        shared = kernel.metadata.shared
        _check(
            _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, shared),
            f"{source.name} needs {shared} bytes of shared memory a block",
        )
    return function.value or 0, shared, 32 * kernel.metadata.num_warps


def parameter_bits(source: KernelSource) -> list[int]:
    """Return the bits of each parameter that the compiled kernel takes.

    A tensor descriptor comes as its map, then its shape (32 bits an axis) and its strides (64 bits an axis). Triton's
    two scratch pointers come last.
    """
    bits = []
    for _, kind in source.signature:
        if kind.startswith("tensordesc"):
            rank = descriptor_rank(kind)
            bits += [8 * MAP_BYTES] + [32] * rank + [64] * rank
        else:
            bits.append({"i32": 32, "fp32": 32}.get(kind, 64))
    return [*bits, 64, 64]


def descriptor_rank(kind: str) -> int:
    """Return the number of axes of a type like ``tensordesc<bf16[64, 128],LAYOUT>``."""
    return kind[: kind.index("]")].count(",") + 1


def count_parameters(source: KernelSource, ptx: str) -> None:
    """Check that the kernel takes the parameters that ``prepare_launch`` gives, no more and no others.

    Raises:
        CompileError: a version of Triton that lays parameters out in another way.
    """
    header = ptx[ptx.index(".entry") :]
    found = [
        int(width) * int(count or 1)
        for width, count in re.findall(
            r"\.param\s+(?:\.align \d+ )?\.[a-z]+(\d+)[^,\[\n]*(?:\[(\d+)\])?", header[: header.index(")")]
        )
    ]
    expected = parameter_bits(source)
    if found != expected:
        raise CompileError(
            f"{source.name}: expected parameters of {expected} bits, the compiled kernel has {found}",
            hint="this version of Triton passes arguments in another way; please report it",
        )


MAX_POINTERS = 6  # of the launch that writes them one by one


def _write_maps(
    source: KernelSource, arch: int, kinds: Sequence[str], tensor_maps: Sequence[TensorMap], first: int
) -> tuple[list[int], list[Any], list[tuple[int, int]]]:
    """Write the maps among the slots from the address ``first`` on.

    Returns:
        Where the driver finds each parameter of the tensors; the objects to keep alive for it; and for every map on
        the tensor of an earlier map, the words of both addresses.
    """
    places: list[int] = []
    kept: list[Any] = []
    repeated = []
    mapped: list[int] = []  # the slots of the maps
    for slot, kind in enumerate(kinds):
        places.append(first + MAP_BYTES * slot)
        if not kind.startswith("tensordesc"):
            continue
        tensor_map = tensor_maps[len(mapped)]
        layout = compile_kernel(source, arch).metadata.tensordesc_meta[len(mapped)]
        mapped.append(slot)
        if tensor_map.of is not None:
            repeated.append((MAP_BYTES // 8 * slot, MAP_BYTES // 8 * mapped[tensor_map.of]))
        encode_without_address(tensor_map, layout, places[-1])
        extents: list[Any] = [ctypes.c_int32(size) for size in tensor_map.shape]
        extents += [ctypes.c_int64(stride) for stride in tensor_map.strides]
        places += map(ctypes.addressof, extents)
        kept += extents
    return places, kept, repeated


def prepare_launch(
    source: KernelSource,
    arch: int,
    device: int,
    grid: tuple[int, int, int],
    scalars: Sequence[float],
    tensor_maps: Sequence[TensorMap] = (),
) -> Callable[..., None]:
    """Return ``launch(stream, p0, p1, p2, p3, p4=0, p5=0)`` for a fixed grid and fixed scalars.

    A kernel of more pointers gets ``launch(stream, *pointers)``.

    Args:
        source: the kernel; tensor descriptors and pointers come first in its signature.
        arch: 90 for sm_90.
        device: index of the CUDA device.
        grid: blocks in x, y and z.
        scalars: values of the arguments after the pointers, in order.
        tensor_maps: the tensors behind the descriptors, in order. Those that are ``of`` another come after all
            tensors whose addresses the function is given.

    Returns:
        A function of the raw stream handle and the device addresses of the kernel's tensors and pointers. Thread-safe.
        The device must be the current one.

    Raises:
        LaunchError: the driver refuses the kernel or a tensor map; from the returned function, the launch.
    """
    function, shared, threads = _load_function(source, arch, device)
    kinds = [kind for _, kind in source.signature]
    tensors = sum(kind.startswith(("*", "tensordesc")) for kind in kinds)
    # Every tensor has a slot of the size of a map; the first word of a slot is the address, with or without a map.
    memory = (ctypes.c_uint8 * (MAP_BYTES * max(tensors, MAX_POINTERS) + MAP_ALIGNMENT))()
    first = ctypes.addressof(memory) + -ctypes.addressof(memory) % MAP_ALIGNMENT
    places, values, repeated = _write_maps(source, arch, kinds[:tensors], tensor_maps, first)
    others: list[Any] = [_CTYPES[kind](value) for kind, value in zip(kinds[tensors:], scalars, strict=True)]
    others += [ctypes.c_void_p(0), ctypes.c_void_p(0)]  # Triton's scratch pointers: unused
    places += map(ctypes.addressof, others)
    values += others
    parameters = (ctypes.c_void_p * len(places))(*places)
    dependent = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    # Before 12.3 a driver cannot capture such a launch into a graph; without it the kernel's wait returns at once.
    early = source.dependent_launch and _driver_version() >= _DEPENDENT_LAUNCH_IN_GRAPHS
    attributes = (ctypes.addressof(dependent), 1) if early else (None, 0)
    config = _LaunchConfig(*grid, threads, 1, 1, shared, 0, *attributes)

    lock = threading.Lock()  # the parameter block is shared by all threads
    slots = (ctypes.c_uint64 * (MAP_BYTES // 8 * max(tensors, MAX_POINTERS))).from_address(first)
    words = memoryview(slots).cast("B").cast("Q")  # slots that the kernel does not have are written and not passed
    config_at, parameters_at = ctypes.addressof(config), ctypes.addressof(parameters)
    cu_launch = _driver().cuLaunchKernelEx

    def launch(stream: int, p0: int, p1: int, p2: int, p3: int, p4: int = 0, p5: int = 0) -> None:
        with lock:
            words[0] = p0
            words[16] = p1
            words[32] = p2
            words[48] = p3
            words[64] = p4
            words[80] = p5
            for at, same in repeated:
                words[at] = words[same]
            config.stream = stream
            code = cu_launch(config_at, function, parameters_at, None)
            if code == _INVALID_CONTEXT:
                _check(_driver().cuCtxSetCurrent(_primary_context(device)), f"cannot use CUDA device {device}")
                code = cu_launch(config_at, function, parameters_at, None)
        if code:
            _check(code, f"cannot launch {source.name}")

    # The driver reads their memory.
    launch.keep_alive = (memory, values, parameters, dependent)  # type: ignore[attr-defined]
    return launch if tensors - len(repeated) <= MAX_POINTERS else _launch_many(launch, words)


def _launch_many(launch: Callable[..., None], words: memoryview) -> Callable[..., None]:
    """Return a launch that writes the addresses behind the first ``MAX_POINTERS`` too."""
    lock = threading.Lock()

    def launch_many(stream: int, *pointers: int) -> None:
        with lock:
            for i in range(MAX_POINTERS, len(pointers)):
                words[MAP_BYTES // 8 * i] = pointers[i]
            launch(stream, *pointers[:MAX_POINTERS])

    return launch_many
