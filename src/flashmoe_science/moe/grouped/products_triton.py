"""Both products of the experts, over tiles of rows of one expert (Triton, sm_80 and newer).

The first gathers its rows of x and applies the activation before it stores; the second stores its rows in order, and
``combine_triton`` gathers and sums them. Each row is a pair of a token and an expert. The reduction of a row has one
order in every tile, so results are bitwise equal from run to run.

The rows of a program (ROWS):
- "sorted": a tile of the table that ``sort_triton`` writes, for many pairs;
- "few": all pairs of one expert, which the program finds without a sort;
- "all": a tile of all tokens, for shared experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import (
    activate,
    expert_of_ids,
    multiply,
    rows_inside,
    rows_of_columns,
    rows_of_tile,
    rows_of_weights,
    tile_of_program,
)


@triton.jit
def _gate_up_tile(
    x_ptr, w_ptr, bias_ptr, product_ptr, h_ptr, expert, token, row, mask_m, pid_n,
    HID: tl.constexpr, INTER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_XT: tl.constexpr, STRIDE_XK: tl.constexpr,
    W: tl.constexpr, ACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of h for rows of one expert."""
    # Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    PRODUCT_N: tl.constexpr = 2 * BLOCK_N if ACT.GATED else BLOCK_N
    columns = pid_n * PRODUCT_N + tl.arange(0, PRODUCT_N)
    if COLUMNS % PRODUCT_N != 0:
        columns = tl.where(columns < COLUMNS, columns, 0)
    w_row = rows_of_columns(columns, COLUMNS, ACT)
    acc = multiply(
        x_ptr + token.to(tl.int64) * STRIDE_XT, rows_of_weights(w_ptr, expert, w_row, COLUMNS, W.E, W.N),
        mask_m, STRIDE_XK, W.K, HID, BLOCK_M, PRODUCT_N, TILE,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * COLUMNS + w_row).to(tl.float32)[None, :]
    if ACT.GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    else:
        gate, up = acc, acc
    h = activate(gate, up, ACT)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = mask_m[:, None]
    if INTER % BLOCK_N != 0:
        mask = mask & (offs_n[None, :] < INTER)
    if product_ptr is not None:
        kind = product_ptr.dtype.element_ty
        if ACT.GATED and not ACT.INTERLEAVED:
            at = product_ptr + row.to(tl.int64)[:, None] * COLUMNS + offs_n[None, :]
            tl.store(at, gate.to(kind), mask=mask)
            tl.store(at + INTER, up.to(kind), mask=mask)
        else:
            offs_c = pid_n * PRODUCT_N + tl.arange(0, PRODUCT_N)
            at = product_ptr + row.to(tl.int64)[:, None] * COLUMNS + offs_c[None, :]
            tl.store(at, acc.to(kind), mask=mask_m[:, None] & (offs_c[None, :] < COLUMNS))
    tl.store(h_ptr + row.to(tl.int64)[:, None] * INTER + offs_n[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down_tile(
    h_ptr, w_ptr, bias_ptr, y_ptr, expert, row, mask_m, pid_n,
    HID: tl.constexpr, INTER: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of y for rows of one expert."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = offs_n
    if HID % BLOCK_N != 0:
        w_row = rows_inside(offs_n, HID, W.N)
    acc = multiply(
        h_ptr + row.to(tl.int64) * INTER, rows_of_weights(w_ptr, expert, w_row, HID, W.E, W.N),
        mask_m, 1, W.K, INTER, TILE.BLOCK_M, BLOCK_N, TILE,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * HID + w_row).to(tl.float32)[None, :]
    mask = mask_m[:, None]
    if HID % BLOCK_N != 0:
        mask = mask & (offs_n[None, :] < HID)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * HID + offs_n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_expert(
    ids_ptr, slot, pairs, EXPERTS: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Return an expert, the rank of each pair among its pairs [BLOCK_P] (-1: another expert's), and their count.

    BY_EXPERT: the expert is ``slot``. Otherwise it is that of pair ``slot``, with count 0 if an earlier pair has it.
    """
    offs = tl.arange(0, BLOCK_P)
    ids = expert_of_ids(tl.load(ids_ptr + offs, mask=offs < pairs, other=-1), EXPERTS)
    if BY_EXPERT:
        expert = slot
        wanted = slot >= 0
    else:
        expert = expert_of_ids(tl.load(ids_ptr + slot), EXPERTS)
        earlier = tl.sum(((ids == expert) & (offs < slot)).to(tl.int32), 0)
        wanted = (earlier == 0) & (expert < EXPERTS)
    mine = (ids == expert) & wanted
    number = tl.where(mine, tl.cumsum(mine.to(tl.int32), 0) - 1, -1)
    return expert, number, tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _pairs_of_rows(number, first, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the pairs [BLOCK_M] of ranks from ``first`` on; 0 for missing ones."""
    wanted = first + tl.arange(0, BLOCK_M)
    pairs = tl.arange(0, BLOCK_P)
    return tl.sum(tl.where(number[None, :] == wanted[:, None], pairs[None, :], 0), 1)


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, HID]
    w_ptr,  # [E, COLUMNS, HID]
    bias_ptr,  # [E, COLUMNS], or None
    ids_ptr,  # [T, K]: "few"
    tiles_ptr,  # [1 + tiles, 4] int32: "sorted"
    order_ptr,  # [P] int32: "sorted"
    product_ptr,  # [P, COLUMNS]: the first product, which gradients need; or None
    h_ptr,  # [P, INTER]: rows sorted, or in the order of pairs; "all": [E, T, INTER]
    tokens,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, HID: tl.constexpr, INTER: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE_XT: tl.constexpr, STRIDE_XK: tl.constexpr,
    W: tl.constexpr,  # WeightStrides
    ACT: tl.constexpr,  # Activation
    ROWS: tl.constexpr,  # "sorted", "few" or "all"
    BY_EXPERT: tl.constexpr, BLOCK_P: tl.constexpr,  # "few": as ``_find_expert`` takes them
    TILE: tl.constexpr,  # ProductTile
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of h = activation(x @ w.T + bias). Grid: (row tiles, or slots, * cdiv(INTER, BLOCK_N),)."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    TILES_N: tl.constexpr = (INTER + TILE.BLOCK_N - 1) // TILE.BLOCK_N
    pid = tl.program_id(0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if ROWS == "few":
        expert, number, count = _find_expert(ids_ptr, pid // TILES_N, tokens * TOPK, EXPERTS, BY_EXPERT, BLOCK_P)
        for first in tl.range(0, count, BLOCK_M):
            pair = _pairs_of_rows(number, first, BLOCK_M, BLOCK_P)
            _gate_up_tile(
                x_ptr, w_ptr, bias_ptr, product_ptr, h_ptr, expert, pair // TOPK, pair,
                first + tl.arange(0, BLOCK_M) < count, pid % TILES_N,
                HID, INTER, COLUMNS, STRIDE_XT, STRIDE_XK, W, ACT, TILE,
            )  # fmt: skip
        return
    if ROWS == "sorted":
        tiles = tl.load(tiles_ptr)
    else:
        tiles = tl.cdiv(tokens, BLOCK_M) * EXPERTS
    if pid >= tiles * TILES_N:
        return
    pid_m, pid_n = tile_of_program(pid, tiles, TILES_N, TILE.GROUP_M)
    expert, row, mask_m, token = rows_of_tile(tiles_ptr, tokens, pid_m, ROWS, BLOCK_M)
    if ROWS == "sorted":
        token = tl.load(order_ptr + row, mask=mask_m, other=0) // TOPK
    _gate_up_tile(
        x_ptr, w_ptr, bias_ptr, product_ptr, h_ptr, expert, token, row, mask_m, pid_n,
        HID, INTER, COLUMNS, STRIDE_XT, STRIDE_XK, W, ACT, TILE,
    )  # fmt: skip


@triton.jit
def _down_kernel(
    h_ptr,  # [P, INTER], as _gate_up_kernel wrote it
    w_ptr,  # [E, HID, INTER]
    bias_ptr,  # [E, HID], or None
    ids_ptr,  # [T, K]: "few"
    tiles_ptr,  # [1 + tiles, 4] int32: "sorted"
    y_ptr,  # [P, HID], rows as those of h
    tokens,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, HID: tl.constexpr, INTER: tl.constexpr,
    W: tl.constexpr,  # as in ``_gate_up_kernel``, like all below
    ROWS: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y = h @ w.T + bias. Grid: (row tiles, or slots, * cdiv(HID, BLOCK_N),)."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    TILES_N: tl.constexpr = (HID + TILE.BLOCK_N - 1) // TILE.BLOCK_N
    pid = tl.program_id(0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if ROWS == "few":
        expert, number, count = _find_expert(ids_ptr, pid // TILES_N, tokens * TOPK, EXPERTS, BY_EXPERT, BLOCK_P)
        for first in tl.range(0, count, BLOCK_M):
            pair = _pairs_of_rows(number, first, BLOCK_M, BLOCK_P)
            _down_tile(
                h_ptr, w_ptr, bias_ptr, y_ptr, expert, pair, first + tl.arange(0, BLOCK_M) < count, pid % TILES_N,
                HID, INTER, W, TILE,
            )  # fmt: skip
        return
    if ROWS == "sorted":
        tiles = tl.load(tiles_ptr)
    else:
        tiles = tl.cdiv(tokens, BLOCK_M) * EXPERTS
    if pid >= tiles * TILES_N:
        return
    pid_m, pid_n = tile_of_program(pid, tiles, TILES_N, TILE.GROUP_M)
    expert, row, mask_m, _token = rows_of_tile(tiles_ptr, tokens, pid_m, ROWS, BLOCK_M)
    _down_tile(h_ptr, w_ptr, bias_ptr, y_ptr, expert, row, mask_m, pid_n, HID, INTER, W, TILE)
