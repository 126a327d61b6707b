"""The gradients of attention of packed sequences for the harness: cases, inputs, exact ones, work and kernels.

A call is given what the forward leaves, q, k, v, o and LSE, and the gradient of o, and gives dq, dk and dv. Each has an
error budget of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..attention import reference
from ..attention.backward.plan import BackwardPlan, plan_backward
from ..attention.backward.plan_sm90 import HopperBackwardConfig, hopper_backward_launches
from ..attention.backward.problem import BackwardProblem
from ..attention.backward.varlen_api import flash_attention_varlen_backward
from ..attention.problem import AttentionProblem
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from .attention_backward import OPERATOR as FIXED, OUTPUTS, BackwardOperator
from .attention_varlen import OPERATOR as FORWARD, VarlenOperator, options_of
from .baselines.attention_varlen_backward import BASELINES
from .baselines.base import Inputs
from .packed.problem import VarlenProblem

if TYPE_CHECKING:
    from ..gpu.identity import PlannedSource

varlen_backward_triton = functools.partial(flash_attention_varlen_backward, kernel="backward_triton")
varlen_backward_gluon_sm90 = functools.partial(flash_attention_varlen_backward, kernel="backward_gluon_sm90")


@dataclass(frozen=True)
class VarlenBackwardProblem(VarlenProblem):
    """A call with packed sequences whose gradients are asked for."""

    @functools.cached_property
    def flops(self) -> float:
        """Operations of a call, as in ``BackwardProblem``."""
        return sum(BackwardProblem(sequence).flops for sequence in self.sequences())

    @property
    def backward(self) -> BackwardProblem:
        """The problem that is planned."""
        return BackwardProblem(dataclasses.replace(self.planned, return_lse=True))

    def describe(self) -> str:
        """Return a short name."""
        return super().describe() + "_backward"


@dataclass(frozen=True)
class _PlanOfTokens(BackwardPlan):
    """A plan of Hopper's kernels for so many tokens, which their grids and tensor maps follow."""

    tokens: tuple[int, int]  # of q, and of k and v


class VarlenBackwardOperator(VarlenOperator):
    """The gradients of attention of packed sequences, for the harness."""

    name = "attention_varlen_backward"
    heads_along = {"q": 1, "k": 1, "v": 1, "do": 1, "o": 1, "lse": 0}
    kernels = {
        "flash_attention_varlen_backward": "auto",
        "varlen_backward_triton": "backward_triton",
        "varlen_backward_gluon_sm90": "backward_gluon_sm90",
    }
    public_module = flash_attention_varlen_backward.__module__
    spill_bytes: ClassVar[dict[str, int]] = {
        **BackwardOperator.spill_bytes, "_backward_sm90_kernel": 72, "_backward_wide_sm90_kernel": 32,
    }  # fmt: skip
    framework = tuple(BackwardOperator.framework)  # type: ignore[assignment] # the forward has four
    known_baselines = BASELINES
    fixed = FIXED
    passed = ("q", "k", "v", "o", "lse", "do")
    instead = "varlen_backward_triton"
    fresh = BackwardOperator.fresh

    def outputs(self, problem: VarlenBackwardProblem) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the names of what a call gives, in this order."""
        return OUTPUTS

    def make_problem(self, table: dict[str, Any]) -> VarlenBackwardProblem:
        """Return the problem of a case. Raises ``InputError`` where a length is no integer."""
        forward = super().make_problem(table)
        return VarlenBackwardProblem(forward.lengths, forward.lengths_k, forward.planned)

    def work(self, problem: VarlenBackwardProblem) -> Work:  # type: ignore[override] # its own problem
        """Count five products a visible score, and every input and output once: the LSE is a number a row."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        columns = p.head_dim + p.head_dim_v
        elements = 2 * (tokens_q * p.heads + tokens_k * p.heads_kv) * columns
        return Work(problem.flops, float(elements * p.item_bytes + 4 * tokens_q * p.heads), tokens_q)

    def shapes(self, problem: VarlenProblem) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs that are normal."""
        p = problem.planned
        return {**super().shapes(problem), "do": (problem.tokens[0], p.heads, p.head_dim_v)}

    def completed(self, problem: VarlenProblem, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is drawn, with o and the LSE of the forward pass in fp32, o rounded."""
        inputs = drawn
        o, lse = reference.attention_varlen(
            **{name: tensor for name, tensor in inputs.items() if name not in ("do", "o", "lse")},
            **options_of(problem), dtype=torch.float32,
        )  # fmt: skip
        return {**inputs, "o": o.to(inputs["do"].dtype), "lse": lse.t().contiguous().t()}  # as the forward leaves it

    def exact(self, problem: VarlenProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the gradients in fp64, of q, k, v and do alone: o and the LSE are computed anew."""
        found = reference.attention_varlen_backward(
            inputs["q"], inputs["k"], inputs["v"], inputs["do"],
            cu_seqlens_q=inputs["cu_seqlens_q"], cu_seqlens_k=inputs["cu_seqlens_k"],
            **options_of(problem), dtype=torch.float64,
        )  # fmt: skip
        return tuple(found[name] for name in ("q", "k", "v"))

    def answers(self, problem: VarlenProblem) -> list[tuple[int, ...]]:
        """Return the shape of each gradient."""
        return [*self.shapes(problem).values()][:3]

    def of_sequence(self, sequence: AttentionProblem) -> BackwardProblem:
        """Return the problem of one sequence, for ``fixed``."""
        return BackwardProblem(sequence)

    def plan(self, subject: str, problem: VarlenBackwardProblem, gpu: GpuSpec) -> Any:
        """Return the plan of a call. Raises ``UnsupportedError``."""
        plan = plan_backward(problem.backward, gpu, self.kernels[subject])
        if not isinstance(plan.config, HopperBackwardConfig):
            return plan
        launches = hopper_backward_launches(plan.problem, plan.config, problem.tokens)
        named = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        return _PlanOfTokens(**{**named, "launches": launches}, tokens=problem.tokens)

    def prepare(self, plan: Any) -> Sequence[PlannedSource]:
        """Return the kernels of a plan."""
        if not isinstance(plan, _PlanOfTokens):
            return FIXED.prepare(plan)
        from ..attention.backward.prepare_sm90 import prepare_hopper_backward

        return prepare_hopper_backward(plan, plan.tokens)

    def instruction(self, plan: Any, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
        return FIXED.instruction(plan, kernel)

    def launches(self, subject: str, problem: VarlenBackwardProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:  # type: ignore[override]
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        return self.prepare(self.plan(subject, problem, gpu))

    def interpreter_steps(self, problem: VarlenProblem) -> int:
        """Count pairs of 16 queries and 32 keys, of two kernels."""
        return 2 * FORWARD.interpreter_steps(problem)


OPERATOR = VarlenBackwardOperator()
