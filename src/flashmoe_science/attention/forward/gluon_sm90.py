"""Attention forward for Hopper: TMA, warpgroup matrix products, warp specialisation (Gluon, sm_90, fp16 and bf16).

One warp, the producer, fetches row tiles from a counter and copies their Q, K and V to shared memory with TMA. Two or
three warpgroups own 64 query rows each and walk over the keys from the last tile to the first. K and V lie in rings of
``STAGES`` tiles. A warpgroup issues the scores of one tile and the output product of the tile before together; where
warpgroups take turns at that, the softmax of one runs under the products of another. Only the tiles at the edge are
masked: the first one to three of a warpgroup's walk, unrolled in front of its loop.

Any number may be subtracted from the scores of a row before exp: it cancels when the output is divided by the sum. The
maximum only keeps exp from overflowing. So the loop subtracts the maximum of the earlier tiles, and checks the sum of
the new tile's exponentials, which it needs anyway. Only if the sum is above ``LARGEST_SUM`` does a warp find the new
maximum, rescale its results, and take the exponentials again. Each score then costs a multiplication, an exp, an
addition and half a conversion: no maximum, no exchange between threads, no rescaling.

TMA reads zeros outside a tensor and stores nothing there, so odd lengths and head dimensions need no code but the mask
on the last keys.

Source: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608) for the turns, the products issued together and the
longest-first order; FlashAttention-2 for the online softmax; FlashAttention-4 for rescaling only where it matters.
Ours: the sum as the test, a warpgroup that skips the key tiles that only later rows see, and the mask whose columns
are known at compile time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import (
    Mailbox,
    Ring,
    fetch_next,
    get_fetched,
    hide_from_compiler,
    lap_of,
    make_mailbox,
    make_ring,
    make_tiles,
    rematerialize,
    slot_of,
    special_register,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, tma_store
from ..kernel_arguments import HopperForwardSizes
from .primitives_sm90 import (
    ROWS,
    TURNS,
    declare_too_large,
    exponentials,
    fold_masked,
    issue_output,
    issue_scores,
    multiply,
    online_softmax_step,
    partial_sums,
    rescale,
    store_output,
    update_row_max,
    warp_scheduler_arrive,
)

# Fields that the producer sends for each row tile.
_SEQUENCE, _HEAD, _ROW = (gl.constexpr(i) for i in range(3))


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
    counter_ptr: gl.tensor  # of tiles drawn; 0 before and after
    row_tiles: Mailbox  # where each lies
    q_ring: Ring  # one slot a warpgroup
    o_bufs: gl.shared_memory_descriptor  # one a warpgroup, on the way to memory; all of the columns, or half
    k_ring: Ring
    v_ring: Ring
    heads: gl.tensor  # of a sequence, by PACK
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # row tiles of one head, or of PACK heads
    heads_total: gl.tensor  # of all sequences, by PACK
    heads_per_group: gl.tensor  # heads, by PACK, that are walked over together when causal
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr  # query heads that share one K/V head
    PACK: gl.constexpr  # of them, those that share the 64 rows of a warpgroup
    ROWS_OF_HEAD: gl.constexpr  # 64 // PACK
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    IS_CAUSAL: gl.constexpr
    EDGE_TILES: gl.constexpr  # key tiles that the first warpgroup masks
    IS_ALIGNED: gl.constexpr  # in turns, causal: the diagonal crosses key tiles as at the start of both sequences
    PING_PONG: gl.constexpr  # the warpgroups take turns at issuing products; all must make the same number of steps
    STORE_LSE: gl.constexpr
    IN_HALVES: gl.constexpr  # the exponentials of a tile are taken in two steps
    D1: gl.constexpr  # columns of Q and K in the second part, or 0
    DV0: gl.constexpr  # likewise of V
    DV1: gl.constexpr

    @gluon.jit
    def tiles(self):
        """Return how many tiles all programs attend."""
        return rematerialize(self.tiles_m) * self.heads_total

    @gluon.jit
    def locate(self, tile):
        """Return sequence, first head and first row of a tile.

        Causal: the longest row tiles of a group of heads come first, then those of the next group.
        """
        tiles_m = rematerialize(self.tiles_m)
        if self.IS_CAUSAL:
            first = tile // (self.heads_per_group * tiles_m) * self.heads_per_group
            width = gl.minimum(self.heads_per_group, self.heads_total - first)
            rest = tile - first * tiles_m
            head = first + rest % width
            m = tiles_m - 1 - rest // width
        else:
            head = tile // tiles_m
            m = tile % tiles_m
        return head // self.heads, head % self.heads * self.PACK, m * (self.ROWS_OF_HEAD * self.WARPGROUPS)

    @gluon.jit
    def publish(self, n, b, h, row):
        """Say where the n-th tile of this program lies; a row of -1 is the end."""
        self.row_tiles.put(n, _SEQUENCE, b)
        self.row_tiles.put(n, _HEAD, h)
        self.row_tiles.put(n, _ROW, row)
        self.row_tiles.publish(n)

    @gluon.jit
    def send(self, place, COLUMN: gl.constexpr, W: gl.constexpr):
        """Send a tile on its way to memory: no wait."""
        b, h, row = place
        fence_async_shared()
        tma_store(self.o_desc, [b, h, row, COLUMN], self.o_bufs.index(hide_from_compiler(W)))

    @gluon.jit
    def key_tiles(self, end_row):
        """Return how many key tiles the rows before ``end_row`` walk over; at least those that are masked."""
        seqlen_k = rematerialize(self.seqlen_k)
        end = seqlen_k
        if self.IS_CAUSAL:
            end = gl.maximum(gl.minimum(end, end_row + seqlen_k - rematerialize(self.seqlen_q)), 0)
        return gl.maximum((end + self.BLOCK_N - 1) // self.BLOCK_N, gl.maximum(self.EDGE_TILES, 1))


@gluon.jit
def _load_partition(a):
    """Fill the rings, for all tiles of this program."""
    # All before this wait ran while the kernel before was ending. The warpgroups write nothing before they have read.
    wait_for_kernel_before()
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    tile = special_register("ctaid.x")
    while tile < a.tiles():
        b, h, row = a.locate(tile)
        a.publish(n, b, h, row)
        kv = h // a.GROUP
        steps = a.key_tiles(row + a.ROWS_OF_HEAD * a.WARPGROUPS)
        # K first: Q waits until the tile before has its last scores.
        a.k_ring.fill(
            a.k_desc, a.k_more_desc, b, kv, (steps - 1) * a.BLOCK_N, slot_of(i, a.STAGES), lap_of(i, a.STAGES)
        )
        for w in gl.static_range(a.WARPGROUPS):
            a.q_ring.fill(a.q_desc, a.q_more_desc, b, h, row + w * a.ROWS_OF_HEAD, w, n)
        for step in range(1, steps):
            key = (steps - step) * a.BLOCK_N
            a.k_ring.fill(
                a.k_desc, a.k_more_desc, b, kv, key - a.BLOCK_N, slot_of(i + 1, a.STAGES), lap_of(i + 1, a.STAGES)
            )
            a.v_ring.fill(a.v_desc, a.v_more_desc, b, kv, key, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
            i += 1
        ticket = fetch_next(a.counter_ptr)  # late, so slow programs fetch fewer tiles
        a.v_ring.fill(a.v_desc, a.v_more_desc, b, kv, 0, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        i += 1
        n += 1
        tile = get_fetched(ticket, a.counter_ptr, a.tiles())
    a.publish(n, 0, 0, -1)  # the end


@gluon.jit
def _mask(s, a, row, n):
    """Put -inf where a row of the tile at keys ``n`` does not see a key.

    A thread holds columns 8 i + 2 lane + k with i and k known at compile time: as a 4-dimensional comparison of
    8 i + k with a number per lane, the mask costs one compare and one select an element.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    if a.IS_CAUSAL:
        diagonal = row + rematerialize(a.seqlen_k) - rematerialize(a.seqlen_q) - n
        i_row = gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
        last = (i_row % a.ROWS_OF_HEAD if a.PACK > 1 else i_row) + diagonal
    else:
        last = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, lane_layout)) + (a.seqlen_k - 1 - n)
    limit = last[:, None] - 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    x = gl.where(column <= limit[:, None, :, None], x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def _step(q, acc, more, packed, m, l, zero, a, i, row, n, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """Scores of tile i and the output product of tile i - 1, then the exponentials of the scores."""
    s, acc, more = multiply(q, acc, more, packed, zero, a, i, W, IS_EDGE)
    if IS_EDGE:
        return fold_masked(_mask(s, a, row, n), acc, more, m, l, a)
    return online_softmax_step(s, acc, more, packed, m, l, a)


@gluon.jit
def _attend_partition(a, W: gl.constexpr):
    """Attend rows 64 W to 64 W + 63 of all tiles of this program."""
    dtype: gl.constexpr = a.q_desc.dtype
    # Warpgroups that take turns all walk over the tiles of the last one; the diagonal of the others lies further back.
    AHEAD: gl.constexpr = W * a.ROWS_OF_HEAD // a.BLOCK_N if a.IS_ALIGNED else 0
    EDGE_TILES: gl.constexpr = a.EDGE_TILES - AHEAD
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.DV0, 16])
    DV1: gl.constexpr = a.DV1 if a.DV1 > 0 else 16  # a tensor that nobody uses costs nothing
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV1, 16])
    if W == a.WARPGROUPS - 1:
        warp_scheduler_arrive(a, W)  # to the first
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    first_row = a.row_tiles.wait(0, _ROW)
    while first_row >= 0:
        row = first_row + W * a.ROWS_OF_HEAD
        end_row = first_row + a.ROWS_OF_HEAD * a.WARPGROUPS
        steps = a.key_tiles(end_row if a.PING_PONG else row + a.ROWS_OF_HEAD)
        skipped = a.key_tiles(end_row) - steps  # key tiles that only rows of others see
        m = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, s_layout))  # not -inf: -inf - -inf is NaN
        l = partial_sums(gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout))
        acc = gl.zeros([ROWS, a.DV0], gl.float32, o_layout)
        more = gl.zeros([ROWS, DV1], gl.float32, more_layout)
        zero = gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout)

        if a.IS_CAUSAL:
            for j in range(i, i + skipped):
                a.k_ring.wait(slot_of(j, a.STAGES), lap_of(j, a.STAGES))
                a.k_ring.release(slot_of(j, a.STAGES))
        q = a.q_ring.wait(W, n)
        start = i
        i += skipped
        last = i + steps - 1
        k = a.k_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        s = warpgroup_mma_wait(0, deps=[issue_scores(q, k, zero, a.D1)])
        a.k_ring.release(slot_of(i, a.STAGES))
        if EDGE_TILES > 0:
            s = _mask(s, a, row, (steps - 1) * a.BLOCK_N)
        m, l, _ = update_row_max(s, m, l, a)
        packed, sums = exponentials(s, m, l, a)
        l += sums
        if a.IS_CAUSAL:
            for j in range(start, i):
                a.v_ring.wait(slot_of(j, a.STAGES), lap_of(j, a.STAGES))
                a.v_ring.release(slot_of(j, a.STAGES))

        # The masked tiles, unrolled: the loop over the others has no mask.
        for edge in gl.static_range(1, EDGE_TILES):
            i += 1
            acc, more, packed, m, l = _step(
                q, acc, more, packed, m, l, zero, a, i, row, (steps - 1 - edge) * a.BLOCK_N, W, True
            )
        for j in range(i + 1, last + 1):
            acc, more, packed, m, l = _step(q, acc, more, packed, m, l, zero, a, j, row, 0, W, False)
        i = last
        # Read here: kept through the loop, b, h and row would spill.
        row = a.row_tiles.wait(n, _ROW) + W * a.ROWS_OF_HEAD
        b, h = a.row_tiles.read(n, _SEQUENCE), a.row_tiles.read(n, _HEAD)
        a.q_ring.release(W)  # the next Q travels under all that follows
        v = a.v_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        acc, more, p = issue_output(packed, v, acc, more, a)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        has_keys = l_row != 0  # a row without keys: output 0, LSE -inf
        inverse = gl.where(has_keys, 1.0 / l_row, 0.0)
        if a.STORE_LSE:
            lse = gl.where(has_keys, (m + gl.log2(l_row)) * 0.6931471805599453, -float("inf"))
            i_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
            seqlen_q = rematerialize(a.seqlen_q)
            if a.PACK > 1:
                offs_m = row + i_row % a.ROWS_OF_HEAD
                lse_row = (b.to(gl.int64) * a.heads * a.PACK + h + i_row // a.ROWS_OF_HEAD) * seqlen_q
            else:
                offs_m = row + i_row
                lse_row = (b.to(gl.int64) * a.heads + h) * seqlen_q
            gl.store(a.lse_ptr + lse_row + offs_m, lse, mask=offs_m < seqlen_q)
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
        a.v_ring.release(slot_of(i, a.STAGES))
        i += 1
        acc, more = rescale(acc, more, inverse, a)
        store_output(acc.to(dtype), more.to(dtype), a, (b, h, row), W)
        n += 1
        first_row = a.row_tiles.wait(n, _ROW)
    tma.store_wait(0)


@gluon.jit
def _forward_sm90_kernel(
    q_desc,  # [B, H, Sq, D]
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    o_desc,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    counter_ptr,  # [1] int32, 0 before and after
    q_more_desc, k_more_desc, v_more_desc,  # of the second part of the columns, or None
    sizes: HopperForwardSizes,
    scale_log2,  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr,  # query heads that share one K/V head
    PACK: gl.constexpr,  # of them, those that share the rows of a warpgroup: a power of two
    IS_CAUSAL: gl.constexpr, EDGE_TILES: gl.constexpr, IS_ALIGNED: gl.constexpr,  # as in ``Args``
    STORE_LSE: gl.constexpr,
    TILE: gl.constexpr,  # HopperTile
):  # fmt: skip
    """Attend 64 * WARPGROUPS rows of one head, or of PACK heads, at a time.

    Grid: (at most tiles,), a program draws one after another.
    """
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    STAGES: gl.constexpr = TILE.STAGES
    # A warpgroup that skips key tiles releases their V after all of their K; the producer fills them in turns.
    SKIPPED: gl.constexpr = ((WARPGROUPS - 1) * ROWS + k_desc.block_type.shape[2] - 1) // k_desc.block_type.shape[2]
    gl.static_assert(SKIPPED <= STAGES, "the producer would wait for V")
    gl.static_assert(TURNS + 2 * WARPGROUPS + 2 * STAGES <= 16, "the hardware has 16 barriers")
    declare_too_large()
    q_more = q_more_desc if TILE.D1 > 0 else q_desc
    k_more = k_more_desc if TILE.D1 > 0 else k_desc
    v_more = v_more_desc if TILE.DV1 > 0 else v_desc
    q_ring = make_ring(q_desc, q_more, TILE.D1, WARPGROUPS, 1, TURNS + WARPGROUPS)
    k_ring = make_ring(k_desc, k_more, TILE.D1, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS)
    v_ring = make_ring(v_desc, v_more, TILE.DV1, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS + STAGES)
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    o_bufs = make_tiles(o_desc, WARPGROUPS)
    row_tiles = make_mailbox(3)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_desc, q_more, k_more, v_more, lse_ptr, counter_ptr,
        row_tiles, q_ring, o_bufs, k_ring, v_ring,
        sizes.heads, sizes.seqlen_q, sizes.seqlen_k, sizes.tiles_m, sizes.heads_total, sizes.heads_per_group,
        scale_log2, GROUP, PACK, ROWS // PACK, WARPGROUPS, BLOCK_N, STAGES, IS_CAUSAL, EDGE_TILES, IS_ALIGNED,
        TILE.PING_PONG, STORE_LSE, WARPGROUPS == 3 and BLOCK_N == 128, TILE.D1, TILE.DV0, TILE.DV1,
    )  # fmt: skip
    R: gl.constexpr = TILE.REGISTERS
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
            [4, 1],
            [R, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_partition, (a, 0)),
                (_attend_partition, (a, 1)),
                (_attend_partition, (a, 2)),
                (_load_partition, (a,)),
            ],
            [4, 4, 1],
            [R, R, 32],
        )
