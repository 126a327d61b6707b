"""The routing of a case, for the harness: sampled so that every set of inputs asks for the same work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..moe.problem import MoeCase

_DRAWS = 9  # of few tokens, of which the middle one is taken: one alone may have unusually many experts without a token
_FEW_TOKENS = 1024  # above, one draw is as good as another: experts without a token are rare
_PART = 256


@dataclass(frozen=True)
class _Draw:
    """What the routing of a case depends on. Cases of other sizes share it."""

    tokens: int
    experts: int
    top_k: int
    routing: str

    @classmethod
    def of(cls, case: MoeCase) -> _Draw:
        p = case.problem
        return cls(p.tokens, p.experts, p.top_k, case.routing)

    def next(self, generator: torch.Generator, tokens: int) -> Tensor:
        """Draw K different experts for each of the next ``tokens`` tokens."""
        uniform = torch.rand(tokens, self.experts, generator=generator)
        keys = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))  # its largest K are such a draw (Gumbel)
        if self.routing == "zipf":
            keys -= torch.log(torch.arange(1, self.experts + 1).float())
        return keys.topk(self.top_k, -1).indices


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch work in one thread: on tensors this small several take ten times as much of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=256)
@_one_thread()
def _routing(draw: _Draw) -> Tensor:
    """Return which expert each pair goes to, ``[T, K]`` int64 on the CPU, up to the names of experts.

    From several samples, take the one with the median number of active experts.
    """
    generator = torch.Generator().manual_seed(0)
    draws = [draw.next(generator, draw.tokens) for _ in range(_DRAWS if draw.tokens <= _FEW_TOKENS else 1)]
    return sorted(draws, key=_active)[len(draws) // 2]


def _active(ids: Tensor) -> int:
    return int(torch.bincount(ids.flatten()).count_nonzero())


def draw_ids(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
    """Return the routing of ``case``, ``[T, K]`` int32, with names of experts that ``generator`` draws.

    How many tokens each expert of a case has is the same in every draw: the work that is counted is the work done, and
    times of one case are of one distribution.
    """
    names = torch.randperm(case.problem.experts, generator=generator, device=device)
    return names[_routing(_Draw.of(case)).to(device)].to(torch.int32)


def active_experts(case: MoeCase) -> int:
    """Return how many experts have a token."""
    return _active_experts(_Draw.of(case))


@functools.lru_cache(maxsize=256)
@_one_thread()
def _active_experts(draw: _Draw) -> int:
    if draw.tokens <= _FEW_TOKENS:
        return _active(_routing(draw))
    # The one draw of many tokens is made in parts: the first of them mostly have every expert.
    generator, seen = torch.Generator().manual_seed(0), torch.zeros(draw.experts, dtype=torch.bool)
    for first in range(0, draw.tokens, _PART):
        seen[draw.next(generator, min(_PART, draw.tokens - first)).flatten()] = True
        if seen.all():
            break
    return int(seen.sum())


def weight_bytes(case: MoeCase) -> int:
    """Return the bytes of all weights that a forward pass has to read; its biases do not count."""
    p = case.problem
    return active_experts(case) * p.expert_bytes + p.shared_bytes if p.tokens else 0
