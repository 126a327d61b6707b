"""Append keys and values to a cache, contiguous or paged, and rotate new queries and keys (Triton, sm_80 and newer).

Source: rotary embedding (Su et al., 2021), its two orders of columns as flash-attn has them. Ours: one launch for all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_arguments import AppendSizes, CachePointers, NewStrides, PageStrides
from ..primitives import head_offset


@triton.jit
def _rotate(
    x, x_ptrs, mask, position, offs_d, cos_ptr, sin_ptr, stride_cos, seqlen_rotary,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return rows ``x`` [T, BLOCK_D] at ``position`` [T] rotated, in fp32. A position behind the table gives NaN."""
    half: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:  # columns 2i and 2i + 1 are a pair
        partner = offs_d ^ 1
        index, first = offs_d // 2, offs_d % 2 == 0
    else:  # columns i and i + half
        partner = tl.where(offs_d < half, offs_d + half, offs_d - half)
        index, first = offs_d % half, offs_d < half
    rotated = offs_d < ROTARY_DIM
    other = tl.load(x_ptrs + (partner - offs_d)[None, :], mask=mask & rotated[None, :], other=0.0).to(tl.float32)
    inside = (position >= 0) & (position < seqlen_rotary)
    at = position.to(tl.int64)[:, None] * stride_cos + index[None, :]
    read = mask & rotated[None, :] & inside[:, None]
    cos = tl.load(cos_ptr + at, mask=read, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=read, other=float("nan")).to(tl.float32)
    x = x.to(tl.float32)
    turned = tl.where(first[None, :], x * cos - other * sin, x * cos + other * sin)
    return tl.where(rotated[None, :], turned, x)


@triton.jit
def _round_to_e4m3(x):
    """Return fp32 rounded to the nearest number of e4m3, ties to even, at most 448 in size; NaN stays NaN.

    The conversion after it is exact, so the interpreter, whose own rounds otherwise, gives what a GPU does.
    """
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits behind the 1
    small = (x + 24576.0) - 24576.0  # below 2**-6 numbers lie 2**-9 apart
    return tl.where(tl.abs(x) < 0.015625, small, tl.where(tl.abs(x) <= 448.0, rounded, x))


@triton.jit
def _quantise(x, scale_ptr, page, inside, h, fits, strides, BY_TOKEN: tl.constexpr):
    """Return rows ``x`` [T, columns] in fp32 over their scale; by token it is 1/448 of the largest, and is stored."""
    if BY_TOKEN:
        largest = tl.max(tl.abs(x), 1)
        scale = tl.maximum(tl.div_rn(largest, 448.0), 2.0**-126, propagate_nan=tl.PropagateNan.ALL)  # 0 / 0 is NaN
        scale = tl.where(largest == 0, 1.0, scale)
        at = page * strides.page + inside.to(tl.int64) * strides.row + h.to(tl.int64) * strides.h
        tl.store(scale_ptr + at, scale, mask=fits)
        x = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    elif scale_ptr is not None:
        scale = tl.load(scale_ptr + h.to(tl.int64) * strides.h)
        x = tl.div_rn(x, tl.zeros_like(x) + scale)
    return _round_to_e4m3(x)


