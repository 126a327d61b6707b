"""One call of ``sparse_mla``, described: the key to plans, prepared launches, cases and evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import InputError
from ..problem import (
    ITEM_BYTES,
    LARGEST_SCALE,
    LOG2_E,
    MAX_POSITIONS,
    MAX_SPLITS,
    Strides,
    dense_strides,
    output_strides,
)

# A row of a cache in fp8, in order: columns of e4m3, an fp32 scale for each SCALED_COLUMNS of them, columns of bf16.
FP8_COLUMNS, SCALED_COLUMNS, ROTATED_COLUMNS = 512, 128, 64
FP8_ROW_BYTES = FP8_COLUMNS + 4 * (FP8_COLUMNS // SCALED_COLUMNS) + 2 * ROTATED_COLUMNS
ROW_ALIGNMENT = 16  # bytes of which the start of a row in fp8 is a multiple, so that its scales are aligned


@dataclass(frozen=True, slots=True)
class SparseProblem:
    """Sizes, dtype and memory layout of one call of ``sparse_mla``.

    Strides are in elements: of q ``[B, H, Sq, D]``, of the cache ``[PAGES, PAGE_SIZE, D]``, of a cache in fp8 in bytes;
    without a page table a page is the cache of one sequence.
    """

    batch: int
    heads: int
    seqlen_q: int
    capacity: int  # rows that a sequence has in the cache
    top_k: int  # indices of a query
    head_dim: int
    head_dim_v: int  # values are the first columns of a row
    dtype: str  # "fp16", "bf16" or "fp32"
    page_size: int = 0  # 0: no page table
    pages: int = 0  # in the cache; without a page table its sequences
    is_fp8: bool = False  # rows of the cache have FP8_ROW_BYTES bytes, and q is in dtype
    sinks: str = ""  # dtype of one logit a head; "": none
    softmax_scale: float | None = None
    num_splits: int = 0  # 0: the plan chooses
    batch_invariant: bool = False
    return_lse: bool = False
    q_strides: Strides = ()  # type: ignore[assignment]
    kv_strides: tuple[int, int] = ()  # type: ignore[assignment] # of a page and of a row
    table_stride: int = 0
    index_strides: tuple[int, int] = ()  # type: ignore[assignment] # of a sequence and of a query
    pointer_alignment: int = 16  # bytes by which the addresses of q and the cache are multiples, 16 at the most

    def __post_init__(self) -> None:
        """Fill contiguous strides in, and check what does not depend on tensors."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        for name in ("batch", "heads", "seqlen_q", "capacity", "top_k", "page_size"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.capacity >= MAX_POSITIONS:
            raise InputError(
                f"caches must have fewer than 2**31 positions a sequence, got {self.capacity}",
                hint="a page table needs no more columns than the longest sequence has pages",
            )
        if not 1 <= self.head_dim_v <= self.head_dim:
            raise InputError(f"head_dim_v must be from 1 to D = {self.head_dim}, got {self.head_dim_v}")
        if self.softmax_scale is not None and not abs(self.softmax_scale) <= LARGEST_SCALE:  # NaN is not
            allowed = f"finite in fp32, so at most {LARGEST_SCALE:.3g} in size"
            raise InputError(f"softmax_scale must be {allowed}, got {self.softmax_scale}")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            raise InputError(f"num_splits must be 0 (the plan chooses) to {MAX_SPLITS}, got {self.num_splits}")
        if self.is_fp8 and (self.head_dim, self.head_dim_v) != (FP8_COLUMNS + ROTATED_COLUMNS, FP8_COLUMNS):
            expected = f"D {FP8_COLUMNS + ROTATED_COLUMNS} and DV {FP8_COLUMNS}"
            raise InputError(f"a cache in fp8 must have {expected}, got {self.head_dim} and {self.head_dim_v}")
        length = self.page_size or self.capacity
        row = FP8_ROW_BYTES if self.is_fp8 else self.head_dim
        table = -(-self.capacity // length) if length else 0
        defaults = {
            "pages": self.batch * table,
            "table_stride": table if self.page_size else 0,
            "q_strides": dense_strides(self.batch, self.heads, self.seqlen_q, self.head_dim),
            "kv_strides": (length * row, row),
            "index_strides": (self.seqlen_q * self.top_k, self.top_k),
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scale_log2(self) -> float:
        """The factor on q . k as the kernel gets it (in fp32)."""
        return self.scale * LOG2_E

    @property
    def rest(self) -> int:
        """Columns of a key behind those that are values."""
        return self.head_dim - self.head_dim_v

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of q and o."""
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the cache."""
        return FP8_ROW_BYTES if self.is_fp8 else self.head_dim * self.item_bytes

    @property
    def cache_alignment(self) -> int:
        """Elements of the cache, of one in fp8 bytes, of which the start of every row is a multiple."""
        return ROW_ALIGNMENT if self.is_fp8 else _alignment_of(self, self.kv_strides)

    @property
    def q_alignment(self) -> int:
        """Elements of q of which the start of every row is a multiple."""
        return _alignment_of(self, self.q_strides[:3])

    @property
    def output_strides(self) -> Strides:
        """Strides of the output ``[B, H, Sq, DV]``."""
        return output_strides(self.batch, self.heads, self.seqlen_q, self.head_dim_v, self.q_strides)

    @property
    def kv_bytes(self) -> float:
        """Bytes of the rows that indices name, each query's once."""
        return float(self.batch * self.seqlen_q * self.top_k * self.row_bytes)

    @property
    def flops(self) -> float:
        """Operations where no index is padding."""
        return 2.0 * self.batch * self.heads * self.seqlen_q * self.top_k * (self.head_dim + self.head_dim_v)

    def describe(self) -> str:
        """Return a short name, e.g. ``b8_h16_s1_32768_top2048_d576_512_bf16_page64``."""
        words = [f"b{self.batch}", f"h{self.heads}", f"s{self.seqlen_q}_{self.capacity}", f"top{self.top_k}"]
        words += [f"d{self.head_dim}_{self.head_dim_v}", self.dtype]
        words += ["fp8"] if self.is_fp8 else []
        words += [f"page{self.page_size}"] if self.page_size else []
        words += ["sinks"] if self.sinks else []
        words += [f"splits{self.num_splits}"] if self.num_splits else []
        words += ["invariant"] if self.batch_invariant else []
        return "_".join(words)


def _alignment_of(problem: SparseProblem, strides: tuple[int, ...]) -> int:
    """Return the largest power of two, in elements, of which every row is a multiple: 16 bytes at the most."""
    bytes_ = problem.pointer_alignment
    for stride in strides:
        bytes_ = math.gcd(bytes_, stride * problem.item_bytes)
    return max(1, bytes_ // problem.item_bytes)
