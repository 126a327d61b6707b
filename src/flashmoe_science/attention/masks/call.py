"""A mask in a call: what it may stand beside, and whether it fits the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError
from ...gpu.checks import check_dense, check_memory, check_tensor
from .block_mask import BlockMask, as_block_mask
from .lists import BLOCK, WORDS

_INSTEAD = {
    "causal": "BlockMask.documents, .prefix and .blocks make causal masks",
    "window": "a window can be part of the mask",
    "alibi": "without mask=, bias hides keys by -inf",
    "bias": "without mask=, bias hides keys by -inf",
    "dropout_p": "without mask=, bias hides keys by -inf",
}


class MaskTensors(NamedTuple):
    """What a call takes of a mask."""

    lists: Tensor
    bits: Tensor
    sizes: tuple[int, int]  # sequences and heads that have a mask of their own


def mask_tensors(mask: Any, tensors: Mapping[str, Any], asked: Mapping[str, bool]) -> MaskTensors:
    """Return what a call takes of a mask that a caller passed.

    Args:
        mask: ours or torch's.
        tensors: q and k, among others, as the caller passed them.
        asked: whether the options that a mask does not stand beside are asked for.

    Raises:
        InputError: it is no mask, or of other sizes or on another device than q and k.
        UnsupportedError: an option is asked for too, a tensor is a DTensor, or torch's mask is passed while compiling.
    """
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(f"{name} is not served beside a mask", hint=_INSTEAD[name])
    found: BlockMask = as_block_mask(mask)
    for name in ("q", "k"):
        check_tensor(name, tensors[name])
        check_dense(name, tensors[name])
    q, k = tensors["q"], tensors["k"]
    sizes = found.sizes
    if q.dim() == k.dim() == 4:  # else they are refused by name, with all others
        batch, heads, seqlen_q, _ = q.shape
        if sizes.seqlen_q != seqlen_q or sizes.seqlen_k != k.shape[2]:
            raise InputError(
                f"mask must be of {seqlen_q} queries and {k.shape[2]} keys, got {sizes.seqlen_q} and {sizes.seqlen_k}"
            )
        check_mask_sizes((sizes.batch, sizes.heads), batch, heads)
    if found.lists.device != q.device:
        raise InputError(f"mask must be on the device of q, {q.device}, got {found.lists.device}")
    return MaskTensors(found.lists, found.bits, (sizes.batch, sizes.heads))


def check_mask_sizes(sizes: tuple[int, int], batch: int, heads: int) -> None:
    """Raise ``InputError`` unless sequences and heads can share so many masks."""
    if sizes[0] not in (1, batch) or sizes[1] < 1 or heads % sizes[1]:
        raise InputError(
            f"mask must be of {batch} or 1 sequences and of heads that divide {heads}, got {sizes[0]} and {sizes[1]}"
        )


def check_mask_tensors(tensors: Mapping[str, Tensor], sizes: tuple[int, int]) -> None:
    """Raise ``InputError`` unless the tensors are what kernels read: their values are not looked at."""
    q, lists, bits = tensors["q"], tensors["mask_lists"], tensors["mask_bits"]
    check_mask_sizes(sizes, q.shape[0], q.shape[1])
    for name, tensor, axes in (("mask_lists", lists, 1), ("mask_bits", bits, 3)):
        check_memory(name, tensor)
        is_right = tensor.dtype == torch.int32 and tensor.dim() == axes and tensor.is_contiguous()
        if not is_right or tensor.device != q.device or (axes == 3 and tuple(tensor.shape[1:]) != (BLOCK, WORDS)):
            raise InputError(
                f"{name} must be int32, contiguous and on {q.device}, as BlockMask has it, got {tensor.dtype} of shape "
                f"{list(tensor.shape)} on {tensor.device}"
            )
