"""A token goes once to each rank that has experts of it. Sizes of messages are fixed: the host reads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .exchange import all_to_all


@dataclass(frozen=True)
class Route:
    """Which tokens a rank sends where."""

    room: int  # rows of a message to one rank
    source: Tensor  # [W, room] the token in each row; any where there is none
    place: Tensor  # [W, n] the row of each token
    fits: Tensor  # [W, n] whether it has one
    ids: Tensor  # [W, room, K] its experts as the receiving rank counts them; below 0 or beyond for none
    over: Tensor  # [1] the most tokens for one rank, less its room


def route_once(ids: Tensor, experts: int, ranks: int, room: int) -> Route:
    """Give tokens rows in messages, in their order.

    Args:
        ids: ``[n, K]`` among the experts of all ranks; others are none.
        experts: of a rank.
        ranks: among which the experts are split, in order.
        room: rows for each rank.
    """
    tokens = ids.shape[0]
    numbers = torch.arange(ranks, device=ids.device)
    owner = torch.div(ids, experts, rounding_mode="floor")
    needs = (owner[None] == numbers[:, None, None]).any(2)  # [W, n]
    row = needs.cumsum(1) - 1
    fits = needs & (row < room)
    place = torch.where(fits, row, room)  # the row behind the last is thrown away
    source = torch.full((ranks, room + 1), tokens, device=ids.device)
    source.scatter_(1, place, torch.arange(tokens, device=ids.device).expand(ranks, tokens))
    source = source[:, :room]
    filled = source < tokens
    source = source.clamp_max(max(tokens - 1, 0))
    own = ids[source] - experts * numbers[:, None, None]
    own = torch.where(filled[..., None], own, -1).to(ids.dtype)
    return Route(room, source, place.clamp_max(max(room - 1, 0)), fits, own, needs.sum(1).amax()[None] - room)


def _send(x: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    """Return ``[W * room, ...]`` of all ranks, from ``[n, ...]`` of this one."""
    return all_to_all(x[route.source], group).flatten(0, 1)


def _sum_back(rows: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    """Return for each token the sum of what ranks made of it, in fp32 in the order of ranks."""
    by_rank = rows.reshape(len(route.fits), route.room, *rows.shape[1:])  # with room for none, -1 would be ambiguous
    back = all_to_all(by_rank.contiguous(), group)
    total = back.new_zeros(route.fits.shape[1], *rows.shape[1:], dtype=torch.float32)
    for rank in range(back.shape[0]):
        # Rows without a token hold anything, NaN too.
        total += torch.where(route.fits[rank, :, None], back[rank][route.place[rank]].float(), 0.0)
    return total.to(rows.dtype)


class SendTokens(torch.autograd.Function):
    """Tokens to ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, route: Route, x: Tensor) -> Tensor:
        """Send."""
        ctx.group, ctx.route = group, route
        return _send(x, route, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Sum."""
        return None, None, _sum_back(gradient, ctx.route, ctx.group)


class ReturnTokens(torch.autograd.Function):
    """What ranks made of tokens, summed; its gradient is sent."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, route: Route, rows: Tensor) -> Tensor:
        """Sum."""
        ctx.group, ctx.route = group, route
        return _sum_back(rows, route, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Send."""
        return None, None, _send(gradient, ctx.route, ctx.group)
