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
from .baselines.attention_decode import BASELINES, in_dtype_of_q, values_of
from .baselines.base import Inputs
from .error_scale import Scale
from .stress import OF_VALUES, stress_attention

decode_gluon_sm90 = functools.partial(flash_attention_with_kv_cache, kernel="decode_gluon_sm90")
decode_triton = functools.partial(flash_attention_with_kv_cache, kernel="decode_triton")

_FP8 = ("", "all", "token")
_LARGEST = 80.0  # of a normal value: five times as much is still a number of e4m3


def _with_scales(problem: CacheProblem, fp8: str) -> CacheProblem:
    """Return the problem with fp8 caches whose scales are contiguous."""
    if not fp8:
        return problem
    rows, heads = problem.page_size or problem.capacity, problem.heads_kv
    sizes, dense = (problem.pages, rows, heads), (rows * heads, heads, 1)
    own = tuple(stride if n > 1 else 0 for n, stride in zip(sizes, dense, strict=True))
    strides, by_token = (own, True) if fp8 == "token" else ((0, 0, 0), False)
    found = dataclasses.replace(problem, is_fp8=True, k_scale_strides=strides, k_by_token=by_token)
    if problem.shared_kv:
        return found
    return dataclasses.replace(found, v_scale_strides=strides, v_by_token=by_token)


def _sides(problem: CacheProblem) -> str:
    """Return whose scales there are: "kv", "k" where the values are columns of the keys, or none."""
    return ("k" if problem.shared_kv else "kv") if problem.is_fp8 else ""


def _as_fp8(cache: torch.Tensor) -> torch.Tensor:
    return (cache.float() * _LARGEST).clamp_(-448, 448).to(torch.float8_e4m3fn)


