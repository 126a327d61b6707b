"""Attention backward for Hopper, heads of up to 192 columns with values of up to 128 (Gluon, sm_90, fp16 and bf16).

DeepSeek's heads have these sizes. The kernel works as ``gluon_sm90`` does: a warpgroup owns 64 keys, and the two
warpgroups of a program walk over the query tiles that see their 128. But the sums of 64 keys, 192 columns of dK and
128 of dV, leave a thread 80 registers. So dP is computed after the scores have become P. A warpgroup computes the 96
columns of its part of dQ in two steps, 64 and 32, in the registers of dP and dS. Q, K, dK and dQ are stored in two
parts of 128 and 64 columns, because a TMA box that reaches out of a tensor is slow. Shared memory has room for one
tile of dO and one of dQ.

With 64 keys a program, as in ``wide_gluon_sm90``, a step would do half of the work for the same L2 traffic, 88 KiB, and
a writer would have one step for an addition, not two.

Source: as there. Ours: the order of a step.
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
    hide_from_compiler,
    lap_of,
    make_barriers,
    make_tiles,
    named_barrier,
    pack,
    slot_of,
    unpack,
)
from ...gpu.gluon_versions import aggregate, tma_add, tma_load, tma_store
from ..kernel_arguments import HopperBackwardSizes, Window
from .primitives_sm90 import (
    KeyTiles,
    Slopes,
    Span,
    as_added,
    first_whole_tile,
    key_coordinates,
    load_partition,
    load_rows,
    make_key_tiles,
    make_slopes,
    make_span,
    place_of,
    query_tile,
    store_rows,
    wait_until_read,
    walk_query_tiles,
    write_partition,
)
from .scores_primitives_sm90 import probabilities, row_numbers, unpack_wide

ROWS = gl.constexpr(64)  # keys of one warpgroup, and query rows of a step
FIRST = gl.constexpr(128)  # columns of Q, K, dK and dQ in a first part
MORE = gl.constexpr(64)  # and in the second
HALF = gl.constexpr(32)  # of the second, which one warpgroup computes of dQ
DV = gl.constexpr(128)
STAGES = gl.constexpr(2)  # of Q; dO has one
BOTH = gl.constexpr(256)  # threads of the two warpgroups
LINES = gl.constexpr(128)  # of 32 numbers, of 64 x 64 of dQ
# Barriers of the hardware; Triton uses those before.
Q_FREE = gl.constexpr(6)  # two
DO_FREE = gl.constexpr(8)
KV_FREE = gl.constexpr(9)
FULL = gl.constexpr(10)  # a tile of dQ lies in shared memory, of an even step or an odd one: two
READY = gl.constexpr(12)  # dS of the other warpgroup: two for each


@aggregate
class Args:
    """The arguments of every partition."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    stats_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor
    dq_semaphore_ptr: gl.tensor
    q_more_desc: tma.tensor_descriptor
    k_more_desc: tma.tensor_descriptor
    dk_more_desc: tma.tensor_descriptor
    dq_more_desc: tma.tensor_descriptor
    q_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, FIRST]
    q_more_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, MORE]
    do_bufs: gl.shared_memory_descriptor  # [1, 1, 1, ROWS, DV]
    stats_bufs: gl.shared_memory_descriptor  # [STAGES, 2 * ROWS]
    k_bufs: gl.shared_memory_descriptor  # [2, 1, 1, ROWS, FIRST]: of each warpgroup
    k_more_bufs: gl.shared_memory_descriptor  # [2, 1, 1, ROWS, MORE]
    v_bufs: gl.shared_memory_descriptor  # [2, 1, 1, ROWS, DV]
    ds_bufs: gl.shared_memory_descriptor  # [4, 64 keys, 64 queries]: of each warpgroup, of even steps and odd ones
    dq_bufs: gl.shared_memory_descriptor  # [1, 2 * LINES, 32] fp32
    dq_more_bufs: gl.shared_memory_descriptor  # [1, LINES, 32] fp32
    ready_bars: gl.shared_memory_descriptor  # [STAGES + 3]: slots of Q, dO, K, V
    written_bar: gl.shared_memory_descriptor  # a tile of dQ was read by TMA
    key_tiles: KeyTiles
    heads: gl.tensor  # query heads of a sequence
    heads_kv: gl.tensor
    span: Span
    scale_log2: gl.tensor
    scale: gl.tensor
    GROUP: gl.constexpr  # query heads that share one K/V head
    TOGETHER: gl.constexpr  # of them that are walked over together
    cap_scale: gl.tensor  # read if HAS_SOFTCAP
    HAS_SOFTCAP: gl.constexpr
    slopes: Slopes

    @gluon.jit
    def load_keys(self, b, kv, key, t):
        """Copy K and V of the t-th key tile of this program, once those of the one before were read."""
        if t > 0:
            named_barrier("sync", KV_FREE, BOTH + 32)
        bar = self.ready_bars.index(STAGES + 1)
        mbarrier.expect(bar, 2 * (self.k_desc.block_type.nbytes + self.k_more_desc.block_type.nbytes))
        for w in gl.static_range(2):
            load_rows(self.k_desc, b, kv, key + w * ROWS, 0, bar, self.k_bufs.index(w))
            load_rows(self.k_more_desc, b, kv, key + w * ROWS, FIRST, bar, self.k_more_bufs.index(w))
        bar = self.ready_bars.index(STAGES + 2)
        mbarrier.expect(bar, 2 * self.v_desc.block_type.nbytes)
        for w in gl.static_range(2):
            load_rows(self.v_desc, b, kv, key + w * ROWS, 0, bar, self.v_bufs.index(w))

    @gluon.jit
    def load_queries(self, b, h, first_row, m, first_tile, i):
        """Copy Q, the row statistics and dO of query tile ``m``, for step ``i``."""
        slot, lap = slot_of(i, STAGES), lap_of(i, STAGES)
        slope = self.slopes.load(b, h)
        if lap > 0:
            named_barrier("sync", Q_FREE + slot, BOTH + 32)
        self.slopes.put(slot, slope)
        bar = self.ready_bars.index(slot)
        Q_BYTES: gl.constexpr = self.q_desc.block_type.nbytes + self.q_more_desc.block_type.nbytes
        mbarrier.expect(bar, Q_BYTES + self.stats_desc.block_type.nbytes)
        load_rows(self.q_desc, b, h, first_row + m * ROWS, 0, bar, self.q_bufs.index(slot))
        load_rows(self.q_more_desc, b, h, first_row + m * ROWS, FIRST, bar, self.q_more_bufs.index(slot))
        tma_load(self.stats_desc, [query_tile(self, first_tile, m) * (2 * ROWS)], bar, self.stats_bufs.index(slot))
        if i > 0:
            named_barrier("sync", DO_FREE, BOTH + 32)
        bar = self.ready_bars.index(STAGES)
        mbarrier.expect(bar, self.do_desc.block_type.nbytes)
        load_rows(self.do_desc, b, h, first_row + m * ROWS, 0, bar, self.do_bufs.index(0))

    @gluon.jit
    def dq_buf(self, WRITER: gl.constexpr):  # noqa: ARG002 - both writers add from the same memory
        """Return the shared memory from which a writer adds."""
        return self.dq_bufs.index(0)

    @gluon.jit
    def add_dq(self, buf, tile, added_before, WRITER: gl.constexpr):
        """Add a step's dQ to that of a query tile, or store the first, and free its shared memory."""
        named_barrier("sync", FULL + WRITER, BOTH + 32)
        row = tile * (3 * LINES)
        if added_before == 0:
            tma_store(self.dq_desc, [row, 0], buf)
            tma_store(self.dq_more_desc, [row + 2 * LINES, 0], self.dq_more_bufs.index(0))
        else:
            tma_add(self.dq_desc, [row, 0], buf)
            tma_add(self.dq_more_desc, [row + 2 * LINES, 0], self.dq_more_bufs.index(0))
        wait_until_read()
        mbarrier.arrive(self.written_bar)

    @gluon.jit
    def step(self, sums, kept, span, i, key, row, W: gl.constexpr, IS_FIRST: gl.constexpr, IS_EDGE: gl.constexpr):
        """Add a query tile to dK and dV, and that of the step before to dQ."""
        dk, dk_more, dv = sums
        return _step(dk, dk_more, dv, kept[0], kept[1], self, span, i, key, row, W, IS_FIRST, IS_EDGE)

    @gluon.jit
    def flush_dq(self, kept, i, W: gl.constexpr):
        """Compute this warpgroup's part of the dQ of step ``i``, the last of a walk."""
        _await_ds(i, W)
        dq = _issue_dq(self, i, kept[0], self.k_bufs, W * 64)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _store_dq(dq, self, i, W)
        rest = _issue_dq(self, i, kept[1], self.k_more_bufs, W * HALF)
        rest = warpgroup_mma_wait(0, deps=[rest])
        _store_rest_of_dq(rest, self, i, W)


