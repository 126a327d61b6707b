"""Gradients of the experts (Triton, sm_80 and newer): the activation's, the weights', and the routing's.

Let dA = w_down.T @ dO for the token of a pair, unweighted. The gradient of the routing weight is <dA, h> + <dO, bias>,
so the output of the second product need not be saved. h is recomputed from the first product, which is saved besides
x. Rows are sorted by expert, as in the forward pass. Every sum has a fixed order, so gradients are bitwise equal from
run to run. The gradient of x is a product of ``grouped_triton`` with w_gate_up transposed, then the sum of
``combine_triton``.

Source: SonicMoE (2025) for the gradient of the routing weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import (
    activate,
    activation_slopes,
    multiply,
    rows_inside,
    rows_of_tile,
    rows_of_weights,
    tile_of_program,
    wide_enough,
)


@triton.jit
def _dot_bias(do_rows, bias_row, mask_m, STRIDE_DK: tl.constexpr, HID: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return <dO, bias> of each row [M]."""
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, HID, N):
        k = start + tl.arange(0, N)
        do = tl.load(do_rows[:, None] + k[None, :] * STRIDE_DK, mask=mask_m[:, None] & (k < HID)[None, :], other=0.0)
        bias = tl.load(bias_row + k, mask=k < HID, other=0.0)
        acc += do.to(tl.float32) * bias.to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _columns_backward(
    da, product_ptr, dproduct_ptr, wh_ptr, row, mask_m, weight, first_column, wh_column,
    INTER: tl.constexpr, COLUMNS: tl.constexpr, WH_COLUMNS: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Store the gradients of N columns of dA; return <dA, h> of each row.

    N is small, as gate, up and their gradients need more registers than the accumulators. Interleaved columns are
    adjacent, so half as many span the same bytes of a row.
    """
    if (2 * N if ACT.INTERLEAVED else N) > 32:
        HALF: tl.constexpr = N // 2
        left, right = tl.split(tl.permute(tl.reshape(da, [M, 2, HALF]), (0, 2, 1)))
        sums = _columns_backward(
            left, product_ptr, dproduct_ptr, wh_ptr, row, mask_m, weight, first_column, wh_column,
            INTER, COLUMNS, WH_COLUMNS, ACT, M, HALF,
        )  # fmt: skip
        sums += _columns_backward(
            right, product_ptr, dproduct_ptr, wh_ptr, row, mask_m, weight, first_column + HALF, wh_column + HALF,
            INTER, COLUMNS, WH_COLUMNS, ACT, M, HALF,
        )  # fmt: skip
    else:
        offs_n = first_column + tl.arange(0, N)
        mask = mask_m[:, None] & (offs_n < INTER)[None, :]
        rows = row.to(tl.int64)[:, None] * COLUMNS
        kind = dproduct_ptr.dtype.element_ty
        if ACT.INTERLEAVED:
            columns = 2 * first_column + tl.arange(0, 2 * N)
            mask_both = mask_m[:, None] & (columns < COLUMNS)[None, :]
            both = tl.load(product_ptr + rows + columns[None, :], mask=mask_both, other=0.0)
            gate, up = tl.split(tl.reshape(both, [M, N, 2]))
        else:
            gate = tl.load(product_ptr + rows + offs_n[None, :], mask=mask, other=0.0)
            up = gate
            if ACT.GATED:
                up = tl.load(product_ptr + rows + INTER + offs_n[None, :], mask=mask, other=0.0)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        h = activate(gate, up, ACT)
        sums = tl.sum(tl.where(mask, da * h, 0.0), 1)
        if wh_ptr is not None:
            wh = (weight[:, None] * h).to(kind)
            wh_at = wh_ptr + row.to(tl.int64)[:, None] * WH_COLUMNS + (wh_column + tl.arange(0, N))[None, :]
            tl.store(wh_at, wh, mask=mask)
        by_gate, by_up = activation_slopes(gate, up, ACT)
        da *= weight[:, None]
        # dproduct may alias product, and another thread may have loaded an element that this one stores.
        tl.debug_barrier()
        if ACT.INTERLEAVED:
            both = tl.reshape(tl.join((da * by_gate).to(kind), (da * by_up).to(kind)), [M, 2 * N])
            tl.store(dproduct_ptr + rows + columns[None, :], both, mask=mask_both)
        elif ACT.GATED:
            tl.store(dproduct_ptr + rows + offs_n[None, :], (da * by_gate).to(kind), mask=mask)
            tl.store(dproduct_ptr + rows + INTER + offs_n[None, :], (da * by_up).to(kind), mask=mask)
        else:
            tl.store(dproduct_ptr + rows + offs_n[None, :], (da * by_up).to(kind), mask=mask)
    return sums


@triton.jit
def _activation_backward_kernel(
    do_ptr,  # [T, HID]
    w_ptr,  # [E, HID, INTER]
    bias_ptr,  # [E, HID], or None
    weights_ptr,  # [T, K]
    product_ptr,  # [P, COLUMNS]
    tiles_ptr,  # [1 + tiles, 4] int32
    order_ptr,  # [P] int32
    dproduct_ptr,  # [P, COLUMNS]; may be product_ptr: only one program reads and overwrites each element
    wh_ptr,  # [P, WH_COLUMNS]: activation times routing weight, the columns of this launch; or None
    sums_ptr,  # [P, column tiles] fp32: <dA, h> of each column tile, or None
    first_tile,  # of this launch's columns
    TOPK: tl.constexpr, HID: tl.constexpr, INTER: tl.constexpr, COLUMNS: tl.constexpr, WH_COLUMNS: tl.constexpr,
    W: tl.constexpr,  # WeightStrides: the product sums over HID, and so over N
    ACT: tl.constexpr,  # Activation
    TILE: tl.constexpr,  # ProductTile
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of dA and the gradients that follow. Grid: (row tiles * cdiv(WH_COLUMNS, BLOCK_N),)."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    TILES_N: tl.constexpr = (WH_COLUMNS + BLOCK_N - 1) // BLOCK_N
    SUMS: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    tiles = tl.load(tiles_ptr)
    if pid >= tiles * TILES_N:
        return
    pid_m, pid_n = tile_of_program(pid, tiles, TILES_N, TILE.GROUP_M)
    wh_column = pid_n * BLOCK_N
    pid_n += first_tile
    expert, row, mask_m, _token = rows_of_tile(tiles_ptr, None, pid_m, "sorted", BLOCK_M)
    pair = tl.load(order_ptr + row, mask=mask_m, other=0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = offs_n
    if INTER % BLOCK_N != 0:
        w_row = rows_inside(offs_n, INTER, W.K)
    do_rows = do_ptr + (pair // TOPK).to(tl.int64) * HID
    da = multiply(
        do_rows, rows_of_weights(w_ptr, expert, w_row, INTER, W.E, W.K),
        mask_m, 1, W.N, HID, BLOCK_M, BLOCK_N, TILE,
    )  # fmt: skip
    weight = tl.load(weights_ptr + pair, mask=mask_m, other=0.0).to(tl.float32)
    sums = _columns_backward(
        da, product_ptr, dproduct_ptr, wh_ptr, row, mask_m, weight, pid_n * BLOCK_N, wh_column,
        INTER, COLUMNS, WH_COLUMNS, ACT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if sums_ptr is not None:
        if bias_ptr is not None:  # noqa: SIM102 - the outer condition is constexpr
            if pid_n == 0:
                sums += _dot_bias(do_rows, bias_ptr + expert.to(tl.int64) * HID, mask_m, 1, HID, BLOCK_M, 32)
        tl.store(sums_ptr + row.to(tl.int64) * SUMS + pid_n, sums, mask=mask_m)


@triton.jit
def _weight_gradient_kernel(
    a_ptr,  # [P, M], or with GATHER_A [T, M]
    b_ptr,  # [P, N], or with GATHER_B [T, N]
    order_ptr,  # [P] int32
    offsets_ptr,  # [E + 5] int32
    out_ptr,  # [E, M, N], rows STRIDE_OUT apart
    TOPK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STRIDE_A: tl.constexpr, STRIDE_AM: tl.constexpr, STRIDE_B: tl.constexpr, STRIDE_BN: tl.constexpr,
    STRIDE_OUT: tl.constexpr,  # N, or more if N is a slice of the columns
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    TILE: tl.constexpr,  # ProductTile
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Sum the outer products of one expert's rows. Grid: (tiles of M * tiles of N, E)."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    TILES_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(1)
    pid_m, pid_n = tile_of_program(tl.program_id(0), TILES_M, TILES_N, TILE.GROUP_M)
    first, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    offs_m, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    a_columns = wide_enough(offs_m, M, STRIDE_AM) * STRIDE_AM
    b_columns = wide_enough(offs_n, N, STRIDE_BN) * STRIDE_BN
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, end, TILE.BLOCK_K, num_stages=TILE.NUM_STAGES):
        row = start + tl.arange(0, TILE.BLOCK_K)
        inside = row < end
        pair = row
        if GATHER_A or GATHER_B:
            pair = tl.load(order_ptr + row, mask=inside, other=0)
        a_row = (pair // TOPK if GATHER_A else row).to(tl.int64)
        b_row = (pair // TOPK if GATHER_B else row).to(tl.int64)
        a_at = a_ptr + a_row[:, None] * STRIDE_A + a_columns[None, :]
        b_at = b_ptr + b_row[:, None] * STRIDE_B + b_columns[None, :]
        a = tl.load(a_at, mask=inside[:, None] & mask_m[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
        b = tl.load(b_at, mask=inside[:, None] & mask_n[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(tl.trans(a), b, acc, input_precision=TILE.PRECISION)
    kind = out_ptr.dtype.element_ty
    base = out_ptr + expert.to(tl.int64) * M * STRIDE_OUT
    at = base + offs_m.to(tl.int64)[:, None] * STRIDE_OUT + offs_n[None, :]
    tl.store(at, acc.to(kind), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _bias_gradient_kernel(
    rows_ptr,  # [P, N], or with GATHER [T, N]
    weights_ptr,  # [T, K]: weights of rows; None: all are 1
    order_ptr,  # [P] int32
    offsets_ptr,  # [E + 5] int32
    out_ptr,  # [E, N]
    TOPK: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Sum one expert's rows. Grid: (tiles of N, E)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in tl.range(first, end, BLOCK_P, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_P)
        inside = row < end
        pair = row
        if GATHER or weights_ptr is not None:
            pair = tl.load(order_ptr + row, mask=inside, other=0)
        at = rows_ptr + (pair // TOPK if GATHER else row).to(tl.int64)[:, None] * N + offs_n[None, :]
        found = tl.load(at, mask=inside[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        if weights_ptr is not None:
            found *= tl.load(weights_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += found
    tl.store(out_ptr + expert.to(tl.int64) * N + offs_n, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def _routing_gradient_kernel(
    sums_ptr,  # [P, COUNT] fp32
    positions_ptr,  # [P] int32
    out_ptr,  # [T, K]
    pairs,
    COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Sum the column tiles of each pair; 0 for a pair without an expert. Grid: (cdiv(P, BLOCK_P),)."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_C)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(positions_ptr + pair, mask=pair < pairs, other=-1)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in tl.range(0, COUNT, BLOCK_C):
        at = sums_ptr + row.to(tl.int64)[:, None] * COUNT + start + column[None, :]
        total += tl.load(at, mask=(row >= 0)[:, None] & (start + column < COUNT)[None, :], other=0.0)
    tl.store(out_ptr + pair, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=pair < pairs)
