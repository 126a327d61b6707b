"""What a block mask is made of: lists of the blocks of 128 x 128 that are seen, and bits of those seen in part.

With R = batch * heads * query blocks and C = batch * heads * key blocks, ``lists`` (int32) has, one behind the other:

    [R + 1] where the full key blocks of each query block start      [R + 1] where its partial ones do
    [C + 1] where the full query blocks of each key block start      [C + 1] where its partial ones do
    [R] of each sequence and head, its query blocks in order of how many key blocks they visit, the most first
    the full key blocks of all query blocks                          the partial ones, each with its place in ``bits``
    the full query blocks of all key blocks                          the partial ones, each with its place in ``bits``

Starts count from the first element of ``lists``; blocks of one list ascend. A block is full where every row in it sees
every key in it. ``bits`` (int32 ``[partial blocks, 128, 4]``) has a row of words for each query: key n of the block is
seen where bit n % 32 of word n // 32 is set. So the memory grows with the blocks that are visited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, shown
from ..tiles import MASK_BLOCK

BLOCK = MASK_BLOCK
WORDS = BLOCK // 32
_AT_ONCE = 512  # blocks whose elements are evaluated together

# Whether rows [N, 128, 1] see keys [N, 1, 128], where sequence and head are [N, 1, 1]: a boolean [N, 128, 128].
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskSizes(NamedTuple):
    """What a mask is for."""

    batch: int  # sequences with a mask of their own; 1: one for all
    heads: int  # heads with a mask of their own, which divide those of the queries
    seqlen_q: int
    seqlen_k: int

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """The shape of a map of blocks: batch, heads, query blocks, key blocks."""
        return self.batch, self.heads, -(-self.seqlen_q // BLOCK), -(-self.seqlen_k // BLOCK)


def in_blocks_of_128(blocks: Tensor, size: tuple[int, int], sizes: MaskSizes, *, every: bool) -> Tensor:
    """Return a map of blocks of ``size`` as one of blocks of 128: where every block in it is set, or some are."""
    for axis, of_axis, length in ((2, size[0], sizes.seqlen_q), (3, size[1], sizes.seqlen_k)):
        there = -(-length // BLOCK)
        if of_axis % BLOCK == 0:
            blocks = blocks.repeat_interleave(of_axis // BLOCK, axis).narrow(axis, 0, there)
            continue
        each = BLOCK // of_axis
        ends = [0, there * each - blocks.shape[axis]]
        pad = [0, 0, *ends] if axis == 2 else ends
        padded = torch.nn.functional.pad(blocks, pad, value=every)
        tiles = padded.view(*padded.shape[:axis], there, each, *padded.shape[axis + 1 :])
        blocks = tiles.all(axis + 1) if every else tiles.any(axis + 1)
    return blocks


def check_block_size(name: str, size: object) -> None:
    """Raise ``InputError`` unless blocks of this size lie in blocks of 128, or these in them."""
    if type(size) is not int or size < 1 or (size % BLOCK and BLOCK % size):
        raise InputError(f"{name} must be a multiple of {BLOCK}, or divide it, got {shown(size)}")


def build(sizes: MaskSizes, full: Tensor, candidates: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return lists and bits. The host waits for the device, which counts blocks.

    Args:
        sizes: of the mask.
        full: boolean map of blocks ``[batch, heads, query blocks, key blocks]`` that are known to be full.
        candidates: map of the other blocks that may be seen. Only these are evaluated.
        seen: evaluates elements.
    """
    places = (candidates & ~full).nonzero()
    words, some, whole = [], [], []
    for chunk in torch.split(places, _AT_ONCE) if len(places) else ():  # split yields an empty part of nothing
        elements = _evaluate(sizes, chunk, seen)
        words.append(_pack(elements[0]))
        some.append(elements[0].any(-1).any(-1))
        whole.append((elements[0] == elements[1]).all(-1).all(-1))
    bits = torch.cat([torch.zeros(0, BLOCK, WORDS, dtype=torch.int32, device=full.device), *words])
    nothing = torch.zeros(0, dtype=torch.bool, device=full.device)
    is_full = torch.cat([nothing, *whole])
    is_partial = torch.cat([nothing, *some]) & ~is_full
    at = places.unbind(1)
    full = full.index_put(at, is_full)
    partial = torch.zeros_like(full).index_put(at, is_partial)
    whole_blocks, partial_blocks = torch.stack((full.sum(), partial.sum())).tolist()
    return pack_lists(full, partial, (whole_blocks, partial_blocks)), bits[is_partial]


