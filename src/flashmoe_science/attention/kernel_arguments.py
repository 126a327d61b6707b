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


class HopperForwardSizes(NamedTuple):
    """Sizes of a forward call for Hopper, int32; heads are counted by PACK."""

    heads: Any  # of a sequence
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any  # row tiles of PACK heads
    heads_total: Any  # of all sequences
    heads_per_group: Any  # that are walked over together when causal


class VariantSizes(NamedTuple):
    """Sizes of a forward call with features for Hopper, int32; packed: no length is read."""

    batch: Any
    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any  # row tiles of a head
    together: Any  # heads, of all sequences, that are walked over together
    dealt: Any  # heads whose row tiles are dealt out in rounds of their own


class VariantCall(NamedTuple):
    """Constants of a forward call with features for Hopper."""

    GROUP: int  # query heads that share one K/V head
    HAS_SEQUSED_Q: bool
    HAS_SOFTCAP: bool
    BOUND_LEFT: bool  # some keys come too early for some rows
    BOUND_RIGHT: bool  # some keys come too late for some rows
    SEES_AHEAD: bool  # with ALiBi: rows see keys behind their own position
    SLOPE_PRODUCT: bool  # with ALiBi: a matrix product gives each score its part of slope * key
    BIAS_BATCH: bool  # each sequence has a bias of its own; so have heads and rows
    BIAS_HEADS: bool
    BIAS_ROWS: bool
    BATCH_INNER: bool  # a head of all sequences comes before the next head: they share a bias
    STORE_LSE: bool
    DV: int  # columns of o


class HopperTile(NamedTuple):
    """What one program of a forward for Hopper works on, and with how much."""

    WARPGROUPS: int  # that multiply matrices; 64 rows each
    STAGES: int  # tiles of K, and of V, in flight
    PING_PONG: bool  # the warpgroups take turns
    REGISTERS: int  # of a thread of these warpgroups
    D1: int  # columns of Q and K in the second of two powers of two; 0: there is one alone
    DV0: int  # columns of V in the first
    DV1: int


class ShortCall(NamedTuple):
    """Constants of a call of the forward over few keys."""

    GROUP: int  # query heads that share one K/V head
    D: int
    DV: int
    ALIGN: int  # every row of q, k and v starts at a multiple of this many elements
    ALIGN_O: int  # every row of o starts at a multiple of this many elements
    MASK_M: bool  # the last tile has fewer rows
    MASK_N: bool  # there are fewer keys than all groups of warps have
    IS_CAUSAL: bool
    STORE_LSE: bool


class ShortTile(NamedTuple):
    """What one program of the forward over few keys works on."""

    BLOCK_M: int
    BLOCK_N: int  # keys of one group of warps
    KEY_GROUPS: int  # groups of warps with a share of the keys each; KEY_GROUPS * BLOCK_N >= Sk
    BLOCK_D: int  # D rounded up to a power of two
    BLOCK_DV: int


class BackwardInputs(NamedTuple):
    """What the gradients are computed of; packed: ``[T, H, D]`` and ``[T, H]``."""

    q_ptr: Any  # [B, H, Sq, D]
    k_ptr: Any  # [B, HK, Sk, D]
    v_ptr: Any  # [B, HK, Sk, DV]
    do_ptr: Any  # [B, H, Sq, DV]
    lse_ptr: Any  # [B, H, Sq] fp32, natural log
    delta_ptr: Any  # like lse


class BackwardCall(NamedTuple):
    """Constants of a call of the gradients."""

    GROUP: int  # query heads that share one K/V head
    D: int
    DV: int
    BLOCK_D: int  # D rounded up to a power of two
    BLOCK_DV: int
    ALIGN: int  # every row of q, k, v and do starts at a multiple of this many elements
    ALIGN_OUT: int  # every row of the gradients that a kernel writes starts at a multiple of this many elements
    ALIGN_BIAS: int  # every row of the bias starts at a multiple of this many elements
    STRIDE_ALIBI_B: int  # elements
    BOUND_LEFT: bool  # some keys come too early for some rows
    BOUND_RIGHT: bool  # some keys come too late for some rows
    PRECISION: str  # of products: "ieee" for fp32 inputs
    ADD: bool  # dK and dV are added to what is there


class BackwardTile(NamedTuple):
    """What one program of the gradients works on."""

    BLOCK_M: int
    BLOCK_N: int
    NUM_STAGES: int
    WIDE: bool  # an offset within a tile can pass 2**31


