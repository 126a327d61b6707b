"""Groups of arguments that the Triton kernels of attention take: strides, sizes, and constants of a call and of a tile.

Triton passes the fields of a ``NamedTuple`` one by one, so a group costs nothing. Fields in upper case are constants of
the compiled kernel. A group of constants alone is annotated ``tl.constexpr`` where a kernel takes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Strides of a tensor ``[B, H, S, D]``; of a cache in pages ``[PAGES, PAGE_SIZE, HK, D]``."""

    b: Any  # of a sequence, or of a page; int64, in units of what its rows are aligned to
    h: Any  # of a head; int64, in the same units
    ROW: Any  # elements
    COLUMN: Any  # elements


class BiasStrides(NamedTuple):
    """Strides of a bias ``[B, H, Sq, Sk]``; 0 where there is none."""

    b: Any  # int64, in units of what the bias' rows are aligned to, as h and m
    h: Any
    m: Any
    COLUMN: Any  # elements


class Sequences(NamedTuple):
    """Where packed sequences lie, int32; each None where the call has none."""

    cu_seqlens_q_ptr: Any  # [B + 1]: where sequences start
    cu_seqlens_k_ptr: Any  # [B + 1]
    seqused_q_ptr: Any  # [B]: lengths of sequences that end before the next one starts
    seqused_k_ptr: Any  # [B]


class Window(NamedTuple):
    """Row m sees keys m + Sk - Sq - left to m + Sk - Sq + right; read where the call has such a bound."""

    left: Any
    right: Any


class Dropout(NamedTuple):
    """What dropout needs beside its seed; None without dropout."""

    last: Any  # the largest random number that drops a probability: an int32 with the bits of a uint32
    scale: Any  # of the probabilities that are kept


class ForwardSizes(NamedTuple):
    """Sizes of a forward call; packed: the longest lengths, read for a bias alone."""

    batch: Any
    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any  # row tiles of a head


class ForwardCall(NamedTuple):
    """Constants of a forward call."""

    GROUP: int  # query heads that share one K/V head
    D: int
    DV: int
    BLOCK_D: int  # D rounded up to a power of two
    BLOCK_DV: int
    ALIGN: int  # every row of q, k and v starts at a multiple of this many elements
    ALIGN_O: int  # every row of o starts at a multiple of this many elements
    ALIGN_BIAS: int  # every row of the bias starts at a multiple of this many elements
    STRIDE_ALIBI_B: int  # elements
    BOUND_LEFT: bool  # some keys come too early for some rows
    BOUND_RIGHT: bool  # some keys come too late for some rows
    EMPTY_ROWS: bool  # a tile can hide all its keys from a row
    STORE_LSE: bool
    PAGE_SIZE: int  # 0: without a page table
    PRECISION: str  # of products: "ieee" for fp32 inputs


class ForwardTile(NamedTuple):
    """What one program of the forward works on."""

    BLOCK_M: int
    BLOCK_N: int
    SPLITS: int  # programs that share out the keys of a row tile
    NUM_STAGES: int
    WIDE: bool  # an offset within a tile can pass 2**31
