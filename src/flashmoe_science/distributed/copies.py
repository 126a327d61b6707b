"""Views whose elements have 16 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDE = torch.complex128  # torch's widest dtype


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of 16-byte elements if all tensors have such rows, else the tensors.

    Torch copies strided tensors element by element. With 2 bytes each, copies took 2.5 times as long as with 16
    (lab/several_gpus/6_timelines_2xh200.txt).
    """
    if all(map(_is_wide, tensors)):
        return [x.detach().view(_WIDE) for x in tensors]
    return list(tensors)


def _is_wide(x: Tensor) -> bool:
    """Return whether rows are contiguous, and begin and end at multiples of 16 bytes."""
    if type(x) is not Tensor:  # a fake one has no address
        return False
    each = _WIDE.itemsize // x.element_size()
    strides = x.stride()
    if not strides or strides[-1] != 1 or x.shape[-1] % each or x.storage_offset() % each:
        return False
    return not x.data_ptr() % _WIDE.itemsize and not any(stride % each for stride in strides[:-1])