class KeySizes(NamedTuple):
    """Sizes for the gradients of k and v; packed: the longest lengths, read for a bias alone."""

    heads: Any
    heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles_n: Any  # key tiles of a head


class HopperBackwardSizes(NamedTuple):
    """Sizes of a call of the gradients for Hopper, int32; packed: lengths and query tiles of all sequences."""

    heads: Any  # of a sequence
    heads_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any  # query tiles of a head
    tiles_n: Any  # key tiles of a head
    heads_total: Any  # K/V heads of all sequences; packed: of one
    heads_per_group: Any  # K/V heads whose key tiles alternate in the order of programs


class QueryTiles(NamedTuple):
    """Query tiles of a call of the gradients for Hopper, int32; packed: of all sequences."""

    heads: Any  # of a sequence
    seqlen_q: Any
    tiles_m: Any  # query tiles of a head


class HopperBackwardCall(NamedTuple):
    """Constants of a call of the gradients for Hopper."""

    GROUP: int  # query heads that share one K/V head
    TOGETHER: int  # of them that are walked over together: a divisor of GROUP
    BOUND_LEFT: bool  # some keys come too early for some rows
    BOUND_RIGHT: bool  # some keys come too late for some rows
    SEES_AHEAD: bool  # with ALiBi: rows see keys behind their own position


class Shares(NamedTuple):
    """Programs that share the query heads of a key tile; without them COUNT is 1 and the pointer None."""

    shares_ptr: Any  # [B * HK * tiles_n, WARPGROUPS, 64, D + DV] fp32 (packed: HK * (tokens_k // keys + B)): dK, dV
    COUNT: int


class QuerySizes(NamedTuple):
    """Sizes for the gradient of q; packed: the longest lengths, read for a bias alone."""

    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any  # row tiles of a head


class BiasSizes(NamedTuple):
    """Sizes for the gradient of a bias; packed: the longest lengths."""

    batch: Any
    heads: Any
    bias_heads: Any  # heads of the gradient: 1 where one bias serves all
    seqlen_q: Any
    seqlen_k: Any
    tiles_m: Any
    tiles_n: Any


class CacheInputs(NamedTuple):
    """What a call with a cache attends with and to."""

    q_ptr: Any  # [B, H, Sq, D]
    k_ptr: Any  # [PAGES, PAGE_SIZE, HK, D]; without a page table a page is the cache of one sequence
    v_ptr: Any  # [PAGES, PAGE_SIZE, HK, DV]


class SplitOutputs(NamedTuple):
    """What a program writes: outputs of sequences with one split, and partial results of those with more."""

    o_ptr: Any  # [B, H, Sq, DV]
    lse_ptr: Any  # [B, H, Sq] fp32, natural log
    o_part_ptr: Any  # [SPLITS, HK, Sq * GROUP, DV] fp32, of each split before its sum divides it; None without splits
    sums_part_ptr: Any  # [SPLITS, HK, Sq * GROUP, 2] fp32: the largest score of a row in units of log2(e), and its sum


class CachePointers(NamedTuple):
    """Where the keys of each sequence lie in a cache, int32; each None where the call has none."""

    page_table_ptr: Any  # [B, pages of a sequence]
    seqlens_ptr: Any  # [B]: keys before the new ones; None: the capacity
    leftpad_ptr: Any  # [B]: keys at the start that are not there
    batch_idx_ptr: Any  # [B]: the page of each sequence without a page table; None: its own number


class CacheSizes(NamedTuple):
    """Sizes of a call with a cache."""

    batch: Any
    heads_kv: Any
    seqlen_q: Any
    seqlen_new: Any
    capacity: Any


class LatentSizes(NamedTuple):
    """Sizes of a call with a cache whose values are columns of its keys."""

    batch: Any
    seqlen_q: Any
    seqlen_new: Any
    capacity: Any


class KVSplits(NamedTuple):
    """How the keys of a sequence are split over programs."""

    splits: Any  # the most splits of one sequence; balanced: splits of all sequences and one K/V head
    least_tiles: Any  # of a split
    uniform: Any  # balanced: splits of each sequence where all are about as long


