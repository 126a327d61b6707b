"""The public functions of the experts: contract, validation, and the way from a call to its prepared launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..gpu.device import gpu_of
from ..gpu.refusals import check_one_device
from .calls import Call, prepare_call
from .gradients import differentiable, records
from .inputs import (
    TENSORS,
    cast_under_autocast,
    check_are_tensors,
    check_flags,
    layout_of,
    moe_problem_of,
    refuse_tangents,
)
from .plan import MoePlan, check_kernel_name, plan_moe
from .refusals import check_hashable, check_operator_call
from .routing import route

__all__ = ["explain_moe", "fused_moe", "route"]

# What a call with the same key does, prepared. A key holds everything that decides plan, kernels and grids.
_prepared: dict[tuple[Any, ...], Call] = {}
_MAX_PREPARED = 8192

_is_compiling = torch.compiler.is_compiling


def fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Send every token through its experts, and sum what they make of it. No token is dropped.

    out[t] = sum_k topk_weights[t, k] * (w_down[e] @ act(w_gate_up[e] @ x[t] + bias_gate_up[e]) + bias_down[e]),
    with e = topk_ids[t, k], and the same over shared experts, to which every token goes.

    Args:
        x: ``[T, HID]`` fp16, bf16 or fp32, any strides; T may be 0.
        w_gate_up: ``[E, 2 * INTER, HID]``, or ``[E, INTER, HID]`` where the activation has no gate; dtype and device of
            x, any strides. The layout of transformers and vLLM.
        w_down: ``[E, HID, INTER]``, likewise.
        topk_weights: ``[T, K]`` fp16, bf16 or fp32, contiguous.
        topk_ids: ``[T, K]`` int32 or int64, contiguous. One outside of 0 to E - 1 contributes nothing: where experts
            are spread over GPUs, those of other GPUs are left out.
        activation: ``"swiglu"`` silu(gate) * up, ``"geglu"`` and ``"geglu_tanh"`` gelu(gate) * up,
            ``"swiglu_clamped"`` (gpt-oss) (up + 1) * gate * sigmoid(alpha * gate) with gate at most ``limit`` and up
            within it; without a gate ``"relu2"`` relu(up) ** 2, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``.
        alpha: of swiglu_clamped, default 1.702.
        limit: of swiglu_clamped, default 7.
        interleaved: rows 2i and 2i + 1 of ``w_gate_up`` and of its bias are gate and up (gpt-oss). Else the first INTER
            rows are the gate.
        bias_gate_up: ``[E, 2 * INTER]`` (or ``[E, INTER]``), dtype of x, contiguous.
        bias_down: ``[E, HID]``, dtype of x, contiguous.
        shared_gate_up: ``[S, 2 * SI, HID]`` weights of S experts that every token goes to; SI may differ from INTER.
        shared_down: ``[S, HID, SI]``.
        shared_weights: ``[T, S]`` fp16, bf16 or fp32, contiguous. Default: all 1.
        batch_invariant: a token gets the same bits whatever else is in the batch. K, sizes, dtype and GPU must be the
            same.
        kernel: ``"auto"``, or one name to force (``explain_moe`` lists them); a forced kernel never falls back.

    Returns:
        ``[T, HID]`` in the dtype of x, contiguous.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the kernel forced, serves this call; or it was asked for second-order or
            forward-mode derivatives, of which there are none.

    All tensors but the ids have gradients. For them, inputs and the first product are kept; the activation is computed
    again. Where gradients are recorded, rows are sorted by expert whatever their number. Under autocast x, weights and
    biases of fp32 are cast.

    Numerics: products accumulate in fp32; the activation and each expert's output are rounded to the dtype of x, and
    summed in fp32 in the order of k. Run-to-run bitwise equal, gradients too. Neither the host waits for the device,
    nor the device for the host. CPU tensors run ``reference.fused_moe``.
    """
    given: dict[str, Tensor | None] = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
        "bias_gate_up": bias_gate_up, "bias_down": bias_down, "shared_gate_up": shared_gate_up,
        "shared_down": shared_down, "shared_weights": shared_weights,
    }  # fmt: skip
    options = (activation, alpha, limit, interleaved, batch_invariant, kernel)
    check_are_tensors(given)
    given = cast_under_autocast(given)
    if _is_compiling():
        return _call_operator(given, options)
    refuse_tangents(given)
    if records(given):
        return _call_operator(given, options)
    # A parameter is a tensor; what else has a type of its own goes by the operator, which knows what to do with it.
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in given.values() if tensor is not None):
        return _call_operator(given, options)
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    check_hashable(options)
    key = (*(layout_of(given[name]) for name in TENSORS), options, tuple(map(type, options)))
    call = _prepared.get(key)
    if call is None:
        call = _prepare(tensors, options)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    return call(tensors)


