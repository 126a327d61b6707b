"""Row tiles of many queries over keys in pages (Gluon, sm_90): which they are, which keys they see, how pages travel.

The producer and the matrix warpgroups of ``many_gluon_sm90`` share these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...gpu.gluon_sm90 import Mailbox, Ring, hide_from_compiler, lap_of, named_barrier, rematerialize, slot_of
from ...gpu.gluon_versions import aggregate, barrier, tma_load, tma_store
from ..forward.primitives_sm90 import ROWS

_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the producer, which is one warp
COLUMNS = gl.constexpr(64)  # of a part of a tile: what the swizzled layout has in one row

# Fields that the producer sends for each row tile.
ROW, HEAD, START, PLACE, QUERIES, KEYS, BEGIN, END, PART = (gl.constexpr(i) for i in range(9))
FIELDS = gl.constexpr(9)
_NO_PART = gl.constexpr(-1)


@aggregate
class PagedRing:
    """Tiles of K or V in shared memory: rows of pages, in parts of 64 columns; a slot is used again every lap."""

    bufs: gl.shared_memory_descriptor  # [slots * boxes of a tile, 1, 1, rows of a box, 64]
    more_bufs: gl.shared_memory_descriptor  # of the second 64 columns; bufs where there are none
    tiles: gl.shared_memory_descriptor  # [slots, keys of a tile, 64]: the same memory
    more_tiles: gl.shared_memory_descriptor
    ready_bars: gl.shared_memory_descriptor  # the slot was filled
    BOXES: gl.constexpr  # of a tile
    MORE: gl.constexpr  # columns of the second part, or 0
    FREE: gl.constexpr  # barrier of the hardware that says that slot 0 is free; those of the others follow
    READERS: gl.constexpr  # warpgroups that read a slot

    @gluon.jit
    def wait(self, slot, lap):
        """Wait until the slot is filled; return its parts as matrices."""
        mbarrier.wait(self.ready_bars.index(slot), lap & 1)
        return self.tiles.index(slot), self.more_tiles.index(slot)

    @gluon.jit
    def release(self, slot):
        """Tell the producer that one reader is done: each warp for itself, with no wait for the others."""
        named_barrier("arrive", self.FREE + slot, 128 * self.READERS + 32)


@aggregate
class Args:
    """The arguments of every partition."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    sinks_ptr: gl.tensor
    o_ptr: gl.tensor  # the tensor of o_desc
    o_part_ptr: gl.tensor
    sums_part_ptr: gl.tensor
    records_ptr: gl.tensor
    page_table_ptr: gl.tensor
    counter_ptr: gl.tensor  # of tiles fetched; 0 before and after
    row_tiles: Mailbox  # where each lies, and what it sees
    q_ring: Ring  # one slot a warpgroup
    o_bufs: gl.shared_memory_descriptor  # one a warpgroup, on the way to memory
    k_ring: PagedRing
    v_ring: PagedRing
    stride_table_b: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    first_part: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive; with a softcap softcap * log2(e)
    cap_scale: gl.tensor  # softmax_scale / softcap
    GROUP: gl.constexpr  # query heads that share one K/V head
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    PAGE_SIZE: gl.constexpr
    HAS_SEQUSED_Q: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    BOUND_LEFT: gl.constexpr
    BOUND_RIGHT: gl.constexpr
    PING_PONG: gl.constexpr  # the warpgroups take turns at issuing products
    STORE_LSE: gl.constexpr
    IN_HALVES: gl.constexpr  # as ``primitives_sm90`` reads it: never here
    D1: gl.constexpr  # columns of Q and K in the second part, or 0
    DV0: gl.constexpr
    DV1: gl.constexpr
    DV: gl.constexpr  # columns of the output

    @gluon.jit
    def record(self, at, WHAT: gl.constexpr):
        """Return what ``work_triton`` stored of a sequence."""
        return gl.load(self.records_ptr + WHAT * self.batch + at)

    @gluon.jit
    def find(self, at, item):
        """Return the record that has the item, which is not before ``at``."""
        lane = gl.arange(0, 32, _LANES)
        passed = gl.to_tensor(32)
        while passed == 32:
            ends = gl.load(self.records_ptr + self.batch + at + lane, mask=at + lane < self.batch, other=2147483647)
            passed = gl.sum((ends <= item).to(gl.int32), 0)
            at += passed
        return at

    @gluon.jit
    def key_tiles(self, row, queries, keys):
        """Return the range of key tiles that the rows of a row tile see; it may be empty."""
        position = row + keys - queries  # of the first row among the keys
        begin = 0
        end = keys
        if self.BOUND_RIGHT:
            last = gl.minimum(row + ROWS * self.WARPGROUPS - 1, queries - 1)
            end = gl.maximum(gl.minimum(end, last + keys - queries + self.window_right + 1), 0)
        if self.BOUND_LEFT:
            begin = gl.maximum(position - self.window_left, 0) // self.BLOCK_N
        end = gl.where(row < queries, end, 0)
        return begin, gl.maximum((end + self.BLOCK_N - 1) // self.BLOCK_N, begin)

    @gluon.jit
    def place(self, n, at, item):
        """Say where the n-th tile lies, if its share has keys or is the first; return whether, and what it reads."""
        head = item % self.heads
        local = item // self.heads
        if at > 0:
            local -= self.record(at - 1, 1)
        each, splits = self.record(at, 8), self.record(at, 9)
        tiles = self.record(at, 11)
        queries, keys = self.record(at, 6), self.record(at, 7)
        split = local % splits
        tile = local // splits
        if self.BOUND_RIGHT:  # tiles with the most keys first
            tile = tiles - 1 - tile
        row = tile * (ROWS * self.WARPGROUPS)
        begin, end = self.key_tiles(row, queries, keys)
        count = gl.maximum((end - begin + each - 1) // each, 1)
        begin += split * each
        end = gl.maximum(gl.minimum(end, begin + each), begin + 1)  # one tile at the least, all of it masked
        has_work = split < count
        if has_work:
            part = self.first_part + ((self.record(at, 10) + tile * splits + split) * self.heads + head) * (
                ROWS * self.WARPGROUPS
            )
            self.row_tiles.put(n, HEAD, head)
            self.row_tiles.put(n, START, self.record(at, 4))
            self.row_tiles.put(n, PLACE, self.record(at, 5))
            self.row_tiles.put(n, QUERIES, queries)
            self.row_tiles.put(n, KEYS, keys)
            self.row_tiles.put(n, BEGIN, begin)
            self.row_tiles.put(n, END, end)
            self.row_tiles.put(n, PART, gl.where(count > 1, part, _NO_PART))
            self.publish(n, row)
        return has_work, head, row, queries, keys, begin, end

    @gluon.jit
    def publish(self, n, row):
        """Say where the n-th tile starts, after all else; a row of -1 is the end."""
        self.row_tiles.put(n, ROW, row)
        self.row_tiles.publish(n)

    @gluon.jit
    def fill(self, ring, desc, table_ptr, kv, tile, first_page, last_page, i):
        """Copy a tile of keys or values, page by page; those of pages that nobody sees come from one that is there."""
        slot, lap = slot_of(i, self.STAGES), lap_of(i, self.STAGES)
        if lap > 0:
            named_barrier("sync", ring.FREE + slot, 128 * ring.READERS + 32)
        bar = ring.ready_bars.index(slot)
        BYTES: gl.constexpr = desc.block_type.nbytes * ring.BOXES * (2 if ring.MORE > 0 else 1)
        ROWS_OF_BOX: gl.constexpr = desc.block_type.shape[2]
        mbarrier.expect(bar, BYTES)
        for box in gl.static_range(ring.BOXES):
            key = tile * self.BLOCK_N + box * ROWS_OF_BOX
            page = gl.load(table_ptr + gl.maximum(gl.minimum(key // self.PAGE_SIZE, last_page), first_page))
            inside = key % self.PAGE_SIZE
            tma_load(desc, [page, kv, inside, 0], bar, ring.bufs.index(slot * ring.BOXES + box))
            if ring.MORE > 0:
                tma_load(desc, [page, kv, inside, COLUMNS], bar, ring.more_bufs.index(slot * ring.BOXES + box))

    @gluon.jit
    def unmasked_tiles(self, position, keys, begin, end):
        """Return the range of key tiles all of which the rows of a warpgroup see, the last tile left out."""
        inside = keys
        if self.BOUND_RIGHT:
            inside = gl.minimum(inside, gl.maximum(position + self.window_right + 1, 0))
        until = gl.maximum(gl.minimum(inside // self.BLOCK_N, end - 1), begin)
        since = begin
        if self.BOUND_LEFT:
            first = gl.maximum(position + (ROWS - 1) - self.window_left, 0)
            since = gl.minimum(gl.maximum((first + self.BLOCK_N - 1) // self.BLOCK_N, begin), until)
        return since, until

    @gluon.jit
    def send(self, place, COLUMN: gl.constexpr, W: gl.constexpr):
        """Send a tile on its way to memory: no wait, but for a tile that ends behind its sequence."""
        head, start, row, end = place
        if row + ROWS <= end:
            fence_async_shared()
            tma_store(self.o_desc, [0, head, start + row, COLUMN], self.o_bufs.index(hide_from_compiler(W)))
        else:
            self.store_rows(head, start, row, end, COLUMN, W)

    @gluon.jit
    def store_rows(self, head, start, row, place, COLUMN: gl.constexpr, W: gl.constexpr):
        """Store the rows that are still in the place of the sequence."""
        WIDTH: gl.constexpr = self.o_bufs.shape[4]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        barrier()
        tile = self.o_bufs.index(hide_from_compiler(W)).reshape([ROWS, WIDTH]).load(layout)
        offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        offs_d = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        heads = rematerialize(self.heads)
        first = ((start + row).to(gl.int64) * heads + head) * self.DV
        offsets = offs_m[:, None] * (heads * self.DV) + offs_d[None, :]
        mask = (offs_m[:, None] < place - row) & (offs_d[None, :] < self.DV)
        gl.store(self.o_ptr + first + offsets, tile, mask=mask)
        barrier()
