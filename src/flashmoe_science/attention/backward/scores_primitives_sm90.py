"""From products of K and Q to P, in the backward kernels for Hopper (Gluon): masks, ALiBi, softcap, packed P."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gpu.gluon_sm90 import pack, rematerialize, tanh
from .primitives_sm90 import ROWS


@gluon.jit
def mask_scores(s, span, key, row):
    """Put -inf where a query row of the tile does not see a key: keys are rows, queries columns.

    A thread holds columns 8 i + 2 lane + k with i and k known at compile time: as a 4-dimensional comparison of
    8 i + k with a number per lane and row, the mask costs one compare and one select an element.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    offs_n = key + rematerialize(gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout)))
    is_key = offs_n < rematerialize(span.seqlen_k)
    lane = rematerialize(2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout)))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    low = gl.where(is_key, span.earliest(offs_n) - row if span.BOUND_RIGHT else 0, COLUMNS)[:, None] - lane
    x = gl.where(column >= low[:, None, :, None], x, -float("inf"))
    if span.BOUND_LEFT:
        high = (span.latest(offs_n) - row)[:, None] - lane
        x = gl.where(column <= high[:, None, :, None], x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def mask_edge(s, span, key, row, IS_EDGE: gl.constexpr):
    """Mask the scores of an edge tile; with a left bound, of each tile that has hidden keys."""
    if IS_EDGE:
        s = mask_scores(s, span, key, row)
    elif span.BOUND_LEFT:  # noqa: SIM102 - the first is a constant, the second is known on the GPU alone
        if not span.is_whole(key, row):
            s = mask_scores(s, span, key, row)
    return s


@gluon.jit
def row_numbers(a, slot, WHICH: gl.constexpr, layout: gl.constexpr):
    """Return LSE (0) or delta (1) of the query rows of a tile, one a column of the scores."""
    return a.stats_bufs.index(slot).slice(WHICH * a.span.BLOCK_M, a.span.BLOCK_M, dim=0).load(layout)


@gluon.jit
def probabilities(s, a, span, slot, key, row, dtype: gl.constexpr, IS_EDGE: gl.constexpr):
    """Return P of a tile of products of K and Q, and P times the derivative of the softcap, both packed.

    Without a softcap both are the same registers. tanh is within 2**-11: what rounding a score to fp16 costs.
    """
    capped = s
    if a.HAS_SOFTCAP:
        capped = tanh(s * a.cap_scale)
    s = mask_edge(capped, span, key, row, IS_EDGE)
    lse = row_numbers(a, slot, 0, gl.SliceLayout(0, s.type.layout))
    if a.slopes.IS_GIVEN:
        p = gl.exp2(_below_lse(s, a, span, lse, a.slopes.read(slot), key, row))
    else:
        p = gl.exp2(s * a.scale_log2 - lse[None, :])
    packed = pack(p, dtype)
    slope = packed
    if a.HAS_SOFTCAP:
        slope = pack(p * (1 - capped * capped), dtype)
    return packed, slope


@gluon.jit
def _below_lse(s, a, span, lse, slope, key, row):
    """Return scores, times log2(e), less slope * distance and the LSE of their rows.

    ALiBi's term is an affine one of row and key, for keys up to the position of the row. The part of a row within its
    query tile is in ``lse`` already. What is left depends on the key: one addition an element.
    """
    keys_layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    # How far each key lies behind the first row.
    behind = key - row + rematerialize(span.seqlen_q) - rematerialize(span.seqlen_k)
    if a.slopes.SEES_AHEAD:
        return _below_lse_ahead(s, a, lse, slope, behind)
    of_key = slope * (behind + rematerialize(gl.arange(0, ROWS, keys_layout))).to(gl.float32)
    return s * a.scale_log2 + (of_key[:, None] - lse[None, :])


@gluon.jit
def _below_lse_ahead(s, a, lse, slope, behind):
    """Do the same where keys may lie ahead of the positions of rows: laid out as for a mask, as columns are known.

    Where all keys of a tile lie ahead of all its rows, the term has the other sign: another number a key, and a product
    with the column. Where some do, 2 * slope * distance is taken from each element that does.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    offs_n = behind + rematerialize(gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout)))
    lane = rematerialize(2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout)))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = (8 * i[None, :, None, None] + k[None, None, None, :]).to(gl.float32)
    all_ahead = behind >= COLUMNS - 1
    turned = gl.where(all_ahead, 2 * lane - offs_n[:, None], offs_n[:, None]).to(gl.float32)
    of_rows = gl.reshape(gl.expand_dims(lse, 0).broadcast_to([ROWS, COLUMNS]), [ROWS, COLUMNS // 8, 4, 2])
    x = x * a.scale_log2 + ((slope * turned)[:, None, :, None] - gl.convert_layout(of_rows, x_layout))
    if all_ahead:
        x += 2 * slope * column
    elif behind + ROWS > 1:
        ahead = (offs_n[:, None] - lane).to(gl.float32)[:, None, :, None] - column
        x -= 2 * slope * gl.maximum(ahead, 0.0)
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def unpack_wide(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``pack`` to fp32."""
    if dtype == gl.bfloat16:
        low = (packed << 16).to(gl.float32, bitcast=True)
        high = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        low = packed.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2]), layout)
