"""Parts that the backward kernels for Hopper share (Gluon): the load and write partitions, key tiles, masks, packed P.

A kernel hands ``load_partition``, ``write_partition`` and ``walk_query_tiles`` its own arguments, an aggregate ``a``.
They read its ``key_tiles``, ``span``, ``heads``, ``heads_kv``, ``dq_semaphore_ptr``, ``GROUP`` and ``TOGETHER``.
They call the methods by which kernels differ: ``load_keys``, ``load_queries``, ``dq_buf``, ``add_dq``,
``step`` and ``flush_dq``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...gpu.gluon_sm90 import fetch_next, lap_of, rematerialize, slot_of, wait_for_kernel_before
from ...gpu.gluon_versions import aggregate

ROWS = gl.constexpr(64)  # keys that a warpgroup computes scores of
# A writer lags the producer by at most five steps, and so by at most five key tiles.
_SLOTS = gl.constexpr(8)


@aggregate
class KeyTiles:
    """The key tiles of this program, one after another: the producer fetches them and publishes their numbers."""

    bufs: gl.shared_memory_descriptor  # [_SLOTS, 1] int32: numbers of key tiles, -1 behind the last
    ready_bars: gl.shared_memory_descriptor  # [_SLOTS]
    tiles_n: gl.tensor  # key tiles of a head
    heads_total: gl.tensor  # K/V heads of all sequences
    heads_per_group: gl.tensor  # K/V heads whose key tiles alternate in the order of programs

    @gluon.jit
    def fetch_next(self, counter_ptr):
        """Return the next key tile that no program has fetched, or -1. All that it waits for were fetched before."""
        ticket = fetch_next(counter_ptr)
        ticket = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
        )
        return gl.where(ticket < self.tiles_n * self.heads_total, ticket, -1)

    @gluon.jit
    def publish(self, t, tile):
        """Say which the t-th key tile of this program is."""
        slot = slot_of(t, _SLOTS)
        self.bufs.index(slot).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile)
        mbarrier.arrive(self.ready_bars.index(slot))

    @gluon.jit
    def wait(self, t, WARPS: gl.constexpr):
        """Wait until the t-th key tile of this program is known, and return its number."""
        slot, lap = slot_of(t, _SLOTS), lap_of(t, _SLOTS)
        mbarrier.wait(self.ready_bars.index(slot), lap & 1)
        tile = gl.max(self.bufs.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
        # All lanes have it. Read so, ptxas knows, and keeps what depends on it in registers that a warp shares.
        asm: gl.constexpr = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        return gl.inline_asm_elementwise(asm, "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def locate(self, tile):
        """Return K/V head (of all sequences) and key tile: in a group of heads, first the first key tile of each."""
        tiles_n = rematerialize(self.tiles_n)
        per_group = self.heads_per_group * tiles_n
        group = tile // per_group
        width = gl.minimum(self.heads_per_group, self.heads_total - group * self.heads_per_group)
        rest = tile - group * per_group
        return group * self.heads_per_group + rest % width, rest // width


@aggregate
class Span:
    """Which query tiles see a key tile, and which key tiles a query tile sees.

    Every key tile is seen by a row: plans see to it, as the ring of key tiles counts on it.
    """

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # query tiles of a head
    window_left: gl.tensor  # read if BOUND_LEFT
    window_right: gl.tensor  # read if BOUND_RIGHT; 0 if causal
    BOUND_LEFT: gl.constexpr  # whether some keys come too early for some rows
    BOUND_RIGHT: gl.constexpr  # whether some keys come too late for some rows
    BLOCK_M: gl.constexpr
    KEYS: gl.constexpr  # of a key tile

    @gluon.jit
    def earliest(self, key):
        """Return the first row that sees a key, were there rows from minus infinity on."""
        return key + rematerialize(self.seqlen_q) - rematerialize(self.seqlen_k) - rematerialize(self.window_right)

    @gluon.jit
    def latest(self, key):
        """Return the last row that sees a key, were there rows without end."""
        return key + rematerialize(self.seqlen_q) - rematerialize(self.seqlen_k) + rematerialize(self.window_left)

    @gluon.jit
    def first(self, n):
        """Return the first query tile that sees a key of key tile ``n``."""
        if self.BOUND_RIGHT:
            row = self.earliest(n * self.KEYS)
            return gl.minimum(gl.maximum(row, 0) // self.BLOCK_M, rematerialize(self.tiles_m))
        return rematerialize(self.tiles_m) * 0

    @gluon.jit
    def end(self, n):
        """Return the query tile behind the last that sees a key of key tile ``n``."""
        if self.BOUND_LEFT:
            row = self.latest(n * self.KEYS + self.KEYS - 1)
            return gl.minimum(row // self.BLOCK_M + 1, rematerialize(self.tiles_m))
        return rematerialize(self.tiles_m)

    @gluon.jit
    def first_key_tile(self, m):
        """Return the first key tile whose span has query tile ``m``."""
        if self.BOUND_LEFT:
            key = (
                m * self.BLOCK_M
                - rematerialize(self.seqlen_q)
                + rematerialize(self.seqlen_k)
                - rematerialize(self.window_left)
            )
            return gl.maximum(key, 0) // self.KEYS
        return rematerialize(self.tiles_m) * 0

    @gluon.jit
    def is_whole(self, key, row):
        """Return whether all rows of the query tile from ``row`` on see all of 64 keys from ``key`` on."""
        whole = (key + ROWS <= rematerialize(self.seqlen_k)) & (row + self.BLOCK_M - 1 <= self.latest(key))
        if self.BOUND_RIGHT:
            whole = whole & (self.earliest(key + ROWS - 1) <= row)
        return whole

    @gluon.jit
    def edge(self, key, first, end):
        """Return the first query tile all of whose rows see 64 keys from ``key`` on, or ``end``.

        For walks in which no key comes too early.
        """
        edge = end
        if key + ROWS <= rematerialize(self.seqlen_k):
            edge = first
            if self.BOUND_RIGHT:
                row = self.earliest(key + ROWS - 1)
                edge = gl.minimum(gl.maximum((row + self.BLOCK_M - 1) // self.BLOCK_M, first), end)
        return edge


@gluon.jit
def step_at(heads_before, r, TOGETHER: gl.constexpr):
    """Return the query tile, and the head of the group, of step ``r`` of a walk over ``TOGETHER`` heads.

    Steps of a walk come in falling order.
    """
    return r // TOGETHER, heads_before + r % TOGETHER


@gluon.jit
def load_partition(a, WRITERS: gl.constexpr):
    """Fetch key tiles; copy K and V of each, then Q, dO and the row statistics of the query tiles that see it.

    Args:
        a: the kernel's arguments.
        WRITERS: semaphores of a query tile. The counter of key tiles lies behind all of them.
    """
    # All before this wait ran while the kernel before was ending. The other partitions wait for a key tile.
    wait_for_kernel_before()
    i = 0  # query tiles so far
    t = 0  # key tiles so far
    query_tiles = rematerialize(a.heads) * (a.key_tiles.heads_total // a.heads_kv) * rematerialize(a.span.tiles_m)
    counter_ptr = a.dq_semaphore_ptr + WRITERS * query_tiles
    tile = a.key_tiles.fetch_next(counter_ptr)
    while tile >= 0:
        a.key_tiles.publish(t, tile)
        head, n = a.key_tiles.locate(tile)
        b, kv = head // a.heads_kv, head % a.heads_kv
        first, end = a.span.first(n), a.span.end(n)
        a.load_keys(b, kv, n, t)
        for heads_before in range(0, a.GROUP, a.TOGETHER):
            for r in range(a.TOGETHER * end - 1, a.TOGETHER * first - 1, -1):
                m, g = step_at(heads_before, r, a.TOGETHER)
                h = kv * a.GROUP + g
                stats = (head * a.GROUP + g) * rematerialize(a.span.tiles_m)
                a.load_queries(b, h, m, stats, i)
                i += 1
        t += 1
        tile = a.key_tiles.fetch_next(counter_ptr)
    a.key_tiles.publish(t, -1)


@gluon.jit
def write_partition(a, WRITER: gl.constexpr, WRITERS: gl.constexpr):
    """Add dQ to memory, in the order of the key tiles: a semaphore a query tile says how many have been added.

    Args:
        a: the kernel's arguments.
        WRITER: 0 or 1, which of the two write partitions this is.
        WRITERS: semaphores of a query tile. 1: the writers add every second step each. 2: each adds half of every step.
    """
    STRIDE: gl.constexpr = 3 - WRITERS
    buf = a.dq_buf(WRITER)
    t = 0
    i = 0  # of the first step of the key tile
    key_tile = a.key_tiles.wait(t, 1)
    while key_tile >= 0:
        head, n = a.key_tiles.locate(key_tile)
        end = a.span.end(n)
        steps = a.TOGETHER * (end - a.span.first(n))
        begin = 0
        if WRITERS == 1:
            begin = (i + WRITER) & 1
        for j in range(begin, a.GROUP // a.TOGETHER * steps, STRIDE):
            m, g = step_at(j // steps * a.TOGETHER, a.TOGETHER * end - 1 - j % steps, a.TOGETHER)
            tile = (head * a.GROUP + g) * rematerialize(a.span.tiles_m) + m
            added_before = n - a.span.first_key_tile(m)
            semaphore = tile if WRITERS == 1 else 2 * tile + WRITER
            while poll(a.dq_semaphore_ptr + semaphore) != added_before:
                pass
            a.add_dq(buf, tile, added_before, WRITER)
            wait_until_added()
            raise_counter(a.dq_semaphore_ptr + semaphore)
        i += a.GROUP // a.TOGETHER * steps
        t += 1
        key_tile = a.key_tiles.wait(t, 1)


@gluon.jit
def first_whole_tile(a, key, first, end):
    """Return the query tile from which on no key is hidden: that of ``Span.edge``, as ``walk_query_tiles`` takes it."""
    edge = first
    if not a.span.BOUND_LEFT:
        edge = a.span.edge(key, first, end)
        if a.TOGETHER == 1:  # the first step is masked in any case; known here, ptxas spills less
            edge = gl.minimum(edge, end - 1)
    return edge


@gluon.jit
def walk_query_tiles(a, i, sums, kept, key, first, edge, end, W: gl.constexpr):
    """Add the query tiles that see a key tile to its sums, head by head; return the sums and the step behind the last.

    Steps are masked at the edges alone: the first of a walk, and those before ``edge``. With a left bound ``step``
    decides for each.

    Args:
        a: the kernel's arguments.
        i: steps so far. First, as loops carry their values in this order, and machine code follows it.
        sums: dK, dV or both, a tuple in registers.
        kept: what all steps read, a tuple.
        key: the first key of this warpgroup.
        first: the first query tile that sees a key of the tile.
        edge: the first query tile that sees all keys. Computed before the sums are made: ptxas spills less.
        end: the query tile behind the last.
        W: which warpgroup this is.
    """
    for _ in range(a.GROUP // a.TOGETHER):
        sums = a.step(sums, kept, i, key, (end - 1) * a.span.BLOCK_M, W, True, True)
        i += 1
        for r in range(a.TOGETHER * end - 2, a.TOGETHER * edge - 1, -1):
            sums = a.step(sums, kept, i, key, r // a.TOGETHER * a.span.BLOCK_M, W, False, False)
            i += 1
        if not a.span.BOUND_LEFT:
            masked = a.TOGETHER * edge
            if a.TOGETHER > 1:
                masked = gl.minimum(masked, a.TOGETHER * end - 1)
            for r in range(masked - 1, a.TOGETHER * first - 1, -1):
                sums = a.step(sums, kept, i, key, r // a.TOGETHER * a.span.BLOCK_M, W, False, True)
                i += 1
        a.flush_dq(kept, i - 1, W)
    return sums, i


@gluon.jit
def mask_edge(s, span, key, row, IS_EDGE: gl.constexpr):
    """Mask the scores of an edge tile; with a left bound, of each tile that has hidden keys."""
    if IS_EDGE:
        s = mask_scores(s, span, key, row)
    elif span.BOUND_LEFT:  # noqa: SIM102 - the first is a constant, the second is known on the GPU alone
        if not span.is_whole(key, row):
            s = mask_scores(s, span, key, row)
    return s


@gluon.jit
def make_key_tiles(tiles_n, heads_total, heads_per_group):
    """Allocate the buffers through which the producer publishes the key tiles of a program."""
    bars = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(_SLOTS):
        mbarrier.init(bars.index(bar), count=1)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bufs = gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], layout)
    return KeyTiles(bufs, bars, tiles_n, heads_total, heads_per_group)  # type: ignore[call-arg] # aggregate gives it a constructor


@gluon.jit
def as_added(dq):
    """Return 64 rows of dQ as threads hold them, 16 bytes a thread side by side: 128 lines of 32 for 64 columns."""
    COLUMNS: gl.constexpr = dq.shape[1]
    x = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2])  # warp, 8 rows further, row, column / 8, lane, column
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([2 * COLUMNS, 32])


@gluon.jit
def poll(ptr):
    """Read a counter; what was written before it was raised can be added to afterwards, by TMA too."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1]; fence.proxy.async.global;",
        "=r,l",
        [ptr.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def raise_counter(ptr):
    """Raise a counter by 1, after all that this warp knows to be done; one lane does it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.b32 lane, %laneid; setp.eq.s32 p, lane, 0; mov.b32 $0, 0;"
        " @p red.release.gpu.global.add.s32 [$1], 1; }",
        "=r,l", [ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_until_read():
    """Wait until the shared memory that this warp's additions read can be written again."""
    asm: gl.constexpr = "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until_added():
    """Wait until memory has what this warp added."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mask_scores(s, span, key, row):
    """Put -inf where a query row of the tile does not see a key: keys are rows, queries columns.

    A thread holds columns 8 i + 2 lane + k with i and k known at compile time: as a 4-dimensional comparison of
    8 i + k with a number per lane and row, the mask costs one compare and one select an element.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    offs_n = key + rematerialize(gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout)))
    is_key = offs_n < rematerialize(span.seqlen_k)
    lane = rematerialize(2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout)))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    low = gl.where(is_key, span.earliest(offs_n) - row if span.BOUND_RIGHT else 0, COLUMNS)[:, None] - lane
    x = gl.where(column >= low[:, None, :, None], x, -float("inf"))
    if span.BOUND_LEFT:
        high = (span.latest(offs_n) - row)[:, None] - lane
        x = gl.where(column <= high[:, None, :, None], x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def unpack_wide(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``pack`` to fp32."""
    if dtype == gl.bfloat16:
        low = (packed << 16).to(gl.float32, bitcast=True)
        high = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        low = packed.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2]), layout)
