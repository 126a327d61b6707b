"""What refuses a call before anything of it runs: these functions raise, or return None and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..gpu.refusals import (
    check_dense,
    check_no_bare_subclass,
    check_not_differentiated_by_torch_func,
    check_not_negative,
)
from .backward_plan import check_backward_kernel_name
from .inputs import check_are_tensors, check_devices, check_flags, moe_problem_of, refuse_tangents
from .plan import check_kernel_name


def check_hashable(options: tuple[Any, ...]) -> None:
    """Raise ``InputError`` where options of ``fused_moe`` have no hash, by which a prepared call is found."""
    try:
        hash(options)
    except TypeError as error:
        _check_options(options)
        raise InputError(f"options must have a hash, got {options!r}") from error


def _check_options(options: tuple[Any, ...]) -> None:
    activation, alpha, limit, interleaved, batch_invariant, kernel = options
    flags = {"interleaved": interleaved, "batch_invariant": batch_invariant}
    check_flags(activation, flags, {"alpha": alpha, "limit": limit})
    check_kernel_name(kernel)


def check_operator_call(given: Mapping[str, Tensor | None], options: tuple[Any, ...]) -> None:
    """Raise what stands in for the operator of ``fused_moe`` would not: one tensor on meta, and its fake serves all.

    Its signature also would refuse, or change, options of another type.
    """
    for name, tensor in given.items():
        if tensor is not None:
            check_dense(name, tensor)
            if name == "topk_ids":
                check_no_bare_subclass(name, tensor)
    check_devices(given)
    _check_options(options)
    for name, tensor in given.items():
        if tensor is not None:
            check_not_negative(name, tensor)
            check_not_differentiated_by_torch_func(name, tensor)


def check_product(product: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` unless ``product`` is like the first product of a call with ``tensors``."""
    columns = tensors["w_gate_up"].shape[1]
    _check_like("product", product, (tensors["topk_ids"].numel(), columns), tensors["x"], "T * K, rows of w_gate_up")
    check_not_negative("product", product)
    if not product.is_contiguous():
        raise InputError(f"product must be contiguous, got strides {list(product.stride())}")
    if behind := product.data_ptr() % 16:
        raise InputError(f"product must begin at a multiple of 16 bytes, got an address {behind} bytes behind one")


def check_gradient(do: Tensor, x: Tensor) -> None:
    """Raise ``InputError`` unless ``do`` is like the output of tokens ``x``."""
    _check_like("do", do, tuple(x.shape), x, "T, HID")


def _check_like(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor, letters: str) -> None:
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} must have shape [{letters}] = {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise InputError(f"{name} must be {x.dtype} on {x.device}, got {tensor.dtype} on {tensor.device}")


def check_routed(
    do: Tensor, product: Tensor, tensors: Mapping[str, Tensor], options: tuple[Any, ...], kernel: str
) -> None:
    """Raise ``InputError`` for what nobody looks at where gradients of routed experts are made.

    Args:
        do: the gradient of the output.
        product: the first product.
        tensors: what the experts were given, by name; what prepares a call of kernels checks them.
        options: activation, alpha, limit, interleaved, batch_invariant and kernel of the call.
        kernel: of the gradients.
    """
    x = tensors["x"]
    by_reference = x.device.type == "cpu" and kernel == "auto" and options[5] in ("auto", "reference")
    if x.shape[0] == 0 or by_reference:
        activation, alpha, limit, interleaved, *_ = options
        moe_problem_of(tensors, activation=activation, alpha=alpha, limit=limit, interleaved=interleaved)
    check_gradient(do, x)
    if not by_reference:  # which keeps no product
        check_product(product, tensors)


def check_backward(
    do: Tensor, product: Tensor, given: Mapping[str, Tensor | None], options: tuple[Any, ...], kernel: str
) -> None:
    """Raise ``InputError`` where arguments of ``fused_moe_backward`` break its contract, whoever would serve them.

    Args:
        do: the gradient of the output.
        product: the first product.
        given: what ``fused_moe`` takes, by name.
        options: activation, alpha, limit and interleaved.
        kernel: a name.
    """
    everything: dict[str, Tensor | None] = {"do": do, "product": product, **given}
    check_are_tensors(everything)
    refuse_tangents(everything)
    check_backward_kernel_name(kernel)
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    activation, alpha, limit, interleaved = options
    moe_problem_of(tensors, activation=activation, alpha=alpha, limit=limit, interleaved=interleaved)
    check_gradient(do, tensors["x"])
    check_product(product, tensors)
