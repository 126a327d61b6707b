"""Attention of MLA to the rows of a cache that indices name, for Hopper (Gluon, sm_90).

One warpgroup owns ``BLOCK_M`` heads of one query and a split of its indices. It copies the rows of two tiles of 64 to
shared memory at once, without a register on the way, and asks for a tile two steps ahead. Scores are computed
transposed, keys by heads, and so is the output, columns by heads: 64 rows of the matrix units are 64 keys or columns,
so few heads waste nothing. A second kernel merges the splits, as for ``sparse_mla_triton``.

Source: DeepSeek-V3.2 (DeepSeek-AI, 2025) for the attention. Ours: the transposed products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import wait_for_kernel_before
from ...gpu.gluon_versions import async_load, barrier
from ..decode.primitives_sm90 import launch_dependents
from ..kernel_arguments import Strides
from .arguments import SparseSizes, SparseStrides

KEYS = gl.constexpr(64)  # of a tile
# 8 lanes have 128 bytes of a row: a thread finds 4 rows of a tile.
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _positions(indices, at, stop, capacity):
    """Return the positions that indices name; -1 for padding, what lies outside, and behind ``stop``."""
    position = gl.load(indices + at, mask=at < stop, other=-1)
    return gl.where(position < capacity, gl.maximum(position, -1), -1)


@gluon.jit
def _row_offsets(position, table, strides, CALL: gl.constexpr):
    """Return where the rows of positions begin, in elements."""
    step: gl.constexpr = strides.ROW // CALL.ALIGN
    at = gl.maximum(position, 0)
    if CALL.PAGE_SIZE > 0:
        page = gl.load(table + at // CALL.PAGE_SIZE, mask=position >= 0, other=0)
        row = page.to(gl.int64) * strides.page + (at % CALL.PAGE_SIZE).to(gl.int64) * step
    else:
        row = at.to(gl.int64) * step
    return row * CALL.ALIGN


@gluon.jit
def _copy_rows(base, rows, position, kv_buf, rest_buf, CALL: gl.constexpr):
    """Ask for one tile of rows; those that are not there become 0."""
    columns = gl.arange(0, CALL.DV, gl.SliceLayout(0, _ROWS))
    ptrs = base + rows[:, None]
    is_there = (position >= 0)[:, None]
    async_load(kv_buf, ptrs + columns[None, :], mask=is_there)
    if CALL.REST > 0:
        rest = CALL.DV + gl.arange(0, CALL.REST, gl.SliceLayout(0, _ROWS))
        async_load(rest_buf, ptrs + rest[None, :], mask=is_there)


@gluon.jit
def _store(
    acc, l, m, sinks_ptr, o_ptr, lse_ptr, o_part_ptr, sums_part_ptr, b, split, token, tile, o_strides, sizes,
    CALL: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Store what BLOCK_M heads of a query have met: of a split as it is, else as the output."""
    layout: gl.constexpr = acc.type.layout
    heads = tile * TILE.BLOCK_M + gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(0, layout))
    column = gl.arange(0, CALL.DV, gl.SliceLayout(1, layout))
    present = heads < CALL.HEADS
    if TILE.SPLIT:
        rows_before = (b * sizes.splits + split).to(gl.int64) * (sizes.seqlen_q * CALL.HEADS)
        at = rows_before + token * CALL.HEADS + heads
        gl.store(o_part_ptr + (at[None, :] * CALL.DV + column[:, None]), acc, mask=present[None, :])
        gl.store(sums_part_ptr + 2 * at, m, mask=present)
        gl.store(sums_part_ptr + 2 * at + 1, l, mask=present)
    else:
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + heads, mask=present, other=0.0).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(m, sink)
            top_safe = gl.where(top == -float("inf"), 0.0, top)
            alpha = gl.exp2(m - top_safe)
            l = l * alpha + gl.exp2(sink - top_safe)
            acc = acc * alpha[None, :]
            m = top
        has_keys = l != 0  # else the output is 0, and the LSE -inf
        out = (acc * gl.where(has_keys, 1.0 / l, 0.0)[None, :]).to(o_ptr.dtype.element_ty)
        o_rows = (b.to(gl.int64) * o_strides.b + heads.to(gl.int64) * o_strides.h) * CALL.ALIGN_O
        o_rows += token.to(gl.int64) * o_strides.ROW
        gl.store(o_ptr + (o_rows[None, :] + column[:, None]), out, mask=present[None, :])
        if CALL.STORE_LSE:
            lse = gl.where(has_keys, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
            gl.store(lse_ptr + (b.to(gl.int64) * CALL.HEADS + heads) * sizes.seqlen_q + token, lse, mask=present)


@gluon.jit
def _sparse_sm90_kernel(
    q_ptr,  # [B, H, Sq, D]
    kv_ptr,  # [PAGES, PAGE_SIZE, D]; without a page table a page is the cache of one sequence
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
    CALL: gl.constexpr,  # SparseCall
    TILE: gl.constexpr,  # SparseTile
    DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M heads of one query to one split of its indices. Grid: (TILES_M * splits * Sq * B,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    DV: gl.constexpr = CALL.DV
    REST: gl.constexpr = CALL.REST
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_heads: gl.constexpr = gl.SliceLayout(0, layout)
    rows_layout: gl.constexpr = gl.SliceLayout(1, _ROWS)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DV], dtype)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, REST], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DV], dtype)
    q_rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, REST], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    kv_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, DV], kv_layout)
    rest_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, REST], rest_layout)
    q_buf = gl.allocate_shared_memory(dtype, [BLOCK_M, DV], q_layout)
    q_rest_buf = gl.allocate_shared_memory(dtype, [BLOCK_M, REST], q_rest_layout)
    p_buf = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_M], p_layout)

    pid = gl.program_id(0)
    tile = pid % TILE.TILES_M
    split = pid // TILE.TILES_M % sizes.splits
    query = pid // TILE.TILES_M // sizes.splits
    token, b = query % sizes.seqlen_q, query // sizes.seqlen_q
    begin = split * sizes.each
    stop = gl.minimum(begin + sizes.each, sizes.top_k)
    indices = indices_ptr + b.to(gl.int64) * strides.ib + token.to(gl.int64) * strides.im
    table = indices
    base = kv_ptr
    if CALL.PAGE_SIZE > 0:
        table = page_table_ptr + b.to(gl.int64) * strides.tb
    else:
        base = kv_ptr + b.to(gl.int64) * strides.page * CALL.ALIGN
    if DEPENDENT_LAUNCH:  # no memory is read before this wait
        wait_for_kernel_before()
        launch_dependents()

    offs = begin + gl.arange(0, KEYS, rows_layout)
    first = _positions(indices, offs, stop, sizes.capacity)
    second = _positions(indices, offs + KEYS, stop, sizes.capacity)
    head = tile * BLOCK_M + gl.arange(0, BLOCK_M, rows_layout)
    q_rows = b.to(gl.int64) * q_strides.b + head.to(gl.int64) * q_strides.h
    q_ptrs = q_ptr + (q_rows * CALL.ALIGN_Q + token.to(gl.int64) * q_strides.ROW)[:, None]
    is_head = (head < CALL.HEADS)[:, None]
    async_load(q_buf, q_ptrs + gl.arange(0, DV, gl.SliceLayout(0, _ROWS))[None, :], mask=is_head)
    rest = DV + gl.arange(0, REST, gl.SliceLayout(0, _ROWS))
    async_load(q_rest_buf, q_ptrs + rest[None, :], mask=is_head)
    first_rows = _row_offsets(first, table, strides, CALL)
    second_rows = _row_offsets(second, table, strides, CALL)
    _copy_rows(base, first_rows, first, kv_bufs.index(0), rest_bufs.index(0), CALL)
    async_copy.commit_group()
    _copy_rows(base, second_rows, second, kv_bufs.index(1), rest_bufs.index(1), CALL)
    async_copy.commit_group()

    acc = gl.zeros([DV, BLOCK_M], gl.float32, layout)
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, layout)
    l = gl.zeros([BLOCK_M], gl.float32, of_heads)
    m = gl.full([BLOCK_M], -float("inf"), gl.float32, of_heads)
    steps = (stop - begin + KEYS - 1) // KEYS
    for i in range(steps):
        start = begin + i * KEYS
        mine = _positions(indices, start + gl.arange(0, KEYS, gl.SliceLayout(1, layout)), stop, sizes.capacity)
        ahead = _positions(indices, offs + (i + 2) * KEYS, stop, sizes.capacity)
        ahead_rows = _row_offsets(ahead, table, strides, CALL)
        kv, kv_rest = kv_bufs.index(i & 1), rest_bufs.index(i & 1)
        async_copy.wait_group(1)
        fence_async_shared()  # the matrix units see what was copied
        barrier()
        s = warpgroup_mma(kv, q_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(kv_rest, q_rest_buf.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])  # [KEYS, BLOCK_M]
        s = gl.where((mine >= 0)[:, None], s * scale, -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        # A head that has met no key has m == -inf, and -inf - -inf is NaN.
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - m_safe[None, :])
        alpha = gl.exp2(m - m_safe)
        l = l * alpha + gl.sum(p, 0)
        m = m_new
        p_buf.store(p.to(dtype))
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(kv.permute((1, 0)), p_buf, acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])  # [DV, BLOCK_M]
        barrier()  # all warps are done with the tile
        if i + 2 < steps:
            _copy_rows(base, ahead_rows, ahead, kv, kv_rest, CALL)
        async_copy.commit_group()

    async_copy.wait_group(0)
    _store(
        acc, l, m, sinks_ptr, o_ptr, lse_ptr, o_part_ptr, sums_part_ptr, b, split, token, tile, o_strides, sizes, CALL,
        TILE,
    )  # fmt: skip