def pack_lists(full: Tensor, partial: Tensor, room: tuple[int, int]) -> Tensor:
    """Return the lists of two maps of blocks. The host waits for nothing.

    Args:
        full: boolean ``[batch, heads, query blocks, key blocks]``.
        partial: the same of partial blocks, whose bits lie in this order.
        room: full and partial blocks that there may be.
    """
    place = (partial.flatten().cumsum(0) - 1).view(partial.shape)
    batch, heads, rows, columns = full.shape
    order = (full | partial).sum(-1).argsort(dim=-1, descending=True, stable=True).flatten()
    at = 2 * (batch * heads * rows + 1) + 2 * (batch * heads * columns + 1) + len(order)
    starts, entries = [], [order]
    for whole, part, of_part in ((full, partial, place), (full.mT, partial.mT, place.mT)):
        blocks = torch.arange(whole.shape[-1], device=whole.device).expand(whole.shape)
        starts.append(at + _count(whole))
        entries.append(_compact(whole, blocks, room[0]))
        at += room[0]
        starts.append(at + 2 * _count(part))
        entries.append(torch.stack([_compact(part, values, room[1]) for values in (blocks, of_part)], 1).flatten())
        at += 2 * room[1]
    return torch.cat([*starts, *entries]).to(torch.int32)


def _count(blocks: Tensor) -> Tensor:
    """Return how many blocks lie before each list, and in all: [lists + 1]."""
    counts = blocks.sum(-1).flatten()
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _compact(blocks: Tensor, values: Tensor, room: int) -> Tensor:
    """Return the values where there are blocks, in order; zeros behind the last."""
    chosen = blocks.flatten()
    at = torch.where(chosen, chosen.cumsum(0) - 1, room)  # what is not chosen goes behind the end
    return torch.zeros(room + 1, dtype=torch.int64, device=blocks.device).scatter(0, at, values.flatten())[:room]


def _evaluate(sizes: MaskSizes, places: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return which elements of blocks ``[N, 4]`` are seen, and which there are: rows and keys end."""
    b, h, block_q, block_k = (place[:, None, None] for place in places.unbind(1))
    inside = torch.arange(BLOCK, device=places.device)
    rows, keys = block_q * BLOCK + inside[:, None], block_k * BLOCK + inside
    exist = (rows < sizes.seqlen_q) & (keys < sizes.seqlen_k)
    rows, keys = rows.clamp(max=sizes.seqlen_q - 1), keys.clamp(max=sizes.seqlen_k - 1)
    return seen(b, h, rows, keys) & exist, exist


def _pack(elements: Tensor) -> Tensor:
    """Return booleans ``[N, 128, 128]`` as bits of int32 ``[N, 128, 4]``."""
    shifts = torch.arange(32, dtype=torch.int32, device=elements.device)
    words = elements.view(-1, BLOCK, WORDS, 32).to(torch.int32) << shifts
    return words.sum(-1).to(torch.int32)


def visited(sizes: MaskSizes, lists: Tensor) -> tuple[int, int, int]:
    """Return how many blocks are full, how many partial, and how many there are. The host waits for the device."""
    batch, heads, rows, columns = sizes.blocks
    count = batch * heads * rows
    first, end, first_partial, end_partial = lists[[0, count, count + 1, 2 * count + 1]].tolist()
    return end - first, (end_partial - first_partial) // 2, count * columns


def to_dense(sizes: MaskSizes, lists: Tensor, bits: Tensor) -> Tensor:
    """Return the mask as booleans ``[batch, heads, Sq, Sk]``. The host waits for the device."""
    batch, heads, rows, columns = sizes.blocks
    count = batch * heads * rows
    dense = torch.zeros(count, columns, BLOCK, BLOCK, dtype=torch.bool, device=lists.device)
    numbers = torch.arange(count, device=lists.device)
    starts, partial_starts = lists[: count + 1].long(), lists[count + 1 : 2 * count + 2].long()
    full = lists[int(starts[0]) : int(starts[-1])].long()
    dense[numbers.repeat_interleave(starts.diff()), full] = True
    blocks, places = lists[int(partial_starts[0]) : int(partial_starts[-1])].long().view(-1, 2).unbind(1)
    shifts = torch.arange(32, dtype=torch.int32, device=lists.device)
    elements = ((bits[places][..., None] >> shifts) & 1).bool().flatten(2)
    dense[numbers.repeat_interleave(partial_starts.diff() // 2), blocks] = elements
    dense = dense.view(batch, heads, rows, columns, BLOCK, BLOCK).transpose(3, 4)
    whole = dense.reshape(batch, heads, rows * BLOCK, columns * BLOCK)
    return whole[:, :, : sizes.seqlen_q, : sizes.seqlen_k].contiguous()
