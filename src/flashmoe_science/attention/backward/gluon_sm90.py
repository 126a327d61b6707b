"""Attention backward for Hopper: TMA, warpgroup matrix products, warp specialisation (Gluon, sm_90, fp16 and bf16).

A program draws key tiles from a counter. It owns 64 keys for each of its warpgroups, holds their dK and dV in
registers, and walks over the query tiles that see them, from the last to the first, in all query heads that share the
K/V head. Scores are computed transposed, keys as rows, so that P and dS enter the products for dV and dK straight from
registers. dS also goes to shared memory, where the warpgroups of a program read each other's: each computes one part of
the query tile's dQ, one step later, and puts it into shared memory too.

One warp, the producer, draws key tiles and copies what they need to shared memory. Two more, the writers, take turns at
adding the dQ of a query tile to memory, in fp32, with one instruction. They do so in the order of the key tiles, so
that bits do not vary: a writer waits until the key tile before has been added, and tells the next. The warpgroups wait
for neither, unless both tiles of dQ in shared memory are full. The first key tile stores, so nothing has to be made 0
before. A key tile waits only for key tiles that were drawn before it: no program waits for one that does not run.

Query tiles are walked backwards: all key tiles of a head then start at the same query tile, and the first key tile,
which has the longest causal walk, is fetched first. With a left window bound, too, each key tile starts at the last
query tile that sees it. When causal, four or two heads of a group are walked over together, each query tile in all of
them. A key tile with a shorter walk waits for the one before it at each further walk, so fewer walks mean fewer waits.

Where key tiles are few, programs share the query heads of a K/V head, each as if its heads had a K/V head of their own.
Each adds its dK and dV to those of the share before, in fp32 and in order, and the last one stores them.

At D = 128, part of V stays in registers, because shared-memory bandwidth limits a step. dP is then computed after the
scores have become P, in the same registers.

dQ is accumulated as the registers hold it, 16 bytes a thread side by side; ``_finish_dq_kernel`` brings it in order.

Source: FlashAttention-2 and 3 (Dao, 2023; Shah et al., 2024) for the five products, the transposed scores, the
reduction by TMA and the order by a counter for each query tile. Ours: the product for dQ a step later, two writers, the
first that stores, and the walk from the last query tile, over heads together.
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
    rematerialize,
    slot_of,
    unpack,
)
from ...gpu.gluon_versions import aggregate, tma_add, tma_load, tma_store
from ..kernel_arguments import HopperBackwardSizes, Shares, Window
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
    number_of_sums,
    place_of,
    poll,
    query_tile,
    raise_counter,
    store_rows,
    sync_warp,
    wait_until_read,
    walk_query_tiles,
    write_partition,
)
from .scores_primitives_sm90 import probabilities, row_numbers, unpack_wide

ROWS = gl.constexpr(64)  # of one warpgroup: what one wgmma instruction computes
PART = gl.constexpr(4096)  # numbers of dQ that a warpgroup computes of a query tile
# Barriers of the hardware; Triton uses those before.
FREE = gl.constexpr(6)  # of the first slot of the ring: two
KV_FREE = gl.constexpr(8)
FULL = gl.constexpr(9)  # a tile of dQ lies in shared memory: two
READY = gl.constexpr(11)  # dS of the other warpgroups: two for each warpgroup
END = gl.constexpr(15)


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
    q_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, D]
    do_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, DV]
    stats_bufs: gl.shared_memory_descriptor  # [STAGES, 2 * BLOCK_M]
    k_bufs: gl.shared_memory_descriptor  # [WARPGROUPS, 1, 1, 64, D]
    v_bufs: gl.shared_memory_descriptor  # [WARPGROUPS, 1, 1, 64, DV]
    ds_bufs: gl.shared_memory_descriptor  # [2 * WARPGROUPS * BLOCK_M / 64, 64 keys, 64 queries]
    dq_bufs: gl.shared_memory_descriptor  # [2, 128 * WARPGROUPS, 32] fp32
    ready_bars: gl.shared_memory_descriptor  # [STAGES + 2]: slots of the ring, K, V
    written_bars: gl.shared_memory_descriptor  # [2]: a tile of dQ was read by TMA
    key_tiles: KeyTiles
    heads: gl.tensor  # query heads of a sequence
    heads_kv: gl.tensor
    span: Span
    scale_log2: gl.tensor
    scale: gl.tensor
    GROUP: gl.constexpr  # query heads that share one K/V head
    TOGETHER: gl.constexpr  # of them that are walked over together
    WARPGROUPS: gl.constexpr
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    V_COLUMNS: gl.constexpr  # of V that live in registers
    cap_scale: gl.tensor  # read if HAS_SOFTCAP
    HAS_SOFTCAP: gl.constexpr
    slopes: Slopes
    shares_ptr: gl.tensor  # read if SHARES > 1
    SHARES: gl.constexpr  # programs that share the query heads of a key tile; then all above counts a share as a head

    @gluon.jit
    def load_keys(self, b, kv, key, t):
        """Copy K and V of the t-th key tile of this program, once those of the one before were read."""
        if self.SHARES > 1:
            kv = kv // self.SHARES
        if t > 0:
            named_barrier("sync", KV_FREE, 128 * self.WARPGROUPS + 32)
        for which in gl.static_range(2):
            bar = self.ready_bars.index(self.STAGES + which)
            desc = self.k_desc if which == 0 else self.v_desc
            bufs = self.k_bufs if which == 0 else self.v_bufs
            mbarrier.expect(bar, self.WARPGROUPS * desc.block_type.nbytes)
            for w in gl.static_range(self.WARPGROUPS):
                load_rows(desc, b, kv, key + w * ROWS, 0, bar, bufs.index(w))

    @gluon.jit
    def load_queries(self, b, h, first_row, m, first_tile, i):
        """Copy Q, dO and the row statistics of query tile ``m``, for step ``i``."""
        slot, lap = slot_of(i, self.STAGES), lap_of(i, self.STAGES)
        slope = self.slopes.load(b, h)
        if lap > 0:
            named_barrier("sync", FREE + slot, 128 * self.WARPGROUPS + 32)
        self.slopes.put(slot, slope)
        bar = self.ready_bars.index(slot)
        mbarrier.expect(
            bar, self.q_desc.block_type.nbytes + self.do_desc.block_type.nbytes + self.stats_desc.block_type.nbytes
        )
        load_rows(self.q_desc, b, h, first_row + m * self.BLOCK_M, 0, bar, self.q_bufs.index(slot))
        tma_load(
            self.stats_desc, [query_tile(self, first_tile, m) * (2 * self.BLOCK_M)], bar, self.stats_bufs.index(slot)
        )
        load_rows(self.do_desc, b, h, first_row + m * self.BLOCK_M, 0, bar, self.do_bufs.index(slot))

    @gluon.jit
    def dq_buf(self, WRITER: gl.constexpr):
        """Return the shared memory from which a writer adds."""
        return self.dq_bufs.index(WRITER)

    @gluon.jit
    def add_dq(self, buf, tile, added_before, WRITER: gl.constexpr):
        """Add a step's dQ to that of a query tile, or store the first, and free its shared memory."""
        named_barrier("sync", FULL + WRITER, 128 * self.WARPGROUPS + 32)
        row = tile * (128 * self.WARPGROUPS)
        if added_before == 0:
            tma_store(self.dq_desc, [row, 0], buf)
        else:
            tma_add(self.dq_desc, [row, 0], buf)
        wait_until_read()
        mbarrier.arrive(self.written_bars.index(WRITER))

    @gluon.jit
    def step(self, sums, kept, span, i, key, row, W: gl.constexpr, IS_FIRST: gl.constexpr, IS_EDGE: gl.constexpr):
        """Add a query tile to dK and dV, and that of the step before to dQ."""
        dk, dv = sums
        v, zero, zero_dq = kept
        return _step(dk, dv, v, zero, zero_dq, self, span, i, key, row, W, IS_FIRST, IS_EDGE)

    @gluon.jit
    def flush_dq(self, kept, i, W: gl.constexpr):
        """Compute this warpgroup's part of the dQ of step ``i``, the last of a walk."""
        _await_ds(self, i, W)
        dq = _issue_dq(self, i, kept[2], W)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _store_dq(dq, self, i, W)


