"""A bias in ``forward_features_gluon_sm90`` (Gluon): its tiles in shared memory, and the softmax of scores with it.

TMA copies the bias of each warpgroup's rows, tile by tile, into a slot of the warpgroup. Once scores are there, it
reads the slot as they are laid out, 16 bits an element, and releases it: the next tile travels under the softmax. Loads
from memory into registers would take 32 instructions a thread and tile of 128 keys, each of eight lines of the L1
cache and half of every sector, and 32 registers from before the product to behind it.

Maxima are to base e, as those of ``forward_triton`` with a bias: the lowest number of bf16, a common mask, is infinite
times log2(e). A row whose keys all have it weighs them equally; one whose keys all have -inf sees none.

Predicted, D 128 and 8k keys, in parts of the plain kernel's rate: 0.8 full and causal, and D 64 0.75. A score costs
two instructions more, one to widen its bias and one to add it, beside three and a half and the exponential.
At plain's rate a bias of each head and sequence takes 3.0 TB/s there, and 4.6 at D 64, so an H100 gives 0.65 at most.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ...gpu.gluon_sm90 import lap_of, named_barrier, pack, slot_of
from ...gpu.gluon_versions import tma_load
from .primitives_sm90 import (
    LARGEST_SUM,
    ROWS,
    is_too_large,
    issue_output,
    issue_scores,
    partial_sums,
    rescale,
    warp_scheduler_arrive,
    warp_scheduler_sync,
)

# Below all that is finite in 16 bits, and not -inf: -inf - -inf is NaN.
BIASED_START = gl.constexpr(-3.4028234663852886e38)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def fill_bias(a, b, head, row, key, i):
    """Copy the bias of the i-th key tile, which starts at ``key``, for the rows of each warpgroup from ``row`` on.

    TMA puts zeros behind the last row and the last key, and reads nothing there.
    """
    ring = a.bias_ring
    for w in gl.static_range(a.WARPGROUPS):
        if i > 0:
            named_barrier("sync", ring.FREE + w, 128 + 32)
        bar = ring.ready_bars.index(w)
        mbarrier.expect(bar, a.bias_desc.block_type.nbytes)
        place = [b if a.BIAS_BATCH else 0, head if a.BIAS_HEADS else 0, row + w * ROWS if a.BIAS_ROWS else 0, key]
        tma_load(a.bias_desc, place, bar, ring.bufs.index(w))


@gluon.jit
def _to_fp32(bias):
    """Convert to fp32, bf16 by one instruction an element: Triton shifts the second of a pair down and up again."""
    if bias.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000; mov.b32 $0, low;"
            " mov.b32 $1, high; }",
            "=f,=f,r", [bias], gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        return bias.to(gl.float32)


@gluon.jit
def read_bias(s, a, i, W: gl.constexpr):
    """Return the bias of the i-th key tile, laid out as scores; a bias of one row serves all rows.

    An arrival at a barrier of the hardware waits for no earlier load, and TMA writes to shared memory by a path of its
    own: without the fence a late load may find the next tile there. On an H200 bits of equal calls differed.
    """
    tile, _ = a.bias_ring.wait(W, i)
    bias = tile.load(s.type.layout)
    fence_async_shared()
    a.bias_ring.release(W)
    return bias


@gluon.jit
def add_bias(s, bias, a):
    """Return scores, scaled, with the bias added."""
    return s * a.inner_scale + _to_fp32(bias)


@gluon.jit
def multiply_biased(q, acc, more, packed, zero, a, i, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """As ``multiply``, with the bias added to the scores.

    It is read under the output product. Behind the wait for that, ptxas would read it piece by piece between
    exponentials, and release the slot after most of them.
    """
    slot, before = slot_of(i, a.STAGES), slot_of(i - 1, a.STAGES)
    k = a.k_ring.wait(slot, lap_of(i, a.STAGES))
    warp_scheduler_sync(a, W)
    s = issue_scores(q, k, zero, a.D1)
    v = a.v_ring.wait(before, lap_of(i - 1, a.STAGES))
    acc, more, p = issue_output(packed, v, acc, more, a)
    warp_scheduler_arrive(a, W)
    if IS_EDGE:
        s, acc, more, _ = warpgroup_mma_wait(0, deps=[s, acc, more, p])
        a.k_ring.release(slot)
        bias = read_bias(s, a, i, W)
    else:
        s = warpgroup_mma_wait(2 if a.DV1 > 0 else 1, deps=[s])
        a.k_ring.release(slot)
        bias = read_bias(s, a, i, W)
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
    a.v_ring.release(before)
    return add_bias(s, bias, a), acc, more


@gluon.jit
def _power(x, m):
    """Return e to the power of x - m, with the bits of ``biased_step`` where m times log2(e) is finite."""
    base = gl.where(gl.abs(m * _LOG2_E) < float("inf"), 0.0, m)
    return gl.exp2(gl.fma(x - base, _LOG2_E, (base - m) * _LOG2_E))


@gluon.jit
def _raise_max(s, m, l, sums=None):
    """Raise the maximum to that of the scores, as ``update_row_max`` does, to base e."""
    largest = gl.convert_layout(gl.max(s, 1), m.type.layout)
    m_new = gl.maximum(m, largest)
    if sums is not None:
        m_new = gl.where(gl.convert_layout(gl.max(sums, 1), m.type.layout) > LARGEST_SUM, m_new, m)
    alpha = _power(m, m_new)
    return m_new, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None], alpha


@gluon.jit
def _exponentials(s, m, l, a):
    """Return P, packed, and its sums, laid out as ``l``."""
    p = _power(s, gl.convert_layout(m, gl.SliceLayout(1, s.type.layout))[:, None])
    return pack(p, a.q_desc.dtype), gl.convert_layout(partial_sums(p), l.type.layout)


@gluon.jit
def first_biased(s, m, l, a):
    """Take the exponentials of the first tile's scores, masked, below their maximum; return P, it, and both sums."""
    m, l, _ = _raise_max(s, m, l)
    packed, sums = _exponentials(s, m, l, a)
    return packed, m, l, sums


