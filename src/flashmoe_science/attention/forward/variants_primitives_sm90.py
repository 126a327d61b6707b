"""Row tiles of ``forward_features_gluon_sm90`` (Gluon): where each lies, which keys it sees, how its output is stored.

The producer and the matrix warpgroups share these. The kernel's docstring gives the reasons.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...gpu.gluon_sm90 import Mailbox, Ring, hide_from_compiler, rematerialize, special_register
from ...gpu.gluon_versions import aggregate, barrier, tma_store
from .primitives_sm90 import ROWS

_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the producer, which is one warp

# Fields that the producer sends for each row tile.
_ROW, _HEAD, _START, _PLACE, _QUERIES, _KEYS = (gl.constexpr(i) for i in range(6))
_FIELDS = gl.constexpr(6)
_SLOPE_COLUMNS = gl.constexpr(16)  # what one wgmma instruction sums over
_SLOPE_PARTS = gl.constexpr(3)  # numbers of bf16 that hold one of fp32
# Fields that ``sequences_triton`` writes for each sequence.
_ENDS, _TILES, _START_Q, _PLACE_Q, _QUERIES_Q, _START_K, _KEYS_K, _TOGETHER = (gl.constexpr(i) for i in range(8))


@gluon.jit
def slope_operand(slope, s_layout: gl.constexpr):
    """Return a slope as three numbers of bf16 in the first columns of each row, for a product with ``make_places``."""
    layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    high = slope.to(gl.bfloat16).to(gl.float32)
    middle = (slope - high).to(gl.bfloat16).to(gl.float32)
    column = gl.arange(0, _SLOPE_COLUMNS, gl.SliceLayout(0, layout))
    part = gl.where(column == 0, high, gl.where(column == 1, middle, slope - high - middle))
    part = gl.where(column < _SLOPE_PARTS, part, 0.0)
    return (part[None, :] + gl.zeros([ROWS, _SLOPE_COLUMNS], gl.float32, layout)).to(gl.bfloat16)


@gluon.jit
def make_places(BLOCK_N: gl.constexpr):
    """Return shared memory with the place of each key in its tile, in each column that a part of a slope meets.

    All are small integers, which bf16 holds.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, _SLOPE_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    smem_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, _SLOPE_COLUMNS], gl.bfloat16)
    places = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, _SLOPE_COLUMNS], smem_layout)
    places.store(gl.where(column < _SLOPE_PARTS, key, 0).to(gl.float32).to(gl.bfloat16))
    return places


