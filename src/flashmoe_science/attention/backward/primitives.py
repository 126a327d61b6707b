"""Device helpers that the gradients in Triton share: P again from the LSE, and sums of products."""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import cap_scores


@triton.jit
def weigh(
    s, rows, cols, lse, bias_ptrs, seqlen_k, diagonal, window, softcap, slope,
    MASK_N: tl.constexpr, MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return P for one tile of scaled products, and the derivative of the softcap; rows lie along either axis."""
    cap = 1.0
    if softcap is not None:
        s = cap_scores(s, softcap, ACCURATE)
        t = s * (1 / softcap)
        cap = 1 - t * t
    if slope is not None:
        s -= slope * tl.abs(rows + diagonal - cols).to(tl.float32)
    if bias_ptrs is not None:
        s += tl.load(bias_ptrs).to(tl.float32)
    if MASK_RIGHT:
        s = tl.where(rows >= cols - (diagonal + window.right), s, -float("inf"))
    if MASK_LEFT:
        s = tl.where(rows <= cols - (diagonal - window.left), s, -float("inf"))
    if MASK_N:
        s = tl.where(cols < seqlen_k, s, -float("inf"))
    if bias_ptrs is None:
        p = tl.exp2(s - lse)
    else:
        p = tl.exp(s - lse)
    return p, cap


@triton.jit
def empty_sum(ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """Return a sum [ROWS, COLUMNS] of no products: (sum,); for fp32 (sum, what rounding added to it)."""
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PRECISION == "ieee":
        result = (zeros, zeros)
    else:
        result = (zeros,)  # type: ignore[assignment] # a constant decides
    return result


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """Return the sum with a @ b added. fp32 uses Kahan's compensation, with a tile's sum as one number.

    A step may add only 16 products to a sum of thousands. Without compensation its rounding errors are larger than
    those of eager PyTorch: with 10,000 rows that see one key, 1.4 times what the error rule allows.
    """
    if PRECISION == "ieee":
        part = tl.dot(a, b, input_precision=PRECISION) - acc[1]
        total = acc[0] + part
        rest = (total - acc[0]) - part
        result = (total, tl.where(tl.abs(rest) < float("inf"), rest, 0.0))  # an infinite sum stays infinite
    else:
        result = (tl.dot(a, b, acc[0], input_precision=PRECISION),)  # type: ignore[assignment]
    return result


@triton.jit
def row_products(o, do, PRECISION: tl.constexpr):
    """Return the sum of o * do over each row, of operands [BLOCK_M, BLOCK_DV], added as ``tl.dot`` adds dP = dO V^T.

    In a row that sees one key O is V and dS has to be 0, which it is of dP less this. Added in another order the same
    numbers leave a rest of rounding, which sums of many rows showed. So this is the diagonal of a product; what lies
    beside it is waste, in a pass that waits for memory.
    """
    products = tl.dot(o, tl.trans(do), input_precision=PRECISION)  # [BLOCK_M, BLOCK_M]
    row = tl.arange(0, o.shape[0])
    return tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)


@triton.jit
def load_lse(ptrs, mask, UNIT: tl.constexpr):
    """Load LSEs in the unit of the scores; +inf where P is to be 0: in rows that saw no key, and outside the mask."""
    if mask is None:
        lse = tl.load(ptrs)
    else:
        lse = tl.load(ptrs, mask=mask, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse) * UNIT
