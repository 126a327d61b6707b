"""ScatterMoE as a baseline: sort, two products that gather and scatter, and PyTorch between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...moe.problem import MoeCase
from .base import Baseline
from .moe import activate, add_shared


class ScatterMoe(Baseline):
    """ScatterMoE's products, in Triton, put together as its ``GLUMLP`` does it. It counts on the host.

    Its gradients cannot be timed apart from its forward pass: they overwrite what that saved.
    """

    name = "scattermoe"
    kernels = ("*_scatter2scatter*",)
    distribution = "scattermoe"

    def load(self) -> Callable[..., Any]:
        """Return it, any activation between the products and shared experts beside it."""
        library = importlib.import_module("scattermoe.parallel_experts")

        def scattermoe(
            x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
        ) -> Tensor:
            order = library.flatten_sort_count(topk_ids, num_experts=w_gate_up.shape[0])
            product = library.parallel_linear(
                x, w_gate_up.permute(0, 2, 1), topk_ids.shape[1], *order,
                expert_biases=options.get("bias_gate_up"), grouped_out=True,
            )  # fmt: skip
            out: Tensor = library.parallel_linear(
                activate(product, options), w_down.permute(0, 2, 1), 1, *order,
                expert_biases=options.get("bias_down"), gates=topk_weights.to(x.dtype), grouped_in=True,
            )  # fmt: skip
            return add_shared(out, x, options)

        return scattermoe

    def refusal(self, case: MoeCase) -> str | None:
        """It multiplies fp32 as tf32, and reaches rows and weights with 32-bit offsets."""
        p = case.problem
        if p.dtype == "fp32":
            return "it serves 16-bit operands"
        if p.batch_invariant:
            return "its tiles hold rows of several experts, so it is not batch-invariant"
        rows, weights = p.pairs * max(p.columns_up, p.hidden, p.inter), p.experts * p.columns_up * p.hidden
        if max(rows, weights) >= 2**31:
            return f"it has 32-bit offsets, which {p.describe()} passes"
        return None
