"""Child process: run the sums of products of gradients in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from flashmoe_science.attention.backward.primitives import add_product, empty_sum


@triton.jit
def _sums_kernel(first_ptr, more_ptr, out_ptr, products, PRECISION: tl.constexpr):
    """Add one product of 16 x 16 numbers that are ``first``, then some that are ``more``."""
    acc = empty_sum(16, 16, PRECISION)
    identity = tl.where(tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :], 1.0, 0.0)
    acc = add_product(acc, tl.full([16, 16], 0.0, tl.float32) + tl.load(first_ptr), identity, PRECISION)
    for _ in range(products):
        acc = add_product(acc, tl.full([16, 16], 0.0, tl.float32) + tl.load(more_ptr), identity, PRECISION)
    places = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + places, acc[0])


def sums(first: float, more: float, products: int, precision: str) -> float:
    """Return the sum, which is the same in all places."""
    out = torch.full((16, 16), math.nan)
    _sums_kernel[(1,)](torch.tensor([first]), torch.tensor([more]), out, products, precision)
    assert (out == out[0, 0]).all() or out.isnan().all()
    return out[0, 0].item()


if __name__ == "__main__":
    # 1 is less than half a unit in the last place of 2**25: a plain sum never grows.
    assert sums(2.0**25, 1.0, 1000, "tf32") == 2.0**25
    assert sums(2.0**25, 1.0, 1000, "ieee") == 2.0**25 + 1000
    assert sums(3e38, 3e38, 3, "ieee") == math.inf  # and not NaN
    assert sums(3e38, -3e38, 3, "ieee") < -5e37
    assert math.isnan(sums(math.nan, 1.0, 2, "ieee"))
    print("right")
