"""Kernels that are never launched: what they are made of is read."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.core import builtin

SCALE = tl.constexpr(2.0)


@triton.jit
def _first_kernel(x_desc, y_ptr, n, scale, BLOCK: tl.constexpr):
    tl.store(y_ptr, n * scale * SCALE)


@triton.jit
def _second_kernel(x_desc, y_ptr, n, scale, BLOCK: tl.constexpr):
    tl.store(y_ptr, n + scale * SCALE)


NOINLINE = False
REDUCE = tl.sum


@triton.jit(noinline=NOINLINE)
def _noinline_kernel(x):
    return REDUCE(x)


@builtin
def copy_once(x, _semantic=None):
    return _semantic.copy(x)


@builtin
def copy_twice(x, _semantic=None):
    return _semantic.copy(_semantic.copy(x))


scaled = copy_once


class Pair:
    def __init__(self, scale):
        self.scale = scale

    def scaled(self):
        return scaled(self.scale)
