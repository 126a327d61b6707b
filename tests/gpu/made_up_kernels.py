"""Two kernels that are never launched: what they are made of is read."""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)


@triton.jit
def _first_kernel(x_desc, y_ptr, n, scale, BLOCK: tl.constexpr):
    tl.store(y_ptr, n * scale * SCALE)


@triton.jit
def _second_kernel(x_desc, y_ptr, n, scale, BLOCK: tl.constexpr):
    tl.store(y_ptr, n + scale * SCALE)
