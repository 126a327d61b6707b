"""Device helpers that the kernels of the experts for Hopper share (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..gpu.gluon_sm90 import FIRST_BARRIER, lap_of, slot_of, special_register
from ..gpu.gluon_versions import aggregate, tma_store

ROWS = gl.constexpr(64)  # of one warpgroup: those of one wgmma instruction
CHUNK = gl.constexpr(64)  # columns of one store: 128 bytes, the width of TMA's swizzle
# Tiles in flight: the producer leads by the steps of the ring, and a tile has at least one step.
TILES = gl.constexpr(8)
RAGGED = gl.constexpr(2**30)  # rows of a ragged tensor map
LEADING = FIRST_BARRIER  # barrier by which the first warpgroup leads; the barriers of the ring follow
FREE = gl.constexpr(6)


@aggregate
class Activation:
    """The group of the same name in ``kernel_arguments``, as aggregates hold it in every version of Triton."""

    KIND: gl.constexpr
    GATED: gl.constexpr
    INTERLEAVED: gl.constexpr
    ALPHA: gl.constexpr
    LIMIT: gl.constexpr


@gluon.jit
def activation_of(ACT: gl.constexpr):
    """Return the activation of a kernel as its aggregate holds it."""
    return Activation(ACT.KIND, ACT.GATED, ACT.INTERLEAVED, ACT.ALPHA, ACT.LIMIT)  # type: ignore[call-arg] # as Mailbox


@aggregate
class Mailbox:
    """A ring through which the producer sends four numbers of each tile of this program."""

    bufs: gl.shared_memory_descriptor  # [4 * TILES, 1] int32
    bars: gl.shared_memory_descriptor  # [TILES, 1]: the tile has arrived
    PRODUCERS: gl.constexpr  # threads

    @gluon.jit
    def publish(self, n, x, y, z, w):
        """Send four numbers of the n-th tile."""
        slot = slot_of(n, TILES)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [self.PRODUCERS // 32], [0])
        self.bufs.index(4 * slot).store(gl.full([1], 0, gl.int32, one) + x)
        self.bufs.index(4 * slot + 1).store(gl.full([1], 0, gl.int32, one) + y)
        self.bufs.index(4 * slot + 2).store(gl.full([1], 0, gl.int32, one) + z)
        self.bufs.index(4 * slot + 3).store(gl.full([1], 0, gl.int32, one) + w)
        mbarrier.arrive(self.bars.index(slot))

    @gluon.jit
    def read(self, n, WHAT: gl.constexpr):
        """Return one number of the n-th tile, which has arrived."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.max(self.bufs.index(4 * slot_of(n, TILES) + WHAT).load(one), 0)

    @gluon.jit
    def wait(self, n, WHAT: gl.constexpr):
        """Wait for the n-th tile, and return one of its numbers."""
        mbarrier.wait(self.bars.index(slot_of(n, TILES)), lap_of(n, TILES) & 1)
        return self.read(n, WHAT)


@gluon.jit
def make_mailbox(PRODUCERS: gl.constexpr):
    """Allocate a mailbox."""
    bufs = gl.allocate_shared_memory(gl.int32, [4 * TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(TILES):
        mbarrier.init(bars.index(slot), count=1)
    return Mailbox(bufs, bars, PRODUCERS)  # type: ignore[call-arg] # aggregate gives it a constructor


@gluon.jit
def row_and_column_tile(a, tile, tiles_m):
    """Return the table index of a row tile, and the column tile. GROUP_M row tiles are visited together."""
    group = tile // (a.GROUP_M * a.TILES_N)
    first = group * a.GROUP_M
    size = gl.minimum(tiles_m - first, a.GROUP_M)
    rest = tile - group * (a.GROUP_M * a.TILES_N)
    return a.tiles_ptr + 4 + 4 * (first + rest % size), rest // size


@gluon.jit
def draw_tile(a, tiles_m):
    """Fetch the next tile from the counter, which also counts the tiles of earlier launches."""
    tile = gl.atomic_add(a.tiles_ptr + a.COUNTER, 1, sem="relaxed") + special_register("nctaid.x")
    return tile - tiles_m * a.drawn


@gluon.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) in four instructions; with denormals, exp and division take ten."""
    e = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], gl.float32, is_pure=True, pack=1
    )
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + e], gl.float32, is_pure=True, pack=1)


@gluon.jit
def left_and_right(x):
    """Return the left and the right half of the columns."""
    return gl.split(x.reshape([ROWS, 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def send(desc, place, x, buf):
    """Start the store of 64 columns through a buffer that TMA has read two stores ago."""
    tma.store_wait(1)
    buf.reshape([ROWS, CHUNK]).store(x.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, place, buf)
