"""Ulysses by plain collectives: an all-to-all of q, k and v, PyTorch's attention of some heads, and one of o."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor


def _exchange(x: Tensor) -> Tensor:
    received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(received, x)
    return received


def _to_heads(x: Tensor) -> Tensor:
    """Turn ``[n, H, D]`` of some tokens into ``[W * n, H / W, D]`` of some heads."""
    n, heads, columns = x.shape
    ranks = dist.get_world_size()
    by_rank = x.view(n, ranks, heads // ranks, columns).transpose(0, 1).contiguous()
    return _exchange(by_rank).view(ranks * n, heads // ranks, columns)


def _to_tokens(x: Tensor) -> Tensor:
    """Undo it."""
    tokens, heads, columns = x.shape
    ranks = dist.get_world_size()
    by_rank = _exchange(x.contiguous().view(ranks, tokens // ranks, heads, columns))
    return by_rank.transpose(0, 1).reshape(tokens // ranks, ranks * heads, columns)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return _to_heads(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _to_tokens(gradient)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return _to_tokens(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _to_heads(gradient.contiguous())


def attend(q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Return o of this rank's tokens, ``[n, H, D]``; documents go one after another."""
    by_heads = [_ToHeads.apply(x) for x in (q, k, v)]  # type: ignore[no-untyped-call]
    documents = zip(*(x.split(lengths) for x in by_heads), strict=True)
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    found = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in parts), **options)[0].transpose(0, 1)
        for parts in documents
    ]
    o: Tensor = _ToTokens.apply(found[0] if len(found) == 1 else torch.cat(found))  # type: ignore[no-untyped-call]
    return o
