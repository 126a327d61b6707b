"""Attention of few query rows to many keys in a cache, contiguous or paged (Triton, sm_80 and newer).

The rows of all query heads of one K/V head, token by token, are packed into the rows of a tile, so every K and V is
read once. The keys of a sequence are split, one program each; a second kernel merges what they leave, in a
fixed order and without atomics, so results have the same bits in every run.

Source: Flash-Decoding (Dao et al., 2023) for the splits, FlashAttention-3 (Shah et al., 2024) for the packed rows.
Ours: splits are made on the device from the lengths found there, of all sequences or of one alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_arguments import (
    BiasStrides,
    CacheInputs,
    CachePointers,
    CacheSizes,
    KVSplits,
    PageStrides,
    SplitOutputs,
    Strides,
    Window,
)
from ..primitives import cap_scores, head_offset, load_rows
from .fp8_primitives import (
    HEADROOM,
    finish_columns,
    load_columns,
    load_scales,
    power_of_two,
    prepare_queries,
    scale_bases,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # finite number of fp32


@triton.jit
def _visible_keys(b, cache, sizes, window_left, HAS_LEFT: tl.constexpr):
    """Return first and end of the keys that some row of sequence ``b`` sees; ``b`` is one or a vector."""
    end = b * 0 + sizes.capacity
    if cache.seqlens_ptr is not None:
        found = tl.load(cache.seqlens_ptr + b, mask=b < sizes.batch, other=0) + sizes.seqlen_new
        end = tl.minimum(tl.maximum(found, 0), sizes.capacity)
    first = b * 0
    if cache.leftpad_ptr is not None:
        first = tl.maximum(tl.load(cache.leftpad_ptr + b, mask=b < sizes.batch, other=0), 0)
    if HAS_LEFT:
        first = tl.maximum(first, end - sizes.seqlen_q - window_left)
    return tl.minimum(first, end), end


@triton.jit
def _split_tiles(first, end, kv_splits, BLOCK_N: tl.constexpr):
    """Return the tiles of one split, and how many splits there are, one at the least.

    Both depend on the keys of this sequence alone.
    """
    tiles = tl.cdiv(end, BLOCK_N) - first // BLOCK_N
    each = tl.maximum(tl.cdiv(tiles, kv_splits.splits), kv_splits.least_tiles)
    return each, tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def _balanced_split_tiles(first, end, batch, present, kv_splits, BLOCK_N: tl.constexpr):
    """Return the same for a vector of sequences, so that the splits of all of them are about as long.

    There are at most ``kv_splits.splits`` and one more for every sequence. Where no sequence is much longer than the
    mean, each has ``kv_splits.uniform``.
    """
    tiles = tl.where(present, tl.cdiv(end, BLOCK_N) - first // BLOCK_N, 0)
    total = tl.sum(tiles, 0)
    mean = total // batch
    quota = tl.maximum(tl.cdiv(total, kv_splits.splits), kv_splits.least_tiles)
    wanted = tl.maximum((tiles + quota // 2) // quota, 1)
    wanted = tl.where(tl.max(tiles, 0) <= mean + mean // 8, kv_splits.uniform, wanted)
    each = tl.maximum(tl.cdiv(tiles, wanted), 1)
    return each, tl.where(present, tl.maximum(tl.cdiv(tiles, each), 1), 0)


@triton.jit
def _find_split(chunk, cache, sizes, window_left, kv_splits, HAS_LEFT: tl.constexpr, TILE: tl.constexpr):
    """Return sequence and number of the split ``chunk``, its tiles, the splits of the sequence, and its keys.

    The number is not below that of the splits where there is nothing to do.
    """
    if TILE.BALANCED:
        seqs = tl.arange(0, TILE.BLOCK_B)
        firsts, ends = _visible_keys(seqs, cache, sizes, window_left, HAS_LEFT)
        tiles, counts = _balanced_split_tiles(firsts, ends, sizes.batch, seqs < sizes.batch, kv_splits, TILE.BLOCK_N)
        b = tl.sum((tl.cumsum(counts, 0) <= chunk).to(tl.int32), 0)  # sequences whose splits all come before
        split = chunk - tl.sum(tl.where(seqs < b, counts, 0), 0)
        each = tl.sum(tl.where(seqs == b, tiles, 0), 0)
        count = tl.sum(tl.where(seqs == b, counts, 0), 0)
        first = tl.sum(tl.where(seqs == b, firsts, 0), 0)
        end = tl.sum(tl.where(seqs == b, ends, 0), 0)
    else:
        b, split = chunk // kv_splits.splits, chunk % kv_splits.splits
        first, end = _visible_keys(b, cache, sizes, window_left, HAS_LEFT)
        each, count = _split_tiles(first, end, kv_splits, TILE.BLOCK_N)
    return b, split, each, count, first, end


@triton.jit
def _keys_of_rows(
    begin, stop, first_token, last_token, end, seqlen_q, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the part of [begin, stop) that queries [first_token, last_token] see."""
    if HAS_RIGHT:
        last = tl.minimum(last_token, seqlen_q - 1)
        stop = tl.minimum(stop, tl.maximum(last + (end - seqlen_q) + window.right + 1, 0))
    if HAS_LEFT:
        seen = tl.maximum(first_token + (end - seqlen_q) - window.left, 0)
        begin = tl.maximum(begin, seen // BLOCK_N * BLOCK_N)
    return begin, stop


@triton.jit
def _tile_pointers(
    base, page, cols, start_n, offs_n, offs_col, strides, CALL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return pointers to a tile of K or V [BLOCK_N, columns], whose pages are ``page``."""
    if CALL.PAGE_SIZE == 0:
        step = tl.full([], 0, tl.int64) + start_n
        return base + step * strides.ROW + (offs_n[:, None] * strides.ROW + offs_col[None, :])
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        inside = cols % CALL.PAGE_SIZE
        if CALL.PAGE_SIZE % BLOCK_N == 0:
            inside = start_n % CALL.PAGE_SIZE + offs_n
        stride_page = strides.b
        if CALL.WIDE:
            page, inside = page.to(tl.int64), inside.to(tl.int64)
        else:  # counted in units of ALIGN, offsets mostly fit 32 bits
            stride_page = stride_page.to(tl.int32)
        rows = (page * stride_page + inside * (strides.ROW // CALL.ALIGN)).to(tl.int64) * CALL.ALIGN
        return base + rows[:, None] + offs_col[None, :]


@triton.jit
def _prefetch(base, start_n, offs_n, end, STRIDE_N: tl.constexpr, BLOCK_COLS: tl.constexpr, ITEM_BYTES: tl.constexpr):
    """Ask the L2 cache for a tile of K or V; rows past the last key ask for that one."""
    LINE: tl.constexpr = 128 // ITEM_BYTES  # elements
    lines = tl.arange(0, BLOCK_COLS // LINE if BLOCK_COLS > LINE else 1) * LINE
    rows = tl.minimum(start_n + offs_n, end - 1).to(tl.int64)
    ptrs = base + rows[:, None] * STRIDE_N + lines[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _attend(
    acc, acc_odd, l, m, q, q_odd, k_ptrs, rest_ptrs, v_ptrs, cols, mask_n, offs_d, offs_rest, offs_dv, position, window,
    scale, k_scales, v_scales, softcap, slope, bias_rows, bias_strides, CALL: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys, those of ``mask_n``, to output, sum and maximum: a step of the online softmax.

    Keys and values of 8 bits are exact in the dtype of q. A scale of each key is a factor on its scores in fp32, and
    one of each value on P. ``q``: the queries, and those of the columns behind the values; of pairs their even columns.
    """
    mask_k, mask_v = mask_n[:, None], mask_n[:, None]
    if CALL.D != CALL.BLOCK_D:
        mask_k = mask_k & (offs_d[None, :] < CALL.D // CALL.ITEMS)
    if CALL.DV != CALL.BLOCK_DV:
        mask_v = mask_v & (offs_dv[None, :] < CALL.DV // CALL.ITEMS)
    k, k_odd = load_columns(k_ptrs, mask_k, q[0].dtype, CALL.ITEMS > 1, CALL.HAS_PTX)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q[0], tl.trans(k), input_precision=CALL.PRECISION)  # [BLOCK_M, BLOCK_N]
    if CALL.ITEMS > 1:
        s = tl.dot(q_odd[0], tl.trans(k_odd), s)
    if CALL.REST > 0:
        mask_rest = mask_n[:, None]
        if CALL.REST != CALL.BLOCK_REST:
            mask_rest = mask_rest & (offs_rest[None, :] < CALL.REST // CALL.ITEMS)
        rest, rest_odd = load_columns(rest_ptrs, mask_rest, q[0].dtype, CALL.ITEMS > 1, CALL.HAS_PTX)
        s = tl.dot(q[1], tl.trans(rest), s, input_precision=CALL.PRECISION)
        if CALL.ITEMS > 1:
            s = tl.dot(q_odd[1], tl.trans(rest_odd), s)
    s *= scale[:, None] if CALL.IN_FP16 else scale
    if CALL.K_BY_TOKEN:
        s *= k_scales[None, :]
    if softcap is not None:
        s = cap_scores(s, softcap, CALL.PRECISION == "ieee")
    if slope is not None:
        s -= slope[:, None] * tl.abs(position[:, None] - cols[None, :]).to(tl.float32)
    visible = mask_n[None, :]
    if CALL.HAS_RIGHT:
        visible = visible & (cols[None, :] <= position[:, None] + window.right)
    if CALL.HAS_LEFT:
        visible = visible & (cols[None, :] >= position[:, None] - window.left)
    if bias_rows is not None:
        bias_ptrs = bias_rows[:, None] + cols[None, :].to(tl.int64) * bias_strides.COLUMN
        bias = tl.load(bias_ptrs, mask=visible, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        # The most negative number hides a key behind all others, but where all have it they are equal: only infinity is
        # infinite in units of log2(e), too. And NaN, which a plain maximum drops, stays NaN.
        finite = tl.clamp(bias * LOG2_E, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        s += tl.where(tl.abs(bias) == float("inf"), bias, finite)
    s = tl.where(visible, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has met no key has m == -inf, and -inf - -inf is NaN.
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None] + HEADROOM if CALL.IN_FP16 else s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    v, v_odd = k, k_odd
    if not CALL.SHARED_KV:
        v, v_odd = load_columns(v_ptrs, mask_v, q[0].dtype, CALL.ITEMS > 1, CALL.HAS_PTX)  # [BLOCK_N, BLOCK_DV]
    if CALL.V_BY_TOKEN and CALL.IN_FP16:
        unit = power_of_two(tl.max(tl.abs(v_scales), 0))  # P stays within fp16
        p = (p * (v_scales / unit)[None, :]).to(v.dtype)
        acc = acc * alpha[:, None] + tl.dot(p, v) * unit
        if CALL.ITEMS > 1:
            acc_odd = acc_odd * alpha[:, None] + tl.dot(p, v_odd) * unit
    else:
        if CALL.V_BY_TOKEN:
            v = (v.to(tl.float32) * v_scales[:, None]).to(v.dtype)
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision=CALL.PRECISION)
        if CALL.ITEMS > 1:
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
    return acc, acc_odd, l, m_new


@triton.jit
def _add_sink(sink, l, m):
    """Add a key with this score and a value of 0; return the factor on the output, the sum and the maximum."""
    sink *= LOG2_E
    top = tl.maximum(m, sink)
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    alpha = tl.exp2(m - top_safe)
    return alpha, l * alpha + tl.exp2(sink - top_safe), top


@triton.jit
def _cache_of(k_ptr, v_ptr, cache, b, h, k_strides, v_strides, stride_tb, ALIGN: tl.constexpr):
    """Return where head ``h`` of K and V begins, and the row of the page table; without one, the sequence's page."""
    k_base = k_ptr + h.to(tl.int64) * k_strides.h * ALIGN
    v_base = v_ptr + h.to(tl.int64) * v_strides.h * ALIGN
    if cache.page_table_ptr is None:
        page = b
        if cache.batch_idx_ptr is not None:
            page = tl.load(cache.batch_idx_ptr + b)
        k_base += page.to(tl.int64) * k_strides.b * ALIGN
        v_base += page.to(tl.int64) * v_strides.b * ALIGN
        return k_base, v_base, page
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        return k_base, v_base, cache.page_table_ptr + b.to(tl.int64) * stride_tb


@triton.jit
def _load_pages(table, start_n, offs_n, first, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of a tile, or the one page of all; 0 for keys outside of [first, end)."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + start_n // PAGE_SIZE, mask=start_n < end, other=0)
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        cols = start_n + offs_n
        return tl.load(table + cols // PAGE_SIZE, mask=(cols >= first) & (cols < end), other=0)


@triton.jit
def _prefetch_split(
    inputs, cache, b, h, first, end, split, each, count, offs_n, k_strides, v_strides, stride_tb,
    CALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask the L2 cache for the first keys of a split.

    They need not wait until the queries have come, which Triton's pipeline makes them do.
    """
    place = (first // TILE.BLOCK_N + split * each) * TILE.BLOCK_N
    if split < count and place < end:
        k_base, v_base, _ = _cache_of(
            inputs.k_ptr, inputs.v_ptr, cache, b, h, k_strides, v_strides, stride_tb, CALL.ALIGN
        )
        ITEM_BYTES: tl.constexpr = inputs.k_ptr.dtype.element_ty.primitive_bitwidth // 8
        for step in tl.static_range(TILE.NUM_STAGES - 1):
            start = place + step * TILE.BLOCK_N
            _prefetch(k_base, start, offs_n, end, k_strides.ROW, CALL.BLOCK_D // CALL.ITEMS, ITEM_BYTES)
            _prefetch(v_base, start, offs_n, end, v_strides.ROW, CALL.BLOCK_DV // CALL.ITEMS, ITEM_BYTES)


@triton.jit
def _load_queries(q_ptr, b, token, head, row, rows, batch, offs_d, q_strides, CALL: tl.constexpr):
    """Return the queries [BLOCK_M, BLOCK_D], those of the columns behind the values, and the numbers of these.

    They are asked for before it is known whether there is a split: the length may still be on its way.
    """
    q_rows = q_ptr + (b.to(tl.int64) * q_strides.b + head.to(tl.int64) * q_strides.h) * CALL.ALIGN_Q
    q_rows += token.to(tl.int64) * q_strides.ROW
    present = tl.where(b < batch, rows, 0)
    q_ptrs = q_rows[:, None] + offs_d[None, :]
    q = load_rows(q_ptrs, row, present, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)
    q_rest, offs_rest = q, offs_d
    if CALL.REST > 0:
        offs_rest = tl.arange(0, CALL.BLOCK_REST)
        q_rest_ptrs = q_rows[:, None] + (CALL.DV + offs_rest)[None, :]
        q_rest = load_rows(q_rest_ptrs, row, present, offs_rest, CALL.REST, True, CALL.REST != CALL.BLOCK_REST)
    return q, q_rest, offs_rest


@triton.jit
def _slopes_of(alibi_ptr, b, head, mask_m, CALL: tl.constexpr):
    """Return the slope of ALiBi of each row, or None."""
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b * CALL.STRIDE_ALIBI_B + head, mask=mask_m, other=0.0).to(tl.float32)
        slope *= LOG2_E
    return slope


@triton.jit
def _bias_rows_of(bias_ptr, b, token, head, seqlen_q, bias_strides):
    """Return where the bias of each row begins, or None; rows past the last one read what that reads."""
    bias_rows = None
    if bias_ptr is not None:
        bias_rows = bias_ptr + b.to(tl.int64) * bias_strides.b + head.to(tl.int64) * bias_strides.h
        bias_rows += tl.minimum(token, seqlen_q - 1).to(tl.int64) * bias_strides.m
    return bias_rows


@triton.jit
def _store_partials(acc, l, m, outputs, at, offs_dv, mask_m, mask_o, DV: tl.constexpr):
    """Store what one of several splits leaves of its rows, at the places ``at`` [BLOCK_M].

    Not their LSE: beside the most negative number, a common mask, the logarithm of the sum is lost.
    """
    tl.store(outputs.o_part_ptr + at[:, None] * DV + offs_dv[None, :], acc, mask=mask_o)
    tl.store(outputs.sums_part_ptr + 2 * at, m, mask=mask_m)
    tl.store(outputs.sums_part_ptr + 2 * at + 1, l, mask=mask_m)


@triton.jit
def _store_rows(
    acc, l, m, sinks_ptr, outputs, b, token, head, offs_dv, mask_m, mask_o, seqlen_q, heads, o_strides,
    CALL: tl.constexpr,
):  # fmt: skip
    """Store rows that have met all their keys. One that met none has l == 0: its output is 0, its LSE -inf."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32)
        alpha, l, m = _add_sink(sink, l, m)
        acc *= alpha[:, None]
    has_keys = l != 0
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    o_rows = (b.to(tl.int64) * o_strides.b + head.to(tl.int64) * o_strides.h) * CALL.ALIGN_O + token.to(
        tl.int64
    ) * o_strides.ROW
    tl.store(outputs.o_ptr + o_rows[:, None] + offs_dv[None, :], out.to(outputs.o_ptr.dtype.element_ty), mask=mask_o)
    if CALL.STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) / LOG2_E, -float("inf"))
        tl.store(outputs.lse_ptr + (b.to(tl.int64) * heads + head) * seqlen_q + token, lse, mask=mask_m)


@triton.jit
def _decode_kernel(
    inputs: CacheInputs,
    cache: CachePointers,
    sinks_ptr,  # [H], or None
    alibi_ptr,  # [H] or [B, H], or None
    bias_ptr,  # [B, H, Sq, capacity], or None
    k_scale_ptr,  # fp32 by which keys of 8 bits are multiplied, [PAGES, PAGE_SIZE, HK] by its strides, or None
    v_scale_ptr,  # the same of values; where they are columns of the keys that of the keys
    outputs: SplitOutputs,
    q_strides: Strides,  # in units of ALIGN_Q elements
    k_strides: Strides, v_strides: Strides,  # in units of ALIGN elements
    k_scale_strides: PageStrides, v_scale_strides: PageStrides,  # elements; 0 along axes that share a scale
    o_strides: Strides,  # in units of ALIGN_O elements
    stride_tb,  # of the page table
    bias_strides: BiasStrides,  # elements
    sizes: CacheSizes,
    window: Window,
    kv_splits: KVSplits,
    scale,  # softmax_scale * log2(e); with a softcap that over softcap, times 2, or as ``cap_scores`` takes it for fp32
    softcap,  # softcap * log2(e), or None
    CALL: tl.constexpr,  # DecodeCall
    TILE: tl.constexpr,  # DecodeTile
    DEPENDENT_LAUNCH: tl.constexpr,  # launched before the kernel before it has ended (sm_90 and newer)
):  # fmt: skip
    """Attend BLOCK_M rows to one split of the keys of a sequence. Grid: (TILES_M * HK * splits,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    COLUMNS: tl.constexpr = CALL.BLOCK_DV // CALL.ITEMS
    pid = tl.program_id(0)
    tile, h = pid % TILE.TILES_M, (pid // TILE.TILES_M) % sizes.heads_kv
    chunk = pid // (TILE.TILES_M * sizes.heads_kv)
    # What L2 is asked for needs no wait: it holds what the kernel before writes, too. But lengths and pages are read.
    IS_TOLD: tl.constexpr = (
        cache.seqlens_ptr is None and cache.leftpad_ptr is None and cache.batch_idx_ptr is None and CALL.PAGE_SIZE == 0
    )
    tl.static_assert(IS_TOLD or not TILE.PREFETCH, "which keys come first is read from memory")
    tl.static_assert(not (TILE.PREFETCH and CALL.SHARED_KV), "columns of K are no power of two")
    if DEPENDENT_LAUNCH and not TILE.PREFETCH:  # no memory is read before this wait
        gdc_wait()
        gdc_launch_dependents()

    b, split, each, count, first, end = _find_split(chunk, cache, sizes, window.left, kv_splits, CALL.HAS_LEFT, TILE)
    offs_n, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_N), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    pairs_d, pairs_dv = tl.arange(0, CALL.BLOCK_D // CALL.ITEMS), tl.arange(0, CALL.BLOCK_DV // CALL.ITEMS)
    row = tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # token by token, in each the GROUP heads of this K/V head
    token, head = row // CALL.GROUP, h * CALL.GROUP + row % CALL.GROUP
    rows = sizes.seqlen_q * CALL.GROUP
    mask_m = row < rows
    if TILE.PREFETCH:
        _prefetch_split(
            inputs, cache, b, h, first, end, split, each, count, offs_n, k_strides, v_strides, stride_tb, CALL, TILE
        )
    if DEPENDENT_LAUNCH and TILE.PREFETCH:
        gdc_wait()
        gdc_launch_dependents()

    q, q_rest, offs_rest = _load_queries(inputs.q_ptr, b, token, head, row, rows, sizes.batch, offs_d, q_strides, CALL)
    if split >= count:
        return

    position = token + (end - sizes.seqlen_q)  # [BLOCK_M], of a row among the keys
    slope = _slopes_of(alibi_ptr, b, head, mask_m, CALL)
    bias_rows = _bias_rows_of(bias_ptr, b, token, head, sizes.seqlen_q, bias_strides)

    # Keys [begin, stop) of this program; tiles start at multiples of BLOCK_N, as pages do.
    begin = (first // TILE.BLOCK_N + split * each) * TILE.BLOCK_N
    stop = tl.minimum(begin + each * TILE.BLOCK_N, end)
    begin, stop = _keys_of_rows(
        begin, stop, tile * TILE.BLOCK_M // CALL.GROUP, (tile * TILE.BLOCK_M + TILE.BLOCK_M - 1) // CALL.GROUP, end,
        sizes.seqlen_q, window, CALL.HAS_LEFT and TILE.TILES_M > 1, CALL.HAS_RIGHT and TILE.TILES_M > 1, TILE.BLOCK_N,
    )  # fmt: skip
    k_base, v_base, table = _cache_of(
        inputs.k_ptr, inputs.v_ptr, cache, b, h, k_strides, v_strides, stride_tb, CALL.ALIGN
    )

    k_scale_base, v_scale_base, scale = scale_bases(
        k_scale_ptr, v_scale_ptr, k_base, v_base, h, table, scale, k_scale_strides, v_scale_strides, CALL
    )
    queries, odd_queries, offs_rest, scale = prepare_queries(q, q_rest, offs_rest, scale, BLOCK_M, CALL)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    acc_odd = acc
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    # The pages of a tile are read one tile ahead: the addresses of K and V wait for no load.
    page = begin * 0
    if CALL.PAGE_SIZE > 0:
        page = _load_pages(table, begin, offs_n, first, end, CALL.PAGE_SIZE, TILE.BLOCK_N)
    for start_n in tl.range(begin, stop, TILE.BLOCK_N, num_stages=TILE.NUM_STAGES):
        cols = start_n + offs_n
        mask_n = (cols >= first) & (cols < end)  # what lies past a sequence is never read
        k_ptrs = _tile_pointers(k_base, page, cols, start_n, offs_n, pairs_d, k_strides, CALL, TILE.BLOCK_N)
        v_ptrs = _tile_pointers(v_base, page, cols, start_n, offs_n, pairs_dv, v_strides, CALL, TILE.BLOCK_N)
        rest_ptrs = k_ptrs
        if CALL.REST > 0:
            rest_ptrs = _tile_pointers(
                k_base + CALL.DV // CALL.ITEMS, page, cols, start_n, offs_n, offs_rest, k_strides, CALL, TILE.BLOCK_N
            )
        k_scales, v_scales = load_scales(
            k_scale_base, v_scale_base, scale, page, cols, mask_n, k_scale_strides, v_scale_strides, CALL
        )
        if CALL.PAGE_SIZE > 0:
            page = _load_pages(table, start_n + TILE.BLOCK_N, offs_n, first, end, CALL.PAGE_SIZE, TILE.BLOCK_N)
        acc, acc_odd, l, m = _attend(
            acc, acc_odd, l, m, queries, odd_queries, k_ptrs, rest_ptrs, v_ptrs, cols, mask_n, pairs_d, offs_rest,
            pairs_dv, position, window, scale, k_scales, v_scales, softcap, slope, bias_rows, bias_strides, CALL,
        )  # fmt: skip

    acc, l = finish_columns(acc, acc_odd, l, v_scale_ptr, v_scale_base, CALL)
    mask_o = mask_m[:, None]
    if CALL.DV != CALL.BLOCK_DV:
        mask_o = mask_o & (offs_dv[None, :] < CALL.DV)
    if TILE.SPLIT:  # noqa: SIM102 - a constexpr, and a number that only the GPU knows
        if count > 1:
            at = (chunk * sizes.heads_kv + h).to(tl.int64) * rows + row
            _store_partials(acc, l, m, outputs, at, offs_dv, mask_m, mask_o, CALL.DV)
            return
    _store_rows(
        acc, l, m, sinks_ptr, outputs, b, token, head, offs_dv, mask_m, mask_o, sizes.seqlen_q,
        sizes.heads_kv * CALL.GROUP, o_strides, CALL,
    )  # fmt: skip


@triton.jit
def _merge_row(
    o_part_ptr, sums_part_ptr, o_ptr, lse_ptr, sinks_ptr, o_strides, b, h, row, first_column, chunk, count,
    heads_kv, seqlen_q, ALIGN_O: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_S: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge splits [chunk, chunk + count) of COLUMNS columns of one row, BLOCK_S at a time."""
    rows = seqlen_q * GROUP
    offs_s, offs_dv = tl.arange(0, BLOCK_S), first_column + tl.arange(0, COLUMNS)
    m = tl.full([], -float("inf"), tl.float32)
    l = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, count, BLOCK_S):
        present = offs_s < tl.where(row < rows, count - start, 0)
        at = ((chunk + start + offs_s) * heads_kv + h).to(tl.int64) * rows + row  # [BLOCK_S]
        m_part = tl.load(sums_part_ptr + 2 * at, mask=present, other=-float("inf"))
        l_part = tl.load(sums_part_ptr + 2 * at + 1, mask=present, other=0.0)
        mask = present[:, None] & (offs_dv[None, :] < DV)
        part = tl.load(o_part_ptr + at[:, None] * DV + offs_dv[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        # A split without keys has -inf; where all have it, -inf - -inf is NaN.
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(m_part - m_safe)
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(l_part * weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m = m_new
    token, head = row // GROUP, h * GROUP + row % GROUP
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row < rows, other=0.0).to(tl.float32)
        alpha, l, m = _add_sink(sink, l, m)
        acc *= alpha
    has_keys = l != 0
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)
    o_row = head_offset(b, head, o_strides.b, o_strides.h) * ALIGN_O + token.to(tl.int64) * o_strides.ROW
    tl.store(o_ptr + o_row + offs_dv, out.to(o_ptr.dtype.element_ty), mask=offs_dv < tl.where(row < rows, DV, 0))
    if STORE_LSE:
        lse_row = (b.to(tl.int64) * heads_kv * GROUP + head) * seqlen_q + token
        lse = tl.where(has_keys, (m + tl.log2(l)) / LOG2_E, -float("inf"))
        tl.store(lse_ptr + lse_row, lse, mask=row < tl.where(first_column == 0, rows, 0))


@triton.jit
def _merge_splits_kernel(
    o_part_ptr,  # [SPLITS, HK, Sq * GROUP, DV] fp32, of each split before its sum divides it
    sums_part_ptr,  # [SPLITS, HK, Sq * GROUP, 2] fp32: the largest score of a row, and its sum
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    cache: CachePointers,  # without pages and places: only lengths are read
    sinks_ptr,  # [H], or None
    o_strides: Strides,  # in units of ALIGN_O elements
    sizes: CacheSizes,
    window_left,
    kv_splits: KVSplits,
    ALIGN_O: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of _decode_kernel
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits of one step
    ROWS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,  # of one program
    TILES_DV: tl.constexpr,  # programs that share the columns of a row
    HAS_LEFT: tl.constexpr, BALANCED: tl.constexpr, STORE_LSE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS rows of one sequence and K/V head. Grid: (TILES_DV * cdiv(Sq * GROUP, ROWS), HK, B)."""
    pid, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_column, first_row = pid % TILES_DV * COLUMNS, pid // TILES_DV * ROWS
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if BALANCED:
        seqs = tl.arange(0, BLOCK_B)
        firsts, ends = _visible_keys(seqs, cache, sizes, window_left, HAS_LEFT)
        _, counts = _balanced_split_tiles(firsts, ends, sizes.batch, seqs < sizes.batch, kv_splits, BLOCK_N)
        chunk = tl.sum(tl.where(seqs < b, counts, 0), 0)
        count = tl.sum(tl.where(seqs == b, counts, 0), 0)
    else:
        first, end = _visible_keys(b, cache, sizes, window_left, HAS_LEFT)
        _, count = _split_tiles(first, end, kv_splits, BLOCK_N)
        chunk = b * kv_splits.splits
    if count == 1:  # _decode_kernel wrote the output
        return

    for i in tl.static_range(ROWS):
        _merge_row(
            o_part_ptr, sums_part_ptr, o_ptr, lse_ptr, sinks_ptr, o_strides, b, h, first_row + i,
            first_column, chunk, count, sizes.heads_kv, sizes.seqlen_q, ALIGN_O, GROUP, DV, COLUMNS, BLOCK_S, STORE_LSE,
        )  # fmt: skip
