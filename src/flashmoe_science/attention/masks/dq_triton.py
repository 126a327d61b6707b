"""Attention backward under a block mask (Triton, sm_80 and newer), without atomics: the gradient of q.

One program owns ``BLOCK_M`` rows and walks over the key blocks as the forward does, in one order.

Source: as in ``forward_triton``.
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
def _add_keys(
    dq, q, do, lse, delta, k_ptrs, v_ptrs, mask_bits_ptr, place, start_n, inside, offs_n, rows, offs_d, offs_dv,
    seqlen_k, scale, softcap, k_strides, v_strides, CALL: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradient of a tile of queries.

    ``rows`` and, from ``inside`` on, the keys are counted from the first of their block.
    """
    PRECISION: tl.constexpr = CALL.PRECISION  # Triton 3.6 hands on names of constants, not fields of groups
    step = start_n.to(tl.int64)
    cols = start_n + offs_n
    k = load_rows(
        k_ptrs + step * k_strides.ROW, cols, seqlen_k, offs_d, CALL.D, CALL.MASK_N, CALL.D != CALL.BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=CALL.PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    p, cap = weigh(
        s, rows[:, None], cols[None, :], lse[:, None], None, seqlen_k, 0, None, softcap, None, CALL.MASK_N, False,
        False, CALL.PRECISION == "ieee",
    )  # fmt: skip
    if IS_PARTIAL:
        p = tl.where(sees(mask_bits_ptr, place, rows[:, None], inside + offs_n[None, :]), p, 0.0)
    v = load_rows(
        v_ptrs + step * v_strides.ROW, cols, seqlen_k, offs_dv, CALL.DV, CALL.MASK_N, CALL.DV != CALL.BLOCK_DV
    )  # [BLOCK_N, BLOCK_DV]
    dp = tl.dot(do, tl.trans(v), input_precision=CALL.PRECISION)  # [BLOCK_M, BLOCK_N]
    ds = p * (dp - delta[:, None])
    if softcap is not None:
        ds *= cap
    return add_product(dq, ds.to(k.dtype), k, PRECISION)


@triton.jit
def _masked_q_kernel(
    q_ptr,  # as in _masked_kv_kernel of dkv_triton, like all below
    k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr,
    dq_ptr,  # [B, H, Sq, D]
    mask_lists_ptr, mask_bits_ptr,
    q_strides: Strides, k_strides: Strides, v_strides: Strides, do_strides: Strides,
    dq_strides: Strides,  # in units of ALIGN_OUT elements
    lists: MaskLists,  # of the blocks of queries
    sizes: MaskedSizes, scale, grad_scale, softcap,
    CALL: tl.constexpr,  # MaskedCall
    TILE: tl.constexpr,  # MaskedTile
):  # fmt: skip
    """Write dQ of BLOCK_M rows of one head. Grid: (tiles * B * H,)."""
    PRECISION: tl.constexpr = CALL.PRECISION
    STEPS: tl.constexpr = 128 // TILE.BLOCK_N
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile, head = pid % sizes.tiles, pid // sizes.tiles
    b, h = head // sizes.heads, head % sizes.heads
    first_row = tile * TILE.BLOCK_M

    offs_m = first_row + tl.arange(0, TILE.BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_N), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    rows, key_rows = tl.arange(0, TILE.BLOCK_M), offs_n
    if TILE.WIDE:
        rows, key_rows = rows.to(tl.int64), key_rows.to(tl.int64)
        offs_d, offs_dv = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    start_row = first_row.to(tl.int64)
    q_base = q_ptr + head_offset(b, h, q_strides.b, q_strides.h) * CALL.ALIGN + start_row * q_strides.ROW
    do_base = do_ptr + head_offset(b, h, do_strides.b, do_strides.h) * CALL.ALIGN + start_row * do_strides.ROW
    k_base = k_ptr + head_offset(b, h // CALL.GROUP, k_strides.b, k_strides.h) * CALL.ALIGN
    v_base = v_ptr + head_offset(b, h // CALL.GROUP, v_strides.b, v_strides.h) * CALL.ALIGN
    q_ptrs = q_base + rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
    do_ptrs = do_base + rows[:, None] * do_strides.ROW + offs_dv[None, :] * do_strides.COLUMN
    k_ptrs = k_base + key_rows[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_base + key_rows[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, CALL.D, CALL.MASK_M, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_ptrs, offs_m, seqlen_q, offs_dv, CALL.DV, CALL.MASK_M, CALL.DV != CALL.BLOCK_DV)
    row_of_head = head.to(tl.int64) * seqlen_q
    lse = load_lse(lse_ptr + row_of_head + offs_m, offs_m < seqlen_q, 1.4426950408889634)
    delta = tl.load(delta_ptr + row_of_head + offs_m, mask=offs_m < seqlen_q, other=0.0)

    dq = empty_sum(TILE.BLOCK_M, CALL.BLOCK_D, PRECISION)
    start, end, start_partial, end_partial = find_lists(mask_lists_ptr, lists, b, h, first_row // 128)
    in_block = offs_m % 128
    for i in tl.range(0, (end - start) * STEPS, 1, num_stages=TILE.NUM_STAGES):
        start_n = tl.load(mask_lists_ptr + start + i // STEPS) * 128 + i % STEPS * TILE.BLOCK_N
        dq = _add_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, mask_bits_ptr, start_n, start_n, 0, offs_n, in_block, offs_d,
            offs_dv, seqlen_k, scale, softcap, k_strides, v_strides, CALL, False,
        )  # fmt: skip
    for i in tl.range(0, (end_partial - start_partial) // 2 * STEPS, 1, num_stages=1):
        entry = mask_lists_ptr + start_partial + i // STEPS * 2
        inside = i % STEPS * TILE.BLOCK_N
        start_n, place = tl.load(entry) * 128 + inside, tl.load(entry + 1)
        dq = _add_keys(
            dq, q, do, lse, delta, k_ptrs, v_ptrs, mask_bits_ptr, place, start_n, inside, offs_n, in_block, offs_d,
            offs_dv, seqlen_k, scale, softcap, k_strides, v_strides, CALL, True,
        )  # fmt: skip

    dq_base = dq_ptr + head_offset(b, h, dq_strides.b, dq_strides.h) * CALL.ALIGN_OUT + start_row * dq_strides.ROW
    dq_mask = offs_m[:, None] < seqlen_q
    if CALL.D != CALL.BLOCK_D:
        dq_mask = dq_mask & (offs_d[None, :] < CALL.D)
    dq_ptrs = dq_base + rows[:, None] * dq_strides.ROW + offs_d[None, :]
    tl.store(dq_ptrs, (dq[0] * grad_scale).to(dq_ptr.dtype.element_ty), mask=dq_mask)