class DecodeCall(NamedTuple):
    """Constants of a call with a cache."""

    GROUP: int  # query heads that share one K/V head
    D: int
    DV: int
    BLOCK_D: int  # D rounded up to a power of two
    BLOCK_DV: int
    ALIGN_Q: int  # every row of q starts at a multiple of this many elements
    ALIGN: int  # every row of k and v starts at a multiple of this many elements
    ALIGN_O: int
    IN_FP16: bool  # 8-bit keys and values are multiplied in fp16
    ITEMS: int  # 2: pairs of them are loaded as 16 bits, and strides of the cache and ALIGN count pairs; else 1
    HAS_PTX: bool  # not in Triton's interpreter
    K_BY_TOKEN: bool  # each key has a scale of its own, else a head or all have one
    V_BY_TOKEN: bool
    SHARED_KV: bool  # V is the first DV columns of K; then D is DV, and REST columns follow
    REST: int
    BLOCK_REST: int
    PAGE_SIZE: int  # 0: without a page table
    WIDE: bool  # offsets in the cache, in units of ALIGN, can pass 2**31
    HAS_LEFT: bool  # some keys come too early for some rows
    HAS_RIGHT: bool  # some keys come too late for some rows
    STRIDE_ALIBI_B: int  # elements
    STORE_LSE: bool
    PRECISION: str  # of products: "ieee" for fp32 inputs


class DecodeTile(NamedTuple):
    """What one program of the decoding kernel works on."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_B: int  # lengths that a program reads at once
    TILES_M: int  # row tiles of one sequence and K/V head
    SPLIT: bool  # a sequence may have more than one split
    BALANCED: bool  # splits are balanced over sequences
    NUM_STAGES: int
    PREFETCH: bool  # without lengths and pages: L2 is asked for the first keys before all waits


class NewStrides(NamedTuple):
    """Strides of queries or of new keys or values ``[B, H, S, D]``, elements."""

    b: Any
    h: Any
    m: Any


class PageStrides(NamedTuple):
    """Strides of a cache ``[PAGES, PAGE_SIZE, HK, D]``, elements."""

    page: Any
    row: Any
    h: Any


class AppendSizes(NamedTuple):
    """Sizes of a call that writes new keys and values into a cache."""

    heads: Any
    heads_kv: Any
    seqlen_q: Any
    seqlen_new: Any
    capacity: Any
    seqlen_rotary: Any  # positions of the rotary tables


class AppendCall(NamedTuple):
    """Constants of a call that writes new keys and values into a cache."""

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_T: int  # tokens of a program
    PAGE_SIZE: int  # 0: without a page table
    ROTARY_DIM: int  # 0: no rotary embedding
    INTERLEAVED: bool  # columns 2i and 2i + 1 are rotated together, else i and i + ROTARY_DIM / 2
    ADVANCE: bool  # query m is at position m after the keys before, else all are at the first
    FP8: bool  # what is written is e4m3, over a scale
    K_BY_TOKEN: bool  # each key gets a scale of its own, else it is divided by that of its head
    V_BY_TOKEN: bool


class WorkQuotas(NamedTuple):
    """How the keys of the sequences of a mixed batch are split; those that a schedule does not read are None."""

    few_slots: Any  # programs with few rows of one K/V head that there should be
    many_slots: Any  # the same with many rows
    few_least: Any  # steps of a share, at least
    many_least: Any
    num_splits: Any  # shares of every sequence, at most
    fixed_steps: Any  # of a share of a sequence of few rows
    few_most: Any  # shares of a tile of few rows that there is room for
    many_most: Any  # the same of many rows
    most_tiles: Any  # of many rows of one sequence


class MixedTiles(NamedTuple):
    """Constants of a mixed batch: sequences of up to FEW_ROWS rows a K/V head have one tile of so many."""

    GROUP: int  # query heads that share one K/V head
    FEW_ROWS: int
    FEW_KEYS: int  # of one step
    MANY_ROWS: int
    MANY_KEYS: int
    MERGE_ROWS: int  # of one program of the merge
    BOUND_LEFT: bool  # some keys come too early for some rows
    BOUND_RIGHT: bool  # some keys come too late for some rows
    SCHEDULE: str  # "lengths", "even" or "own length"


class MixedTile(NamedTuple):
    """What one program of a mixed batch works on."""

    BLOCK_M: int
    BLOCK_N: int
    FIELD: int  # of a record, which counts such programs: 0 with few rows, 1 with many
    BLOCK_B: int  # records that a program looks at together
    NUM_STAGES: int
    WIDE: bool  # an offset within a page can pass 2**31


class MixedPartials(NamedTuple):
    """Partial results of the shares of keys, fp32, tile by tile."""

    o_ptr: Any  # [rows, DV], before its sum divides it
    sums_ptr: Any  # [rows, 2]: the largest score of a row in units of log2(e), and its sum