class DecodeOperator(KernelOperator):
    """Attention with a K/V cache, for the harness.

    Every sequence of a case fills its cache. With a ``page_size`` pages lie in random order and lengths on the device;
    without, no lengths are given. With ``fp8`` caches are e4m3: "all" have one scale, or each "token" and head has one.
    """

    name = "attention_cache"
    fresh = ("q", "k_cache", "v_cache")
    keys = {
        "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "causal": bool, "softmax_scale": float, "page_size": int,
        "batch_invariant": bool, "shared_kv": bool, "fp8": str,
    }  # fmt: skip
    required = ("batch", "heads", "seqlen_k", "head_dim", "dtype")
    omitted = {"softmax_scale": None, "fp8": ""}
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
    preparer = "..attention.decode.prepare:prepare_cache_kernels"
    instead = "decode_triton"
    spill_bytes = {"_decode_kernel": 16}  # of MLA over fp8 caches with a scale a token on sm_90, by Triton 3.6
    stress_draws = (*OF_VALUES, "short_caches", "strided", "odd_offset")
    laid_out = ("q",)  # a cache is allocated once, by whom it serves

    def make_problem(self, table: dict[str, Any]) -> CacheProblem:
        """Return the problem of a case. Raises ``InputError`` where pages do not fill the cache."""
        full = {"seqlen_q": 1, **table}
        full["capacity"] = full.pop("seqlen_k")
        page_size = full.get("page_size", 0)
        if page_size and full["capacity"] % page_size:
            raise InputError(f"seqlen_k must be a multiple of page_size = {page_size}, got {full['capacity']}")
        fp8 = full.pop("fp8", "")
        if fp8 not in _FP8:
            raise InputError(f"fp8 must be one of {', '.join(map(repr, _FP8))}, got {fp8!r}")
        p = CacheProblem(**full, has_seqlens=page_size > 0)
        p = _with_scales(p, fp8)
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
        names = {"seqlen_k": "capacity"}
        found = {key: getattr(problem, names.get(key, key)) for key in self.keys if key != "fp8"}
        return {**found, "fp8": ("token" if problem.k_by_token else "all") if problem.is_fp8 else ""}

    def work(self, problem: CacheProblem) -> Work:
        """Count 4 D operations a visible score, and every input that is read, and the output, once."""
        p = problem
        rows = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v) * p.item_bytes
        pages = 4.0 * p.batch * (-(-p.capacity // p.page_size) + 1) if p.page_size else 0.0
        scales = 4.0 * p.batch * p.seen_keys * p.heads_kv * (p.k_by_token + p.v_by_token)
        return Work(p.flops, p.kv_bytes + rows + pages + scales, p.batch * p.seqlen_q)

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
        for side in _sides(p):
            shape = inputs[f"{side}_cache"].shape[:3] if p.k_by_token else ()
            scale = (0.5 + torch.rand(shape, generator=generator, device=device)) / _LARGEST
            inputs[f"{side}_scale"] = scale
            inputs[f"{side}_cache"] = _as_fp8(inputs[f"{side}_cache"])
        if p.page_size:
            order = torch.randperm(p.pages, generator=generator, device=device, dtype=torch.int32)
            inputs["page_table"] = order.reshape(p.batch, -1)
            inputs["cache_seqlens"] = torch.full((p.batch,), p.capacity, dtype=torch.int32, device=device)
        return inputs

    def refresh(self, problem: CacheProblem, inputs: Inputs, *, seed: int) -> None:
        """Write new values; those of fp8 caches are drawn in the dtype of q. Scales stay."""
        if not problem.is_fp8:
            super().refresh(problem, inputs, seed=seed)
            return
        drawn = self.make_inputs(problem, seed=seed, device=str(inputs["q"].device))
        for name in self.fresh:
            if name in inputs:
                inputs[name].copy_(drawn[name])

    def arguments(self, problem: CacheProblem, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q and the caches, and options."""
        options: dict[str, Any] = {name: inputs[name] for name in ("page_table", "cache_seqlens") if name in inputs}
        options.update(causal=problem.causal, softmax_scale=problem.softmax_scale)
        options |= {name: inputs[name] for name in ("k_scale", "v_scale") if name in inputs}
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
        inputs = in_dtype_of_q(problem, inputs)
        caches = [inputs["k_cache"], values_of(problem, inputs)]
        if problem.page_size:
            pages = inputs["page_table"].long()
            caches = [cache[pages].flatten(1, 2) for cache in caches]
        k, v = (cache.transpose(1, 2) for cache in caches)
        options: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.softmax_scale}
        if "cache_seqlens" in inputs:
            rows, keys = (torch.arange(size, device=k.device) for size in (problem.seqlen_q, k.shape[2]))
            ends = inputs["cache_seqlens"][:, None, None, None]
            last = ends - problem.seqlen_q + rows[:, None] if problem.causal else ends - 1
            options |= {"mask": (keys <= last).expand(-1, -1, problem.seqlen_q, -1), "causal": False}
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
        if draw == "short_caches":  # each sequence has another length, and pages that it does not use
            if (lengths := inputs.get("cache_seqlens")) is None:
                return False
            parts = torch.arange(1, problem.batch + 1, device=lengths.device) * problem.capacity // (problem.batch + 1)
            lengths.copy_((parts - 3).clamp_min(problem.seqlen_q))
            return True
        if problem.is_fp8:
            return False
        if draw == "neighbours":
            inputs["q"][1:] *= 16
            return problem.batch > 1
        k = inputs["k_cache"].transpose(1, 2)
        v = inputs["v_cache"].transpose(1, 2) if "v_cache" in inputs else None
        stress_attention(draw, inputs["q"], k, v, problem.scale, [0])
        return True

    def instruction(self, plan: DecodePlan, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
        if kernel in ("_decode_sm90_kernel", "_few_rows_sm90_kernel", "_few_rows_fp8_sm90_kernel"):
            return "*GMMA*"
        return "*MMA*" if plan.problem.item_bytes == 2 and kernel == "_decode_kernel" else ""

    def interpreter_steps(self, problem: CacheProblem) -> int:
        """Count tiles of 16 keys."""
        return problem.batch * problem.heads_kv * -(-problem.seen_keys // 16)


OPERATOR = DecodeOperator()
