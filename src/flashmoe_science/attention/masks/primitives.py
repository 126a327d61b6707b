"""Device helpers of the kernels that walk over the lists of a mask."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_lists(mask_lists_ptr, lists, b, h, block):
    """Return where the full and the partial blocks of one list lie: start and end of each."""
    at = mask_lists_ptr + lists.first + (b * lists.heads + h // lists.share) * lists.blocks + block
    partial = at + lists.count
    return tl.load(at), tl.load(at + 1), tl.load(partial), tl.load(partial + 1)


@triton.jit
def sees(mask_bits_ptr, place, rows, keys):
    """Return whether rows of a partial block see keys of it, both counted from its first; they lie along any axes."""
    words = tl.load(mask_bits_ptr + place.to(tl.int64) * 512 + rows * 4 + keys // 32)
    return ((words >> (keys % 32)) & 1) != 0
