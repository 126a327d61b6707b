"""Device helpers that more than one attention kernel uses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptrs, offs_row, rows, offs_col, cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """Load ``[ROWS, COLS]`` with zeros outside ``rows`` and ``cols``; a bound known to hold costs nothing."""
    if MASK_ROWS and MASK_COLS:
        return tl.load(ptrs, mask=(offs_row[:, None] < rows) & (offs_col[None, :] < cols), other=0.0)
    if MASK_ROWS:
        return tl.load(ptrs, mask=offs_row[:, None] < rows, other=0.0)
    if MASK_COLS:
        return tl.load(ptrs, mask=offs_col[None, :] < cols, other=0.0)
    return tl.load(ptrs)


@triton.jit
def head_offset(b, h, stride_b, stride_h):
    """Return the offset of one head in int64: ``b * stride_b`` alone can pass 2**31."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def used_lengths(sequences, b, seqlen_q, seqlen_k):
    """Return the lengths in use of a packed sequence whose place has ``seqlen_q`` rows and ``seqlen_k`` keys."""
    if sequences.seqused_q_ptr is not None:
        seqlen_q = tl.load(sequences.seqused_q_ptr + b)
    if sequences.seqused_k_ptr is not None:
        seqlen_k = tl.load(sequences.seqused_k_ptr + b)
    return seqlen_q, seqlen_k


@triton.jit
def bias_rows_of(bias_ptr, b, h, offs_m, seqlen_q, longest_q, bias_strides, ALIGN_BIAS: tl.constexpr):
    """Return pointers to the rows ``offs_m`` of a bias; None without one.

    Rows past the end read the last one: what they give is never stored. Packed, a bias has ``longest_q`` rows.
    """
    rows = None
    if bias_ptr is not None:
        bias_head = bias_ptr + head_offset(b, h, bias_strides.b, bias_strides.h) * ALIGN_BIAS
        last_row = seqlen_q - 1
        if longest_q is not None:
            last_row = tl.minimum(seqlen_q, longest_q) - 1
        rows = bias_head + tl.minimum(offs_m, last_row).to(tl.int64) * (bias_strides.m * ALIGN_BIAS)
    return rows


@triton.jit
def cap_scores(s, softcap, ACCURATE: tl.constexpr):
    """Return softcap * tanh(x) for s = x, or for s = 2 log2(e) x where a fast one will do.

    Beside 1 the fast one loses what a small tanh has: an error of 2**-23 times the softcap, which 16-bit inputs hide.
    """
    if ACCURATE:
        # An odd polynomial of least relative error (3e-9) up to 0.6: beyond, the other form loses two bits at most.
        x2 = s * s
        small = tl.fma(x2, -0.005895085167139769, 0.02079591527581215)
        small = tl.fma(small, x2, -0.05378381535410881)
        small = tl.fma(small, x2, 0.13331924378871918)
        small = tl.fma(small, x2, -0.33333298563957214)
        small = tl.fma(small * x2, s, s)
        large = 1.0 - tl.div_rn(2.0, 1.0 + tl.exp2(tl.abs(s) * 2.885390081777927))
        return softcap * tl.where(tl.abs(s) < 0.6, small, tl.where(s < 0, -large, large))
    return softcap - 2 * softcap / (1 + tl.exp2(s))


@triton.jit
def load_dropout(dropout_seed_ptr, head, dropout_last, dropout_scale):
    """Return the arguments of ``kept_by`` and its callers for one head, b * H + h."""
    seed, offset = tl.load(dropout_seed_ptr), tl.load(dropout_seed_ptr + 1)
    return seed, offset.to(tl.uint32), head.to(tl.uint32), dropout_last.to(tl.uint32, bitcast=True), dropout_scale


@triton.jit
def kept_by(dropout, offs_m, first_key, BLOCK_N: tl.constexpr):
    """Return which elements of a tile ``[BLOCK_M, BLOCK_N]`` dropout keeps.

    The numbers of four keys in a row, the first a multiple of four, are the four that Philox 4x32 of 10 rounds makes
    of their row, of that first key over four, and of their head: the same in whatever tile they lie. ``last`` is the
    largest number that drops: one more, the least that keeps, can be 2**32.

    Args:
        dropout: what ``load_dropout`` gave.
        offs_m: ``[BLOCK_M]``, numbers of the rows.
        first_key: of the tile, a multiple of four.
        BLOCK_N: of the tile, a multiple of four.
    """
    seed, offset, head, last, _scale = dropout
    fours = first_key // 4 + tl.arange(0, BLOCK_N // 4)
    rows, fours = offs_m[:, None].to(tl.uint32), fours[None, :].to(tl.uint32)
    one, two, three, four = tl.philox(seed, rows, fours, head, offset)
    kept = tl.join(tl.join(one > last, three > last), tl.join(two > last, four > last))
    return tl.reshape(kept, [offs_m.shape[0], BLOCK_N])
