"""Attention forward of heads of 257 to 512 columns for Hopper (Gluon, sm_90, fp16 and bf16).

The output of 64 rows and 512 columns would fill the registers of two warpgroups, and 64 rows use each byte of K and V
from L2 for 64 operations. So a program attends 128 query rows and half of the columns of V: two warpgroups own 64 rows
each, and compute the scores of all columns of Q and K. Scores are computed twice, and a byte is used for 85 operations
that count.

One warp, the producer, copies tiles of 64 keys with TMA; K in halves of its columns, each of which is copied anew as
soon as its products have ended. Keys are walked over from the last tile to the first. A warpgroup issues the scores of
one tile and the output product of the tile before together, and the softmax of one warpgroup runs under the products of
the other. The online softmax is that of ``forward_gluon_sm90``.

TMA reads zeros outside a tensor, so odd lengths and head dimensions need no code but the mask on the last keys.

Source: FlashAttention-3 (Shah et al., 2024) for the products issued together. Ours: the halves of V.
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

from ...gpu.gluon_sm90 import (
    FIRST_BARRIER,
    hide_from_compiler,
    make_barriers,
    make_tiles,
    named_barrier,
    rematerialize,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import aggregate, tma_load
from ..decode.primitives_sm90 import uniform
from ..kernel_arguments import HopperForwardSizes, NewStrides
from .primitives_sm90 import (
    ROWS,
    declare_too_large,
    exponentials,
    fold_masked,
    issue_output,
    online_softmax_step,
    partial_sums,
    rescale,
    update_row_max,
)

KEYS = gl.constexpr(64)  # of a tile
HALF = gl.constexpr(256)  # columns: of Q and K in one product, of V and the output in one program
WARPGROUPS = gl.constexpr(2)
_ALL = gl.constexpr(2 * 128 + 32)  # threads of the warpgroups and of the producer
# Barriers of the hardware.
_K_FREE = FIRST_BARRIER  # both have multiplied a half of K: two
_V_FREE = gl.constexpr(7)
# Barriers in shared memory: halves of K, then V, then the queries.
_V_READY = gl.constexpr(2)
_Q_READY = gl.constexpr(3)


@aggregate
class Args:
    """The arguments of every partition."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_ptr: gl.tensor
    lse_ptr: gl.tensor
    q_bufs: gl.shared_memory_descriptor  # [2 * WARPGROUPS, 1, 1, ROWS, HALF]: halves of one, then of the other
    k_bufs: gl.shared_memory_descriptor  # [2, 1, 1, KEYS, HALF]
    v_bufs: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, HALF]
    ready_bars: gl.shared_memory_descriptor  # [4]
    b: gl.tensor  # sequence
    h: gl.tensor  # query head
    row: gl.tensor  # first row
    column: gl.tensor  # first column of V: 0 or HALF
    steps: gl.tensor  # tiles of keys
    heads: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    stride_ob: gl.tensor  # in units of ALIGN_O elements
    stride_oh: gl.tensor
    stride_om: gl.tensor
    scale_log2: gl.tensor  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr  # query heads that share one K/V head
    DV: gl.constexpr
    ALIGN_O: gl.constexpr
    IS_CAUSAL: gl.constexpr
    STORE_LSE: gl.constexpr
    IN_HALVES: gl.constexpr  # what the shared primitives ask for: no
    DV1: gl.constexpr  # likewise: 0

    @gluon.jit
    def tile(self, bufs, WHICH: gl.constexpr, BAR: gl.constexpr, i):
        """Wait until tile ``i`` is there; return it as a matrix."""
        mbarrier.wait(self.ready_bars.index(hide_from_compiler(BAR)), i & 1)
        return bufs.index(hide_from_compiler(WHICH)).reshape([KEYS, HALF])

    @gluon.jit
    def key(self, i):
        """Return the first key of the i-th tile of the walk."""
        return (rematerialize(self.steps) - 1 - i) * KEYS


