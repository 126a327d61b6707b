"""The activation's gradient for Hopper: TMA, warpgroup matrix products, an epilogue beside them (Gluon, sm_90).

dA = dO @ w_down for the token of each pair, and the gradients that follow from it, as in ``backward_triton``. A program
fetches tiles of 128 rows of one expert by 256 columns from a counter. Two warps gather rows of dO with cp.async, TMA
copies the weights, which have the reduction outermost, and two warpgroups multiply 64 rows each, as in
``grouped_gluon_sm90``.

The epilogue reads two numbers for each element of dA and writes three. In the matrix warpgroups it would idle the
matrix units for a tenth to a sixth of the time, by instruction count. So they only write dA to shared memory and begin
the next tile, while two epilogue warps process 16 rows by 64 columns at a time. cp.async loads gate and up three such
parts ahead, the first before dA is complete. All loads of a part finish before its gradient is stored, so the gradient
may overwrite the product.

dA is rounded to bf16, as in eager torch: it takes 64 KB, and with fp32 the ring would have only two steps. The rounding
differs from that of ``backward_triton``, and so do the bits.

Source: SonicMoE (2025) for the gradient of the routing weights.
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
from ..primitives import activate, activation_slopes
from ..primitives_sm90 import (
    CHUNK,
    FREE,
    ROWS,
    TILES,
    Activation,
    Mailbox,
    activation_of,
    draw_tile,
    left_and_right,
    make_mailbox,
    row_and_column_tile,
    sigmoid,
)

# Triton 3.9 renamed it; the arguments are the same: (descriptor, dtype, shape, layout).
_Descriptor = gl.shared_memory_descriptor
_reinterpret = getattr(_Descriptor, "reinterpret", None) or _Descriptor._reinterpret  # noqa: SLF001 - the older name

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
CHUNKS = gl.constexpr(4)  # of 64 columns
PART = gl.constexpr(16)  # rows of one epilogue step
STRIPS = gl.constexpr(4)  # of PART rows, of a warpgroup
# Threads. With a whole warpgroup each, a kernel would start with 128 registers a thread. ptxas then refuses products of
# 256 columns, although registers are reallocated; products of 128 columns would read the rows twice.
PRODUCERS = gl.constexpr(64)
FINISHERS = gl.constexpr(64)


@aggregate
class Args:
    """Arguments of all partitions."""

    do_ptr: gl.tensor
    w_desc: tma.tensor_descriptor
    bias_ptr: gl.tensor  # tiles_ptr if None, like all optional pointers below
    weights_ptr: gl.tensor
    product_ptr: gl.tensor
    tiles_ptr: gl.tensor
    order_ptr: gl.tensor
    dproduct_ptr: gl.tensor
    wh_ptr: gl.tensor
    sums_ptr: gl.tensor
    drawn: gl.tensor
    do_bufs: gl.shared_memory_descriptor  # [STAGES, BLOCK_M, STEP]
    w_bufs: gl.shared_memory_descriptor  # [STAGES, 1, 1, STEP, BLOCK_N]
    da_bufs: gl.shared_memory_descriptor  # [2 * CHUNKS, ROWS, CHUNK]: four a warpgroup
    da_strips: gl.shared_memory_descriptor  # [2 * CHUNKS * STRIPS, PART, CHUNK]: the same memory
    gate_bufs: gl.shared_memory_descriptor  # [CHUNKS, PART, CHUNK]; twice the columns if gate and up alternate
    up_bufs: gl.shared_memory_descriptor  # as gate_bufs; gate_bufs itself if there is none
    ready_bars: gl.shared_memory_descriptor  # [STAGES, 1]
    tiles: Mailbox  # expert, first row (-1 after the last tile), end, column tile
    HAS_BIAS: gl.constexpr
    HAS_WH: gl.constexpr
    HAS_SUMS: gl.constexpr
    COUNTER: gl.constexpr  # index of this kernel's counter in the table of tiles
    TOPK: gl.constexpr
    HID: gl.constexpr
    INTER: gl.constexpr
    COLUMNS: gl.constexpr  # of the product
    WH_COLUMNS: gl.constexpr
    SUMS: gl.constexpr  # of a row
    TILES_N: gl.constexpr
    GROUP_M: gl.constexpr
    STEP: gl.constexpr
    STAGES: gl.constexpr
    ACT: Activation

    @gluon.jit
    def release(self, i):
        """Free the buffers of the i-th step for the producer."""
        named_barrier("arrive", FREE + slot_of(i, self.STAGES), 256 + PRODUCERS)

    @gluon.jit
    def hand_over(self, WHAT: gl.constexpr, w):
        """Signal, or wait for, dA of warpgroup w in shared memory."""
        named_barrier(WHAT, FREE + self.STAGES + w, 128 + FINISHERS)

    @gluon.jit
    def take_back(self, WHAT: gl.constexpr, w):
        """Signal, or wait, that dA was read."""
        named_barrier(WHAT, FREE + self.STAGES + 2 + w, 128 + FINISHERS)


@gluon.jit
def _load_partition(a):
    """Fill the ring for all tiles of this program."""
    # The code before this wait overlaps the end of the previous kernel. The warpgroups wait for the first tile.
    wait_for_kernel_before()
    STEPS: gl.constexpr = (a.HID + a.STEP - 1) // a.STEP
    LANES: gl.constexpr = a.STEP // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [PRODUCERS // 32, 1], [1, 0])
    tiles_m = gl.load(a.tiles_ptr)
    i = 0  # steps so far
    n = 0  # tiles so far
    tile = special_register("ctaid.x")
    while tile < tiles_m * a.TILES_N:
        entry, column = row_and_column_tile(a, tile, tiles_m)
        column += a.drawn
        expert, row, end = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        a.tiles.publish(n, expert, row, end, column)
        # Rows past the end repeat the last one; they are not stored.
        offs_m = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)), end - 1)
        token = gl.load(a.order_ptr + offs_m) // a.TOPK
        offs_k = gl.arange(0, a.STEP, gl.SliceLayout(0, layout))
        rows = a.do_ptr + (token.to(gl.int64) * a.HID)[:, None] + offs_k[None, :]
        for step in range(STEPS):
            slot, lap = slot_of(i, a.STAGES), lap_of(i, a.STAGES)
            if lap > 0:
                named_barrier("sync", FREE + slot, 256 + PRODUCERS)
            bar = a.ready_bars.index(slot)
            mbarrier.expect(bar, a.w_desc.block_type.nbytes)
            tma_load(a.w_desc, [expert, 0, step * a.STEP, column * BLOCK_N], bar, a.w_bufs.index(slot))
            if a.HID % a.STEP == 0:
                async_load(a.do_bufs.index(slot), rows + step * a.STEP)
            else:
                inside = (offs_k < a.HID - step * a.STEP)[None, :]
                async_load(a.do_bufs.index(slot), rows + step * a.STEP, inside)
            async_copy.mbarrier_arrive(bar, increment_count=False)
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
    fence_async_shared()  # cp.async writes by the generic proxy, the matrix units read by the async proxy
    w = a.w_bufs.index(slot).reshape([a.STEP, BLOCK_N])
    rows = a.do_bufs.index(slot).slice(W * ROWS, ROWS, dim=0)
    return warpgroup_mma(rows, w, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _put(x, a, FIRST: gl.constexpr, W: gl.constexpr):
    """Write dA to shared memory, 64 columns a buffer."""
    if x.shape[1] > CHUNK:
        left, right = left_and_right(x)
        _put(left, a, FIRST, W)
        _put(right, a, FIRST + left.shape[1], W)
    else:
        a.da_bufs.index(hide_from_compiler(CHUNKS * W + FIRST // CHUNK)).store(x.to(a.w_desc.dtype))


@gluon.jit
def _multiply_partition(a, W: gl.constexpr):
    """Multiply rows 64 W to 64 W + 63 of all tiles of this program."""
    STEPS: gl.constexpr = (a.HID + a.STEP - 1) // a.STEP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    i = 0  # steps so far
    n = 0  # tiles so far
    given = 0  # tiles with rows
    row = a.tiles.wait(n, 1)
    while row >= 0:
        if row + W * ROWS < a.tiles.read(n, 2):
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            acc = warpgroup_mma_wait(1, deps=[_issue(acc, a, i, W, False)])  # does not block
            for j in range(i + 1, i + STEPS):
                acc = _issue(acc, a, j, W, True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                a.release(j - 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            a.release(i + STEPS - 1)
            if given > 0:
                a.take_back("sync", W)
            _put(acc, a, 0, W)
            a.hand_over("arrive", W)
            given += 1
        else:
            for j in range(i, i + STEPS):
                mbarrier.wait(a.ready_bars.index(slot_of(j, a.STAGES)), lap_of(j, a.STAGES) & 1)
                a.release(j)
        i += STEPS
        n += 1
        row = a.tiles.wait(n, 1)


@gluon.jit
def _slopes(gate, up, a):
    """Return the activation and its derivatives by gate and by up."""
    if a.ACT.KIND == "swiglu":
        s = sigmoid(gate)
        by_up = gate * s
        by_gate = up * (s + by_up * (1 - s))
        h = by_up * up
    else:
        h = activate(gate, up, a.ACT)
        by_gate, by_up = activation_slopes(gate, up, a.ACT)
    return h, by_gate, by_up


@gluon.jit
def _offsets(a, STRIDE: gl.constexpr, WIDTH: gl.constexpr, columns_left, rows_left, layout: gl.constexpr):
    """Return offsets of 16 rows by 64 columns, WIDTH elements each, and a mask of the valid ones.

    They are the same for all parts; the uniform base pointer has the rest.
    """
    rows = gl.arange(0, PART, gl.SliceLayout(1, layout))
    columns = gl.arange(0, CHUNK * WIDTH, gl.SliceLayout(0, layout))
    mask = (rows < rows_left)[:, None]
    if a.INTER % BLOCK_N != 0:
        mask &= (columns < columns_left * WIDTH)[None, :]
    return rows[:, None] * STRIDE + columns[None, :], mask


@gluon.jit
def _ask(a, column, chunk, first, end, layout: gl.constexpr, wide: gl.constexpr):
    """Start loads of gate and up of 16 rows by 64 columns; zeros fill invalid places."""
    place = column * BLOCK_N + chunk * CHUNK
    base = a.product_ptr + first.to(gl.int64) * a.COLUMNS
    if a.ACT.INTERLEAVED:
        offsets, mask = _offsets(a, a.COLUMNS, 2, a.INTER - place, end - first, wide)
        async_load(a.gate_bufs.index(chunk), base + 2 * place + offsets, mask)
    else:
        offsets, mask = _offsets(a, a.COLUMNS, 1, a.INTER - place, end - first, layout)
        async_load(a.gate_bufs.index(chunk), base + place + offsets, mask)
        if a.ACT.GATED:
            async_load(a.up_bufs.index(chunk), base + place + a.INTER + offsets, mask)
    async_copy.commit_group()


@gluon.jit
def _product(a, chunk, layout: gl.constexpr, wide: gl.constexpr):
    """Return gate and up of finished loads, in fp32."""
    if a.ACT.INTERLEAVED:
        gate, up = gl.split(a.gate_bufs.index(chunk).load(wide).reshape([PART, CHUNK, 2]))
        gate, up = gl.convert_layout(gate, layout), gl.convert_layout(up, layout)  # each where it is
    else:
        gate = a.gate_bufs.index(chunk).load(layout)
        up = gate
        if a.ACT.GATED:
            up = a.up_bufs.index(chunk).load(layout)
    return gate.to(gl.float32), up.to(gl.float32)


@gluon.jit
def _finish_part(a, da, weight, column, chunk, first, end, layout: gl.constexpr, wide: gl.constexpr):
    """Store the gradients of 16 rows by 64 columns of dA; return <dA, h> of each row."""
    gate, up = _product(a, chunk, layout, wide)
    h, by_gate, by_up = _slopes(gate, up, a)
    place = column * BLOCK_N + chunk * CHUNK
    kind: gl.constexpr = a.w_desc.dtype
    if a.HAS_WH:
        offsets, mask = _offsets(a, a.WH_COLUMNS, 1, a.INTER - place, end - first, layout)
        base = a.wh_ptr + first.to(gl.int64) * a.WH_COLUMNS + (place - a.drawn * BLOCK_N)
        gl.store(base + offsets, (weight[:, None] * h).to(kind), mask=mask)
    weighted = da * weight[:, None]
    base = a.dproduct_ptr + first.to(gl.int64) * a.COLUMNS
    if a.ACT.INTERLEAVED:
        both = gl.join((weighted * by_gate).to(kind), (weighted * by_up).to(kind)).reshape([PART, 2 * CHUNK])
        offsets, mask = _offsets(a, a.COLUMNS, 2, a.INTER - place, end - first, wide)
        gl.store(base + 2 * place + offsets, gl.convert_layout(both, wide), mask=mask)
    else:
        offsets, mask = _offsets(a, a.COLUMNS, 1, a.INTER - place, end - first, layout)
        if a.ACT.GATED:
            gl.store(base + place + offsets, (weighted * by_gate).to(kind), mask=mask)
            base += a.INTER
        gl.store(base + place + offsets, (weighted * by_up).to(kind), mask=mask)
    return gl.sum(da * h, 1)


@gluon.jit
def _pairs(a, first, end, layout: gl.constexpr):
    """Return the pairs of 16 rows; 0 for invalid rows."""
    rows = gl.arange(0, PART, layout)
    return gl.load(a.order_ptr + first + rows, mask=rows < end - first, other=0)


@gluon.jit
def _weights(a, pair):
    """Return the routing weights of pairs."""
    return gl.load(a.weights_ptr + pair).to(gl.float32)


@gluon.jit
def _store_sums(a, sums, first, end, place, layout: gl.constexpr):
    """Store one partial sum of each of 16 rows."""
    rows = gl.arange(0, PART, layout)
    gl.store(a.sums_ptr + first.to(gl.int64) * a.SUMS + place + rows * a.SUMS, sums, mask=rows < end - first)


@gluon.jit
def _dot_bias(a, expert, first, end, layout: gl.constexpr):
    """Store <dO, bias> of 16 rows behind the sums of the column tiles."""
    pair = _pairs(a, first, end, gl.SliceLayout(1, layout))
    rows = a.do_ptr + ((pair // a.TOPK).to(gl.int64) * a.HID)[:, None]
    bias_row = a.bias_ptr + expert.to(gl.int64) * a.HID
    total = gl.zeros([PART, CHUNK], gl.float32, layout)
    for start in range(0, a.HID, 4 * CHUNK):
        for chunk in gl.static_range(4):  # loads in flight together, to hide the latency of L2
            k = start + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
            do = gl.load(rows + k[None, :], mask=(k < a.HID)[None, :], other=0.0)
            bias = gl.load(bias_row + k, mask=k < a.HID, other=0.0)
            total += do.to(gl.float32) * bias.to(gl.float32)[None, :]
    _store_sums(a, gl.sum(total, 1), first, end, a.SUMS - 1, gl.SliceLayout(1, layout))


@gluon.jit
def _read(a, n, WHAT: gl.constexpr):
    """Return one number of the n-th tile, as ``Mailbox.read``, but for two warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [FINISHERS // 32], [0])
    return gl.max(a.tiles.bufs.index(4 * slot_of(n, TILES) + WHAT).load(one), 0)


@gluon.jit
def _first_row(a, n):
    """Wait for the n-th tile, and return its first row."""
    mbarrier.wait(a.tiles.bars.index(slot_of(n, TILES)), lap_of(n, TILES) & 1)
    return _read(a, n, 1)


@gluon.jit
def _finish_tile(a, n, row, layout: gl.constexpr, wide: gl.constexpr):
    """Run the epilogue of the n-th tile: 16 rows after another, 64 columns after another."""
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    end = gl.minimum(_read(a, n, 2), row + BLOCK_M)  # later rows belong to another tile
    column = _read(a, n, 3)
    for first_chunk in gl.static_range(CHUNKS - 1):
        _ask(a, column, first_chunk, row, end, layout, wide)
    # Two dependent loads, pairs and then their weights: each runs two parts ahead of its use.
    weight = _weights(a, _pairs(a, row, end, of_rows))
    pair = _pairs(a, row + PART, end, of_rows)
    parts = (end - row + PART - 1) // PART
    for part in range(parts):
        first = row + part * PART
        weight_after = _weights(a, pair)
        pair = _pairs(a, first + 2 * PART, end, of_rows)
        w, strip = part // STRIPS, part % STRIPS
        if strip == 0:
            a.hand_over("sync", w)
        sums = gl.zeros([PART], gl.float32, of_rows)
        for chunk in range(CHUNKS):
            # Into the buffer of the previous columns. No rows are loaded past the last one.
            ahead = chunk + CHUNKS - 1
            _ask(a, column, ahead % CHUNKS, first + ahead // CHUNKS * PART, end, layout, wide)
            async_copy.wait_group(CHUNKS - 1)
            da = a.da_strips.index((w * CHUNKS + chunk) * STRIPS + strip).load(layout).to(gl.float32)
            sums += _finish_part(a, da, weight, column, chunk, first, end, layout, wide)
        if (strip == STRIPS - 1) | (part == parts - 1):
            a.take_back("arrive", w)
        if a.HAS_SUMS:
            _store_sums(a, sums, first, end, column, of_rows)
        weight = weight_after
    async_copy.wait_group(0)
    if a.HAS_BIAS:  # noqa: SIM102 - the outer condition is constexpr
        if column == 0:
            for part in range(parts):
                _dot_bias(a, _read(a, n, 0), row + part * PART, end, layout)


@gluon.jit
def _finish_partition(a):
    """Run the epilogue of all tiles of this program."""
    wait_for_kernel_before()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [FINISHERS // 32, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [FINISHERS // 32, 1], [1, 0])  # of alternating gate and up
    n = 0  # tiles so far
    row = _first_row(a, n)
    while row >= 0:
        _finish_tile(a, n, row, layout, wide)
        n += 1
        row = _first_row(a, n)


@gluon.jit
def _activation_sm90_kernel(
    w_desc,  # [E, 1, HID, INTER]
    do_ptr,  # [T, HID]
    bias_ptr,  # [E, HID], or None
    weights_ptr,  # [T, K]
    product_ptr,  # [P, COLUMNS]
    tiles_ptr,  # [1 + tiles, 4] int32; the first entry: tiles, counters
    order_ptr,  # [P] int32
    dproduct_ptr,  # [P, COLUMNS]; may be product_ptr: only one program reads and overwrites each element
    wh_ptr,  # [P, WH_COLUMNS]: activation times routing weight, the columns of this launch; or None
    sums_ptr,  # [P, SUMS] fp32: <dA, h> of each column tile, then <dO, bias>; or None
    drawn,  # column tiles that earlier launches fetched from the same counter: the first one of this launch
    COUNTER: gl.constexpr, TOPK: gl.constexpr, HID: gl.constexpr, INTER: gl.constexpr, COLUMNS: gl.constexpr,
    WH_COLUMNS: gl.constexpr, SUMS: gl.constexpr, TILES_N: gl.constexpr, GROUP_M: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr,
    ACT: gl.constexpr,  # Activation
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dA and the gradients that follow from it. Grid: (programs,), persistent."""
    gl.static_assert(STAGES + FREE + 4 <= 16, "the hardware has 16 barriers")
    STEPS: gl.constexpr = (HID + STEP - 1) // STEP
    # Tiles in flight: those in the ring, one whose dA waits, one in the epilogue, and the next.
    KNOWN: gl.constexpr = (STAGES + STEPS) // STEPS + 3
    gl.static_assert(KNOWN <= TILES, "the producer would overwrite tiles that are worked on")
    kind: gl.constexpr = w_desc.dtype
    do_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, STEP], kind)
    da_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], kind)
    do_bufs = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, STEP], do_layout)
    w_bufs = make_tiles(w_desc, STAGES)
    da_bufs = gl.allocate_shared_memory(kind, [2 * CHUNKS, ROWS, CHUNK], da_layout)
    # Eight rows of 128 bytes are one swizzle period, so 16 rows are a valid buffer of their own.
    strip_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, CHUNK], kind)
    da_strips = _reinterpret(da_bufs, kind, [2 * CHUNKS * STRIPS, PART, CHUNK], strip_layout)
    WIDTH: gl.constexpr = 2 if ACT.INTERLEAVED else 1
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])  # each thread reads what it loaded
    gate_bufs = gl.allocate_shared_memory(kind, [CHUNKS, PART, CHUNK * WIDTH], plain)
    up_bufs = gate_bufs
    if ACT.GATED and not ACT.INTERLEAVED:
        up_bufs = gl.allocate_shared_memory(kind, [CHUNKS, PART, CHUNK], plain)
    ready_bars = make_barriers(STAGES, PRODUCERS + 1)
    tiles = make_mailbox(PRODUCERS)
    fence_async_shared()  # make the barriers visible to TMA
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    HAS_WH: gl.constexpr = wh_ptr is not None
    HAS_SUMS: gl.constexpr = sums_ptr is not None
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        do_ptr, w_desc, bias_ptr if HAS_BIAS else tiles_ptr, weights_ptr, product_ptr, tiles_ptr, order_ptr,
        dproduct_ptr, wh_ptr if HAS_WH else tiles_ptr, sums_ptr if HAS_SUMS else tiles_ptr, drawn,
        do_bufs, w_bufs, da_bufs, da_strips, gate_bufs, up_bufs, ready_bars, tiles, HAS_BIAS, HAS_WH, HAS_SUMS,
        COUNTER, TOPK, HID, INTER, COLUMNS, WH_COLUMNS, SUMS, TILES_N, GROUP_M, STEP, STAGES,
        activation_of(ACT),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply_partition, (a, 0)),
            (_multiply_partition, (a, 1)),
            (_finish_partition, (a,)),
            (_load_partition, (a,)),
        ],
        [4, FINISHERS // 32, PRODUCERS // 32],
        [REGISTERS] * 3,
    )
