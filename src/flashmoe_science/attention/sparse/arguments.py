"""Groups of arguments of the kernels that attend to indexed rows: see ``attention.kernel_arguments``."""

from __future__ import annotations

from typing import Any, NamedTuple


class SparseStrides(NamedTuple):
    """Strides of the cache, of indices and of the page table; int64, elements unless said."""

    page: Any  # of a page of the cache, in units of what its rows are aligned to; without pages: of a sequence
    ib: Any  # of the indices of a sequence
    im: Any  # of the indices of a query
    tb: Any  # of the pages of a sequence
    ROW: Any  # of a row of the cache


class SparseSizes(NamedTuple):
    """Sizes of a call."""

    seqlen_q: Any
    capacity: Any  # rows that a sequence has in the cache
    top_k: Any
    splits: Any  # programs that share the indices of a query
    each: Any  # indices of a split


class SparseCall(NamedTuple):
    """Constants of a call."""

    HEADS: int
    DV: int  # columns of values, the first of a key
    REST: int  # columns of a key behind them, or 0
    ALIGN_Q: int  # every row of q starts at a multiple of this many elements
    ALIGN: int  # every row of the cache
    ALIGN_O: int  # every row of o
    PAGE_SIZE: int  # 0: without a page table
    WIDE: bool  # offsets in the cache, in units of ALIGN, can pass 2**31
    STORE_LSE: bool


class SparseTile(NamedTuple):
    """What one program works on."""

    BLOCK_M: int
    BLOCK_N: int
    TILES_M: int  # row tiles of the heads of a query
    SPLIT: bool  # a query may have more than one split
    NUM_STAGES: int
