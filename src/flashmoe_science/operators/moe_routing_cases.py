"""The routing of a case, for the harness: sampled so that every set of inputs asks for the same work."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..moe.problem import MoeCase

_DRAWS = 9  # of few tokens, of which the middle one is taken: one alone may have unusually many experts without a token
_FEW_TOKENS = 1024  # above, one draw is as good as another: experts without a token are rare


def _draw(case: MoeCase, generator: torch.Generator) -> Tensor:
    """Draw K different experts for each token."""
    p = case.problem
    uniform = torch.rand(p.tokens, p.experts, generator=generator)
    keys = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))  # the largest K of these are such a draw (Gumbel)
    if case.routing == "zipf":
        keys -= torch.log(torch.arange(1, p.experts + 1).float())
    return keys.topk(p.top_k, -1).indices


@functools.lru_cache(maxsize=256)
def _routing(case: MoeCase) -> Tensor:
    """Return which expert each pair goes to, ``[T, K]`` int64 on the CPU, up to the names of experts.

    From several samples, take the one with the median number of active experts.
    """
    generator = torch.Generator().manual_seed(0)
    draws = [_draw(case, generator) for _ in range(_DRAWS if case.problem.tokens <= _FEW_TOKENS else 1)]
    return sorted(draws, key=_active)[len(draws) // 2]


def _active(ids: Tensor) -> int:
    return int(torch.unique(ids).numel())


def draw_ids(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
    """Return the routing of ``case``, ``[T, K]`` int32, with names of experts that ``generator`` draws.

    How many tokens each expert of a case has is the same in every draw: the work that is counted is the work done, and
    times of one case are of one distribution.
    """
    names = torch.randperm(case.problem.experts, generator=generator, device=device)
    return names[_routing(case).to(device)].to(torch.int32)


def active_experts(case: MoeCase) -> int:
    """Return how many experts have a token."""
    return _active(_routing(case))


def weight_bytes(case: MoeCase) -> int:
    """Return the bytes of all weights that a forward pass has to read; its biases do not count."""
    p = case.problem
    return active_experts(case) * p.expert_bytes + p.shared_bytes if p.tokens else 0