@gluon.jit
def _load_partition(a):
    """Copy the queries, then tile after tile of K, and of V one behind."""
    kv = a.h // a.GROUP
    if a.steps > 0:
        bar = a.ready_bars.index(_Q_READY)
        mbarrier.expect(bar, 2 * WARPGROUPS * a.q_desc.block_type.nbytes)
        for w in gl.static_range(WARPGROUPS):
            for half in gl.static_range(2):
                tma_load(a.q_desc, [a.b, a.h, a.row + w * ROWS, half * HALF], bar, a.q_bufs.index(2 * w + half))
    for i in range(a.steps + 1):
        if i < a.steps:
            for half in gl.static_range(2):
                if i > 0:
                    named_barrier("sync", _K_FREE + half, _ALL)
                bar = a.ready_bars.index(half)
                mbarrier.expect(bar, a.k_desc.block_type.nbytes)
                tma_load(a.k_desc, [a.b, kv, a.key(i), half * HALF], bar, a.k_bufs.index(half))
        if i > 0:
            if i > 1:
                named_barrier("sync", _V_FREE, _ALL)
            bar = a.ready_bars.index(_V_READY)
            mbarrier.expect(bar, a.v_desc.block_type.nbytes)
            tma_load(a.v_desc, [a.b, kv, a.key(i - 1), a.column], bar, a.v_bufs.index(0))


@gluon.jit
def _mask(s, a, key, W: gl.constexpr):
    """Put -inf where a row does not see a key of the tile at ``key``."""
    layout: gl.constexpr = s.type.layout
    column = key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    if a.IS_CAUSAL:  # row m of Sq sees key m + Sk - Sq, too
        row = rematerialize(a.row) + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        s = gl.where(column[None, :] - row[:, None] <= a.seqlen_k - a.seqlen_q, s, -float("inf"))
    return gl.where(column[None, :] < a.seqlen_k, s, -float("inf"))


@gluon.jit
def _issue_scores(a, zero, i, W: gl.constexpr):
    """Issue Q K^T of tile ``i``, a half of the columns at a time."""
    q = a.q_bufs.index(hide_from_compiler(2 * W)).reshape([ROWS, HALF])
    q_more = a.q_bufs.index(hide_from_compiler(2 * W + 1)).reshape([ROWS, HALF])
    k = a.tile(a.k_bufs, 0, 0, i)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    k_more = a.tile(a.k_bufs, 1, 1, i)
    return warpgroup_mma(q_more, k_more.permute((1, 0)), s, is_async=True)


