"""Device helpers that more than one attention kernel uses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptrs, offs_row, rows, offs_col, cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """Load ``[ROWS, COLS]`` with zeros outside ``rows`` and ``cols``; a bound known to hold costs nothing."""
    if MASK_ROWS and MASK_COLS:
        return tl.load(ptrs, mask=(offs_row[:, None] < rows) & (offs_col[None, :] < cols), other=0.0)
    if MASK_ROWS:
        return tl.load(ptrs, mask=offs_row[:, None] < rows, other=0.0)
    if MASK_COLS:
        return tl.load(ptrs, mask=offs_col[None, :] < cols, other=0.0)
    return tl.load(ptrs)


@triton.jit
def head_offset(b, h, stride_b, stride_h):
    """Return the offset of one head in int64: ``b * stride_b`` alone can pass 2**31."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
