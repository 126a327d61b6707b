"""What refuses a call before anything of it runs: these functions raise, or return None and change nothing.

So fingerprints leave statements out that only call one of them (``gpu/dependencies.py``), and a better message makes no
measurement anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError
from .backward_plan import check_backward_kernel_name
from .inputs import check_are_tensors, check_flags, moe_problem_of
from .plan import check_kernel_name


def check_hashable(options: tuple[Any, ...]) -> None:
    """Raise ``InputError`` where options of ``fused_moe`` have no hash, by which a prepared call is found."""
    try:
        hash(options)
    except TypeError:
        activation, alpha, limit, interleaved, batch_invariant, kernel = options
        flags = {"interleaved": interleaved, "batch_invariant": batch_invariant}
        check_flags(activation, flags, {"alpha": alpha, "limit": limit})
        check_kernel_name(kernel)
        raise


def check_backward(
    do: Tensor, product: Tensor, given: Mapping[str, Tensor | None], options: Mapping[str, Any], kernel: str
) -> None:
    """Raise ``InputError`` where arguments of ``fused_moe_backward`` break its contract, whoever would serve them.

    Args:
        do: the gradient of the output.
        product: the first product.
        given: what ``fused_moe`` takes, by name.
        options: activation, alpha, limit and interleaved.
        kernel: a name.
    """
    check_are_tensors({"do": do, "product": product, **given})
    check_backward_kernel_name(kernel)
    problem = moe_problem_of({name: tensor for name, tensor in given.items() if tensor is not None}, **options)
    x = given["x"]
    assert x is not None
    columns = "2 * INTER" if problem.gated else "INTER"
    for name, tensor, shape, letters in (
        ("do", do, (problem.tokens, problem.hidden), "T, HID"),
        ("product", product, (problem.pairs, problem.columns_up), f"T * K, {columns}"),
    ):
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} must have shape [{letters}] = {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise InputError(f"{name} must be {x.dtype} on {x.device}, got {tensor.dtype} on {tensor.device}")
    if product.is_neg():
        raise InputError("product must not be a negative view, got one (is_neg()): call resolve_neg()")
    if not product.is_contiguous():
        raise InputError(f"product must be contiguous, got strides {list(product.stride())}")
    if behind := product.data_ptr() % 16:
        raise InputError(f"product must begin at a multiple of 16 bytes, got an address {behind} bytes behind one")
