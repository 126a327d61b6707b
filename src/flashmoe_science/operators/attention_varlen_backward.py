"""The gradients of attention of packed sequences for the harness: cases, inputs, exact ones, work and kernels.

A call is given what the forward leaves, q, k, v, o and LSE, and the gradient of o, and gives dq, dk and dv. Each has an
error budget of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..attention import reference
from ..attention.backward.plan import BackwardPlan, plan_backward
from ..attention.backward.plan_sm90 import HopperBackwardConfig, hopper_backward_launches
from ..attention.backward.problem import BackwardProblem
from ..attention.backward.varlen_api import flash_attention_varlen_backward
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from .attention_backward import OPERATOR as FIXED, OUTPUTS, BackwardOperator
from .attention_varlen import OPERATOR as FORWARD, VarlenOperator
from .attention_varlen_problem import VarlenProblem
from .base import DTYPES, standard_normal
from .baselines.attention_varlen_backward import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale

if TYPE_CHECKING:
    from ..gpu.identity import PlannedSource

varlen_backward_triton = functools.partial(flash_attention_varlen_backward, kernel="backward_triton")
varlen_backward_gluon_sm90 = functools.partial(flash_attention_varlen_backward, kernel="backward_gluon_sm90")


@dataclass(frozen=True)
class VarlenBackwardProblem(VarlenProblem):
    """A call with packed sequences whose gradients are asked for."""

    def backward_problems(self) -> Iterator[BackwardProblem]:
        """Yield the gradients of each sequence as a problem of its own."""
        for sequence in self.sequences():
            yield BackwardProblem(sequence)

    @functools.cached_property
    def flops(self) -> float:
        """Operations of a call, as in ``BackwardProblem``."""
        return sum(problem.flops for problem in self.backward_problems())

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
    kernels = {
        "flash_attention_varlen_backward": "auto",
        "varlen_backward_triton": "backward_triton",
        "varlen_backward_gluon_sm90": "backward_gluon_sm90",
    }
    public_module = flash_attention_varlen_backward.__module__
    spill_bytes = BackwardOperator.spill_bytes
    framework = tuple(BackwardOperator.framework)  # type: ignore[assignment] # the forward has four
    known_baselines = BASELINES
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

    def make_inputs(self, problem: VarlenProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k, v and do, and o and LSE of the reference in fp32, o rounded."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        shapes = {
            "q": (tokens_q, p.heads, p.head_dim),
            "k": (tokens_k, p.heads_kv, p.head_dim),
            "v": (tokens_k, p.heads_kv, p.head_dim_v),
            "do": (tokens_q, p.heads, p.head_dim_v),
        }
        inputs = standard_normal(shapes, DTYPES[p.dtype], torch.Generator(device=device).manual_seed(seed))
        for side, lengths in (("q", problem.lengths), ("k", problem.lengths_k)):
            starts = [0, *itertools.accumulate(lengths)]
            inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return self.completed(problem, inputs)

    def completed(self, problem: VarlenProblem, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is drawn, with o and the LSE of the forward pass."""
        p, inputs = problem.planned, drawn
        o, lse = reference.attention_varlen(
            **{name: tensor for name, tensor in inputs.items() if name not in ("do", "o", "lse")},
            causal=p.causal, softmax_scale=p.softmax_scale, dtype=torch.float32,
        )  # fmt: skip
        return {**inputs, "o": o.to(inputs["do"].dtype), "lse": lse.t().contiguous().t()}  # as the forward leaves it

    def arguments(self, problem: VarlenProblem, inputs: Inputs) -> tuple[list[torch.Tensor | int], dict[str, Any]]:
        """Return what a call is given; a baseline runs its forward before."""
        names = ("q", "k", "v", "o", "lse", "do", "cu_seqlens_q", "cu_seqlens_k")
        options = {"causal": problem.planned.causal, "softmax_scale": problem.planned.softmax_scale}
        return [*(inputs[name] for name in names), *problem.longest], options

    def exact(self, problem: VarlenProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:  # type: ignore[override] # three
        """Return the gradients in fp64, of q, k, v and do alone: o and the LSE are computed anew."""
        p = problem.planned
        found = reference.attention_varlen_backward(
            inputs["q"], inputs["k"], inputs["v"], inputs["do"],
            cu_seqlens_q=inputs["cu_seqlens_q"], cu_seqlens_k=inputs["cu_seqlens_k"],
            causal=p.causal, softmax_scale=p.softmax_scale, dtype=torch.float64,
        )  # fmt: skip
        return tuple(found[name] for name in ("q", "k", "v"))

    def low_precision(self, problem: VarlenBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Return what autograd makes of the eager run of each sequence in the problem's dtype."""
        found = [
            torch.zeros(inputs[name].shape, dtype=inputs[name].dtype, device=inputs[name].device) for name in "qkv"
        ]
        for one, rows, keys, parts in self._sequences(problem, inputs):
            _, dq, dk, dv = FIXED.eager(one, parts)
            for whole, part, its in zip(found, (dq, dk, dv), (rows, keys, keys), strict=True):
                whole[its] = part[0].transpose(0, 1)
        return tuple(found)

    def error_scale(self, problem: VarlenBackwardProblem, inputs: Inputs) -> tuple[Scale, ...]:  # type: ignore[override]
        """Return what is allowed in each element of dq, dk and dv, sequence by sequence."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in "qkv":
            shape, device = inputs[name].shape, inputs[name].device
            found.append((torch.zeros(*shape, device=device), torch.zeros(*shape[:2], 1, device=device)))
        for one, rows, keys, parts in self._sequences(problem, inputs):
            scales = FIXED.error_scale(one, parts)
            for (largest, rms), scale, its in zip(found, scales, (rows, keys, keys), strict=True):
                largest[its], rms[its] = (each[0].transpose(0, 1) for each in scale)
        return tuple(Scale(*each) for each in found)

    def _sequences(
        self, problem: VarlenBackwardProblem, inputs: Inputs
    ) -> Iterator[tuple[BackwardProblem, slice, slice, dict[str, torch.Tensor]]]:
        """Yield the sequences that have queries and keys: problem, rows, keys, and ``[1, H, S, D]`` tensors."""
        ends_q, ends_k = (itertools.accumulate(lengths) for lengths in (problem.lengths, problem.lengths_k))
        for one, end_q, end_k in zip(problem.backward_problems(), ends_q, ends_k, strict=True):
            p = one.forward
            rows, keys = slice(end_q - p.seqlen_q, end_q), slice(end_k - p.seqlen_k, end_k)
            if p.seqlen_q and p.seqlen_k:
                places = {"q": rows, "k": keys, "v": keys, "do": rows}
                yield one, rows, keys, {name: inputs[name][its].transpose(0, 1)[None] for name, its in places.items()}

    def plan(self, subject: str, problem: VarlenBackwardProblem, gpu: GpuSpec) -> Any:  # type: ignore[override]
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
