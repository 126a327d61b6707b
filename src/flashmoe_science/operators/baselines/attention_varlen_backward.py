"""The baselines of our gradients of packed sequences.

A baseline is given copies of the inputs, runs its forward on them outside of any timing, and is timed in its backward
alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..packed.problem import VarlenProblem
from .attention_backward import BackwardMatrixProduct, FlashAttention4
from .attention_varlen import TorchVarlen
from .base import ONLY_16_BIT, Bound, Call, Inputs, by_name


class FlashAttention4Varlen(FlashAttention4):
    """FlashAttention-4's backward of packed sequences."""

    def _bind(self, forward: Any, backward: Any, problem: Any, inputs: Inputs) -> Call:
        q, k, v, do = (inputs[name].contiguous() for name in ("q", "k", "v", "do"))
        options: dict[str, Any] = {
            "cu_seqlens_q": inputs["cu_seqlens_q"], "cu_seqlens_k": inputs["cu_seqlens_k"],
            "max_seqlen_q": problem.longest[0], "max_seqlen_k": problem.longest[1],
            **self._options(problem.planned),
        }  # fmt: skip
        o, lse, *_ = forward(q, k, v, return_lse=True, **options)
        call = functools.partial(backward, q, k, v, o, do, lse, deterministic=self.deterministic, **options)
        return lambda: tuple(call()[:3])

    def refusal(self, problem: Any) -> str | None:
        """The package serves 16-bit types."""
        return ONLY_16_BIT if problem.dtype == "fp32" else None


class TorchVarlenBackward(TorchVarlen):
    """The backward of ``torch.nn.attention.varlen.varlen_attn``, FlashAttention-2 by default."""

    def load(self) -> Any:
        """Return it with the options of this version of torch."""
        forward: Any = super().load()

        def bind(problem: VarlenProblem, inputs: Inputs) -> Call:
            leaves = {name: inputs[name].clone().requires_grad_() for name in ("q", "k", "v")}
            do = inputs["do"].contiguous()
            with torch.enable_grad():
                o = forward.bind_inputs(problem, {**inputs, **leaves})()
            given = tuple(leaves.values())
            return lambda: torch.autograd.grad(o, given, do, retain_graph=True)

        return Bound(bind)

    def version(self) -> str:
        """Return torch's version; the gradients may have other bits in every run."""
        return f"{super().version()}, not deterministic"


BASELINES = by_name(
    FlashAttention4Varlen("fa4", deterministic=False),
    FlashAttention4Varlen("fa4-deterministic", deterministic=True),
    TorchVarlenBackward(),
    BackwardMatrixProduct(),
)
