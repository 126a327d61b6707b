"""Parts that the backward kernels for Hopper share (Gluon): the load and write partitions, key tiles.

A kernel hands ``load_partition``, ``write_partition`` and ``walk_query_tiles`` its own arguments, an aggregate ``a``.
They read its ``key_tiles``, ``span``, ``heads``, ``heads_kv``, ``dq_semaphore_ptr``, ``GROUP`` and ``TOGETHER``.
They call the methods by which kernels differ: ``load_keys``, ``load_queries``, ``dq_buf``, ``add_dq``,
``step`` and ``flush_dq``.

Packed sequences differ in three things. Each has a ``Span`` of its own, made of lengths that only the GPU knows: the
producer looks up whose key tile it fetched, among sequences in the order of their keys, and publishes what the other
partitions need. Query tiles, which have row statistics, sums of dQ and semaphores, are counted over all sequences.
And tensor maps are ragged: element (FAR, b, h, t) is head h of token b + t - FAR, where the axis of t has FAR elements.
With b where a sequence ends and t from FAR minus its length on, that axis ends where the sequence does: TMA reads 0 for
the rows behind it, and does not write them. The first axis brings addresses back by FAR tokens, as they wrap at 2**64:
FAR = 2**30 times its stride is 2**65 bytes less FAR tokens. (A map that starts FAR tokens before the tensor could do
without, but TMA does not read where its start is no memory.)

Source of ragged maps: ``triton.tools.ragged_tma``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...gpu.gluon_sm90 import (
    fetch_next,
    lap_of,
    make_barriers,
    rematerialize,
    slot_of,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, tma_load, tma_store

ROWS = gl.constexpr(64)  # keys that a warpgroup computes scores of
# A writer lags the producer by at most five steps, and so by at most five key tiles.
_SLOTS = gl.constexpr(8)
# What the producer publishes of a key tile: its number; packed, also its K/V head, the queries and keys of its
# sequence, the tokens behind them, and its first query tile; with shares, also its number among all that have sums.
_NUMBER, _HEAD, _QUERIES, _KEYS, _END_Q, _END_K, _FIRST, _SUMS = (gl.constexpr(i) for i in range(8))
_FIELDS = gl.constexpr(7)  # without the last
# What ``_order_key_tiles_kernel`` stores of each sequence, besides: key tiles up to its last, and those of one head.
_ENDS, _TILES = gl.constexpr(0), gl.constexpr(1)
FAR = gl.constexpr(2**30)  # tokens: see above
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@aggregate
class KeyTiles:
    """The key tiles of this program, one after another: the producer fetches them and publishes their numbers."""

    bufs: gl.shared_memory_descriptor  # [_SLOTS * FIELDS, 1] int32: numbers of key tiles, -1 behind the last, and more
    ready_bars: gl.shared_memory_descriptor  # [_SLOTS]
    tiles_n: gl.tensor  # key tiles of a head; not read if packed
    heads_total: gl.tensor  # K/V heads of all sequences; packed: of one
    heads_per_group: gl.tensor  # K/V heads whose key tiles alternate in the order of programs
    sequences_ptr: gl.tensor  # packed: [_FIELDS, B] int32, see ``_order_key_tiles_kernel``; else not read
    batch: gl.tensor  # packed: sequences
    IS_PACKED: gl.constexpr
    FIELDS: gl.constexpr  # that are published of a key tile
    SHARES: gl.constexpr  # of the heads of a K/V head; a share counts as one above

    @gluon.jit
    def fetch_next(self, counter_ptr):
        """Return the next key tile that no program has fetched, or -1. All that it waits for were fetched before."""
        ticket = fetch_next(counter_ptr)
        ticket = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
        )
        if not self.IS_PACKED:  # packed, ``find`` knows the last
            ticket = gl.where(ticket < self.tiles_n * self.heads_total, ticket, -1)
        return ticket

    @gluon.jit
    def publish(self, t, tile):
        """Say which the t-th key tile of this program is."""
        self.put(t, _NUMBER, tile)
        mbarrier.arrive(self.ready_bars.index(slot_of(t, _SLOTS)))

    @gluon.jit
    def put(self, t, WHAT: gl.constexpr, value):
        """Say one thing of the t-th key tile of this program."""
        buf = slot_of(t, _SLOTS) * self.FIELDS + WHAT
        self.bufs.index(buf).store(gl.full([1], 0, gl.int32, _LANES) + value)

    @gluon.jit
    def wait(self, t, WARPS: gl.constexpr):
        """Wait until the t-th key tile of this program is known, and return its number."""
        slot, lap = slot_of(t, _SLOTS), lap_of(t, _SLOTS)
        mbarrier.wait(self.ready_bars.index(slot), lap & 1)
        return self.read(t, _NUMBER, WARPS)

    @gluon.jit
    def read(self, t, WHAT: gl.constexpr, WARPS: gl.constexpr):
        """Return one thing that was said of the t-th key tile, which is known."""
        buf = slot_of(t, _SLOTS) * self.FIELDS + WHAT
        value = gl.max(self.bufs.index(buf).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
        # All lanes have it. Read so, ptxas knows, and keeps what depends on it in registers that a warp shares.
        asm: gl.constexpr = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        return gl.inline_asm_elementwise(asm, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def sequence(self, rank, WHAT: gl.constexpr):
        """Return what is known of the packed sequence with the rank-th most keys."""
        return gl.load(self.sequences_ptr + WHAT * self.batch + rank)

    @gluon.jit
    def find(self, rank, ticket):
        """Return the rank of the sequence that has a key tile, which is not before ``rank``; behind the last, B."""
        lane = gl.arange(0, 32, _LANES)
        passed = gl.to_tensor(32)
        while passed == 32:
            ends = gl.load(self.sequences_ptr + rank + lane, mask=rank + lane < self.batch, other=2147483647)
            passed = gl.sum((ends <= ticket).to(gl.int32), 0)
            rank += passed
        return rank

    @gluon.jit
    def publish_packed(self, t, ticket, rank, KEYS: gl.constexpr):
        """Say which key tile of which sequence the t-th of this program is; return its number there."""
        tiles_n, keys = self.sequence(rank, _TILES), self.sequence(rank, _KEYS)
        first = self.sequence(rank, _ENDS) - tiles_n * self.heads_total
        head, n = self.locate_among(ticket - first, tiles_n)
        if self.SHARES > 1:
            self.put(t, _SUMS, first // self.SHARES + head // self.SHARES * tiles_n + n)
        n += (keys + KEYS - 1) // KEYS - tiles_n  # those before it are seen by no query
        self.put(t, _HEAD, head)
        self.put(t, _KEYS, keys)
        for what in gl.static_range(_QUERIES, _FIELDS):
            if what != _KEYS:
                self.put(t, what, self.sequence(rank, what))
        self.publish(t, n)
        return n

    @gluon.jit
    def locate(self, tile):
        """Return K/V head (of all sequences) and key tile: in a group of heads, first the first key tile of each."""
        return self.locate_among(tile, rematerialize(self.tiles_n))

    @gluon.jit
    def locate_among(self, tile, tiles_n):
        """Return K/V head and key tile, where each head has ``tiles_n`` key tiles."""
        per_group = self.heads_per_group * tiles_n
        group = tile // per_group
        width = gl.minimum(self.heads_per_group, self.heads_total - group * self.heads_per_group)
        rest = tile - group * per_group
        return group * self.heads_per_group + rest % width, rest // width


@aggregate
class Slopes:
    """ALiBi: the slopes of the heads whose queries lie in the slots of the ring. Without it nothing is read."""

    alibi_ptr: gl.tensor  # [H] or [B, H]
    stride_b: gl.tensor
    bufs: gl.shared_memory_descriptor  # [SLOTS, 1] fp32: slope * log2(e)
    IS_GIVEN: gl.constexpr
    SEES_AHEAD: gl.constexpr  # whether rows see keys behind their own position

    @gluon.jit
    def load(self, b, h):
        """Return the slope of a head, times log2(e)."""
        slope = gl.zeros([1], gl.float32, _LANES)
        if self.IS_GIVEN:
            ptr = self.alibi_ptr + b * self.stride_b + h
            slope += gl.load(ptr).to(gl.float32) * 1.4426950408889634
        return slope

    @gluon.jit
    def put(self, slot, slope):
        """Store a slope before the barrier of the slot is armed: who waits for the barrier sees it."""
        if self.IS_GIVEN:
            self.bufs.index(slot).store(slope)

    @gluon.jit
    def read(self, slot):
        """Return the slope of a slot, times log2(e)."""
        return gl.max(self.bufs.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@aggregate
class Span:
    """Which query tiles see a key tile, and which key tiles a query tile sees.

    Every key tile is seen by a row: plans see to it, as the ring of key tiles counts on it.
    """

    seqlen_q: gl.tensor  # packed, as the kernel is given it: not read; so below
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # query tiles of a head; packed: of all sequences
    window_left: gl.tensor  # read if BOUND_LEFT
    window_right: gl.tensor  # read if BOUND_RIGHT; 0 if causal
    BOUND_LEFT: gl.constexpr  # whether some keys come too early for some rows
    BOUND_RIGHT: gl.constexpr  # whether some keys come too late for some rows
    BLOCK_M: gl.constexpr
    KEYS: gl.constexpr  # of a key tile

    @gluon.jit
    def of_sequence(self, seqlen_q, seqlen_k):
        """Return the span of a packed sequence."""
        tiles_m = (seqlen_q + self.BLOCK_M - 1) // self.BLOCK_M
        return Span(  # type: ignore[call-arg] # aggregate gives it a constructor
            seqlen_q, seqlen_k, tiles_m, self.window_left, self.window_right,
            self.BOUND_LEFT, self.BOUND_RIGHT, self.BLOCK_M, self.KEYS,
        )  # fmt: skip

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
def place_of(a, tile, t, WARPS: gl.constexpr):
    """Return K/V head (of all sequences, or of a packed one), number and span of the t-th key tile."""
    if a.key_tiles.IS_PACKED:
        queries = a.key_tiles.read(t, _QUERIES, WARPS)
        span = a.span.of_sequence(queries, a.key_tiles.read(t, _KEYS, WARPS))
        return a.key_tiles.read(t, _HEAD, WARPS), tile, span
    else:  # noqa: RET505 - both would be compiled
        head, n = a.key_tiles.locate(tile)
        return head, n, a.span


@gluon.jit
def load_rows(desc, b, h, row, COLUMN: gl.constexpr, bar, buf):
    """Copy rows of a head to shared memory."""
    if len(desc.block_type.shape) == 5:
        tma_load(desc, [FAR, b, h, row, COLUMN], bar, buf)
    else:
        tma_load(desc, [b, h, row, COLUMN], bar, buf)


@gluon.jit
def store_rows(desc, b, h, row, COLUMN: gl.constexpr, buf):
    """Copy rows of a head from shared memory."""
    if len(desc.block_type.shape) == 5:
        tma_store(desc, [FAR, b, h, row, COLUMN], buf)
    else:
        tma_store(desc, [b, h, row, COLUMN], buf)


@gluon.jit
def key_coordinates(a, head, t, WARPS: gl.constexpr):
    """Return the coordinates, in tensor maps, of the first key of the sequence that has the t-th key tile."""
    if a.key_tiles.IS_PACKED:
        first = FAR - a.key_tiles.read(t, _KEYS, WARPS)
        return a.key_tiles.read(t, _END_K, WARPS), head, first
    else:  # noqa: RET505 - both would be compiled
        return head // a.heads_kv, head % a.heads_kv, 0


@gluon.jit
def number_of_sums(a, head, n, t, WARPS: gl.constexpr):
    """Return which of all key tiles, counted once for all shares of its K/V head, the t-th of this program is."""
    if a.key_tiles.IS_PACKED:
        number = a.key_tiles.read(t, _SUMS, WARPS)
    else:
        number = head // a.SHARES * rematerialize(a.key_tiles.tiles_n) + n
    return number


@gluon.jit
def query_coordinates(a, b, t):
    """Return the coordinates, in tensor maps, of the first query of the sequence that has the t-th key tile."""
    if a.key_tiles.IS_PACKED:
        first = FAR - a.key_tiles.read(t, _QUERIES, 1)
        return a.key_tiles.read(t, _END_Q, 1), first
    else:  # noqa: RET505 - both would be compiled
        return b, 0


@gluon.jit
def first_query_tile(a, first_tile, head, g):
    """Return the number, of all, of the first query tile of the g-th query head of a K/V head."""
    if a.key_tiles.IS_PACKED:
        tile = first_tile * rematerialize(a.heads) + head * a.GROUP + g
    else:
        tile = (head * a.GROUP + g) * rematerialize(a.span.tiles_m)
    return tile


@gluon.jit
def query_tile(a, first, m):
    """Return the number, of all, of query tile ``m`` of the head that starts with tile ``first``."""
    if a.key_tiles.IS_PACKED:  # the heads lie side by side
        m = m * rematerialize(a.heads)
    return first + m


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
    rank = gl.to_tensor(0)  # packed: of the sequence that has the key tile
    tile, rank = _next_key_tile(a, rank, counter_ptr)
    while tile >= 0:
        if a.key_tiles.IS_PACKED:
            tile = a.key_tiles.publish_packed(t, tile, rank, a.span.KEYS)
        else:
            a.key_tiles.publish(t, tile)
        head, n, span = place_of(a, tile, t, 1)
        b, kv, first_key = key_coordinates(a, head, t, 1)
        first, end = span.first(n), span.end(n)
        a.load_keys(b, kv, first_key + n * a.span.KEYS, t)
        b, first_row = query_coordinates(a, b, t)
        first_tile = a.key_tiles.read(t, _FIRST, 1) if a.key_tiles.IS_PACKED else 0
        for heads_before in range(0, a.GROUP, a.TOGETHER):
            for r in range(a.TOGETHER * end - 1, a.TOGETHER * first - 1, -1):
                m, g = step_at(heads_before, r, a.TOGETHER)
                h = kv * a.GROUP + g
                a.load_queries(b, h, first_row, m, first_query_tile(a, first_tile, head, g), i)
                i += 1
        t += 1
        tile, rank = _next_key_tile(a, rank, counter_ptr)
    a.key_tiles.publish(t, -1)


@gluon.jit
def _next_key_tile(a, rank, counter_ptr):
    """Fetch a key tile, or -1; return it, and packed the rank of its sequence."""
    tile = a.key_tiles.fetch_next(counter_ptr)
    if a.key_tiles.IS_PACKED:
        rank = a.key_tiles.find(rank, tile)
        tile = gl.where(rank < a.key_tiles.batch, tile, -1)
    return tile, rank


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
        head, n, span = place_of(a, key_tile, t, 1)
        end = span.end(n)
        steps = a.TOGETHER * (end - span.first(n))
        first_tile = a.key_tiles.read(t, _FIRST, 1) if a.key_tiles.IS_PACKED else 0
        begin = 0
        if WRITERS == 1:
            begin = (i + WRITER) & 1
        for j in range(begin, a.GROUP // a.TOGETHER * steps, STRIDE):
            m, g = step_at(j // steps * a.TOGETHER, a.TOGETHER * end - 1 - j % steps, a.TOGETHER)
            tile = query_tile(a, first_query_tile(a, first_tile, head, g), m)
            added_before = n - span.first_key_tile(m)
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
def first_whole_tile(a, span, key, first, end):
    """Return the query tile from which on no key is hidden: that of ``Span.edge``, as ``walk_query_tiles`` takes it."""
    edge = first
    if not a.span.BOUND_LEFT:
        edge = span.edge(key, first, end)
        if a.TOGETHER == 1:  # the first step is masked in any case; known here, ptxas spills less
            edge = gl.minimum(edge, end - 1)
    return edge


@gluon.jit
def walk_query_tiles(a, span, i, sums, kept, key, first, edge, end, W: gl.constexpr):
    """Add the query tiles that see a key tile to its sums, head by head; return the sums and the step behind the last.

    Steps are masked at the edges alone: the first of a walk, and those before ``edge``. With a left bound ``step``
    decides for each.

    Args:
        a: the kernel's arguments.
        span: of the sequence that has the key tile.
        i: steps so far. First of all numbers, as loops carry their values in this order, and machine code follows it.
        sums: dK, dV or both, a tuple in registers.
        kept: what all steps read, a tuple.
        key: the first key of this warpgroup.
        first: the first query tile that sees a key of the tile.
        edge: the first query tile that sees all keys. Computed before the sums are made: ptxas spills less.
        end: the query tile behind the last.
        W: which warpgroup this is.
    """
    for _ in range(a.GROUP // a.TOGETHER):
        sums = a.step(sums, kept, span, i, key, (end - 1) * a.span.BLOCK_M, W, True, True)
        i += 1
        for r in range(a.TOGETHER * end - 2, a.TOGETHER * edge - 1, -1):
            sums = a.step(sums, kept, span, i, key, r // a.TOGETHER * a.span.BLOCK_M, W, False, False)
            i += 1
        if not a.span.BOUND_LEFT:
            masked = a.TOGETHER * edge
            if a.TOGETHER > 1:
                masked = gl.minimum(masked, a.TOGETHER * end - 1)
            for r in range(masked - 1, a.TOGETHER * first - 1, -1):
                sums = a.step(sums, kept, span, i, key, r // a.TOGETHER * a.span.BLOCK_M, W, False, True)
                i += 1
        a.flush_dq(kept, i - 1, W)
    return sums, i


@gluon.jit
def make_span(sizes, window, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
              KEYS: gl.constexpr):  # fmt: skip
    """Return the span of a call; of packed sequences ``Span.of_sequence`` makes others."""
    return Span(  # type: ignore[call-arg] # aggregate gives it a constructor
        sizes.seqlen_q, sizes.seqlen_k, sizes.tiles_m, window.left, window.right,
        BOUND_LEFT, BOUND_RIGHT, BLOCK_M, KEYS,
    )  # fmt: skip


@gluon.jit
def make_key_tiles(sizes, sequences_ptr, batch, SHARES: gl.constexpr = 1):
    """Allocate the buffers through which the producer publishes the key tiles of a program."""
    IS_PACKED: gl.constexpr = sequences_ptr is not None
    FIELDS: gl.constexpr = _FIELDS + (SHARES > 1) if IS_PACKED else 1
    tiles_n, heads_total, heads_per_group = sizes.tiles_n, sizes.heads_total, sizes.heads_per_group
    bars = make_barriers(_SLOTS, 1)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bufs = gl.allocate_shared_memory(gl.int32, [_SLOTS * FIELDS, 1], layout)
    if not IS_PACKED:  # then these are not read
        sequences_ptr, batch = tiles_n, tiles_n
    return KeyTiles(  # type: ignore[call-arg] # aggregate gives it a constructor
        bufs, bars, tiles_n, heads_total, heads_per_group, sequences_ptr, batch, IS_PACKED, FIELDS, SHARES
    )


@gluon.jit
def make_slopes(alibi_ptr, stride_b, other_ptr, other, other_bufs, SLOTS: gl.constexpr, SEES_AHEAD: gl.constexpr):
    """Allocate room for the slopes of ALiBi. Without it others take the places of what nobody reads."""
    if alibi_ptr is not None:
        bufs = gl.allocate_shared_memory(gl.float32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return Slopes(alibi_ptr, stride_b, bufs, True, SEES_AHEAD)  # type: ignore[call-arg] # aggregate gives it a constructor
    else:  # noqa: RET505 - both would be compiled
        return Slopes(other_ptr, other, other_bufs, False, False)  # type: ignore[call-arg] # aggregate gives it a constructor


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
def sync_warp():
    """Let each lane of the warp know to be done what the others did."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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
