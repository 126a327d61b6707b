"""Device helpers that the kernels of mixed batches share: what a program works on, and a step over keys in pages."""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import cap_scores, load_rows

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(records_ptr, batch, item, FIELD: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return which record the program ``item`` belongs to, and its number there; ``batch`` where there is none."""
    found = item * 0
    before = item * 0
    for first in range(0, batch, BLOCK_B):
        offs = first + tl.arange(0, BLOCK_B)
        ends = tl.load(records_ptr + FIELD * batch + offs, mask=offs < batch, other=2147483647)
        done = ends <= item
        found += tl.sum(done.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(done, ends, 0), 0))
    return found, item - before


@triton.jit
def read_record(records_ptr, batch, at):
    """Return the sequence of a record, and what ``_plan_work_kernel`` stored of it."""
    record = records_ptr + at
    b, start_q, place = tl.load(record + 3 * batch), tl.load(record + 4 * batch), tl.load(record + 5 * batch)
    queries, keys, each = tl.load(record + 6 * batch), tl.load(record + 7 * batch), tl.load(record + 8 * batch)
    splits, slot, tiles = tl.load(record + 9 * batch), tl.load(record + 10 * batch), tl.load(record + 11 * batch)
    return b, start_q, place, queries, keys, each, splits, slot, tiles


@triton.jit
def tile_keys(
    first_token, last_token, queries, keys, window, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, block_n
):  # fmt: skip
    """Return the keys that some of a tile's queries see: begin, a multiple of ``block_n``, and end."""
    diagonal = keys - queries
    begin = first_token * 0
    end = keys
    if BOUND_RIGHT:
        last = tl.minimum(last_token, queries - 1)
        end = tl.maximum(tl.minimum(keys, last + diagonal + window.right + 1), 0)
    if BOUND_LEFT:
        begin = tl.maximum(first_token + diagonal - window.left, 0) // block_n * block_n
    end = tl.where(first_token < queries, end, 0)
    return begin, end


@triton.jit
def load_pages(table, start_n, offs_n, first_key, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of a tile, or the one page of all; 0 for keys outside of [first_key, end)."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + start_n // PAGE_SIZE, mask=start_n < end, other=0)
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        cols = start_n + offs_n
        return tl.load(table + cols // PAGE_SIZE, mask=(cols >= first_key) & (cols < end), other=0)


@triton.jit
def _key_rows(cols, page, strides, CALL: tl.constexpr, WIDE: tl.constexpr):
    """Return where the rows of a tile of K or V lie in their pages; WIDE: an offset in a page can pass 2**31."""
    inside = cols % CALL.PAGE_SIZE
    if WIDE:
        inside = inside.to(tl.int64)
    inside *= strides.ROW // CALL.ALIGN
    return (page.to(tl.int64) * strides.b + inside.to(tl.int64)) * CALL.ALIGN


@triton.jit
def attend_tile(
    acc, l, m, q, k_ptrs, v_ptrs, start_n, tokens, offs_n, offs_d, offs_dv, first_key, end, diagonal, window, scale,
    softcap, slope, page, k_strides, v_strides, CALL: tl.constexpr, WIDE: tl.constexpr, MASK_N: tl.constexpr,
    MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr, EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    """Add the keys of one tile that lie before ``end`` to output, sum and maximum: a step of the online softmax."""
    cols = start_n + offs_n
    read = cols
    if MASK_LEFT:  # the pages of keys before the first one in reach may be gone
        read = tl.where(cols >= first_key, cols, end)
    k_tile = k_ptrs + _key_rows(cols, page, k_strides, CALL, WIDE)[:, None]
    k = load_rows(k_tile, read, end, offs_d, CALL.D, MASK_N, CALL.D != CALL.BLOCK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k)) * scale  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        s = cap_scores(s, softcap, False)
    if slope is not None:
        s -= slope * tl.abs(tokens[:, None] + diagonal - cols[None, :]).to(tl.float32)
    if MASK_RIGHT:
        s = tl.where(tokens[:, None] + (diagonal + window.right) >= cols[None, :], s, -float("inf"))
    if MASK_LEFT:
        s = tl.where(tokens[:, None] + (diagonal - window.left) <= cols[None, :], s, -float("inf"))
    if MASK_N:
        s = tl.where(cols[None, :] < end, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has met no key has m == -inf, and -inf - -inf is NaN.
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new) if EMPTY_ROWS else m_new
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    v_tile = v_ptrs + _key_rows(cols, page, v_strides, CALL, WIDE)[:, None]
    v = load_rows(v_tile, read, end, offs_dv, CALL.DV, MASK_N, CALL.DV != CALL.BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    return tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), l, m_new


@triton.jit
def add_sink(sink, l, m):
    """Add a key with this score and a value of 0; return the factor on the output, the sum and the maximum."""
    sink *= LOG2_E
    top = tl.maximum(m, sink)
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    alpha = tl.exp2(m - top_safe)
    return alpha, l * alpha + tl.exp2(sink - top_safe), top
