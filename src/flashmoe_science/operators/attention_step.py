"""Attention in a step of training for the harness: a call gives o, then dq, dk and dv.

All but the forward is as ``attention_backward`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..attention import reference
from ..attention.api import flash_attention
from ..attention.backward.api import flash_attention_backward
from ..attention.backward.plan import BackwardPlan, plan_backward
from ..attention.backward.problem import BackwardProblem
from ..attention.forward.plan import plan_attention
from ..attention.tiles import Plan
from ..gpu.planning import PlannedLaunch, Work
from ..gpu.specs import GpuSpec
from .attention_backward import BackwardOperator, draw, step_options
from .attention_scale import step_scale
from .baselines.attention_backward import STEP_BASELINES
from .baselines.base import Inputs
from .error_scale import Scale

if TYPE_CHECKING:
    from ..gpu.identity import PlannedSource


_NOT_SERVED = ("softcap", "sinks", "alibi", "bias")


def attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o, dq, dk and dv: what autograd runs of a layer's attention in one step."""
    options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "window": window}
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    return o, *flash_attention_backward(q, k, v, o, lse, do, **options)


@dataclass(frozen=True)
class StepPlan:
    """The plans of both passes."""

    forward: Plan
    backward: BackwardPlan

    @property
    def problem(self) -> BackwardProblem:
        """The problem of the backward pass, which has that of the forward."""
        return self.backward.problem

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """The launches of both, in order."""
        return self.forward.launches + self.backward.launches


class StepOperator(BackwardOperator):
    """Attention in a step of training, for the harness."""

    name = "attention_train"
    fresh = ("q", "k", "v", "do")
    keys = {name: kind for name, kind in BackwardOperator.keys.items() if name not in _NOT_SERVED}
    omitted = {"softmax_scale": None, "window": (-1, -1)}
    kernels = {"attention_step": "auto"}
    public_module = ""
    framework = ("*flash_fwd*", *BackwardOperator.framework)
    known_baselines = STEP_BASELINES
    instead = ""

    def outputs(self, problem: BackwardProblem) -> Sequence[str]:
        """Return the names of what a call gives, in this order."""
        return ("o", *super().outputs(problem))

    def describe(self, problem: BackwardProblem) -> str:
        """Return a short name of a problem."""
        return problem.forward.describe() + "_step"

    def work(self, problem: BackwardProblem) -> Work:
        """Count seven products a visible score, and every input and output once: o is an output here."""
        found = super().work(problem)
        return Work(found.flops + problem.forward.flops, found.bytes - 4 * problem.forward.rows, found.tokens)

    def make_inputs(self, problem: BackwardProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k, v and do."""
        return draw(problem, seed=seed, device=device)

    def completed(self, problem: BackwardProblem, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ARG002 - the base's signature
        """Return what is drawn: nothing follows from it."""
        return drawn

    def arguments(self, problem: BackwardProblem, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q, k, v and do, and options."""
        return [inputs[name] for name in ("q", "k", "v", "do")], step_options(problem)

    def exact(self, problem: BackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return o and the gradients in fp64."""
        q, k, v = (inputs[name] for name in "qkv")
        o, _ = reference.attention(q, k, v, **step_options(problem), dtype=torch.float64)
        return o, *super().exact(problem, inputs)

    def low_precision(self, problem: BackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return o and what autograd makes of it, in the problem's dtype, K/V head by K/V head."""
        return tuple(self.eager(problem, inputs))

    def error_scale(self, problem: BackwardProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o, dq, dk and dv."""
        return step_scale(*(inputs[name] for name in ("q", "k", "v", "do")), **step_options(problem))

    def plan(self, subject: str, problem: BackwardProblem, gpu: GpuSpec) -> StepPlan:  # noqa: ARG002 - there is one
        """Return the plans of both passes. Raises ``UnsupportedError``."""
        return StepPlan(plan_attention(problem.forward, gpu), plan_backward(problem, gpu))

    def prepare(self, plan: StepPlan) -> Sequence[PlannedSource]:
        """Return the kernels of both passes."""
        from ..attention.forward.prepare import prepare_kernels

        return [*prepare_kernels(plan.forward), *super().prepare(plan.backward)]


OPERATOR = StepOperator()
