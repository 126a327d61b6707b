"""One attention call, described: the key to plans, prepared launches, cases and evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
LOG2_E = math.log2(math.e)
LARGEST_SCALE = (2 - 2**-23) * 2.0**127 / LOG2_E  # kernels take it times log2(e), in fp32

Strides = tuple[int, int, int, int]


def dense_strides(_batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Return the strides of a contiguous ``[B, H, S, D]`` tensor, in elements."""
    return heads * seqlen * head_dim, seqlen * head_dim, head_dim, 1


def canonical_strides(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Return strides in which axes of one element, never stepped along, have 0, the last axis 1."""
    b, h, s, d = (stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return b, h, s, d if shape[3] > 1 else 1


def output_strides(batch: int, heads: int, seqlen_q: int, head_dim_v: int, q_strides: Strides) -> Strides:
    """Return the strides of the output: [B, S, H, D] in memory where q (canonical strides) is so, else contiguous."""
    _, h, s, d = q_strides
    if d == 1 and seqlen_q > 1 and heads > 1 and h < s:
        return seqlen_q * heads * head_dim_v, head_dim_v, heads * head_dim_v, 1
    return dense_strides(batch, heads, seqlen_q, head_dim_v)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Sizes, dtype, mask and memory layout of one call of ``flash_attention``; strides are in elements."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str  # "fp16", "bf16" or "fp32"
    causal: bool = False
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    return_lse: bool = False
    q_strides: Strides = ()  # type: ignore[assignment] # left out: contiguous
    k_strides: Strides = ()  # type: ignore[assignment]
    v_strides: Strides = ()  # type: ignore[assignment]
    pointer_alignment: int = 16  # bytes by which the addresses of q, k and v are multiples, 16 at the most

    def __post_init__(self) -> None:
        """Fill contiguous strides in, and check what does not depend on tensors."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads_kv == 0 and self.heads != 0:
            raise InputError(f"heads_kv must be at least 1 with heads = {self.heads}, got 0")
        if self.heads_kv and self.heads % self.heads_kv:
            raise InputError(f"heads must be a multiple of heads_kv = {self.heads_kv}, got {self.heads}")
        if self.softmax_scale is not None and not abs(self.softmax_scale) <= LARGEST_SCALE:  # NaN is not
            allowed = f"finite in fp32, so at most {LARGEST_SCALE:.3g} in size"
            raise InputError(f"softmax_scale must be {allowed}, got {self.softmax_scale}")
        shapes = {
            "q_strides": (self.batch, self.heads, self.seqlen_q, self.head_dim),
            "k_strides": (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            "v_strides": (self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v),
        }
        for name, shape in shapes.items():
            if not getattr(self, name):
                object.__setattr__(self, name, dense_strides(*shape))

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scale_log2(self) -> float:
        """The factor on the scores for exponentials to base 2, as kernels get it (in fp32)."""
        return self.scale * LOG2_E

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of q, k, v and o."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of the output over all heads and sequences."""
        return self.batch * self.heads * self.seqlen_q

    @property
    def output_strides(self) -> Strides:
        """Strides of the output."""
        return output_strides(self.batch, self.heads, self.seqlen_q, self.head_dim_v, self.q_strides)

    @property
    def visible_scores(self) -> int:
        """Pairs of a query and a key that it may see, per head."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        diagonal = self.seqlen_k - self.seqlen_q  # row m sees keys 0 .. m + diagonal
        first = max(0, -diagonal)  # rows before see no key
        rows = self.seqlen_q - first
        return rows * (first + diagonal + 1) + rows * (rows - 1) // 2 if rows > 0 else 0

    @property
    def flops(self) -> float:
        """Operations of a call: for every visible score, 2 D for it and 2 DV for its share of the output."""
        return 2.0 * self.batch * self.heads * self.visible_scores * (self.head_dim + self.head_dim_v)

    def describe(self) -> str:
        """Return a short name, e.g. ``b1_h16_s512_d64_fp16_causal``."""
        heads = f"h{self.heads}" if self.heads == self.heads_kv else f"h{self.heads}_{self.heads_kv}"
        seqlen = f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"s{self.seqlen_q}_{self.seqlen_k}"
        dim = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_{self.head_dim_v}"
        return f"b{self.batch}_{heads}_{seqlen}_{dim}_{self.dtype}{'_causal' if self.causal else ''}"