@triton.jit
def _append_kernel(
    k_new_ptr,  # [B, HK, Sn, D]
    v_new_ptr,  # [B, HK, Sn, DV]
    k_ptr,  # [PAGES, PAGE_SIZE, HK, D]; without a page table a page is the cache of one sequence
    v_ptr,  # [PAGES, PAGE_SIZE, HK, DV]
    cache: CachePointers,
    q_ptr,  # [B, H, Sq, D], or None without rotary embedding; so the five below
    q_out_ptr,  # [B, H, Sq, D] dense
    cos_ptr,  # [S, ROTARY_DIM / 2]
    sin_ptr,  # [S, ROTARY_DIM / 2]
    k_scale_ptr,  # fp32, [PAGES, PAGE_SIZE, HK] by its strides: read, or with a scale of each token written; or None
    v_scale_ptr,  # the same of values
    k_new_strides: NewStrides, v_new_strides: NewStrides,
    k_strides: PageStrides, v_strides: PageStrides,
    k_scale_strides: PageStrides, v_scale_strides: PageStrides,
    q_strides: NewStrides,
    stride_cos,  # of the rotary tables
    stride_tb,  # of the page table
    sizes: AppendSizes,
    CALL: tl.constexpr,  # AppendCall
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_T tokens of one K/V head, or rotate them for a query head.

    Grid: (cdiv(max(Sn, Sq), CALL.BLOCK_T), HK + H with rotary embedding, B).
    """
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_T: tl.constexpr = CALL.BLOCK_T
    h, b = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * CALL.BLOCK_T + tl.arange(0, CALL.BLOCK_T)
    offs_d, offs_dv = tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(cache.seqlens_ptr + b)
    leftpad = before * 0
    if cache.leftpad_ptr is not None:
        leftpad = tl.load(cache.leftpad_ptr + b)
    if h < sizes.heads_kv:
        place = before + token  # [BLOCK_T]
        fits = (token < sizes.seqlen_new) & (place >= 0) & (place < sizes.capacity)
        if CALL.PAGE_SIZE == 0:
            page = b
            if cache.batch_idx_ptr is not None:
                page = tl.load(cache.batch_idx_ptr + b)
            page = page.to(tl.int64) + tl.zeros([BLOCK_T], tl.int64)
            inside = place
        else:
            table = cache.page_table_ptr + b.to(tl.int64) * stride_tb
            page = tl.load(table + place // CALL.PAGE_SIZE, mask=fits, other=0).to(tl.int64)
            inside = place % CALL.PAGE_SIZE
        mask = fits[:, None] & (offs_d[None, :] < CALL.D)
        x_rows = head_offset(b, h, k_new_strides.b, k_new_strides.h) + token.to(tl.int64) * k_new_strides.m
        x_ptrs = k_new_ptr + x_rows[:, None] + offs_d[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0)
        if CALL.ROTARY_DIM > 0:
            x = _rotate(
                x, x_ptrs, mask, place - leftpad, offs_d, cos_ptr, sin_ptr, stride_cos, sizes.seqlen_rotary,
                CALL.ROTARY_DIM, CALL.INTERLEAVED,
            )  # fmt: skip
        if CALL.FP8:
            x = x.to(k_new_ptr.dtype.element_ty).to(tl.float32)
            x = _quantise(x, k_scale_ptr, page, inside, h, fits, k_scale_strides, CALL.K_BY_TOKEN)
        rows = page * k_strides.page + inside.to(tl.int64) * k_strides.row + h.to(tl.int64) * k_strides.h
        tl.store(k_ptr + rows[:, None] + offs_d[None, :], x.to(k_ptr.dtype.element_ty), mask=mask)
        mask_v = fits[:, None] & (offs_dv[None, :] < CALL.DV)
        w_rows = head_offset(b, h, v_new_strides.b, v_new_strides.h) + token.to(tl.int64) * v_new_strides.m
        w = tl.load(v_new_ptr + w_rows[:, None] + offs_dv[None, :], mask=mask_v, other=0.0)
        if CALL.FP8:
            w = _quantise(w.to(tl.float32), v_scale_ptr, page, inside, h, fits, v_scale_strides, CALL.V_BY_TOKEN)
        rows = page * v_strides.page + inside.to(tl.int64) * v_strides.row + h.to(tl.int64) * v_strides.h
        tl.store(v_ptr + rows[:, None] + offs_dv[None, :], w.to(v_ptr.dtype.element_ty), mask=mask_v)
    elif CALL.ROTARY_DIM > 0:
        hq = h - sizes.heads_kv
        present = token < sizes.seqlen_q
        mask = present[:, None] & (offs_d[None, :] < CALL.D)
        q_rows = head_offset(b, hq, q_strides.b, q_strides.h) + token.to(tl.int64) * q_strides.m
        q_ptrs = q_ptr + q_rows[:, None] + offs_d[None, :]
        x = tl.load(q_ptrs, mask=mask, other=0.0)
        position = before - leftpad + token * 0
        if CALL.ADVANCE:
            position += token
        x = _rotate(
            x, q_ptrs, mask, position, offs_d, cos_ptr, sin_ptr, stride_cos, sizes.seqlen_rotary,
            CALL.ROTARY_DIM, CALL.INTERLEAVED,
        )  # fmt: skip
        out = ((b.to(tl.int64) * sizes.heads + hq) * sizes.seqlen_q + token) * CALL.D
        tl.store(q_out_ptr + out[:, None] + offs_d[None, :], x.to(q_out_ptr.dtype.element_ty), mask=mask)
