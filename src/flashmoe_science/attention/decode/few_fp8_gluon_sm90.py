"""Attention of few query rows to an 8-bit cache whose values are columns of its keys (MLA), for Hopper.

As ``few_gluon_sm90``: one warpgroup, transposed products, tiles of 64 keys that it copies for itself. Keys and values
go to the matrix units through registers, where one instruction makes two numbers of fp16 out of two of e4m3. Two
neighbours of a row travel as one number of 16 bits, as in ``fp8_primitives``: scores are a sum of two products, of even
and of odd columns, and the output has two parts. Tiles are half as large, so an SM has two programs: one multiplies
while the other waits. 32 rows are two programs that read the same keys, one after the other from L2.

A row's maximum is that of its scores times the scale of their values. So P times that scale stays within fp16.

Source: ours.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gpu.gluon_sm90 import make_barriers, make_tiles, wait_for_kernel_before
from ...gpu.gluon_versions import barrier, tma_load
from ..kernel_arguments import KVSplits, LatentSizes, NewStrides, PageStrides
from .fp8_primitives import HEADROOM, LEVEL, SPLIT_PAIRS
from .primitives_sm90 import (
    COLUMNS,
    KEYS,
    MORE,
    ROWS,
    STAGES,
    find_share,
    hide_keys,
    launch_dependents,
    place_of_tile,
    uniform,
    zero_rows,
)

_PAIRS = gl.constexpr(COLUMNS.value // 2)
_MORE_PAIRS = gl.constexpr(MORE.value // 2)
_PART = gl.constexpr(64)  # pairs that are multiplied at once: 128 bytes of a row
_LEAST = gl.constexpr(2.0**-80)  # of a scale, as a row's maximum counts it: P itself stays finite
_OF_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _even_and_odd(pairs, layout: gl.constexpr):
    """Return the even and the odd columns of a tile in shared memory, whose pairs are numbers of 16 bits."""
    x = pairs.load(layout).to(gl.int16, bitcast=True)
    return gl.inline_asm_elementwise(SPLIT_PAIRS, "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, slot, page, inside):
    """Ask for one tile of keys."""
    bar = bars.index(slot)
    mbarrier.expect(bar, k_desc.block_type.nbytes + k_more_desc.block_type.nbytes)
    tma_load(k_desc, [page, inside, 0], bar, k_bufs.index(slot))
    tma_load(k_more_desc, [page, inside, _PAIRS], bar, k_more_bufs.index(slot))


@gluon.jit
def _load_queries(
    q_ptr, b, first_row, seqlen_q, q_strides, FIRST: gl.constexpr, COUNT: gl.constexpr, HEADS: gl.constexpr
):
    """Return ``COUNT`` columns of the rows from ``first_row`` on in fp32, and the largest size in each row."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, _OF_QUERIES))
    column = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, _OF_QUERIES))
    at = b.to(gl.int64) * q_strides.b + (row % HEADS).to(gl.int64) * q_strides.h
    at += (row // HEADS).to(gl.int64) * q_strides.m
    present = (row < seqlen_q * HEADS)[:, None]
    q = gl.load(q_ptr + (at[:, None] * 8 + column[None, :]), mask=present, other=0.0).to(gl.float32)
    return q, gl.max(gl.abs(q), 1)


@gluon.jit
def _make_p_buffer():
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    return gl.allocate_shared_memory(gl.float16, [KEYS, ROWS], layout)


@gluon.jit
def _power_of_two(largest):
    """Return the largest power of two that is not above ``largest``; 1 for 0, and where there is none."""
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.where((bits >= 1 << 23) & (bits < 0x7F800000), bits, 127 << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _store_queries(q, power, PAIRS: gl.constexpr):
    """Put the even and the odd columns of queries, divided by ``power``, in shared memory."""
    even, odd = gl.split(gl.reshape((q / power[:, None]).to(gl.float16), [ROWS, PAIRS, 2]))
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PAIRS], gl.float16)
    even_buf = gl.allocate_shared_memory(gl.float16, [ROWS, PAIRS], layout)
    odd_buf = gl.allocate_shared_memory(gl.float16, [ROWS, PAIRS], layout)
    even_buf.store(even)
    odd_buf.store(odd)
    return even_buf, odd_buf


