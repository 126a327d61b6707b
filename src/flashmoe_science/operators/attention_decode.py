"""Attention with a K/V cache for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..attention.decode import reference as cache_reference
from ..attention.decode.api import flash_attention_with_kv_cache
from ..attention.decode.plan import DecodePlan, plan_with_kv_cache
from ..attention.decode.problem import CacheProblem
from ..attention.problem import canonical_strides
from ..errors import InputError
from ..gpu.planning import Work
from .attention_scale import forward_scale
from .base import DTYPES, KernelOperator
from .baselines.attention_decode import BASELINES, values_of
from .baselines.base import Inputs
from .error_scale import Scale
from .stress import OF_VALUES, stress_attention

decode_gluon_sm90 = functools.partial(flash_attention_with_kv_cache, kernel="decode_gluon_sm90")
decode_triton = functools.partial(flash_attention_with_kv_cache, kernel="decode_triton")


class DecodeOperator(KernelOperator):
    """Attention with a K/V cache, for the harness.

    Every sequence of a case fills its cache. With a ``page_size`` pages lie in random order and lengths on the device;
    without, no lengths are given.
    """

    name = "attention_cache"
    fresh = ("q", "k_cache", "v_cache")
    keys = {
        "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "causal": bool, "softmax_scale": float, "page_size": int,
        "batch_invariant": bool, "shared_kv": bool,
    }  # fmt: skip
    required = ("batch", "heads", "seqlen_k", "head_dim", "dtype")
    same_as = {"heads_kv": "heads", "head_dim_v": "head_dim"}
    kernels = {
        "flash_attention_with_kv_cache": "auto",
        "decode_gluon_sm90": "decode_gluon_sm90",
        "decode_triton": "decode_triton",
    }
    public_module = flash_attention_with_kv_cache.__module__
    rooms = ("attention",)
    framework = ("*flash_fwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
    known_baselines = BASELINES
    planner = staticmethod(plan_with_kv_cache)
    preparer = "flashmoe_science.attention.decode.prepare:prepare_cache_kernels"
    instead = "decode_triton"
    stress_draws = (*OF_VALUES, "strided", "odd_offset")
    laid_out = ("q",)  # a cache is allocated once, by whom it serves

    def make_problem(self, table: dict[str, Any]) -> CacheProblem:
        """Return the problem of a case. Raises ``InputError`` where pages do not fill the cache."""
        full = {"seqlen_q": 1, **table}
        full["capacity"] = full.pop("seqlen_k")
        page_size = full.get("page_size", 0)
        if page_size and full["capacity"] % page_size:
            raise InputError(f"seqlen_k must be a multiple of page_size = {page_size}, got {full['capacity']}")
        p = CacheProblem(**full, has_seqlens=page_size > 0)
        pages = (p.pages, p.page_size or p.capacity, p.heads_kv)
        # As a call describes it: an axis of one element has stride 0.
        return dataclasses.replace(
            p,
            q_strides=canonical_strides((p.batch, p.heads, p.seqlen_q, p.head_dim), p.q_strides),
            k_strides=canonical_strides((*pages, p.head_dim), p.k_strides),
            v_strides=canonical_strides((*pages, p.head_dim_v), p.v_strides),
        )

    def values(self, problem: CacheProblem) -> dict[str, Any]:
        """Return the value of each key."""
        return {key: getattr(problem, "capacity" if key == "seqlen_k" else key) for key in self.keys}

    def work(self, problem: CacheProblem) -> Work:
        """Count 4 D operations a visible score, and every input that is read, and the output, once."""
        p = problem
        rows = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v) * p.item_bytes
        pages = 4.0 * p.batch * (-(-p.capacity // p.page_size) + 1) if p.page_size else 0.0
        return Work(p.flops, p.kv_bytes + rows + pages, p.batch * p.seqlen_q)

    def make_inputs(self, problem: CacheProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q and caches, pages in random order, and lengths."""
        p, dtype = problem, DTYPES[problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        inputs = {
            "q": normal(p.batch, p.heads, p.seqlen_q, p.head_dim),
            "k_cache": normal(p.pages, p.page_size or p.capacity, p.heads_kv, p.head_dim),
        }
        if not p.shared_kv:
            inputs["v_cache"] = normal(p.pages, p.page_size or p.capacity, p.heads_kv, p.head_dim_v)
        if p.page_size:
            order = torch.randperm(p.pages, generator=generator, device=device, dtype=torch.int32)
            inputs["page_table"] = order.reshape(p.batch, -1)
            inputs["cache_seqlens"] = torch.full((p.batch,), p.capacity, dtype=torch.int32, device=device)
        return inputs

    def arguments(self, problem: CacheProblem, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q and the caches, and options."""
        options: dict[str, Any] = {name: inputs[name] for name in ("page_table", "cache_seqlens") if name in inputs}
        options.update(causal=problem.causal, softmax_scale=problem.softmax_scale)
        if problem.batch_invariant:
            options["batch_invariant"] = True
        return [inputs["q"], inputs["k_cache"], values_of(problem, inputs)], options

    def exact(self, problem: CacheProblem, inputs: Inputs) -> torch.Tensor:
        """Return the answer in fp64."""
        return self._reference(problem, inputs, torch.float64)

    def low_precision(self, problem: CacheProblem, inputs: Inputs) -> torch.Tensor:
        """Return the answer with every step rounded to the problem's dtype."""
        return self._reference(problem, inputs, DTYPES[problem.dtype])

    @staticmethod
    def _reference(problem: CacheProblem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
        tensors = {**inputs, "v_cache": values_of(problem, inputs)}
        return cache_reference.attention_with_kv_cache(problem, tensors, dtype=dtype)[0]

    def error_scale(self, problem: CacheProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o."""
        caches = [inputs["k_cache"], values_of(problem, inputs)]
        if problem.page_size:
            pages = inputs["page_table"].long()
            caches = [cache[pages].flatten(1, 2) for cache in caches]
        k, v = (cache.transpose(1, 2) for cache in caches)
        options = {"causal": problem.causal, "softmax_scale": problem.softmax_scale}
        return (forward_scale(inputs["q"], k, v, **options),)

    def smaller(self, problem: CacheProblem, device: str) -> CacheProblem:
        """Return a problem of fewer sequences and heads, on a CPU with a shorter cache."""
        p = problem
        batch, heads_kv = min(2, p.batch), min(2, p.heads_kv)
        unit = p.page_size or 1
        length = min(p.capacity, max(unit, 64 // unit * unit)) if device == "cpu" else p.capacity
        sizes = {"batch": batch, "heads": p.group * heads_kv, "heads_kv": heads_kv, "seqlen_k": length}
        found: CacheProblem = self.changed(p, **sizes)
        return found

    def change_values(self, draw: str, problem: CacheProblem, inputs: Inputs) -> bool:
        """Change q and the caches; each page begins with a sink."""
        if draw == "neighbours":
            inputs["q"][1:] *= 16
            return problem.batch > 1
        k = inputs["k_cache"].transpose(1, 2)
        v = inputs["v_cache"].transpose(1, 2) if "v_cache" in inputs else None
        stress_attention(draw, inputs["q"], k, v, problem.scale, [0])
        return True

    def instruction(self, plan: DecodePlan, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
        if kernel == "_decode_sm90_kernel":
            return "*GMMA*"
        return "*MMA*" if plan.problem.item_bytes == 2 and kernel == "_decode_kernel" else ""

    def interpreter_steps(self, problem: CacheProblem) -> int:
        """Count tiles of 16 keys."""
        return problem.batch * problem.heads_kv * -(-problem.seen_keys // 16)


OPERATOR = DecodeOperator()
