"""Attention backward for Hopper, the widest heads: one warpgroup for dV, one for dK (Gluon, sm_90, fp16 and bf16).

The sums of dK and of dV of 64 keys each fill the registers of a warpgroup. So the two warpgroups of a program divide
the products, not the keys: the first computes the scores, P and dV, the second dP, dS and dK. P goes from one to the
other through shared memory, as the threads hold it. dS goes there too, and a step later each computes half of the
columns of dQ, 64 at a time. All else is as in ``gluon_sm90``: key tiles from a counter, writers that add dQ to
memory in the order of the key tiles, and the walk from the last query tile. Each writer has one half of every tile.

``d192_gluon_sm90`` serves heads up to 192 with V up to 128. Heads up to 192 with a wider V have 64 last columns of 0,
which are neither copied nor multiplied.

Source: as there. Ours: the roles of the warpgroups.
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

KEYS = gl.constexpr(64)  # of a program
ROWS = gl.constexpr(64)  # query rows of a step
STAGES = gl.constexpr(2)  # of Q; dO has one
BOTH = gl.constexpr(256)  # threads of the two warpgroups
LINES = gl.constexpr(128)  # of 32 numbers, of 64 x 64 of dQ
LEFT = gl.constexpr(128)  # columns of Q, K and dK in a first part; the rest may be 64 or 128
# Barriers of the hardware; Triton uses those before.
Q_FREE = gl.constexpr(6)  # two
DO_FREE = gl.constexpr(8)
KV_FREE = gl.constexpr(9)
FULL = gl.constexpr(10)  # half a tile of dQ lies in shared memory: two
P_FULL = gl.constexpr(12)
P_FREE = gl.constexpr(13)
DS_FULL = gl.constexpr(14)
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
    # For the columns behind D; where there are none, they repeat the descriptors above.
    q_more_desc: tma.tensor_descriptor
    k_more_desc: tma.tensor_descriptor
    dk_more_desc: tma.tensor_descriptor
    q_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, D]
    q_more_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, COLUMNS - D]
    do_bufs: gl.shared_memory_descriptor  # [1, 1, 1, ROWS, DV]
    stats_bufs: gl.shared_memory_descriptor  # [STAGES, 2 * ROWS]
    k_bufs: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, D]
    k_more_bufs: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, COLUMNS - D]
    v_bufs: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, DV]
    p_bufs: gl.shared_memory_descriptor  # [1, 64, 32] int32: P, with a softcap times its derivative, as threads hold it
    ds_bufs: gl.shared_memory_descriptor  # [2, KEYS, ROWS]
    dq_bufs: gl.shared_memory_descriptor  # [1, 2 * LINES, 32] fp32
    ready_bars: gl.shared_memory_descriptor  # [STAGES + 3]: slots of Q, dO, K, V
    written_bars: gl.shared_memory_descriptor  # [1]: half a tile of dQ was read by TMA
    key_tiles: KeyTiles
    heads: gl.tensor  # query heads of a sequence
    heads_kv: gl.tensor
    span: Span
    scale_log2: gl.tensor
    scale: gl.tensor
    GROUP: gl.constexpr  # query heads that share one K/V head
    TOGETHER: gl.constexpr  # of them that are walked over together
    COLUMNS: gl.constexpr  # of Q and K that are not 0
    D: gl.constexpr  # columns of Q and K in the first part
    DV: gl.constexpr
    cap_scale: gl.tensor  # read if HAS_SOFTCAP
    HAS_SOFTCAP: gl.constexpr
    slopes: Slopes

    @gluon.jit
    def load_keys(self, b, kv, key, t):
        """Copy K and V of the t-th key tile of this program, once those of the one before were read."""
        if t > 0:
            named_barrier("sync", KV_FREE, BOTH + 32)
        for which in gl.static_range(2):
            bar = self.ready_bars.index(STAGES + 1 + which)
            desc = self.k_desc if which == 0 else self.v_desc
            bufs = self.k_bufs if which == 0 else self.v_bufs
            if which == 0 and self.D < self.COLUMNS:
                mbarrier.expect(bar, desc.block_type.nbytes + self.k_more_desc.block_type.nbytes)
                load_rows(self.k_more_desc, b, kv, key, self.D, bar, self.k_more_bufs.index(0))
            else:
                mbarrier.expect(bar, desc.block_type.nbytes)
            load_rows(desc, b, kv, key, 0, bar, bufs.index(0))

    @gluon.jit
    def load_queries(self, b, h, first_row, m, first_tile, i):
        """Copy Q, the row statistics and dO of query tile ``m``, for step ``i``."""
        slot, lap = slot_of(i, STAGES), lap_of(i, STAGES)
        slope = self.slopes.load(b, h)
        if lap > 0:
            named_barrier("sync", Q_FREE + slot, BOTH + 32)
        self.slopes.put(slot, slope)
        bar = self.ready_bars.index(slot)
        Q_BYTES: gl.constexpr = self.q_desc.block_type.nbytes + self.stats_desc.block_type.nbytes
        MORE: gl.constexpr = self.q_more_desc.block_type.nbytes if self.D < self.COLUMNS else 0
        mbarrier.expect(bar, Q_BYTES + MORE)
        load_rows(self.q_desc, b, h, first_row + m * ROWS, 0, bar, self.q_bufs.index(slot))
        if MORE > 0:
            load_rows(self.q_more_desc, b, h, first_row + m * ROWS, self.D, bar, self.q_more_bufs.index(slot))
        tma_load(self.stats_desc, [query_tile(self, first_tile, m) * (2 * ROWS)], bar, self.stats_bufs.index(slot))
        if i > 0:
            named_barrier("sync", DO_FREE, BOTH + 32)
        do_bar = self.ready_bars.index(STAGES)
        mbarrier.expect(do_bar, self.do_desc.block_type.nbytes)
        load_rows(self.do_desc, b, h, first_row + m * ROWS, 0, do_bar, self.do_bufs.index(0))

    @gluon.jit
    def dq_buf(self, WRITER: gl.constexpr):  # noqa: ARG002 - both writers add from the same memory
        """Return the shared memory from which a writer adds."""
        return self.dq_bufs.index(0)

    @gluon.jit
    def add_dq(self, buf, tile, added_before, WRITER: gl.constexpr):
        """Add half of a step's dQ to that of a query tile, or store the first, and free its shared memory."""
        named_barrier("sync", FULL + WRITER, BOTH + 32)
        row = tile * (4 * LINES) + WRITER * (2 * LINES)
        if added_before == 0:
            tma_store(self.dq_desc, [row, 0], buf)
        else:
            tma_add(self.dq_desc, [row, 0], buf)
        wait_until_read()
        mbarrier.arrive(self.written_bars.index(0))

    @gluon.jit
    def step(
        self,
        sums,
        kept,
        span,
        i,
        key,
        row,
        W: gl.constexpr,  # noqa: ARG002 - one warpgroup computes scores
        IS_FIRST: gl.constexpr,
        IS_EDGE: gl.constexpr,
    ):
        """Compute P of a query tile, hand it on, and add to dV; and our columns of dQ of the step before."""
        return (_score_step(sums[0], kept[0], self, span, i, key, row, IS_FIRST, IS_EDGE),)

    @gluon.jit
    def flush_dq(self, kept, i, W: gl.constexpr):
        """Compute this warpgroup's columns of the dQ of step ``i``, the last of a walk."""
        _flush_dq(self, i, kept[0], W)


