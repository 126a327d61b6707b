"""Attention forward, streaming over the keys (Triton, sm_80 and newer).

One program owns ``BLOCK_M`` query rows of one head and walks over the keys in tiles of ``BLOCK_N`` with the online
softmax. With ``SPLITS > 1`` it walks over one share of the keys and leaves partial results for ``merge_triton``.

Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for the loop; Flash-Decoding (Dao et al., 2023) for the split.
Ours: tiles free of masks except at the edges, rows without keys, one grid axis in longest-first order when causal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import head_offset, load_rows


@triton.jit
def _attend(
    acc, l, m, q, k_ptrs, v_ptrs, start_n, offs_m, offs_n, offs_d, offs_dv, seqlen_k, diagonal, scale_log2,
    STRIDE_KN: tl.constexpr, STRIDE_VN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    MASK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, EMPTY_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into the running output, sum and maximum."""
    step = tl.full([], 0, tl.int64) + start_n  # the interpreter counts loops in Python integers
    cols = start_n + offs_n
    k = load_rows(k_ptrs + step * STRIDE_KN, cols, seqlen_k, offs_d, D, MASK_N, MASK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_N]
    if IS_CAUSAL:
        s = tl.where(offs_m[:, None] + diagonal >= cols[None, :], s, -float("inf"))
    if MASK_N:
        s = tl.where(cols[None, :] < seqlen_k, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has met no key has m == -inf, and -inf - -inf is NaN.
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new) if EMPTY_ROWS else m_new
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    v = load_rows(v_ptrs + step * STRIDE_VN, cols, seqlen_k, offs_dv, DV, MASK_N, MASK_DV)  # [BLOCK_N, BLOCK_DV]
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l, m_new


@triton.jit
def _forward_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, HK, Sk, D]
    v_ptr,  # [B, HK, Sk, DV]
    o_ptr,  # [B, H, Sq, DV]; with SPLITS > 1 fp32 [SPLITS, B, H, Sq, DV], each share normalised
    lse_ptr,  # [B, H, Sq] fp32, natural log; with SPLITS > 1 [SPLITS, B, H, Sq]
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,  # in units of ALIGN elements
    stride_ob, stride_oh,  # in units of ALIGN_O elements
    batch, heads, seqlen_q, seqlen_k, tiles_m,
    scale_log2,  # softmax_scale * log2(e)
    STRIDE_QM: tl.constexpr, STRIDE_QD: tl.constexpr, STRIDE_KN: tl.constexpr, STRIDE_KD: tl.constexpr,
    STRIDE_VN: tl.constexpr, STRIDE_VD: tl.constexpr, STRIDE_OM: tl.constexpr,
    ALIGN: tl.constexpr,  # every row of q, k and v starts at a multiple of this many elements
    ALIGN_O: tl.constexpr,  # every row of o starts at a multiple of this many elements
    GROUP: tl.constexpr,  # query heads that share one K/V head
    SPLITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, EMPTY_ROWS: tl.constexpr, WIDE: tl.constexpr, STORE_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one head to one share of the keys. Grid: (tiles_m * SPLITS * B * H,)."""
    pid = tl.program_id(0)
    tile = pid % tiles_m
    split = (pid // tiles_m) % SPLITS
    row_of_heads = pid // (tiles_m * SPLITS)
    b, h = row_of_heads // heads, row_of_heads % heads
    if IS_CAUSAL:
        tile = tiles_m - 1 - tile  # the longest rows first: the short ones fill the gaps at the end

    first_row = tile * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    if WIDE:  # an offset inside one tile can pass 2**31: strides of more than 2**31 / BLOCK elements
        rows, offs_d, offs_dv = rows.to(tl.int64), offs_d.to(tl.int64), offs_dv.to(tl.int64)
        key_rows = offs_n.to(tl.int64)
    else:
        key_rows = offs_n
    q_base = q_ptr + head_offset(b, h, stride_qb, stride_qh) * ALIGN + first_row.to(tl.int64) * STRIDE_QM
    k_base = k_ptr + head_offset(b, h // GROUP, stride_kb, stride_kh) * ALIGN
    v_base = v_ptr + head_offset(b, h // GROUP, stride_vb, stride_vh) * ALIGN
    k_ptrs = k_base + key_rows[:, None] * STRIDE_KN + offs_d[None, :] * STRIDE_KD
    v_ptrs = v_base + key_rows[:, None] * STRIDE_VN + offs_dv[None, :] * STRIDE_VD
    q_ptrs = q_base + rows[:, None] * STRIDE_QM + offs_d[None, :] * STRIDE_QD
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, D, True, D != BLOCK_D)  # [BLOCK_M, BLOCK_D]

    # Keys [begin, end) of this program; from `unmasked` on, tiles cross the diagonal or the end of the keys.
    diagonal = seqlen_k - seqlen_q  # row m sees keys up to m + diagonal
    end = seqlen_k
    if IS_CAUSAL:
        end = tl.maximum(tl.minimum(seqlen_k, first_row + BLOCK_M + diagonal), 0)
    begin = 0
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(seqlen_k, SPLITS), BLOCK_N) * BLOCK_N
        begin = split * share
        end = tl.minimum(end, begin + share)
    unmasked = end // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        unmasked = tl.minimum(unmasked, tl.maximum(first_row + diagonal + 1, 0) // BLOCK_N * BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for start_n in tl.range(begin, unmasked, BLOCK_N, num_stages=NUM_STAGES):
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, start_n, offs_m, offs_n, offs_d, offs_dv, seqlen_k, diagonal, scale_log2,
            STRIDE_KN, STRIDE_VN, D, DV, D != BLOCK_D, DV != BLOCK_DV, False, False, False, PRECISION,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, BLOCK_N, num_stages=1):
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, start_n, offs_m, offs_n, offs_d, offs_dv, seqlen_k, diagonal, scale_log2,
            STRIDE_KN, STRIDE_VN, D, DV, D != BLOCK_D, DV != BLOCK_DV, True, IS_CAUSAL, EMPTY_ROWS, PRECISION,
        )  # fmt: skip

    # A row that met no key has l == 0: its output is 0 and its LSE -inf.
    has_keys = l != 0
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    part = 0
    if SPLITS > 1:
        part = split.to(tl.int64) * batch
    o_base = o_ptr + head_offset(part + b, h, stride_ob, stride_oh) * ALIGN_O + first_row.to(tl.int64) * STRIDE_OM
    o_ptrs = o_base + rows[:, None] * STRIDE_OM + offs_dv[None, :]
    o_mask = offs_m[:, None] < seqlen_q
    if DV != BLOCK_DV:
        o_mask = o_mask & (offs_dv[None, :] < DV)
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=o_mask)
    if STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) * 0.6931471805599453, -float("inf"))
        lse_row = ((part + b) * heads + h).to(tl.int64) * seqlen_q
        tl.store(lse_ptr + lse_row + offs_m, lse, mask=offs_m < seqlen_q)
