"""Merge partial results of attention over shares of the keys (Triton, sm_80 and newer).

Source: Flash-Decoding (Dao et al., 2023); the order of the sum is fixed, so results have the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import head_offset


@triton.jit
def _weight(score, NATURAL: tl.constexpr):
    """Return how much a share counts, of its largest score less that of all shares."""
    return tl.exp(score) if NATURAL else tl.exp2(score)


@triton.jit
def _merge_partials_kernel(
    o_part_ptr,  # [SPLITS, B, H, Sq, DV] fp32, of each share before its sum divides it
    sums_part_ptr,  # [SPLITS, B, H, Sq, 2] fp32: the largest score of a row, and its sum
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    stride_ob, stride_oh,  # in units of ALIGN_O elements
    rows_total,  # B * H * Sq
    heads, seqlen_q,
    ALIGN_O: tl.constexpr, STRIDE_OM: tl.constexpr, SPLITS: tl.constexpr, DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
    NATURAL: tl.constexpr,  # scores are to base e, else to base 2
    STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one row. Grid: (B * H * Sq,)."""
    row = tl.program_id(0)
    token, row_of_heads = row % seqlen_q, row // seqlen_q
    b, h = row_of_heads // heads, row_of_heads % heads
    offs_s, offs_dv = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DV)
    mask_s, mask_dv = offs_s < SPLITS, offs_dv < DV

    sums = sums_part_ptr + 2 * (offs_s * rows_total + row)  # [BLOCK_SPLITS]
    m = tl.load(sums, mask=mask_s, other=-float("inf"))
    l = tl.load(sums + 1, mask=mask_s, other=0.0)
    top = tl.max(m, 0)
    # A row that saw no key has -inf in every share, and -inf - -inf is NaN.
    top_safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(l * _weight(m - top_safe, NATURAL), 0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for split in tl.static_range(SPLITS):
        at = split * rows_total + row
        weight = _weight(tl.load(sums_part_ptr + 2 * at) - top_safe, NATURAL)
        acc += weight * tl.load(o_part_ptr + at * DV + offs_dv, mask=mask_dv, other=0.0)
    has_keys = total != 0
    out = acc * tl.where(has_keys, 1.0 / total, 0.0)
    o_row = head_offset(b, h, stride_ob, stride_oh) * ALIGN_O + token.to(tl.int64) * STRIDE_OM
    tl.store(o_ptr + o_row + offs_dv, out.to(o_ptr.dtype.element_ty), mask=mask_dv)
    if STORE_LSE:
        lse = top + tl.log(total) if NATURAL else (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + row, tl.where(has_keys, lse, -float("inf")))
