"""Groups of constants that the kernels of the experts take, each annotated ``constexpr`` where a kernel takes it."""

from __future__ import annotations

from typing import NamedTuple


class Activation(NamedTuple):
    """The activation between the two products; by default none."""

    KIND: str = ""  # as ``fused_moe`` names it; "": nothing
    GATED: bool = False  # the first product has columns of a gate, and of what it scales
    INTERLEAVED: bool = False  # and these alternate
    ALPHA: float = 0.0  # of "swiglu_clamped", as LIMIT
    LIMIT: float = 0.0


class WeightStrides(NamedTuple):
    """Strides of weights ``[E, N, K]``, elements; the product sums over K."""

    E: int
    N: int
    K: int


class ProductTile(NamedTuple):
    """What one program computes of a product ``[M, N]``, BLOCK_K of the sum at a time."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int  # row tiles that are visited together, so that their operands stay in L2
    SWAP: bool  # the transpose is computed: few rows become columns of the matrix unit's tile
    PRECISION: str  # of fp32 operands
    NUM_STAGES: int
