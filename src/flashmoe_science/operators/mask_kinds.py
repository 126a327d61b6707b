"""The masks of cases of ``attention_masked``: as a block mask of ours, and as the function that FlexAttention takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention.masks.block_mask import BlockMask
from ..attention.masks.lists import BLOCK
from ..errors import InputError

Shown = Callable[[Any, Any, Any, Any], Any]  # of sequence, head, row and key: FlexAttention's mask_mod
KINDS = ("documents", "prefix", "window", "tree", "blocks", "tiles")
_SEED = 5


def check_kind(kind: str, seqlen_q: int, seqlen_k: int) -> None:
    """Raise ``InputError`` where there is no such kind, or lengths differ that must not."""
    if kind not in KINDS:
        raise InputError(f"mask must be one of {', '.join(KINDS)}, got {kind!r}")
    if seqlen_q > seqlen_k or (kind != "tree" and seqlen_q != seqlen_k):
        raise InputError(f"a mask of {kind} needs as many queries as keys, got {seqlen_q} and {seqlen_k}")


def make_mask(kind: str, amount: int, seqlen_q: int, seqlen_k: int, device: str) -> tuple[BlockMask, Shown]:
    """Return a mask for all sequences and heads, and its function; the same in every run.

    Args:
        kind: ``documents``: causal documents of ``amount`` tokens on average; ``prefix``: causal, and ``amount`` keys
            that all see; ``window``: each sees itself and ``amount`` - 1 keys before; ``tree``: a binary tree of all
            queries behind the other keys, ``amount`` unused; ``blocks``: ``amount`` blocks of 128 for each block of
            queries, its own among them, causal, as MiniMax-M3 chooses them; ``tiles``: each block of queries sees
            itself, ``amount`` blocks on each side, and every sixteenth block, as sparse attention of videos does.
        amount: what the kind says.
        seqlen_q: queries.
        seqlen_k: keys.
        device: where it lies.

    Raises:
        InputError: there is no such kind, or queries and keys are not as many where the kind needs it.
    """
    check_kind(kind, seqlen_q, seqlen_k)
    makers: dict[str, Callable[[int, int, int, str], tuple[BlockMask, Shown]]] = {
        "documents": _documents, "prefix": _prefix, "window": _window, "tree": _tree, "blocks": _blocks,
        "tiles": _tiles,
    }  # fmt: skip
    return makers[kind](amount, seqlen_q, seqlen_k, device)


def count_visible(kind: str, amount: int, seqlen_q: int, seqlen_k: int) -> int:
    """Return how many pairs of a query and a key such a mask shows. A dense mask would have 2**30 elements."""
    rows = torch.arange(seqlen_q)
    if kind == "documents":
        lengths = _document_ids(amount, seqlen_q).bincount()
        return int((lengths * (lengths + 1) // 2).sum())
    if kind == "prefix":  # row r sees r + 1 keys, and no fewer than the prefix has
        return int((rows + 1).clamp(min=min(amount, seqlen_k)).sum())
    if kind == "window":
        return int((rows + 1).clamp(max=amount).sum())
    if kind == "tree":  # all keys before, itself, and its parents up to the root
        return seqlen_q * (seqlen_k - seqlen_q) + sum((row + 1).bit_length() for row in range(seqlen_q))
    chosen = _chosen_blocks(amount, seqlen_q) if kind == "blocks" else _reached_tiles(amount, seqlen_q)
    tokens = (seqlen_q - torch.arange(len(chosen)) * BLOCK).clamp(max=BLOCK)  # of each block
    shown = (_listed(chosen) * tokens[:, None] * tokens).sum()
    if kind == "blocks":  # causal: half of each block's own
        shown -= (tokens * (tokens - 1) // 2).sum()
    return int(shown)


def _document_ids(mean: int, seqlen: int) -> Tensor:
    starts = torch.rand(seqlen, generator=torch.Generator().manual_seed(_SEED)) < 1 / max(1, mean)
    return starts.cumsum(0)


def _documents(mean: int, seqlen: int, _keys: int, device: str) -> tuple[BlockMask, Shown]:
    ids = _document_ids(mean, seqlen).to(device)
    return BlockMask.documents(ids), lambda _b, _h, row, key: (ids[row] == ids[key]) & (key <= row)


def _prefix(length: int, seqlen: int, _keys: int, device: str) -> tuple[BlockMask, Shown]:
    made = BlockMask.prefix(torch.tensor([length], device=device), seqlen)
    return made, lambda _b, _h, row, key: (key <= row) | (key < length)


def _window(width: int, seqlen: int, _keys: int, device: str) -> tuple[BlockMask, Shown]:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    def shown(_b: Any, _h: Any, row: Any, key: Any) -> Any:
        return (key <= row) & (row - key < width)

    count = -(-seqlen // BLOCK)
    blocks = torch.arange(count, device=device)
    reach = (blocks <= blocks[:, None]) & (blocks * BLOCK + BLOCK - 1 > blocks[:, None] * BLOCK - width)
    counts = reach.sum(1).to(torch.int32)
    order = reach.to(torch.int32).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    mask = TorchBlockMask.from_kv_blocks(
        counts[None, None], order[None, None], BLOCK_SIZE=BLOCK, mask_mod=shown, seq_lengths=(seqlen, seqlen)
    )
    return BlockMask.from_torch(mask), shown


def _tree(_amount: int, tokens: int, keys: int, device: str) -> tuple[BlockMask, Shown]:
    parents = (torch.arange(tokens, device=device) - 1).div(2, rounding_mode="floor")
    made = BlockMask.tree(parents, keys_before=keys - tokens)
    seen = made.to_dense()[0, 0]
    return made, lambda _b, _h, row, key: seen[row, key]


def _chosen_blocks(count: int, seqlen: int) -> Tensor:
    blocks = -(-seqlen // BLOCK)
    order = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(_SEED))
    own = torch.arange(blocks)
    order[own, own] = 2.0
    order[own > own[:, None]] = -1.0  # behind the rows
    values, indices = order.topk(min(count, blocks), 1)
    return torch.where(values >= 0, indices, -1)


def _blocks(count: int, seqlen: int, _keys: int, device: str) -> tuple[BlockMask, Shown]:
    return _of_blocks(_chosen_blocks(count, seqlen).to(device), seqlen, causal=True)


def _reached_tiles(near: int, seqlen: int) -> Tensor:
    own = torch.arange(-(-seqlen // BLOCK))
    return torch.where(((own - own[:, None]).abs() <= near) | (own % 16 == 0), own, -1)


def _tiles(near: int, seqlen: int, _keys: int, device: str) -> tuple[BlockMask, Shown]:
    return _of_blocks(_reached_tiles(near, seqlen).to(device), seqlen, causal=False)


def _listed(chosen: Tensor) -> Tensor:
    """Return which blocks are chosen, ``[blocks, blocks]``."""
    return (chosen[:, :, None] == torch.arange(len(chosen), device=chosen.device)).any(1)


def _of_blocks(chosen: Tensor, seqlen: int, *, causal: bool) -> tuple[BlockMask, Shown]:
    """Return the mask of blocks of 128, from the numbers of the keys' for each of the queries', -1 for none."""
    listed = _listed(chosen)

    def shown(_b: Any, _h: Any, row: Any, key: Any) -> Any:
        found = listed[row // BLOCK, key // BLOCK]
        return found & (key <= row) if causal else found

    return BlockMask.blocks(chosen[None, None], BLOCK, seqlen, seqlen, causal=causal), shown
