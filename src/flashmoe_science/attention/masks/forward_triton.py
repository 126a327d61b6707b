"""Attention forward under a block mask (Triton, sm_80 and newer).

One program owns ``BLOCK_M`` query rows of one head, which lie in one block of 128. It walks over the full key blocks in
the list of that block and then over its partial ones, in tiles of ``BLOCK_N``, with the online softmax. Full blocks
are not masked, partial ones read bits, all others are skipped.

Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for the loop; FlexAttention (Dong et al., 2024, arXiv 2412.05496)
for lists of full and of partial blocks. Ours: bits in place of a function, so that one kernel serves every mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernel_arguments import Strides
from ..primitives import cap_scores, head_offset, load_rows
from .arguments import MaskedSizes, MaskLists
from .primitives import find_lists, sees


@triton.jit
def _attend(
    acc, l, m, q, k_ptrs, v_ptrs, mask_bits_ptr, place, start_n, inside, offs_n, rows, offs_d, offs_dv, seqlen_k, scale,
    softcap, k_strides, v_strides, CALL: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running output, sum and maximum: a step of the online softmax.

    ``rows`` and, from ``inside`` on, the keys are counted from the first of their block.
    """
    step = start_n.to(tl.int64)
    cols = start_n + offs_n
    k = load_rows(
        k_ptrs + step * k_strides.ROW, cols, seqlen_k, offs_d, CALL.D, CALL.MASK_N, CALL.D != CALL.BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=CALL.PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        s = cap_scores(s, softcap, CALL.PRECISION == "ieee")
    if IS_PARTIAL:
        s = tl.where(sees(mask_bits_ptr, place, rows[:, None], inside + offs_n[None, :]), s, -float("inf"))
    elif CALL.MASK_N:
        s = tl.where(cols[None, :] < seqlen_k, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = m_new
    if IS_PARTIAL or CALL.MASK_N:  # a row that has met no key has m == -inf, and -inf - -inf is NaN
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    v = load_rows(
        v_ptrs + step * v_strides.ROW, cols, seqlen_k, offs_dv, CALL.DV, CALL.MASK_N, CALL.DV != CALL.BLOCK_DV
    )  # [BLOCK_N, BLOCK_DV]
    if CALL.PRECISION == "ieee":  # keys are added to the sum of a tile, not of all, whose rounding is larger
        part = tl.dot(p, v, input_precision=CALL.PRECISION)
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), part)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=CALL.PRECISION)
    return acc, l, m_new


@triton.jit
def _masked_forward_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, HK, Sk, D]
    v_ptr,  # [B, HK, Sk, DV]
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    sinks_ptr,  # [H] or None
    mask_lists_ptr,  # int32, see ``lists``
    mask_bits_ptr,  # [partial blocks, 128, 4] int32
    q_strides: Strides, k_strides: Strides, v_strides: Strides, o_strides: Strides,
    lists: MaskLists,  # of the blocks of queries
    sizes: MaskedSizes,
    scale,  # softmax_scale * log2(e); with a softcap what ``cap_scores`` takes
    softcap,  # softcap * log2(e), or None
    CALL: tl.constexpr,  # MaskedCall
    TILE: tl.constexpr,  # MaskedTile
):  # fmt: skip
    """Attend BLOCK_M rows of one head. Grid: (tiles * B * H,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_DV: tl.constexpr = CALL.BLOCK_DV
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
    q_base = q_ptr + head_offset(b, h, q_strides.b, q_strides.h) * CALL.ALIGN + first_row.to(tl.int64) * q_strides.ROW
    k_base = k_ptr + head_offset(b, h // CALL.GROUP, k_strides.b, k_strides.h) * CALL.ALIGN
    v_base = v_ptr + head_offset(b, h // CALL.GROUP, v_strides.b, v_strides.h) * CALL.ALIGN
    q_ptrs = q_base + rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
    k_ptrs = k_base + key_rows[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
    v_ptrs = v_base + key_rows[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, CALL.D, CALL.MASK_M, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks_ptr is not None:  # as if a key with this score and a value of 0 came first
        sink = tl.load(sinks_ptr + h).to(tl.float32) * 1.4426950408889634
        l = tl.zeros([BLOCK_M], tl.float32) + tl.where(sink == -float("inf"), 0.0, 1.0)
        m = tl.zeros([BLOCK_M], tl.float32) + sink
    else:
        l = tl.zeros([BLOCK_M], tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)

    start, end, start_partial, end_partial = find_lists(mask_lists_ptr, lists, b, h, first_row // 128)
    in_block = offs_m % 128
    for i in tl.range(0, (end - start) * STEPS, 1, num_stages=TILE.NUM_STAGES):
        start_n = tl.load(mask_lists_ptr + start + i // STEPS) * 128 + i % STEPS * TILE.BLOCK_N
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, mask_bits_ptr, start_n, start_n, 0, offs_n, in_block, offs_d, offs_dv,
            seqlen_k, scale, softcap, k_strides, v_strides, CALL, False,
        )  # fmt: skip
    for i in tl.range(0, (end_partial - start_partial) // 2 * STEPS, 1, num_stages=1):
        entry = mask_lists_ptr + start_partial + i // STEPS * 2
        inside = i % STEPS * TILE.BLOCK_N
        start_n, place = tl.load(entry) * 128 + inside, tl.load(entry + 1)
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, mask_bits_ptr, place, start_n, inside, offs_n, in_block, offs_d, offs_dv,
            seqlen_k, scale, softcap, k_strides, v_strides, CALL, True,
        )  # fmt: skip

    # A row that met no key has l == 0: its output is 0 and its LSE -inf.
    has_keys = l != 0
    if CALL.PRECISION == "ieee":  # a reciprocal loses two units in the last place
        out = tl.div_rn(acc, tl.where(has_keys, l, 1.0)[:, None])
    else:
        out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    o_base = (
        o_ptr + head_offset(b, h, o_strides.b, o_strides.h) * CALL.ALIGN_OUT + first_row.to(tl.int64) * o_strides.ROW
    )
    o_mask = offs_m[:, None] < seqlen_q
    if CALL.DV != CALL.BLOCK_DV:
        o_mask = o_mask & (offs_dv[None, :] < CALL.DV)
    tl.store(o_base + rows[:, None] * o_strides.ROW + offs_dv[None, :], out.to(o_ptr.dtype.element_ty), mask=o_mask)
    if CALL.STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) * 0.6931471805599453, -float("inf"))
        tl.store(lse_ptr + head.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
