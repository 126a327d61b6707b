"""Device helpers that more than one kernel of the experts uses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu(x, IS_TANH: tl.constexpr):
    """Return x * Phi(x), by erf or by the usual tanh: 0.5 * (1 + tanh(u)) is a sigmoid of 2 * u."""
    if IS_TANH:
        y = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Return the ``Activation`` in fp32; without a gate, ``gate`` and ``up`` are the same."""
    if ACT.KIND == "swiglu":
        h = gate / (1 + tl.exp(-gate)) * up
    elif ACT.KIND == "swiglu_clamped":
        # NaN stays NaN this way; minimum and maximum do not guarantee that.
        gate = tl.where(gate > ACT.LIMIT, ACT.LIMIT, gate)
        up = tl.where(up > ACT.LIMIT, ACT.LIMIT, up)
        up = tl.where(up < -ACT.LIMIT, -ACT.LIMIT, up)
        h = (up + 1) * (gate / (1 + tl.exp(-ACT.ALPHA * gate)))
    elif ACT.KIND == "geglu" or ACT.KIND == "geglu_tanh":  # noqa: PLR1714 - Triton knows no sets
        h = _gelu(gate, ACT.KIND == "geglu_tanh") * up
    elif ACT.KIND == "relu2":
        positive = tl.where(up < 0, 0.0, up)
        h = positive * positive
    elif ACT.KIND == "silu":
        h = up / (1 + tl.exp(-up))
    else:
        tl.static_assert(ACT.KIND == "gelu" or ACT.KIND == "gelu_tanh")  # noqa: PLR1714 - as above
        h = _gelu(up, ACT.KIND == "gelu_tanh")
    return h


@triton.jit
def rows_of_columns(columns, COLUMNS: tl.constexpr, ACT: tl.constexpr):
    """Return the rows of ``w_gate_up`` for ``columns`` of a product in which gate and up alternate.

    One thread then holds both in adjacent registers, whatever the layout of the weights.
    """
    if ACT.GATED and not ACT.INTERLEAVED:
        return columns // 2 + columns % 2 * (COLUMNS // 2)
    return columns


@triton.jit
def expert_of_ids(ids, EXPERTS: tl.constexpr):
    """Return ids as int32; EXPERTS replaces an invalid id, which contributes nothing."""
    return tl.where((ids >= 0) & (ids < EXPERTS), ids, EXPERTS).to(tl.int32)


@triton.jit
def tile_of_program(
    pid, tiles, TILES_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Return row and column tile; GROUP_M row tiles are visited together, so that their operands stay in L2."""
    group = pid // (GROUP_M * TILES_N)
    first = group * GROUP_M
    size = tl.minimum(tiles - first, GROUP_M)
    rest = pid - group * (GROUP_M * TILES_N)
    return first + rest % size, rest // size


@triton.jit
def rows_of_tile(tiles_ptr, tokens, pid_m, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a row tile, its rows, whether they exist, and the tokens of rows that are not sorted."""
    if ROWS == "sorted":
        entry = tiles_ptr + 4 + 4 * pid_m
        expert = tl.load(entry)
        row = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
        mask_m = row < tl.load(entry + 2)
        token = row
    else:
        tiles_m = tl.cdiv(tokens, BLOCK_M)
        expert = pid_m // tiles_m
        token = pid_m % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = token < tokens
        row = expert * tokens + token
    return expert, row, mask_m, token


@triton.jit
def wide_enough(places, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Return ``places`` on an axis of SIZE elements, in 64 bits if SIZE * STRIDE can pass 2**31."""
    if SIZE * STRIDE >= 2**31:
        places = places.to(tl.int64)
    return places


@triton.jit
def multiply(
    a_rows, b_rows, mask_m, STRIDE_AK: tl.constexpr, STRIDE_BK: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the product [M, N] in fp32 of rows ``a_rows`` [M] and ``b_rows`` [N], given as pointers to their starts.

    TILE is a ``ProductTile``, of which N may be another: gate and up are two columns.
    """
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows[:, None] + wide_enough(offs_k, BLOCK_K, STRIDE_AK)[None, :] * STRIDE_AK
    b_ptrs = b_rows[:, None] + wide_enough(offs_k, BLOCK_K, STRIDE_BK)[None, :] * STRIDE_BK
    acc = tl.zeros([N, M] if TILE.SWAP else [M, N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=TILE.NUM_STAGES):
        if K % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=mask_m[:, None], other=0.0)
            b = tl.load(b_ptrs)
        else:
            mask_k = offs_k < K - start
            a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_k[None, :], other=0.0)
        if TILE.SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=TILE.PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=TILE.PRECISION)
        a_ptrs += BLOCK_K * STRIDE_AK
        b_ptrs += BLOCK_K * STRIDE_BK
    if TILE.SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def rows_inside(rows, ROWS_TOTAL: tl.constexpr, STRIDE_N: tl.constexpr):
    """Return ``rows`` with valid ones in place of those past the last, whose results are not stored."""
    if STRIDE_N == 1:  # contiguous rows stay contiguous, for vector loads
        found = rows % ROWS_TOTAL
    else:  # one row for all, to read little
        found = tl.where(rows < ROWS_TOTAL, rows, 0)
    return found