@gluon.jit
def _as_held(packed):
    """Return packed P with 8 bytes a thread side by side: [64, 32] int32."""
    x = packed.reshape([4, 2, 8, 8, 4])  # warp, 8 rows further, row, column / 8, lane
    return x.permute((3, 0, 2, 4, 1)).reshape([64, 32])


@gluon.jit
def _as_computed(x, layout: gl.constexpr):
    """Undo ``_as_held``."""
    x = x.reshape([8, 4, 8, 4, 2]).permute((1, 4, 2, 0, 3)).reshape([64, 32])
    return gl.convert_layout(x, layout)


@gluon.jit
def _columns(a, bufs, more_bufs, slot, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return columns of a tile of Q or K; none lie in both parts."""
    if FIRST < a.D:
        columns = bufs.index(slot).reshape([ROWS, a.D]).slice(FIRST, COUNT, dim=1)
    else:
        columns = more_bufs.index(slot).reshape([ROWS, a.COLUMNS - a.D]).slice(FIRST - a.D, COUNT, dim=1)
    return columns


@gluon.jit
def _issue_dq(a, i, zero, FIRST: gl.constexpr):
    """Issue as many columns of dQ = dS K, of the dS of step ``i``, as ``zero`` has."""
    ds = a.ds_bufs.index(i & 1)
    k = _columns(a, a.k_bufs, a.k_more_bufs, hide_from_compiler(0), FIRST, zero.shape[1])
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _store_dq(dq, a, i, HALF: gl.constexpr, W: gl.constexpr):
    """Put 64 columns of the dQ of step ``i`` where a writer takes them, as the threads hold them."""
    number = 2 * i + HALF
    mbarrier.wait(a.written_bars.index(0), (number & 1) ^ 1)  # of the half before; the first does not wait
    a.dq_bufs.index(hide_from_compiler(0)).slice(W * LINES, LINES, dim=0).store(as_added(dq))
    fence_async_shared()
    named_barrier("arrive", FULL + HALF, BOTH + 32)


@gluon.jit
def _pass_over_dq(a):
    """Let what lies there pass for the last 64 columns of a dQ: of heads up to 192 nothing is made of them."""
    mbarrier.wait(a.written_bars.index(0), 0)  # the first half of the step was read: the number of this one is odd
    named_barrier("arrive", FULL + 1, BOTH + 32)


@gluon.jit
def _score_step(dv, zero, a, span, i, key, row, IS_FIRST: gl.constexpr, IS_EDGE: gl.constexpr):
    """Compute P of a query tile, hand it on, and add to dV; and our columns of dQ of the step before."""
    dtype: gl.constexpr = a.q_desc.dtype
    slot = slot_of(i, STAGES)
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, STAGES) & 1)
    here = hide_from_compiler(0)
    REST: gl.constexpr = a.COLUMNS - LEFT
    k = _columns(a, a.k_bufs, a.k_more_bufs, here, 0, LEFT)
    q = _columns(a, a.q_bufs, a.q_more_bufs, slot, 0, LEFT)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    k = _columns(a, a.k_bufs, a.k_more_bufs, here, LEFT, REST)
    q = _columns(a, a.q_bufs, a.q_more_bufs, slot, LEFT, REST)
    s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
    if IS_FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        named_barrier("sync", DS_FULL, BOTH)
        dq = _issue_dq(a, i - 1, zero, 0)
        s = warpgroup_mma_wait(1, deps=[s])
    packed, slope = probabilities(s, a, span, slot, key, row, dtype, IS_EDGE)
    named_barrier("arrive", Q_FREE + slot, BOTH + 32)
    if i > 0:
        named_barrier("sync", P_FREE, BOTH)
    a.p_bufs.index(hide_from_compiler(0)).store(_as_held(slope))
    named_barrier("arrive", P_FULL, BOTH)
    if not IS_FIRST:
        dq = warpgroup_mma_wait(0, deps=[dq])
        _store_dq(dq, a, i - 1, 0, 0)
        dq = _issue_dq(a, i - 1, zero, 128)
    mbarrier.wait(a.ready_bars.index(STAGES), i & 1)
    do = a.do_bufs.index(hide_from_compiler(0)).reshape([ROWS, a.DV])
    p_operand = unpack(packed, dtype, gl.DotOperandLayout(0, dv.type.layout, 2))
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    if not IS_FIRST:
        dq = warpgroup_mma_wait(1, deps=[dq])
        _store_dq(dq, a, i - 1, 1, 0)
    dv, _ = warpgroup_mma_wait(0, deps=[dv, p_operand])
    named_barrier("arrive", DO_FREE, BOTH + 32)
    return dv


@gluon.jit
def _gradient_step(dk, dk_rest, zero, a, i, IS_FIRST: gl.constexpr):
    """Compute dS of a query tile and add to dK; and our columns of dQ of the step before."""
    dtype: gl.constexpr = a.q_desc.dtype
    slot = slot_of(i, STAGES)
    s_layout: gl.constexpr = zero.type.layout
    mbarrier.wait(a.ready_bars.index(STAGES), i & 1)
    v = a.v_bufs.index(hide_from_compiler(0)).reshape([KEYS, a.DV])
    do = a.do_bufs.index(hide_from_compiler(0)).reshape([ROWS, a.DV])
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not IS_FIRST:
        named_barrier("sync", DS_FULL, BOTH)
        dq = _issue_dq(a, i - 1, zero, 64)
        dp = warpgroup_mma_wait(1, deps=[dp])
        named_barrier("arrive", DO_FREE, BOTH + 32)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _store_dq(dq, a, i - 1, 0, 1)
    else:
        dp = warpgroup_mma_wait(0, deps=[dp])
        named_barrier("arrive", DO_FREE, BOTH + 32)
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, STAGES) & 1)
    named_barrier("sync", P_FULL, BOTH)
    like = pack(zero, dtype)
    packed_layout: gl.constexpr = like.type.layout
    held_layout: gl.constexpr = _as_held(like).type.layout
    packed = _as_computed(a.p_bufs.index(hide_from_compiler(0)).load(held_layout), packed_layout)
    named_barrier("arrive", P_FREE, BOTH)
    delta = row_numbers(a, slot, 1, gl.SliceLayout(0, s_layout))
    ds = pack(unpack_wide(packed, dtype, s_layout) * (dp - delta[None, :]), dtype)
    a.ds_bufs.index(i & 1).store(unpack(ds, dtype, s_layout))
    fence_async_shared()
    q = _columns(a, a.q_bufs, a.q_more_bufs, slot, 0, LEFT)
    q_rest = _columns(a, a.q_bufs, a.q_more_bufs, slot, LEFT, a.COLUMNS - LEFT)
    ds_operand = unpack(ds, dtype, gl.DotOperandLayout(0, dk.type.layout, 2))
    rest_operand = unpack(ds, dtype, gl.DotOperandLayout(0, dk_rest.type.layout, 2))
    if not IS_FIRST and a.COLUMNS == 256:
        dq = _issue_dq(a, i - 1, zero, 192)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dk_rest = warpgroup_mma(rest_operand, q_rest, dk_rest, is_async=True)
    if not IS_FIRST:
        if a.COLUMNS == 256:
            dq = warpgroup_mma_wait(2, deps=[dq])
            _store_dq(dq, a, i - 1, 1, 1)
        else:
            _pass_over_dq(a)
    dk, dk_rest, _, _ = warpgroup_mma_wait(0, deps=[dk, dk_rest, ds_operand, rest_operand])
    named_barrier("arrive", Q_FREE + slot, BOTH + 32)
    return dk, dk_rest


@gluon.jit
def _flush_dq(a, i, zero, W: gl.constexpr):
    """Compute the columns of dQ of step ``i``, the last of a walk."""
    named_barrier("sync", DS_FULL, BOTH)
    for half in gl.static_range(2):
        if half == 1 and W == 1 and a.COLUMNS < 256:
            _pass_over_dq(a)
        else:
            dq = _issue_dq(a, i, zero, 128 * half + 64 * W)
            dq = warpgroup_mma_wait(0, deps=[dq])
            _store_dq(dq, a, i, half, W)


@gluon.jit
def _score_partition(a):
    """Compute P and dV."""
    dtype: gl.constexpr = a.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.DV, 16])
    i = 0  # query tiles so far
    t = 0  # key tiles so far
    tile = a.key_tiles.wait(t, 4)
    while tile >= 0:
        head, n, span = place_of(a, tile, t, 4)
        first, end = span.first(n), span.end(n)
        key = n * KEYS
        edge = first_whole_tile(a, span, key, first, end)
        dv = gl.zeros([KEYS, a.DV], gl.float32, dv_layout)
        zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
        mbarrier.wait(a.ready_bars.index(STAGES + 1), t & 1)
        sums, i = walk_query_tiles(a, span, i, (dv,), (zero,), key, first, edge, end, 0)
        dv = sums[0]
        # The other warpgroup read V for the last time; it reads K no more when they have met, nor does this one.
        named_barrier("sync", END, BOTH)
        a.v_bufs.index(hide_from_compiler(0)).reshape([KEYS, a.DV]).store(dv.to(dtype))
        fence_async_shared()
        b, kv, first_key = key_coordinates(a, head, t, 4)
        store_rows(a.dv_desc, b, kv, first_key + key, 0, a.v_bufs.index(0))
        tma.store_wait(0)
        named_barrier("arrive", KV_FREE, BOTH + 32)
        t += 1
        tile = a.key_tiles.wait(t, 4)


@gluon.jit
def _gradient_partition(a):
    """Compute dS and dK."""
    dtype: gl.constexpr = a.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    REST: gl.constexpr = a.COLUMNS - LEFT
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEFT, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    i = 0  # query tiles so far
    t = 0  # key tiles so far
    tile = a.key_tiles.wait(t, 4)
    while tile >= 0:
        head, n, span = place_of(a, tile, t, 4)
        steps = a.TOGETHER * (span.end(n) - span.first(n))
        dk = gl.zeros([KEYS, LEFT], gl.float32, dk_layout)
        dk_rest = gl.zeros([KEYS, REST], gl.float32, rest_layout)
        zero = gl.zeros([KEYS, ROWS], gl.float32, s_layout)
        mbarrier.wait(a.ready_bars.index(STAGES + 2), t & 1)
        mbarrier.wait(a.ready_bars.index(STAGES + 1), t & 1)
        for _ in range(a.GROUP // a.TOGETHER):
            dk, dk_rest = _gradient_step(dk, dk_rest, zero, a, i, True)
            i += 1
            for _step in range(1, steps):
                dk, dk_rest = _gradient_step(dk, dk_rest, zero, a, i, False)
                i += 1
            _flush_dq(a, i - 1, zero, 1)
        named_barrier("sync", END, BOTH)
        here = hide_from_compiler(0)
        _columns(a, a.k_bufs, a.k_more_bufs, here, 0, LEFT).store((dk * a.scale).to(dtype))
        _columns(a, a.k_bufs, a.k_more_bufs, here, LEFT, REST).store((dk_rest * a.scale).to(dtype))
        fence_async_shared()
        b, kv, first_key = key_coordinates(a, head, t, 4)
        store_rows(a.dk_desc, b, kv, first_key + n * KEYS, 0, a.k_bufs.index(0))
        if a.D < a.COLUMNS:
            more = a.k_more_bufs.index(0)
            store_rows(a.dk_more_desc, b, kv, first_key + n * KEYS, a.D, more)
        tma.store_wait(0)
        named_barrier("arrive", KV_FREE, BOTH + 32)
        t += 1
        tile = a.key_tiles.wait(t, 4)


@gluon.jit
def _backward_wide_sm90_kernel(
    q_desc,  # [B, H, Sq, D]: in boxes of all columns, or of the first 128
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    do_desc,  # [B, H, Sq, DV]
    dk_desc,  # [B, HK, Sk, D]
    dv_desc,  # [B, HK, Sk, DV]
    stats_desc,  # [B * H * tiles_m * 2 * ROWS] fp32: of a query tile LSE * log2(e), then delta
    dq_desc,  # [B * H * tiles_m * 4 * LINES, 32] fp32
    dq_semaphore_ptr,  # [B * H * tiles_m * 2 + 1] int32, 0 before; the last counts key tiles that were drawn
    sequences_ptr,  # packed: [7, B] int32, see ``_order_key_tiles_kernel``; else None
    alibi_ptr,  # [H], [B, H] or None; packed [H] or None
    q_more_desc, k_more_desc, dk_more_desc,  # of the second part of the columns, or None
    sizes: HopperBackwardSizes,
    window: Window,
    batch,  # packed: sequences; else None
    scale_log2,  # scale * log2(e); with a softcap, softcap * log2(e)
    scale,
    cap_scale,  # scale / softcap; without one None
    alibi_stride,  # of the slopes along B, or None
    CALL: gl.constexpr,  # HopperBackwardCall
    COLUMNS: gl.constexpr,  # of Q and K: 192 or 256; those behind are 0
    MATRIX_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys and add what they give to dQ. Grid: any."""
    D: gl.constexpr = q_desc.block_type.shape[-1]
    DV: gl.constexpr = do_desc.block_type.shape[-1]
    IN_PARTS: gl.constexpr = COLUMNS < 256  # TMA is slow where a box lies outside of a tensor
    gl.static_assert(CALL.GROUP % CALL.TOGETHER == 0, "all partitions have as many walks")
    gl.static_assert((LEFT if IN_PARTS else 256) == D, "dQ has parts of 64 columns")
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], q_desc.dtype)
    p_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ready_bars = make_barriers(STAGES + 3, 1)
    written_bars = make_barriers(1, 1)
    key_tiles = make_key_tiles(sizes, sequences_ptr, batch)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    q_bufs = make_tiles(q_desc, STAGES)
    do_bufs = make_tiles(do_desc, 1)
    stats_bufs = make_tiles(stats_desc, STAGES)
    k_bufs = make_tiles(k_desc, 1)
    v_bufs = make_tiles(v_desc, 1)
    p_bufs = gl.allocate_shared_memory(gl.int32, [1, 64, 32], p_layout)
    ds_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, KEYS, ROWS], ds_layout)
    dq_bufs = make_tiles(dq_desc, 1)
    q_more, k_more, dk_more = q_desc, k_desc, dk_desc
    q_more_bufs, k_more_bufs = q_bufs, k_bufs
    if IN_PARTS:
        q_more, k_more, dk_more = q_more_desc, k_more_desc, dk_more_desc
        q_more_bufs = make_tiles(q_more, STAGES)
        k_more_bufs = make_tiles(k_more, 1)
    slopes = make_slopes(alibi_ptr, alibi_stride, dq_semaphore_ptr, sizes.heads, stats_bufs, STAGES, CALL.SEES_AHEAD)
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, dq_desc, dq_semaphore_ptr,
        q_more, k_more, dk_more,
        q_bufs, q_more_bufs, do_bufs, stats_bufs, k_bufs, k_more_bufs, v_bufs, p_bufs, ds_bufs, dq_bufs,
        ready_bars, written_bars, key_tiles, sizes.heads, sizes.heads_kv,
        make_span(sizes, window, CALL.BOUND_LEFT, CALL.BOUND_RIGHT, ROWS, KEYS),
        scale_log2, scale, CALL.GROUP, CALL.TOGETHER, COLUMNS, D, DV,
        scale if cap_scale is None else cap_scale, cap_scale is not None, slopes,
    )  # fmt: skip
    R: gl.constexpr = MATRIX_REGISTERS
    gl.warp_specialize(
        [
            (_score_partition, (a,)),
            (_gradient_partition, (a,)),
            (load_partition, (a, 2)),
            (write_partition, (a, 0, 2)),
            (write_partition, (a, 1, 2)),
        ],
        [4, 1, 1, 1],
        [R, 24, 24, 24],
    )
