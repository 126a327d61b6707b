"""Experts over ranks as most frameworks run them: pairs of a token and an expert travel; the host reads how many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.api import fused_moe
from ..ranks.over_ranks import narrowed, with_gradients
from .base import Baseline, Call, Inputs, by_name
from .context_parallel import ONE_GPU


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows with the lengths of both sides on the host; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        ctx.lengths = received, sent
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        received, sent = ctx.lengths
        return _Exchange.apply(gradient, sent, received), None, None  # type: ignore[no-untyped-call]


def by_pairs(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, *, ids: Tensor, options: Any) -> Tensor:
    """Return the output of this rank's tokens ``x``, with this rank's experts."""
    ranks, mine, top_k = dist.get_world_size(), w_down.shape[0], ids.shape[1]
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=mine * ranks)
    theirs = torch.zeros_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = counts.view(ranks, mine).sum(1).tolist(), theirs.view(ranks, mine).sum(1).tolist()  # the wait
    rows = _Exchange.apply(x[order // top_k], received, sent)  # type: ignore[no-untyped-call]
    experts = torch.arange(mine, device=x.device, dtype=torch.int32).repeat(ranks)
    experts = experts.repeat_interleave(theirs, output_size=sum(received))[:, None]
    ones = torch.ones(experts.shape, dtype=weights.dtype, device=x.device)
    back = _Exchange.apply(fused_moe(rows, w_gate_up, w_down, ones, experts, **options), sent, received)  # type: ignore[no-untyped-call]
    pairs = torch.zeros_like(back).index_copy(0, order, back).view(*ids.shape, -1)
    return (pairs.float() * weights[..., None].float()).sum(1).to(x.dtype)


class AllToAll(Baseline):
    """Pairs by ``all_to_all_single``, with our kernels for the experts of each rank."""

    name = "all-to-all"

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call on views of the inputs."""
        names = ("x", "w_gate_up", "w_down", "topk_weights", "topk_ids")
        *tensors, ids = narrowed(inputs, names, problem.ranks)
        do = narrowed(inputs, ["do"], problem.ranks)[0] if problem.gradients else None
        run = functools.partial(by_pairs, ids=ids, options={"activation": problem.whole.problem.activation})
        return functools.partial(with_gradients, run, tensors, do)


class OneGpu(Baseline):
    """All experts on all tokens on each rank's card, of whose answer a rank's part is kept."""

    name = ONE_GPU
    distribution = None

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call on the whole inputs."""
        tensors = [inputs[name] for name in ("x", "w_gate_up", "w_down", "topk_weights")]
        activation = problem.whole.problem.activation

        def experts(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor) -> Tensor:
            return fused_moe(x, w_gate_up, w_down, weights, inputs["topk_ids"], activation=activation)

        call = functools.partial(with_gradients, experts, tensors, inputs.get("do"))
        return lambda: tuple(part.chunk(problem.ranks)[dist.get_rank()] for part in call())


class ReplicatedExperts(Baseline):
    """All experts on each rank's card, and that rank's tokens alone: nothing travels.

    Gradients of the weights are not added up over ranks: so it does less than the problem asks for.
    """

    name = "replicated-experts"
    distribution = None
    speed_of_light = True

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call on views of this rank's tokens."""
        x, weights, ids = narrowed(inputs, ("x", "topk_weights", "topk_ids"), problem.ranks)
        do = narrowed(inputs, ["do"], problem.ranks)[0] if problem.gradients else None
        activation = problem.whole.problem.activation

        def experts(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor) -> Tensor:
            return fused_moe(x, w_gate_up, w_down, weights, ids, activation=activation)

        tensors = (x, inputs["w_gate_up"], inputs["w_down"], weights)
        return functools.partial(with_gradients, experts, tensors, do)


BASELINES = by_name(AllToAll(), OneGpu(), ReplicatedExperts())
