"""Copies between layouts, 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = torch.complex128  # torch's widest element: its copies of strided tensors move one element a thread


def copy_wide(into: Tensor, source: Tensor) -> None:
    """Copy ``source`` into a tensor of the same shape and dtype; both may have any strides. No gradient is recorded."""
    if _is_wide(into) and _is_wide(source):
        into, source = into.view(_WIDE), source.view(_WIDE)
    into.copy_(source)


def _is_wide(x: Tensor) -> bool:
    """Return whether rows are contiguous, and begin and end at multiples of 16 bytes."""
    if x.dim() == 0 or x.stride(-1) != 1 or x.data_ptr() % _WIDE.itemsize:
        return False
    each = _WIDE.itemsize // x.element_size()
    return not any(size % each for size in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