@gluon.jit
def _prepare_queries(q_ptr, b, first_row, seqlen_q, q_strides, HEADS: gl.constexpr):
    """Return queries in shared memory, even and odd columns of the first and of the rest, and what divides each row."""
    q, largest = _load_queries(q_ptr, b, first_row, seqlen_q, q_strides, 0, COLUMNS, HEADS)
    q_more, more_largest = _load_queries(q_ptr, b, first_row, seqlen_q, q_strides, COLUMNS, MORE, HEADS)
    power = _power_of_two(gl.maximum(largest, more_largest))
    even, odd = _store_queries(q, power, _PAIRS)
    more_even, more_odd = _store_queries(q_more, power, _MORE_PAIRS)
    return even, odd, more_even, more_odd, power


@gluon.jit
def _scores(s, k, q_even, q_odd, FIRST: gl.constexpr, PAIRS: gl.constexpr, layout: gl.constexpr):
    """Add the products of some pairs of columns to scores, keys by rows."""
    even, odd = _even_and_odd(k.slice(FIRST, PAIRS, dim=1), gl.DotOperandLayout(0, layout, 2))
    s = warpgroup_mma(even, q_even.slice(FIRST, PAIRS, dim=1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(odd, q_odd.slice(FIRST, PAIRS, dim=1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weights(s, m, size):
    """Return ``2**HEADROOM * exp2(s - m)``; ``size``: log2 of each key's scale.

    A scale's logarithm is rounded, and so are sums with large scores: P times the scale stays below what fp16 holds.
    """
    power, most = s - m[None, :] + HEADROOM, (HEADROOM + 1.0 - size)[:, None]
    return gl.exp2(gl.where(power > most, most, power))  # NaN stays


@gluon.jit
def _values(even_acc, odd_acc, k, p_buf, alpha, FIRST: gl.constexpr):
    """Add the products of P and some pairs of columns to two parts of the output, columns by rows."""
    of_columns: gl.constexpr = gl.DotOperandLayout(0, even_acc.type.layout, 2)
    even, odd = _even_and_odd(k.slice(FIRST, _PART, dim=1).permute((1, 0)), of_columns)
    even_acc = warpgroup_mma(even, p_buf, even_acc * alpha[None, :], is_async=True)
    odd_acc = warpgroup_mma(odd, p_buf, odd_acc * alpha[None, :], is_async=True)
    return even_acc, odd_acc


@gluon.jit
def _load_scales(scale_ptr, page, inside, key, end, strides, layout: gl.constexpr, BY_TOKEN: gl.constexpr):
    """Return the scale of each key of a tile; 1 where there is none, or no key."""
    keys = gl.arange(0, KEYS, layout)
    scales = gl.full([KEYS], 1.0, gl.float32, layout)
    if BY_TOKEN:
        at = page.to(gl.int64) * strides.page + (inside + keys).to(gl.int64) * strides.row
        scales = gl.load(scale_ptr + at, mask=key + keys < end, other=1.0)
    return scales


@gluon.jit
def _store_part(
    even, odd, l, o_ptr, o_part_ptr, b, chunk, count, first_row, o_strides, seqlen_q,
    FIRST: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Store the columns from ``FIRST`` on: of a share as they are, else as the output."""
    acc = gl.permute(gl.join(even, odd), (0, 2, 1)).reshape([2 * _PART, ROWS])
    layout: gl.constexpr = acc.type.layout
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    column = FIRST + gl.arange(0, 2 * _PART, gl.SliceLayout(1, layout))
    present = (row < seqlen_q * HEADS)[None, :]
    if count > 1:
        at = (chunk.to(gl.int64) * (seqlen_q * HEADS) + row) * COLUMNS
        gl.store(o_part_ptr + (at[None, :] + column[:, None]), acc, mask=present)
    else:
        share = gl.convert_layout(gl.where(l != 0, 1.0 / l, 0.0), gl.SliceLayout(0, layout))  # without keys: 0
        at = b.to(gl.int64) * o_strides.b + (row % HEADS).to(gl.int64) * o_strides.h
        at += (row // HEADS).to(gl.int64) * o_strides.m
        gl.store(
            o_ptr + (at[None, :] + column[:, None]), (acc * share[None, :]).to(o_ptr.dtype.element_ty), mask=present
        )


@gluon.jit
def _store_sums(
    m, l, lse_ptr, sums_part_ptr, b, chunk, count, first_row, seqlen_q, HEADS: gl.constexpr, STORE_LSE: gl.constexpr
):
    """Store the largest score and the sum of each row: of a share as they are, else as the LSE."""
    row = first_row + gl.arange(0, ROWS, m.type.layout)
    present = row < seqlen_q * HEADS
    if count > 1:
        at = chunk.to(gl.int64) * (seqlen_q * HEADS) + row
        gl.store(sums_part_ptr + 2 * at, m, mask=present)
        gl.store(sums_part_ptr + 2 * at + 1, l, mask=present)
    elif STORE_LSE:
        lse = gl.where(l != 0, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
        gl.store(lse_ptr + (b.to(gl.int64) * HEADS + row % HEADS) * seqlen_q + row // HEADS, lse, mask=present)


@gluon.jit
def _few_rows_fp8_sm90_kernel(
    q_ptr,  # [B, H, Sq, COLUMNS + MORE] in fp16 or bf16
    k_desc,  # [PAGES, PAGE_SIZE, (COLUMNS + MORE) / 2] pairs of e4m3; without a table a page is a sequence's cache
    page_table_ptr,  # [B, pages of a sequence] int32, or None
    seqlens_ptr,  # [B] int32: keys before the new ones, or None: the capacity
    k_scale_ptr,  # fp32: one, or one for each key; or None
    o_ptr,  # [B, H, Sq, COLUMNS]
    lse_ptr,  # [B, H, Sq] fp32, natural log, or None
    o_part_ptr,  # [SHARES, Sq * H, COLUMNS] fp32, of each share before its sum divides it, or None
    sums_part_ptr,  # [SHARES, Sq * H, 2] fp32: what is subtracted from a row's scores, in units of log2(e), and its sum
    k_more_desc,  # of the columns behind COLUMNS
    stride_tb,  # of the page table
    q_strides: NewStrides,
    o_strides: NewStrides,
    k_scale_strides: PageStrides,
    sizes: LatentSizes,
    kv_splits: KVSplits,
    scale_log2,  # softmax_scale * log2(e)
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, BALANCED: gl.constexpr,
    BLOCK_B: gl.constexpr, STORE_LSE: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Attend 16 rows of a sequence to one share of its keys. Grid: (row tiles * shares,)."""
    wait_for_kernel_before()
    launch_dependents()
    tiles_m = (sizes.seqlen_q * HEADS + ROWS - 1) // ROWS  # of 16 heads, or of whole tokens
    first_row = gl.program_id(0) % tiles_m * ROWS
    chunk = gl.program_id(0) // tiles_m
    b, split, share, count, end = find_share(chunk, sizes, seqlens_ptr, kv_splits, BALANCED, BLOCK_B, KEYS)
    if split >= count:  # nothing to do, and no sequence, perhaps
        return
    begin = split * share * KEYS
    steps = uniform(gl.maximum((gl.minimum(begin + share * KEYS, end) - begin + KEYS - 1) // KEYS, 0))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    of_keys: gl.constexpr = gl.SliceLayout(1, layout)
    k_bufs, k_more_bufs = make_tiles(k_desc, STAGES), make_tiles(k_more_desc, STAGES)
    p_buf = _make_p_buffer()
    bars = make_barriers(STAGES, 1)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    barrier()
    table_ptr = o_ptr if page_table_ptr is None else page_table_ptr + b.to(gl.int64) * stride_tb
    page, inside = b, begin
    if steps > 0:
        page, inside = place_of_tile(table_ptr, b, begin, PAGE_SIZE)
        _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, 0, page, inside)
    scales = _load_scales(k_scale_ptr, page, inside, begin, end, k_scale_strides, of_keys, BY_TOKEN)
    if steps > 1:
        page, inside = place_of_tile(table_ptr, b, begin + KEYS, PAGE_SIZE)
        _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, 1, page, inside)

    q_even, q_odd, more_even, more_odd, power = _prepare_queries(q_ptr, b, first_row, sizes.seqlen_q, q_strides, HEADS)
    factor = gl.convert_layout(power, of_rows) * scale_log2  # on scores
    v_scale = LEVEL
    if k_scale_ptr is not None and not BY_TOKEN:
        factor *= gl.load(k_scale_ptr)
        v_scale = gl.load(k_scale_ptr) * LEVEL
    fence_async_shared()
    barrier()

    zero = gl.zeros([KEYS, ROWS], gl.float32, layout)
    e0, e1, e2, e3, o0, o1, o2, o3 = zero, zero, zero, zero, zero, zero, zero, zero
    m = gl.full([ROWS], -float("inf"), gl.float32, of_rows)
    l = zero  # the sums of what a thread holds: threads add theirs up once, at the end
    for i in range(steps):
        key = begin + i * KEYS
        slot = i & 1
        # Asked for here, so that they have come when they are needed; the last tiles ask for a page again.
        next_scales = _load_scales(k_scale_ptr, page, inside, key + KEYS, end, k_scale_strides, of_keys, BY_TOKEN)
        page, inside = place_of_tile(table_ptr, b, gl.where(i + STAGES < steps, key + STAGES * KEYS, key), PAGE_SIZE)
        k = k_bufs.index(slot).reshape([KEYS, _PAIRS])
        mbarrier.wait(bars.index(slot), (i >> 1) & 1)
        s = _scores(zero, k, q_even, q_odd, 0, _PART, layout)
        for part in gl.static_range(1, 4):
            s = _scores(s, k, q_even, q_odd, part * _PART, _PART, layout)
            s = warpgroup_mma_wait(2, deps=[s])  # the part before it gives its registers back
        s = _scores(
            s, k_more_bufs.index(slot).reshape([KEYS, _MORE_PAIRS]), more_even, more_odd, 0, _MORE_PAIRS, layout
        )
        s = warpgroup_mma_wait(0, deps=[s]) * factor[None, :] * scales[:, None]
        # Keys that no row lacks are not masked; the first of several queries sees least.
        hidden = sizes.seqlen_q - 1 if IS_CAUSAL else 0
        if key + KEYS > end - hidden:
            s = hide_keys(s, key, end, sizes.seqlen_q - first_row // HEADS, HEADS, IS_CAUSAL)
        size = gl.log2(gl.maximum(gl.abs(scales), _LEAST))
        m_new = gl.maximum(m, gl.max(s + size[:, None], 0))
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has met no key: -inf - -inf is NaN
        p = _weights(s, m_safe, size)
        alpha = gl.exp2(m - m_safe)
        l = l * alpha[None, :] + p
        m = m_new
        p_buf.store((p * scales[:, None]).to(gl.float16))
        if end - key < KEYS:
            barrier()  # all warps are done with the scores
            zero_rows(k, end - key)  # P is 0 there, but 0 * NaN is not
        fence_async_shared()
        barrier()
        e0, o0 = _values(e0, o0, k, p_buf, alpha, 0)
        e1, o1 = _values(e1, o1, k, p_buf, alpha, _PART)
        e0, o0 = warpgroup_mma_wait(2, deps=[e0, o0])
        e2, o2 = _values(e2, o2, k, p_buf, alpha, 2 * _PART)
        e1, o1 = warpgroup_mma_wait(2, deps=[e1, o1])
        e3, o3 = _values(e3, o3, k, p_buf, alpha, 3 * _PART)
        e2, o2, e3, o3 = warpgroup_mma_wait(0, deps=[e2, o2, e3, o3])
        barrier()  # all warps are done with the tile, and with P
        if i + STAGES < steps:
            _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, slot, page, inside)
        scales = next_scales

    if o_part_ptr is None:  # then no sequence has two shares
        o_part_ptr, sums_part_ptr = o_ptr, o_ptr
    total = gl.sum(l, 0) * LEVEL
    _store_sums(m, total, lse_ptr, sums_part_ptr, b, chunk, count, first_row, sizes.seqlen_q, HEADS, STORE_LSE)
    parts = ((e0, o0), (e1, o1), (e2, o2), (e3, o3))
    for part in gl.static_range(4):
        even, odd = parts[part]
        _store_part(
            even * v_scale, odd * v_scale, total, o_ptr, o_part_ptr, b, chunk, count, first_row, o_strides,
            sizes.seqlen_q, part * 2 * _PART, HEADS,
        )  # fmt: skip
