"""Experts that are split over ranks, for the harness: each rank has some experts, and some tokens.

All ranks make the inputs of all tokens and all experts, and a call takes views of this rank's. It gives the output of
its tokens, and the gradients of what it was given where they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...distributed import ExpertParallel
from ...gpu.planning import Work
from ...moe import reference
from ..base import DTYPES
from ..baselines.all_to_all import BASELINES
from ..baselines.base import Inputs
from ..baselines.moe import options_of
from ..error_scale import Scale
from ..moe import OPERATOR as FORWARD, MoeOperator, activation_of
from ..moe_backward import OPERATOR as BACKWARD
from ..moe_scale import expert_gradients_scale, experts_scale
from .over_ranks import OperatorOverRanks, Pass, RankedProblem, mesh_of, narrowed, rank_here, with_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LEAVES = ("x", "w_gate_up", "w_down", "topk_weights")
_WEIGHTS = ("w_gate_up", "w_down")
_TOKENS = ("x", "topk_weights", "topk_ids", "do")


@functools.lru_cache(maxsize=4)
def _context(mesh: DeviceMesh) -> ExpertParallel:
    return ExpertParallel(mesh)


def expert_parallel(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    do: torch.Tensor | None,
    *,
    mesh: DeviceMesh,
    activation: str,
) -> Any:
    """Return the output of this rank's tokens, and gradients where that of the output is given."""

    def experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _context(mesh).fused_moe(x, up, down, weights, topk_ids, activation=activation)

    return with_gradients(experts, (x, w_gate_up, w_down, topk_weights), do)