@gluon.jit
def _store_ds(ds, a, i, W: gl.constexpr):
    """Put dS where the other warpgroups read it: a tile of 64 keys by 64 queries, or two."""
    HALVES: gl.constexpr = a.BLOCK_M // 64
    buf = ((i & 1) * a.WARPGROUPS + W) * HALVES
    if HALVES == 1:
        a.ds_bufs.index(buf).store(ds)
    else:
        left, right = gl.split(ds.reshape([ROWS, 2, 64]).permute((0, 2, 1)))
        a.ds_bufs.index(buf).store(left)
        a.ds_bufs.index(buf + 1).store(right)
    fence_async_shared()


@gluon.jit
def _pass_ds(a, i, W: gl.constexpr):
    """Tell the other warpgroups that this one's dS of step ``i`` is there, and that it has read that of step i - 1."""
    for other in gl.static_range(a.WARPGROUPS):
        if other != W:
            named_barrier("arrive", READY + 2 * other + (i & 1), 128 * a.WARPGROUPS)


@gluon.jit
def _await_ds(a, i, W: gl.constexpr):
    """Wait for dS of step ``i`` of the other warpgroups; the slot of step i - 1 is free then."""
    named_barrier("sync", READY + 2 * W + (i & 1), 128 * a.WARPGROUPS)


