"""Which tokens a query attends to: the scores of DeepSeek-V3.2's indexer, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError, shown
from ...gpu.ambient import without_autocast
from ...gpu.checks import check_memory, check_not_mixed, check_tensor
from ...gpu.subclasses import is_untraced
from ..checks import DTYPE_NAMES, check_place, check_shape

_PRODUCTS = 1 << 27  # at a time: 512 MiB in fp32


@torch.no_grad()
def sparse_mla_indices(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, *, seqlens_k: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Return the positions of the ``top_k`` tokens with the largest indexer scores, as ``sparse_mla`` takes them.

    ``score[b, m, n] = sum_h weights[b, m, h] * relu(q[b, h, m] . k[b, n])``, over the heads of the indexer, which have
    one key. With ``length[b] = seqlens_k[b]`` query m is at ``m + length[b] - Sq``, and no query sees a later token.

    Args:
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32: queries of the indexer.
        k: ``[B, S, D]``, dtype of q.
        weights: ``[B, Sq, H]`` of any of these dtypes, factors on heads included.
        top_k: 1 or more.
        seqlens_k: ``[B]`` int32: tokens of each sequence; by default S.
        causal: hide later tokens; without it, a query sees all tokens of its sequence.

    Returns:
        ``[B, Sq, top_k]`` int32, in no order; -1 where a query sees fewer tokens.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.

    Numerics: products in the dtype of q, their weighted sum in fp32. Which of several tokens with equal scores is
    chosen is up to ``torch.topk``. There are no gradients. Nothing synchronises.
    """
    _check(q, k, weights, seqlens_k)
    _check_options(top_k, causal)
    return _best_tokens(q, k, weights, top_k, seqlens_k, causal=causal)


@without_autocast
def _best_tokens(
    q: Tensor, k: Tensor, weights: Tensor, top_k: int, seqlens_k: Tensor | None, *, causal: bool
) -> Tensor:
    """Return the positions of the largest scores, some rows of queries at a time."""
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[1]
    found = torch.full((batch, seqlen_q, top_k), -1, dtype=torch.int32, device=q.device)
    kept = min(top_k, seqlen_k)
    if not found.numel() or not kept:
        return found
    keys = torch.arange(seqlen_k, device=q.device)
    lengths = torch.full((batch,), seqlen_k, device=q.device) if seqlens_k is None else seqlens_k
    rows = max(1, _PRODUCTS // (batch * max(1, heads) * seqlen_k))
    for first in range(0, seqlen_q, rows):
        part = slice(first, min(seqlen_q, first + rows))
        # [B, H, rows, S]. A product beyond fp16 counts as its largest number: infinity would look like a hidden token.
        products = (q[:, :, part] @ k[:, None].mT).float().clamp(0, torch.finfo(q.dtype).max)
        scores = (products * weights[:, part].float().permute(0, 2, 1)[..., None]).sum(1)
        end = lengths[:, None, None]
        if causal:
            end = end - seqlen_q + 1 + torch.arange(seqlen_q, device=q.device)[part, None]
        scores = scores.masked_fill(keys >= end, -torch.inf)
        best = scores.topk(kept, -1, sorted=False)
        found[:, part, :kept] = torch.where(best.indices >= end, -1, best.indices).int()
    return found


def _check_options(top_k: object, causal: object) -> None:
    if type(top_k) is not int or not 1 <= top_k < 2**31:
        raise InputError(f"top_k must be an integer from 1 to 2**31 - 1, got {shown(top_k)}")
    if type(causal) is not bool:
        raise InputError(f"causal must be True or False, got {shown(causal)}")


def _check(q: Tensor, k: Tensor, weights: Tensor, seqlens_k: Tensor | None) -> None:
    for name, tensor, letters in (("q", q, "B, H, Sq, D"), ("k", k, "B, S, D"), ("weights", weights, "B, Sq, H")):
        check_tensor(name, tensor)
        check_memory(name, tensor)
        check_place(name, tensor, q)
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.dim() != letters.count(",") + 1:
            raise InputError(f"{name} must have axes [{letters}], got shape {list(tensor.shape)}")
    given = {"q": q, "k": k, "weights": weights, "seqlens_k": seqlens_k}
    check_not_mixed({name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)})
    batch, heads, seqlen_q, columns = q.shape
    check_shape("k", k, (batch, k.shape[1], columns), "B, S, D")
    check_shape("weights", weights, (batch, seqlen_q, heads), "B, Sq, H")
    if k.dtype != q.dtype:
        raise InputError(f"k must have the dtype of q, {q.dtype}, got {k.dtype}")
    if seqlens_k is not None:
        check_tensor("seqlens_k", seqlens_k)
        check_place("seqlens_k", seqlens_k, q)
        check_shape("seqlens_k", seqlens_k, (batch,), "B")
        if seqlens_k.dtype != torch.int32:
            raise InputError(f"seqlens_k must be int32, got {seqlens_k.dtype}")
        if seqlens_k.device.type == "cpu" and is_untraced(seqlens_k) and bool((seqlens_k > k.shape[1]).any()):
            raise InputError(f"seqlens_k must be at most the {k.shape[1]} rows of k, got {int(seqlens_k.max())}")
