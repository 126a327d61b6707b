"""Attention forward for Hopper: TMA, warpgroup matrix products, warp specialisation (Gluon, sm_90, fp16 and bf16).

One warp, the producer, copies Q, K and V to shared memory with TMA; two or three warpgroups own 64 query rows each and
walk over the keys from the last tile to the first. K and V lie in rings of ``STAGES`` tiles. A warpgroup issues the
scores of one tile and the output product of the tile before together; where warpgroups take turns at that, the softmax
of one runs under the products of another. Only the tiles at the edge are masked: the first one or two of a warpgroup's
walk, unrolled in front of its loop.

TMA fills what lies outside a tensor with zeros and does not store it: odd lengths and head dimensions need no code but
the mask on the last keys.

Source: FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608) for the turns, the products issued together and the
longest-first order; FlashAttention-2 for the online softmax. Ours: rounds that come out even with no counter in memory,
a warpgroup that skips the key tiles that only later rows see, and the mask whose columns are known at compile time.
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

from ..gpu.gluon_versions import aggregate, tma_load, tma_store

ROWS = gl.constexpr(64)  # of one warpgroup: what one wgmma instruction computes


@aggregate
class Ring:
    """Tiles in shared memory that the producer fills and the warpgroups drain; a slot is used again every lap."""

    bufs: gl.shared_memory_descriptor  # [slots, 1, 1, rows, columns]
    ready_bars: gl.shared_memory_descriptor  # the slot was filled
    empty_bars: gl.shared_memory_descriptor  # all who read the slot are done

    @gluon.jit
    def fill(self, desc, b, h, row, slot, lap):
        """Copy rows from ``row`` on of one head into the slot, once it is free."""
        # A fresh barrier counts as having completed the phase before: the first lap never waits.
        mbarrier.wait(self.empty_bars.index(slot), (lap & 1) ^ 1)
        mbarrier.expect(self.ready_bars.index(slot), desc.block_type.nbytes)
        tma_load(desc, [b, h, row, 0], self.ready_bars.index(slot), self.bufs.index(slot))

    @gluon.jit
    def wait(self, slot, lap):
        """Wait until the slot is filled; return it as a matrix."""
        mbarrier.wait(self.ready_bars.index(slot), lap & 1)
        return self.bufs.index(slot).reshape([self.bufs.shape[3], self.bufs.shape[4]])

    @gluon.jit
    def release(self, slot):
        """Tell the producer that one reader is done."""
        mbarrier.arrive(self.empty_bars.index(slot))


@gluon.jit
def _make_ring(desc, SLOTS: gl.constexpr, READERS: gl.constexpr):
    bufs = gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)
    ready_bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready_bars.index(slot), count=1)
        mbarrier.init(empty_bars.index(slot), count=READERS)
    return Ring(bufs, ready_bars, empty_bars)  # type: ignore[call-arg] # aggregate gives it a constructor


@gluon.jit
def _copy(x):
    """Return a copy of an integer that the compiler cannot see through.

    What is computed from it is computed where it is needed. Else LLVM computes it once for all warpgroups at the start
    of the kernel (Triton 3.9), and ptxas spills what lives that long.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _special_register(NAME: gl.constexpr):
    """Read a special register of 32 bits where it is needed, for the reason of ``_copy``."""
    asm: gl.constexpr = f"mov.b32 $0, %{NAME};"
    return gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _named_barrier(WHAT: gl.constexpr, TURN: gl.constexpr):
    """Wait for, or arrive at, the barrier of a warpgroup's turn: 128 threads that wait and 128 that arrive.

    A barrier of the hardware, as it costs one instruction; Triton uses the first few of the 16.
    """
    BARRIER: gl.constexpr = 10 + TURN
    asm: gl.constexpr = f"bar.{WHAT} {BARRIER}, 256; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class Args:
    """What every partition is given."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    q_ring: Ring  # one slot a warpgroup
    o_bufs: gl.shared_memory_descriptor  # one a warpgroup, on the way to memory; half of the columns where DV is 256
    k_ring: Ring
    v_ring: Ring
    heads: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    tiles_m: gl.tensor  # row tiles of one head
    heads_total: gl.tensor  # of all sequences
    heads_per_group: gl.tensor  # heads that are walked over together when causal
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr  # query heads that share one K/V head
    WARPGROUPS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    IS_CAUSAL: gl.constexpr
    EDGE_TILES: gl.constexpr  # key tiles that the first warpgroup masks
    PING_PONG: gl.constexpr  # the warpgroups take turns at issuing products; all must make the same number of steps
    STORE_LSE: gl.constexpr

    @gluon.jit
    def take_turn(self, W: gl.constexpr):
        """Wait until the warpgroup before has issued its products; its softmax then runs under those of this one."""
        if self.PING_PONG:
            _named_barrier("sync", W)

    @gluon.jit
    def pass_turn(self, W: gl.constexpr):
        """Let the next warpgroup issue its products."""
        if self.PING_PONG:
            _named_barrier("arrive", (W + 1) % self.WARPGROUPS)

    @gluon.jit
    def rounds(self):
        """Return how many tiles this program attends."""
        programs = _special_register("nctaid.x")
        tiles = _copy(self.tiles_m) * self.heads_total
        whole = tiles // programs
        return whole + (self.place(whole) < tiles).to(gl.int32)

    @gluon.jit
    def place(self, round_):
        """Return this program's tile of a round.

        Every second round runs backwards: the program with the longest tile of a round has the shortest of the next.
        """
        programs = _special_register("nctaid.x")
        forwards = _special_register("ctaid.x")
        return round_ * programs + gl.where((round_ & 1) == 1, programs - 1 - forwards, forwards)

    @gluon.jit
    def locate(self, round_):
        """Return sequence, head and first row of this program's tile of a round.

        Causal: the longest row tiles of a group of heads come first, then those of the next group.
        """
        tile = self.place(round_)
        tiles_m = _copy(self.tiles_m)
        if self.IS_CAUSAL:
            first = tile // (self.heads_per_group * tiles_m) * self.heads_per_group
            width = gl.minimum(self.heads_per_group, self.heads_total - first)
            rest = tile - first * tiles_m
            head = first + rest % width
            m = tiles_m - 1 - rest // width
        else:
            head = tile // tiles_m
            m = tile % tiles_m
        return head // self.heads, head % self.heads, m * (ROWS * self.WARPGROUPS)

    @gluon.jit
    def store(self, o, b, h, row, W: gl.constexpr):
        """Send the output of a warpgroup on its way to memory."""
        COLUMNS: gl.constexpr = self.o_bufs.shape[4]
        if o.shape[1] == COLUMNS:
            self.send(o, b, h, row, 0, W)
        else:
            left, right = gl.split(o.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
            self.send(left, b, h, row, 0, W)
            self.send(right, b, h, row, COLUMNS, W)

    @gluon.jit
    def send(self, o, b, h, row, column, W: gl.constexpr):
        """Send a tile on its way to memory: no wait, but for what was sent before."""
        smem = self.o_bufs.index(W)
        tma.store_wait(0)
        smem.reshape(o.shape).store(o)
        fence_async_shared()
        tma_store(self.o_desc, [b, h, row, column], smem)

    @gluon.jit
    def key_tiles(self, end_row):
        """Return how many key tiles the rows before ``end_row`` walk over; at least those that are masked."""
        end = self.seqlen_k
        if self.IS_CAUSAL:
            end = gl.maximum(gl.minimum(end, end_row + self.seqlen_k - self.seqlen_q), 0)
        return gl.maximum((end + self.BLOCK_N - 1) // self.BLOCK_N, gl.maximum(self.EDGE_TILES, 1))


@gluon.jit
def _load_partition(a):
    """Fill the rings, for all tiles of this program."""
    # All before this wait ran while the kernel before was ending. The warpgroups write nothing before they have read.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    i = 0  # tiles of K and of V so far
    for round_ in range(a.rounds()):
        b, h, row = a.locate(round_)
        kv = h // a.GROUP
        steps = a.key_tiles(row + ROWS * a.WARPGROUPS)
        # K first: Q waits until the tile before has its last scores.
        a.k_ring.fill(a.k_desc, b, kv, (steps - 1) * a.BLOCK_N, i % a.STAGES, i // a.STAGES)
        for w in gl.static_range(a.WARPGROUPS):
            a.q_ring.fill(a.q_desc, b, h, row + w * ROWS, w, round_)
        for step in range(1, steps):
            n = (steps - step) * a.BLOCK_N
            a.k_ring.fill(a.k_desc, b, kv, n - a.BLOCK_N, (i + 1) % a.STAGES, (i + 1) // a.STAGES)
            a.v_ring.fill(a.v_desc, b, kv, n, i % a.STAGES, i // a.STAGES)
            i += 1
        a.v_ring.fill(a.v_desc, b, kv, 0, i % a.STAGES, i // a.STAGES)
        i += 1


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
        diagonal = row + a.seqlen_k - a.seqlen_q - n
        last = gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout)) + diagonal
    else:
        last = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, lane_layout)) + (a.seqlen_k - 1 - n)
    limit = last[:, None] - 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    x = gl.where(column <= limit[:, None, :, None], x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def _softmax(s, m, l, a):
    """Fold the scores of one tile into running maximum and sum; return them, P, and the factor on what was before."""
    m_new = gl.maximum(m, gl.max(s, 1) * a.scale_log2)
    p = gl.exp2(s * a.scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """Round to 16 bits, two neighbours to an integer: [M, N] fp32 -> [M, N // 2] int32.

    So P crosses from step to step: 16-bit values that do are unpacked and packed again by ptxas, an instruction a pair.
    """
    PTX_TYPE: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + PTX_TYPE + ".f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``_pack``; costs no instruction."""
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, layout)


