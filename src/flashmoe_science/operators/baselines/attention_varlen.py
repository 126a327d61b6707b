"""The baselines of our attention of packed sequences: how each is called, and the kernels that show it ran."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from ..packed.problem import VarlenProblem
from .base import (
    FA2,
    FA3,
    FA4,
    ONLY_16_BIT,
    TOP_LEFT,
    Baseline,
    Bound,
    Call,
    FlashAttentionBaseline,
    Inputs,
    SdpaBaseline,
    by_name,
    contiguous_copy,
    fa3_packed,
    first_tensor,
)


def refuse_window(problem: VarlenProblem) -> str | None:
    """Return why a baseline that is called without windows cannot serve ``problem``, or None."""
    return "it is not called with a sliding window" if problem.planned.window != (-1, -1) else None


class TorchVarlen(Baseline):
    """``torch.nn.attention.varlen.varlen_attn``, FlashAttention-2 by default."""

    name = "torch-varlen"

    def load(self) -> Callable[..., Any]:
        """Return it with the options of this version of torch."""
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(function).parameters

        def bind(problem: VarlenProblem, inputs: Inputs) -> Call:
            p = problem.planned
            options: dict[str, Any] = {"window_size": (-1, 0 if p.causal else -1)}
            if "is_causal" in known:
                options = {"is_causal": p.causal}
            if p.softmax_scale is not None:
                options["scale"] = p.softmax_scale
            if p.group > 1 and "enable_gqa" in known:
                options["enable_gqa"] = True
            starts = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
            return functools.partial(
                function, inputs["q"], inputs["k"], inputs["v"], *starts, *problem.longest, **options
            )

        return Bound(bind)

    def refusal(self, problem: VarlenProblem) -> str | None:
        """It serves 16-bit types."""
        return refuse_window(problem) or (ONLY_16_BIT if problem.dtype == "fp32" else None)


class Sdpa(SdpaBaseline):
    """``torch.nn.functional.scaled_dot_product_attention`` for one sequence after another."""

    def bind(self, problem: VarlenProblem, inputs: Inputs) -> Call:
        """Return a function that calls SDPA for every sequence."""
        p = problem.planned
        parts: list[Any] = [
            tuple(contiguous_copy(part.transpose(0, 1)[None]) for part in sequence)
            for sequence in zip(
                inputs["q"].split(problem.lengths),  # type: ignore[no-untyped-call]
                inputs["k"].split(problem.lengths_k),  # type: ignore[no-untyped-call]
                inputs["v"].split(problem.lengths_k),  # type: ignore[no-untyped-call]
                strict=True,
            )
        ]
        options: dict[str, Any] = {"is_causal": p.causal, "scale": p.softmax_scale, "enable_gqa": p.group > 1}

        def run() -> torch.Tensor:
            return torch.cat([F.scaled_dot_product_attention(*part, **options)[0].transpose(0, 1) for part in parts])

        return run

    def refusal(self, problem: VarlenProblem) -> str | None:
        """It aligns its causal mask top-left where lengths differ."""
        if found := refuse_window(problem):
            return found
        return TOP_LEFT if problem.planned.causal and problem.lengths != problem.lengths_k else None


class FlashAttention(FlashAttentionBaseline):
    """FlashAttention of packed sequences."""

    function = "flash_attn_varlen_func"

    def bind_package(self, function: Callable[..., Any], problem: VarlenProblem, inputs: Inputs) -> Call:
        """Return a call of the package."""
        # By name: after v, FlashAttention-4 has an argument that the others lack.
        options: dict[str, Any] = {name: inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options.update(zip(("max_seqlen_q", "max_seqlen_k"), problem.longest, strict=True))
        options.update(softmax_scale=problem.planned.softmax_scale, causal=problem.planned.causal)
        call = functools.partial(function, inputs["q"], inputs["k"], inputs["v"], **options)
        return lambda: first_tensor(call)

    def bind_library(self, problem: VarlenProblem, inputs: Inputs) -> Call:
        """Return a call of the library."""
        p = problem.planned
        tensors, starts = (inputs[name] for name in "qkv"), (inputs["cu_seqlens_q"], inputs["cu_seqlens_k"])
        call = fa3_packed(tuple(tensors), starts, problem.longest, p.scale, causal=p.causal)
        shape = (problem.tokens[0], p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape)

    def refusal(self, problem: VarlenProblem) -> str | None:
        """Windows have other names in each version."""
        return refuse_window(problem) or super().refusal(problem)


BASELINES = by_name(
    TorchVarlen(),
    Sdpa("sdpa", None),
    FlashAttention(*FA2),
    FlashAttention(*FA3),
    FlashAttention(*FA4),
)
