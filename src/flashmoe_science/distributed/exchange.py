"""What ranks send to one another: all-to-all and all-gather, and sums in the order of ranks.

Messages have tokens first, so what arrives lies in the order of tokens, and views of it are what kernels take.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError
from .layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def all_to_all(message: Tensor, group: Group) -> Tensor:
    """Send ``message[r]`` to rank r; return what the ranks sent, by rank. ``[W, ...]`` contiguous."""
    received = torch.empty(message.shape, dtype=message.dtype, device=message.device)
    dist.all_to_all_single(received, message, group=group)
    return received


def tokens_to_heads(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Turn some tokens of all heads into all tokens of some heads, in one message.

    Args:
        tensors: ``[B, heads, n, D]`` each, D and the heads of its own; heads are multiples of the ranks W.
        group: of W ranks.

    Returns:
        For each ``[B, heads / W, n * W, D]``, a view of the message.
    """
    ranks = group.size()
    batch, _, tokens, _ = tensors[0].shape
    widths = [tensor.shape[1] // ranks * tensor.shape[3] for tensor in tensors]
    message = tensors[0].new_empty(ranks, tokens, batch, sum(widths))
    for tensor, part in zip(tensors, torch.split(message, widths, 3), strict=True):
        heads, columns = tensor.shape[1] // ranks, tensor.shape[3]
        by_rank = torch.unflatten(tensor, 1, (ranks, heads)).permute(1, 3, 0, 2, 4)  # W, n, B, heads / W, D
        torch.unflatten(part, 3, (heads, columns)).copy_(by_rank)
    received = all_to_all(message, group).flatten(0, 1)  # n * W, B, columns of all
    return tuple(
        torch.unflatten(part, 2, (tensor.shape[1] // ranks, tensor.shape[3])).permute(1, 2, 0, 3)
        for tensor, part in zip(tensors, torch.split(received, widths, 2), strict=True)
    )


def heads_to_tokens(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Undo ``tokens_to_heads``: ``[B, heads / W, n * W, D]`` become ``[B, heads, n, D]``, rows of D contiguous."""
    ranks = group.size()
    batch, _, tokens, _ = tensors[0].shape
    widths = [tensor.shape[1] * tensor.shape[3] for tensor in tensors]
    message = tensors[0].new_empty(ranks, tokens // ranks, batch, sum(widths))
    for tensor, part in zip(tensors, torch.split(message, widths, 3), strict=True):
        by_rank = torch.unflatten(tensor, 2, (ranks, tokens // ranks)).permute(2, 3, 0, 1, 4)
        torch.unflatten(part, 3, (tensor.shape[1], tensor.shape[3])).copy_(by_rank)
    received = all_to_all(message, group)
    found = []
    for tensor, part in zip(tensors, torch.split(received, widths, 3), strict=True):
        heads, columns = tensor.shape[1], tensor.shape[3]
        local = tensor.new_empty(batch, tokens // ranks, ranks, heads, columns)
        local.copy_(torch.unflatten(part, 3, (heads, columns)).permute(2, 1, 0, 3, 4))
        found.append(local.flatten(2, 3).transpose(1, 2))
    return tuple(found)


class TokensToHeads(torch.autograd.Function):
    """``tokens_to_heads``, with gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange."""
        ctx.group = group
        return tokens_to_heads(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Exchange back."""
        return None, *heads_to_tokens(gradients, ctx.group)


class HeadsToTokens(torch.autograd.Function):
    """``heads_to_tokens`` of one tensor, with gradients."""

    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        """Exchange."""
        ctx.group = group
        return heads_to_tokens((tensor,), group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Exchange back."""
        return None, tokens_to_heads((gradient,), ctx.group)[0]


def gather_tokens(local: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the tokens ``[T, ...]`` of all ranks in their order, from ``[n, ...]`` of each."""
    gathered = local.new_empty(layout.tokens, *local.shape[1:])
    _all_gather(gathered, local.contiguous(), group=group)
    return _reorder(gathered, layout.places(), layout.chunk)


def reduce_tokens(partial: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the sum over ranks for the tokens of this one, added in the order of ranks: the same bits in every run.

    Args:
        partial: ``[T, ...]``, what this rank adds to each token; it is sent as it is.
        layout: which tokens are whose.
        group: of all ranks.

    Returns:
        ``[n, ...]`` fp32.
    """
    owned = _reorder(partial, [number for held in layout.chunks for number in held], layout.chunk)
    received = all_to_all(torch.unflatten(owned, 0, (layout.ranks, -1)).contiguous(), group)
    total = received[0].float()
    for rank in range(1, layout.ranks):
        total = total + received[rank]
    return total


class GatherTokens(torch.autograd.Function):
    """``gather_tokens``, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, group: Group, local: Tensor) -> Tensor:
        """Gather."""
        ctx.layout, ctx.group = layout, group
        return gather_tokens(local, layout, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Sum."""
        return None, None, reduce_tokens(gradient, ctx.layout, ctx.group).to(gradient.dtype)


class ReduceTokens(torch.autograd.Function):
    """``reduce_tokens`` in the dtype of the parts, whose gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, group: Group, partial: Tensor) -> Tensor:
        """Sum."""
        ctx.layout, ctx.group = layout, group
        return reduce_tokens(partial, layout, group).to(partial.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gather."""
        return None, None, gather_tokens(gradient, ctx.layout, ctx.group)


def _reorder(tokens: Tensor, places: Sequence[int], chunk: int) -> Tensor:
    """Return the chunks of ``tokens`` in the order of ``places``."""
    if list(places) == list(range(len(places))):
        return tokens
    parts = torch.split(tokens, chunk)
    return torch.cat([parts[place] for place in places])


class Agreement:
    """Whether all ranks make the same call: a collective would hang else, or mix tensors up."""

    def __init__(self, group: Group) -> None:
        """Begin with no call known."""
        self._group = group
        self._known: set[str] = set()

    def check(self, call: str) -> None:
        """Compare a call over ranks, the first time that it comes; with ``FLASHMOE_CHECK=1`` every time.

        Args:
            call: describes the call of this rank. If it starts with ``error:``, it says what is wrong with it.

        Raises:
            InputError: on all ranks, where calls differ or one is wrong.
        """
        if call in self._known and os.environ.get("FLASHMOE_CHECK") != "1":
            return
        _compare(call, self._group)
        self._known.add(call)


def _compare(call: str, group: Group) -> None:
    calls: list[str] = [""] * group.size()
    dist.all_gather_object(calls, call, group=group)
    for rank, other in enumerate(calls):
        if other.startswith("error:"):
            raise InputError(f"rank {rank}: {other.removeprefix('error:').strip()}")
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise InputError(
                f"all ranks must make the same call, but rank 0 has {calls[0]} and rank {rank} has {other}"
            )


def describe_tensors(tensors: Mapping[str, Tensor | None]) -> str:
    """Return shapes and dtypes by name, and which tensors have a gradient."""
    return ", ".join(f"{name} {_form(tensor)}" for name, tensor in tensors.items() if tensor is not None)


def _form(tensor: Tensor) -> str:
    grad = " with a gradient" if tensor.requires_grad and torch.is_grad_enabled() else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{grad}"


def group_of(mesh: DeviceMesh, dimension: str) -> Group:
    """Return the group of a mesh of one dimension. Raises ``InputError`` for another mesh."""
    if mesh.ndim != 1:
        raise InputError(
            f"mesh must have one dimension, got {mesh.ndim}", hint=f'choose one, as in mesh["{dimension}"]'
        )
    return mesh.get_group()