@gluon.jit
def _issue_dq(a, i, zero, W: gl.constexpr):
    """Issue a part of dQ = dS K, of the dS of step ``i``: 64 rows, or 64 columns."""
    HALVES: gl.constexpr = a.BLOCK_M // 64
    dq = zero
    for w in gl.static_range(a.WARPGROUPS):
        half = W if HALVES > 1 else 0
        ds = a.ds_bufs.index(((i & 1) * a.WARPGROUPS + w) * HALVES + half)
        k = a.k_bufs.index(w).reshape([ROWS, a.D])
        if HALVES == 1:
            k = k.slice(W * 64, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _store_dq(dq, a, i, W: gl.constexpr):
    """Put a part of the dQ of step ``i`` where a writer takes it, in the order in which the threads hold it."""
    slot = i & 1
    mbarrier.wait(a.written_bars.index(slot), ((i >> 1) & 1) ^ 1)  # of the lap before; the first does not wait
    a.dq_bufs.index(slot).slice(W * 128, 128, dim=0).store(as_added(dq))
    fence_async_shared()
    named_barrier("arrive", FULL + slot, 128 * a.WARPGROUPS + 32)


@gluon.jit
def _keep_v(a, s_layout: gl.constexpr, W: gl.constexpr):
    """Return the columns of V that live in registers: 64, and those behind them, if any."""
    layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    v = a.v_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.DV])
    first = v.slice(0, 64, dim=1).load(layout)
    more = first
    if a.V_COLUMNS > 64:
        more = v.slice(64, a.V_COLUMNS - 64, dim=1).load(layout)
    return first, more


@gluon.jit
def _issue_dp(a, v, do, zero, W: gl.constexpr):
    """Issue dP = V dO, of the columns of V in registers, then of the others."""
    if a.V_COLUMNS > 0:
        dp = warpgroup_mma(v[0], do.slice(0, 64, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
    if a.V_COLUMNS > 64:
        do_part = do.slice(64, a.V_COLUMNS - 64, dim=1)
        dp = warpgroup_mma(v[1], do_part.permute((1, 0)), dp, is_async=True)
    if a.V_COLUMNS == 0:
        whole_v = a.v_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.DV])
        dp = warpgroup_mma(whole_v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    elif a.V_COLUMNS < a.DV:
        REST: gl.constexpr = a.DV - a.V_COLUMNS
        rest = a.v_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.DV]).slice(a.V_COLUMNS, REST, dim=1)
        dp = warpgroup_mma(rest, do.slice(a.V_COLUMNS, REST, dim=1).permute((1, 0)), dp, is_async=True)
    return dp


