"""Attention of few query rows to a cache whose values are columns of its keys (MLA), for Hopper (Gluon, sm_90).

A program attends 64 rows, the heads of one or of several queries, to one share of the keys of a sequence, 64 at a time.
The output of 64 rows and 512 columns fills the registers of two warpgroups, half of the columns each. The first
computes the scores and their exponentials, and hands P and the rescaling factor to the second through shared memory.
Both multiply P with their half of the tile of keys, which is read from memory once. One warp, the producer, copies
tiles with TMA.

The last tile of a sequence may hold rows past its last key. They change no result: their scores are masked, and their
values become 0 in shared memory. Later pages are not read.

Keys are split, and partial outputs merged by a second kernel, as in ``decode_triton``.

Source: FlashMLA (DeepSeek, 2025) for the two halves of the output and P that goes through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gpu.gluon_sm90 import (
    FIRST_BARRIER,
    hide_from_compiler,
    make_barriers,
    make_tiles,
    named_barrier,
    rematerialize,
    unpack,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, barrier, tma_load
from ..forward.primitives_sm90 import exponentials, partial_sums, update_row_max
from ..kernel_arguments import KVSplits, LatentSizes, NewStrides
from .primitives_sm90 import COLUMNS, KEYS, MORE, STAGES, find_share, launch_dependents, uniform, zero_rows

ROWS = gl.constexpr(64)  # of a program
HALF = gl.constexpr(256)  # of the output, of one warpgroup
_BOTH = gl.constexpr(256)  # threads of the two warpgroups
# Barriers of the hardware.
_FREE = FIRST_BARRIER  # both have read a slot: two
_P_FULL = gl.constexpr(7)
_P_FREE = gl.constexpr(8)


@aggregate
class Args:
    """The arguments of every partition."""

    q_desc: tma.tensor_descriptor
    q_more_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    k_more_desc: tma.tensor_descriptor
    table_ptr: gl.tensor  # the pages of this sequence; unused without pages
    o_ptr: gl.tensor
    lse_ptr: gl.tensor
    o_part_ptr: gl.tensor
    sums_part_ptr: gl.tensor
    q_buf: gl.shared_memory_descriptor  # [1, tokens, heads, COLUMNS]
    q_more_buf: gl.shared_memory_descriptor  # [1, tokens, heads, MORE]
    k_bufs: gl.shared_memory_descriptor  # [STAGES, 1, KEYS, COLUMNS]
    k_more_bufs: gl.shared_memory_descriptor  # [STAGES, 1, KEYS, MORE]
    p_buf: gl.shared_memory_descriptor  # [ROWS, KEYS]
    factor_buf: gl.shared_memory_descriptor  # [ROWS] fp32: on the output so far
    ready_bars: gl.shared_memory_descriptor  # [STAGES + 1]: slots of keys, the queries
    b: gl.tensor  # sequence
    tile: gl.tensor  # row tile
    chunk: gl.tensor  # share, of all sequences
    begin: gl.tensor  # first key, a multiple of KEYS
    steps: gl.tensor  # tiles of keys
    end: gl.tensor  # keys of the sequence
    shares: gl.tensor  # of the sequence; 0: this program has nothing to do
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor
    seqlen_q: gl.tensor
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive
    HEADS: gl.constexpr
    PAGE_SIZE: gl.constexpr  # 0: without a page table
    IS_CAUSAL: gl.constexpr
    STORE_LSE: gl.constexpr

    @gluon.jit
    def keys(self, i):
        """Return what the matrix units read of tile ``i``: columns that are values too, and the others."""
        slot = i & 1
        mbarrier.wait(self.ready_bars.index(slot), (i >> 1) & 1)
        shared = self.k_bufs.index(slot).reshape([KEYS, COLUMNS])
        return shared, self.k_more_bufs.index(slot).reshape([KEYS, MORE])

    @gluon.jit
    def release(self, i):
        """Tell the producer that a warpgroup is done with tile ``i``."""
        named_barrier("arrive", _FREE + (i & 1), _BOTH + 32)

    @gluon.jit
    def rows(self, layout: gl.constexpr):
        """Return token, head, number among all rows of the sequence, and presence of each row."""
        row = rematerialize(self.tile) * ROWS + gl.arange(0, ROWS, layout)
        present = row < gl.where(self.shares > 0, self.seqlen_q * self.HEADS, 0)
        return row // self.HEADS, row % self.HEADS, row, present


@gluon.jit
def _load_partition(a):
    """Copy the queries, then tile after tile of keys."""
    if a.steps > 0:
        bar = a.ready_bars.index(STAGES)
        row = a.tile * ROWS
        mbarrier.expect(bar, a.q_desc.block_type.nbytes + a.q_more_desc.block_type.nbytes)
        tma_load(a.q_desc, [a.b, row // a.HEADS, row % a.HEADS, 0], bar, a.q_buf)
        tma_load(a.q_more_desc, [a.b, row // a.HEADS, row % a.HEADS, COLUMNS], bar, a.q_more_buf)
    for i in range(a.steps):
        key = a.begin + i * KEYS
        page = a.b
        inside = key
        if a.PAGE_SIZE > 0:
            page = gl.load(a.table_ptr + key // a.PAGE_SIZE)
            inside = key % a.PAGE_SIZE
        slot = i & 1
        if i >= STAGES:
            named_barrier("sync", _FREE + slot, _BOTH + 32)
        bar = a.ready_bars.index(slot)
        mbarrier.expect(bar, a.k_desc.block_type.nbytes + a.k_more_desc.block_type.nbytes)
        tma_load(a.k_desc, [page, inside, 0], bar, a.k_bufs.index(slot))
        tma_load(a.k_more_desc, [page, inside, COLUMNS], bar, a.k_more_bufs.index(slot))


@gluon.jit
def _mask(s, a, key):
    """Put -inf where a row does not see a key of the tile at ``key``."""
    layout: gl.constexpr = s.type.layout
    column = key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    if a.IS_CAUSAL:  # row m of Sq sees key m + end - Sq, too
        token, _, _, _ = a.rows(gl.SliceLayout(1, layout))
        s = gl.where(column[None, :] - token[:, None] <= a.end - a.seqlen_q, s, -float("inf"))
    return gl.where(column[None, :] < a.end, s, -float("inf"))


@gluon.jit
def _clean(values, keys):
    """Put 0 in place of the values from row ``keys`` on, if there are such."""
    if keys < KEYS:
        barrier()  # all warps are done with products that read it
        zero_rows(values, keys)
        fence_async_shared()  # the matrix units, and TMA after them, see it
        barrier()


@gluon.jit
def _store(acc, a, W: gl.constexpr):
    """Store half of the columns: of a share as they are, else as the output."""
    layout: gl.constexpr = acc.type.layout
    token, head, row, present = a.rows(gl.SliceLayout(1, layout))
    column = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    if a.shares > 1:
        at = a.chunk.to(gl.int64) * (a.seqlen_q * a.HEADS) + row
        gl.store(a.o_part_ptr + (at[:, None] * COLUMNS + column[None, :]), acc, mask=present[:, None])
    else:
        at = a.b.to(gl.int64) * a.stride_ob + head.to(gl.int64) * a.stride_oh + token.to(gl.int64) * a.stride_om
        o = acc.to(a.q_desc.dtype)
        gl.store(a.o_ptr + (at[:, None] + column[None, :]), o, mask=present[:, None])


@gluon.jit
def _score_partition(a):
    """Compute the scores and P of every tile, and the first half of the columns."""
    dtype: gl.constexpr = a.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    m = gl.full([ROWS], -3.0e38, gl.float32, row_layout)  # not -inf: -inf - -inf is NaN
    l = partial_sums(zero)
    acc = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    q = a.q_buf.reshape([ROWS, COLUMNS])
    q_more = a.q_more_buf.reshape([ROWS, MORE])
    steps = uniform(a.steps)
    if steps > 0:
        mbarrier.wait(a.ready_bars.index(hide_from_compiler(2)), 0)
    for i in range(steps):
        key = a.begin + i * KEYS
        k, k_more = a.keys(i)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_more, k_more.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        # Keys that no row lacks are not masked; the first of several queries sees least.
        hidden = a.seqlen_q - 1 if a.IS_CAUSAL else 0
        if key + KEYS > a.end - hidden:
            s = _mask(s, a, key)
        m, l, factor = update_row_max(s, m, l, a)
        packed, sums = exponentials(s, m, l, a)
        l += sums
        if i > 0:
            named_barrier("sync", _P_FREE, _BOTH)
        a.p_buf.store(unpack(packed, dtype, s_layout))
        a.factor_buf.store(factor)
        fence_async_shared()
        named_barrier("arrive", _P_FULL, _BOTH)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
        values = k.slice(0, HALF, dim=1)
        _clean(values, a.end - key)
        p = unpack(packed, dtype, gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma(p, values, acc, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[acc, p])
        a.release(i)

    l_row = gl.convert_layout(gl.sum(l, 1), row_layout)
    has_keys = l_row != 0  # a row without keys: output 0, LSE -inf
    factor = gl.where(has_keys, 1.0 / l_row, 0.0)
    token, head, row, present = a.rows(row_layout)
    if a.shares > 1:
        factor = gl.full([ROWS], 1.0, gl.float32, row_layout)
        at = 2 * (a.chunk.to(gl.int64) * (a.seqlen_q * a.HEADS) + row)
        gl.store(a.sums_part_ptr + at, m, mask=present)
        gl.store(a.sums_part_ptr + at + 1, l_row, mask=present)
    elif a.STORE_LSE:
        lse = gl.where(has_keys, (m + gl.log2(l_row)) * 0.6931471805599453, -float("inf"))
        at = (a.b.to(gl.int64) * a.HEADS + head) * a.seqlen_q + token
        gl.store(a.lse_ptr + at, lse, mask=present)
    if steps > 0:
        named_barrier("sync", _P_FREE, _BOTH)
    a.factor_buf.store(factor)
    named_barrier("arrive", _P_FULL, _BOTH)
    _store(acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None], a, 0)


@gluon.jit
def _value_partition(a):
    """Compute the second half of the columns."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    acc = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    for i in range(uniform(a.steps)):
        k, _ = a.keys(i)
        values = k.slice(HALF, HALF, dim=1)
        named_barrier("sync", _P_FULL, _BOTH)
        acc = acc * a.factor_buf.load(row_layout)[:, None]
        _clean(values, a.end - a.begin - i * KEYS)
        acc = warpgroup_mma(a.p_buf, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        named_barrier("arrive", _P_FREE, _BOTH)
        a.release(i)
    named_barrier("sync", _P_FULL, _BOTH)
    _store(acc * a.factor_buf.load(row_layout)[:, None], a, 1)


@gluon.jit
def _decode_sm90_kernel(
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
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, TILES_M: gl.constexpr,  # row tiles of one sequence
    IS_CAUSAL: gl.constexpr, BALANCED: gl.constexpr, BLOCK_B: gl.constexpr, STORE_LSE: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread of the warpgroups
):  # fmt: skip
    """Attend 64 rows to one share of the keys of a sequence. Grid: (TILES_M * shares,)."""
    wait_for_kernel_before()
    launch_dependents()
    pid = gl.program_id(0)
    tile = pid % TILES_M
    chunk = pid // TILES_M
    b, split, share, count, end = find_share(chunk, sizes, seqlens_ptr, kv_splits, BALANCED, BLOCK_B, KEYS)
    begin = split * share * KEYS
    stop = gl.minimum(begin + share * KEYS, end)
    if IS_CAUSAL and TILES_M > 1:
        last_token = gl.minimum((tile * ROWS + ROWS - 1) // HEADS, sizes.seqlen_q - 1)
        stop = gl.minimum(stop, gl.maximum(last_token + (end - sizes.seqlen_q) + 1, 0))
    steps = gl.maximum((stop - begin + KEYS - 1) // KEYS, 0)
    shares = count
    if split >= count:  # nothing to do, and no sequence, perhaps
        b, steps, shares = 0 * b, 0 * steps, 0 * count

    q_buf = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    q_more_buf = gl.allocate_shared_memory(q_desc.dtype, q_more_desc.block_type.shape, q_more_desc.layout)
    k_bufs, k_more_bufs = make_tiles(k_desc, STAGES), make_tiles(k_more_desc, STAGES)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], q_desc.dtype)
    p_buf = gl.allocate_shared_memory(q_desc.dtype, [ROWS, KEYS], p_layout)
    factor_buf = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready_bars = make_barriers(STAGES + 1, 1)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    table_ptr = o_ptr if page_table_ptr is None else page_table_ptr + b.to(gl.int64) * stride_tb
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, q_more_desc, k_desc, k_more_desc, table_ptr, o_ptr,
        o_ptr if lse_ptr is None else lse_ptr,
        o_ptr if o_part_ptr is None else o_part_ptr,
        o_ptr if sums_part_ptr is None else sums_part_ptr,
        q_buf, q_more_buf, k_bufs, k_more_bufs, p_buf, factor_buf, ready_bars,
        b, tile, chunk, begin, steps, end, shares, o_strides.b, o_strides.h, o_strides.m, sizes.seqlen_q, scale_log2,
        HEADS, PAGE_SIZE, IS_CAUSAL, STORE_LSE,
    )  # fmt: skip
    gl.warp_specialize(
        [(_score_partition, (a,)), (_value_partition, (a,)), (_load_partition, (a,))],
        [4, 1],
        [REGISTERS, 24],
    )
