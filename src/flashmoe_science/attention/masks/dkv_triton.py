"""Attention backward under a block mask (Triton, sm_80 and newer), without atomics: the gradients of k and v.

See ``backward.dkv_triton`` for the formulas and for delta. One program owns ``BLOCK_N`` keys, which lie in one block of
128, and walks over the query blocks in the lists of that block, for all heads that share the K/V head: full ones
first, then partial ones. So every gradient is a sum in one order, made by one program.

Source: as there, and as in ``forward_triton``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..backward.primitives import add_product, empty_sum, load_lse, weigh
from ..kernel_arguments import Strides
from ..primitives import head_offset, load_rows
from .arguments import MaskedSizes, MaskLists
from .primitives import find_lists, sees


@triton.jit
def _add_rows(
    dk, dv, k, v, q_ptrs, do_ptrs, lse_ptr, delta_ptr, mask_bits_ptr, place, start_m, inside, offs_m, keys, offs_d,
    offs_dv, seqlen_q, scale, softcap, q_strides, do_strides, CALL: tl.constexpr, IS_PARTIAL: tl.constexpr,
    MAKE_DK: tl.constexpr, MAKE_DV: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values.

    ``keys`` and, from ``inside`` on, the rows are counted from the first of their block.
    """
    PRECISION: tl.constexpr = CALL.PRECISION  # Triton 3.6 hands on names of constants, not fields of groups
    step = start_m.to(tl.int64)
    rows = start_m + offs_m
    mask = None
    if CALL.MASK_M:
        mask = rows < seqlen_q
    q = load_rows(
        q_ptrs + step * q_strides.ROW, rows, seqlen_q, offs_d, CALL.D, CALL.MASK_M, CALL.D != CALL.BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    s = tl.dot(k, tl.trans(q), input_precision=CALL.PRECISION) * scale  # [BLOCK_N, BLOCK_M]
    lse = load_lse(lse_ptr + rows, mask, 1.4426950408889634)
    # Keys past the end give rows of dK and dV that are not stored.
    p, cap = weigh(
        s, rows[None, :], keys[:, None], lse[None, :], None, 0, 0, None, softcap, None, False, False, False,
        CALL.PRECISION == "ieee",
    )  # fmt: skip
    if IS_PARTIAL:
        p = tl.where(sees(mask_bits_ptr, place, inside + offs_m[None, :], keys[:, None]), p, 0.0)
    do = load_rows(
        do_ptrs + step * do_strides.ROW, rows, seqlen_q, offs_dv, CALL.DV, CALL.MASK_M, CALL.DV != CALL.BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    if MAKE_DV:
        dv = add_product(dv, p.to(do.dtype), do, PRECISION)
    if MAKE_DK:
        dp = tl.dot(v, tl.trans(do), input_precision=CALL.PRECISION)  # [BLOCK_N, BLOCK_M]
        if CALL.MASK_M:
            delta = tl.load(delta_ptr + rows, mask=mask, other=0.0)
        else:
            delta = tl.load(delta_ptr + rows)
        ds = p * (dp - delta[None, :])
        if softcap is not None:
            ds *= cap
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv


@triton.jit
def _masked_kv_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, HK, Sk, D]
    v_ptr,  # [B, HK, Sk, DV]
    do_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    delta_ptr,  # like lse
    dk_ptr,  # [B, HK, Sk, D], or None where another launch makes it
    dv_ptr,  # [B, HK, Sk, DV], or None
    mask_lists_ptr,  # int32, see ``lists``
    mask_bits_ptr,  # [partial blocks, 128, 4] int32
    q_strides: Strides, k_strides: Strides, v_strides: Strides, do_strides: Strides,  # in units of ALIGN elements
    dk_strides: Strides, dv_strides: Strides,  # in units of ALIGN_OUT elements
    lists: MaskLists,  # of the blocks of keys
    sizes: MaskedSizes,
    scale,  # as in the forward
    grad_scale,  # softmax_scale
    softcap,
    CALL: tl.constexpr,  # MaskedCall
    TILE: tl.constexpr,  # MaskedTile
):  # fmt: skip
    """Write dK, dV or both of BLOCK_N keys of one K/V head. Grid: (tiles * B * HK,)."""
    MAKE_DK: tl.constexpr = dk_ptr is not None
    MAKE_DV: tl.constexpr = dv_ptr is not None
    PRECISION: tl.constexpr = CALL.PRECISION
    STEPS: tl.constexpr = 128 // TILE.BLOCK_M
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile, head = pid % sizes.tiles, pid // sizes.tiles
    b, hk = head // sizes.heads_kv, head % sizes.heads_kv
    first_key = tile * TILE.BLOCK_N

    offs_n = first_key + tl.arange(0, TILE.BLOCK_N)
    offs_m, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_M), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    keys, query_rows = tl.arange(0, TILE.BLOCK_N), offs_m
    if TILE.WIDE:
        keys, query_rows = keys.to(tl.int64), query_rows.to(tl.int64)
        offs_d, offs_dv = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    start_row = first_key.to(tl.int64)
    k_base = k_ptr + head_offset(b, hk, k_strides.b, k_strides.h) * CALL.ALIGN + start_row * k_strides.ROW
    v_base = v_ptr + head_offset(b, hk, v_strides.b, v_strides.h) * CALL.ALIGN + start_row * v_strides.ROW
    k_ptrs = k_base + keys[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_base + keys[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    k = load_rows(k_ptrs, offs_n, seqlen_k, offs_d, CALL.D, CALL.MASK_N, CALL.D != CALL.BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptrs, offs_n, seqlen_k, offs_dv, CALL.DV, CALL.MASK_N, CALL.DV != CALL.BLOCK_DV)

    dk = empty_sum(TILE.BLOCK_N, CALL.BLOCK_D, PRECISION)
    dv = empty_sum(TILE.BLOCK_N, CALL.BLOCK_DV, PRECISION)
    group = sizes.heads // sizes.heads_kv  # not a constant: unrolled, this loop needs registers that there are not
    in_block = offs_n % 128
    for turn in range(group):
        h = hk * group + turn
        q_base = q_ptr + head_offset(b, h, q_strides.b, q_strides.h) * CALL.ALIGN
        do_base = do_ptr + head_offset(b, h, do_strides.b, do_strides.h) * CALL.ALIGN
        q_ptrs = q_base + query_rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
        do_ptrs = do_base + query_rows[:, None] * do_strides.ROW + offs_dv[None, :] * do_strides.COLUMN
        row_of_head = (b * sizes.heads + h).to(tl.int64) * seqlen_q
        start, end, start_partial, end_partial = find_lists(mask_lists_ptr, lists, b, h, first_key // 128)
        for i in tl.range(0, (end - start) * STEPS, 1, num_stages=TILE.NUM_STAGES):
            start_m = tl.load(mask_lists_ptr + start + i // STEPS) * 128 + i % STEPS * TILE.BLOCK_M
            dk, dv = _add_rows(
                dk, dv, k, v, q_ptrs, do_ptrs, lse_ptr + row_of_head, delta_ptr + row_of_head, mask_bits_ptr, start_m,
                start_m, 0, offs_m, in_block, offs_d, offs_dv, seqlen_q, scale, softcap, q_strides, do_strides, CALL,
                False, MAKE_DK, MAKE_DV,
            )  # fmt: skip
        for i in tl.range(0, (end_partial - start_partial) // 2 * STEPS, 1, num_stages=1):
            entry = mask_lists_ptr + start_partial + i // STEPS * 2
            inside = i % STEPS * TILE.BLOCK_M
            start_m, place = tl.load(entry) * 128 + inside, tl.load(entry + 1)
            dk, dv = _add_rows(
                dk, dv, k, v, q_ptrs, do_ptrs, lse_ptr + row_of_head, delta_ptr + row_of_head, mask_bits_ptr, place,
                start_m, inside, offs_m, in_block, offs_d, offs_dv, seqlen_q, scale, softcap, q_strides, do_strides,
                CALL, True, MAKE_DK, MAKE_DV,
            )  # fmt: skip

    if MAKE_DK:
        dk_base = dk_ptr + head_offset(b, hk, dk_strides.b, dk_strides.h) * CALL.ALIGN_OUT + start_row * dk_strides.ROW
        dk_mask = offs_n[:, None] < seqlen_k
        if CALL.D != CALL.BLOCK_D:
            dk_mask = dk_mask & (offs_d[None, :] < CALL.D)
        dk_ptrs = dk_base + keys[:, None] * dk_strides.ROW + offs_d[None, :]
        tl.store(dk_ptrs, (dk[0] * grad_scale).to(dk_ptr.dtype.element_ty), mask=dk_mask)
    if MAKE_DV:
        dv_base = dv_ptr + head_offset(b, hk, dv_strides.b, dv_strides.h) * CALL.ALIGN_OUT + start_row * dv_strides.ROW
        dv_mask = offs_n[:, None] < seqlen_k
        if CALL.DV != CALL.BLOCK_DV:
            dv_mask = dv_mask & (offs_dv[None, :] < CALL.DV)
        dv_ptrs = dv_base + keys[:, None] * dv_strides.ROW + offs_dv[None, :]
        tl.store(dv_ptrs, dv[0].to(dv_ptr.dtype.element_ty), mask=dv_mask)