@gluon.jit
def _step(q, acc, packed, m, l, zero, a, i, row, n, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """Scores of tile i and the output product of tile i - 1, then the softmax of the scores."""
    slot, before = i % a.STAGES, (i - 1) % a.STAGES
    k = a.k_ring.wait(slot, i // a.STAGES)
    a.take_turn(W)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    v = a.v_ring.wait(before, (i - 1) // a.STAGES)
    p = _unpack(packed, a.q_desc.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(p, v, acc, is_async=True)
    a.pass_turn(W)
    if IS_EDGE:
        # Both products end before the mask: beside P, three warpgroups have no registers for it.
        s, acc, _ = warpgroup_mma_wait(0, deps=[s, acc, p])
        s = _mask(s, a, row, n)
    else:
        s = warpgroup_mma_wait(1, deps=[s])
    a.k_ring.release(slot)
    p_new, m, l, alpha = _softmax(s, m, l, a)
    if not IS_EDGE:
        # ptxas moves this wait up in front of the exp2. Held in its place it was up to 12 % slower (lab/hopper, run 6).
        acc = warpgroup_mma_wait(0, deps=[acc, p])[0]
    a.v_ring.release(before)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, _pack(p_new, a.q_desc.dtype), m, l


@gluon.jit
def _attend_partition(a, W: gl.constexpr):
    """Attend rows 64 W to 64 W + 63 of all tiles of this program."""
    dtype: gl.constexpr = a.q_desc.dtype
    BLOCK_DV: gl.constexpr = a.v_ring.bufs.shape[4]
    # Warpgroups that take turns all walk over the tiles of the last one; the diagonal of the others lies further back.
    AHEAD: gl.constexpr = W * ROWS // a.BLOCK_N if a.IS_CAUSAL and a.PING_PONG else 0
    EDGE_TILES: gl.constexpr = a.EDGE_TILES - AHEAD
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    if W == a.WARPGROUPS - 1:
        a.pass_turn(W)  # to the first
    i = 0  # tiles of K and of V so far
    for round_ in range(a.rounds()):
        b, h, first_row = a.locate(round_)
        row = first_row + W * ROWS
        steps = a.key_tiles(first_row + ROWS * a.WARPGROUPS if a.PING_PONG else row + ROWS)
        skipped = a.key_tiles(first_row + ROWS * a.WARPGROUPS) - steps  # key tiles that only rows of others see
        m = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, s_layout))  # not -inf: -inf - -inf is NaN
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
        zero = gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout)

        if a.IS_CAUSAL:
            for j in range(i, i + skipped):
                a.k_ring.wait(j % a.STAGES, j // a.STAGES)
                a.k_ring.release(j % a.STAGES)
        q = a.q_ring.wait(W, round_)
        start = i
        i += skipped
        k = a.k_ring.wait(i % a.STAGES, i // a.STAGES)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        a.k_ring.release(i % a.STAGES)
        if EDGE_TILES > 0:
            s = _mask(s, a, row, (steps - 1) * a.BLOCK_N)
        p, m, l, _ = _softmax(s, m, l, a)
        packed = _pack(p, dtype)
        if a.IS_CAUSAL:
            for j in range(start, i):
                a.v_ring.wait(j % a.STAGES, j // a.STAGES)
                a.v_ring.release(j % a.STAGES)

        # The masked tiles, unrolled: the loop over the others has no mask.
        for edge in gl.static_range(1, EDGE_TILES):
            i += 1
            acc, packed, m, l = _step(q, acc, packed, m, l, zero, a, i, row, (steps - 1 - edge) * a.BLOCK_N, W, True)
        for _ in range(EDGE_TILES if EDGE_TILES > 1 else 1, steps):
            i += 1
            acc, packed, m, l = _step(q, acc, packed, m, l, zero, a, i, row, 0, W, False)
        if a.WARPGROUPS == 3:
            # Worked out again: with 160 registers a thread, b, h and row would spill.
            b, h, first_row = a.locate(_copy(round_))
            row = first_row + W * ROWS
        a.q_ring.release(W)  # the next Q travels under all that follows
        v = a.v_ring.wait(i % a.STAGES, i // a.STAGES)
        p = _unpack(packed, dtype, gl.DotOperandLayout(0, o_layout, 2))
        acc = warpgroup_mma(p, v, acc, is_async=True)
        has_keys = l != 0  # a row without keys: output 0, LSE -inf
        inverse = gl.where(has_keys, 1.0 / l, 0.0)
        if a.STORE_LSE:
            lse = gl.where(has_keys, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
            offs_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
            seqlen_q = _copy(a.seqlen_q)
            lse_row = (b * a.heads + h).to(gl.int64) * seqlen_q
            gl.store(a.lse_ptr + lse_row + offs_m, lse, mask=offs_m < seqlen_q)
        acc = warpgroup_mma_wait(0, deps=[acc, p])[0]
        a.v_ring.release(i % a.STAGES)
        i += 1
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        a.store(acc.to(dtype), b, h, row, W)
    tma.store_wait(0)


@gluon.jit
def _forward_sm90_kernel(
    q_desc,  # [B, H, Sq, D]
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    o_desc,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    heads, seqlen_q, seqlen_k, tiles_m, heads_total,
    heads_per_group,  # heads that are walked over together when causal
    scale_log2,  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr,  # query heads that share one K/V head
    WARPGROUPS: gl.constexpr,  # that multiply matrices; 64 rows each
    STAGES: gl.constexpr,  # tiles of K, and of V, in flight
    IS_CAUSAL: gl.constexpr, EDGE_TILES: gl.constexpr, PING_PONG: gl.constexpr, STORE_LSE: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, MATRIX_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend 64 * WARPGROUPS rows of one head at a time. Grid: (at most tiles,), a program strides over the tiles."""
    q_ring = _make_ring(q_desc, WARPGROUPS, 1)
    k_ring = _make_ring(k_desc, STAGES, WARPGROUPS)
    v_ring = _make_ring(v_desc, STAGES, WARPGROUPS)
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [WARPGROUPS] + o_desc.block_type.shape, o_desc.layout)
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_desc, lse_ptr, q_ring, o_bufs, k_ring, v_ring, heads, seqlen_q, seqlen_k,
        tiles_m, heads_total, heads_per_group, scale_log2, GROUP, WARPGROUPS, BLOCK_N, STAGES, IS_CAUSAL, EDGE_TILES,
        PING_PONG, STORE_LSE,
    )  # fmt: skip
    R: gl.constexpr = MATRIX_REGISTERS
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
            [4, 1],
            [R, PRODUCER_REGISTERS],
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
            [R, R, PRODUCER_REGISTERS],
        )
