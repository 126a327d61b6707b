"""Packed sequences in the order in which ``forward_features_gluon_sm90`` attends them (Triton).

Sequences with the most keys come first, so short ones fill the gaps at the end. Each sequence is compared with all
others. Even with thousands of them this takes less time than a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read_sequences(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, b, batch, heads, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return where sequences start in q and in k, their place, queries and keys, and their row tiles of all heads."""
    mask = b < batch
    start_q = tl.load(cu_seqlens_q_ptr + b, mask=mask, other=0)
    place = tl.load(cu_seqlens_q_ptr + b + 1, mask=mask, other=0) - start_q
    start_k = tl.load(cu_seqlens_k_ptr + b, mask=mask, other=0)
    keys = tl.load(cu_seqlens_k_ptr + b + 1, mask=mask, other=0) - start_k
    queries = place
    if seqused_q_ptr is not None:
        queries = tl.load(seqused_q_ptr + b, mask=mask, other=0)
    if seqused_k_ptr is not None:
        keys = tl.load(seqused_k_ptr + b, mask=mask, other=0)
    tiles = (place + BLOCK_M - 1) // BLOCK_M
    return start_q, place, queries, start_k, keys, tiles * heads


@triton.jit
def _order_sequences_kernel(
    sequences_ptr,  # [8, B] int32: for each, those with the most keys first, what is stored below
    cu_seqlens_q_ptr,  # [B + 1] int32
    cu_seqlens_k_ptr,  # [B + 1] int32
    seqused_q_ptr,  # [B] int32 or None
    seqused_k_ptr,  # [B] int32 or None
    batch, heads,
    together_keys,  # keys of one head, over the number of heads that are walked over together; 0: one head
    BLOCK_M: tl.constexpr,  # rows of a row tile
    BLOCK_B: tl.constexpr,  # sequences of one program
):  # fmt: skip
    """Order the sequences by their keys, and count their row tiles. Grid: (cdiv(B, BLOCK_B),)."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    start_q, place, queries, start_k, keys, tiles = _read_sequences(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, b, batch, heads, BLOCK_M
    )
    rank = tl.zeros([BLOCK_B], tl.int32)
    end = tiles
    for first in range(0, batch, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)
        _, _, _, _, other_keys, other_tiles = _read_sequences(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, other, batch, heads, BLOCK_M
        )
        more = other_keys[None, :] > keys[:, None]
        as_many = (other_keys[None, :] == keys[:, None]) & (other[None, :] < b[:, None])
        before = (more | as_many) & (other[None, :] < batch)
        rank += tl.sum(before.to(tl.int32), 1)
        end += tl.sum(tl.where(before, other_tiles[None, :], 0), 1)
    together = tl.full([BLOCK_B], 1, tl.int32)
    if together_keys is not None:
        together = tl.minimum(tl.maximum(together_keys // tl.maximum(keys, 1), 1), heads)
        groups = (heads + together - 1) // together
        together = (heads + groups - 1) // groups  # as equal as they can be
    mask = b < batch
    place_of = sequences_ptr + rank
    tl.store(place_of, end, mask=mask)  # the number of row tiles up to its last
    tl.store(place_of + batch, tiles // heads, mask=mask)  # its row tiles of one head
    tl.store(place_of + 2 * batch, start_q, mask=mask)
    tl.store(place_of + 3 * batch, place, mask=mask)  # rows up to the next sequence
    tl.store(place_of + 4 * batch, queries, mask=mask)
    tl.store(place_of + 5 * batch, start_k, mask=mask)
    tl.store(place_of + 6 * batch, keys, mask=mask)
    tl.store(place_of + 7 * batch, together, mask=mask)  # heads that are walked over together
