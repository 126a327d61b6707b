"""Attention forward under a block mask for Hopper (Gluon, sm_90, fp16 and bf16).

``forward_gluon_sm90`` with another walk: a row tile is a block of 128 queries, and its keys are the blocks in the
lists of that block, the partial ones first. The producer reads their numbers one ahead, and copies with TMA. Only tiles
of partial blocks are masked: a thread tests bits of the words of its two rows. Row tiles with long walks come first,
and programs are dealt them to and fro, so that all walk over about as many blocks.

A row that has met no key has a maximum of -3e38. Where a full block follows, the sum of its exponentials is too large,
and the maximum is raised, as in ``forward_gluon_sm90``. A row tile without blocks walks over one tile of zeros behind
the last key, all of it hidden.

Source: FlashAttention-3 (Shah et al., 2024) for the products issued together; FlexAttention (Dong et al., 2024) for
lists of full and of partial blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import (
    Mailbox,
    Ring,
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
from ..forward.primitives_sm90 import (
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
from ..kernel_arguments import HopperForwardSizes
from .arguments import MaskLists

WARPGROUPS = gl.constexpr(2)  # a block of the mask has the rows of two
_BLOCK = gl.constexpr(128)
# Fields that the producer sends for each row tile. Of masked tiles, -1: nothing is seen.
_SEQUENCE, _HEAD, _ROW, _STEPS, _MASKED, _ENTRIES = (gl.constexpr(i) for i in range(6))


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
    mask_lists_ptr: gl.tensor
    mask_bits_ptr: gl.tensor
    row_tiles: Mailbox  # where each lies, and its walk
    q_ring: Ring  # one slot a warpgroup
    o_bufs: gl.shared_memory_descriptor  # one a warpgroup, on the way to memory; all of the columns, or half
    k_ring: Ring
    v_ring: Ring
    heads: gl.tensor  # of a sequence
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # row tiles of one head
    heads_total: gl.tensor  # of all sequences
    heads_per_group: gl.tensor  # heads that are walked over together
    mask_heads: gl.tensor  # as in ``MaskLists``
    mask_share: gl.tensor
    mask_count: gl.tensor
    mask_order: gl.tensor  # where the order of blocks lies, by how many blocks they visit
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr  # query heads that share one K/V head
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STEPS: gl.constexpr  # tiles of a block
    STAGES: gl.constexpr
    PING_PONG: gl.constexpr  # the warpgroups take turns at issuing products
    STORE_LSE: gl.constexpr
    IN_HALVES: gl.constexpr  # what the shared primitives ask for: no
    D1: gl.constexpr  # columns of Q and K in the second part, or 0
    DV0: gl.constexpr  # likewise of V
    DV1: gl.constexpr

    @gluon.jit
    def tiles(self):
        """Return how many tiles all programs attend."""
        return rematerialize(self.tiles_m) * self.heads_total

    @gluon.jit
    def locate(self, tile):
        """Return sequence, head and block of a tile: of a group of heads, those with the longest walks come first."""
        tiles_m = rematerialize(self.tiles_m)
        first = tile // (self.heads_per_group * tiles_m) * self.heads_per_group
        width = gl.minimum(self.heads_per_group, self.heads_total - first)
        rest = tile - first * tiles_m
        head = first + rest % width
        b, h = head // self.heads, head % self.heads
        at = self.mask_order + (b * self.mask_heads + h // self.mask_share) * tiles_m + rest // width
        return b, h, gl.load(self.mask_lists_ptr + at)

    @gluon.jit
    def tile(self, n):
        """Return the n-th tile of this program: to and fro, so that programs walk over as many blocks."""
        programs, mine = special_register("nctaid.x"), special_register("ctaid.x")
        return n * programs + gl.where(n % 2 == 0, mine, programs - 1 - mine)

    @gluon.jit
    def find_lists(self, b, h, block):
        """Return where the full and the partial blocks of a tile are listed, and how many there are of each."""
        at = self.mask_lists_ptr + (b * self.mask_heads + h // self.mask_share) * self.tiles_m + block
        partial_at = at + self.mask_count
        full, full_end = gl.load(at), gl.load(at + 1)
        partial, partial_end = gl.load(partial_at), gl.load(partial_at + 1)
        return full, full_end - full, partial, (partial_end - partial) // 2

    @gluon.jit
    def key(self, step, full, partial, partials):
        """Return the first key of a tile: those of partial blocks come first."""
        block = step // self.STEPS
        entry = gl.where(block < partials, partial + 2 * block, full + block - partials)
        return gl.load(self.mask_lists_ptr + entry) * _BLOCK + step % self.STEPS * self.BLOCK_N

    @gluon.jit
    def place(self, n, step, masked):
        """Return where the bits of a partial block lie. Where they are listed is read anew: kept, it would spill."""
        entry = self.row_tiles.read(n, _ENTRIES) + step // self.STEPS * 2
        return gl.load(self.mask_lists_ptr + entry + 1, mask=step < masked, other=0)

    @gluon.jit
    def publish(self, n, b, h, row, steps, masked, entries):
        """Say where the n-th tile of this program lies, and how it walks; a row of -1 is the end."""
        self.row_tiles.put(n, _SEQUENCE, b)
        self.row_tiles.put(n, _HEAD, h)
        self.row_tiles.put(n, _ROW, row)
        self.row_tiles.put(n, _STEPS, steps)
        self.row_tiles.put(n, _MASKED, masked)
        self.row_tiles.put(n, _ENTRIES, entries)
        self.row_tiles.publish(n)

    @gluon.jit
    def send(self, place, COLUMN: gl.constexpr, W: gl.constexpr):
        """Send a tile on its way to memory: no wait."""
        b, h, row = place
        fence_async_shared()
        tma_store(self.o_desc, [b, h, row, COLUMN], self.o_bufs.index(hide_from_compiler(W)))


@gluon.jit
def _load_partition(a):
    """Fill the rings, for all tiles of this program."""
    wait_for_kernel_before()
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    tile = a.tile(0)
    while tile < a.tiles():
        b, h, block = a.locate(tile)
        full, fulls, partial, partials = a.find_lists(b, h, block)
        seen = (fulls + partials) * a.STEPS
        masked = gl.where(seen > 0, partials * a.STEPS, -1)
        steps = gl.maximum(seen, 1)
        row = block * _BLOCK
        a.publish(n, b, h, row, steps, masked, partial)
        kv = h // a.GROUP
        last = steps - 1
        key = a.seqlen_k  # behind the last: TMA reads zeros there
        if seen > 0:
            key = a.key(0, full, partial, partials)
        # K first: Q waits until the tile before has its last scores.
        a.k_ring.fill(a.k_desc, a.k_more_desc, b, kv, key, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        for w in gl.static_range(a.WARPGROUPS):
            a.q_ring.fill(a.q_desc, a.q_more_desc, b, h, row + w * ROWS, w, n)
        if last > 0:
            key_after = a.key(1, full, partial, partials)
            for step in range(1, steps):
                following = key_after
                key_after = a.key(gl.minimum(step + 1, last), full, partial, partials)  # in time for the next step
                a.k_ring.fill(
                    a.k_desc, a.k_more_desc, b, kv, following, slot_of(i + 1, a.STAGES), lap_of(i + 1, a.STAGES)
                )
                a.v_ring.fill(a.v_desc, a.v_more_desc, b, kv, key, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
                key = following
                i += 1
        a.v_ring.fill(a.v_desc, a.v_more_desc, b, kv, key, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        i += 1
        n += 1
        tile = a.tile(n)
    a.publish(n, 0, 0, -1, 0, 0, 0)  # the end


@gluon.jit
def _load_words(s, a, place, step, other, is_listed, W: gl.constexpr):
    """Return the words of the mask of a tile, [ROWS, words, 4]: each lane of a row has all; ``other`` unless listed."""
    WORDS: gl.constexpr = a.BLOCK_N // 32
    x_layout: gl.constexpr = gl.reshape(s, [ROWS, WORDS, 4, 4, 2]).type.layout
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, x_layout))
    row = W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    word = step % a.STEPS * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = row[:, None, None] * 4 + word[None, :, None] + lane[None, None, :] * 0
    words = gl.load(a.mask_bits_ptr + place.to(gl.int64) * (4 * _BLOCK) + at, mask=(at >= 0) & is_listed, other=other)
    return words >> (2 * lane[None, None, :])


@gluon.jit
def _hide(s, words):
    """Put -inf where the bit of a score is not set.

    A thread holds columns 32 w + 8 i + 2 lane + k with w, i and k known at compile time, and words shifted by 2 lane.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    x = gl.reshape(s, [ROWS, COLUMNS // 32, 4, 4, 2])
    layout: gl.constexpr = x.type.layout
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))))
    bit = 1 << (8 * i[None, None, :, None, None] + k[None, None, None, None, :])
    x = gl.where((words[:, :, None, :, None] & bit) != 0, x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), s.type.layout)