@gluon.jit
def _step(
    dk, dv, v, zero, zero_dq, a, span, i, key, row, W: gl.constexpr, IS_FIRST: gl.constexpr, IS_EDGE: gl.constexpr
):
    """Add a query tile to dK and dV, and that of the step before to dQ."""
    dtype: gl.constexpr = a.q_desc.dtype
    slot = slot_of(i, a.STAGES)
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, a.STAGES) & 1)
    k = a.k_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.D])
    q = a.q_bufs.index(slot).reshape([a.BLOCK_M, a.D])
    do = a.do_bufs.index(slot).reshape([a.BLOCK_M, a.DV])
    s_layout: gl.constexpr = zero.type.layout
    # In the place of the scores: there is no other.
    DP_IS_LATE: gl.constexpr = a.V_COLUMNS > 0 or a.HAS_SOFTCAP
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = zero
    if DP_IS_LATE:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        dp = _issue_dp(a, v, do, zero, W)
        s = warpgroup_mma_wait(1, deps=[s])
    packed, slope = probabilities(s, a, span, slot, key, row, dtype, IS_EDGE)
    if DP_IS_LATE:
        dp = _issue_dp(a, v, do, zero, W)
    p_operand = unpack(packed, dtype, gl.DotOperandLayout(0, dv.type.layout, 2))
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = row_numbers(a, slot, 1, gl.SliceLayout(0, s_layout))
    ds = pack(unpack_wide(slope, dtype, s_layout) * (dp - delta[None, :]), dtype)
    if a.V_COLUMNS > 0:  # so that the registers of P are free
        dv, _ = warpgroup_mma_wait(0, deps=[dv, p_operand])
    if not IS_FIRST:
        _await_ds(a, i - 1, W)
    _store_ds(unpack(ds, dtype, s_layout), a, i, W)
    ds_operand = unpack(ds, dtype, gl.DotOperandLayout(0, dk.type.layout, 2))
    if IS_FIRST:
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        _pass_ds(a, i, W)
    else:
        dq = _issue_dq(a, i - 1, zero_dq, W)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        _pass_ds(a, i, W)
        _store_dq(dq, a, i - 1, W)
    if a.V_COLUMNS > 0:
        dk, _ = warpgroup_mma_wait(0, deps=[dk, ds_operand])
    else:
        dk, dv, _, _ = warpgroup_mma_wait(0, deps=[dk, dv, p_operand, ds_operand])
    named_barrier("arrive", FREE + slot, 128 * a.WARPGROUPS + 32)
    return dk, dv


@gluon.jit
def _store_sums(dk, dv, a, head, key, t, W: gl.constexpr):
    """Store dK and dV of the t-th key tile, from the shared memory of K and V."""
    dtype: gl.constexpr = a.q_desc.dtype
    b, kv, first_key = key_coordinates(a, head, t, 4)
    if a.SHARES > 1:
        kv = kv // a.SHARES
    # V of this warpgroup was read for the last time; K by all when they have met. Both are looked up here: kept
    # through the loops, their addresses spill.
    a.v_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.DV]).store(dv.to(dtype))
    fence_async_shared()
    store_rows(a.dv_desc, b, kv, first_key + key, 0, a.v_bufs.index(hide_from_compiler(W)))
    named_barrier("sync", END, 128 * a.WARPGROUPS)
    a.k_bufs.index(hide_from_compiler(W)).reshape([ROWS, a.D]).store((dk * a.scale).to(dtype))
    fence_async_shared()
    store_rows(a.dk_desc, b, kv, first_key + key, 0, a.k_bufs.index(hide_from_compiler(W)))
    tma.store_wait(0)


