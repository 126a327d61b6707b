"""Attention of a mixed batch over keys in pages (Triton, sm_80 and newer).

The rows of all query heads of one K/V head, token by token, are packed into the rows of a tile. One program attends a
row tile to one share of the keys; ``work_triton`` says which, from the lengths on the device. Where there is one share,
its program writes the output; else a second kernel merges what all leave, in a fixed order and without atomics.

Source: Flash-Decoding (Dao et al., 2023) for the split, FlashAttention-3 (Shah et al., 2024) for the packed rows.
Ours: one list of work for prompts, chunks and single tokens, with tiles of few rows and of many.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_arguments import MixedPartials, Strides, Window
from ..primitives import load_rows
from .primitives import LOG2_E, add_sink, attend_tile, find_sequence, load_pages, read_record, tile_keys


@triton.jit
def _inner_keys(first_token, tokens, begin, end, diagonal, window, CALL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return inside and unmasked: all queries of a tile see the keys [inside, unmasked), of [begin, end)."""
    unmasked = end // BLOCK_N * BLOCK_N
    if CALL.BOUND_RIGHT:
        first_end = tl.maximum(first_token + diagonal + window.right + 1, 0)
        unmasked = tl.minimum(unmasked, first_end // BLOCK_N * BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)
    inside = begin
    if CALL.BOUND_LEFT:
        last_begin = tl.maximum(first_token + tokens - 1 + diagonal - window.left, 0)
        inside = tl.maximum(tl.cdiv(last_begin, BLOCK_N) * BLOCK_N, begin)
        unmasked = tl.maximum(unmasked, inside)
    return inside, unmasked


@triton.jit
def _store_output(
    acc, l, m, sinks_ptr, o_ptr, lse_ptr, start_q, token, head, place, queries, heads, offs_dv, o_strides, place_lse,
    CALL: tl.constexpr,
):  # fmt: skip
    """Store rows that have met all their keys. One that met none, or has no query, gets 0 and an LSE of -inf.

    The LSE of queries from ``place_lse`` on is left to others.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=token < queries, other=0.0).to(tl.float32)
        alpha, l, m = add_sink(sink, l, m)
        acc *= alpha[:, None]
    has_keys = (l != 0) & (token < queries)
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    out = tl.where(has_keys[:, None], out, 0.0)
    row = (start_q + token).to(tl.int64)
    o_rows = row * o_strides.ROW + head.to(tl.int64) * o_strides.h * CALL.ALIGN_O
    mask = (token < place)[:, None]
    if CALL.DV != CALL.BLOCK_DV:
        mask = mask & (offs_dv[None, :] < CALL.DV)
    tl.store(o_ptr + o_rows[:, None] + offs_dv[None, :], out.to(o_ptr.dtype.element_ty), mask=mask)
    if CALL.STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) / LOG2_E, -float("inf"))
        tl.store(lse_ptr + row * heads + head, lse, mask=token < place_lse)


@triton.jit
def _mixed_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [PAGES, PAGE_SIZE, HK, D]
    v_ptr,  # [PAGES, PAGE_SIZE, HK, DV]
    o_ptr,  # [T, H, DV]
    lse_ptr,  # [T, H] fp32, natural log
    partials: MixedPartials,
    sinks_ptr,  # [H], or None
    alibi_ptr,  # [H] or [B, H], or None
    records_ptr,  # [RECORDS, B] int32: the work
    page_table_ptr,  # [B, pages of a sequence] int32
    q_strides: Strides, k_strides: Strides, v_strides: Strides, o_strides: Strides,
    batch, heads_kv,
    stride_table_b,  # of the page table
    first_part,  # where the partial results of tiles of this size begin; int64
    scale,  # softmax_scale * log2(e); with a softcap what ``cap_scores`` takes
    window: Window,
    softcap,  # softcap * log2(e), or None
    CALL: tl.constexpr,  # ForwardCall
    TILE: tl.constexpr,  # MixedTile
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one K/V head to one share of the keys. Grid: (HK * tiles and their shares, at most,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_DV: tl.constexpr = CALL.BLOCK_DV
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    h = pid % heads_kv
    at, local = find_sequence(records_ptr, batch, pid // heads_kv, TILE.FIELD, TILE.BLOCK_B)
    if at >= batch:
        return
    b, start_q, place, queries, keys, each, splits, slot, tiles = read_record(records_ptr, batch, at)
    tile, split = local // splits, local % splits
    if CALL.BOUND_RIGHT:  # tiles with the most keys first
        tile = tiles - 1 - tile
    first_token = tile * BLOCK_M // CALL.GROUP
    last_token = (tile * BLOCK_M + BLOCK_M - 1) // CALL.GROUP
    begin, end = tile_keys(first_token, last_token, queries, keys, window, CALL.BOUND_LEFT, CALL.BOUND_RIGHT, BLOCK_N)
    count = tl.maximum(tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), each), 1)
    if split >= count:
        return
    begin += split * each * BLOCK_N
    end = tl.minimum(end, begin + each * BLOCK_N)

    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // CALL.GROUP, h * CALL.GROUP + row % CALL.GROUP
    q_rows = (start_q + token).to(tl.int64) * q_strides.ROW + head.to(tl.int64) * q_strides.h * CALL.ALIGN
    q_ptrs = q_ptr + q_rows[:, None] + offs_d[None, :] * q_strides.COLUMN
    q = load_rows(q_ptrs, token, queries, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slope = None
    if alibi_ptr is not None:
        slopes = tl.load(alibi_ptr + b.to(tl.int64) * CALL.STRIDE_ALIBI_B + head, mask=token < queries, other=0.0)
        slope = slopes.to(tl.float32)[:, None] * LOG2_E
    k_ptrs = k_ptr + h.to(tl.int64) * k_strides.h * CALL.ALIGN + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_ptr + h.to(tl.int64) * v_strides.h * CALL.ALIGN + offs_dv[None, :] * v_strides.COLUMN

    diagonal = keys - queries  # without bounds of its own, query m is at key m + diagonal
    inside, unmasked = _inner_keys(
        first_token, last_token - first_token + 1, begin, end, diagonal, window, CALL, BLOCK_N
    )
    first_key = 0
    if CALL.BOUND_LEFT:
        first_key = tl.maximum(first_token + diagonal - window.left, 0)  # that any row of the tile sees
    # The pages of a tile are read one tile ahead, also from loop to loop: the addresses of K and V wait for no load.
    table = page_table_ptr + b.to(tl.int64) * stride_table_b
    page = load_pages(table, begin, offs_n, first_key, end, CALL.PAGE_SIZE, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if CALL.BOUND_LEFT:
        for start_n in tl.range(begin, tl.minimum(inside, end), BLOCK_N, num_stages=1):
            page_of_tile = page
            page = load_pages(table, start_n + BLOCK_N, offs_n, first_key, end, CALL.PAGE_SIZE, BLOCK_N)
            acc, l, m = attend_tile(
                acc, l, m, q, k_ptrs, v_ptrs, start_n, token, offs_n, offs_d, offs_dv, first_key, end, diagonal,
                window, scale, softcap, slope, page_of_tile, k_strides, v_strides, CALL, TILE.WIDE,
                True, True, CALL.BOUND_RIGHT, True,
            )  # fmt: skip
    for start_n in tl.range(inside, unmasked, BLOCK_N, num_stages=TILE.NUM_STAGES):
        page_of_tile = page
        page = load_pages(table, start_n + BLOCK_N, offs_n, first_key, end, CALL.PAGE_SIZE, BLOCK_N)
        acc, l, m = attend_tile(
            acc, l, m, q, k_ptrs, v_ptrs, start_n, token, offs_n, offs_d, offs_dv, first_key, end, diagonal,
            window, scale, softcap, slope, page_of_tile, k_strides, v_strides, CALL, TILE.WIDE,
            False, False, False, False,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, BLOCK_N, num_stages=1):
        page_of_tile = page
        page = load_pages(table, start_n + BLOCK_N, offs_n, first_key, end, CALL.PAGE_SIZE, BLOCK_N)
        acc, l, m = attend_tile(
            acc, l, m, q, k_ptrs, v_ptrs, start_n, token, offs_n, offs_d, offs_dv, first_key, end, diagonal,
            window, scale, softcap, slope, page_of_tile, k_strides, v_strides, CALL, TILE.WIDE,
            True, False, CALL.BOUND_RIGHT, CALL.EMPTY_ROWS,
        )  # fmt: skip

    if count > 1:
        part = ((slot + tile * splits + split) * heads_kv + h).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        part += first_part
        o_part = partials.o_ptr + part[:, None] * CALL.DV + offs_dv[None, :]
        if CALL.DV != CALL.BLOCK_DV:
            tl.store(o_part, acc, mask=offs_dv[None, :] < CALL.DV)
        else:
            tl.store(o_part, acc)
        tl.store(partials.sums_ptr + 2 * part, m)
        tl.store(partials.sums_ptr + 2 * part + 1, l)
        return
    _store_output(
        acc, l, m, sinks_ptr, o_ptr, lse_ptr, start_q, token, head, place, queries, heads_kv * CALL.GROUP, offs_dv,
        o_strides, place, CALL,
    )  # fmt: skip


@triton.jit
def _merge_rows(
    partials, first, split_rows, count, offs_dv, DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return outputs, sums and maxima of some rows over ``count`` shares, ``BLOCK_S`` at a time, in order.

    The partial results of the first share are rows ``first``, those of each share ``split_rows`` behind those before.
    """
    m = tl.full([first.shape[0]], -float("inf"), tl.float32)
    l = tl.zeros([first.shape[0]], tl.float32)
    acc = tl.zeros([first.shape[0], offs_dv.shape[0]], tl.float32)
    for start in tl.range(0, count, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        part = first[:, None] + split[None, :].to(tl.int64) * split_rows  # [ROWS, BLOCK_S]
        present = (split < count)[None, :] & (first >= 0)[:, None]
        m_part = tl.load(partials.sums_ptr + 2 * part, mask=present, other=-float("inf"))
        l_part = tl.load(partials.sums_ptr + 2 * part + 1, mask=present, other=0.0)
        o_ptrs = partials.o_ptr + part[:, :, None] * DV + offs_dv[None, None, :]
        o_part = tl.load(o_ptrs, mask=present[:, :, None] & (offs_dv < DV)[None, None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 1))
        # A share without keys of a row has -inf; where all have it, -inf - -inf is NaN.
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(m_part - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(l_part * weight, 1)
        acc = acc * alpha[:, None] + tl.sum(o_part * weight[:, :, None], 1)
        m = m_new
    return acc, l, m


@triton.jit
def _merge_mixed_kernel(
    o_ptr,  # [T, H, DV]
    lse_ptr,  # [T, H] fp32, natural log
    partials: MixedPartials,
    sinks_ptr,  # [H], or None
    records_ptr,  # [RECORDS, B] int32: the work
    o_strides: Strides,
    batch, heads_kv,
    many_part,  # where the partial results of tiles of many rows begin; int64
    window: Window,
    CALL: tl.constexpr,  # ForwardCall
    TILES: tl.constexpr,  # MixedTiles
    COLUMNS: tl.constexpr,  # of one program
    TILES_DV: tl.constexpr,  # programs that share the columns of a row
    BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Merge the shares of MERGE_ROWS rows of one K/V head. Grid: (TILES_DV * HK * such rows, at most,)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: tl.constexpr = TILES.MERGE_ROWS
    pid = tl.program_id(0)
    first_column = pid % TILES_DV * COLUMNS
    h = pid // TILES_DV % heads_kv
    at, local = find_sequence(records_ptr, batch, pid // TILES_DV // heads_kv, 2, BLOCK_B)
    if at >= batch:
        return
    _, start_q, place, queries, keys, each, splits, slot, _ = read_record(records_ptr, batch, at)
    few = place * CALL.GROUP <= TILES.FEW_ROWS
    block_m = tl.where(few, TILES.FEW_ROWS, TILES.MANY_ROWS)
    block_n = tl.where(few, TILES.FEW_KEYS, TILES.MANY_KEYS)
    row = local * ROWS + tl.arange(0, ROWS)  # token by token, all in one tile
    token, head = row // CALL.GROUP, row % CALL.GROUP
    tile = local * ROWS // block_m
    begin, end = tile_keys(
        tile * block_m // CALL.GROUP, (tile * block_m + block_m - 1) // CALL.GROUP, queries, keys, window,
        CALL.BOUND_LEFT, CALL.BOUND_RIGHT, block_n,
    )  # fmt: skip
    count = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), block_n), each)
    if count <= 1:  # the output is written
        return
    first_part = tl.where(few, 0, many_part) + (slot + tile * splits).to(tl.int64) * heads_kv * block_m
    part = first_part + h.to(tl.int64) * block_m + row - tile * block_m
    head += h * CALL.GROUP
    offs_dv = first_column + tl.arange(0, COLUMNS)
    acc, l, m = _merge_rows(partials, part, (heads_kv * block_m).to(tl.int64), count, offs_dv, CALL.DV, BLOCK_S)
    _store_output(
        acc, l, m, sinks_ptr, o_ptr, lse_ptr, start_q, token, head, place, queries, heads_kv * CALL.GROUP, offs_dv,
        o_strides, tl.where(first_column == 0, place, 0), CALL,
    )  # fmt: skip