@gluon.jit
def _pass_ds(i, W: gl.constexpr):
    """Tell the other warpgroup that this one's dS of step ``i`` is there, and that it has read that of step i - 1."""
    named_barrier("arrive", READY + 2 * (1 - W) + (i & 1), BOTH)


@gluon.jit
def _await_ds(i, W: gl.constexpr):
    """Wait for dS of step ``i`` of the other warpgroup; the slot of step i - 1 is free then."""
    named_barrier("sync", READY + 2 * W + (i & 1), BOTH)


@gluon.jit
def _issue_dq(a, i, zero, bufs, BEGIN: gl.constexpr):
    """Issue as many columns of dQ = dS K as ``zero`` has, of the dS of step ``i``."""
    dq = zero
    for w in gl.static_range(2):
        ds = a.ds_bufs.index((i & 1) * 2 + w)
        k = bufs.index(hide_from_compiler(w)).reshape([ROWS, bufs.shape[-1]]).slice(BEGIN, zero.shape[1], dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _store_dq(dq, a, i, W: gl.constexpr):
    """Put 64 columns of the dQ of step ``i`` where a writer takes them, in the order in which the threads hold them."""
    mbarrier.wait(a.written_bar, (i & 1) ^ 1)  # of the step before; the first does not wait
    a.dq_bufs.index(hide_from_compiler(0)).slice(W * LINES, LINES, dim=0).store(as_added(dq))


@gluon.jit
def _store_rest_of_dq(dq, a, i, W: gl.constexpr):
    """Put the 32 columns there that remain, and tell the writer."""
    a.dq_more_bufs.index(hide_from_compiler(0)).slice(W * (LINES // 2), LINES // 2, dim=0).store(as_added(dq))
    fence_async_shared()
    named_barrier("arrive", FULL + (i & 1), BOTH + 32)


@gluon.jit
def _step(
    dk,
    dk_more,
    dv,
    zero,
    zero_rest,
    a,
    span,
    i,
    key,
    row,
    W: gl.constexpr,
    IS_FIRST: gl.constexpr,
    IS_EDGE: gl.constexpr,
):
    """Add a query tile to dK and dV, and that of the step before to dQ."""
    dtype: gl.constexpr = a.q_desc.dtype
    slot = slot_of(i, STAGES)
    here = hide_from_compiler(W)
    s_layout: gl.constexpr = zero.type.layout
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, STAGES) & 1)
    q = a.q_bufs.index(slot).reshape([ROWS, FIRST])
    q_more = a.q_more_bufs.index(slot).reshape([ROWS, MORE])
    k = a.k_bufs.index(here).reshape([ROWS, FIRST])
    k_more = a.k_more_bufs.index(here).reshape([ROWS, MORE])
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(k_more, q_more.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    packed, slope = probabilities(s, a, span, slot, key, row, dtype, IS_EDGE)
    mbarrier.wait(a.ready_bars.index(STAGES), i & 1)
    do = a.do_bufs.index(hide_from_compiler(0)).reshape([ROWS, DV])
    dp = warpgroup_mma(a.v_bufs.index(here).reshape([ROWS, DV]), do.permute((1, 0)), zero, use_acc=False, is_async=True)
    p_operand = unpack(packed, dtype, gl.DotOperandLayout(0, dv.type.layout, 2))
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = row_numbers(a, slot, 1, gl.SliceLayout(0, s_layout))
    ds = pack(unpack_wide(slope, dtype, s_layout) * (dp - delta[None, :]), dtype)
    dv, _ = warpgroup_mma_wait(0, deps=[dv, p_operand])
    named_barrier("arrive", DO_FREE, BOTH + 32)
    if not IS_FIRST:
        _await_ds(i - 1, W)
    a.ds_bufs.index((i & 1) * 2 + W).store(unpack(ds, dtype, s_layout))
    fence_async_shared()
    ds_operand = unpack(ds, dtype, gl.DotOperandLayout(0, dk.type.layout, 2))
    more_operand = unpack(ds, dtype, gl.DotOperandLayout(0, dk_more.type.layout, 2))
    if IS_FIRST:
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dk_more = warpgroup_mma(more_operand, q_more, dk_more, is_async=True)
        _pass_ds(i, W)
        dk, dk_more, _, _ = warpgroup_mma_wait(0, deps=[dk, dk_more, ds_operand, more_operand])
    else:
        dq = _issue_dq(a, i - 1, zero, a.k_bufs, W * 64)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _store_dq(dq, a, i - 1, W)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dk_more = warpgroup_mma(more_operand, q_more, dk_more, is_async=True)
        rest = _issue_dq(a, i - 1, zero_rest, a.k_more_bufs, W * HALF)
        dk, dk_more, rest, _, _ = warpgroup_mma_wait(0, deps=[dk, dk_more, rest, ds_operand, more_operand])
        _pass_ds(i, W)
        _store_rest_of_dq(rest, a, i - 1, W)
    named_barrier("arrive", Q_FREE + slot, BOTH + 32)
    return dk, dk_more, dv


@gluon.jit
def _multiply_partition(a, W: gl.constexpr):
    """Compute dK and dV of keys 64 W to 64 W + 63, and a part of the dQ of each query tile."""
    dtype: gl.constexpr = a.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    i = 0  # query tiles so far
    t = 0  # key tiles so far
    tile = a.key_tiles.wait(t, 4)
    while tile >= 0:
        head, n, span = place_of(a, tile, t, 4)
        first, end = span.first(n), span.end(n)
        key = n * (2 * ROWS) + W * ROWS
        edge = first_whole_tile(a, span, key, first, end)
        dk = gl.zeros([ROWS, FIRST], gl.float32, wide_layout)
        dk_more = gl.zeros([ROWS, MORE], gl.float32, s_layout)
        dv = gl.zeros([ROWS, DV], gl.float32, wide_layout)
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        zero_rest = gl.zeros([ROWS, HALF], gl.float32, rest_layout)
        mbarrier.wait(a.ready_bars.index(STAGES + 1), t & 1)
        mbarrier.wait(a.ready_bars.index(STAGES + 2), t & 1)
        sums, i = walk_query_tiles(a, span, i, (dk, dk_more, dv), (zero, zero_rest), key, first, edge, end, W)
        dk, dk_more, dv = sums
        b, kv, first_key = key_coordinates(a, head, t, 4)
        # V of this warpgroup was read for the last time; K by both when they have met. All are looked up here: kept
        # through the loops, their addresses spill.
        a.v_bufs.index(hide_from_compiler(W)).reshape([ROWS, DV]).store(dv.to(dtype))
        fence_async_shared()
        store_rows(a.dv_desc, b, kv, first_key + key, 0, a.v_bufs.index(hide_from_compiler(W)))
        _pass_ds(i, W)
        _await_ds(i, W)
        a.k_bufs.index(hide_from_compiler(W)).reshape([ROWS, FIRST]).store((dk * a.scale).to(dtype))
        a.k_more_bufs.index(hide_from_compiler(W)).reshape([ROWS, MORE]).store((dk_more * a.scale).to(dtype))
        fence_async_shared()
        store_rows(a.dk_desc, b, kv, first_key + key, 0, a.k_bufs.index(hide_from_compiler(W)))
        store_rows(a.dk_more_desc, b, kv, first_key + key, FIRST, a.k_more_bufs.index(hide_from_compiler(W)))
        tma.store_wait(0)
        named_barrier("arrive", KV_FREE, BOTH + 32)
        t += 1
        tile = a.key_tiles.wait(t, 4)


@gluon.jit
def _backward_192_sm90_kernel(
    q_desc,  # [B, H, Sq, D]: in boxes of the first 128 columns
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    do_desc,  # [B, H, Sq, DV]
    dk_desc,  # [B, HK, Sk, D]
    dv_desc,  # [B, HK, Sk, DV]
    stats_desc,  # [B * H * tiles_m * 2 * ROWS] fp32: of a query tile LSE * log2(e), then delta
    dq_desc,  # [B * H * tiles_m * 3 * LINES, 32] fp32
    dq_semaphore_ptr,  # [B * H * tiles_m + 1] int32, 0 before; the last counts key tiles that were drawn
    sequences_ptr,  # packed: [7, B] int32, see ``_order_key_tiles_kernel``; else None
    alibi_ptr,  # [H], [B, H] or None; packed [H] or None
    q_more_desc, k_more_desc, dk_more_desc, dq_more_desc,  # in boxes of the other 64 columns
    sizes: HopperBackwardSizes,
    window: Window,
    batch,  # packed: sequences; else None
    scale_log2,  # scale * log2(e); with a softcap, softcap * log2(e)
    scale,
    cap_scale,  # scale / softcap; without one None
    alibi_stride,  # of the slopes along B, or None
    CALL: gl.constexpr,  # HopperBackwardCall
    MATRIX_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 128 keys and add what they give to dQ. Grid: any."""
    gl.static_assert(CALL.GROUP % CALL.TOGETHER == 0, "all partitions have as many walks")
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], q_desc.dtype)
    ready_bars = make_barriers(STAGES + 3, 1)
    written_bars = make_barriers(1, 1)
    key_tiles = make_key_tiles(sizes, sequences_ptr, batch)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    dtype: gl.constexpr = q_desc.dtype
    stats_bufs = make_tiles(stats_desc, STAGES)
    slopes = make_slopes(alibi_ptr, alibi_stride, dq_semaphore_ptr, sizes.heads, stats_bufs, STAGES, CALL.SEES_AHEAD)
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, dq_desc, dq_semaphore_ptr,
        q_more_desc, k_more_desc, dk_more_desc, dq_more_desc,
        make_tiles(q_desc, STAGES),
        make_tiles(q_more_desc, STAGES),
        make_tiles(do_desc, 1),
        stats_bufs,
        make_tiles(k_desc, 2),
        make_tiles(k_more_desc, 2),
        make_tiles(v_desc, 2),
        gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], ds_layout),
        make_tiles(dq_desc, 1),
        make_tiles(dq_more_desc, 1),
        ready_bars, written_bars.index(0), key_tiles, sizes.heads, sizes.heads_kv,
        make_span(sizes, window, CALL.BOUND_LEFT, CALL.BOUND_RIGHT, ROWS, 2 * ROWS),
        scale_log2, scale, CALL.GROUP, CALL.TOGETHER,
        scale if cap_scale is None else cap_scale, cap_scale is not None, slopes,
    )  # fmt: skip
    R: gl.constexpr = MATRIX_REGISTERS
    gl.warp_specialize(
        [
            (_multiply_partition, (a, 0)),
            (_multiply_partition, (a, 1)),
            (load_partition, (a, 1)),
            (write_partition, (a, 0, 1)),
            (write_partition, (a, 1, 1)),
        ],
        [4, 1, 1, 1],
        [R, 24, 24, 24],
    )