@gluon.jit
def _attend_partition(a, W: gl.constexpr):
    """Attend rows 64 W to 64 W + 63 of all tiles of this program."""
    dtype: gl.constexpr = a.q_desc.dtype
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
        masked = a.row_tiles.read(n, _MASKED)
        m = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, s_layout))  # not -inf: -inf - -inf is NaN
        l = partial_sums(gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout))
        acc = gl.zeros([ROWS, a.DV0], gl.float32, o_layout)
        more = gl.zeros([ROWS, DV1], gl.float32, more_layout)
        zero = gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout)

        # The first tile, masked in any case: by all bits where its block is full, by none where there is no block.
        place = a.place(n, 0, masked)
        place_after = a.place(n, 1, masked)
        words = _load_words(zero, a, place, 0, gl.where(masked < 0, 0, -1), masked > 0, W)
        q = a.q_ring.wait(W, n)
        k = a.k_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        s = warpgroup_mma_wait(0, deps=[issue_scores(q, k, zero, a.D1)])
        a.k_ring.release(slot_of(i, a.STAGES))
        s = _hide(s, words)
        m, l, _ = update_row_max(s, m, l, a)
        packed, sums = exponentials(s, m, l, a)
        l += sums

        for step in range(1, masked):
            words = _load_words(zero, a, place_after, step, 0, True, W)
            place_after = a.place(n, step + 1, masked)
            s, acc, more = multiply(q, acc, more, packed, zero, a, i + step, W, True)
            acc, more, packed, m, l = fold_masked(_hide(s, words), acc, more, m, l, a)
        for j in range(i + gl.maximum(masked, 1), i + a.row_tiles.read(n, _STEPS)):
            s, acc, more = multiply(q, acc, more, packed, zero, a, j, W, False)
            acc, more, packed, m, l = online_softmax_step(s, acc, more, packed, m, l, a)
        i += a.row_tiles.read(n, _STEPS) - 1
        # Read here: kept through the loop, b, h and row would spill.
        row = a.row_tiles.read(n, _ROW) + W * ROWS
        b, h = a.row_tiles.read(n, _SEQUENCE), a.row_tiles.read(n, _HEAD)
        a.q_ring.release(W)  # the next Q travels under all that follows
        v = a.v_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        acc, more, p = issue_output(packed, v, acc, more, a)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        has_keys = l_row != 0  # a row without keys: output 0, LSE -inf
        inverse = gl.where(has_keys, 1.0 / l_row, 0.0)
        if a.STORE_LSE:
            lse = gl.where(has_keys, (m + gl.log2(l_row)) * 0.6931471805599453, -float("inf"))
            offs_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
            seqlen_q = rematerialize(a.seqlen_q)
            gl.store(a.lse_ptr + (b.to(gl.int64) * a.heads + h) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
        a.v_ring.release(slot_of(i, a.STAGES))
        i += 1
        acc, more = rescale(acc, more, inverse, a)
        store_output(acc.to(dtype), more.to(dtype), a, (b, h, row), W)
        n += 1
        first_row = a.row_tiles.wait(n, _ROW)
    tma.store_wait(0)


@gluon.jit
def _masked_forward_sm90_kernel(
    q_desc,  # [B, H, Sq, D]
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    o_desc,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    mask_lists_ptr,  # int32, see ``lists``
    mask_bits_ptr,  # [partial blocks, 128, 4] int32
    q_more_desc, k_more_desc, v_more_desc,  # of the second part of the columns, or None
    lists: MaskLists,  # of the blocks of queries
    order,  # of blocks of queries: where it lies in the lists
    sizes: HopperForwardSizes,
    scale_log2,  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr,  # query heads that share one K/V head
    STORE_LSE: gl.constexpr,
    TILE: gl.constexpr,  # HopperTile
):  # fmt: skip
    """Attend 128 rows of one head at a time. Grid: (at most tiles,)."""
    STAGES: gl.constexpr = TILE.STAGES
    gl.static_assert(TILE.WARPGROUPS == WARPGROUPS, "a block of the mask has the rows of two warpgroups")
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
    row_tiles = make_mailbox(6)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_desc, q_more, k_more, v_more, lse_ptr, mask_lists_ptr, mask_bits_ptr,
        row_tiles, q_ring, o_bufs, k_ring, v_ring,
        sizes.heads, sizes.seqlen_q, sizes.seqlen_k, sizes.tiles_m, sizes.heads_total, sizes.heads_per_group,
        lists.heads, lists.share, lists.count, order, scale_log2, GROUP, WARPGROUPS, BLOCK_N, _BLOCK // BLOCK_N, STAGES,
        TILE.PING_PONG, STORE_LSE, False, TILE.D1, TILE.DV0, TILE.DV1,
    )  # fmt: skip
    gl.warp_specialize(
        [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
        [4, 1],
        [TILE.REGISTERS, 32],
    )
