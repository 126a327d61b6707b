"""What the harness needs to know of attention in a step of training: a call gives o, then dq, dk and dv.

All but the forward is as ``attention_backward`` has it.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..attention import reference
from ..attention.api import flash_attention
from ..attention.backward_api import flash_attention_backward
from ..attention.backward_plan import BackwardPlan, plan_backward
from ..attention.backward_problem import BackwardProblem
from ..attention.calls import allocate_lse, allocate_output
from ..attention.inputs import problem_of
from ..attention.plan import plan_attention
from ..attention_backward import operator as backward
from ..attention_backward.operator import BackwardOperator, draw
from ..gpu.planning import PlannedLaunch, Work
from ..gpu.specs import GpuSpec
from . import rivals

if TYPE_CHECKING:
    from ..attention.prepared import PreparedKernel

_ROOMS = ("attention", "attention_backward", "attention_train", "gpu")


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


class TrainOperator(BackwardOperator):
    """Attention in a step of training, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "attention_train"
    keys = {**backward._KEYS, "window": list}  # noqa: RUF012, SLF001 - those of gradients, and one more

    def outputs(self, problem: BackwardProblem) -> Sequence[str]:
        """Return the names of what a call gives, in this order."""
        return ("o", *super().outputs(problem))

    def as_table(self, problem: BackwardProblem) -> dict[str, Any]:
        """Return the inverse of ``parse_case``."""
        table = {**super().as_table(problem), "window": [*problem.forward.window]}
        if table["window"] == [-1, -1]:
            del table["window"]
        return table

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

    def bind(
        self, entry: Callable[..., Any], problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], Any]:
        """Return ``entry(q, k, v, do, ...)`` as a call without arguments."""
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], Any] = entry.bind_inputs(problem, inputs)
            return bound
        p = problem.forward
        options: dict[str, Any] = {"causal": p.causal, "softmax_scale": p.softmax_scale, "window": p.window}
        return functools.partial(entry, *(inputs[name] for name in ("q", "k", "v", "do")), **options)

    def exact(self, problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return o and the gradients in fp64."""
        p = problem.forward
        o, _ = reference.attention(
            inputs["q"], inputs["k"], inputs["v"],
            causal=p.causal, softmax_scale=p.softmax_scale, window=p.window, dtype=torch.float64,
        )  # fmt: skip
        return o, *super().exact(problem, inputs)

    def low_precision(self, problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return o and what autograd makes of it, in the problem's dtype, K/V head by K/V head."""
        o, *gradients = self.eager(problem, inputs)
        return o, *gradients

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementation."""
        return {"attention_step": f"{__package__}.operator:attention_step"}

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: the rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        return sorted(str(path.relative_to(package)) for room in _ROOMS for path in (package / room).glob("*.py"))

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own attention kernels."""
        return ("*flash_fwd*", *super().framework_kernels())

    def cpu_refusal(self, subject: str, problem: BackwardProblem) -> str | None:  # noqa: ARG002 - the protocol's
        """Return why a CPU cannot check ``problem``."""
        return "on CPU tensors it runs the reference, which would prove nothing"

    def rivals(self) -> Mapping[str, Any]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS

    def _launches(
        self, subject: str, problem: BackwardProblem, gpu: GpuSpec
    ) -> list[tuple[PlannedLaunch, PreparedKernel]]:
        from ..attention.prepare import prepare_kernels

        forward = plan_attention(problem.forward, gpu)
        before = [*zip(forward.launches, prepare_kernels(forward), strict=True)]
        return [*before, *super()._launches(subject, problem, gpu)]

    def _saved(self, problem: BackwardProblem, drawn: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is drawn, with o and the LSE as the forward of a step lays them out."""
        p, (q, k, v) = problem.forward, (drawn[name] for name in "qkv")
        forward = problem_of(
            q, k, v, causal=p.causal, softmax_scale=p.softmax_scale, window=p.window, return_lse=True
        )  # fmt: skip
        return {**drawn, "o": allocate_output(forward, q), "lse": allocate_lse(forward, q)}

    def _plan(self, subject: str, problem: BackwardProblem, gpu: GpuSpec) -> BackwardPlan:  # noqa: ARG002
        plan_attention(problem.forward, gpu)  # it may refuse too
        return plan_backward(problem, gpu)


OPERATOR = TrainOperator()
