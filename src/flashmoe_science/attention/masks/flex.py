"""What torch's ``BlockMask`` says: maps of its blocks, and its function evaluated on those that are partial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ...errors import InputError
from .lists import BLOCK, MaskSizes, Seen, check_block_size, in_blocks_of_128


def map_blocks(mask: Any) -> tuple[MaskSizes, Tensor, Tensor, Seen]:
    """Return sizes, the map of full blocks of 128, that of the others that may be seen, and what evaluates these."""
    size_q, size_k = mask.BLOCK_SIZE
    for size in (size_q, size_k):
        check_block_size("the block size of mask", size)
    missing = (None,) * (4 - mask.kv_indices.dim())  # batch and heads may be left out
    counts, indices = mask.kv_num_blocks[missing], mask.kv_indices[missing]
    sizes = MaskSizes(counts.shape[0], counts.shape[1], *map(int, mask.seq_lengths))
    columns = -(-sizes.seqlen_k // size_k)
    rows = -(-sizes.seqlen_q // size_q)
    if counts.shape[2] < rows:
        raise InputError(
            f"mask must have a list for each of {rows} blocks of queries, got {counts.shape[2]}",
            hint="part of a mask is not served",
        )
    partial = _map(counts, indices, columns)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _map(mask.full_kv_num_blocks.view(counts.shape), mask.full_kv_indices.view(indices.shape), columns)
    partial, full = partial[:, :, :rows], full[:, :, :rows]

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        first_row, first_key = row[:, 0, 0], key[:, 0, 0]
        of_b, of_h = b[:, 0, 0], h[:, 0, 0]
        last_row, last_key = sizes.seqlen_q - 1, sizes.seqlen_k - 1

        def of_place(n: Tensor, _h: Tensor, inner_row: Tensor, inner_key: Tensor) -> Tensor:
            at = (first_row[n] + inner_row).clamp(max=last_row), (first_key[n] + inner_key).clamp(max=last_key)
            shown: Tensor = mask.mask_mod(of_b[n], of_h[n], *at)
            return shown

        shown = create_mask(of_place, len(of_b), 1, BLOCK, BLOCK, device=row.device)[:, 0]
        at = b, h, row // size_q, key // size_k
        return full[at] | (partial[at] & shown)

    wholly = in_blocks_of_128(full, (size_q, size_k), sizes, every=True)
    return sizes, wholly, in_blocks_of_128(full | partial, (size_q, size_k), sizes, every=False), seen


def _map(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return which blocks are listed: boolean ``[batch, heads, query blocks, columns]``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(listed, indices, columns).clamp(max=columns).long()
    blocks = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    return blocks.scatter(3, places, value=True)[..., :columns]
