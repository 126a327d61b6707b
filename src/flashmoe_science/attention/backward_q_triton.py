"""Attention backward (Triton, sm_80 and newer), without atomics: the gradients of q and of an additive bias.

See ``backward_triton`` for the formulas, and for why every gradient has a kernel of its own. A tile of queries walks
over the keys that it sees, a tile of the bias over the sequences and heads for which it is broadcast.

Source: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_primitives import add_product, empty_sum, load_lse, weigh
from .primitives import head_offset, kept_by, load_dropout, load_rows


@triton.jit
def _key_range(
    first_row, seqlen_k, diagonal, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the keys that a tile of rows sees: begin, inside, unmasked, end.

    Tiles before ``inside`` cross the left bound; from ``unmasked`` on, they cross the right bound or the last key.
    """
    begin = 0
    end = seqlen_k
    if BOUND_RIGHT:
        end = tl.maximum(tl.minimum(seqlen_k, first_row + BLOCK_M + (diagonal + window_right)), 0)
    if BOUND_LEFT:
        begin = tl.maximum(first_row + diagonal - window_left, 0) // BLOCK_N * BLOCK_N
    unmasked = end // BLOCK_N * BLOCK_N
    if BOUND_RIGHT:
        first_end = tl.maximum(first_row + (diagonal + window_right) + 1, 0)  # of row first_row
        unmasked = tl.minimum(unmasked, first_end // BLOCK_N * BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)
    inside = begin
    if BOUND_LEFT:
        last_begin = tl.maximum(first_row + (BLOCK_M - 1) + diagonal - window_left, 0)  # of the tile's last row
        inside = tl.maximum(tl.cdiv(last_begin, BLOCK_N) * BLOCK_N, begin)
        unmasked = tl.maximum(unmasked, inside)
    return begin, inside, unmasked, end


@triton.jit
def _fold_keys(
    dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, rows, offs_n, offs_d, offs_dv, seqlen_k, diagonal,
    window_left, window_right, scale, softcap, slope, dropout,
    STRIDE_KN: tl.constexpr, STRIDE_VN: tl.constexpr, STRIDE_BIAS_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    MASK_N: tl.constexpr, MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradient of a tile of queries."""
    step = tl.full([], 0, tl.int64) + start_n
    cols = start_n + offs_n
    k = load_rows(k_ptrs + step * STRIDE_KN, cols, seqlen_k, offs_d, D, MASK_N, MASK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    bias_ptrs = None
    if bias_rows is not None:
        if MASK_N:
            bias_cols = tl.minimum(cols, seqlen_k - 1).to(tl.int64) * STRIDE_BIAS_N
            bias_ptrs = bias_rows[:, None] + bias_cols[None, :]
        else:
            bias_ptrs = bias_rows[:, None] + step * STRIDE_BIAS_N + offs_n[None, :] * STRIDE_BIAS_N
    p, cap = weigh(
        s, rows[:, None], cols[None, :], lse[:, None], bias_ptrs, seqlen_k, diagonal, window_left, window_right,
        softcap, slope, MASK_N, MASK_LEFT, MASK_RIGHT, PRECISION == "ieee",
    )  # fmt: skip
    v = load_rows(v_ptrs + step * STRIDE_VN, cols, seqlen_k, offs_dv, DV, MASK_N, MASK_DV)  # [BLOCK_N, BLOCK_DV]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if dropout is not None:
        dp = tl.where(kept_by(dropout, rows, start_n, offs_n.shape[0]), dp * dropout[4], 0.0)
    ds = p * (dp - delta[:, None])
    if softcap is not None:
        ds *= cap
    return add_product(dq, ds.to(k.dtype), k, PRECISION)


@triton.jit
def _backward_q_kernel(
    q_ptr,  # as in _backward_kv_kernel of backward_triton, like all below
    k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    dq_ptr,  # [B, H, Sq, D]
    alibi_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, dropout_seed_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,  # in units of ALIGN
    stride_dqb, stride_dqh,  # in units of ALIGN_OUT elements
    heads, seqlen_q, seqlen_k, tiles_m, scale, grad_scale, window_left, window_right, softcap,
    stride_bias_b, stride_bias_h, stride_bias_m, dropout_last, dropout_scale,
    STRIDE_QM: tl.constexpr, STRIDE_QD: tl.constexpr, STRIDE_KN: tl.constexpr, STRIDE_KD: tl.constexpr,
    STRIDE_VN: tl.constexpr, STRIDE_VD: tl.constexpr, STRIDE_DOM: tl.constexpr, STRIDE_DOD: tl.constexpr,
    STRIDE_DQM: tl.constexpr, STRIDE_ALIBI_B: tl.constexpr, STRIDE_BIAS_N: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_OUT: tl.constexpr, ALIGN_BIAS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Write dQ of BLOCK_M rows of one head. Grid: (tiles_m * B * H,)."""
    UNIT: tl.constexpr = 1.4426950408889634 if bias_ptr is None else 1.0
    pid = tl.program_id(0)
    tile = pid % tiles_m
    b, h = (pid // tiles_m) // heads, (pid // tiles_m) % heads
    if BOUND_RIGHT:
        tile = tiles_m - 1 - tile  # the longest rows first

    first_row = tile * BLOCK_M
    if cu_seqlens_q_ptr is not None:
        start_q, start_k = tl.load(cu_seqlens_q_ptr + b), tl.load(cu_seqlens_k_ptr + b)
        place_q = tl.load(cu_seqlens_q_ptr + b + 1) - start_q
        if first_row >= place_q:
            return
        longest_q, longest_k = seqlen_q, seqlen_k  # that a bias has rows and columns for, whatever lengths say
        seqlen_q, seqlen_k = place_q, tl.load(cu_seqlens_k_ptr + b + 1) - start_k
        if seqused_q_ptr is not None:
            seqlen_q = tl.load(seqused_q_ptr + b)
        if seqused_k_ptr is not None:
            seqlen_k = tl.load(seqused_k_ptr + b)
        q_ptr += start_q.to(tl.int64) * STRIDE_QM
        k_ptr += start_k.to(tl.int64) * STRIDE_KN
        v_ptr += start_k.to(tl.int64) * STRIDE_VN
        do_ptr += start_q.to(tl.int64) * STRIDE_DOM
        dq_ptr += start_q.to(tl.int64) * STRIDE_DQM
        lse_at, step_lse = start_q.to(tl.int64) * heads + h, heads
    else:
        place_q = seqlen_q
        lse_at, step_lse = (b * heads + h).to(tl.int64) * seqlen_q, 1

    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows, key_rows = tl.arange(0, BLOCK_M), offs_n
    if WIDE:
        rows, key_rows = rows.to(tl.int64), key_rows.to(tl.int64)
        offs_d, offs_dv = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    start = first_row.to(tl.int64)
    q_base = q_ptr + head_offset(b, h, stride_qb, stride_qh) * ALIGN + start * STRIDE_QM
    do_base = do_ptr + head_offset(b, h, stride_dob, stride_doh) * ALIGN + start * STRIDE_DOM
    k_base = k_ptr + head_offset(b, h // GROUP, stride_kb, stride_kh) * ALIGN
    v_base = v_ptr + head_offset(b, h // GROUP, stride_vb, stride_vh) * ALIGN
    k_ptrs = k_base + key_rows[:, None] * STRIDE_KN + offs_d[None, :] * STRIDE_KD
    v_ptrs = v_base + key_rows[:, None] * STRIDE_VN + offs_dv[None, :] * STRIDE_VD
    q_ptrs = q_base + rows[:, None] * STRIDE_QM + offs_d[None, :] * STRIDE_QD
    do_ptrs = do_base + rows[:, None] * STRIDE_DOM + offs_dv[None, :] * STRIDE_DOD
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, D, True, D != BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_ptrs, offs_m, seqlen_q, offs_dv, DV, True, DV != BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    lse = load_lse(lse_ptr + lse_at + offs_m.to(tl.int64) * step_lse, offs_m < seqlen_q, UNIT)
    delta = tl.load(delta_ptr + lse_at + offs_m.to(tl.int64) * step_lse, mask=offs_m < seqlen_q, other=0.0)
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b.to(tl.int64) * STRIDE_ALIBI_B + h).to(tl.float32) * UNIT
    bias_rows = None
    if bias_ptr is not None:
        bias_head = bias_ptr + head_offset(b, h, stride_bias_b, stride_bias_h) * ALIGN_BIAS
        last_row = seqlen_q - 1
        if cu_seqlens_q_ptr is not None:
            last_row = tl.minimum(seqlen_q, longest_q) - 1
        bias_rows = bias_head + tl.minimum(offs_m, last_row).to(tl.int64) * (stride_bias_m * ALIGN_BIAS)

    dropout = None
    if dropout_seed_ptr is not None:
        dropout = load_dropout(dropout_seed_ptr, b * heads + h, dropout_last, dropout_scale)

    diagonal = seqlen_k - seqlen_q
    if cu_seqlens_q_ptr is not None and bias_ptr is not None:
        seqlen_k = tl.minimum(seqlen_k, longest_k)
    begin, inside, unmasked, end = _key_range(
        first_row, seqlen_k, diagonal, window_left, window_right, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
    )
    if seqused_q_ptr is not None:
        end = tl.where(first_row < seqlen_q, end, 0)
        inside, unmasked = tl.minimum(inside, end), tl.minimum(unmasked, end)

    dq = empty_sum(BLOCK_M, BLOCK_D, PRECISION)
    if BOUND_LEFT:
        for start_n in tl.range(begin, tl.minimum(inside, end), BLOCK_N, num_stages=1):
            dq = _fold_keys(
                dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
                diagonal, window_left, window_right, scale, softcap, slope, dropout,
                STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, D != BLOCK_D, DV != BLOCK_DV,
                True, True, BOUND_RIGHT, PRECISION,
            )  # fmt: skip
    for start_n in tl.range(inside, unmasked, BLOCK_N, num_stages=NUM_STAGES):
        dq = _fold_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window_left, window_right, scale, softcap, slope, dropout,
            STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, D != BLOCK_D, DV != BLOCK_DV,
            False, False, False, PRECISION,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, BLOCK_N, num_stages=1):
        dq = _fold_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window_left, window_right, scale, softcap, slope, dropout,
            STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, D != BLOCK_D, DV != BLOCK_DV,
            True, False, BOUND_RIGHT, PRECISION,
        )  # fmt: skip

    dq = dq[0] * grad_scale
    dq_base = dq_ptr + head_offset(b, h, stride_dqb, stride_dqh) * ALIGN_OUT + start * STRIDE_DQM
    dq_ptrs = dq_base + rows[:, None] * STRIDE_DQM + offs_d[None, :]
    dq_mask = offs_m[:, None] < place_q
    if D != BLOCK_D:
        dq_mask = dq_mask & (offs_d[None, :] < D)
    if seqused_q_ptr is not None and bias_ptr is not None:  # rows behind read the last row of the bias: it may be NaN
        dq = tl.where(offs_m[:, None] < seqlen_q, dq, 0.0)
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=dq_mask)


@triton.jit
def _backward_bias_kernel(
    q_ptr,  # as in _backward_q_kernel, like all below
    k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    dbias_ptr,  # [BB, BH, Sq, Sk], contiguous, where BB is B or 1 and BH is H or 1; packed: of the longest lengths
    alibi_ptr, bias_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, dropout_seed_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,  # in units of ALIGN
    batch, heads, bias_heads, seqlen_q, seqlen_k, tiles_m, tiles_n, scale, window_left, window_right, softcap,
    stride_bias_b, stride_bias_h, stride_bias_m, dropout_last, dropout_scale,
    STRIDE_QM: tl.constexpr, STRIDE_QD: tl.constexpr, STRIDE_KN: tl.constexpr, STRIDE_KD: tl.constexpr,
    STRIDE_VN: tl.constexpr, STRIDE_VD: tl.constexpr, STRIDE_DOM: tl.constexpr, STRIDE_DOD: tl.constexpr,
    STRIDE_ALIBI_B: tl.constexpr, STRIDE_BIAS_N: tl.constexpr, ALIGN: tl.constexpr, ALIGN_BIAS: tl.constexpr,
    SUM_BATCH: tl.constexpr, SUM_HEADS: tl.constexpr,  # whether one bias serves all sequences, or all heads
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_M x BLOCK_N elements of the gradient of the bias. Grid: (tiles_m * tiles_n * BB * BH,)."""
    pid = tl.program_id(0)
    tile_n, rest = pid % tiles_n, pid // tiles_n
    tile_m, place = rest % tiles_m, rest // tiles_m
    bias_b, bias_h = place // bias_heads, place % bias_heads
    first_row, first_key = tile_m * BLOCK_M, tile_n * BLOCK_N
    offs_m, offs_n = first_row + tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N)
    rows, keys = offs_m.to(tl.int64), offs_n.to(tl.int64)
    offs_d, offs_dv = tl.arange(0, BLOCK_D).to(tl.int64), tl.arange(0, BLOCK_DV).to(tl.int64)
    diagonal = seqlen_k - seqlen_q
    bias_at = tl.minimum(rows, seqlen_q - 1)[:, None] * (stride_bias_m * ALIGN_BIAS)
    bias_at += tl.minimum(keys, seqlen_k - 1)[None, :] * STRIDE_BIAS_N

    times = 1
    if SUM_BATCH:
        times = batch
    if SUM_HEADS:
        times = times * heads
    if cu_seqlens_q_ptr is None:  # else every sequence has a diagonal of its own
        if BOUND_RIGHT:  # a tile of which all is masked: the last row ends before the first key
            times = tl.where(first_row + (BLOCK_M - 1) + (diagonal + window_right) >= first_key, times, 0)
        if BOUND_LEFT:
            times = tl.where(first_row + (diagonal - window_left) <= first_key + (BLOCK_N - 1), times, 0)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in tl.range(0, times, 1, num_stages=1):
        b, h = bias_b, bias_h
        if SUM_BATCH and SUM_HEADS:
            b, h = turn // heads, turn % heads
        elif SUM_BATCH:
            b = turn
        elif SUM_HEADS:
            h = turn
        b, h = tl.full([], 0, tl.int64) + b, tl.full([], 0, tl.int64) + h
        q_base = q_ptr + (b * stride_qb + h * stride_qh) * ALIGN
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * ALIGN
        k_base = k_ptr + (b * stride_kb + h // GROUP * stride_kh) * ALIGN
        v_base = v_ptr + (b * stride_vb + h // GROUP * stride_vh) * ALIGN
        own_q, own_k, own_diagonal = seqlen_q, seqlen_k, diagonal
        reached = True
        if cu_seqlens_q_ptr is not None:
            start_q, start_k = tl.load(cu_seqlens_q_ptr + b), tl.load(cu_seqlens_k_ptr + b)
            if seqused_q_ptr is not None:
                own_q = tl.load(seqused_q_ptr + b)
            else:
                own_q = tl.load(cu_seqlens_q_ptr + b + 1) - start_q
            if seqused_k_ptr is not None:
                own_k = tl.load(seqused_k_ptr + b)
            else:
                own_k = tl.load(cu_seqlens_k_ptr + b + 1) - start_k
            own_diagonal = own_k - own_q
            q_base += start_q.to(tl.int64) * STRIDE_QM
            do_base += start_q.to(tl.int64) * STRIDE_DOM
            k_base += start_k.to(tl.int64) * STRIDE_KN
            v_base += start_k.to(tl.int64) * STRIDE_VN
            # Sequences that are shorter than the place of this tile, or of which all is masked there, add nothing.
            reached = (first_row < own_q) & (first_key < own_k)
            if BOUND_RIGHT:
                reached = reached & (first_row + (BLOCK_M - 1) + (own_diagonal + window_right) >= first_key)
            if BOUND_LEFT:
                reached = reached & (first_row + (own_diagonal - window_left) <= first_key + (BLOCK_N - 1))
        if reached:
            q_ptrs = q_base + rows[:, None] * STRIDE_QM + offs_d[None, :] * STRIDE_QD
            do_ptrs = do_base + rows[:, None] * STRIDE_DOM + offs_dv[None, :] * STRIDE_DOD
            k_ptrs = k_base + keys[:, None] * STRIDE_KN + offs_d[None, :] * STRIDE_KD
            v_ptrs = v_base + keys[:, None] * STRIDE_VN + offs_dv[None, :] * STRIDE_VD
            q = load_rows(q_ptrs, offs_m, own_q, offs_d, D, True, D != BLOCK_D)  # [BLOCK_M, BLOCK_D]
            k = load_rows(k_ptrs, offs_n, own_k, offs_d, D, True, D != BLOCK_D)  # [BLOCK_N, BLOCK_D]
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
            do = load_rows(do_ptrs, offs_m, own_q, offs_dv, DV, True, DV != BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
            v = load_rows(v_ptrs, offs_n, own_k, offs_dv, DV, True, DV != BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if dropout_seed_ptr is not None:
                dropout = load_dropout(dropout_seed_ptr, b * heads + h, dropout_last, dropout_scale)
                dp = tl.where(kept_by(dropout, offs_m, first_key, BLOCK_N), dp * dropout_scale, 0.0)
            if cu_seqlens_q_ptr is None:
                head, lse_rows = (b * heads + h) * seqlen_q, offs_m
            else:
                head, lse_rows = start_q.to(tl.int64) * heads + h, rows * heads
            lse = load_lse(lse_ptr + head + lse_rows, offs_m < own_q, 1.0)
            delta = tl.load(delta_ptr + head + lse_rows, mask=offs_m < own_q, other=0.0)
            slope = None
            if alibi_ptr is not None:
                slope = tl.load(alibi_ptr + b * STRIDE_ALIBI_B + h).to(tl.float32)
            bias_ptrs = bias_ptr + (b * stride_bias_b + h * stride_bias_h) * ALIGN_BIAS + bias_at
            p, _cap = weigh(
                s, offs_m[:, None], offs_n[None, :], lse[:, None], bias_ptrs, own_k, own_diagonal, window_left,
                window_right, softcap, slope, False, BOUND_LEFT, BOUND_RIGHT, PRECISION == "ieee",
            )  # fmt: skip
            ds = p * (dp - delta[:, None])
            if cu_seqlens_q_ptr is not None:  # what the bias has behind the ends of a sequence may be anything
                ds = tl.where((offs_m[:, None] < own_q) & (offs_n[None, :] < own_k), ds, 0.0)
            total += ds

    out = dbias_ptr + (place.to(tl.int64) * seqlen_q + rows)[:, None] * seqlen_k + keys[None, :]
    mask = (offs_m[:, None] < seqlen_q) & (offs_n[None, :] < seqlen_k)
    tl.store(out, total.to(dbias_ptr.dtype.element_ty), mask=mask)
