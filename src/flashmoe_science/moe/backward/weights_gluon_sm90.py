"""Gradients of the experts' weights for Hopper: TMA, warpgroup matrix products, warp specialisation (Gluon, sm_90).

out[e] = sum of a[row].T * b[row] over the rows of an expert. A program fetches tiles of 128 x 256 of one expert from a
counter; two warpgroups hold 64 x 256 each and reduce over the expert's rows, 64 at a time. TMA loads the rows of one
operand, which are in order; its ragged tensor map gives zeros past the expert's last row. Four warps gather the rows of
the other, those of tokens, with cp.async. Both operands have the reduction outermost, as the matrix units read them.

An expert without rows has one step of zeros, which writes its gradient.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
    named_barrier,
    slot_of,
    special_register,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, async_load, tma_load
from ..primitives_sm90 import CHUNK, FREE, LEADING, RAGGED, ROWS, TILES, Mailbox, left_and_right, make_mailbox, send

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
PRODUCERS = gl.constexpr(128)  # threads


@aggregate
class Args:
    """Arguments of all partitions."""

    rows_ptr: gl.tensor  # [T, columns]: rows to gather
    rows_desc: tma.tensor_descriptor  # rows in order
    out_desc: tma.tensor_descriptor
    order_ptr: gl.tensor
    offsets_ptr: gl.tensor
    drawn: gl.tensor
    a_bufs: gl.shared_memory_descriptor  # [2 * STAGES, BLOCK_K, ROWS]: one a warpgroup
    b_bufs: gl.shared_memory_descriptor  # [STAGES, BLOCK_K, BLOCK_N]
    out_bufs: gl.shared_memory_descriptor  # [2 * 2, 1, ROWS, CHUNK]: two a warpgroup
    ready_bars: gl.shared_memory_descriptor  # [STAGES, 1]
    tiles: Mailbox  # expert, row tile, column tile, steps (-1 after the last tile)
    GATHER_A: gl.constexpr  # else B
    EXPERTS: gl.constexpr
    TOPK: gl.constexpr
    STRIDE: gl.constexpr  # of rows to gather
    COUNTER: gl.constexpr  # index of the counter after the offsets
    M: gl.constexpr
    N: gl.constexpr
    GROUP_M: gl.constexpr
    STAGES: gl.constexpr
    LEAD: gl.constexpr

    @gluon.jit
    def release(self, i):
        """Free the buffers of the i-th step for the producer."""
        named_barrier("arrive", FREE + slot_of(i, self.STAGES), 256 + PRODUCERS)


@gluon.jit
def _tokens(a, row, end, layout: gl.constexpr):
    """Return the tokens of rows from ``row`` on, and a mask of the valid ones."""
    rows = row + gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
    inside = rows < end
    return gl.load(a.order_ptr + rows, mask=inside, other=0) // a.TOPK, inside


@gluon.jit
def _gather(a, buf, token, inside, first, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Copy columns from ``first`` on of some tokens; zeros for invalid rows and columns."""
    columns = first + gl.arange(0, buf.shape[1], gl.SliceLayout(0, layout))
    at = a.rows_ptr + (token.to(gl.int64) * a.STRIDE)[:, None] + columns[None, :]
    async_load(buf, at, inside[:, None] & (columns < COLUMNS)[None, :])


