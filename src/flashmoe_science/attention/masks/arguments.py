"""Groups of arguments of the kernels that walk over the lists of a mask: see ``attention.kernel_arguments``."""

from __future__ import annotations

from typing import Any, NamedTuple


class MaskLists(NamedTuple):
    """Where the lists of a block of queries, or of keys, are found."""

    heads: Any  # with a mask of their own, of each sequence; 0: all sequences have one mask
    share: Any  # query heads that have one mask
    blocks: Any  # of queries, or of keys: each has two lists
    first: Any  # where the starts of full blocks lie, from the first element on
    count: Any  # elements from there to the starts of partial blocks


class MaskedSizes(NamedTuple):
    """Sizes of a call."""

    heads: Any
    heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles: Any  # of a head: of rows or, where a program owns keys, of keys


class MaskedCall(NamedTuple):
    """Constants of a call."""

    GROUP: int  # query heads that share one K/V head
    D: int
    DV: int
    BLOCK_D: int  # D rounded up to a power of two
    BLOCK_DV: int
    ALIGN: int  # every row that is read starts at a multiple of this many elements
    ALIGN_OUT: int  # every row that is written starts at a multiple of this many elements
    MASK_M: bool  # the last block has fewer rows
    MASK_N: bool  # the last block has fewer keys
    STORE_LSE: bool
    PRECISION: str  # of products: "ieee" for fp32 inputs


class MaskedTile(NamedTuple):
    """What one program works on: parts of blocks of 128, so both sizes divide it."""

    BLOCK_M: int
    BLOCK_N: int
    NUM_STAGES: int
    WIDE: bool  # an offset within a tile can pass 2**31
