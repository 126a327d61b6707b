"""SonicMoE as a baseline: the layer that its benchmark times, from where its router is done."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...moe.problem import MoeCase
from .base import Baseline
from .moe import add_shared

_ACTIVATIONS = {"swiglu": "SWIGLU", "geglu_tanh": "GEGLU"}
_SERVED = ("geglu_tanh", "interleaved gates", "biases", "shared experts")
# Its products are QuACK's, written in the third's language.
_PACKAGES = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")


class SonicMoe(Baseline):
    """SonicMoE's experts, on QuACK's grouped products; it tunes itself at the first call of a size. It has gradients.

    Its path for routing with a fixed number of experts a token, which has fewer kernels than the path for any routing.
    """

    name = "sonicmoe"
    kernels = ("*GemmGatedSm*",)
    distribution = "sonic-moe"

    def load(self) -> Callable[..., Any]:
        """Return it, shared experts beside it."""
        kinds = importlib.import_module("sonicmoe.enums").ActivationType
        sort = importlib.import_module("sonicmoe.functional.triton_kernels").TC_topk_router_metadata_triton
        layer = importlib.import_module("sonicmoe.functional")
        project_up, project_down = layer._UpProjection.apply, layer._DownProjection.apply  # noqa: SLF001 - see above

        def sonicmoe(
            x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
        ) -> Tensor:
            (tokens, top_k), experts = topk_ids.shape, w_gate_up.shape[0]
            pairs = tokens * top_k
            counts, offsets, rows, order, back = (
                torch.empty(size, dtype=torch.int32, device=x.device)
                for size in (experts, experts + 1, pairs, pairs, pairs)
            )
            sort(topk_ids, experts, counts, offsets, rows, order, back)
            routing = rows, order, back, None, False  # as many experts for every token
            activation = kinds[_ACTIVATIONS[options.get("activation", "swiglu")]]
            # The product before the activation is written for gradients only.
            inputs = x, w_gate_up, w_down, topk_weights
            keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
            # Its weights have the expert last, of ours a view, and gate and up rows by turns or, as ours, one after the
            # other.
            halves = not options.get("interleaved", False)
            hidden, product = project_up(
                x, w_gate_up.permute(1, 2, 0), options.get("bias_gate_up"), offsets, pairs, top_k, *routing, activation,
                not keep, halves,
            )  # fmt: skip
            out: Tensor = project_down(
                hidden, product, w_down.permute(1, 2, 0), options.get("bias_down"), topk_weights.float(), offsets,
                tokens, top_k, *routing, activation,
            )  # fmt: skip
            return add_shared(out, x, options)

        return sonicmoe

    def version(self) -> str:
        """Return the versions of all that decides what it runs."""
        return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)

    def refusal(self, case: MoeCase) -> str | None:
        """It has two gated activations, biases of both products or of none, and 16-bit operands."""
        problem = case.problem
        if problem.dtype not in ("bf16", "fp16"):
            return f"it serves 16-bit operands, got {problem.dtype}"
        lacking = [feature for feature in problem.features if feature not in _SERVED]
        if lacking:
            return f"it has no {', '.join(lacking)}"
        if problem.bias_gate_up != problem.bias_down:
            return "it has biases of both products, or of none"
        if problem.hidden % 8 or problem.inter % 8:
            return f"it serves sizes that are multiples of 8, got {problem.hidden} and {problem.inter}"
        if not problem.tokens:
            return "it serves one token or more"
        if problem.pairs * problem.hidden >= 2**32:
            return f"it adds up rows with 32-bit offsets, which {problem.pairs} rows of {problem.hidden} pass"
        return None
