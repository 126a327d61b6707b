"""Sparse MLA for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from ..attention.problem import canonical_strides
from ..attention.sparse import reference
from ..attention.sparse.api import sparse_mla
from ..attention.sparse.fp8_rows import pack_mla_rows
from ..attention.sparse.plan import HOPPER_SPARSE_KERNEL, SPARSE_KERNEL, SparsePlan, plan_sparse_mla
from ..attention.sparse.problem import FP8_COLUMNS, SparseProblem
from ..errors import InputError
from ..gpu.planning import Work
from .attention_scale import forward_scale
from .base import DTYPES, KernelOperator
from .baselines.attention_sparse import BASELINES, gathered_rows
from .baselines.base import Inputs
from .error_scale import Scale
from .stress import OF_VALUES, stress_attention

_QUERIES_OF_PART = 16  # that late answers are compared in
sparse_mla_triton = functools.partial(sparse_mla, kernel=SPARSE_KERNEL)
sparse_mla_gluon_sm90 = functools.partial(sparse_mla, kernel=HOPPER_SPARSE_KERNEL)


class SparseOperator(KernelOperator):
    """Attention of MLA to indexed rows, for the harness: each query has other indices, in random order.

    With a ``page_size`` pages lie in random order. The last ``padding`` indices of each query are -1. With ``fp8`` rows
    of the cache have 656 bytes.
    """

    name = "attention_sparse"
    fresh = ("q", "kv_cache")
    keys = {
        "batch": int, "heads": int, "seqlen_q": int, "seqlen_k": int, "top_k": int, "padding": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "softmax_scale": float, "page_size": int, "batch_invariant": bool, "fp8": bool,
    }  # fmt: skip
    required = ("batch", "heads", "seqlen_k", "top_k", "dtype")
    omitted = {"softmax_scale": None, "page_size": 0, "batch_invariant": False, "padding": 0, "fp8": False}
    kernels = {
        "sparse_mla": "auto", "sparse_mla_gluon_sm90": HOPPER_SPARSE_KERNEL, "sparse_mla_triton": SPARSE_KERNEL,
    }  # fmt: skip
    public_module = sparse_mla.__module__
    rooms = ("attention",)
    framework = ("*flash_fwd*", "*fmha*", "*cudnn*", "*softmax*")
    known_baselines = BASELINES
    preparer = "..attention.sparse.prepare:prepare_sparse_kernels"
    instead = SPARSE_KERNEL
    spill_bytes = {"_sparse_kernel": 256}  # of 64 heads on sm_90, by Triton 3.9: smaller tiles were slower
    stress_draws = (*OF_VALUES, "strided", "odd_offset")
    laid_out = ("q",)

    def make_problem(self, table: dict[str, Any]) -> Any:
        """Return the problem of a case. Raises ``InputError``."""
        full = {"seqlen_q": 1, "head_dim": 576, "head_dim_v": 512, **table}
        full["capacity"], padding = full.pop("seqlen_k"), full.pop("padding", 0)
        full["is_fp8"] = full.pop("fp8", False)
        page_size = full.get("page_size", 0)
        if page_size and full["capacity"] % page_size:
            raise InputError(f"seqlen_k must be a multiple of page_size = {page_size}, got {full['capacity']}")
        p = SparseProblem(**full)
        if not 0 <= padding <= p.top_k <= p.capacity:
            raise InputError(
                f"padding must be from 0 to top_k, and top_k at most seqlen_k, got {padding}, {p.top_k}, {p.capacity}"
            )
        shape = p.batch, p.heads, p.seqlen_q, p.head_dim
        return SparseCase(dataclasses.replace(p, q_strides=canonical_strides(shape, p.q_strides)), padding)

    def sizes(self, problem: Any) -> SparseProblem:
        """Return the problem that is planned."""
        planned: SparseProblem = problem.planned
        return planned

    def values(self, problem: Any) -> dict[str, Any]:
        """Return the value of each key."""
        names = {"seqlen_k": "capacity", "fp8": "is_fp8"}
        found = {key: getattr(problem.planned, names.get(key, key)) for key in self.keys if key != "padding"}
        return {**found, "padding": problem.padding}

    def work(self, problem: Any) -> Work:
        """Count the operations of all indices that are none, and every row, index and output once."""
        p = problem.planned
        share = 1 - problem.padding / p.top_k if p.top_k else 1.0
        queries = p.batch * p.seqlen_q
        rows = queries * p.heads * (p.head_dim + p.head_dim_v) * p.item_bytes
        kv_bytes = min(p.kv_bytes * share, float(p.batch * p.capacity * p.row_bytes))
        return Work(p.flops * share, kv_bytes + rows + 4.0 * queries * p.top_k, queries)

    def make_inputs(self, problem: Any, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q and cache, indices and pages in random order."""
        p, dtype = problem.planned, DTYPES[problem.planned.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)
        length = p.page_size or p.capacity
        options: dict[str, Any] = {"generator": generator, "device": device}
        inputs = {
            "q": torch.randn(p.batch, p.heads, p.seqlen_q, p.head_dim, dtype=dtype, **options),
            "kv_cache": torch.randn(p.pages, length, 1, p.head_dim, dtype=dtype, **options),
            "indices": torch.empty(p.batch, p.seqlen_q, p.top_k, dtype=torch.int32, device=device),
        }
        if p.is_fp8:
            inputs["kv_cache"] = pack_mla_rows(
                inputs["kv_cache"][..., :FP8_COLUMNS], inputs["kv_cache"][..., FP8_COLUMNS:]
            )
        for b in range(p.batch):
            for token in range(p.seqlen_q):
                inputs["indices"][b, token] = torch.randperm(p.capacity, **options)[: p.top_k]
        if problem.padding:
            inputs["indices"][..., p.top_k - problem.padding :] = -1
        if p.page_size:
            inputs["page_table"] = torch.randperm(p.pages, dtype=torch.int32, **options).reshape(p.batch, -1)
        return inputs

    def refresh(self, problem: Any, inputs: Inputs, *, seed: int) -> None:
        """Write new values; rows in fp8 are drawn in the dtype of q."""
        if not problem.planned.is_fp8:
            super().refresh(problem, inputs, seed=seed)
            return
        drawn = self.make_inputs(problem, seed=seed, device=str(inputs["q"].device))
        for name in self.fresh:
            inputs[name].copy_(drawn[name])

    def arguments(self, problem: Any, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q, cache and indices, and options."""
        p = problem.planned
        options: dict[str, Any] = {"head_dim_v": p.head_dim_v, "softmax_scale": p.softmax_scale}
        options |= {"page_table": inputs["page_table"]} if p.page_size else {}
        options |= {"batch_invariant": True} if p.batch_invariant else {}
        return [inputs["q"], inputs["kv_cache"], inputs["indices"]], options

    def exact(self, problem: Any, inputs: Inputs) -> torch.Tensor:
        """Return the answer in fp64."""
        return reference.sparse_attention(problem.planned, inputs, dtype=torch.float64)[0]

    def low_precision(self, problem: Any, inputs: Inputs) -> torch.Tensor:
        """Return the answer with every step rounded to the problem's dtype."""
        return reference.sparse_attention(problem.planned, inputs, dtype=DTYPES[problem.planned.dtype])[0]

    def error_scale(self, problem: Any, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o: each query is a sequence with keys of its own."""
        p = problem.planned
        q = inputs["q"].transpose(1, 2).reshape(-1, p.heads, 1, p.head_dim)
        rows, is_there = gathered_rows(p, inputs)
        k, shown = rows.flatten(0, 1)[:, None], is_there.flatten(0, 1)[:, None, None]
        found = forward_scale(q, k, k[..., : p.head_dim_v], causal=False, softmax_scale=p.softmax_scale, mask=shown)

        def restored(x: torch.Tensor) -> torch.Tensor:
            return x.view(p.batch, p.seqlen_q, p.heads, -1).transpose(1, 2)

        return (Scale(*map(restored, found)),)

    def sample(
        self, problem: Any, inputs: Inputs, *, seed: int
    ) -> tuple[Any, Inputs, Callable[[torch.Tensor], torch.Tensor], int] | None:
        """Return some queries in a row of one sequence, drawn by ``seed``, with all of their heads.

        Returns:
            Their problem, views of its inputs, what picks their part of an output, and the number of such parts.
            None: there is one.
        """
        p = problem.planned
        count = min(_QUERIES_OF_PART, p.seqlen_q)
        parts = p.batch * -(-p.seqlen_q // max(1, count))
        if parts < 2:
            return None
        drawn = random.Random(seed)
        b, first = drawn.randrange(p.batch), drawn.randrange(p.seqlen_q - count + 1)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[b : b + 1, :, first : first + count]

        its = {**inputs, "q": pick(inputs["q"]), "indices": inputs["indices"][b : b + 1, first : first + count]}
        of_sequence = "page_table" if p.page_size else "kv_cache"  # in pages, all sequences have one cache
        its[of_sequence] = inputs[of_sequence][b : b + 1]
        return self.changed(problem, batch=1, seqlen_q=count), its, pick, parts

    def smaller(self, problem: Any, device: str) -> Any:
        """Return a problem of fewer sequences, queries and heads, on a CPU with fewer indices."""
        p = problem.planned
        top_k, length = p.top_k, p.capacity
        if device == "cpu":
            top_k, length = min(48, top_k), min(length, 64 // (p.page_size or 1) * (p.page_size or 1) or p.page_size)
        sizes = {
            "batch": min(2, p.batch), "heads": min(32, p.heads), "seqlen_q": min(4, p.seqlen_q), "top_k": top_k,
            "seqlen_k": length, "padding": min(problem.padding, top_k // 2),
        }  # fmt: skip
        return self.changed(problem, **sizes)

    def change_values(self, draw: str, problem: Any, inputs: Inputs) -> bool:
        """Change q and the cache; each page begins with a sink."""
        if draw == "neighbours":
            inputs["q"][1:] *= 16
            return bool(problem.planned.batch > 1)
        if problem.planned.is_fp8:
            return False
        stress_attention(draw, inputs["q"], inputs["kv_cache"].transpose(1, 2), None, problem.planned.scale, [0])
        return True

    def plan(self, subject: str, problem: Any, gpu: Any) -> SparsePlan:
        """Return the plan of a call. Raises ``UnsupportedError``."""
        return plan_sparse_mla(problem.planned, gpu, self.kernels[subject])

    def instruction(self, plan: SparsePlan, kernel: str) -> str:  # noqa: ARG002 - the protocol's signature
        """Return the machine instruction that a kernel promises, as a pattern, or an empty text."""
        return {"_sparse_kernel": "*MMA*", "_sparse_sm90_kernel": "*GMMA*"}.get(kernel, "")

    def interpreter_steps(self, problem: Any) -> int:
        """Count tiles of 16 indices of 16 heads."""
        p = problem.planned
        return int(p.batch * p.seqlen_q * -(-p.heads // 16) * -(-p.top_k // 16))


@dataclasses.dataclass(frozen=True)
class SparseCase:
    """A call, and how many indices of each query are none."""

    planned: SparseProblem
    padding: int = 0

    def describe(self) -> str:
        """Return a short name, e.g. ``b8_h16_s1_32768_top2048_d576_512_bf16_page64``."""
        return self.planned.describe() + (f"_padding{self.padding}" if self.padding else "")


OPERATOR = SparseOperator()