def explain_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> MoePlan:
    """Return the plan that would serve ``fused_moe`` with the same arguments; nothing is launched.

    ``print`` shows it as text, ``.as_dict()`` gives it as data. Arguments and errors are those of ``fused_moe``; where
    gradients would be recorded, the plan is that of the forward pass that keeps what they need.
    """
    given: dict[str, Tensor | None] = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
        "bias_gate_up": bias_gate_up, "bias_down": bias_down, "shared_gate_up": shared_gate_up,
        "shared_down": shared_down, "shared_weights": shared_weights,
    }  # fmt: skip
    check_are_tensors(given)
    refuse_tangents(given)
    tensors = {name: tensor for name, tensor in cast_under_autocast(given).items() if tensor is not None}
    problem = moe_problem_of(
        tensors, activation=activation, alpha=alpha, limit=limit, interleaved=interleaved,
        batch_invariant=batch_invariant, keep_product=records(tensors),
    )  # fmt: skip
    return plan_moe(problem, gpu_of(x), kernel)


def _prepare(tensors: Mapping[str, Tensor], options: tuple[Any, ...]) -> Call:
    """Validate one call, plan it, and return it prepared."""
    activation, alpha, limit, interleaved, batch_invariant, kernel = options
    problem = moe_problem_of(
        tensors,
        activation=activation,
        alpha=alpha,
        limit=limit,
        interleaved=interleaved,
        batch_invariant=batch_invariant,
    )
    x = tensors["x"]
    return prepare_call(plan_moe(problem, gpu_of(x), kernel), x.device)


# Graphs that torch traces hold the operator below, and tensor subclasses come by it; the eager call never does.


@torch.library.custom_op("flashmoe_science::fused_moe", mutates_args=())
def _fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_weights: Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    interleaved: bool,
    batch_invariant: bool,
    kernel: str,
) -> Tensor:
    optional = (bias_gate_up, bias_down, shared_gate_up, shared_down, shared_weights)
    names = TENSORS[5:]
    return fused_moe(
        x.detach(), w_gate_up.detach(), w_down.detach(), topk_weights.detach(), topk_ids,
        **{name: None if tensor is None else tensor.detach() for name, tensor in zip(names, optional, strict=True)},
        activation=activation, alpha=alpha, limit=limit, interleaved=interleaved, batch_invariant=batch_invariant,
        kernel=kernel,
    )  # fmt: skip


@_fused_moe.register_fake
def _fake_fused_moe(x: Tensor, *_rest: object) -> Tensor:
    check_one_device("x", x, _rest)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _call_operator(given: Mapping[str, Tensor | None], options: tuple[Any, ...]) -> Tensor:
    refuse_tangents(given)
    check_operator_call(given, options)
    activation, alpha, limit, interleaved, batch_invariant, kernel = options
    if not _is_compiling():  # the operator's signature would refuse, or change, what is of another type
        flags = {"interleaved": interleaved, "batch_invariant": batch_invariant}
        check_flags(activation, flags, {"alpha": alpha, "limit": limit})
        check_kernel_name(kernel)
    elif not isinstance(activation, str):
        raise InputError(f"activation must be a name, got {activation!r}")
    alpha, limit = (None if number is None else float(number) for number in (alpha, limit))
    if records(given):
        return differentiable(given, (activation, alpha, limit, interleaved, batch_invariant, kernel))
    out: Tensor = _fused_moe(
        *(given[name] for name in TENSORS), activation, alpha, limit, interleaved, batch_invariant, kernel
    )
    return out