@gluon.jit
def _step(acc, packed, m, l, zero, a, i, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """Scores of tile i and the output product of tile i - 1, then the exponentials of the scores."""
    s = _issue_scores(a, zero, i, W)
    v = a.tile(a.v_bufs, 0, 2, i - 1)
    acc, more, p = issue_output(packed, (v, v), acc, zero, a)
    s = warpgroup_mma_wait(2, deps=[s])
    named_barrier("arrive", _K_FREE, _ALL)
    s = warpgroup_mma_wait(1, deps=[s])
    named_barrier("arrive", _K_FREE + 1, _ALL)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    named_barrier("arrive", _V_FREE, _ALL)
    if IS_EDGE:
        acc, more, packed, m, l = fold_masked(_mask(s, a, a.key(i), W), acc, more, m, l, a)
    else:
        acc, more, packed, m, l = online_softmax_step(s, acc, more, packed, m, l, a)
    return acc, packed, m, l


@gluon.jit
def _attend_partition(a, W: gl.constexpr):
    """Attend rows 64 W to 64 W + 63."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    m = gl.full([ROWS], -3.0e38, gl.float32, row_layout)  # not -inf: -inf - -inf is NaN
    l = partial_sums(zero)
    acc = gl.zeros([ROWS, HALF], gl.float32, o_layout)
    steps = uniform(a.steps)
    # Keys that all rows see: tiles behind them are masked, and the first one.
    seen = a.seqlen_k
    if a.IS_CAUSAL:
        seen = gl.maximum(gl.minimum(seen, a.row + W * ROWS + 1 + a.seqlen_k - a.seqlen_q), 0)
    edge = uniform(gl.maximum(a.steps - seen // KEYS, 1))
    if steps > 0:
        mbarrier.wait(a.ready_bars.index(hide_from_compiler(3)), 0)
        s = _issue_scores(a, zero, 0, W)
        s = warpgroup_mma_wait(1, deps=[s])
        named_barrier("arrive", _K_FREE, _ALL)
        s = warpgroup_mma_wait(0, deps=[s])
        named_barrier("arrive", _K_FREE + 1, _ALL)
        s = _mask(s, a, a.key(0), W)
        m, l, factor = update_row_max(s, m, l, a)
        packed, sums = exponentials(s, m, l, a)
        l += sums
        for i in range(1, edge):
            acc, packed, m, l = _step(acc, packed, m, l, zero, a, i, W, True)
        for i in range(edge, steps):
            acc, packed, m, l = _step(acc, packed, m, l, zero, a, i, W, False)
        v = a.tile(a.v_bufs, 0, 2, steps - 1)
        acc, _, p = issue_output(packed, (v, v), acc, zero, a)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])

    l_row = gl.convert_layout(gl.sum(l, 1), row_layout)
    has_keys = l_row != 0  # a row without keys: output 0, LSE -inf
    factor = gl.where(has_keys, 1.0 / l_row, 0.0)
    first_row = rematerialize(a.row) + W * ROWS
    if a.STORE_LSE:
        lse = gl.where(has_keys, (m + gl.log2(l_row)) * 0.6931471805599453, -float("inf"))
        row = first_row + gl.arange(0, ROWS, row_layout)
        at = (a.b.to(gl.int64) * a.heads + a.h) * a.seqlen_q
        gl.store(a.lse_ptr + at + row, lse, mask=(row < a.seqlen_q) & (a.column == 0))
    acc, _ = rescale(acc, zero, factor, a)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
    at = a.b.to(gl.int64) * a.stride_ob + a.h.to(gl.int64) * a.stride_oh
    at = (at + row.to(gl.int64) * a.stride_om) * a.ALIGN_O
    mask = (row < a.seqlen_q)[:, None] & (column < a.DV - a.column)[None, :]
    gl.store(a.o_ptr + a.column + (at[:, None] + column[None, :]), acc.to(a.q_desc.dtype), mask=mask)


@gluon.jit
def _locate(tile, sizes, IS_CAUSAL: gl.constexpr):
    """Return sequence and head, counted together, and first row of a tile.

    Causal: the longest row tiles of a group of heads come first, then those of the next group.
    """
    if IS_CAUSAL:
        first = tile // (sizes.heads_per_group * sizes.tiles_m) * sizes.heads_per_group
        width = gl.minimum(sizes.heads_per_group, sizes.heads_total - first)
        rest = tile - first * sizes.tiles_m
        head, m = first + rest % width, sizes.tiles_m - 1 - rest // width
    else:
        head, m = tile // sizes.tiles_m, tile % sizes.tiles_m
    return head, m * (WARPGROUPS * ROWS)


@gluon.jit
def _forward_wide_sm90_kernel(
    q_desc,  # [B, H, Sq, D]
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    o_strides: NewStrides,  # in units of ALIGN_O elements
    sizes: HopperForwardSizes,
    scale_log2,  # softmax_scale * log2(e), positive
    GROUP: gl.constexpr,  # query heads that share one K/V head
    DV: gl.constexpr, ALIGN_O: gl.constexpr, IS_CAUSAL: gl.constexpr, STORE_LSE: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread of the second warpgroup
):  # fmt: skip
    """Attend 128 rows of one head to half of the columns of V. Grid: (2 * row tiles,)."""
    declare_too_large()
    wait_for_kernel_before()
    pid = gl.program_id(0)
    head, row = _locate(pid // 2, sizes, IS_CAUSAL)
    end = sizes.seqlen_k
    if IS_CAUSAL:
        end = gl.maximum(gl.minimum(end, row + WARPGROUPS * ROWS + sizes.seqlen_k - sizes.seqlen_q), 0)
    steps = (end + KEYS - 1) // KEYS
    q_bufs, k_bufs, v_bufs = make_tiles(q_desc, 2 * WARPGROUPS), make_tiles(k_desc, 2), make_tiles(v_desc, 1)
    ready_bars = make_barriers(4, 1)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_ptr, lse_ptr, q_bufs, k_bufs, v_bufs, ready_bars, head // sizes.heads,
        head % sizes.heads, row, pid % 2 * HALF, steps, sizes.heads, sizes.seqlen_q, sizes.seqlen_k, o_strides.b,
        o_strides.h, o_strides.m, scale_log2, GROUP, DV, ALIGN_O, IS_CAUSAL, STORE_LSE, False, 0,
    )  # fmt: skip
    gl.warp_specialize(
        [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
        [4, 1],
        [REGISTERS, 24],
    )
