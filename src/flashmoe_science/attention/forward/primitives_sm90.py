"""Primitives of both Hopper forward kernels (Gluon): turns, products, the softmax without a maximum, output.

``a`` is the ``Args`` that a kernel passes to its partitions. The functions here use its rings, buffers and constants,
the dtype of ``q_desc``, ``scale_log2`` and ``send``. ``forward_gluon_sm90`` gives the reasons.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import FIRST_BARRIER, hide_from_compiler, lap_of, named_barrier, pack, slot_of, unpack

ROWS = gl.constexpr(64)  # of one warpgroup: what one wgmma instruction computes
TURNS = FIRST_BARRIER  # of the first warpgroup; those of the others follow, then those of the rings
# The largest sum of exponentials that a thread holds for a row of a tile. It is far from fp16's largest P (65504), and
# far above the sums of scores that grow little along the walk.
LARGEST_SUM = gl.constexpr(1024.0)
_LARGEST_SUM_PTX = gl.constexpr("0f" + struct.pack(">f", 1024.0).hex())


@gluon.jit
def warp_scheduler_sync(a, W: gl.constexpr):
    """Wait until the warpgroup before has issued its products; its softmax then runs under those of this one."""
    if a.PING_PONG:
        named_barrier("sync", TURNS + W, 256)


@gluon.jit
def warp_scheduler_arrive(a, W: gl.constexpr):
    """Let the next warpgroup issue its products."""
    if a.PING_PONG:
        named_barrier("arrive", TURNS + (W + 1) % a.WARPGROUPS, 256)


@gluon.jit
def issue_scores(q, k, zero, D1: gl.constexpr, more_columns=None):
    """Issue Q K^T over the columns that there are, and over ``more_columns``, a pair of operands like Q and K."""
    if more_columns is None:
        s = warpgroup_mma(q[0], k[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(more_columns[0], more_columns[1].permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q[0], k[0].permute((1, 0)), s, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(q[1], k[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_output(packed, v, acc, more, a):
    """Issue P V over the columns that there are: those of ``acc``, and those of ``more`` behind them."""
    dtype: gl.constexpr = a.q_desc.dtype
    p = unpack(packed, dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(p, v[0], acc, is_async=True)
    if a.DV1 > 0:
        p_more = unpack(packed, dtype, gl.DotOperandLayout(0, more.type.layout, 2))
        more = warpgroup_mma(p_more, v[1], more, is_async=True)
    return acc, more, p


@gluon.jit
def multiply(q, acc, more, packed, zero, a, i, W: gl.constexpr, IS_EDGE: gl.constexpr, more_columns=None):
    """Return the scores of tile i, with ``more_columns``, and the output with the product of tile i - 1 added."""
    slot, before = slot_of(i, a.STAGES), slot_of(i - 1, a.STAGES)
    k = a.k_ring.wait(slot, lap_of(i, a.STAGES))
    warp_scheduler_sync(a, W)
    s = issue_scores(q, k, zero, a.D1, more_columns)
    v = a.v_ring.wait(before, lap_of(i - 1, a.STAGES))
    acc, more, p = issue_output(packed, v, acc, more, a)
    warp_scheduler_arrive(a, W)
    if IS_EDGE:
        # Both products end before the mask: beside P, three warpgroups have no registers for it.
        s, acc, more, _ = warpgroup_mma_wait(0, deps=[s, acc, more, p])
        a.k_ring.release(slot)
    else:
        s = warpgroup_mma_wait(2 if a.DV1 > 0 else 1, deps=[s])
        a.k_ring.release(slot)
        # A wait behind the exponentials does not let the output product run under them: ptxas moves it up in front of
        # the exp2. Held in its place it was up to 12 % slower (lab/hopper, run 6). And P of this tile must not be
        # packed before this wait: ptxas would serialise the products, which read P of the tile before from registers.
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
    a.v_ring.release(before)
    return s, acc, more


@gluon.jit
def partial_sums(p):
    """Sum the columns that one thread holds: [ROWS, columns] -> [ROWS, 4], a sum for each of the lanes of a row."""
    x = gl.reshape(p, [ROWS, p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def update_row_max(s, m, l, a, sums=None):
    """Raise the maximum to that of the scores; return it, the sums below it, and the factor on what was before.

    With ``sums`` only that of the rows whose sum is too large: the bits of a row do not depend on its neighbours.
    """
    largest = gl.convert_layout(gl.max(s, 1), m.type.layout)
    m_new = gl.maximum(m, largest * a.scale_log2)
    if sums is not None:
        m_new = gl.where(gl.convert_layout(gl.max(sums, 1), m.type.layout) > LARGEST_SUM, m_new, m)
    alpha = gl.exp2(m - m_new)
    return m_new, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None], alpha


@gluon.jit
def exponentials(s, m, l, a):
    """Return P of some columns, packed, and its sums, laid out as ``l``."""
    p = gl.exp2(s * a.scale_log2 - gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))[:, None])
    return pack(p, a.q_desc.dtype), gl.convert_layout(partial_sums(p), l.type.layout)


@gluon.jit
def declare_too_large():
    """Declare the predicate of ``is_too_large``, once a kernel."""
    gl.inline_asm_elementwise(".reg .pred too_large; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def is_too_large(sums):
    """Return whether a sum of this warp is above ``LARGEST_SUM``: a scalar, and each warp has its own.

    A reduction of the tensor would wait for the other warps. The answer leaves the tensor through a predicate of PTX.
    Code under this test may use neither shared memory nor matrix products, which take all warps of a warpgroup.
    """
    asm: gl.constexpr = (
        "{ .reg .pred large; setp.gt.f32 large, $2, " + _LARGEST_SUM_PTX
        + "; setp.gt.or.f32 large, $3, " + _LARGEST_SUM_PTX
        + ", large; vote.sync.any.pred too_large, large, 0xffffffff; mov.b32 $0, 0; mov.b32 $1, 0; }"
    )  # fmt: skip
    gl.inline_asm_elementwise(asm, "=r,=r,f,f", [sums], gl.int32, is_pure=False, pack=2)  # a thread holds two rows
    return gl.inline_asm_elementwise("selp.b32 $0, 1, 0, too_large;", "=r", [], gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def rescale(acc, more, alpha, a):
    """Multiply the rows of the output by ``alpha``."""
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    if a.DV1 > 0:
        more = more * gl.convert_layout(alpha, gl.SliceLayout(1, more.type.layout))[:, None]
    return acc, more


@gluon.jit
def _rescale_packed(packed, alpha, dtype: gl.constexpr):
    """Multiply the rows of P by ``alpha``."""
    low = packed.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, packed.type.layout))[:, None]
    return pack(gl.join(low * alpha, high * alpha).reshape([packed.shape[0], packed.shape[1] * 2]), dtype)


@gluon.jit
def fold_masked(s, acc, more, m, l, a):
    """Take the exponentials of masked scores, below their maximum."""
    m, l, alpha = update_row_max(s, m, l, a)
    packed, sums = exponentials(s, m, l, a)
    acc, more = rescale(acc, more, alpha, a)
    return acc, more, packed, m, l + sums


@gluon.jit
def online_softmax_step(s, acc, more, packed, m, l, a):
    """Take the exponentials of scores below the maximum so far; raise it only where a sum is too large."""
    if a.IN_HALVES:
        return _fold_halves(s, acc, more, packed, m, l, a)
    packed, sums = exponentials(s, m, l, a)
    if is_too_large(sums):
        m, l, alpha = update_row_max(s, m, l, a, sums)
        acc, more = rescale(acc, more, alpha, a)
        packed, sums = exponentials(s, m, l, a)
    return acc, more, packed, m, l + sums


@gluon.jit
def _fold_halves(s, acc, more, packed, m, l, a):
    """Take the exponentials of one half of the columns after the other: the scores need fewer registers beside P.

    With three warpgroups, which have 160 registers a thread, 13 to 21 % faster than at once, full (lab/hopper, run 10).
    """
    packed_layout: gl.constexpr = packed.type.layout
    left, right = _halves(s)
    packed_left, sums = exponentials(left, m, l, a)
    if is_too_large(sums):
        m, l, alpha = update_row_max(s, m, l, a, sums)
        acc, more = rescale(acc, more, alpha, a)
        packed_left, sums = exponentials(left, m, l, a)
    l += sums
    packed_right, sums = exponentials(right, m, l, a)
    if is_too_large(sums):
        m, l, alpha = update_row_max(right, m, l, a, sums)
        acc, more = rescale(acc, more, alpha, a)
        packed_left = _rescale_packed(packed_left, alpha, a.q_desc.dtype)
        packed_right, sums = exponentials(right, m, l, a)
    l += sums
    both = gl.join(packed_left, packed_right).permute((0, 2, 1)).reshape([ROWS, a.BLOCK_N // 2])
    return acc, more, gl.convert_layout(both, packed_layout), m, l


@gluon.jit
def _halves(s):
    """Return the left and the right half of the columns."""
    return gl.split(s.reshape([ROWS, 2, s.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def store_output(o, more, a, place, W: gl.constexpr):
    """Send the output of a warpgroup to its place in memory, which ``a.send`` understands."""
    COLUMNS: gl.constexpr = a.o_bufs.shape[4]
    smem = a.o_bufs.index(hide_from_compiler(W)).reshape([ROWS, COLUMNS])
    ALL: gl.constexpr = a.DV0 + a.DV1
    gl.static_assert(ALL <= COLUMNS or a.DV0 == COLUMNS or ALL == 2 * COLUMNS, "columns would not be stored")
    gl.static_assert(a.DV1 <= COLUMNS, "columns would not be stored")
    tma.store_wait(0)
    if ALL <= COLUMNS:
        smem.slice(0, a.DV0, dim=1).store(o)
        if a.DV1 > 0:
            smem.slice(a.DV0, a.DV1, dim=1).store(more)
        a.send(place, 0, W)
    else:
        if a.DV0 == COLUMNS:
            left = o
            right = more
        else:
            left, right = gl.split(o.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
        smem.store(left)
        a.send(place, 0, W)
        tma.store_wait(0)
        smem.slice(0, right.shape[1], dim=1).store(right)
        a.send(place, COLUMNS, W)
