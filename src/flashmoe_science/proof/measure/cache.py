"""Empty the L2 cache of a GPU, lines that were asked to stay included.

A kernel may ask that what it reads stays: by a window of persisting accesses, or by evict-last loads. Lines of either
kind outlive reads and writes of other memory, so that a call would not find the cache cold. So none may be set aside,
and the driver makes all lines ordinary ones before other memory goes through the cache.
"""

from __future__ import annotations

import ctypes

import torch

from ...errors import ProofError

_PERSISTING_L2_CACHE_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_NOT_THERE = (215, 801)  # CUDA_ERROR_UNSUPPORTED_LIMIT, CUDA_ERROR_NOT_SUPPORTED: before Ampere


class CacheFlush:
    """Flushes L2 on the current stream of the current CUDA device."""

    def __init__(self, l2_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._written = torch.full((2 * l2_bytes // 4,), 1, dtype=torch.int32, device="cuda")
        self._read = torch.full((2 * l2_bytes // 4,), 1, dtype=torch.int32, device="cuda")
        self._seen = torch.empty((), dtype=torch.int32, device="cuda")
        self._can_persist = True  # asked after the first allocation, which makes torch's context the current one
        self._can_persist = self._ask("cuCtxSetLimit", _PERSISTING_L2_CACHE_SIZE, ctypes.c_size_t(0))

    def flush(self) -> None:
        """Write and read memory that nothing else uses, each twice the size of the cache. No line is left to write.

        The host waits until the stream is empty, so nothing may be timed around this.
        """
        if self._can_persist:
            # A reset does not wait in the stream: a call that still runs would ask for lines after it.
            torch.cuda.current_stream().synchronize()
            self._can_persist = self._ask("cuCtxResetPersistingL2Cache")
        self._written.fill_(2)
        torch.amax(self._read, 0, out=self._seen)

    def _ask(self, function: str, *arguments: object) -> bool:
        """Call the driver; return whether this GPU has lines that persist. Raises ``ProofError``."""
        code = getattr(self._driver, function)(*arguments) if self._can_persist else _NOT_THERE[0]
        if code not in (0, *_NOT_THERE):
            raise ProofError(f"{function} of the CUDA driver failed with code {code}")
        return code == 0
