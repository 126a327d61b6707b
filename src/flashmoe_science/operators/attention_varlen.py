"""Attention of packed sequences for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..attention import reference
from ..attention.forward.plan import plan_attention
from ..attention.inputs import check_window
from ..attention.problem import AttentionProblem
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from .attention import OPERATOR as FIXED, AttentionOperator
from .base import DTYPES, KernelOperator, standard_normal
from .baselines.attention_varlen import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale
from .packed.problem import VarlenProblem, make_problem
from .stress import OF_VALUES, stress_attention

if TYPE_CHECKING:
    from ..gpu.identity import PlannedSource

varlen_triton = functools.partial(flash_attention_varlen, kernel="forward_triton")
varlen_gluon_sm90 = functools.partial(flash_attention_varlen, kernel="forward_features_gluon_sm90")


def options_of(problem: VarlenProblem) -> dict[str, Any]:
    """Return the options of a call: a window only where there is one."""
    p = problem.planned
    window = {"window": p.window} if p.window != (-1, -1) else {}
    return {"causal": p.causal, "softmax_scale": p.softmax_scale, **window}


class VarlenOperator(KernelOperator):
    """Attention of packed sequences, for the harness."""

    name = "attention_varlen"
    fresh: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    heads_along = {"q": 1, "k": 1, "v": 1}
    keys = {
        "lengths": list, "lengths_k": list, "heads": int, "heads_kv": int, "head_dim": int, "head_dim_v": int,
        "dtype": str, "causal": bool, "softmax_scale": float, "window": list,
    }  # fmt: skip
    omitted: ClassVar[Mapping[str, Any]] = {**KernelOperator.omitted, "window": (-1, -1)}
    required: ClassVar[Sequence[str]] = ("lengths", "heads", "head_dim", "dtype")
    same_as = {"heads_kv": "heads", "head_dim_v": "head_dim", "lengths_k": "lengths"}
    kernels = {
        "flash_attention_varlen": "auto",
        "varlen_triton": "forward_triton",
        "varlen_gluon_sm90": "forward_features_gluon_sm90",
    }
    public_module = flash_attention_varlen.__module__
    rooms = ("attention",)
    spill_bytes = AttentionOperator.spill_bytes
    framework = AttentionOperator.framework
    known_baselines = BASELINES
    planner = staticmethod(lambda problem, *more: plan_attention(problem.planned, *more))
    preparer = AttentionOperator.preparer
    fixed: ClassVar[Any] = FIXED  # the operator of one sequence
    passed: ClassVar[Sequence[str]] = ("q", "k", "v")  # tensors of a call
    instead = "varlen_triton"
    stress_draws = (*OF_VALUES, "strided", "odd_offset")  # expanded tokens would be one

    def make_problem(self, table: dict[str, Any]) -> VarlenProblem:
        """Return the problem of a case. Raises ``InputError`` where a length is no integer."""
        for key in ("lengths", "lengths_k"):
            if not all(type(length) is int for length in table[key]):
                raise InputError(f"{key} must be a list of integers, got {table[key]!r}")
        if "window" in table:
            table["window"] = check_window(table["window"])
        return make_problem(tuple(table.pop("lengths")), tuple(table.pop("lengths_k")), **table)

    def sizes(self, problem: VarlenProblem) -> AttentionProblem:
        """Return the problem that is planned."""
        return problem.planned

    def values(self, problem: VarlenProblem) -> dict[str, Any]:
        """Return the value of each key."""
        lengths = ("lengths", "lengths_k")
        return {key: getattr(problem if key in lengths else problem.planned, key) for key in self.keys}

    def work(self, problem: VarlenProblem) -> Work:
        """Count 4 D operations a visible score, and every input and output once."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        elements = (tokens_q * p.heads + tokens_k * p.heads_kv) * (p.head_dim + p.head_dim_v)
        return Work(problem.flops, float(elements * p.item_bytes + 8 * (p.batch + 1)), tokens_q)

    def shapes(self, problem: VarlenProblem) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs that are normal."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        q, k, v = (
            (tokens_q, p.heads, p.head_dim),
            (tokens_k, p.heads_kv, p.head_dim),
            (tokens_k, p.heads_kv, p.head_dim_v),
        )
        return {"q": q, "k": k, "v": v}

    def make_inputs(self, problem: VarlenProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, packed, and where sequences start."""
        generator = torch.Generator(device=device).manual_seed(seed)
        inputs = standard_normal(self.shapes(problem), DTYPES[problem.dtype], generator)
        for side, lengths in (("q", problem.lengths), ("k", problem.lengths_k)):
            starts = [0, *itertools.accumulate(lengths)]
            inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return self.completed(problem, inputs)

    def arguments(self, problem: VarlenProblem, inputs: Inputs) -> tuple[list[torch.Tensor | int], dict[str, Any]]:
        """Return tensors, where sequences start, the longest lengths, and options."""
        names = (*self.passed, "cu_seqlens_q", "cu_seqlens_k")
        return [*(inputs[name] for name in names), *problem.longest], options_of(problem)

    def exact(self, problem: VarlenProblem, inputs: Inputs) -> Any:
        """Return the answer in fp64."""
        return reference.attention_varlen(**inputs, **options_of(problem), dtype=torch.float64)[0]

    def low_precision(self, problem: VarlenProblem, inputs: Inputs) -> Any:
        """Return the framework's eager answer to each sequence in the problem's dtype."""

        def answer(one: Any, its: Inputs) -> list[tuple[torch.Tensor, ...]]:
            found = self.fixed.low_precision(one, its)
            return [(each,) for each in (found if isinstance(found, tuple) else (found,))]

        found = tuple(whole for (whole,) in self._joined(problem, inputs, inputs["q"].dtype, answer, (None,)))
        return found if len(found) > 1 else found[0]

    def error_scale(self, problem: VarlenProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element, sequence by sequence."""
        found = self._joined(problem, inputs, torch.float32, self.fixed.error_scale, (None, 1))
        return tuple(Scale(*each) for each in found)

    def _joined(
        self,
        problem: VarlenProblem,
        inputs: Inputs,
        dtype: torch.dtype,
        answer: Callable[[Any, Inputs], Sequence[Sequence[torch.Tensor]]],
        columns: Sequence[int | None],
    ) -> list[list[torch.Tensor]]:
        """Return for each output what ``answer`` gives of each sequence, packed; zeros where there is nothing to sum.

        ``columns``: of each tensor of an output; None: as many as the output has.
        """
        device, shapes = inputs["q"].device, self.answers(problem)
        wholes = [
            [torch.zeros(*shape[:2], last or shape[2], dtype=dtype, device=device) for last in columns]
            for shape in shapes
        ]
        ends_q, ends_k = (itertools.accumulate(lengths) for lengths in (problem.lengths, problem.lengths_k))
        for one, end_q, end_k in zip(problem.sequences(), ends_q, ends_k, strict=True):
            rows, keys = slice(end_q - one.seqlen_q, end_q), slice(end_k - one.seqlen_k, end_k)
            if not one.seqlen_q or not one.seqlen_k:
                continue
            places = {name: keys if name in "kv" else rows for name in ("q", "k", "v", "do") if name in inputs}
            its = {name: inputs[name][place].transpose(0, 1)[None] for name, place in places.items()}
            found = answer(self.of_sequence(one), its)
            for whole, part, place in zip(wholes, found, (rows, keys, keys), strict=False):
                for tensor, each in zip(whole, part, strict=True):
                    tensor[place] = each[0].transpose(0, 1)
        return wholes

    def answers(self, problem: VarlenProblem) -> list[tuple[int, ...]]:
        """Return the shape of each output."""
        q, _, v = self.shapes(problem).values()
        return [(*q[:2], v[2])]

    def of_sequence(self, sequence: AttentionProblem) -> Any:
        """Return the problem of one sequence, for ``fixed``."""
        return sequence

    def smaller(self, problem: VarlenProblem, device: str) -> VarlenProblem:
        """Return a problem of the first sequences, shorter ones, and of fewer heads."""
        p, (count, longest) = problem.planned, (3, 48) if device == "cpu" else (8, 2048)
        heads_kv, group = min(2, p.heads_kv), min(2, p.group) if device == "cpu" else p.group
        lengths, lengths_k = ([min(n, longest) for n in all_[:count]] for all_ in (problem.lengths, problem.lengths_k))
        sizes = {"lengths": lengths, "lengths_k": lengths_k, "heads": group * heads_kv, "heads_kv": heads_kv}
        found: VarlenProblem = self.changed(problem, **sizes)
        return found

    def change_values(self, draw: str, problem: VarlenProblem, inputs: Inputs) -> bool:
        """Change q, k and v."""
        starts = [0, *itertools.accumulate(problem.lengths_k)]
        if draw == "neighbours":
            for name, first, factor in (("q", problem.lengths[0], 4), ("k", starts[1], 4), ("v", starts[1], 64)):
                inputs[name][first:] *= factor
            return len(problem.lengths) > 1
        q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
        firsts = [first for first, length in zip(starts, problem.lengths_k, strict=False) if length]
        stress_attention(draw, q, k, v, problem.planned.scale, firsts)
        return True

    instruction = AttentionOperator.instruction

    def launches(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from ..attention.forward.variants_plan import FEATURES_KERNEL
        from ..attention.forward.variants_prepare import prepare_features

        plan = self.plan(subject, problem, gpu)
        if plan.kernel != FEATURES_KERNEL:
            return self.prepare(plan)
        return prepare_features(plan, problem.tokens)  # TMA's maps have all tokens

    def interpreter_steps(self, problem: VarlenProblem) -> int:
        """Count pairs of 16 queries and 32 keys."""
        tiles = sum(-(-q // 16) * -(-k // 32) for q, k in zip(problem.lengths, problem.lengths_k, strict=True))
        return tiles * problem.planned.heads


OPERATOR = VarlenOperator()