@gluon.jit
def _load_partition(a):
    """Fill the ring for all tiles of this program."""
    wait_for_kernel_before()
    TILES_M: gl.constexpr = (a.M + BLOCK_M - 1) // BLOCK_M
    TILES_N: gl.constexpr = (a.N + BLOCK_N - 1) // BLOCK_N
    # A row has 128 contiguous bytes in the tile of one warpgroup, 512 in that of both.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if a.GATHER_A else [1, 32], [4, 1], [1, 0])
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_N if a.GATHER_A else BLOCK_M)
    i = 0  # steps so far
    n = 0  # tiles so far
    tile = special_register("ctaid.x")
    while tile < a.EXPERTS * (TILES_M * TILES_N):
        expert = tile // (TILES_M * TILES_N)
        of_expert = tile % (TILES_M * TILES_N)
        group = of_expert // (a.GROUP_M * TILES_N)
        size = gl.minimum(TILES_M - group * a.GROUP_M, a.GROUP_M)
        rest = of_expert - group * (a.GROUP_M * TILES_N)
        m, column = group * a.GROUP_M + rest % size, rest // size
        row, end = gl.load(a.offsets_ptr + expert), gl.load(a.offsets_ptr + expert + 1)
        steps = gl.maximum((end - row + BLOCK_K - 1) // BLOCK_K, 1)
        a.tiles.publish(n, expert, m, column, steps)
        token, inside = _tokens(a, row, end, layout)
        for _ in range(steps):
            slot, lap = slot_of(i, a.STAGES), lap_of(i, a.STAGES)
            here, present = token, inside
            token, inside = _tokens(a, row + BLOCK_K, end, layout)  # prefetch: the latency of L2
            if lap > 0:
                named_barrier("sync", FREE + slot, 256 + PRODUCERS)
            bar = a.ready_bars.index(slot)
            mbarrier.expect(bar, BYTES)
            # Rows in order, zeros from ``end`` on: see ``prepare_sm90.ragged``.
            left = gl.maximum(end - row, 0)
            if a.GATHER_A:
                place = [RAGGED, end, RAGGED - left, 0, column * BLOCK_N]
                tma_load(a.rows_desc, place, bar, a.b_bufs.index(slot))
                for w in gl.static_range(2):
                    buf = a.a_bufs.index(2 * slot + w)
                    _gather(a, buf, here, present, m * BLOCK_M + w * ROWS, a.M, layout)
            else:
                for w in gl.static_range(2):
                    place = [RAGGED, end, RAGGED - left, 0, m * BLOCK_M + w * ROWS]
                    tma_load(a.rows_desc, place, bar, a.a_bufs.index(2 * slot + w))
                _gather(a, a.b_bufs.index(slot), here, present, column * BLOCK_N, a.N, layout)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            row += BLOCK_K
            i += 1
        # Fetch late, so that slow programs fetch fewer tiles. The full ring hides the latency of L2.
        counter = a.offsets_ptr + a.EXPERTS + 1 + a.COUNTER
        tile = gl.atomic_add(counter, 1, sem="relaxed") + special_register("nctaid.x") - a.drawn
        n += 1
    a.tiles.publish(n, 0, 0, 0, -1)  # the end


@gluon.jit
def _issue(acc, a, i, W: gl.constexpr, USE_ACC: gl.constexpr):
    """Issue the products of the i-th step, once its operands have arrived."""
    slot = slot_of(i, a.STAGES)
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, a.STAGES) & 1)
    fence_async_shared()  # cp.async writes by the generic proxy, the matrix units read by the async proxy
    left = a.a_bufs.index(2 * slot + W).permute((1, 0))
    return warpgroup_mma(left, a.b_bufs.index(slot), acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _store(x, a, expert, row, column, FIRST: gl.constexpr, W: gl.constexpr):
    """Store a tile of the gradient, 64 columns at a time."""
    if x.shape[1] > CHUNK:
        left, right = left_and_right(x)
        _store(left, a, expert, row, column, FIRST, W)
        _store(right, a, expert, row, column, FIRST + left.shape[1], W)
    else:
        send(
            a.out_desc,
            [expert, row, column + FIRST],
            x,
            a.out_bufs.index(hide_from_compiler(2 * W + FIRST // CHUNK % 2)),
        )


@gluon.jit
def _multiply_partition(a, W: gl.constexpr):
    """Compute rows 64 W to 64 W + 63 of all tiles of this program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    i = 0  # steps so far
    n = 0  # tiles so far
    steps = a.tiles.wait(n, 3)
    while steps > 0:
        # With fewer steps than in the ring, the first could lead by two tiles, but the barrier counts one.
        leads = steps >= a.STAGES
        if a.LEAD > 0 and W == 1:  # noqa: SIM102 - the outer condition is constexpr
            if leads:
                named_barrier("sync", LEADING, 256)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        acc = warpgroup_mma_wait(1, deps=[_issue(acc, a, i, W, False)])  # does not block
        for j in range(i + 1, i + steps):
            acc = _issue(acc, a, j, W, True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            a.release(j - 1)
            if a.LEAD > 0 and W == 0:  # noqa: SIM102 - as above
                if leads & (j == i + a.LEAD):
                    named_barrier("arrive", LEADING, 256)
        acc = warpgroup_mma_wait(0, deps=[acc])
        i += steps
        a.release(i - 1)
        expert, m, column = a.tiles.read(n, 0), a.tiles.read(n, 1), a.tiles.read(n, 2)
        _store(acc, a, expert, m * BLOCK_M + W * ROWS, column * BLOCK_N, 0, W)
        n += 1
        steps = a.tiles.wait(n, 3)
    tma.store_wait(0)


@gluon.jit
def _weights_sm90_kernel(
    rows_desc,  # [P, columns]: rows in order, ragged; of A, or with GATHER_A of B
    out_desc,  # [E, M, N]
    rows_ptr,  # [T, columns]: rows to gather, the other operand
    order_ptr,  # [P] int32
    offsets_ptr,  # [E + 5] int32: the last four are counters, initially 0
    drawn,  # tiles that earlier launches fetched from the same counter
    GATHER_A: gl.constexpr, EXPERTS: gl.constexpr, TOPK: gl.constexpr, STRIDE: gl.constexpr, COUNTER: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
    MATRIX_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of all experts' weights of one product. Grid: (programs,), persistent."""
    gl.static_assert(STAGES + FREE <= 16, "the hardware has 16 barriers")
    gl.static_assert(LEAD < STAGES, "the second warpgroup would wait for steps that have no room")
    gl.static_assert(STAGES + 2 <= TILES, "the producer would overwrite tiles that are worked on")
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, ROWS], out_desc.dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], out_desc.dtype)
    a_bufs = gl.allocate_shared_memory(out_desc.dtype, [2 * STAGES, BLOCK_K, ROWS], a_layout)
    b_bufs = gl.allocate_shared_memory(out_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], b_layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [4] + out_desc.block_type.shape, out_desc.layout)
    ready_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready_bars.index(slot), count=PRODUCERS + 1)
    tiles = make_mailbox(PRODUCERS)
    fence_async_shared()  # make the barriers visible to TMA
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        rows_ptr, rows_desc, out_desc, order_ptr, offsets_ptr, drawn, a_bufs, b_bufs, out_bufs, ready_bars, tiles,
        GATHER_A, EXPERTS, TOPK, STRIDE, COUNTER, M, N, GROUP_M, STAGES, LEAD,
    )  # fmt: skip
    gl.warp_specialize(
        [(_multiply_partition, (a, 0)), (_multiply_partition, (a, 1)), (_load_partition, (a,))],
        [4, 4],
        [MATRIX_REGISTERS, PRODUCER_REGISTERS],
    )
