"""Counters in GPU memory that are 0 between launches, for kernels whose programs draw their work from one.

A kernel leaves its counter at 0, so nobody has to clear it before the next launch. Two launches may share one if the
second starts after the first has ended: those of one stream do. A launch that is captured gets a counter for itself,
as its graph may be replayed beside anything.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from .launch import current_context, driver_call, relaxed_capture

_BLOCK = 4096  # counters allocated at once: 16 KiB
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: one handle, a stream for every thread

# Absent from CPU builds of torch.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # noqa: SLF001 - what torch.cuda calls


class Counters:
    """The counters of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._of_stream: dict[tuple[int, int], int] = {}
        self._fresh: list[int] = []
        self._lock = threading.Lock()

    def address(self, stream: int) -> int:
        """Return the address of the counter for a launch on ``stream``, which is the current one."""
        if _is_capturing():  # type: ignore[misc] # only CPU builds lack it
            return self._take()
        key = (stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
        found = self._of_stream.get(key)
        if found is None:
            found = self._of_stream.setdefault(key, self._take())
        return found

    def _take(self) -> int:
        with self._lock:
            if not self._fresh:
                self._fresh = _allocate_zeros(self._device)
            return self._fresh.pop()


@functools.cache
def counters_of(device: int) -> Counters:
    """Return the counters of a device."""
    return Counters(device)


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
