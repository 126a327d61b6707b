"""Both products of the experts for Hopper: TMA, warpgroup matrix products, warp specialisation (Gluon, sm_90).

A program fetches tiles from a counter: 128 rows of one expert, from the table of ``sort_triton``, by 256 columns of the
product. A producer fills a ring of reduction steps; two warpgroups multiply 64 rows each. TMA copies the weights. The
first product gathers rows of x, which Hopper's TMA cannot do: four producer warps copy them with cp.async, 128 bytes of
a row at a time. A separate pass that sorts the rows would write and read each of them once more, a tenth of the time of
fine-grained experts. The second product reads its rows in order.

In the first product, gate and up are the halves of a tile or alternate. Either way one thread has both, and applies the
activation in registers. Outputs go through shared memory to TMA. Its ragged tensor map ends with the expert's rows, so
a partial tile does not overwrite the next expert.

The second warpgroup starts each tile LEAD steps after the first, so that the epilogue of one overlaps the products of
the other. A warpgroup without valid rows only frees the ring.

Source: CUTLASS's cooperative kernels for two warpgroups over one tile of weights; SonicMoE (2025) for the gather by
cp.async; triton.tools.ragged_tma for the wrapping address. Ours: the lead instead of ping-pong, whose tiles would read
the weights twice.
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
    make_barriers,
    make_tiles,
    named_barrier,
    slot_of,
    special_register,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, async_load, tma_load
from ..primitives import activate
from ..primitives_sm90 import (
    CHUNK,
    FREE,
    LEADING,
    RAGGED,
    ROWS,
    TILES,
    Activation,
    Mailbox,
    activation_of,
    draw_tile,
    left_and_right,
    make_mailbox,
    row_and_column_tile,
    send,
    sigmoid,
)

BLOCK_M = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)  # 128 bytes: the width of TMA's swizzle


@aggregate
class Args:
    """Arguments of all partitions."""

    a_ptr: gl.tensor  # rows to gather; otherwise tiles_ptr, unused
    a_desc: tma.tensor_descriptor  # rows in order; otherwise w_desc, unused
    w_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    product_desc: tma.tensor_descriptor  # of the product before the activation; out_desc if it is not kept
    bias_ptr: gl.tensor  # tiles_ptr if there is none
    tiles_ptr: gl.tensor
    order_ptr: gl.tensor
    drawn: gl.tensor
    a_bufs: gl.shared_memory_descriptor  # [STAGES, BLOCK_M, BLOCK_K]
    w_bufs: gl.shared_memory_descriptor  # [STAGES, 1, parts, rows, BLOCK_K]; turned [STAGES, 1, 1, BLOCK_K, columns]
    out_bufs: gl.shared_memory_descriptor  # [2 * 2, 1, 1, ROWS, 1, CHUNK]: two a warpgroup
    ready_bars: gl.shared_memory_descriptor  # [STAGES, 1]
    tiles: Mailbox  # expert, first row (-1 after the last tile), end, column tile
    GATHER: gl.constexpr
    HAS_BIAS: gl.constexpr
    COUNTER: gl.constexpr  # index of this product's counter in the table of tiles
    TOPK: gl.constexpr
    STRIDE: gl.constexpr  # of rows to gather
    K: gl.constexpr  # of the reduction
    COLUMNS: gl.constexpr  # of the product, of one expert
    PRODUCT: gl.constexpr  # columns of a tile of the product
    OUT: gl.constexpr  # columns of a tile of the output
    TILES_N: gl.constexpr
    GROUP_M: gl.constexpr
    STAGES: gl.constexpr
    LEAD: gl.constexpr
    ACT: Activation
    PRODUCERS: gl.constexpr  # threads
    IS_TURNED: gl.constexpr  # the weights are [E, K, COLUMNS]
    KEEPS: gl.constexpr  # the product is stored too

    @gluon.jit
    def release(self, i):
        """Free the buffers of the i-th step for the producer."""
        named_barrier("arrive", FREE + slot_of(i, self.STAGES), 256 + self.PRODUCERS)


@gluon.jit
def _load_partition(a):
    """Fill the ring for all tiles of this program."""
    # The code before this wait overlaps the end of the previous kernel. The warpgroups wait for the first tile.
    wait_for_kernel_before()
    STEPS: gl.constexpr = (a.K + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [a.PRODUCERS // 32, 1], [1, 0])
    tiles_m = gl.load(a.tiles_ptr)
    i = 0  # steps so far
    n = 0  # tiles so far
    tile = special_register("ctaid.x")
    while tile < tiles_m * a.TILES_N:
        entry, column = row_and_column_tile(a, tile, tiles_m)
        expert, row, end = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        a.tiles.publish(n, expert, row, end, column)
        if a.GATHER:
            # Rows past the end repeat the last one; they are not stored.
            offs_m = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
            token = gl.load(a.order_ptr + offs_m) // a.TOPK
            offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
            rows = a.a_ptr + (token.to(gl.int64) * a.STRIDE)[:, None] + offs_k[None, :]
        for step in range(STEPS):
            slot, lap = slot_of(i, a.STAGES), lap_of(i, a.STAGES)
            if lap > 0:
                named_barrier("sync", FREE + slot, 256 + a.PRODUCERS)
            bar = a.ready_bars.index(slot)
            A_BYTES: gl.constexpr = 0 if a.GATHER else 2 * BLOCK_M * BLOCK_K
            mbarrier.expect(bar, A_BYTES + a.w_desc.block_type.nbytes)
            W_ROWS: gl.constexpr = a.w_desc.block_type.shape[2]
            if a.IS_TURNED:
                tma_load(a.w_desc, [expert, 0, step * BLOCK_K, column * a.PRODUCT], bar, a.w_bufs.index(slot))
            else:
                tma_load(a.w_desc, [expert, 0, column * W_ROWS, step * BLOCK_K], bar, a.w_bufs.index(slot))
            if a.GATHER:
                if a.K % BLOCK_K == 0:
                    async_load(a.a_bufs.index(slot), rows + step * BLOCK_K)
                else:
                    inside = (offs_k < a.K - step * BLOCK_K)[None, :]
                    async_load(a.a_bufs.index(slot), rows + step * BLOCK_K, inside)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma_load(a.a_desc, [row, step * BLOCK_K], bar, a.a_bufs.index(slot))
            i += 1
        # Fetch late, so that slow programs fetch fewer tiles. The full ring hides the latency of L2.
        tile = draw_tile(a, tiles_m)
        n += 1
    a.tiles.publish(n, 0, -1, 0, 0)  # the end


@gluon.jit
def _issue(acc, a, i, W: gl.constexpr, USE_ACC: gl.constexpr):
    """Issue the products of the i-th step, once its operands have arrived."""
    slot = slot_of(i, a.STAGES)
    mbarrier.wait(a.ready_bars.index(slot), lap_of(i, a.STAGES) & 1)
    if a.GATHER:
        fence_async_shared()  # cp.async writes by the generic proxy, the matrix units read by the async proxy
    if a.IS_TURNED:
        w = a.w_bufs.index(slot).reshape([BLOCK_K, a.PRODUCT])
    else:
        w = a.w_bufs.index(slot).reshape([a.PRODUCT, BLOCK_K]).permute((1, 0))
    rows = a.a_bufs.index(slot).slice(W * ROWS, ROWS, dim=0)
    return warpgroup_mma(rows, w, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _add_bias(acc, a, n):
    """Add the bias of the expert, if there is one."""
    layout: gl.constexpr = acc.type.layout
    PRODUCT: gl.constexpr = acc.shape[1]
    if a.HAS_BIAS:
        product = gl.arange(0, PRODUCT, gl.SliceLayout(0, layout))
        column = a.tiles.read(n, 3)
        if a.ACT.GATED and not a.ACT.INTERLEAVED:
            HALF: gl.constexpr = PRODUCT // 2
            INTER: gl.constexpr = a.COLUMNS // 2
            inner = column * HALF + product % HALF
            offs = product // HALF * INTER + inner
            mask = inner < INTER
        else:
            offs = column * PRODUCT + product
            mask = offs < a.COLUMNS
        base = a.bias_ptr + a.tiles.read(n, 0).to(gl.int64) * a.COLUMNS
        acc += gl.load(base + offs, mask=mask, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _finish(acc, a):
    """Return the output of a tile, after the activation if there is one."""
    PRODUCT: gl.constexpr = acc.shape[1]
    if a.ACT.GATED:
        if a.ACT.INTERLEAVED:
            gate, up = gl.split(acc.reshape([ROWS, PRODUCT // 2, 2]))
        else:
            gate, up = left_and_right(acc)
        if a.ACT.KIND == "swiglu":
            out = gate * sigmoid(gate) * up
        else:
            out = activate(gate, up, a.ACT)
    elif a.ACT.KIND != "":
        out = activate(acc, acc, a.ACT)
    else:
        out = acc
    return out


@gluon.jit
def _store(desc, x, a, first, size, part, column, FIRST: gl.constexpr, W: gl.constexpr):
    """Store columns, 64 at a time, through two buffers; each store waits until TMA has read its buffer."""
    if x.shape[1] > CHUNK:
        left, right = left_and_right(x)
        _store(desc, left, a, first, size, part, column, FIRST, W)
        _store(desc, right, a, first, size, part, column, FIRST + left.shape[1], W)
    else:
        # The wrapping address: the row coordinate exceeds the map where the expert's rows end.
        place = [RAGGED, first + size, RAGGED - size, part, column + FIRST]
        send(desc, place, x, a.out_bufs.index(hide_from_compiler(2 * W + FIRST // CHUNK % 2)))


@gluon.jit
def _store_product(acc, a, first, size, column, W: gl.constexpr):
    """Store the product for gradients, with gate and up in the order of the weights."""
    if a.ACT.GATED and not a.ACT.INTERLEAVED:
        gate, up = left_and_right(acc)
        _store(a.product_desc, gate, a, first, size, 0, column * a.OUT, 0, W)
        _store(a.product_desc, up, a, first, size, 1, column * a.OUT, 0, W)
    else:
        _store(a.product_desc, acc, a, first, size, 0, column * a.PRODUCT, 0, W)


@gluon.jit
def _multiply_partition(a, W: gl.constexpr):
    """Multiply rows 64 W to 64 W + 63 of all tiles of this program."""
    STEPS: gl.constexpr = (a.K + BLOCK_K - 1) // BLOCK_K
    # With fewer steps in a tile than in the ring, the first could lead by two tiles, but the barrier counts one.
    LEAD: gl.constexpr = min(a.LEAD, STEPS - 1) if STEPS + min(a.LEAD, STEPS - 1) >= a.STAGES else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.PRODUCT, 16])
    i = 0  # steps so far
    n = 0  # tiles so far
    row = a.tiles.wait(n, 1)
    while row >= 0:
        first = row + W * ROWS
        end = a.tiles.read(n, 2)
        if first < end:
            if LEAD > 0 and W == 1:
                named_barrier("sync", LEADING, 256)
            acc = gl.zeros([ROWS, a.PRODUCT], gl.float32, layout)
            acc = warpgroup_mma_wait(1, deps=[_issue(acc, a, i, W, False)])  # does not block
            for j in range(i + 1, i + STEPS):
                acc = _issue(acc, a, j, W, True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                a.release(j - 1)
                if LEAD > 0 and W == 0:  # noqa: SIM102 - the outer condition is constexpr
                    if (j == i + LEAD) & (first + ROWS < end):
                        named_barrier("arrive", LEADING, 256)
            acc = warpgroup_mma_wait(0, deps=[acc])
            a.release(i + STEPS - 1)
            # Read here: during the loop they would occupy registers.
            first, end, column = a.tiles.read(n, 1) + W * ROWS, a.tiles.read(n, 2), a.tiles.read(n, 3)
            size = gl.minimum(end - first, ROWS)
            acc = _add_bias(acc, a, n)
            if a.KEEPS:
                _store_product(acc, a, first, size, column, W)
            out = _finish(acc, a)
            _store(a.out_desc, out, a, first, size, 0, column * a.OUT, 0, W)
        else:
            for j in range(i, i + STEPS):
                mbarrier.wait(a.ready_bars.index(slot_of(j, a.STAGES)), lap_of(j, a.STAGES) & 1)
                a.release(j)
        i += STEPS
        n += 1
        row = a.tiles.wait(n, 1)
    tma.store_wait(0)


@gluon.jit
def _grouped_sm90_kernel(
    a_desc,  # [P, K]: rows in order, or None
    w_desc,  # [E, parts, rows, K]: gate and up are two parts, unless they alternate
    out_desc,  # [P, 1, columns of the output], ragged
    product_desc,  # [P, parts, columns of the product], ragged, or None
    a_ptr,  # [T, K]: rows to gather, or None
    bias_ptr,  # [E, COLUMNS], or None
    tiles_ptr,  # [1 + tiles, 4] int32; the first entry: tiles, a counter of each product
    order_ptr,  # [P] int32, or None
    drawn,  # column tiles that earlier launches fetched from the same counter
    GATHER: gl.constexpr, COUNTER: gl.constexpr, TOPK: gl.constexpr, STRIDE: gl.constexpr,
    K: gl.constexpr, COLUMNS: gl.constexpr, OUT: gl.constexpr, TILES_N: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, LEAD: gl.constexpr,
    ACT: gl.constexpr,  # Activation; none: the second product
    IS_TURNED: gl.constexpr,
    MATRIX_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute one product. Grid: (programs,), persistent."""
    gl.static_assert(STAGES + FREE <= 16, "the hardware has 16 barriers")
    gl.static_assert(LEAD < STAGES, "the second warpgroup would wait for steps that have no room")
    gl.static_assert(STAGES + 2 <= TILES, "the producer would overwrite tiles that are worked on")
    PRODUCERS: gl.constexpr = 128 if GATHER else 32
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    KEEPS: gl.constexpr = product_desc is not None
    TILE: gl.constexpr = w_desc.block_type.shape
    PRODUCT: gl.constexpr = TILE[3] if IS_TURNED else TILE[1] * TILE[2]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], w_desc.dtype)
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_layout)
    w_bufs = make_tiles(w_desc, STAGES)
    out_bufs = make_tiles(out_desc, 4)
    ready_bars = make_barriers(STAGES, 129 if GATHER else 1)
    tiles = make_mailbox(PRODUCERS)
    fence_async_shared()  # make the barriers visible to TMA
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        a_ptr if GATHER else tiles_ptr, w_desc if GATHER else a_desc, w_desc, out_desc,
        product_desc if KEEPS else out_desc,
        bias_ptr if HAS_BIAS else tiles_ptr, tiles_ptr, order_ptr if GATHER else tiles_ptr, drawn,
        a_bufs, w_bufs, out_bufs, ready_bars, tiles,
        GATHER, HAS_BIAS, COUNTER, TOPK, STRIDE, K, COLUMNS, PRODUCT, OUT, TILES_N, GROUP_M, STAGES, LEAD,
        activation_of(ACT), PRODUCERS, IS_TURNED, KEEPS,
    )  # fmt: skip
    gl.warp_specialize(
        [(_multiply_partition, (a, 0)), (_multiply_partition, (a, 1)), (_load_partition, (a,))],
        [4, PRODUCERS // 32],
        [MATRIX_REGISTERS, PRODUCER_REGISTERS],
    )
