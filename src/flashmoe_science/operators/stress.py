"""Stress draws: inputs and layouts that models have and standard normal, contiguous tensors have not.

Values stay within the contract, so that a right kernel is as right as ever: what is allowed in each element follows
from these very values. Each function of values changes its tensors in place; one of layouts returns new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

OF_VALUES = ("outliers", "sink_key", "large_logits", "peaked_rows", "repeated_rows", "neighbours")
OF_LAYOUT = ("strided", "expanded", "odd_offset")
_LARGE = 120.0  # exp of it overflows in fp32, and of its negative it is 0
_SINK = 8.0  # above the other scores: as most of a row's weight as in trained models
_PADDING = 8  # rows and elements around what is read: 16 bytes of a 16-bit format


def stress_attention(draw: str, q: Tensor, k: Tensor, v: Tensor | None, scale: float, first: Sequence[int]) -> None:
    """Change standard normal tensors ``[..., S, D]``, views allowed, as ``draw`` says.

    Args:
        draw: one of ``OF_VALUES`` but ``neighbours``.
        q: queries.
        k: keys.
        v: values; None where they are the keys.
        scale: factor on the scores.
        first: the first key of each sequence.
    """
    common = (_LARGE / abs(scale)) ** 0.5 if scale else 1.0
    if draw == "outliers":  # a channel in which all queries and keys are large, and one of the values
        q[..., 0] *= 6
        k[..., 0] *= 6
        if v is not None:
            v[..., -1] *= 64
    elif draw == "sink_key":  # all rows look at key 0, whose value is small
        q[..., 0] += 3
        k[..., first, :] *= 0.1
        k[..., first, 0] = _SINK / (3 * abs(scale)) if scale else 1.0
        if v is not None:
            v[..., first, :] *= 0.1
    elif draw == "large_logits":  # of one row all are far above 0, of the next all far below
        q[..., 0] = common
        q[..., 1::2, 0] = -common
        k[..., 0] = common
    elif draw == "peaked_rows":  # one key has all the weight, or all have the same
        for row, factor in enumerate((8.0, 0.0, 1.0, 0.25)):
            q[..., row::4, :] *= factor
    elif draw == "repeated_rows":  # the same query or key twice: scores tie
        for x in (q, k):
            x[..., 1::2, :] = x[..., : x.shape[-2] // 2 * 2 : 2, :]


def laid_out(
    draw: str, tensors: Mapping[str, Tensor], names: Sequence[str], expanded: Sequence[str]
) -> dict[str, Tensor] | None:
    """Return the same values in another layout, or those of one sequence or head for all with stride 0.

    Rows stay dense: strides and addresses change.

    Args:
        draw: one of ``OF_LAYOUT``.
        tensors: inputs by name.
        names: those of them that are laid out anew.
        expanded: those that may be expanded, each along another axis that is longer than 1: their strides differ.

    Returns:
        All inputs; None where none can be expanded.
    """
    if draw == "expanded":
        there = [name for name in expanded if name in tensors]
        wide = {name: _expanded(tensors[name], place) for place, name in enumerate(there)}
        found = {name: x for name, x in wide.items() if x is not None}
        return {**tensors, **found} if found else None
    change = {"strided": _strided, "odd_offset": _at_odd_offset}[draw]
    return {name: change(x) if name in names else x for name, x in tensors.items()}


def _expanded(x: Tensor, place: int) -> Tensor | None:
    """Return the first of the axis at ``place`` for all others, with stride 0; the last two axes stay."""
    axes = [axis for axis in range(x.dim() - 2) if x.shape[axis] > 1]
    return x.narrow(axes[place], 0, 1).expand(x.shape) if place < len(axes) else None


def _strided(x: Tensor) -> Tensor:
    """Return ``[..., M, N, D]`` as a part of ``[..., N + 8, M + 8, D + 8]``: nothing may read the NaN of the rest."""
    order = [*range(x.dim())]
    if x.dim() > 2:
        order[-3], order[-2] = order[-2], order[-3]
    shape = [x.shape[axis] for axis in order]
    around = (*shape[:-3], *(size + _PADDING for size in shape[-3:]))
    wide = torch.full(around, torch.nan, dtype=x.dtype, device=x.device)
    return wide[tuple(slice(size) for size in shape)].permute(order).copy_(x)


def _at_odd_offset(x: Tensor) -> Tensor:
    """Return it one element behind an address that the allocator aligned, between numbers that are NaN."""
    memory = torch.full((x.numel() + 2 * _PADDING,), torch.nan, dtype=x.dtype, device=x.device)
    return memory[_PADDING + 1 :][: x.numel()].view(x.shape).copy_(x)


def halved(size: int, least: int, fits: Callable[[int], bool]) -> int:
    """Return a size halved until it fits, or is at most ``least``."""
    while size > least and not fits(size):
        size = max(least, size // 2)
    return size
