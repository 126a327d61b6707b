"""vLLM's experts in Triton as a rival: how they are called."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError
from .inputs import TENSORS
from .problem import DEFAULT_ALPHA, DEFAULT_LIMIT, MoeCase
from .rivals import MoeRival, _add_shared

# Ours to its; of these "gelu" is the exact one, and "swigluoai" has gpt-oss's alpha, limit and interleaved gates.
_ACTIVATIONS = {
    "swiglu": "silu", "geglu": "gelu", "swiglu_clamped": "swigluoai",
    "silu": "silu_no_mul", "gelu": "gelu_no_mul", "relu2": "relu2_no_mul",
}  # fmt: skip


class _Bound:
    """An entry point that describes biases and activation before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __init__(
        self, run: Callable[..., Tensor], activation: Callable[[str], Any], biased: Callable[..., Any]
    ) -> None:
        """Take vLLM's ``fused_experts``, ``MoEActivation`` and ``biased_moe_quant_config``."""
        self._run, self._activation, self._biased = run, activation, biased

    def __call__(self, *_arguments: object, **_options: object) -> Tensor:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")

    def bind_inputs(self, case: MoeCase, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """Return the call, shared experts beside it."""
        p = case.problem
        routed = functools.partial(
            self._run,
            *(inputs[name] for name in TENSORS[:5]),
            activation=self._activation(_ACTIVATIONS[p.activation]),
            quant_config=self._biased(inputs.get("bias_gate_up"), inputs.get("bias_down")),
        )
        if not p.shared_experts:
            return routed
        options: dict[str, Any] = {name: inputs[name] for name in TENSORS[5:] if name in inputs}
        options.update(activation=p.activation, alpha=p.alpha, limit=p.limit, interleaved=p.interleaved)
        x = inputs["x"]
        return lambda: _add_shared(routed(), x, options)


class Vllm(MoeRival):
    """vLLM's experts in Triton, those of ``moe_backend="triton"``; tiles are from its tables, where it has one."""

    name = "vllm-triton"
    kernels = ("*fused_moe_kernel*",)
    distribution = "vllm"
    also_called = ("vLLM's Triton experts", "vLLM's fused_experts")

    def load(self) -> Callable[..., Tensor]:
        """Return its functional entry."""
        experts = importlib.import_module("vllm.model_executor.layers.fused_moe")
        config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
        return _Bound(experts.fused_experts, experts.MoEActivation, config.biased_moe_quant_config)

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
