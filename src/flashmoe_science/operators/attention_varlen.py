"""Attention of packed sequences for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..attention import reference
from ..attention.forward.plan import plan_attention
from ..attention.problem import AttentionProblem
from ..attention.tiles import Plan
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from .attention import AttentionOperator
from .attention_scale import forward_scale
from .attention_varlen_problem import VarlenProblem, make_problem
from .base import DTYPES, KernelOperator, standard_normal
from .baselines.attention_varlen import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale
from .stress import OF_VALUES, stress_attention

if TYPE_CHECKING:
    from ..gpu.identity import PlannedSource

varlen_triton = functools.partial(flash_attention_varlen, kernel="forward_triton")
varlen_gluon_sm90 = functools.partial(flash_attention_varlen, kernel="forward_features_gluon_sm90")


class VarlenOperator(KernelOperator):
    """Attention of packed sequences, for the harness."""

    name = "attention_varlen"
    fresh: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    keys = {
        "lengths": list, "lengths_k": list, "heads": int, "heads_kv": int, "head_dim": int, "head_dim_v": int,
        "dtype": str, "causal": bool, "softmax_scale": float,
    }  # fmt: skip
    required = ("lengths", "heads", "head_dim", "dtype")
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
    instead = "varlen_triton"
    stress_draws = (*OF_VALUES, "strided", "odd_offset")  # expanded tokens would be one

    def make_problem(self, table: dict[str, Any]) -> VarlenProblem:
        """Return the problem of a case. Raises ``InputError`` where a length is no integer."""
        for key in ("lengths", "lengths_k"):
            if not all(type(length) is int for length in table[key]):
                raise InputError(f"{key} must be a list of integers, got {table[key]!r}")
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

    def make_inputs(self, problem: VarlenProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, packed, and where sequences start."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        shapes = {
            "q": (tokens_q, p.heads, p.head_dim),
            "k": (tokens_k, p.heads_kv, p.head_dim),
            "v": (tokens_k, p.heads_kv, p.head_dim_v),
        }
        inputs = standard_normal(shapes, DTYPES[p.dtype], torch.Generator(device=device).manual_seed(seed))
        for side, lengths in (("q", problem.lengths), ("k", problem.lengths_k)):
            starts = [0, *itertools.accumulate(lengths)]
            inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return inputs

    def arguments(self, problem: VarlenProblem, inputs: Inputs) -> tuple[list[torch.Tensor | int], dict[str, Any]]:
        """Return q, k and v, where sequences start, the longest lengths, and options."""
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        options = {"causal": problem.planned.causal, "softmax_scale": problem.planned.softmax_scale}
        return [*(inputs[name] for name in names), *problem.longest], options

    def exact(self, problem: VarlenProblem, inputs: Inputs) -> torch.Tensor:
        """Return the answer in fp64."""
        return reference.attention_varlen(
            **inputs, causal=problem.planned.causal, softmax_scale=problem.planned.softmax_scale, dtype=torch.float64
        )[0]

    def low_precision(self, problem: VarlenProblem, inputs: Inputs) -> torch.Tensor:
        """Return the framework's eager answer in the problem's dtype, by heads: all scores at once may not fit."""
        p = problem.planned
        o = torch.zeros(*inputs["q"].shape[:2], p.head_dim_v, dtype=inputs["q"].dtype, device=inputs["q"].device)
        ends_q, ends_k = (itertools.accumulate(lengths) for lengths in (problem.lengths, problem.lengths_k))
        for sequence, end_q, end_k in zip(problem.sequences(), ends_q, ends_k, strict=True):
            rows, keys = slice(end_q - sequence.seqlen_q, end_q), slice(end_k - sequence.seqlen_k, end_k)
            if not sequence.seqlen_q or not sequence.seqlen_k:
                continue
            at_once = reference.heads_at_once(p.heads_kv, p.group * sequence.seqlen_q * sequence.seqlen_k)
            for h in range(0, p.heads_kv, at_once):
                mine, its = slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
                parts = (inputs["q"][rows, mine], inputs["k"][keys, its], inputs["v"][keys, its])
                q, k, v = (part.transpose(0, 1)[None] for part in parts)
                low = reference.attention_low_precision(q, k, v, causal=p.causal, softmax_scale=p.softmax_scale)
                o[rows, mine] = low[0].transpose(0, 1)
        return o

    def error_scale(self, problem: VarlenProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o, sequence by sequence."""
        p, q = problem.planned, inputs["q"]
        largest = torch.zeros(*q.shape[:2], p.head_dim_v, device=q.device)
        rms = torch.zeros(*q.shape[:2], 1, device=q.device)
        ends_q, ends_k = (itertools.accumulate(lengths) for lengths in (problem.lengths, problem.lengths_k))
        for sequence, end_q, end_k in zip(problem.sequences(), ends_q, ends_k, strict=True):
            rows, keys = slice(end_q - sequence.seqlen_q, end_q), slice(end_k - sequence.seqlen_k, end_k)
            parts = (inputs["q"][rows], inputs["k"][keys], inputs["v"][keys])
            batched = (part.transpose(0, 1)[None] for part in parts)
            found = forward_scale(*batched, causal=p.causal, softmax_scale=p.softmax_scale)
            largest[rows], rms[rows] = (each[0].transpose(0, 1) for each in found)
        return (Scale(largest, rms),)

    def smaller(self, problem: VarlenProblem, device: str) -> VarlenProblem:
        """Return a problem of the first sequences, shorter ones, and of fewer heads."""
        p, (count, longest) = problem.planned, (3, 48) if device == "cpu" else (8, 2048)
        heads_kv, group = min(2, p.heads_kv), min(2, p.group) if device == "cpu" else p.group
        lengths, lengths_k = ([min(n, longest) for n in all_[:count]] for all_ in (problem.lengths, problem.lengths_k))
        sizes = {"lengths": lengths, "lengths_k": lengths_k, "heads": group * heads_kv, "heads_kv": heads_kv}
        found: VarlenProblem = self.parse_case({**self.as_table(problem), **sizes})
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

    def plan(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Plan:
        """Return the plan of a call. Raises ``UnsupportedError``."""
        return plan_attention(problem.planned, gpu, self.kernels[subject])

    def prepare(self, plan: Plan) -> Sequence[PlannedSource]:
        """Return the kernels of a plan."""
        from ..attention.forward.prepare import prepare_kernels

        return prepare_kernels(plan)

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
