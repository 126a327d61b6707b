"""The gradients of experts as a function, for who keeps what they need without autograd."""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from .backward_plan import GRADIENTS
from .gradients import moe_gradients
from .inputs import check_are_tensors
from .refusals import check_backward


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
        do: ``[T, HID]``, of the output, dtype of x; any strides.
        product: ``[P, 2 * INTER]``, or ``[P, INTER]`` without a gate: the first product with its bias, before the
            activation; P = T * K rows, of pairs of a token and an expert sorted by expert, then as they come. Pairs of
            no expert have none: rows behind those of the last expert are not read. Dtype of x, contiguous, its address
            a multiple of 16.
        x: as ``fused_moe`` takes it; so all that follow.
        w_gate_up: likewise.
        w_down: likewise.
        topk_weights: likewise.
        topk_ids: likewise.
        activation: likewise.
        alpha: likewise.
        limit: likewise.
        interleaved: likewise.
        bias_gate_up: likewise.
        bias_down: likewise.
        kernel: ``"auto"``, or one name to force: ``"moe_backward_gluon_sm90"`` or ``"moe_backward_triton"``.

    Returns:
        The gradients of x, w_gate_up, w_down and topk_weights, then of the biases that are given.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the kernel forced, serves this call.

    Numerics: as the gradients of ``fused_moe``; the same bits in every run. CPU tensors run the reference, which
    computes the product again.
    """
    given: dict[str, Tensor | None] = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
        "bias_gate_up": bias_gate_up, "bias_down": bias_down,
    }  # fmt: skip
    check_backward(do, product, given, (activation, alpha, limit, interleaved), kernel)
    # What follows down to the tensors is said better above. It goes when suite moe-train is measured anew.
    check_are_tensors({"do": do, "product": product, **given})
    rows = (topk_ids.numel(), w_gate_up.shape[1] if w_gate_up.dim() == 3 else 0)
    for name, tensor, shape in (("do", do, tuple(x.shape)), ("product", product, rows)):
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise InputError(f"{name} must be {x.dtype} on {x.device}, got {tensor.dtype} on {tensor.device}")
    if not product.is_contiguous() or product.data_ptr() % 16:
        raise InputError("product must be contiguous and begin at a multiple of 16 bytes")
    tensors = {name: tensor.detach() for name, tensor in given.items() if tensor is not None}
    wanted = [name for name in GRADIENTS if name in tensors]
    options = (activation, alpha, limit, interleaved, False, "auto")
    found = moe_gradients(do.detach(), (product, product[:0]), tensors, options, wanted, kernel)
    return tuple(found[name] for name in wanted)
