"""``fused_moe_backward``: the gradients of the experts without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gpu.checks import check_one_device
from ...gpu.subclasses import is_traced
from ..checks import MoeCall, check_operator_call, read_tensors
from ..problem import Options
from .autograd import routed_gradients
from .plan import GRADIENTS, check_backward_kernel_name


def fused_moe_backward(
    do: Tensor,
    product: Tensor,
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
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """Return the gradients of a call of ``fused_moe`` without shared experts.

    Args:
        do: ``[T, HID]``, the gradient of the output, dtype of x, any strides.
        product: ``[P, 2 * INTER]``, or ``[P, INTER]`` without a gate: the first product with its bias, before the
            activation. Its P = T * K rows belong to pairs of a token and an expert, sorted by expert (stable). Pairs
            without an expert come last, and their rows are not read. Dtype of x, contiguous, 16-byte aligned.
        x: As in ``fused_moe``.
        w_gate_up: As in ``fused_moe``.
        w_down: As in ``fused_moe``.
        topk_weights: As in ``fused_moe``.
        topk_ids: As in ``fused_moe``.
        activation: As in ``fused_moe``.
        alpha: As in ``fused_moe``.
        limit: As in ``fused_moe``.
        interleaved: As in ``fused_moe``.
        bias_gate_up: As in ``fused_moe``.
        bias_down: As in ``fused_moe``.
        kernel: ``"auto"``, or one kernel by name: ``"moe_backward_gluon_sm90"`` or ``"moe_backward_triton"``. A forced
            kernel never falls back.

    Returns:
        The gradients of x, w_gate_up, w_down and topk_weights, then of the biases that were given.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the forced one, serves this call.

    Numerics: as the gradients of ``fused_moe``, bitwise equal from run to run. CPU tensors run the reference, which
    recomputes the product.
    """
    tensors = read_tensors(
        {
            "do": do, "product": product, "x": x, "w_gate_up": w_gate_up, "w_down": w_down,
            "topk_weights": topk_weights, "topk_ids": topk_ids, "bias_gate_up": bias_gate_up, "bias_down": bias_down,
        }
    )  # fmt: skip
    check_backward_kernel_name(kernel)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    options = Options(activation, alpha, limit, interleaved)
    if not is_traced(tensors.values()):
        return tuple(_run(tensors, options, kernel))
    check_operator_call(MoeCall(tensors, options, is_recorded=False, key=None))
    alpha, limit = (None if number is None else float(number) for number in (alpha, limit))
    return tuple(_gradients(*(tensors.get(name) for name in _TENSORS), activation, alpha, limit, interleaved, kernel))


_TENSORS = (
    "do", "product", "x", "w_gate_up", "w_down", "topk_weights", "topk_ids", "bias_gate_up", "bias_down",
)  # fmt: skip


def _run(tensors: dict[str, Tensor], options: Options, kernel: str) -> list[Tensor]:
    do, product = tensors.pop("do"), tensors.pop("product")
    wanted = [name for name in GRADIENTS if name in tensors]
    found = routed_gradients(do, product, tensors, options, wanted, kernel, product_is_given=True)
    return [found[name] for name in wanted]


# Traced graphs hold this operator.


@torch.library.custom_op("flashmoe_science::fused_moe_gradients", mutates_args=())
def _gradients(
    do: Tensor,
    product: Tensor,
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    interleaved: bool,
    kernel: str,
) -> list[Tensor]:
    given = (do, product, x, w_gate_up, w_down, topk_weights, topk_ids, bias_gate_up, bias_down)
    tensors = {name: tensor.detach() for name, tensor in zip(_TENSORS, given, strict=True) if tensor is not None}
    return _run(tensors, Options(activation, alpha, limit, interleaved), kernel)


@_gradients.register_fake
def _fake_gradients(*given: Any) -> list[Tensor]:
    tensors = {name: tensor for name, tensor in zip(_TENSORS, given, strict=False) if tensor is not None}
    check_one_device("x", tensors["x"], given)
    like = [tensors[name] for name in GRADIENTS if name in tensors]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in like]