@triton.jit
def rows_of_weights(w_ptr, expert, rows, ROWS_TOTAL: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr):
    """Return pointers to rows of one expert's weights; see ``rows_inside`` for rows past the last."""
    base = w_ptr + expert.to(tl.int64) * STRIDE_E
    return base + wide_enough(rows, ROWS_TOTAL, STRIDE_N) * STRIDE_N


@triton.jit
def _gelu_slope(x, IS_TANH: tl.constexpr):
    """Return the derivative of ``_gelu``."""
    if IS_TANH:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s, rest = 1 / (1 + tl.exp(-u)), 1 / (1 + tl.exp(u))  # 1 - s without cancellation
        y = s + x * s * rest * (1.5957691216057308 + 0.21406444881780076 * x * x)
    else:
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        y = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return y


@triton.jit
def activation_slopes(gate, up, ACT: tl.constexpr):
    """Return the derivatives of ``activate`` by ``gate`` and by ``up``; without a gate both are the same."""
    if ACT.KIND == "swiglu":
        s = 1 / (1 + tl.exp(-gate))
        by_gate = up * s * (1 + gate * (1 - s))
        by_up = gate * s
    elif ACT.KIND == "swiglu_clamped":
        g = tl.where(gate > ACT.LIMIT, ACT.LIMIT, gate)
        u = tl.where(up > ACT.LIMIT, ACT.LIMIT, up)
        u = tl.where(u < -ACT.LIMIT, -ACT.LIMIT, u)
        s = 1 / (1 + tl.exp(-ACT.ALPHA * g))
        by_gate = tl.where(gate > ACT.LIMIT, 0.0, (u + 1) * s * (1 + ACT.ALPHA * g * (1 - s)))
        by_up = tl.where((up > ACT.LIMIT) | (up < -ACT.LIMIT), 0.0, g * s)
    elif ACT.KIND == "geglu" or ACT.KIND == "geglu_tanh":  # noqa: PLR1714 - Triton knows no sets
        by_gate = _gelu_slope(gate, ACT.KIND == "geglu_tanh") * up
        by_up = _gelu(gate, ACT.KIND == "geglu_tanh")
    elif ACT.KIND == "relu2":
        by_up = 2 * tl.where(up < 0, 0.0, up)
        by_gate = by_up
    elif ACT.KIND == "silu":
        s = 1 / (1 + tl.exp(-up))
        by_up = s * (1 + up * (1 - s))
        by_gate = by_up
    else:
        tl.static_assert(ACT.KIND == "gelu" or ACT.KIND == "gelu_tanh")  # noqa: PLR1714 - as above
        by_up = _gelu_slope(up, ACT.KIND == "gelu_tanh")
        by_gate = by_up
    return by_gate, by_up
