"""Gather the expert outputs of each token and sum them with their weights (Triton, sm_80 and newer).

The sum is in fp32, in the order of the token's experts, then the shared ones: bitwise equal from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import expert_of_ids


@triton.jit
def _combine_kernel(
    y_ptr,  # [P, HID]
    weights_ptr,  # [T, K]; None: all are 1
    ids_ptr,  # [T, K]: rows of y are in the order of pairs; None: they are sorted
    positions_ptr,  # [P] int32: the sorted row of each pair, -1 without an expert; None: rows are not sorted
    y_shared_ptr,  # [S, T, HID], or None
    shared_weights_ptr,  # [T, S], or None
    out_ptr,  # [T, HID], rows STRIDE_OUT apart
    tokens,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, HID: tl.constexpr, SHARED: tl.constexpr,
    STRIDE_OUT: tl.constexpr,  # HID, or more if HID is a slice of the columns
    UNROLL: tl.constexpr,  # experts whose loads are in flight together
    BLOCK_N: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_N columns of one token. Grid: (T, cdiv(HID, BLOCK_N))."""
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < HID
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, TOPK, UNROLL):
        for i in tl.static_range(UNROLL):
            pair = token * TOPK + first + i
            exists = first + i < TOPK
            if positions_ptr is not None:
                row = tl.load(positions_ptr + pair, mask=exists, other=-1)
                exists = row >= 0
            else:
                row = pair
                exists &= expert_of_ids(tl.load(ids_ptr + pair, mask=exists, other=-1), EXPERTS) < EXPERTS
            mask = offs_n < tl.where(exists, HID, 0)  # `&` with a scalar is no mask to the interpreter of Triton 3.9
            y = tl.load(y_ptr + row.to(tl.int64) * HID + offs_n, mask=mask, other=0.0).to(tl.float32)
            if weights_ptr is not None:
                y *= tl.load(weights_ptr + pair, mask=exists, other=0.0).to(tl.float32)
            acc += y
    if y_shared_ptr is not None:
        for s in tl.static_range(SHARED):
            y = tl.load(y_shared_ptr + (s * tokens + token) * HID + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            if shared_weights_ptr is not None:
                y *= tl.load(shared_weights_ptr + token * SHARED + s).to(tl.float32)
            acc += y
    tl.store(out_ptr + token * STRIDE_OUT + offs_n, acc.to(out_ptr.dtype.element_ty), mask=mask_n)
