"""Primitives of Hopper kernels, in Gluon: rings of tiles, hardware barriers, tiles fetched from a counter.

Also: 16-bit operands, and three ways to hide a value from the compiler, with the reason for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_versions import aggregate, tma_load

FIRST_BARRIER = gl.constexpr(5)  # of the hardware's 16 that is ours; Triton uses those before
_ONE_PER_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_ONE_PER_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def named_barrier(WHAT: gl.constexpr, barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of the hardware (``arrive``), or wait there too (``sync``), as one of ``THREADS``.

    There are 16. It costs a warp one instruction, and nothing to agree on with its warpgroup: before an arrival at an
    mbarrier, which one thread makes for all, Triton has the whole warpgroup wait.
    """
    asm: gl.constexpr = f"bar.{WHAT} $1, {THREADS}; // $0"
    gl.inline_asm_elementwise(asm, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class Ring:
    """Tiles in shared memory that the producer fills and the warpgroups drain; a slot is used again every lap.

    A tile may lie in two parts: a power of two of columns, and the power of two that covers the rest.
    """

    bufs: gl.shared_memory_descriptor  # [slots, 1, heads, rows of one, columns]
    more_bufs: gl.shared_memory_descriptor  # [slots, 1, heads, rows of one, MORE]
    ready_bars: gl.shared_memory_descriptor  # the slot was filled
    MORE: gl.constexpr  # columns of the second part; 0 where there is none, and more_bufs is bufs
    FREE: gl.constexpr  # barrier of the hardware that says that slot 0 is free; those of the others follow
    READERS: gl.constexpr  # warpgroups that read a slot

    @gluon.jit
    def fill(self, desc, more_desc, b, h, row, slot, lap):
        """Copy rows from ``row`` on, of the heads from ``h`` on that a tile has, into the slot, once it is free."""
        if lap > 0:
            named_barrier("sync", self.FREE + slot, 128 * self.READERS + 32)
        bar = self.ready_bars.index(slot)
        BYTES: gl.constexpr = desc.block_type.nbytes + (more_desc.block_type.nbytes if self.MORE > 0 else 0)
        mbarrier.expect(bar, BYTES)
        tma_load(desc, [b, h, row, 0], bar, self.bufs.index(slot))
        if self.MORE > 0:
            tma_load(more_desc, [b, h, row, desc.block_type.shape[3]], bar, self.more_bufs.index(slot))

    @gluon.jit
    def wait(self, slot, lap):
        """Wait until the slot is filled; return its parts as matrices, head after head."""
        mbarrier.wait(self.ready_bars.index(slot), lap & 1)
        ROWS: gl.constexpr = self.bufs.shape[2] * self.bufs.shape[3]
        first = self.bufs.index(slot).reshape([ROWS, self.bufs.shape[4]])
        more = self.more_bufs.index(slot).reshape([ROWS, self.more_bufs.shape[4]])
        return first, more

    @gluon.jit
    def release(self, slot):
        """Tell the producer that one reader is done: each warp for itself, with no wait for the others."""
        named_barrier("arrive", self.FREE + slot, 128 * self.READERS + 32)


@gluon.jit
def make_tiles(desc, COUNT: gl.constexpr):
    """Allocate shared memory for ``COUNT`` tiles of a tensor descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate ``COUNT`` mbarriers, each of which waits for ``ARRIVALS`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(COUNT):
        mbarrier.init(bars.index(bar), count=ARRIVALS)
    return bars


@gluon.jit
def slot_of(i, SLOTS: gl.constexpr):
    """Return the slot of the i-th tile. Unsigned: a signed remainder costs four instructions more."""
    return (i.to(gl.uint32, bitcast=True) % SLOTS).to(gl.int32, bitcast=True)


@gluon.jit
def lap_of(i, SLOTS: gl.constexpr):
    """Return how often the ring was filled before the i-th tile."""
    return (i.to(gl.uint32, bitcast=True) // SLOTS).to(gl.int32, bitcast=True)


@gluon.jit
def make_ring(desc, more_desc, MORE: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr, FREE: gl.constexpr):
    """Allocate a ring for the tiles of ``desc``, and of ``more_desc`` where there is a second part."""
    bufs = make_tiles(desc, SLOTS)
    more_bufs = bufs
    if MORE > 0:
        more_bufs = make_tiles(more_desc, SLOTS)
    return Ring(bufs, more_bufs, make_barriers(SLOTS, 1), MORE, FREE, READERS)  # type: ignore[call-arg] # aggregate gives it a constructor


@aggregate
class Mailbox:
    """Messages of the producer, one warp, about the tiles of its program: some numbers for each, in order."""

    bufs: gl.shared_memory_descriptor  # [2 * FIELDS, 1] int32
    ready_bars: gl.shared_memory_descriptor  # all was said of a tile
    FIELDS: gl.constexpr

    @gluon.jit
    def put(self, n, WHAT: gl.constexpr, value):
        """Send one number of the n-th tile. Its slot is free: whoever finished the previous tile has read it."""
        self.bufs.index(self.FIELDS * (n & 1) + WHAT).store(gl.full([1], 0, gl.int32, _ONE_PER_WARP) + value)

    @gluon.jit
    def publish(self, n):
        """Let all be read that was said of the n-th tile."""
        mbarrier.arrive(self.ready_bars.index(n & 1))

    @gluon.jit
    def wait(self, n, WHAT: gl.constexpr):
        """Wait until the n-th tile is known; return one thing that was said of it."""
        mbarrier.wait(self.ready_bars.index(n & 1), (n >> 1) & 1)
        return self.read(n, WHAT)

    @gluon.jit
    def read(self, n, WHAT: gl.constexpr):
        """Return one thing that was said of the n-th tile, which is known."""
        return gl.max(self.bufs.index(self.FIELDS * (n & 1) + WHAT).load(_ONE_PER_WARPGROUP), 0)


@gluon.jit
def make_mailbox(FIELDS: gl.constexpr):
    """Allocate a mailbox."""
    bufs = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Mailbox(bufs, make_barriers(2, 1), FIELDS)  # type: ignore[call-arg] # aggregate gives it a constructor


@gluon.jit
def wait_for_kernel_before():
    """Wait until the previous kernel has ended; code before this call overlaps its end."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_next(counter_ptr):
    """Ask the tile scheduler for the next ticket; the answer takes a trip to L2, and ``get_fetched`` waits for it.

    One lane asks. As Triton's own atomic operation it would be waited for at once.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.b32 lane, %laneid; setp.eq.s32 p, lane, 0; mov.b32 $0, 0;"
        " @p atom.relaxed.gpu.global.add.s32 $0, [$1], 1; }",
        "=r,l", [counter_ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get_fetched(ticket, counter_ptr, tiles):
    """Return the tile of a ticket: the next free one, or one past the end.

    Each tile is fetched once; the last fetch resets the counter to 0 for the next launch.
    """
    ticket = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )
    if ticket == tiles - 1:
        gl.store(counter_ptr, 0)
    return ticket + special_register("nctaid.x")


@gluon.jit
def rematerialize(x):
    """Return a copy of an integer that the compiler cannot see through.

    Values derived from the copy are computed where they are needed. Without it LLVM computes them once, at the start of
    the kernel, for all warpgroups (Triton 3.9), and ptxas spills them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_from_compiler(X: gl.constexpr):
    """Return a constant that the compiler does not know, for the reason of ``rematerialize``."""
    asm: gl.constexpr = f"mov.b32 $0, {X};"
    return gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def special_register(NAME: gl.constexpr):
    """Read a special register of 32 bits where it is needed, for the reason of ``rematerialize``."""
    asm: gl.constexpr = f"mov.b32 $0, %{NAME};"
    return gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round to 16 bits, two neighbours to an integer: [M, N] fp32 -> [M, N // 2] int32.

    Keeps P packed across steps: ptxas would unpack and repack 16-bit values, an instruction a pair.
    """
    PTX_TYPE: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + PTX_TYPE + ".f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``pack``; costs no instruction."""
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, layout)


@gluon.jit
def tanh(x):
    """Return tanh to within 2**-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)