@aggregate
class Args:
    """The arguments of every partition."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    q_more_desc: tma.tensor_descriptor  # of the second part of the columns; q_desc where there is none
    k_more_desc: tma.tensor_descriptor
    v_more_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    sinks_ptr: gl.tensor
    o_ptr: gl.tensor  # packed: the tensor of o_desc
    sequences_ptr: gl.tensor
    counter_ptr: gl.tensor  # of tiles drawn; 0 before and after
    row_tiles: Mailbox  # where each lies, and what it sees
    q_ring: Ring  # one slot a warpgroup
    o_bufs: gl.shared_memory_descriptor  # one a warpgroup, on the way to memory; all of the columns, or half
    k_ring: Ring
    v_ring: Ring
    places: gl.shared_memory_descriptor  # with SLOPE_PRODUCT: of the keys within a tile, see ``slope_operand``
    bias_desc: tma.tensor_descriptor  # q_desc where there is none
    bias_ring: Ring  # one slot a warpgroup
    batch: gl.tensor
    heads: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # row tiles of one head
    together: gl.tensor  # heads that are walked over together
    dealt: gl.tensor  # heads whose row tiles are dealt out in rounds of their own
    window_left: gl.tensor
    window_right: gl.tensor
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive; with a softcap softcap * log2(e); see ``_scales``
    inner_scale: gl.tensor  # with a softcap softmax_scale / softcap; with ALiBi or a bias see ``_scales``
    alibi_ptr: gl.tensor
    alibi_stride: gl.tensor  # of the slopes along B
    GROUP: gl.constexpr  # query heads that share one K/V head
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    IS_PACKED: gl.constexpr
    HAS_SEQUSED_Q: gl.constexpr
    HAS_SINKS: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    HAS_ALIBI: gl.constexpr
    SEES_AHEAD: gl.constexpr  # with ALiBi: whether rows see keys behind their own position
    SLOPE_PRODUCT: gl.constexpr  # with ALiBi: a matrix product gives each score its part of slope * key
    BOUND_LEFT: gl.constexpr
    BOUND_RIGHT: gl.constexpr
    PING_PONG: gl.constexpr  # the warpgroups take turns at issuing products
    STORE_LSE: gl.constexpr
    IN_HALVES: gl.constexpr  # the exponentials of a tile are taken in two steps
    D1: gl.constexpr  # columns of Q and K in the second part, or 0
    DV0: gl.constexpr  # likewise of V
    DV1: gl.constexpr
    DV: gl.constexpr  # columns of the output
    HAS_BIAS: gl.constexpr
    BIAS_BATCH: gl.constexpr  # each sequence has a bias of its own; so have heads and rows
    BIAS_HEADS: gl.constexpr
    BIAS_ROWS: gl.constexpr
    BATCH_INNER: gl.constexpr  # a head of all sequences comes before the next head

    @gluon.jit
    def sequence(self, rank, WHAT: gl.constexpr):
        """Return what is known of the sequence with the rank-th most keys."""
        return gl.load(self.sequences_ptr + WHAT * self.batch + rank)

    @gluon.jit
    def count_tiles(self):
        """Return how many tiles all programs attend."""
        if self.IS_PACKED:
            return self.sequence(self.batch - 1, _ENDS)
        return self.tiles_m * self.heads * self.batch

    @gluon.jit
    def find(self, rank, tile):
        """Return the rank of the sequence that has the tile, which is not before ``rank``."""
        lane = gl.arange(0, 32, _LANES)
        passed = gl.to_tensor(32)
        while passed == 32:
            ends = gl.load(self.sequences_ptr + rank + lane, mask=rank + lane < self.batch, other=2147483647)
            passed = gl.sum((ends <= tile).to(gl.int32), 0)
            rank += passed
        return rank

    @gluon.jit
    def deal(self, turn, tiles):
        """Return the tile that this program gets next, ``tiles`` where there is none, and the turn after that.

        Programs without a tile in the last round of some heads wait for the next ones.
        """
        program, programs = special_register("ctaid.x"), special_register("nctaid.x")
        heads = self.heads * self.batch
        turns = (self.dealt * self.tiles_m + programs - 1) // programs
        last = (heads + self.dealt - 1) // self.dealt * turns
        tile = tiles
        while (tile == tiles) & (turn < last):
            first = turn // turns * self.dealt
            in_round = turn % turns
            place = in_round * programs + gl.where(in_round & 1 == 1, programs - 1 - program, program)
            if place < gl.minimum(self.dealt, heads - first) * self.tiles_m:
                tile = first * self.tiles_m + place
            turn += 1
        return tile, turn

    @gluon.jit
    def place(self, n, tile, rank):
        """Say where the n-th tile of this program lies; return K/V head, first row, queries, first key and keys."""
        tiles_m = self.tiles_m
        heads = self.heads
        together = self.together
        if self.IS_PACKED:
            tiles_m = self.sequence(rank, _TILES)
            together = self.sequence(rank, _TOGETHER)
            start = self.sequence(rank, _START_Q)
            place = self.sequence(rank, _PLACE_Q)
            queries = self.sequence(rank, _QUERIES_Q)
            start_k = self.sequence(rank, _START_K)
            keys = self.sequence(rank, _KEYS_K)
            tile -= self.sequence(rank, _ENDS) - tiles_m * heads
        else:
            heads *= self.batch
            queries = self.seqlen_q
            keys = self.seqlen_k
        # Heads that are walked over together start with their last rows, which see the most keys when causal.
        first = tile // (together * tiles_m) * together
        width = gl.minimum(together, heads - first)
        rest = tile - first * tiles_m
        head = first + rest % width
        row = (tiles_m - 1 - rest // width) * (ROWS * self.WARPGROUPS)
        if self.IS_PACKED:
            self.row_tiles.put(n, _PLACE, place)
            self.row_tiles.put(n, _QUERIES, queries)
            self.row_tiles.put(n, _KEYS, keys)
        else:
            if self.BATCH_INNER:
                start = head % self.batch
                head //= self.batch
            else:
                start = head // self.heads
                head %= self.heads
            start_k = start
        self.row_tiles.put(n, _HEAD, head)
        self.row_tiles.put(n, _START, start)
        self.publish(n, row)
        return head, row, start, queries, start_k, keys

    @gluon.jit
    def publish(self, n, row):
        """Say where the n-th tile starts, after all else; a row of -1 is the end."""
        self.row_tiles.put(n, _ROW, row)
        self.row_tiles.publish(n)

    @gluon.jit
    def queries_of(self, n):
        """Return the queries of the sequence of the n-th tile."""
        return self.row_tiles.read(n, _QUERIES) if self.IS_PACKED else rematerialize(self.seqlen_q)

    @gluon.jit
    def keys_of(self, n):
        """Return the keys of the sequence of the n-th tile."""
        return self.row_tiles.read(n, _KEYS) if self.IS_PACKED else rematerialize(self.seqlen_k)

    @gluon.jit
    def key_tiles(self, row, queries, keys):
        """Return the range of key tiles that the rows of a row tile see, of which they walk over one at least."""
        position = row + keys - queries  # of the first row among the keys
        begin = 0
        end = keys
        if self.BOUND_RIGHT:
            end = gl.minimum(end, position + ROWS * self.WARPGROUPS + self.window_right)
        if self.HAS_SEQUSED_Q:
            end = gl.where(row < queries, end, 0)
        end = gl.maximum((gl.maximum(end, 0) + self.BLOCK_N - 1) // self.BLOCK_N, 1)
        if self.BOUND_LEFT:
            begin = gl.minimum(gl.maximum(position - self.window_left, 0) // self.BLOCK_N, end - 1)
        return begin, end

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
        if self.IS_PACKED:
            if row + ROWS <= end:
                fence_async_shared()
                tma_store(self.o_desc, [0, head, start + row, COLUMN], self.o_bufs.index(hide_from_compiler(W)))
            else:
                self.store_rows(head, start, row, end, COLUMN, W)
        else:
            fence_async_shared()
            tma_store(self.o_desc, [start, head, row, COLUMN], self.o_bufs.index(hide_from_compiler(W)))

    @gluon.jit
    def store_rows(self, head, start, row, place, COLUMN: gl.constexpr, W: gl.constexpr):
        """Store the rows that are still in the place of the sequence."""
        COLUMNS: gl.constexpr = self.o_bufs.shape[4]
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
        barrier()
        tile = self.o_bufs.index(hide_from_compiler(W)).reshape([ROWS, COLUMNS]).load(layout)
        offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        offs_d = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        heads = rematerialize(self.heads)
        first = ((start + row).to(gl.int64) * heads + head) * self.DV
        offsets = offs_m[:, None] * (heads * self.DV) + offs_d[None, :]
        mask = (offs_m[:, None] < place - row) & (offs_d[None, :] < self.DV)
        gl.store(self.o_ptr + first + offsets, tile, mask=mask)
        barrier()