class ExpertParallelOperator(OperatorOverRanks):
    """Experts over ranks, for the harness."""

    name = "expert_parallel"
    fresh = (*MoeOperator.fresh, "do")
    keys = {
        **{key: MoeOperator.keys[key] for key in (*MoeOperator.required, "activation", "routing")},
        "ranks": int, "gradients": bool,
    }  # fmt: skip
    required = ("ranks", *MoeOperator.required)
    omitted = {**MoeOperator.omitted, "gradients": True}
    kernels = {"expert_parallel": "auto"}
    rooms = ("moe", "distributed")
    framework = MoeOperator.framework
    known_baselines = BASELINES

    def make_problem(self, table: dict[str, Any]) -> RankedProblem:
        """Return the problem of a case, whose ``tokens`` are those of a rank."""
        ranks, gradients = self.check_ranks(table, {"experts": table["experts"]})
        base = BACKWARD if gradients else FORWARD
        return RankedProblem(base.parse_case({**table, "tokens": table["tokens"] * ranks}), ranks, gradients)

    def sizes(self, problem: RankedProblem) -> Any:
        """Return the sizes of the whole problem."""
        return problem.whole.problem

    def values(self, problem: RankedProblem) -> dict[str, Any]:
        """Return the value of each key."""
        found = FORWARD.values(problem.whole)
        found |= {"ranks": problem.ranks, "gradients": problem.gradients, "tokens": found["tokens"] // problem.ranks}
        return {key: found[key] for key in self.keys}

    def deviation(self, problem: RankedProblem, name: str) -> float:
        """Return the standard deviation of an input."""
        return FORWARD.deviation(problem.whole, name)

    def describe(self, problem: RankedProblem) -> str:
        """Return a short name."""
        return f"w{problem.ranks}_{FORWARD.describe(problem.whole)}{'_step' if problem.gradients else ''}"

    def outputs(self, problem: RankedProblem) -> Sequence[str]:
        """Return the names of what a call gives."""
        return ("out", *(f"d{name}" for name in _LEAVES if problem.gradients))

    def work(self, problem: RankedProblem) -> Work:
        """Return the work of one rank."""
        forward = self.part_of(FORWARD, problem)
        if not problem.gradients:
            return forward
        backward = self.part_of(BACKWARD, problem)
        return Work(forward.flops + backward.flops, backward.bytes, forward.tokens)

    def make_inputs(self, problem: RankedProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return those of all tokens and all experts, and the gradient of the output."""
        inputs = FORWARD.make_inputs(problem.whole, seed=seed, device=device)
        if problem.gradients:
            make = torch.Generator(device=device).manual_seed(seed + 1)
            do = torch.randn(inputs["x"].shape, generator=make, device=device, dtype=torch.float32)
            inputs["do"] = do.to(DTYPES[problem.whole.problem.dtype])
        return inputs

    def bind(self, entry: Callable[..., Any], problem: RankedProblem, inputs: Inputs) -> Callable[[], Any]:
        """Return a call on this rank's tokens and experts."""
        if hasattr(entry, "bind_inputs"):
            return super().bind(entry, problem, inputs)
        tensors = narrowed(inputs, (*_LEAVES, "topk_ids"), problem.ranks)
        do = narrowed(inputs, ["do"], problem.ranks)[0] if problem.gradients else None
        mesh = functools.partial(mesh_of, problem.ranks, tensors[0].device.type)
        activation = problem.whole.problem.activation
        return lambda: entry(*tensors, do, mesh=mesh(), activation=activation)

    def shard(self, problem: RankedProblem, layout: str, rank: int, output: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tokens or the experts of a rank: both are the first dimension."""
        del layout, output
        length = tensor.shape[0] // problem.ranks
        return tensor.narrow(0, rank * length, length)

    def exact(self, problem: RankedProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the whole answer in fp64."""
        mine = _of_rank(inputs, _TOKENS, problem.ranks)
        if not problem.gradients:
            return (_of_all_ranks(FORWARD.exact(problem.whole, mine)),)
        arguments: dict[str, Any] = {**mine, **options_of(problem.whole)}
        found = reference.moe_gradients(**arguments, dtype=torch.float64, output=True)
        for name in _WEIGHTS if dist.is_initialized() else ():
            dist.all_reduce(found[name])
        return tuple(found[name] if name in _WEIGHTS else _of_all_ranks(found[name]) for name in ("out", *_LEAVES))

    def low_precision(self, problem: RankedProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the framework's whole answer in the problem's dtype."""
        out = FORWARD.low_precision(problem.whole, _plain(inputs))
        return (out, *BACKWARD.low_precision(problem.whole, inputs)) if problem.gradients else (out,)

    def error_scale(self, problem: RankedProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of the whole answer."""
        options, mine = activation_of(problem.whole), _of_rank(inputs, _TOKENS, problem.ranks)
        if not problem.gradients:
            found = {"out": experts_scale(mine, options)}
        else:
            found = expert_gradients_scale(mine, options, of_experts=False, output=True)
            mine = _of_rank(inputs, _WEIGHTS, problem.ranks)
            mine["topk_ids"] = inputs["topk_ids"] - rank_here() * mine["w_down"].shape[0]  # others are none here
            found |= expert_gradients_scale(mine, options, of_tokens=False)
        return tuple(Scale(*map(_of_all_ranks, found[name])) for name in ("out", *_LEAVES) if name in found)

    def passes(self, subject: str, problem: RankedProblem) -> Sequence[Pass]:  # noqa: ARG002 - there is one
        """Return what a rank runs: its experts on all tokens."""
        p = problem.whole.problem
        mine = dataclasses.replace(p, experts=p.experts // problem.ranks)
        part = dataclasses.replace(problem.whole, problem=mine)
        forward = FORWARD, "fused_moe", part
        return [forward, (BACKWARD, "fused_moe_backward", part)] if problem.gradients else [forward]


def _of_rank(inputs: Inputs, names: Sequence[str], ranks: int) -> dict[str, torch.Tensor]:
    """Return the inputs with this rank's span of some; all of them where one process works out what is right alone."""
    if not dist.is_initialized():
        return dict(inputs)
    given = [name for name in names if name in inputs]
    return {**inputs, **dict(zip(given, narrowed(inputs, given, ranks), strict=True))}


def _of_all_ranks(span: torch.Tensor) -> torch.Tensor:
    """Return the spans of all ranks, one behind the other."""
    if not dist.is_initialized():
        return span
    whole = span.new_empty(dist.get_world_size() * span.shape[0], *span.shape[1:])
    dist.all_gather_into_tensor(whole, span.contiguous())
    return whole


def _plain(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in inputs.items() if name != "do"}


OPERATOR = ExpertParallelOperator()
