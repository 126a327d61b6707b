"""Layers of transformers that choose their keys: ``indices`` of tokens, or ``block_indices`` of blocks of keys.

For "eager" and "sdpa" such a layer puts its choice into the mask, and hands it over to every other implementation. Here
it becomes a mask of all keys again, so that the answer is that of eager attention.

Source: transformers 5, models/deepseek_v32 (DeepseekV32Attention) and models/minimax_m3_vl (MiniMaxM3VLIndexer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.masks.block_mask import BlockMask, is_block_mask
from ..errors import InputError, UnsupportedError, shown
from ..gpu.subclasses import is_untraced
from .arguments import as_bias, check_attended, check_mask
from .transformers_packing import PackedMask, positions_of, refuse_leaks, restarts


def with_chosen_keys(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    others: dict[str, Any],
    *,
    dropout: float,
) -> tuple[Tensor, Any]:
    """Return the queries and the mask of a call, whose mask hides what the layer did not choose.

    Args:
        module: the attention layer. With ``block_indices``, its ``indexer.block_size`` is the keys of a block.
        query: ``[B, H, Sq, D]``.
        key: ``[B, HK, Sk, D]``.
        attention_mask: what expands to ``[B, 1, Sq, Sk]``: boolean, or added to the scores.
        others: keywords of the call. Taken out: ``indices`` ``[B, Sq, K]``, the tokens that a query sees, and
            ``block_indices`` ``[B, groups, Sq, K]``, the blocks of keys that it sees, for each group of heads; both
            int32 or int64, with negative numbers for none.
        dropout: as in ``attend``.

    Raises:
        InputError: the choice breaks the contract above; with ``indices`` there is no mask.
        UnsupportedError: the mask is a ``BlockMask``, or shows documents to each other; blocks are chosen in packed
            documents, or nothing says how large they are.
    """
    indices, blocks = others.pop("indices", None), others.pop("block_indices", None)
    if indices is None and blocks is None:
        return query, attention_mask
    name = "indices" if blocks is None else "block_indices"
    if is_block_mask(attention_mask):
        raise UnsupportedError(f"{name} is not served beside a BlockMask", hint="hand over a mask [B, 1, Sq, Sk]")
    check_attended({"query": (query, "B, H, Sq, D"), "key": (key, "B, HK, Sk, D")})
    is_packed = isinstance(attention_mask, PackedMask)
    mask = attention_mask.dense() if is_packed else attention_mask
    check_mask("attention_mask", mask, ("query", query))
    positions = others.get("position_ids")
    if mask is not None:
        refuse_leaks(mask, positions_of(mask, others), query.shape[2])
    if blocks is None:
        return query, _show_tokens(query, key, mask, indices)
    if indices is not None:
        raise UnsupportedError("indices is not served beside block_indices")
    if is_packed or others.get("cu_seq_lens_q") is not None or (mask is None and restarts(positions, module)):
        # The layer counts its blocks from the first token of all, by positions that restart.
        raise UnsupportedError("block_indices is not served for packed documents")
    seen = _show_blocks(module, query, key, mask, blocks, positions)
    # Eager attention weighs all keys alike in a row that sees none. Scores of nothing do, too.
    hidden = ~seen.any(-1, keepdim=True)
    repeats = query.shape[1] // seen.shape[1]
    query = query.masked_fill(hidden.repeat_interleave(repeats, 1), 0.0)
    seen = seen | hidden
    # Beside dropout or a bias, flash_attention takes no BlockMask, and for a token there is little to skip.
    is_plain = not dropout and others.get("position_bias") is None and query.shape[2] > 1
    return query, BlockMask.from_dense(seen) if is_plain and _can_wait(seen) else seen.repeat_interleave(repeats, 1)


def _can_wait(seen: Tensor) -> bool:
    """Whether a ``BlockMask`` can be made: its size depends on values, for which a GPU is waited for."""
    if not is_untraced(seen) or seen.device.type not in ("cpu", "cuda"):
        return False
    return not (seen.is_cuda and torch.cuda.is_current_stream_capturing())


def _show_tokens(query: Tensor, key: Tensor, mask: Tensor | None, indices: Any) -> Tensor:
    """Return what is added to the scores, ``[B, 1, Sq, Sk]``."""
    batch, _, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    _check_choice("indices", indices, query, (batch, seqlen_q), "[B, Sq, K]")
    if mask is None:
        raise InputError("attention_mask must say which keys a query sees beside indices, got None")
    bias = as_bias("attention_mask", mask, (batch, 1, seqlen_q, seqlen_k), query.dtype)
    seen = _listed(indices, seqlen_k)[:, None]
    return bias.masked_fill(~seen, torch.finfo(bias.dtype).min)


def _show_blocks(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, blocks: Any, position_ids: Any
) -> Tensor:
    """Return which keys are seen, ``[B, groups, Sq, Sk]``."""
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if type(size) is not int or size < 1:
        raise UnsupportedError(
            f"block_indices is not served for {type(module).__name__}, whose indexer.block_size is {shown(size)}"
        )
    groups = blocks.shape[1] if isinstance(blocks, Tensor) and blocks.dim() == 4 else 1
    _check_choice("block_indices", blocks, query, (batch, groups, seqlen_q), "[B, groups, Sq, K]")
    if groups < 1 or heads % groups:
        raise InputError(f"block_indices must have groups that divide {heads} heads, got {groups}")
    listed = _listed(blocks, -(-seqlen_k // size)).repeat_interleave(size, -1)[..., :seqlen_k]
    if mask is None:  # every key up to the query's own, as eager attention has it
        places = torch.arange(seqlen_k, device=query.device)
        own = places[seqlen_k - seqlen_q :] if position_ids is None else position_ids
        return listed & (places <= (own if own.dim() > 1 else own[None])[:, None, :, None])
    try:
        shown_keys = mask.expand(batch, 1, seqlen_q, seqlen_k)
    except RuntimeError:
        raise InputError(
            f"attention_mask must expand to {[batch, 1, seqlen_q, seqlen_k]}, got {list(mask.shape)}"
        ) from None
    return listed & (shown_keys if mask.dtype == torch.bool else shown_keys == 0)


def _check_choice(name: str, choice: Any, query: Tensor, shape: tuple[int, ...], letters: str) -> None:
    if not isinstance(choice, Tensor) or choice.dtype not in (torch.int32, torch.int64):
        got = choice.dtype if isinstance(choice, Tensor) else shown(choice)
        raise InputError(f"{name} must be an int32 or int64 tensor {letters}, got {got}")
    if tuple(choice.shape[:-1]) != shape or choice.device != query.device:
        raise InputError(
            f"{name} must be {letters} on {query.device}, here {[*shape, 'K']}, got {list(choice.shape)} on "
            f"{choice.device}"
        )


def _listed(choice: Tensor, count: int) -> Tensor:
    """Return booleans ``[..., count]``, True where the last axis names a place. Negative ones go to a place apart."""
    places = torch.where(choice < 0, count, choice).long()
    apart = torch.zeros(*choice.shape[:-1], count + 1, dtype=torch.bool, device=choice.device)
    return apart.scatter(-1, places, value=True)[..., :count]
