"""vLLM's experts in Triton as a baseline: how they are called."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ...moe.checks import TENSORS
from ...moe.problem import DEFAULT_ALPHA, DEFAULT_LIMIT, MoeCase
from .base import Baseline, Bound, Call, Inputs
from .moe import add_shared, options_of

# Ours to its; of these "gelu" is the exact one, and "swigluoai" has gpt-oss's alpha, limit and interleaved gates.
_ACTIVATIONS = {
    "swiglu": "silu", "geglu": "gelu", "swiglu_clamped": "swigluoai",
    "silu": "silu_no_mul", "gelu": "gelu_no_mul", "relu2": "relu2_no_mul",
}  # fmt: skip


class Vllm(Baseline):
    """vLLM's experts in Triton, those of ``moe_backend="triton"``; tiles are from its tables, where it has one."""

    name = "vllm-triton"
    kernels = ("*fused_moe_kernel*",)
    distribution = "vllm"

    def load(self) -> Callable[..., Any]:
        """Return its functional entry, given biases and activation before the call, with shared experts beside it."""
        experts = importlib.import_module("vllm.model_executor.layers.fused_moe")
        config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        run, kinds, biased = experts.fused_experts, experts.MoEActivation, config.biased_moe_quant_config

        def bind(case: MoeCase, inputs: Inputs) -> Call:
            p = case.problem
            routed = functools.partial(
                run,
                *(inputs[name] for name in TENSORS[:5]),
                activation=kinds(_ACTIVATIONS[p.activation]),
                quant_config=biased(inputs.get("bias_gate_up"), inputs.get("bias_down")),
            )
            if not p.shared_experts:
                return routed
            options: dict[str, Any] = {name: inputs[name] for name in TENSORS[5:] if name in inputs}
            options.update(options_of(case))
            x = inputs["x"]
            return lambda: add_shared(routed(), x, options)

        return Bound(bind)

    def refusal(self, case: MoeCase) -> str | None:
        """Name what the function cannot be asked for, and fp32, which its tiles multiply as tf32."""
        p = case.problem
        clamped = p.activation == "swiglu_clamped"
        theirs = (DEFAULT_ALPHA, DEFAULT_LIMIT)
        lacking = {
            p.activation: p.activation not in _ACTIVATIONS,
            f"interleaved gates of {p.activation}": p.interleaved and not clamped,
            "swiglu_clamped without interleaved gates": clamped and not p.interleaved,
            f"alpha and limit but {theirs[0]:g} and {theirs[1]:g}": clamped and (p.alpha, p.limit) != theirs,
            "batch invariance of a single call": p.batch_invariant,
            "products of fp32 but as tf32": p.dtype == "fp32",
        }
        asked = ", ".join(name for name, is_asked in lacking.items() if is_asked)
        return f"it has no {asked}" if asked else None
