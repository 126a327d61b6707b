"""Attention backward (Triton, sm_80 and newer), without atomics: the gradients of q and of an additive bias.

See ``backward_triton`` for the formulas, and for why every gradient has a kernel of its own. A tile of queries walks
over the keys that it sees, a tile of the bias over the sequences and heads for which it is broadcast.

Source: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernel_arguments import BackwardInputs, BiasSizes, BiasStrides, Dropout, QuerySizes, Sequences, Strides, Window
from ..primitives import bias_rows_of, head_offset, kept_by, load_dropout, load_rows, used_lengths
from .primitives import add_product, empty_sum, load_lse, weigh


@triton.jit
def _key_range(first_row, seqlen_k, diagonal, window, CALL: tl.constexpr, TILE: tl.constexpr):
    """Return the keys that a tile of rows sees: begin, inside, unmasked, end.

    Tiles before ``inside`` cross the left bound; from ``unmasked`` on, they cross the right bound or the last key.
    """
    begin = 0
    end = seqlen_k
    if CALL.BOUND_RIGHT:
        end = tl.maximum(tl.minimum(seqlen_k, first_row + TILE.BLOCK_M + (diagonal + window.right)), 0)
    if CALL.BOUND_LEFT:
        begin = tl.maximum(first_row + diagonal - window.left, 0) // TILE.BLOCK_N * TILE.BLOCK_N
    unmasked = end // TILE.BLOCK_N * TILE.BLOCK_N
    if CALL.BOUND_RIGHT:
        first_end = tl.maximum(first_row + (diagonal + window.right) + 1, 0)  # of row first_row
        unmasked = tl.minimum(unmasked, first_end // TILE.BLOCK_N * TILE.BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)
    inside = begin
    if CALL.BOUND_LEFT:
        last_begin = tl.maximum(first_row + (TILE.BLOCK_M - 1) + diagonal - window.left, 0)  # of the tile's last row
        inside = tl.maximum(tl.cdiv(last_begin, TILE.BLOCK_N) * TILE.BLOCK_N, begin)
        unmasked = tl.maximum(unmasked, inside)
    return begin, inside, unmasked, end


@triton.jit
def _add_keys(
    dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, rows, offs_n, offs_d, offs_dv, seqlen_k, diagonal,
    window, scale, softcap, slope, draws, k_strides, v_strides, bias_strides,
    CALL: tl.constexpr, MASK_N: tl.constexpr, MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradient of a tile of queries."""
    PRECISION: tl.constexpr = CALL.PRECISION  # Triton 3.6 hands on names of constants, not fields of groups
    step = tl.full([], 0, tl.int64) + start_n
    cols = start_n + offs_n
    k = load_rows(
        k_ptrs + step * k_strides.ROW, cols, seqlen_k, offs_d, CALL.D, MASK_N, CALL.D != CALL.BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=CALL.PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    bias_ptrs = None
    if bias_rows is not None:
        if MASK_N:
            bias_cols = tl.minimum(cols, seqlen_k - 1).to(tl.int64) * bias_strides.COLUMN
            bias_ptrs = bias_rows[:, None] + bias_cols[None, :]
        else:
            bias_ptrs = bias_rows[:, None] + step * bias_strides.COLUMN + offs_n[None, :] * bias_strides.COLUMN
    p, cap = weigh(
        s, rows[:, None], cols[None, :], lse[:, None], bias_ptrs, seqlen_k, diagonal, window,
        softcap, slope, MASK_N, MASK_LEFT, MASK_RIGHT, CALL.PRECISION == "ieee",
    )  # fmt: skip
    v = load_rows(
        v_ptrs + step * v_strides.ROW, cols, seqlen_k, offs_dv, CALL.DV, MASK_N, CALL.DV != CALL.BLOCK_DV
    )  # [BLOCK_N, BLOCK_DV]
    dp = tl.dot(do, tl.trans(v), input_precision=CALL.PRECISION)  # [BLOCK_M, BLOCK_N]
    if draws is not None:
        dp = tl.where(kept_by(draws, rows, start_n, offs_n.shape[0]), dp * draws[4], 0.0)
    ds = p * (dp - delta[:, None])
    if softcap is not None:
        ds *= cap
    return add_product(dq, ds.to(k.dtype), k, PRECISION)


@triton.jit
def _backward_q_kernel(
    inputs: BackwardInputs,  # as in _backward_kv_kernel, like all below
    dq_ptr,  # [B, H, Sq, D]
    alibi_ptr, bias_ptr, sequences: Sequences, dropout_seed_ptr,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, do_strides: Strides,
    dq_strides: Strides,  # in units of ALIGN_OUT elements
    sizes: QuerySizes, scale, grad_scale, window: Window, softcap, bias_strides: BiasStrides, dropout: Dropout,
    CALL: tl.constexpr,  # BackwardCall
    TILE: tl.constexpr,  # BackwardTile
):  # fmt: skip
    """Write dQ of BLOCK_M rows of one head. Grid: (tiles_m * B * H,)."""
    UNIT: tl.constexpr = 1.4426950408889634 if bias_ptr is None else 1.0
    PRECISION: tl.constexpr = CALL.PRECISION
    q_ptr, k_ptr, v_ptr, do_ptr = inputs.q_ptr, inputs.k_ptr, inputs.v_ptr, inputs.do_ptr
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile = pid % sizes.tiles_m
    b, h = (pid // sizes.tiles_m) // sizes.heads, (pid // sizes.tiles_m) % sizes.heads
    if CALL.BOUND_RIGHT:
        tile = sizes.tiles_m - 1 - tile  # the longest rows first

    first_row = tile * TILE.BLOCK_M
    if sequences.cu_seqlens_q_ptr is not None:
        start_q, start_k = tl.load(sequences.cu_seqlens_q_ptr + b), tl.load(sequences.cu_seqlens_k_ptr + b)
        place_q = tl.load(sequences.cu_seqlens_q_ptr + b + 1) - start_q
        if first_row >= place_q:
            return
        longest_q, longest_k = seqlen_q, seqlen_k  # that a bias has rows and columns for, whatever lengths say
        seqlen_q, seqlen_k = place_q, tl.load(sequences.cu_seqlens_k_ptr + b + 1) - start_k
        seqlen_q, seqlen_k = used_lengths(sequences, b, seqlen_q, seqlen_k)
        q_ptr += start_q.to(tl.int64) * q_strides.ROW
        k_ptr += start_k.to(tl.int64) * k_strides.ROW
        v_ptr += start_k.to(tl.int64) * v_strides.ROW
        do_ptr += start_q.to(tl.int64) * do_strides.ROW
        dq_ptr += start_q.to(tl.int64) * dq_strides.ROW
        lse_at, step_lse = start_q.to(tl.int64) * sizes.heads + h, sizes.heads
    else:
        place_q, longest_q = seqlen_q, None
        lse_at, step_lse = (b * sizes.heads + h).to(tl.int64) * seqlen_q, 1

    offs_m = first_row + tl.arange(0, TILE.BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_N), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    rows, key_rows = tl.arange(0, TILE.BLOCK_M), offs_n
    if TILE.WIDE:
        rows, key_rows = rows.to(tl.int64), key_rows.to(tl.int64)
        offs_d, offs_dv = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    start = first_row.to(tl.int64)
    q_base = q_ptr + head_offset(b, h, q_strides.b, q_strides.h) * CALL.ALIGN + start * q_strides.ROW
    do_base = do_ptr + head_offset(b, h, do_strides.b, do_strides.h) * CALL.ALIGN + start * do_strides.ROW
    k_base = k_ptr + head_offset(b, h // CALL.GROUP, k_strides.b, k_strides.h) * CALL.ALIGN
    v_base = v_ptr + head_offset(b, h // CALL.GROUP, v_strides.b, v_strides.h) * CALL.ALIGN
    k_ptrs = k_base + key_rows[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_base + key_rows[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    q_ptrs = q_base + rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
    do_ptrs = do_base + rows[:, None] * do_strides.ROW + offs_dv[None, :] * do_strides.COLUMN
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_ptrs, offs_m, seqlen_q, offs_dv, CALL.DV, True, CALL.DV != CALL.BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    lse = load_lse(inputs.lse_ptr + lse_at + offs_m.to(tl.int64) * step_lse, offs_m < seqlen_q, UNIT)
    delta = tl.load(inputs.delta_ptr + lse_at + offs_m.to(tl.int64) * step_lse, mask=offs_m < seqlen_q, other=0.0)
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b.to(tl.int64) * CALL.STRIDE_ALIBI_B + h).to(tl.float32) * UNIT
    bias_rows = bias_rows_of(bias_ptr, b, h, offs_m, seqlen_q, longest_q, bias_strides, CALL.ALIGN_BIAS)
    draws = None
    if dropout_seed_ptr is not None:
        draws = load_dropout(dropout_seed_ptr, b * sizes.heads + h, dropout.last, dropout.scale)

    diagonal = seqlen_k - seqlen_q
    if sequences.cu_seqlens_q_ptr is not None and bias_ptr is not None:
        seqlen_k = tl.minimum(seqlen_k, longest_k)
    begin, inside, unmasked, end = _key_range(first_row, seqlen_k, diagonal, window, CALL, TILE)
    if sequences.seqused_q_ptr is not None:
        end = tl.where(first_row < seqlen_q, end, 0)
        inside, unmasked = tl.minimum(inside, end), tl.minimum(unmasked, end)

    dq = empty_sum(TILE.BLOCK_M, CALL.BLOCK_D, PRECISION)
    if CALL.BOUND_LEFT:
        for start_n in tl.range(begin, tl.minimum(inside, end), TILE.BLOCK_N, num_stages=1):
            dq = _add_keys(
                dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
                diagonal, window, scale, softcap, slope, draws, k_strides, v_strides, bias_strides,
                CALL, True, True, CALL.BOUND_RIGHT,
            )  # fmt: skip
    for start_n in tl.range(inside, unmasked, TILE.BLOCK_N, num_stages=TILE.NUM_STAGES):
        dq = _add_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window, scale, softcap, slope, draws, k_strides, v_strides, bias_strides,
            CALL, False, False, False,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, TILE.BLOCK_N, num_stages=1):
        dq = _add_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window, scale, softcap, slope, draws, k_strides, v_strides, bias_strides,
            CALL, True, False, CALL.BOUND_RIGHT,
        )  # fmt: skip

    dq = dq[0] * grad_scale
    dq_base = dq_ptr + head_offset(b, h, dq_strides.b, dq_strides.h) * CALL.ALIGN_OUT + start * dq_strides.ROW
    dq_ptrs = dq_base + rows[:, None] * dq_strides.ROW + offs_d[None, :]
    dq_mask = offs_m[:, None] < place_q
    if CALL.D != CALL.BLOCK_D:
        dq_mask = dq_mask & (offs_d[None, :] < CALL.D)
    if (
        sequences.seqused_q_ptr is not None and bias_ptr is not None
    ):  # rows behind read the last row of the bias: it may be NaN
        dq = tl.where(offs_m[:, None] < seqlen_q, dq, 0.0)
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=dq_mask)


@triton.jit
def _backward_bias_kernel(
    inputs: BackwardInputs,  # as in _backward_q_kernel, like all below
    dbias_ptr,  # [BB, BH, Sq, Sk], contiguous, where BB is B or 1 and BH is H or 1; packed: of the longest lengths
    alibi_ptr, bias_ptr, sequences: Sequences, dropout_seed_ptr,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, do_strides: Strides,
    sizes: BiasSizes, scale, window: Window, softcap, bias_strides: BiasStrides, dropout: Dropout,
    CALL: tl.constexpr,  # BackwardCall
    TILE: tl.constexpr,  # BackwardTile
    SUM_BATCH: tl.constexpr, SUM_HEADS: tl.constexpr,  # whether one bias serves all sequences, or all heads
):  # fmt: skip
    """Write BLOCK_M x BLOCK_N elements of the gradient of the bias. Grid: (tiles_m * tiles_n * BB * BH,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile_n, rest = pid % sizes.tiles_n, pid // sizes.tiles_n
    tile_m, place = rest % sizes.tiles_m, rest // sizes.tiles_m
    bias_b, bias_h = place // sizes.bias_heads, place % sizes.bias_heads
    first_row, first_key = tile_m * TILE.BLOCK_M, tile_n * TILE.BLOCK_N
    offs_m, offs_n = first_row + tl.arange(0, TILE.BLOCK_M), first_key + tl.arange(0, TILE.BLOCK_N)
    rows, keys = offs_m.to(tl.int64), offs_n.to(tl.int64)
    offs_d, offs_dv = tl.arange(0, CALL.BLOCK_D).to(tl.int64), tl.arange(0, CALL.BLOCK_DV).to(tl.int64)
    diagonal = seqlen_k - seqlen_q
    bias_at = tl.minimum(rows, seqlen_q - 1)[:, None] * (bias_strides.m * CALL.ALIGN_BIAS)
    bias_at += tl.minimum(keys, seqlen_k - 1)[None, :] * bias_strides.COLUMN

    times = 1
    if SUM_BATCH:
        times = sizes.batch
    if SUM_HEADS:
        times = times * sizes.heads
    if sequences.cu_seqlens_q_ptr is None:  # else every sequence has a diagonal of its own
        if CALL.BOUND_RIGHT:  # a tile of which all is masked: the last row ends before the first key
            times = tl.where(first_row + (TILE.BLOCK_M - 1) + (diagonal + window.right) >= first_key, times, 0)
        if CALL.BOUND_LEFT:
            times = tl.where(first_row + (diagonal - window.left) <= first_key + (TILE.BLOCK_N - 1), times, 0)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in tl.range(0, times, 1, num_stages=1):
        b, h = bias_b, bias_h
        if SUM_BATCH and SUM_HEADS:
            b, h = turn // sizes.heads, turn % sizes.heads
        elif SUM_BATCH:
            b = turn
        elif SUM_HEADS:
            h = turn
        b, h = tl.full([], 0, tl.int64) + b, tl.full([], 0, tl.int64) + h
        q_base = inputs.q_ptr + (b * q_strides.b + h * q_strides.h) * CALL.ALIGN
        do_base = inputs.do_ptr + (b * do_strides.b + h * do_strides.h) * CALL.ALIGN
        k_base = inputs.k_ptr + (b * k_strides.b + h // CALL.GROUP * k_strides.h) * CALL.ALIGN
        v_base = inputs.v_ptr + (b * v_strides.b + h // CALL.GROUP * v_strides.h) * CALL.ALIGN
        own_q, own_k, own_diagonal = seqlen_q, seqlen_k, diagonal
        reached = True
        if sequences.cu_seqlens_q_ptr is not None:
            start_q, start_k = tl.load(sequences.cu_seqlens_q_ptr + b), tl.load(sequences.cu_seqlens_k_ptr + b)
            if sequences.seqused_q_ptr is not None:
                own_q = tl.load(sequences.seqused_q_ptr + b)
            else:
                own_q = tl.load(sequences.cu_seqlens_q_ptr + b + 1) - start_q
            if sequences.seqused_k_ptr is not None:
                own_k = tl.load(sequences.seqused_k_ptr + b)
            else:
                own_k = tl.load(sequences.cu_seqlens_k_ptr + b + 1) - start_k
            own_diagonal = own_k - own_q
            q_base += start_q.to(tl.int64) * q_strides.ROW
            do_base += start_q.to(tl.int64) * do_strides.ROW
            k_base += start_k.to(tl.int64) * k_strides.ROW
            v_base += start_k.to(tl.int64) * v_strides.ROW
            # Sequences that are shorter than the place of this tile, or of which all is masked there, add nothing.
            reached = (first_row < own_q) & (first_key < own_k)
            if CALL.BOUND_RIGHT:
                reached = reached & (first_row + (TILE.BLOCK_M - 1) + (own_diagonal + window.right) >= first_key)
            if CALL.BOUND_LEFT:
                reached = reached & (first_row + (own_diagonal - window.left) <= first_key + (TILE.BLOCK_N - 1))
        if reached:
            q_ptrs = q_base + rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
            do_ptrs = do_base + rows[:, None] * do_strides.ROW + offs_dv[None, :] * do_strides.COLUMN
            k_ptrs = k_base + keys[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
            v_ptrs = v_base + keys[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
            q = load_rows(q_ptrs, offs_m, own_q, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]
            k = load_rows(k_ptrs, offs_n, own_k, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_N, BLOCK_D]
            s = tl.dot(q, tl.trans(k), input_precision=CALL.PRECISION) * scale  # [BLOCK_M, BLOCK_N]
            do = load_rows(
                do_ptrs, offs_m, own_q, offs_dv, CALL.DV, True, CALL.DV != CALL.BLOCK_DV
            )  # [BLOCK_M, BLOCK_DV]
            v = load_rows(
                v_ptrs, offs_n, own_k, offs_dv, CALL.DV, True, CALL.DV != CALL.BLOCK_DV
            )  # [BLOCK_N, BLOCK_DV]
            dp = tl.dot(do, tl.trans(v), input_precision=CALL.PRECISION)  # [BLOCK_M, BLOCK_N]
            if dropout_seed_ptr is not None:
                draws = load_dropout(dropout_seed_ptr, b * sizes.heads + h, dropout.last, dropout.scale)
                dp = tl.where(kept_by(draws, offs_m, first_key, TILE.BLOCK_N), dp * dropout.scale, 0.0)
            if sequences.cu_seqlens_q_ptr is None:
                head, lse_rows = (b * sizes.heads + h) * seqlen_q, offs_m
            else:
                head, lse_rows = start_q.to(tl.int64) * sizes.heads + h, rows * sizes.heads
            lse = load_lse(inputs.lse_ptr + head + lse_rows, offs_m < own_q, 1.0)
            delta = tl.load(inputs.delta_ptr + head + lse_rows, mask=offs_m < own_q, other=0.0)
            slope = None
            if alibi_ptr is not None:
                slope = tl.load(alibi_ptr + b * CALL.STRIDE_ALIBI_B + h).to(tl.float32)
            bias_ptrs = bias_ptr + (b * bias_strides.b + h * bias_strides.h) * CALL.ALIGN_BIAS + bias_at
            p, _cap = weigh(
                s, offs_m[:, None], offs_n[None, :], lse[:, None], bias_ptrs, own_k, own_diagonal, window,
                softcap, slope, False, CALL.BOUND_LEFT, CALL.BOUND_RIGHT, CALL.PRECISION == "ieee",
            )  # fmt: skip
            ds = p * (dp - delta[:, None])
            if (
                sequences.cu_seqlens_q_ptr is not None
            ):  # what the bias has behind the ends of a sequence may be anything
                ds = tl.where((offs_m[:, None] < own_q) & (offs_n[None, :] < own_k), ds, 0.0)
            total += ds

    out = dbias_ptr + (place.to(tl.int64) * seqlen_q + rows)[:, None] * seqlen_k + keys[None, :]
    mask = (offs_m[:, None] < seqlen_q) & (offs_n[None, :] < seqlen_k)
    tl.store(out, total.to(dbias_ptr.dtype.element_ty), mask=mask)
