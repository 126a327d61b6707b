"""Counters in GPU memory that are 0 between launches, for kernels whose programs draw their work from one.

A kernel leaves its counter at 0, so nobody has to clear it before the next launch. Two launches may share one if the
second draws after the first has drawn all: those of one stream do. A launch that is captured gets a counter for itself,
as its graph may be replayed beside anything else. Two instances of one captured graph must not run at the same time:
they write the same outputs, and a counter that both draw from may never come back to 0, for any later replay either.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from .launch import current_context, driver_call, relaxed_capture

_BLOCK = 4096  # counters allocated at once: 16 KiB
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

# What torch.cuda calls; absent from CPU builds of torch.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # noqa: SLF001
_current_stream = getattr(torch._C, "_cuda_getCurrentStream", None)  # noqa: SLF001


class Counters:
    """The counters of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._of_handle: dict[int, int] = {}  # of torch's own streams, which live as long as the process
        self._of_id: dict[int, int] = {}  # of all others
        self._fresh: list[int] = []
        self._lock = threading.Lock()

    def address(self, stream: int) -> int:
        """Return the address of the counter for a launch on ``stream``, which is the current one."""
        if _is_capturing():  # type: ignore[misc] # only CPU builds lack it
            return self._take()
        found = self._of_handle.get(stream)
        if found is not None:
            return found
        if _is_torchs(self._device):
            return self._of_handle.setdefault(stream, self._take())
        # The handle of another's stream may be given to a new one while the work of the old one still runs, and the
        # per-thread stream has one handle in all threads. The id is never used again.
        key = _stream_id(stream)
        found = self._of_id.get(key)
        return self._of_id.setdefault(key, self._take()) if found is None else found

    def _take(self) -> int:
        with self._lock:
            if not self._fresh:
                self._fresh = _allocate_zeros(self._device)
            return self._fresh.pop()


@functools.cache
def counters_of(device: int) -> Counters:
    """Return the counters of a device."""
    return Counters(device)


def _is_torchs(device: int) -> bool:
    """Return whether the current stream is the default one or of torch's pool; the id of any other is its handle."""
    stream_id = _current_stream(device)[0]  # type: ignore[misc] # only CPU builds lack it
    return stream_id == 0 or bool(stream_id & 1)


def _stream_id(stream: int) -> int:
    """Return the driver's id of a stream. Raises ``LaunchError``: there is none before CUDA 12.0."""
    found = ctypes.c_uint64()
    driver_call("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(found), what="cannot tell streams apart")
    return found.value


def _allocate_zeros(device: int) -> list[int]:
    """Return the addresses of new counters, all 0. They are kept for the life of the process.

    Not torch's memory: what is allocated from it during a capture belongs to the graph.
    """
    memory, stream = ctypes.c_uint64(), ctypes.c_void_p()
    what = "cannot allocate counters"
    with current_context(device), relaxed_capture():
        driver_call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * _BLOCK), what=what)
        driver_call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING, what=what)
        driver_call("cuMemsetD32Async", memory, 0, ctypes.c_size_t(_BLOCK), stream, what=what)
        driver_call("cuStreamSynchronize", stream, what=what)
        driver_call("cuStreamDestroy_v2", stream, what=what)
    return [memory.value + 4 * i for i in range(_BLOCK)]
