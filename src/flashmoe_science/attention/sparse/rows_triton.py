"""Attention of MLA to the rows of a cache that indices name (Triton, sm_80 and newer).

One program owns ``BLOCK_M`` heads of one query and a share of its indices, ``BLOCK_N`` at a time: it gathers those rows
of the cache once, and uses them as keys and, less their last columns, as values. A second kernel merges the shares, in
a fixed order and without atomics. Columns in fp8 are multiplied by their scales in fp32 (sm_89 and newer), and rounded
to the dtype of q.

Source: DeepSeek-V3.2 (DeepSeek-AI, 2025) for the attention, Flash-Decoding (Dao et al., 2023) for the shares.
Ours: the row of an index is found one tile ahead of its use, so that no address waits for a load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_arguments import Strides
from ..primitives import head_offset
from .arguments import SparseSizes, SparseStrides

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_rows(indices, table, at, stop, sizes, strides, CALL: tl.constexpr):
    """Return where the rows of indices ``at`` begin, in units of ALIGN; -1 for padding and behind ``stop``."""
    position = tl.load(indices + at, mask=at < stop, other=-1)
    is_there = (position >= 0) & (position < sizes.capacity)
    step = strides.ROW // CALL.ALIGN
    if CALL.PAGE_SIZE > 0:
        page = tl.load(table + position // CALL.PAGE_SIZE, mask=is_there, other=0)
        inside, stride_page = position % CALL.PAGE_SIZE, strides.page
        if CALL.WIDE:
            page, inside = page.to(tl.int64), inside.to(tl.int64)
        else:
            stride_page = stride_page.to(tl.int32)
        row = page * stride_page + inside * step
    else:
        if CALL.WIDE:
            position = position.to(tl.int64)
        row = position * step
    return tl.where(is_there, row, -1)


@triton.jit
def _load_fp8(base, scales, rows, is_there, DV: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """Return columns of values of rows in fp8, times their scales; ``rows`` are in units of 16 bytes."""
    group, column = tl.arange(0, DV // 128), tl.arange(0, 128)
    places = (rows * 16)[:, None, None] + (group[:, None] * 128 + column[None, :])[None, :, :]
    stored = tl.load(base + places, mask=is_there[:, None, None], other=0.0)  # [BLOCK_N, DV / 128, 128]
    scale = tl.load(scales + (rows * 4 + DV // 4)[:, None] + group[None, :], mask=is_there[:, None], other=0.0)
    return tl.reshape((stored.to(tl.float32) * scale[:, :, None]).to(dtype), [BLOCK_N, DV])


@triton.jit
def _add_sink(sink, l, m):
    """Add a row with this score and a value of 0; return the factor on the output, the sum and the maximum."""
    sink = sink.to(tl.float32) * LOG2_E
    top = tl.maximum(m, sink)
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    alpha = tl.exp2(m - top_safe)
    return alpha, l * alpha + tl.exp2(sink - top_safe), top


@triton.jit
def _sparse_kernel(
    q_ptr,  # [B, H, Sq, D]
    kv_ptr,  # [PAGES, PAGE_SIZE, D]; without a page table a page is the cache of one sequence
    scales_ptr,  # the same memory as fp32 where kv_ptr has rows in fp8, and ALIGN is 16 bytes; else None
    rotated_ptr,  # the same as bf16
    indices_ptr,  # [B, Sq, K] int32
    page_table_ptr,  # [B, P] int32, or None
    sinks_ptr,  # [H], or None
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    o_part_ptr,  # [B * SPLITS, Sq * H, DV] fp32, of each split before its sum divides it; unused without SPLIT
    sums_part_ptr,  # [B * SPLITS, Sq * H, 2] fp32: the largest score of a row in units of log2(e), and its sum
    q_strides: Strides,  # in units of ALIGN_Q elements
    o_strides: Strides,  # in units of ALIGN_O elements
    strides: SparseStrides,
    sizes: SparseSizes,
    scale,  # softmax_scale * log2(e)
    CALL: tl.constexpr,  # SparseCall
    TILE: tl.constexpr,  # SparseTile
    DEPENDENT_LAUNCH: tl.constexpr,  # launched before the kernel before it has ended (sm_90 and newer)
):  # fmt: skip
    """Attend BLOCK_M heads of one query to one split of its indices. Grid: (TILES_M * splits * Sq * B,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    DV: tl.constexpr = CALL.DV
    pid = tl.program_id(0)
    tile = pid % TILE.TILES_M
    split = pid // TILE.TILES_M % sizes.splits
    query = pid // TILE.TILES_M // sizes.splits
    token, b = query % sizes.seqlen_q, query // sizes.seqlen_q
    if DEPENDENT_LAUNCH:  # no memory is read before this wait
        gdc_wait()
        gdc_launch_dependents()

    offs_n, offs_dv = tl.arange(0, TILE.BLOCK_N), tl.arange(0, CALL.DV)
    head = tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
    mask_m = head < CALL.HEADS
    begin = split * sizes.each
    stop = tl.minimum(begin + sizes.each, sizes.top_k)
    indices = indices_ptr + b.to(tl.int64) * strides.ib + token.to(tl.int64) * strides.im
    table, base, scales, rotated = indices, kv_ptr, scales_ptr, rotated_ptr
    if CALL.PAGE_SIZE > 0:
        table = page_table_ptr + b.to(tl.int64) * strides.tb
    else:
        base += b.to(tl.int64) * strides.page * CALL.ALIGN
        if scales_ptr is not None:
            scales += b.to(tl.int64) * strides.page * 4
            rotated += b.to(tl.int64) * strides.page * 8
    rows = _find_rows(indices, table, begin + offs_n, stop, sizes, strides, CALL)

    q_rows = q_ptr + (b.to(tl.int64) * q_strides.b + head.to(tl.int64) * q_strides.h) * CALL.ALIGN_Q
    q_rows += token.to(tl.int64) * q_strides.ROW
    q = tl.load(q_rows[:, None] + offs_dv[None, :], mask=mask_m[:, None], other=0.0)  # [BLOCK_M, DV]
    q_rest, offs_rest = q, offs_dv
    if CALL.REST > 0:
        offs_rest = CALL.DV + tl.arange(0, CALL.REST)
        q_rest = tl.load(q_rows[:, None] + offs_rest[None, :], mask=mask_m[:, None], other=0.0)

    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for start in tl.range(begin, stop, TILE.BLOCK_N, num_stages=TILE.NUM_STAGES):
        is_there = rows >= 0
        ptrs = base + (rows.to(tl.int64) * CALL.ALIGN)[:, None]
        if scales_ptr is None:
            kv = tl.load(ptrs + offs_dv[None, :], mask=is_there[:, None], other=0.0)  # [BLOCK_N, DV]
        else:
            kv = _load_fp8(base, scales, rows.to(tl.int64), is_there, CALL.DV, TILE.BLOCK_N, dtype)
            # Rotated columns lie behind DV bytes and an fp32 scale for each 128; their own numbers begin at DV.
            ptrs = rotated + (rows.to(tl.int64) * 8 + (CALL.DV + CALL.DV // 32) // 2 - CALL.DV)[:, None]
        s = tl.dot(q, tl.trans(kv))  # [BLOCK_M, BLOCK_N]
        if CALL.REST > 0:
            rest = tl.load(ptrs + offs_rest[None, :], mask=is_there[:, None], other=0.0)  # [BLOCK_N, REST]
            if scales_ptr is not None:
                rest = rest.to(dtype)
            s = tl.dot(q_rest, tl.trans(rest), s)
        rows = _find_rows(indices, table, start + TILE.BLOCK_N + offs_n, stop, sizes, strides, CALL)
        s = tl.where(is_there[None, :], s * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has met no key has m == -inf, and -inf - -inf is NaN.
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(kv.dtype), kv, acc * alpha[:, None])
        m = m_new

    if TILE.SPLIT:
        at = (b * sizes.splits + split).to(tl.int64) * (sizes.seqlen_q * CALL.HEADS) + token * CALL.HEADS + head
        tl.store(o_part_ptr + at[:, None] * CALL.DV + offs_dv[None, :], acc, mask=mask_m[:, None])
        tl.store(sums_part_ptr + 2 * at, m, mask=mask_m)
        tl.store(sums_part_ptr + 2 * at + 1, l, mask=mask_m)
    else:
        if sinks_ptr is not None:
            alpha, l, m = _add_sink(tl.load(sinks_ptr + head, mask=mask_m, other=0.0), l, m)
            acc *= alpha[:, None]
        has_keys = l != 0  # else the output is 0, and the LSE -inf
        out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
        o_rows = (b.to(tl.int64) * o_strides.b + head.to(tl.int64) * o_strides.h) * CALL.ALIGN_O
        o_rows += token.to(tl.int64) * o_strides.ROW
        tl.store(o_ptr + o_rows[:, None] + offs_dv[None, :], out.to(o_ptr.dtype.element_ty), mask=mask_m[:, None])
        if CALL.STORE_LSE:
            lse = tl.where(has_keys, (m + tl.log2(l)) / LOG2_E, -float("inf"))
            tl.store(lse_ptr + (b.to(tl.int64) * CALL.HEADS + head) * sizes.seqlen_q + token, lse, mask=mask_m)


@triton.jit
def _merge_sparse_kernel(
    o_part_ptr,  # [B * SPLITS, Sq * H, DV] fp32, of each split before its sum divides it
    sums_part_ptr,  # [B * SPLITS, Sq * H, 2] fp32: the largest score of a row, and its sum
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    sinks_ptr,  # [H], or None
    o_strides: Strides,  # in units of ALIGN_O elements
    seqlen_q, splits,
    CALL: tl.constexpr,  # SparseCall
    COLUMNS: tl.constexpr,  # of one program
    BLOCK_S: tl.constexpr,  # splits of one step
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Merge the splits of COLUMNS columns of one row. Grid: (DV / COLUMNS * Sq * H, B)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = CALL.DV // COLUMNS
    row, first, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES * COLUMNS, tl.program_id(1)
    offs_s, offs_dv = tl.arange(0, BLOCK_S), first + tl.arange(0, COLUMNS)
    m = tl.full([], -float("inf"), tl.float32)
    l = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        present = start + offs_s < splits
        at = (b * splits + start + offs_s).to(tl.int64) * (seqlen_q * CALL.HEADS) + row  # [BLOCK_S]
        m_part = tl.load(sums_part_ptr + 2 * at, mask=present, other=-float("inf"))
        l_part = tl.load(sums_part_ptr + 2 * at + 1, mask=present, other=0.0)
        part = tl.load(o_part_ptr + at[:, None] * CALL.DV + offs_dv[None, :], mask=present[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(m_part - m_safe)
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(l_part * weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m = m_new
    token, head = row // CALL.HEADS, row % CALL.HEADS
    if sinks_ptr is not None:
        alpha, l, m = _add_sink(tl.load(sinks_ptr + head), l, m)
        acc *= alpha
    has_keys = l != 0
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)
    o_row = head_offset(b, head, o_strides.b, o_strides.h) * CALL.ALIGN_O + token.to(tl.int64) * o_strides.ROW
    tl.store(o_ptr + o_row + offs_dv, out.to(o_ptr.dtype.element_ty))
    if CALL.STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) / LOG2_E, -float("inf"))
        tl.store(lse_ptr + (b.to(tl.int64) * CALL.HEADS + head) * seqlen_q + token, lse, mask=first == 0)
