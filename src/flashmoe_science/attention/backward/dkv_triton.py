"""Attention backward (Triton, sm_80 and newer), without atomics: delta, and the gradients of k and v.

With P = exp(S - LSE) and delta[m] = sum_d dO[m, d] O[m, d] - dLSE[m]:

    dV = P^T dO      dS = P * (dO V^T - delta)      dQ = scale * dS' K      dK = scale * dS'^T Q      dbias = dS

where dS' is dS times the derivative of the softcap. ``_delta_kernel`` makes delta. ``_backward_kv_kernel`` owns a tile
of keys and walks over the queries of all heads that share it, so the heads of a group are summed in registers, in one
order. ``dq_triton`` has the gradients of q and of an additive bias: ``_backward_q_kernel`` owns a tile of
queries and walks over the keys, ``_backward_bias_kernel`` owns a tile of the bias and walks over the sequences and
heads for which it is broadcast. So every gradient is a sum in one order, made
by one program: the same bits in every run. It costs S and dO V^T a second time, seven products in place of five, and
needs no memory but delta. Where the sums of dK and dV are too wide for the registers of one program, each has its own,
at the cost of S a third time.

With dropout, P in dV = P^T dO and dP = dO V^T are those that it leaves; delta has them already, in O. Each kernel makes
the mask again, element by element, from the seed.

Unused options are None or a constant, and cost no instruction.

Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for the recomputation of P; Triton's tutorial on fused attention
for the transposed tiles of the first loop. Ours: features, tiles free of masks except at the edges, rows without keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernel_arguments import BackwardInputs, BiasStrides, Dropout, KeySizes, Sequences, Strides, Window
from ..primitives import head_offset, kept_by, load_dropout, load_rows, used_lengths
from .primitives import add_product, empty_sum, load_lse, row_products, weigh


@triton.jit
def _delta_kernel(
    o_ptr,  # [B, H, Sq, DV]; packed [T, H, DV], like do
    do_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32; packed [T, H]
    delta_ptr,  # like lse
    dlse_ptr,  # like lse, or None
    cu_seqlens_q_ptr,  # [B + 1] int32 or None: not packed
    stride_ob, stride_oh, stride_dob, stride_doh,  # in units of ALIGN elements
    heads, seqlen_q, tiles_m,
    STRIDE_OM: tl.constexpr, STRIDE_OD: tl.constexpr, STRIDE_DOM: tl.constexpr, STRIDE_DOD: tl.constexpr,
    ALIGN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write delta of BLOCK_M rows of one head. Grid: (tiles_m * B * H,)."""
    pid = tl.program_id(0)
    tile = pid % tiles_m
    b, h = (pid // tiles_m) // heads, (pid // tiles_m) % heads
    first_row = tile * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    if cu_seqlens_q_ptr is not None:
        start_q = tl.load(cu_seqlens_q_ptr + b)
        seqlen_q = tl.load(cu_seqlens_q_ptr + b + 1) - start_q
        if first_row >= seqlen_q:
            return
        o_ptr += start_q.to(tl.int64) * STRIDE_OM
        do_ptr += start_q.to(tl.int64) * STRIDE_DOM
        places = (start_q + offs_m).to(tl.int64) * heads + h
    else:
        places = (b * heads + h).to(tl.int64) * seqlen_q + offs_m
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    o_base = o_ptr + head_offset(b, h, stride_ob, stride_oh) * ALIGN + first_row.to(tl.int64) * STRIDE_OM
    do_base = do_ptr + head_offset(b, h, stride_dob, stride_doh) * ALIGN + first_row.to(tl.int64) * STRIDE_DOM
    o_ptrs = o_base + rows[:, None] * STRIDE_OM + offs_dv[None, :] * STRIDE_OD
    do_ptrs = do_base + rows[:, None] * STRIDE_DOM + offs_dv[None, :] * STRIDE_DOD
    o = load_rows(o_ptrs, offs_m, seqlen_q, offs_dv, DV, True, DV != BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    do = load_rows(do_ptrs, offs_m, seqlen_q, offs_dv, DV, True, DV != BLOCK_DV)
    delta = row_products(o, do, PRECISION)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + places, mask=offs_m < seqlen_q, other=0.0)
    # In a row that saw no key P is 0, and the gradient of its LSE, of -inf, may be NaN.
    lse = tl.load(lse_ptr + places, mask=offs_m < seqlen_q, other=0.0)
    delta = tl.where(lse == -float("inf"), 0.0, delta)
    tl.store(delta_ptr + places, delta, mask=offs_m < seqlen_q)


@triton.jit
def _row_range(first_key, seqlen_q, diagonal, window, CALL: tl.constexpr, TILE: tl.constexpr):
    """Return the rows that see a tile of keys: begin, inside, unmasked, end.

    Tiles before ``inside`` cross the right bound; from ``unmasked`` on, they cross the left bound.
    """
    begin = 0
    end = seqlen_q
    if CALL.BOUND_RIGHT:
        begin = tl.maximum(first_key - (diagonal + window.right), 0) // TILE.BLOCK_M * TILE.BLOCK_M
    if CALL.BOUND_LEFT:
        end = tl.maximum(tl.minimum(seqlen_q, first_key + TILE.BLOCK_N - diagonal + window.left), 0)
    unmasked = end
    if CALL.BOUND_LEFT:
        last_row = tl.maximum(first_key - diagonal + window.left + 1, 0)  # that sees the first key, and one more
        unmasked = tl.maximum(tl.minimum(end, last_row // TILE.BLOCK_M * TILE.BLOCK_M), begin)
    inside = begin
    if CALL.BOUND_RIGHT:
        whole = tl.maximum(
            first_key + (TILE.BLOCK_N - 1) - (diagonal + window.right), 0
        )  # the first row to see all keys
        inside = tl.maximum(tl.cdiv(whole, TILE.BLOCK_M) * TILE.BLOCK_M, begin)
        unmasked = tl.maximum(unmasked, inside)
    return begin, inside, unmasked, end


@triton.jit
def _add_rows(
    dk, dv, k, v, q_ptrs, do_ptrs, lse_ptr, delta_ptr, bias_head, start_m, offs_m, first_key, offs_n, key_cols,
    offs_d, offs_dv, seqlen_q, seqlen_k, step_lse, diagonal, window, scale, softcap, slope, draws,
    q_strides, do_strides, bias_strides, CALL: tl.constexpr, MASK_M: tl.constexpr, MASK_LEFT: tl.constexpr,
    MASK_RIGHT: tl.constexpr, UNIT: tl.constexpr, MAKE_DK: tl.constexpr, MAKE_DV: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values."""
    PRECISION: tl.constexpr = CALL.PRECISION  # Triton 3.6 hands on names of constants, not fields of groups
    step = tl.full([], 0, tl.int64) + start_m  # the interpreter counts loops in Python integers
    rows = start_m + offs_m
    mask = None
    if MASK_M:
        mask = rows < seqlen_q
    q = load_rows(
        q_ptrs + step * q_strides.ROW, rows, seqlen_q, offs_d, CALL.D, MASK_M, CALL.D != CALL.BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    s = tl.dot(k, tl.trans(q), input_precision=CALL.PRECISION) * scale  # [BLOCK_N, BLOCK_M]
    lse = load_lse(lse_ptr + (step + offs_m) * step_lse, mask, UNIT)
    bias_ptrs = None
    if bias_head is not None:
        bias_rows = tl.minimum(rows, seqlen_q - 1).to(tl.int64) * (bias_strides.m * CALL.ALIGN_BIAS)
        bias_ptrs = bias_head + bias_rows[None, :] + key_cols[:, None]
    # Keys past the end give rows of dK and dV that are not stored.
    p, cap = weigh(
        s, rows[None, :], offs_n[:, None], lse[None, :], bias_ptrs, seqlen_k, diagonal, window,
        softcap, slope, False, MASK_LEFT, MASK_RIGHT, CALL.PRECISION == "ieee",
    )  # fmt: skip
    do = load_rows(
        do_ptrs + step * do_strides.ROW, rows, seqlen_q, offs_dv, CALL.DV, MASK_M, CALL.DV != CALL.BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    kept = None
    if draws is not None:
        kept = tl.trans(kept_by(draws, rows, first_key, offs_n.shape[0]))
    if MAKE_DV:
        weights = p
        if draws is not None:  # what is kept is scaled at the end
            weights = tl.where(kept, p, 0.0)
        dv = add_product(dv, weights.to(do.dtype), do, PRECISION)
    if MAKE_DK:
        dp = tl.dot(v, tl.trans(do), input_precision=CALL.PRECISION)  # [BLOCK_N, BLOCK_M]
        if draws is not None:
            dp = tl.where(kept, dp * draws[4], 0.0)
        if MASK_M:
            delta = tl.load(delta_ptr + (step + offs_m) * step_lse, mask=mask, other=0.0)
        else:
            delta = tl.load(delta_ptr + (step + offs_m) * step_lse)
        ds = p * (dp - delta[None, :])
        if softcap is not None:
            ds *= cap
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv


@triton.jit
def _add_heads(
    k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, alibi_ptr, bias_ptr, dropout_seed_ptr, b, hk, begin, inside, unmasked, end,
    query_rows, offs_m, first_key, offs_n, key_cols, offs_d, offs_dv, seqlen_q, seqlen_k, lse_head, step_lse, diagonal,
    sizes, window, scale, softcap, dropout, q_strides, do_strides, bias_strides,
    CALL: tl.constexpr, TILE: tl.constexpr, MASK_M: tl.constexpr, UNIT: tl.constexpr,
    MAKE_DK: tl.constexpr, MAKE_DV: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a tile of keys and values: sums over the rows of all heads of the group, head by head."""
    PRECISION: tl.constexpr = CALL.PRECISION
    dk = empty_sum(TILE.BLOCK_N, CALL.BLOCK_D, PRECISION)
    dv = empty_sum(TILE.BLOCK_N, CALL.BLOCK_DV, PRECISION)
    group = sizes.heads // sizes.heads_kv  # not a constant: unrolled, this loop needs registers that there are not
    first_head = hk * group
    q_base = q_ptr + head_offset(b, first_head, q_strides.b, q_strides.h) * CALL.ALIGN
    do_base = do_ptr + head_offset(b, first_head, do_strides.b, do_strides.h) * CALL.ALIGN
    lse_base = lse_ptr + first_head.to(tl.int64) * lse_head
    delta_base = delta_ptr + first_head.to(tl.int64) * lse_head
    alibi_base, bias_base = alibi_ptr, bias_ptr
    if alibi_ptr is not None:
        alibi_base += b.to(tl.int64) * CALL.STRIDE_ALIBI_B + first_head
    if bias_ptr is not None:
        bias_base += head_offset(b, first_head, bias_strides.b, bias_strides.h) * CALL.ALIGN_BIAS
    for turn in range(group):
        q_ptrs = q_base + query_rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
        do_ptrs = do_base + query_rows[:, None] * do_strides.ROW + offs_dv[None, :] * do_strides.COLUMN
        slope = None
        if alibi_ptr is not None:
            slope = tl.load(alibi_base).to(tl.float32) * UNIT
        draws = None
        if dropout_seed_ptr is not None:
            head = b * sizes.heads + first_head + turn
            draws = load_dropout(dropout_seed_ptr, head, dropout.last, dropout.scale)
        if CALL.BOUND_RIGHT:
            for start_m in tl.range(begin, tl.minimum(inside, end), TILE.BLOCK_M, num_stages=1):
                dk, dv = _add_rows(
                    dk, dv, k, v, q_ptrs, do_ptrs, lse_base, delta_base, bias_base, start_m, offs_m, first_key,
                    offs_n, key_cols, offs_d, offs_dv, seqlen_q, seqlen_k, step_lse, diagonal, window, scale, softcap,
                    slope, draws, q_strides, do_strides, bias_strides, CALL, MASK_M, CALL.BOUND_LEFT, True, UNIT,
                    MAKE_DK, MAKE_DV,
                )  # fmt: skip
        for start_m in tl.range(inside, unmasked, TILE.BLOCK_M, num_stages=TILE.NUM_STAGES):
            dk, dv = _add_rows(
                dk, dv, k, v, q_ptrs, do_ptrs, lse_base, delta_base, bias_base, start_m, offs_m, first_key,
                offs_n, key_cols, offs_d, offs_dv, seqlen_q, seqlen_k, step_lse, diagonal, window, scale, softcap,
                slope, draws, q_strides, do_strides, bias_strides, CALL, MASK_M, False, False, UNIT, MAKE_DK, MAKE_DV,
            )  # fmt: skip
        if CALL.BOUND_LEFT:
            for start_m in tl.range(unmasked, end, TILE.BLOCK_M, num_stages=1):
                dk, dv = _add_rows(
                    dk, dv, k, v, q_ptrs, do_ptrs, lse_base, delta_base, bias_base, start_m, offs_m, first_key,
                    offs_n, key_cols, offs_d, offs_dv, seqlen_q, seqlen_k, step_lse, diagonal, window, scale, softcap,
                    slope, draws, q_strides, do_strides, bias_strides, CALL, MASK_M, True, False, UNIT,
                    MAKE_DK, MAKE_DV,
                )  # fmt: skip

        q_base += q_strides.h * CALL.ALIGN
        do_base += do_strides.h * CALL.ALIGN
        lse_base += lse_head
        delta_base += lse_head
        if alibi_ptr is not None:
            alibi_base += 1
        if bias_ptr is not None:
            bias_base += bias_strides.h * CALL.ALIGN_BIAS
    return dk, dv


@triton.jit
def _store_keys(
    gradient, out_ptr, b, hk, start, offs_n, keys, offs_col, seqlen_k, place_k, strides,
    ALIGN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HAS_LENGTHS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of keys or values, or add it to what is there.

    HAS_LENGTHS: 0 for keys behind the length of a sequence.
    """
    if HAS_LENGTHS:
        gradient = tl.where(offs_n[:, None] < seqlen_k, gradient, 0.0)
    base = out_ptr + head_offset(b, hk, strides.b, strides.h) * ALIGN + start * strides.ROW
    mask = offs_n[:, None] < place_k
    if COLUMNS != BLOCK:
        mask = mask & (offs_col[None, :] < COLUMNS)
    ptrs = base + keys[:, None] * strides.ROW + offs_col[None, :]
    if ADD:
        gradient += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, gradient.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kv_kernel(
    inputs: BackwardInputs,
    dk_ptr,  # [B, HK, Sk, D]; packed [T, HK, D]; or None where another launch makes it
    dv_ptr,  # [B, HK, Sk, DV]; packed [T, HK, DV]; or None
    alibi_ptr,  # [H], [B, H] or None
    bias_ptr,  # [B, H, Sq, Sk] or None; packed: of the longest lengths
    sequences: Sequences,
    dropout_seed_ptr,  # [2] int64 or None
    q_strides: Strides, k_strides: Strides, v_strides: Strides, do_strides: Strides,  # in units of ALIGN elements
    dk_strides: Strides, dv_strides: Strides,  # in units of ALIGN_OUT elements
    sizes: KeySizes,
    scale,  # as in the forward: softmax_scale, times log2(e) without a bias; with a softcap what ``cap_scores`` takes
    grad_scale,  # softmax_scale
    window: Window,
    softcap,
    bias_strides: BiasStrides,  # in units of ALIGN_BIAS elements
    dropout: Dropout,  # as in the forward
    CALL: tl.constexpr,  # BackwardCall
    TILE: tl.constexpr,  # BackwardTile
    MASK_M: tl.constexpr,  # whether the last tile of rows has fewer than BLOCK_M, or may have
):  # fmt: skip
    """Write dK, dV or both of BLOCK_N keys of one K/V head. Grid: (tiles_n * B * HK,)."""
    MAKE_DK: tl.constexpr = dk_ptr is not None
    MAKE_DV: tl.constexpr = dv_ptr is not None
    UNIT: tl.constexpr = 1.4426950408889634 if bias_ptr is None else 1.0
    q_ptr, k_ptr, v_ptr, do_ptr = inputs.q_ptr, inputs.k_ptr, inputs.v_ptr, inputs.do_ptr
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile = pid % sizes.tiles_n  # the first keys are seen by the most rows when causal: the longest come first
    b, hk = (pid // sizes.tiles_n) // sizes.heads_kv, (pid // sizes.tiles_n) % sizes.heads_kv

    first_key = tile * TILE.BLOCK_N
    if sequences.cu_seqlens_q_ptr is not None:
        start_q, start_k = tl.load(sequences.cu_seqlens_q_ptr + b), tl.load(sequences.cu_seqlens_k_ptr + b)
        place_k = tl.load(sequences.cu_seqlens_k_ptr + b + 1) - start_k
        if first_key >= place_k:
            return
        longest_q, longest_k = seqlen_q, seqlen_k  # that a bias has rows and columns for, whatever lengths say
        seqlen_q, seqlen_k = tl.load(sequences.cu_seqlens_q_ptr + b + 1) - start_q, place_k
        seqlen_q, seqlen_k = used_lengths(sequences, b, seqlen_q, seqlen_k)
        q_ptr += start_q.to(tl.int64) * q_strides.ROW
        k_ptr += start_k.to(tl.int64) * k_strides.ROW
        v_ptr += start_k.to(tl.int64) * v_strides.ROW
        do_ptr += start_q.to(tl.int64) * do_strides.ROW
        if MAKE_DK:
            dk_ptr += start_k.to(tl.int64) * dk_strides.ROW
        if MAKE_DV:
            dv_ptr += start_k.to(tl.int64) * dv_strides.ROW
        lse_start, step_lse = start_q.to(tl.int64) * sizes.heads, sizes.heads
        lse_head = 1
    else:
        place_k, longest_k = seqlen_k, seqlen_k
        lse_start, step_lse = b.to(tl.int64) * sizes.heads * seqlen_q, 1
        lse_head = seqlen_q

    offs_n = first_key + tl.arange(0, TILE.BLOCK_N)
    offs_m, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_M), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    keys, query_rows = tl.arange(0, TILE.BLOCK_N), tl.arange(0, TILE.BLOCK_M)
    if TILE.WIDE:  # an offset inside one tile can pass 2**31
        keys, query_rows = keys.to(tl.int64), query_rows.to(tl.int64)
        offs_d, offs_dv = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    start = first_key.to(tl.int64)
    k_base = k_ptr + head_offset(b, hk, k_strides.b, k_strides.h) * CALL.ALIGN + start * k_strides.ROW
    v_base = v_ptr + head_offset(b, hk, v_strides.b, v_strides.h) * CALL.ALIGN + start * v_strides.ROW
    k_ptrs = k_base + keys[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_base + keys[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    k = load_rows(k_ptrs, offs_n, seqlen_k, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptrs, offs_n, seqlen_k, offs_dv, CALL.DV, True, CALL.DV != CALL.BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    key_cols = None
    if bias_ptr is not None:
        key_cols = tl.minimum(offs_n, tl.minimum(seqlen_k, longest_k) - 1)
        if TILE.WIDE or bias_strides.COLUMN > 1:  # counted from the first key, unlike what WIDE is about
            key_cols = key_cols.to(tl.int64)
        key_cols = key_cols * bias_strides.COLUMN

    diagonal = seqlen_k - seqlen_q
    if sequences.cu_seqlens_q_ptr is not None and bias_ptr is not None:
        seqlen_q = tl.minimum(seqlen_q, longest_q)
    begin, inside, unmasked, end = _row_range(first_key, seqlen_q, diagonal, window, CALL, TILE)
    if sequences.seqused_k_ptr is not None:
        end = tl.where(first_key < seqlen_k, end, 0)
        inside, unmasked = tl.minimum(inside, end), tl.minimum(unmasked, end)

    dk, dv = _add_heads(
        k, v, q_ptr, do_ptr, inputs.lse_ptr + lse_start, inputs.delta_ptr + lse_start, alibi_ptr, bias_ptr,
        dropout_seed_ptr, b, hk, begin, inside, unmasked, end, query_rows, offs_m, first_key, offs_n, key_cols, offs_d,
        offs_dv, seqlen_q, seqlen_k, lse_head, step_lse, diagonal, sizes, window, scale, softcap, dropout, q_strides,
        do_strides, bias_strides, CALL, TILE, MASK_M, UNIT, MAKE_DK, MAKE_DV,
    )  # fmt: skip

    if MAKE_DK:
        _store_keys(
            dk[0] * grad_scale, dk_ptr, b, hk, start, offs_n, keys, offs_d, seqlen_k, place_k, dk_strides,
            CALL.ALIGN_OUT, CALL.D, CALL.BLOCK_D, sequences.seqused_k_ptr is not None, CALL.ADD,
        )  # fmt: skip
    if MAKE_DV:
        dv = dv[0]
        if dropout_seed_ptr is not None:
            dv *= dropout.scale
        _store_keys(
            dv, dv_ptr, b, hk, start, offs_n, keys, offs_dv, seqlen_k, place_k, dv_strides,
            CALL.ALIGN_OUT, CALL.DV, CALL.BLOCK_DV, sequences.seqused_k_ptr is not None, CALL.ADD,
        )  # fmt: skip
