"""Attention forward over few keys, in one pass (Triton, sm_80 and newer, fp16 and bf16).

All keys of a head are in flight at once: warp ``w`` of a program owns keys ``[w * BLOCK_N, (w + 1) * BLOCK_N)``, so
there is no loop and no second kernel; the warps meet twice, for the maximum and for the sum. What bounds problems of
this size is the latency of one load, two small products and one store, and nothing else is left.

Source: the split of keys is that of Flash-Decoding (Dao et al., 2023), here over the warps of one block instead of over
blocks: a batched product whose batch axis Triton lays over the warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import head_offset


@triton.jit
def _forward_short_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, HK, Sk, D]
    v_ptr,  # [B, HK, Sk, DV]
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om,
    heads, seqlen_q, seqlen_k, tiles_m,
    scale_log2,  # softmax_scale * log2(e)
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_GROUPS: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one head to all keys; KEY_GROUPS * BLOCK_N >= Sk. Grid: (tiles_m * B * H,)."""
    pid = tl.program_id(0)
    tile, row_of_heads = pid % tiles_m, pid // tiles_m
    b, h = row_of_heads // heads, row_of_heads % heads
    rows = tl.arange(0, BLOCK_M)
    offs_m = tile * BLOCK_M + rows
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, KEY_GROUPS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [KEY_GROUPS, BLOCK_N]
    q_base = q_ptr + head_offset(b, h, stride_qb, stride_qh)
    k_base = k_ptr + head_offset(b, h // GROUP, stride_kb, stride_kh)
    v_base = v_ptr + head_offset(b, h // GROUP, stride_vb, stride_vh)

    q_ptrs = q_base + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    k_ptrs = (
        k_base + offs_n[:, :, None] * stride_kn + offs_d[None, None, :] * stride_kd
    )  # [KEY_GROUPS, BLOCK_N, BLOCK_D]
    v_ptrs = v_base + offs_n[:, :, None] * stride_vn + offs_dv[None, None, :] * stride_vd
    q_mask = offs_m[:, None] < seqlen_q if MASK_M else tl.full([BLOCK_M, 1], True, tl.int1)
    n_mask = (offs_n < seqlen_k)[:, :, None] if MASK_N else tl.full([1, 1, 1], True, tl.int1)
    if D != BLOCK_D:
        q_mask = q_mask & (offs_d[None, :] < D)
    k_mask = n_mask & (offs_d[None, None, :] < D) if D != BLOCK_D else n_mask
    v_mask = n_mask & (offs_dv[None, None, :] < DV) if DV != BLOCK_DV else n_mask
    if MASK_M or D != BLOCK_D:
        q = tl.load(q_ptrs, mask=q_mask, other=0.0)
    else:
        q = tl.load(q_ptrs)
    if MASK_N or D != BLOCK_D:
        k = tl.load(k_ptrs, mask=k_mask, other=0.0)
    else:
        k = tl.load(k_ptrs)
    if MASK_N or DV != BLOCK_DV:  # V is asked for before the first product, so that both latencies overlap
        v = tl.load(v_ptrs, mask=v_mask, other=0.0)
    else:
        v = tl.load(v_ptrs)

    q3 = tl.broadcast_to(q[None, :, :], [KEY_GROUPS, BLOCK_M, BLOCK_D])
    s = tl.dot(q3, tl.permute(k, (0, 2, 1))) * scale_log2  # [KEY_GROUPS, BLOCK_M, BLOCK_N]
    if IS_CAUSAL:
        last = offs_m + seqlen_k - seqlen_q
        s = tl.where(last[None, :, None] >= offs_n[:, None, :], s, -float("inf"))
    if MASK_N:
        s = tl.where((offs_n < seqlen_k)[:, None, :], s, -float("inf"))
    m = tl.max(tl.max(s, 2), 0)  # [BLOCK_M]
    m_safe = tl.where(m == -float("inf"), 0.0, m) if IS_CAUSAL else m  # a row without keys: -inf - -inf is NaN
    p = tl.exp2(s - m_safe[None, :, None])
    l = tl.sum(tl.sum(p, 2), 0)
    acc = tl.sum(tl.dot(p.to(v.dtype), v), 0)  # [BLOCK_M, BLOCK_DV]
    has_keys = l > 0
    out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]

    o_base = o_ptr + head_offset(b, h, stride_ob, stride_oh)
    o_mask = offs_m[:, None] < seqlen_q
    if DV != BLOCK_DV:
        o_mask = o_mask & (offs_dv[None, :] < DV)
    tl.store(o_base + offs_m[:, None] * stride_om + offs_dv[None, :], out.to(o_ptr.dtype.element_ty), mask=o_mask)
    if STORE_LSE:
        lse = tl.where(has_keys, (m + tl.log2(l)) * 0.6931471805599453, -float("inf"))
        tl.store(lse_ptr + row_of_heads.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