@gluon.jit
def _pass_sums_on(dk, dv, a, head, n, key, t, W: gl.constexpr):
    """Add dK and dV of the shares before, in order, and hand the sums to the next share; the last one stores them.

    A thread reads what the same thread of another program wrote, so each warp waits and tells for itself.
    """
    share = head % a.SHARES
    tile = number_of_sums(a, head, n, t, 4)
    # Behind the semaphores of the query tiles and the counter of drawn key tiles.
    sequences = a.key_tiles.heads_total // a.heads_kv
    counter_ptr = a.dq_semaphore_ptr + rematerialize(a.heads) * sequences * rematerialize(a.span.tiles_m) + 1 + tile
    sums_ptr = a.shares_ptr + (tile.to(gl.int64) * a.WARPGROUPS + W) * (ROWS * (a.D + a.DV))
    if share > 0:
        while poll(counter_ptr) < share * (4 * a.WARPGROUPS):  # or more, where warps of this share are done
            pass
        dk = _add_from(sums_ptr, dk)
        dv = _add_from(sums_ptr + ROWS * a.D, dv)
    if share < a.SHARES - 1:
        _store_to(sums_ptr, dk)
        _store_to(sums_ptr + ROWS * a.D, dv)
        sync_warp()
        raise_counter(counter_ptr)
    else:
        _store_sums(dk, dv, a, head, key, t, W)


@gluon.jit
def _add_from(ptr, x):
    """Add numbers that ``_store_to`` stored."""
    COLUMNS: gl.constexpr = x.shape[1]
    found = gl.load(_places(ptr, COLUMNS // 8), cache_modifier=".cg")
    found = found.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, COLUMNS])
    return x + gl.convert_layout(found, x.type.layout)


