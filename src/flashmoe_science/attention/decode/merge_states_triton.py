"""Merge two partial results of attention over disjoint keys (Triton, sm_80 and newer).

Source: Flash-Decoding (Dao et al., 2023) for the weights. Ours: any strides, and what a part without keys holds is not
read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernel_arguments import NewStrides


@triton.jit
def _merge_states_kernel(
    o_a_ptr,  # [B, H, S, D]
    o_b_ptr,  # [B, H, S, D]
    lse_a_ptr,  # [B, H, S] fp32, natural log
    lse_b_ptr,  # [B, H, S] fp32, natural log
    o_ptr,  # [B, H, S, D]
    lse_ptr,  # [B, H, S] fp32, natural log
    o_a_strides: NewStrides, o_b_strides: NewStrides, lse_a_strides: NewStrides, lse_b_strides: NewStrides,
    o_strides: NewStrides, lse_strides: NewStrides,
    rows,  # B * H * S
    heads, seqlen, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_M rows. Grid: (cdiv(rows, BLOCK_M),)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    present = row < rows
    token, head = (row % seqlen).to(tl.int64), row // seqlen
    h, b = (head % heads).to(tl.int64), (head // heads).to(tl.int64)
    at_a = b * lse_a_strides.b + h * lse_a_strides.h + token * lse_a_strides.m
    at_b = b * lse_b_strides.b + h * lse_b_strides.h + token * lse_b_strides.m
    lse_a = tl.load(lse_a_ptr + at_a, mask=present, other=-float("inf"))
    lse_b = tl.load(lse_b_ptr + at_b, mask=present, other=-float("inf"))
    top = tl.maximum(lse_a, lse_b)
    # A row that saw no key has -inf in both, and -inf - -inf is NaN.
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - top_safe), tl.exp(lse_b - top_safe)
    total = weight_a + weight_b
    columns = offs_d[None, :] < D
    rows_a = b * o_a_strides.b + h * o_a_strides.h + token * o_a_strides.m
    rows_b = b * o_b_strides.b + h * o_b_strides.h + token * o_b_strides.m
    mask_a, mask_b = (weight_a > 0)[:, None] & columns, (weight_b > 0)[:, None] & columns
    o_a = tl.load(o_a_ptr + rows_a[:, None] + offs_d[None, :], mask=mask_a, other=0.0).to(tl.float32)
    o_b = tl.load(o_b_ptr + rows_b[:, None] + offs_d[None, :], mask=mask_b, other=0.0).to(tl.float32)
    has_keys = total != 0
    scale = tl.where(has_keys, 1.0 / total, 0.0)
    out = (o_a * weight_a[:, None] + o_b * weight_b[:, None]) * scale[:, None]
    at = b * o_strides.b + h * o_strides.h + token * o_strides.m
    tl.store(o_ptr + at[:, None] + offs_d[None, :], out.to(o_ptr.dtype.element_ty), mask=present[:, None] & columns)
    at = b * lse_strides.b + h * lse_strides.h + token * lse_strides.m
    tl.store(lse_ptr + at, tl.where(has_keys, top + tl.log(total), -float("inf")), mask=present)
