"""Attention of a mixed batch over pages for the harness: prompts, chunks and single tokens in one call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...attention.mixed.plan import MIXED_KERNEL, mixed_launches
from ...attention.tiles import MixedConfig, Plan
from ...attention.varlen import flash_attention_varlen
from ...errors import InputError
from ...gpu.planning import PlannedLaunch, Work
from ...gpu.specs import GpuSpec, find_gpu
from ..attention_varlen import VarlenOperator
from ..baselines.attention_mixed import BASELINES, keys_in_a_row, pages_of
from ..baselines.base import Inputs
from ..error_scale import Scale
from ..stress import stress_attention
from .problem import VarlenProblem

if TYPE_CHECKING:
    from ...gpu.identity import PlannedSource

flash_attention_paged = functools.partial(flash_attention_varlen, kernel="auto")
paged_mixed_triton = functools.partial(flash_attention_varlen, kernel=MIXED_KERNEL)
paged_forward_triton = functools.partial(flash_attention_varlen, kernel="forward_triton")


_MULTIPLYING = ("_mixed_kernel", "_forward_kernel")


class MixedOperator(VarlenOperator):
    """Attention of packed queries over keys in pages, for the harness. Pages lie in random order."""

    name = "attention_mixed"
    fresh = ("q", "k", "v")
    heads_along = {"q": 1, "k": 2, "v": 2}
    keys = {
        **{key: kind for key, kind in VarlenOperator.keys.items() if key != "window"},
        "page_size": int, "batch_invariant": bool,
    }  # fmt: skip
    required: ClassVar[Sequence[str]] = ("lengths", "heads", "head_dim", "dtype", "page_size")
    omitted = {**VarlenOperator.omitted, "batch_invariant": False}
    kernels = {
        "flash_attention_paged": "auto",
        "paged_mixed_triton": MIXED_KERNEL,
        "paged_forward_triton": "forward_triton",
    }
    public_module = ""
    known_baselines = BASELINES
    instead = "paged_mixed_triton"

    def make_problem(self, table: dict[str, Any]) -> VarlenProblem:
        """Return the problem of a case. Raises ``InputError`` where pages have no size."""
        page_size, lengths_k = table["page_size"], table["lengths_k"]
        if page_size < 1:
            raise InputError(f"page_size must be 1 or more, got {page_size}")
        longest = max((length for length in lengths_k if type(length) is int), default=0)
        several = len(lengths_k) > 1
        columns = -(-longest // page_size)
        return super().make_problem({**table, "table_stride": columns if several else 0})

    def work(self, problem: VarlenProblem) -> Work:
        """Count 4 D operations a visible score, and every input and output once."""
        found = super().work(problem)
        return dataclasses.replace(found, bytes=found.bytes + 4.0 * sum(pages_of(problem)))

    def shapes(self, problem: VarlenProblem) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the queries and of the caches."""
        p = problem.planned
        cache = (sum(pages_of(problem)), p.page_size, p.heads_kv)
        q = (problem.tokens[0], p.heads, p.head_dim)
        return {"q": q, "k": (*cache, p.head_dim), "v": (*cache, p.head_dim_v)}

    def answers(self, problem: VarlenProblem) -> list[tuple[int, ...]]:
        """Return the shape of the output."""
        return [(problem.tokens[0], problem.planned.heads, problem.planned.head_dim_v)]

    def make_inputs(self, problem: VarlenProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal queries and caches, lengths, and pages in random order."""
        inputs = super().make_inputs(problem, seed=seed, device=device)
        counts = pages_of(problem)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        first = 0
        for row, count in zip(table, counts, strict=True):
            row[:count] = order[first : first + count]
            first += count
        return {**inputs, "page_table": table.to(device)}

    def arguments(self, problem: VarlenProblem, inputs: Inputs) -> tuple[list[torch.Tensor | int], dict[str, Any]]:
        """Return tensors, lengths, the page table, and options."""
        positional, options = super().arguments(problem, inputs)
        options["page_table"] = inputs["page_table"]
        if problem.planned.batch_invariant:
            options["batch_invariant"] = True
        return positional, options

    def low_precision(self, problem: VarlenProblem, inputs: Inputs) -> Any:
        """Return the framework's eager answer to each sequence in the problem's dtype."""
        return super().low_precision(problem, keys_in_a_row(problem, inputs))

    def error_scale(self, problem: VarlenProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element, sequence by sequence."""
        return super().error_scale(problem, keys_in_a_row(problem, inputs))

    def change_values(self, draw: str, problem: VarlenProblem, inputs: Inputs) -> bool:
        """Change q and the caches; each page begins with a sink."""
        if draw == "neighbours":
            count = pages_of(problem)[0]
            others = torch.ones(inputs["k"].shape[0], dtype=torch.bool, device=inputs["k"].device)
            others[inputs["page_table"][0, :count].long()] = False
            inputs["q"][problem.lengths[0] :] *= 4
            inputs["k"][others] *= 4
            inputs["v"][others] *= 64
            return len(problem.lengths) > 1
        k, v = (inputs[name].transpose(1, 2) for name in "kv")
        stress_attention(draw, inputs["q"].transpose(0, 1), k, v, problem.planned.scale, [0])
        return True

    def plan(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Plan:
        """Return the plan of a call with as many queries as it has. Raises ``UnsupportedError``."""
        plan: Plan = super().plan(subject, problem, gpu)
        if not isinstance(plan.config, MixedConfig):
            return plan
        launches = mixed_launches(plan.problem, plan.config, gpu.sms, problem.tokens[0])
        return dataclasses.replace(plan, launches=launches)

    def prepare(self, plan: Plan) -> Sequence[PlannedSource]:
        """Return the kernels of a plan, of as many queries as the maxima allow."""
        if not isinstance(plan.config, MixedConfig):
            return super().prepare(plan)
        from ...attention.mixed.prepare import prepare_mixed

        return prepare_mixed(plan, find_gpu(plan.gpu).sms, plan.problem.batch * plan.problem.seqlen_q)

    def launches(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from ...attention.mixed.prepare import prepare_mixed

        plan = self.plan(subject, problem, gpu)
        if not isinstance(plan.config, MixedConfig):
            return self.prepare(plan)
        return prepare_mixed(plan, gpu.sms, problem.tokens[0])

    def _compiled(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Iterator[tuple[PlannedLaunch, str, Any]]:
        """Yield each launch of the plan, its kernel's name, and the kernel as Triton compiled it."""
        from ...gpu.compile import compile_kernel

        plan = self.plan(subject, problem, gpu)
        for launch, kernel in zip(plan.launches, self.launches(subject, problem, gpu), strict=True):
            yield launch, kernel.source.name, compile_kernel(kernel.source, gpu.arch)

    def instruction(self, plan: Any, kernel: str) -> str:
        """Return the matrix instruction that a kernel promises, as a pattern, or an empty text."""
        return "*MMA*" if plan.problem.item_bytes == 2 and kernel in _MULTIPLYING else ""


OPERATOR = MixedOperator()