@gluon.jit
def fold_biased(s, acc, more, m, l, a):
    """Take the exponentials of masked scores, below their maximum."""
    m, l, alpha = _raise_max(s, m, l)
    packed, sums = _exponentials(s, m, l, a)
    acc, more = rescale(acc, more, alpha, a)
    return acc, more, packed, m, l + sums


@gluon.jit
def biased_step(s, acc, more, m, l, a):
    """Take the exponentials of scores below the maximum so far; raise it only where a sum is too large.

    One instruction a score gives its exponent. A maximum that is infinite times log2(e) counts as a sum that is.
    """
    top = m * _LOG2_E
    top = gl.where(gl.abs(top) < float("inf"), -top, float("nan"))
    p = gl.exp2(gl.fma(s, _LOG2_E, gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))[:, None]))
    packed = pack(p, a.q_desc.dtype)
    sums = gl.convert_layout(partial_sums(p), l.type.layout)
    sums = gl.where(sums <= LARGEST_SUM, sums, float("inf"))
    if is_too_large(sums):
        m, l, alpha = _raise_max(s, m, l, sums)
        acc, more = rescale(acc, more, alpha, a)
        packed, sums = _exponentials(s, m, l, a)
    return acc, more, packed, m, l + sums


@gluon.jit
def normalise_biased(m, l, head, a):
    """Return the maximum, the sum and the factor on the output that make it the softmax, sinks included."""
    factor = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
    if a.HAS_SINKS:
        sink = gl.load(a.sinks_ptr + head).to(gl.float32)
        top = gl.maximum(m, sink)
        factor = _power(m, top)
        l = l * factor + _power(sink, top)
        m = top
    return m, l, gl.where(l != 0, factor / l, 0.0)


@gluon.jit
def lse_biased(m, l):
    """Return the LSE of rows that see a key."""
    top = m * _LOG2_E  # what exponentials were below, rounded
    return gl.where(gl.abs(top) < float("inf"), (top + gl.log2(l)) * _LN_2, m)
