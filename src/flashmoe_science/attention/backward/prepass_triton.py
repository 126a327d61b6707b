"""Kernels before and after the Hopper backward kernel (Triton): LSE and delta of each query row, dQ in order, dsinks.

Packed sequences have query tiles of their own. Those of sequence b are numbers start // BLOCK_M + b and those behind
it, where it starts at token ``start``: no two sequences share one, and no sum over lengths is needed. For each, the
heads lie side by side. A kernel before orders the sequences; one more sets to 0 what no other kernel writes.

Source: FlashAttention-2 (Dao, 2023) for delta = rowsum(dO * O), and its packed sequences for the numbers of query
tiles. Ours: the layouts that ``backward_gluon_sm90`` reads and writes, and the order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..kernel_arguments import QueryTiles
from .primitives import row_products


@triton.jit
def _length(cu_seqlens_ptr, seqused_ptr, b, mask=None):
    """Return where sequences start, and their length."""
    start = tl.load(cu_seqlens_ptr + b, mask=mask)
    if seqused_ptr is None:
        length = tl.load(cu_seqlens_ptr + b + 1, mask=mask) - start
    else:
        length = tl.load(seqused_ptr + b, mask=mask)
    return start, length


@triton.jit
def _first_key_tile(seqlen_q, seqlen_k, window_left, BOUND_LEFT: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key tile of a sequence that a query sees; that behind the last where there is no query."""
    tiles = (seqlen_k + KEYS - 1) // KEYS
    first = tl.zeros_like(tiles)
    if BOUND_LEFT:
        first = tl.minimum(tl.maximum(seqlen_k - seqlen_q - window_left, 0) // KEYS, tiles)
    return tl.where(seqlen_q > 0, first, tiles), tiles


@triton.jit
def _order_key_tiles_kernel(
    sequences_ptr,  # [7, B] int32: for each sequence, those with the most keys first, what is stored below
    cu_seqlens_q_ptr,  # [B + 1] int32
    cu_seqlens_k_ptr,  # [B + 1] int32
    seqused_q_ptr,  # [B] int32 or None
    seqused_k_ptr,  # [B] int32 or None
    batch, heads_kv, window_left,  # where programs share the heads of a K/V head, each share counts as one
    BOUND_LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a query tile
    KEYS: tl.constexpr,  # of a key tile
    BLOCK_B: tl.constexpr,  # sequences of one program
):  # fmt: skip
    """Order the sequences by their keys, and count the key tiles that a query sees. Grid: (cdiv(B, BLOCK_B),).

    Each sequence is compared with all others: with thousands of them, too, that takes less time than a launch.
    """
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = b < batch
    start_q, queries = _length(cu_seqlens_q_ptr, seqused_q_ptr, b, mask)
    start_k, keys = _length(cu_seqlens_k_ptr, seqused_k_ptr, b, mask)
    first, tiles = _first_key_tile(queries, keys, window_left, BOUND_LEFT, KEYS)
    rank = tl.zeros([BLOCK_B], tl.int32)
    end = tiles - first
    for other_block in range(0, batch, BLOCK_B):
        other = other_block + tl.arange(0, BLOCK_B)
        is_one = other < batch
        _, other_queries = _length(cu_seqlens_q_ptr, seqused_q_ptr, other, is_one)
        _, other_keys = _length(cu_seqlens_k_ptr, seqused_k_ptr, other, is_one)
        other_first, other_tiles = _first_key_tile(other_queries, other_keys, window_left, BOUND_LEFT, KEYS)
        more = other_keys[None, :] > keys[:, None]
        as_many = (other_keys[None, :] == keys[:, None]) & (other[None, :] < b[:, None])
        before = (more | as_many) & is_one[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
        end += tl.sum(tl.where(before, (other_tiles - other_first)[None, :], 0), 1)
    place_of = sequences_ptr + rank
    tl.store(place_of, end * heads_kv, mask=mask)  # key tiles of all heads up to its last
    tl.store(place_of + batch, tiles - first, mask=mask)  # of one head
    tl.store(place_of + 2 * batch, queries, mask=mask)
    tl.store(place_of + 3 * batch, keys, mask=mask)
    tl.store(place_of + 4 * batch, start_q + queries, mask=mask)
    tl.store(place_of + 5 * batch, start_k + keys, mask=mask)
    tl.store(place_of + 6 * batch, start_q // BLOCK_M + b, mask=mask)  # its first query tile


@triton.jit
def _find_query_tile(cu_seqlens_q_ptr, seqused_q_ptr, tile, batch, BLOCK_M: tl.constexpr):
    """Return where the sequence of a query tile starts, its queries, and the first row of the tile.

    A tile that is in no sequence has no queries.
    """
    low, high = tl.zeros_like(tile), tl.zeros_like(tile) + batch  # the first of it, and that behind the last
    while low < high:
        middle = (low + high) // 2
        is_behind = tl.load(cu_seqlens_q_ptr + middle) // BLOCK_M + middle > tile
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, middle + 1)
    b = tl.maximum(low - 1, 0)
    start, queries = _length(cu_seqlens_q_ptr, seqused_q_ptr, b)
    first_row = (tile - start // BLOCK_M - b) * BLOCK_M
    return start, tl.where(low > 0, queries, 0), tl.maximum(first_row, 0)


@triton.jit
def _clear_kernel(
    dq_ptr,  # [Tq, H, D]
    dk_ptr,  # [Tk, HK, D]
    dv_ptr,  # [Tk, HK, DV]
    cu_seqlens_q_ptr,  # [B + 1] int32
    cu_seqlens_k_ptr,  # [B + 1] int32
    batch, tokens_q, tokens_k, columns_q, columns_k, columns_v,  # of all heads
    window_left,
    BOUND_LEFT: tl.constexpr,
    KEYS: tl.constexpr,  # of a key tile
    BLOCK_T: tl.constexpr,  # tokens of one program
):  # fmt: skip
    """Set to 0 the gradients of tokens in no sequence, and of key tiles that no query sees.

    Grid: (cdiv(max(tokens_q, tokens_k), BLOCK_T),).
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = tl.load(cu_seqlens_q_ptr)
    end = tl.load(cu_seqlens_q_ptr + batch)
    _clear_rows(dq_ptr, token, ((token < start) | (token >= end)) & (token < tokens_q), columns_q)
    low, high = tl.zeros_like(token), tl.zeros_like(token) + batch + 1
    for _ in range(32):  # more than any number of sequences takes
        middle = (low + high) // 2
        is_open = low < high
        is_behind = tl.load(cu_seqlens_k_ptr + middle, mask=is_open, other=0) > token
        high = tl.where(is_open & is_behind, middle, high)
        low = tl.where(is_open & (is_behind == 0), middle + 1, low)
    b = low - 1  # the last sequence that starts at the token or before; the end of all counts as one
    is_inside = (b >= 0) & (b < batch)
    _, queries = _length(cu_seqlens_q_ptr, None, b, is_inside)
    start_k, keys = _length(cu_seqlens_k_ptr, None, b, is_inside)
    first, _tiles = _first_key_tile(queries, keys, window_left, BOUND_LEFT, KEYS)
    is_unseen = (is_inside == 0) | (token < start_k + first * KEYS)
    _clear_rows(dk_ptr, token, is_unseen & (token < tokens_k), columns_k)
    _clear_rows(dv_ptr, token, is_unseen & (token < tokens_k), columns_v)


@triton.jit
def _clear_rows(ptr, token, mask, columns):
    """Set rows to 0, where there are any to set."""
    if tl.sum(mask.to(tl.int32), 0) > 0:
        rows = token.to(tl.int64)[:, None] * columns
        for first in range(0, columns, 64):
            offs = first + tl.arange(0, 64)
            zero = tl.zeros([token.shape[0], 64], ptr.dtype.element_ty)
            tl.store(ptr + rows + offs[None, :], zero, mask=mask[:, None] & (offs < columns)[None, :])


@triton.jit
def _prepare_backward_kernel(
    o_ptr,  # [B, H, Sq, DV]; packed [T, H, DV], like all tensors of rows
    do_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log; packed [T, H]
    dlse_ptr,  # like lse, if HAS_DLSE
    stats_ptr,  # [B * H * tiles_m, 2, BLOCK_M] fp32: LSE * log2(e), with ALiBi more; delta
    dq_semaphore_ptr,  # [B * H * tiles_m * WRITERS + 1] int32: dQ added so far, and how many key tiles were fetched
    cu_seqlens_q_ptr,  # packed: [B + 1] int32; else None
    seqused_q_ptr,  # packed: [B] int32 or None
    alibi_ptr,  # [H], [B, H] or None; packed [H] or None
    stride_ob, stride_oh, stride_dob, stride_doh,  # in units of UNIT elements
    sizes: QueryTiles,
    batch,  # packed: sequences; else None
    alibi_stride,  # of the slopes along B
    STRIDE_OM: tl.constexpr, STRIDE_DOM: tl.constexpr,
    UNIT: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,  # DV rounded up to a power of two, 16 at least
    BLOCK_M: tl.constexpr,
    WRITERS: tl.constexpr,  # of a query tile
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Compute the numbers of a query tile's rows, and set its semaphores to 0. Grid: (B * H * tiles_m,).

    From the last tile to the first, as the next kernel starts with the first heads: what it reads still lies in L2.
    Packed, the grid is (tiles_m * H,), of the query tiles of all sequences.
    """
    heads, seqlen_q, tiles_m = sizes.heads, sizes.seqlen_q, sizes.tiles_m
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if cu_seqlens_q_ptr is None:
        head = tile // tiles_m
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    else:
        start_q, seqlen_q, first_row = _find_query_tile(cu_seqlens_q_ptr, seqused_q_ptr, tile // heads, batch, BLOCK_M)
        b, h = tl.zeros([], tl.int64), (tile % heads).to(tl.int64)
        o_ptr += start_q.to(tl.int64) * STRIDE_OM
        do_ptr += start_q.to(tl.int64) * STRIDE_DOM
    offs_d = tl.arange(0, BLOCK_DV)
    o_ptr += (b * stride_ob + h * stride_oh) * UNIT
    do_ptr += (b * stride_dob + h * stride_doh) * UNIT
    for start in tl.static_range(0, BLOCK_M, 64):  # 128 rows at once: twice the waste, 174 registers
        offs = start + tl.arange(0, 64)
        if cu_seqlens_q_ptr is None:
            offs_m = tile % tiles_m * BLOCK_M + offs
        else:
            offs_m = first_row + offs
        mask = (offs_m < seqlen_q)[:, None] & (offs_d < DV)[None, :]
        rows = offs_m.to(tl.int64)[:, None]
        o = tl.load(o_ptr + rows * STRIDE_OM + offs_d[None, :], mask=mask, other=0.0)
        do = tl.load(do_ptr + rows * STRIDE_DOM + offs_d[None, :], mask=mask, other=0.0)
        delta = row_products(o, do, "tf32")  # which is not read: operands have 16 bits
        if cu_seqlens_q_ptr is None:
            row = head.to(tl.int64) * seqlen_q + offs_m
        else:
            row = (start_q + offs_m).to(tl.int64) * heads + h
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + row, mask=offs_m < seqlen_q, other=0.0)
        lse = tl.load(lse_ptr + row, mask=offs_m < seqlen_q, other=-float("inf"))
        # Rows without a key, and behind the last: P = exp2(score - inf) = 0. The gradient of their LSE may be NaN.
        delta = tl.where(lse == -float("inf"), 0.0, delta)
        lse = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
        if alibi_ptr is not None:  # that part of slope * distance which depends on the row, counted from the tile's
            slope = tl.load(alibi_ptr + b * alibi_stride + h).to(tl.float32) * 1.4426950408889634
            lse += slope * offs.to(tl.float32)
        stats = stats_ptr + tile.to(tl.int64) * (2 * BLOCK_M) + offs
        tl.store(stats, lse)
        tl.store(stats + BLOCK_M, delta)
    tl.store(dq_semaphore_ptr + tile * WRITERS + tl.arange(0, WRITERS), tl.zeros([WRITERS], tl.int32))
    if tile == 0:
        tl.store(dq_semaphore_ptr + tl.num_programs(0) * WRITERS, 0)


@triton.jit
def _finish_dq_kernel(
    acc_ptr,  # [B * H * tiles_m, PARTS, 4096] fp32, as the registers of a warpgroup held it
    dq_semaphore_ptr,  # [B * H * tiles_m, WRITERS] int32: key tiles that the query tile sees
    dq_ptr,  # [B, H, Sq, D]; packed [T, H, D]
    cu_seqlens_q_ptr,  # packed: [B + 1] int32; else None
    seqused_q_ptr,  # packed: [B] int32 or None
    stride_b, stride_h,  # in units of UNIT elements
    heads, seqlen_q, tiles_m,
    scale,
    batch,  # packed: sequences; else None
    STRIDE_M: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # of 64 rows by 64 columns
    WRITERS: tl.constexpr,  # of a query tile
):  # fmt: skip
    """Scale a part of dQ and store it as a matrix. Grid: (B * H * tiles_m * PARTS,); packed (tiles_m * H * PARTS,).

    From the last tile to the first, as the last heads were written last: they still lie in L2.
    """
    gdc_wait()  # all before ran while the kernel before was ending
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, part = program // PARTS, program % PARTS
    if cu_seqlens_q_ptr is None:
        head = tile // tiles_m
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    else:
        start_q, seqlen_q, first_row = _find_query_tile(cu_seqlens_q_ptr, seqused_q_ptr, tile // heads, batch, BLOCK_M)
        b, h = tl.zeros([], tl.int64), (tile % heads).to(tl.int64)
        dq_ptr += start_q.to(tl.int64) * STRIDE_M
        if first_row >= seqlen_q:
            return
    offs = tl.arange(0, 4096)
    # Nobody added to the dQ of a tile that sees no key: it is 0.
    written = tl.where(tl.load(dq_semaphore_ptr + tile * WRITERS) > 0, 4096, 0)
    acc = tl.load(acc_ptr + program.to(tl.int64) * 4096 + offs, mask=offs < written, other=0.0)
    # columns / 8, warp, row, lane, 8 rows further, column -> rows, columns
    acc = acc.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
    DOWN: tl.constexpr = BLOCK_M // 64  # parts of a tile that lie below one another; the others lie side by side
    if cu_seqlens_q_ptr is None:
        first_row = tile % tiles_m * BLOCK_M
    offs_m = first_row + part % DOWN * 64 + tl.arange(0, 64)
    offs_d = part // DOWN * 64 + tl.arange(0, 64)
    mask = (offs_m < seqlen_q)[:, None] & (offs_d < D)[None, :]
    dq = dq_ptr + (b * stride_b + h * stride_h) * UNIT + offs_m.to(tl.int64)[:, None] * STRIDE_M + offs_d[None, :]
    tl.store(dq, (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sinks_gradient_kernel(
    stats_ptr,  # [tiles, 2, BLOCK_M] fp32, of ``_prepare_backward_kernel``: query tiles of all heads and sequences
    sinks_ptr,  # [H]
    dsinks_ptr,  # [H]
    heads,
    tiles_m,  # query tiles of a head that lie side by side: packed 1, as the heads of a tile do
    tiles,  # query tiles of one head, in all sequences
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,  # query tiles that are added up at once
):  # fmt: skip
    """Compute the gradient of a head's sink, - sum exp(sink - LSE) delta over its rows: its value is 0. Grid: (H,).

    Rows without a key, and behind the last, have an LSE of infinity and add 0.
    """
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    row = tl.arange(0, BLOCK_M)
    for first in range(0, tiles, BLOCK_T):
        tile = first + tl.arange(0, BLOCK_T)
        mask = (tile < tiles)[:, None] & (row >= 0)[None, :]
        place = (tile // tiles_m * heads + head) * tiles_m + tile % tiles_m
        stats = stats_ptr + place.to(tl.int64)[:, None] * (2 * BLOCK_M) + row[None, :]
        lse = tl.load(stats, mask=mask, other=float("inf"))
        total -= tl.exp2(sink - lse) * tl.load(stats + BLOCK_M, mask=mask, other=0.0)
    tl.store(dsinks_ptr + head, tl.sum(tl.sum(total, 1), 0).to(dsinks_ptr.dtype.element_ty))
