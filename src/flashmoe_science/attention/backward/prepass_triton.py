"""Kernels before and after the Hopper backward kernel (Triton): delta and LSE of each query row, and dQ in order.

Source: FlashAttention-2 (Dao, 2023) for delta = rowsum(dO * O). Ours: the layouts that ``backward_gluon_sm90`` reads
and writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .primitives import row_products


@triton.jit
def _prepare_backward_kernel(
    o_ptr,  # [B, H, Sq, DV]
    do_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    dlse_ptr,  # [B, H, Sq] fp32, if HAS_DLSE
    stats_ptr,  # [B * H * tiles_m, 2, BLOCK_M] fp32: LSE * log2(e), delta
    dq_semaphore_ptr,  # [B * H * tiles_m * WRITERS + 1] int32: dQ added so far, and how many key tiles were fetched
    stride_ob, stride_oh, stride_dob, stride_doh,  # in units of UNIT elements
    heads, seqlen_q, tiles_m,
    STRIDE_OM: tl.constexpr,
    STRIDE_DOM: tl.constexpr,
    UNIT: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,  # DV rounded up to a power of two, 16 at least
    BLOCK_M: tl.constexpr,
    WRITERS: tl.constexpr,  # of a query tile
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Compute the numbers of a query tile's rows, and set its semaphores to 0. Grid: (B * H * tiles_m,).

    From the last tile to the first, as the next kernel starts with the first heads: what it reads still lies in L2.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tile // tiles_m
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_DV)
    o_ptr += (b * stride_ob + h * stride_oh) * UNIT
    do_ptr += (b * stride_dob + h * stride_doh) * UNIT
    for start in tl.static_range(0, BLOCK_M, 64):  # 128 rows at once: twice the waste, 174 registers
        offs = start + tl.arange(0, 64)
        offs_m = tile % tiles_m * BLOCK_M + offs
        mask = (offs_m < seqlen_q)[:, None] & (offs_d < DV)[None, :]
        rows = offs_m.to(tl.int64)[:, None]
        o = tl.load(o_ptr + rows * STRIDE_OM + offs_d[None, :], mask=mask, other=0.0)
        do = tl.load(do_ptr + rows * STRIDE_DOM + offs_d[None, :], mask=mask, other=0.0)
        delta = row_products(o, do, "tf32")  # which is not read: operands have 16 bits
        row = head.to(tl.int64) * seqlen_q + offs_m
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + row, mask=offs_m < seqlen_q, other=0.0)
        lse = tl.load(lse_ptr + row, mask=offs_m < seqlen_q, other=-float("inf"))
        # Rows without a key, and behind the last: P = exp2(score - inf) = 0. The gradient of their LSE may be NaN.
        delta = tl.where(lse == -float("inf"), 0.0, delta)
        lse = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
        stats = stats_ptr + tile.to(tl.int64) * (2 * BLOCK_M) + offs
        tl.store(stats, lse)
        tl.store(stats + BLOCK_M, delta)
    tl.store(dq_semaphore_ptr + tile * WRITERS + tl.arange(0, WRITERS), tl.zeros([WRITERS], tl.int32))
    if tile == 0:
        tl.store(dq_semaphore_ptr + tl.num_programs(0) * WRITERS, 0)


@triton.jit
def _finish_dq_kernel(
    acc_ptr,  # [B * H * tiles_m, PARTS, 4096] fp32, as the registers of a warpgroup held it
    dq_semaphore_ptr,  # [B * H * tiles_m, WRITERS] int32: key tiles that the query tile sees
    dq_ptr,  # [B, H, Sq, D]
    stride_b, stride_h,  # in units of UNIT elements
    heads, seqlen_q, tiles_m,
    scale,
    STRIDE_M: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # of 64 rows by 64 columns
    WRITERS: tl.constexpr,  # of a query tile
):  # fmt: skip
    """Scale a part of dQ and store it as a matrix. Grid: (B * H * tiles_m * PARTS,).

    From the last tile to the first, as the last heads were written last: they still lie in L2.
    """
    gdc_wait()  # all before ran while the kernel before was ending
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, part = program // PARTS, program % PARTS
    head = tile // tiles_m
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    offs = tl.arange(0, 4096)
    # Nobody added to the dQ of a tile that sees no key: it is 0.
    written = tl.where(tl.load(dq_semaphore_ptr + tile * WRITERS) > 0, 4096, 0)
    acc = tl.load(acc_ptr + program.to(tl.int64) * 4096 + offs, mask=offs < written, other=0.0)
    # columns / 8, warp, row, lane, 8 rows further, column -> rows, columns
    acc = acc.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
    DOWN: tl.constexpr = BLOCK_M // 64  # parts of a tile that lie below one another; the others lie side by side
    offs_m = tile % tiles_m * BLOCK_M + part % DOWN * 64 + tl.arange(0, 64)
    offs_d = part // DOWN * 64 + tl.arange(0, 64)
    mask = (offs_m < seqlen_q)[:, None] & (offs_d < D)[None, :]
    dq = dq_ptr + (b * stride_b + h * stride_h) * UNIT + offs_m.to(tl.int64)[:, None] * STRIDE_M + offs_d[None, :]
    tl.store(dq, (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask)