@gluon.jit
def _store_to(ptr, x):
    """Store a matrix as threads hold it, 16 bytes a thread side by side."""
    ptrs = _places(ptr, x.shape[1] // 8)
    gl.store(ptrs, gl.convert_layout(as_added(x).reshape([x.shape[1] // 8, 512]), ptrs.type.layout))


@gluon.jit
def _places(ptr, PIECES: gl.constexpr):
    """Return where the pieces of a matrix lie, 16 bytes of each thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    piece = gl.arange(0, PIECES, gl.SliceLayout(1, layout))
    number = rematerialize(gl.arange(0, 512, gl.SliceLayout(0, layout)))
    # Partitions are told neither how the tensor is aligned nor, by ``rematerialize``, that numbers follow one another.
    return gl.max_contiguous(gl.multiple_of(ptr + piece[:, None] * 512 + number[None, :], (16, 16)), (1, 4))


@gluon.jit
def _multiply_partition(a, W: gl.constexpr):
    """Compute dK and dV of keys 64 W to 64 W + 63, and a part of the dQ of each query tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.DV, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    i = 0  # query tiles so far
    t = 0  # key tiles so far
    tile = a.key_tiles.wait(t, 4)
    while tile >= 0:
        head, n, span = place_of(a, tile, t, 4)
        first, end = span.first(n), span.end(n)
        key = n * (ROWS * a.WARPGROUPS) + W * ROWS
        edge = first_whole_tile(a, span, key, first, end)
        dk = gl.zeros([ROWS, a.D], gl.float32, dk_layout)
        dv = gl.zeros([ROWS, a.DV], gl.float32, dv_layout)
        zero = gl.zeros([ROWS, a.BLOCK_M], gl.float32, s_layout)
        zero_dq = gl.zeros([64, 64], gl.float32, dq_layout)
        mbarrier.wait(a.ready_bars.index(a.STAGES), t & 1)
        mbarrier.wait(a.ready_bars.index(a.STAGES + 1), t & 1)
        v = zero, zero
        if a.V_COLUMNS > 0:
            v = _keep_v(a, s_layout, W)
        sums, i = walk_query_tiles(a, span, i, (dk, dv), (v, zero, zero_dq), key, first, edge, end, W)
        dk, dv = sums
        if a.SHARES == 1:
            _store_sums(dk, dv, a, head, key, t, W)
        else:
            _pass_sums_on(dk, dv, a, head, n, key, t, W)
        named_barrier("arrive", KV_FREE, 128 * a.WARPGROUPS + 32)
        t += 1
        tile = a.key_tiles.wait(t, 4)


@gluon.jit
def _backward_sm90_kernel(
    q_desc,  # [B, H, Sq, D]
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    do_desc,  # [B, H, Sq, DV]
    dk_desc,  # [B, HK, Sk, D]
    dv_desc,  # [B, HK, Sk, DV]
    stats_desc,  # [B * H * tiles_m * 2 * BLOCK_M] fp32: of a query tile LSE * log2(e), then delta
    dq_desc,  # [B * H * tiles_m * 128 * WARPGROUPS, 32] fp32
    dq_semaphore_ptr,  # [B * H * tiles_m + 1] int32, 0 before: the last counts drawn tiles; more behind it for shares
    sequences_ptr,  # packed: [7, B] int32, see ``_order_key_tiles_kernel``; else None
    alibi_ptr,  # [H], [B, H] or None; packed [H] or None
    shares: Shares,
    sizes: HopperBackwardSizes,
    window: Window,
    batch,  # packed: sequences; else None
    scale_log2,  # scale * log2(e); with a softcap, softcap * log2(e)
    scale,
    cap_scale,  # scale / softcap; without one None
    alibi_stride,  # of the slopes along B, or None
    CALL: gl.constexpr,  # HopperBackwardCall
    WARPGROUPS: gl.constexpr,  # that multiply matrices; 64 keys each
    STAGES: gl.constexpr,  # query tiles in flight
    V_COLUMNS: gl.constexpr,  # of V that live in registers: 0, 64, 96 or all 128
    MATRIX_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 * WARPGROUPS keys and add what they give to dQ. Grid: any."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    D: gl.constexpr = q_desc.block_type.shape[-1]
    DV: gl.constexpr = do_desc.block_type.shape[-1]
    gl.static_assert(CALL.GROUP % CALL.TOGETHER == 0, "all partitions have as many walks")
    gl.static_assert(BLOCK_M * D == PART * WARPGROUPS, "a warpgroup computes 64 x 64 of dQ")
    gl.static_assert(STAGES <= KV_FREE - FREE, "the hardware has 16 barriers")
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], q_desc.dtype)
    ready_bars = make_barriers(STAGES + 2, 1)
    written_bars = make_barriers(2, 1)
    key_tiles = make_key_tiles(sizes, sequences_ptr, batch, shares.COUNT)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    stats_bufs = make_tiles(stats_desc, STAGES)
    slopes = make_slopes(alibi_ptr, alibi_stride, dq_semaphore_ptr, sizes.heads, stats_bufs, STAGES, CALL.SEES_AHEAD)
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, dq_desc, dq_semaphore_ptr,
        make_tiles(q_desc, STAGES),
        make_tiles(do_desc, STAGES),
        stats_bufs,
        make_tiles(k_desc, WARPGROUPS),
        make_tiles(v_desc, WARPGROUPS),
        gl.allocate_shared_memory(q_desc.dtype, [2 * WARPGROUPS * BLOCK_M // 64, ROWS, 64], ds_layout),
        make_tiles(dq_desc, 2),
        ready_bars, written_bars, key_tiles, sizes.heads, sizes.heads_kv,
        make_span(sizes, window, CALL.BOUND_LEFT, CALL.BOUND_RIGHT, BLOCK_M, 64 * WARPGROUPS),
        scale_log2, scale,
        CALL.GROUP, CALL.TOGETHER, WARPGROUPS, BLOCK_M, STAGES, D, DV, V_COLUMNS,
        scale if cap_scale is None else cap_scale, cap_scale is not None, slopes,
        dq_semaphore_ptr if shares.shares_ptr is None else shares.shares_ptr, shares.COUNT,
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
