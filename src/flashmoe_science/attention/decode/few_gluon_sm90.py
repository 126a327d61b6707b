"""Attention of at most 16 query rows to a cache whose values are columns of its keys (MLA), for Hopper (Gluon).

One warpgroup attends 16 rows, the heads of one or of several queries, to one share of the keys of a sequence, 64 at a
time. It computes the scores transposed, keys by rows, and so the output, columns by rows: 64 rows of the matrix
units are 64 keys or columns, so few rows waste nothing. As a slot is free only once its last product has ended, the
warpgroup copies the tiles itself, with TMA: a producer could not be earlier.

The last tile of a sequence, the split of the keys and the merge are those of ``decode_gluon_sm90``.

Source: ours; the transposed products are those of ``sparse_mla_gluon_sm90``.
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
from ..kernel_arguments import KVSplits, LatentSizes, NewStrides
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


@gluon.jit
def _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, slot, page, inside):
    """Ask for one tile of keys."""
    bar = bars.index(slot)
    mbarrier.expect(bar, k_desc.block_type.nbytes + k_more_desc.block_type.nbytes)
    tma_load(k_desc, [page, inside, 0], bar, k_bufs.index(slot))
    tma_load(k_more_desc, [page, inside, COLUMNS], bar, k_more_bufs.index(slot))


@gluon.jit
def _store(
    acc, m, l, o_ptr, lse_ptr, o_part_ptr, sums_part_ptr, b, chunk, count, o_strides, seqlen_q,
    HEADS: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Store what the rows have met: of a share as it is, else as the output."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    present = row < seqlen_q * HEADS
    if o_part_ptr is None:  # then no sequence has two shares
        o_part_ptr, sums_part_ptr = o_ptr, o_ptr
    if count > 1:
        at = chunk.to(gl.int64) * (seqlen_q * HEADS) + row
        gl.store(o_part_ptr + (at[None, :] * COLUMNS + column[:, None]), acc, mask=present[None, :])
        gl.store(sums_part_ptr + 2 * at, m, mask=present)
        gl.store(sums_part_ptr + 2 * at + 1, l, mask=present)
    else:
        has_keys = l != 0  # a row without keys: output 0, LSE -inf
        head, token = row % HEADS, row // HEADS
        o = (acc * gl.where(has_keys, 1.0 / l, 0.0)[None, :]).to(o_ptr.dtype.element_ty)
        at = b.to(gl.int64) * o_strides.b + head.to(gl.int64) * o_strides.h + token.to(gl.int64) * o_strides.m
        gl.store(o_ptr + (at[None, :] + column[:, None]), o, mask=present[None, :])
        if STORE_LSE:
            lse = gl.where(has_keys, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
            at = (b.to(gl.int64) * HEADS + head) * seqlen_q + token
            gl.store(lse_ptr + at, lse, mask=present)


@gluon.jit
def _few_rows_sm90_kernel(
    q_desc,  # [B, Sq, H, COLUMNS + MORE]
    k_desc,  # [PAGES, PAGE_SIZE, COLUMNS + MORE]; without a page table a page is the cache of one sequence
    page_table_ptr,  # [B, pages of a sequence] int32, or None
    seqlens_ptr,  # [B] int32: keys before the new ones, or None: the capacity
    o_ptr,  # [B, H, Sq, COLUMNS]
    lse_ptr,  # [B, H, Sq] fp32, natural log, or None
    o_part_ptr,  # [SHARES, Sq * H, COLUMNS] fp32, of each share before its sum divides it, or None
    sums_part_ptr,  # [SHARES, Sq * H, 2] fp32: the largest score of a row in units of log2(e), and its sum, or None
    q_more_desc, k_more_desc,  # of the columns behind COLUMNS
    stride_tb,  # of the page table
    o_strides: NewStrides,
    sizes: LatentSizes,
    kv_splits: KVSplits,
    scale_log2,  # softmax_scale * log2(e), positive
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, BALANCED: gl.constexpr,
    BLOCK_B: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Attend all rows of a sequence to one share of its keys. Grid: (shares,)."""
    wait_for_kernel_before()
    launch_dependents()
    chunk = gl.program_id(0)
    b, split, share, count, end = find_share(chunk, sizes, seqlens_ptr, kv_splits, BALANCED, BLOCK_B, KEYS)
    if split >= count:  # nothing to do, and no sequence, perhaps
        return
    begin = split * share * KEYS
    steps = uniform(gl.maximum((gl.minimum(begin + share * KEYS, end) - begin + KEYS - 1) // KEYS, 0))

    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    q_buf = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
    q_more_buf = gl.allocate_shared_memory(dtype, q_more_desc.block_type.shape, q_more_desc.layout)
    k_bufs, k_more_bufs = make_tiles(k_desc, STAGES), make_tiles(k_more_desc, STAGES)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    p_buf = gl.allocate_shared_memory(dtype, [KEYS, ROWS], p_layout)
    bars = make_barriers(STAGES + 1, 1)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    barrier()
    table_ptr = o_ptr if page_table_ptr is None else page_table_ptr + b.to(gl.int64) * stride_tb
    if steps > 0:
        q_bar = bars.index(STAGES)
        mbarrier.expect(q_bar, q_desc.block_type.nbytes + q_more_desc.block_type.nbytes)
        tma_load(q_desc, [b, 0, 0, 0], q_bar, q_buf)
        tma_load(q_more_desc, [b, 0, 0, COLUMNS], q_bar, q_more_buf)
    for i in gl.static_range(STAGES):
        if i < steps:
            page, inside = place_of_tile(table_ptr, b, begin + i * KEYS, PAGE_SIZE)
            _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, i, page, inside)

    zero = gl.zeros([KEYS, ROWS], gl.float32, layout)
    acc = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
    m = gl.full([ROWS], -float("inf"), gl.float32, of_rows)
    l = zero  # the sums of what a thread holds: threads add theirs up once, at the end
    q = q_buf.reshape([ROWS, COLUMNS]).permute((1, 0))
    q_more = q_more_buf.reshape([ROWS, MORE]).permute((1, 0))
    if steps > 0:
        mbarrier.wait(bars.index(STAGES), 0)
    for i in range(steps):
        key = begin + i * KEYS
        slot = i & 1
        # Asked for here, so that it has come when the slot is free; the last tiles ask for a page again.
        page, inside = place_of_tile(table_ptr, b, gl.where(i + STAGES < steps, key + STAGES * KEYS, key), PAGE_SIZE)
        k = k_bufs.index(slot).reshape([KEYS, COLUMNS])
        mbarrier.wait(bars.index(slot), (i >> 1) & 1)
        s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
        s = warpgroup_mma(k_more_bufs.index(slot).reshape([KEYS, MORE]), q_more, s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        # Keys that no row lacks are not masked; the first of several queries sees least.
        hidden = sizes.seqlen_q - 1 if IS_CAUSAL else 0
        if key + KEYS > end - hidden:
            s = hide_keys(s, key, end, sizes.seqlen_q, HEADS, IS_CAUSAL)
        m_new = gl.maximum(m, gl.max(s, 0) * scale_log2)
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has met no key: -inf - -inf is NaN
        p = gl.exp2(s * scale_log2 - m_safe[None, :])
        alpha = gl.exp2(m - m_safe)
        l = l * alpha[None, :] + p
        m = m_new
        p_buf.store(p.to(dtype))
        if end - key < KEYS:
            barrier()  # all warps are done with the scores
            zero_rows(k, end - key)  # P is 0 there, but 0 * NaN is not
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(k.permute((1, 0)), p_buf, acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # all warps are done with the tile, and with P
        if i + STAGES < steps:
            _copy_tile(k_desc, k_more_desc, k_bufs, k_more_bufs, bars, slot, page, inside)

    _store(
        acc, m, gl.sum(l, 0), o_ptr, lse_ptr, o_part_ptr, sums_part_ptr, b, chunk, count, o_strides, sizes.seqlen_q,
        HEADS, STORE_LSE,
    )  # fmt: skip
