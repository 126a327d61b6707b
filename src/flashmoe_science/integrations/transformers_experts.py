"""Our experts in Hugging Face transformers, behind ``experts_implementation="flashmoe_science"``.

    from flashmoe_science.integrations.transformers_experts import register_experts
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation=register_experts())

Routing stays the model's own; weights are taken as they lie, nothing is copied.

Source: transformers 5, integrations/moe.py, for what is asked of an implementation and what a module says of itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MissingPackageError, UnsupportedError, shown
from ..gpu.checks import check_dense, check_tensor
from ..moe.api import fused_moe
from ..moe.plan import check_kernel_name

# By the class of ``act_fn``: the activation with a gate, and without one. None: there is no such kernel.
_ACTIVATIONS: dict[str, tuple[str | None, str]] = {
    "SiLU": ("swiglu", "silu"),
    "SiLUActivation": ("swiglu", "silu"),
    "GELUActivation": ("geglu", "gelu"),
    "GELUTanh": ("geglu_tanh", "gelu_tanh"),
    "NewGELUActivation": ("geglu_tanh", "gelu_tanh"),
    "ReLUSquaredActivation": (None, "relu2"),
}
_DEFAULT_GATE = "_default_apply_gate"
# Experts whose gate is gpt-oss's: where they have alpha and limit, and whether gate and up take turns. By their very
# class: what inherits from one may have another gate.
_CLAMPED_GATES = {
    "GptOssExperts": ("alpha", "limit", True),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit", False),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit", False),
}
_THEIRS = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")


def register_experts(name: str = "flashmoe_science", *, batch_invariant: bool = False, kernel: str = "auto") -> str:
    """Let models be made with ``experts_implementation=name``, and return the name.

    Args:
        name: of the implementation.
        batch_invariant: as in ``fused_moe``.
        kernel: that serves it, as in ``fused_moe``.

    Raises:
        InputError: the name is one of transformers' own; there is no such kernel.
        MissingPackageError: transformers is not installed, or too old.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise MissingPackageError(
            f"transformers cannot be imported: {error}", hint='pip install "transformers>=5.23"'
        ) from error

    given: dict[str, object] = {"name": name, "batch_invariant": batch_invariant}
    if not isinstance(given["name"], str) or not name:
        raise InputError(f"name must be a text, got {shown(name)}")
    if not isinstance(given["batch_invariant"], bool):
        raise InputError(f"batch_invariant must be True or False, got {shown(batch_invariant)}")
    if name in _THEIRS:
        raise InputError(f"name must not be one of transformers' own, {', '.join(_THEIRS)}, got {name!r}")
    check_kernel_name(kernel)
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(run_experts, batch_invariant=batch_invariant, kernel=kernel))
    return name


def run_experts(
    module: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Do what the forward of an experts module does.

    Args:
        module: the experts: ``gate_up_proj`` ``[E, 2 * INTER, HID]`` or ``up_proj`` ``[E, INTER, HID]``, ``down_proj``
            ``[E, HID, INTER]``, transposed where ``is_transposed``, and biases ``gate_up_proj_bias`` and so on where
            ``has_bias``.
        hidden_states: ``[T, HID]``.
        top_k_index: ``[T, K]``, int32 or int64; ``E`` stands for an expert of another GPU, and contributes nothing.
        top_k_weights: ``[T, K]`` fp16, bf16 or fp32.
        batch_invariant: as in ``fused_moe``.
        kernel: as in ``fused_moe``.

    Returns:
        ``[T, HID]``.

    Raises:
        UnsupportedError: the module's activation, gate or norm has no kernel.
        InputError: weights are of another dtype than the tokens, such as quantised ones.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{type(module).__name__} norms what each expert makes, which is not served", hint=_hint(module)
        )
    _check_module(module)
    given = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, tensor in given.items():
        check_tensor(name, tensor)
        check_dense(name, tensor)
    which: Any = module
    prefix = "gate_up_proj" if which.has_gate else "up_proj"
    up, down = getattr(which, prefix), which.down_proj
    if which.is_transposed:
        for name, weight in ((prefix, up), ("down_proj", down)):
            if not isinstance(weight, Tensor) or weight.dim() != 3:
                got = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
                raise InputError(f"{name} of {type(module).__name__} must have 3 dimensions, got {got}")
            check_tensor(name, weight)
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    options = _activation_of(which)
    if which.has_bias:
        options.update(bias_gate_up=getattr(which, f"{prefix}_bias"), bias_down=which.down_proj_bias)
    return fused_moe(
        hidden_states,
        up,
        down,
        top_k_weights.contiguous(),
        top_k_index.contiguous(),
        **options,
        batch_invariant=batch_invariant,
        kernel=kernel,
    )


# What transformers' own implementations read of an experts module.
_SAID = ("has_gate", "has_bias", "is_transposed", "down_proj")


def _check_module(module: Any) -> None:
    """Raise ``InputError`` where a module does not say of itself what experts of transformers do."""
    missing = [name for name in _SAID if not hasattr(module, name)]
    if not missing:
        prefix = "gate_up_proj" if module.has_gate else "up_proj"
        wanted = [prefix, *((f"{prefix}_bias", "down_proj_bias") if module.has_bias else ())]
        missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        raise InputError(
            f"module must be experts of transformers 5 with {', '.join(missing)}, got {type(module).__name__} without"
        )


def _number_of(module: Any, name: str) -> float:
    """Return a number that a gate has: without one ``fused_moe`` would take gpt-oss's."""
    number = getattr(module, name, None)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise InputError(f"{name} of {type(module).__name__} must be a number, got {shown(number)}")
    return number


def _activation_of(module: Any) -> dict[str, Any]:
    """Return the options of ``fused_moe`` that are what the module does between its products."""
    if module.has_gate:
        kind = type(module).__name__
        if kind in _CLAMPED_GATES:
            alpha, limit, interleaved = _CLAMPED_GATES[kind]
            return {
                "activation": "swiglu_clamped",
                "alpha": _number_of(module, alpha),
                "limit": _number_of(module, limit),
                "interleaved": interleaved,
            }
        gate = getattr(module, "_apply_gate", None)  # its own, or one that was put on this very module
        if getattr(gate, "__name__", None) != _DEFAULT_GATE:  # the name that transformers gives it
            raise UnsupportedError(f"the gate of {kind} is not served", hint=_hint(module))
    kind_of_act = type(getattr(module, "act_fn", None))
    act = kind_of_act.__name__
    name = _ACTIVATIONS.get(act, (None, None))[0 if module.has_gate else 1]
    if name is None or kind_of_act.__module__.partition(".")[0] not in ("torch", "transformers"):
        what = "with" if module.has_gate else "without"
        raise UnsupportedError(
            f"{kind_of_act.__module__}.{act} is not served as the activation of experts {what} a gate "
            f"({type(module).__name__})",
            hint=_hint(module),
        )
    return {"activation": name}


def _hint(module: torch.nn.Module) -> str:
    return f'experts_implementation="grouped_mm" serves {type(module).__name__}'
