"""Merge partial results of attention over shares of the keys (Triton, sm_80 and newer).

Source: Flash-Decoding (Dao et al., 2023); the order of the sum is fixed, so results have the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import head_offset


@triton.jit
def _merge_partials_kernel(
    o_part_ptr,  # [SPLITS, B, H, Sq, DV] fp32, each share normalised
    lse_part_ptr,  # [SPLITS, B, H, Sq] fp32, natural log
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    stride_ob, stride_oh,  # in units of ALIGN_O elements
    rows_total,  # B * H * Sq
    heads, seqlen_q, tiles_m,
    ALIGN_O: tl.constexpr, STRIDE_OM: tl.constexpr, SPLITS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_M rows of one head. Grid: (tiles_m * B * H,)."""
    pid = tl.program_id(0)
    tile, row_of_heads = pid % tiles_m, pid // tiles_m
    b, h = row_of_heads // heads, row_of_heads % heads
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_m = offs_m < seqlen_q
    mask = mask_m[:, None] & (offs_dv[None, :] < DV)
    row = row_of_heads.to(tl.int64) * seqlen_q + offs_m  # [BLOCK_M], of all rows of one split

    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(lse_part_ptr + split * rows_total + row, mask=mask_m, other=-float("inf")))
    # A row that saw no key has lse == -inf in every split, and -inf - -inf is NaN.
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for split in tl.static_range(SPLITS):
        lse = tl.load(lse_part_ptr + split * rows_total + row, mask=mask_m, other=-float("inf"))
        weight = tl.exp(lse - top_safe)
        total += weight
        part = tl.load(o_part_ptr + (split * rows_total + row)[:, None] * DV + offs_dv[None, :], mask=mask, other=0.0)
        acc += part * weight[:, None]
    has_keys = total != 0
    out = acc * tl.where(has_keys, 1.0 / total, 0.0)[:, None]
    o_base = o_ptr + head_offset(b, h, stride_ob, stride_oh) * ALIGN_O
    o_ptrs = o_base + offs_m.to(tl.int64)[:, None] * STRIDE_OM + offs_dv[None, :]
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=mask)
    if STORE_LSE:
        tl.store(lse_ptr + row, tl.where(has_keys, top + tl.log(total), -float("inf")), mask=mask_m)
