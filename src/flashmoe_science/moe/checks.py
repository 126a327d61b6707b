"""Check what callers pass against the contract, and describe the call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from ..gpu.checks import (
    check_before_operator,
    check_dense,
    check_in_memory,
    check_no_bare_subclass,
    check_no_tangent,
    check_not_negative,
    check_operand,
    check_saved_for_gradients,
    check_tensor,
)
from ..gpu.subclasses import PLAIN, is_traced
from .plan import check_kernel_name
from .problem import ACTIVATIONS, GATED, LARGEST, MoeProblem, Options, columns_up

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ID_NAMES = {torch.int32: "i32", torch.int64: "i64"}
_forward_ad = torch.autograd.forward_ad
# In the order of ``fused_moe``.
TENSORS = (
    "x", "w_gate_up", "w_down", "topk_weights", "topk_ids",
    "bias_gate_up", "bias_down", "shared_gate_up", "shared_down", "shared_weights",
)  # fmt: skip
_DEFAULTS = Options()
_REQUIRED, _OPTIONAL = TENSORS[:5], TENSORS[5:]
_WITH_DTYPE_OF_X = ("w_gate_up", "w_down", "bias_gate_up", "bias_down", "shared_gate_up", "shared_down")


class MoeCall(NamedTuple):
    """One call of ``fused_moe``: its tensors were checked for their type and for tangents, and cast under autocast."""

    tensors: dict[str, Tensor]  # by name, without those that are None
    options: Options
    is_recorded: bool  # autograd needs gradients
    key: tuple[Any, ...] | None  # everything that its preparation depends on; None: an operator of torch serves it


def read_call(given: Mapping[str, object], options: Options) -> MoeCall:
    """Describe the call that a caller makes. Shapes and values are checked once for each key: see ``moe_problem_of``.

    Raises:
        InputError: an argument is no tensor, a tensor is not dense, or an option has no hash.
        UnsupportedError: a tensor has a forward-mode tangent, or no memory of its own.
    """
    tensors = cast_under_autocast(read_tensors(given))
    is_recorded = _is_recorded(tensors)
    if is_recorded and not torch.compiler.is_compiling() and any(one.is_inference() for one in tensors.values()):
        check_saved_for_gradients(tensors)
    by_operator = is_recorded or is_traced(tensors.values())
    return MoeCall(tensors, options, is_recorded, None if by_operator else call_key(tensors, options))


def read_tensors(given: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the arguments that are tensors, by name.

    Raises:
        InputError: a required argument is no tensor, or an optional one is neither a tensor nor None.
        UnsupportedError: a tensor has a forward-mode tangent, which the call would lose.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if type(tensor) not in PLAIN:
            check_tensor(name, tensor, optional=name in _OPTIONAL)
        tensors[name] = tensor  # type: ignore[assignment] # it is one
    if _forward_ad._current_level >= 0:  # noqa: SLF001 - the public way asks tensor by tensor
        for name, tensor in tensors.items():
            check_no_tangent(name, tensor)
    return tensors


def _is_recorded(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether autograd needs gradients of a call."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad and name != "topk_ids":
                return True
    return False


def cast_under_autocast(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cast fp32 x, weights and biases to the dtype of autocast, where it is enabled."""
    x = given["x"]
    if not (x.is_cuda or x.is_cpu):
        return given
    device = "cuda" if x.is_cuda else "cpu"  # faster than x.device.type, on every call
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    cast = dict(given)
    for name in ("x", *_WITH_DTYPE_OF_X):
        tensor = given.get(name)
        if tensor is not None and tensor.dtype == torch.float32:
            cast[name] = tensor.to(dtype)
    return cast


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != expected:
        raise InputError(f"{name} must have shape [{letters}] = {list(expected)}, got {list(tensor.shape)}")


def _check_axes(name: str, tensor: Tensor, letters: str) -> None:
    axes = letters.count(",") + 1
    if tensor.dim() != axes:
        raise InputError(f"{name} must have {axes} dimensions [{letters}], got shape {list(tensor.shape)}")


def check_places(tensors: Mapping[str, Tensor]) -> None:
    """Check devices, memory and dtypes. Raises ``InputError``."""
    check_in_memory(tensors, "x")
    x = tensors["x"]
    for name, tensor in tensors.items():
        if name == "topk_ids":
            if tensor.dtype not in _ID_NAMES:
                raise InputError(f"topk_ids must be int32 or int64, got {tensor.dtype}")
        elif tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if name in _WITH_DTYPE_OF_X and tensor.dtype != x.dtype:
            raise InputError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InputError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def _check_shared(tensors: Mapping[str, Tensor], tokens: int, hidden: int, activation: str) -> tuple[int, int]:
    """Return number and inner size of the shared experts."""
    up, down = tensors.get("shared_gate_up"), tensors.get("shared_down")
    for name, tensor, other in (("shared_gate_up", up, down), ("shared_down", down, up)):
        if tensor is None and other is not None:
            raise InputError(f"{name} must be given with the other weights of the shared experts, got None")
    if up is None or down is None:
        if "shared_weights" in tensors:
            raise InputError("shared_weights must be None without shared experts, got some")
        return 0, 0
    _check_axes("shared_gate_up", up, "S, 2 * INTER, HID")
    _check_axes("shared_down", down, "S, HID, INTER")
    shared, inter = down.shape[0], down.shape[2]
    _check_shape("shared_down", down, (shared, hidden, inter), "S, HID, INTER")
    rows = columns_up(inter, activation)
    letters = "S, 2 * INTER, HID" if activation in GATED else "S, INTER, HID"
    _check_shape("shared_gate_up", up, (shared, rows, hidden), letters)
    if "shared_weights" in tensors:
        _check_shape("shared_weights", tensors["shared_weights"], (tokens, shared), "T, S")
        _check_contiguous("shared_weights", tensors["shared_weights"])
    if shared * inter == 0:
        raise InputError(f"shared_down must have S and INTER of 1 or more, got shape {list(down.shape)}")
    return shared, inter


def check_flags(activation: object, flags: Mapping[str, object], numbers: Mapping[str, object]) -> None:
    """Check an activation, and flags and numbers by name; ``MoeProblem`` limits the numbers. Raises ``InputError``."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {shown(activation)}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, got {shown(flag)}")
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0):
            raise InputError(f"{name} must be a positive number or None, got {shown(number)}")
        if isinstance(number, int) and number > LARGEST:  # perhaps too large for a float, and for a message
            raise InputError(f"{name} must be positive and at most 1e30, got an integer of {number.bit_length()} bits")


def check_options(options: Options) -> None:
    """Check the types of options; ``MoeProblem`` checks what depends on the activation. Raises ``InputError``."""
    flags = {"interleaved": options.interleaved, "batch_invariant": options.batch_invariant}
    check_flags(options.activation, flags, {"alpha": options.alpha, "limit": options.limit})
    check_kernel_name(options.kernel)


def moe_problem_of(
    tensors: Mapping[str, Tensor], options: Options = _DEFAULTS, *, keep_product: bool = False
) -> MoeProblem:
    """Check a call against the contract of ``fused_moe`` and describe it.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    check_options(options)
    activation = options.activation
    check_places(tensors)
    x, up, down, weights, ids = (tensors[name] for name in _REQUIRED)
    _check_axes("x", x, "T, HID")
    tokens, hidden = x.shape
    _check_axes("w_down", down, "E, HID, INTER")
    experts, inter = down.shape[0], down.shape[2]
    if up.dim() == 3 and up.shape[2] == down.shape[1] != hidden:  # the weights agree
        raise InputError(f"x must have the HID of the weights, {down.shape[1]}, got shape [T, HID] = {list(x.shape)}")
    columns = inter
    if up.dim() == 3 and up.shape[2] == hidden:  # w_gate_up gives INTER, as w_down may be transposed
        columns = up.shape[1] // columns_up(1, activation)
    _check_shape("w_down", down, (experts, hidden, inter if down.shape[1] == hidden else columns), "E, HID, INTER")
    if experts * inter * hidden == 0:
        raise InputError(f"w_down must have E, HID and INTER of 1 or more, got shape {list(down.shape)}")
    rows = columns_up(inter, activation)
    up_rows = "2 * INTER" if activation in GATED else "INTER"
    letters = f"E, {up_rows}, HID"
    _check_axes("w_gate_up", up, letters)
    _check_shape("w_gate_up", up, (experts, rows, hidden), letters)
    _check_axes("topk_ids", ids, "T, K")
    top_k = ids.shape[1]
    _check_shape("topk_ids", ids, (tokens, top_k), "T, K")
    _check_shape("topk_weights", weights, (tokens, top_k), "T, K")
    for name, shape, axes in (
        ("bias_gate_up", (experts, rows), f"E, {up_rows}"),
        ("bias_down", (experts, hidden), "E, HID"),
    ):
        if name in tensors:
            _check_shape(name, tensors[name], shape, axes)
            _check_contiguous(name, tensors[name])
    if top_k == 0:
        raise InputError(f"topk_ids must have K of 1 or more, got shape {list(ids.shape)}")
    _check_contiguous("topk_weights", weights)
    _check_contiguous("topk_ids", ids)
    shared, shared_inter = _check_shared(tensors, tokens, hidden, activation)
    return MoeProblem(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        inter=inter,
        dtype=DTYPE_NAMES[x.dtype],
        activation=activation,
        alpha=float(options.alpha or 0.0),
        limit=float(options.limit or 0.0),
        interleaved=options.interleaved,
        bias_gate_up="bias_gate_up" in tensors,
        bias_down="bias_down" in tensors,
        weights_dtype=DTYPE_NAMES[weights.dtype],
        ids_dtype=_ID_NAMES[ids.dtype],
        shared_experts=shared,
        shared_inter=shared_inter,
        shared_weights=DTYPE_NAMES[tensors["shared_weights"].dtype] if "shared_weights" in tensors else "",
        batch_invariant=options.batch_invariant,
        keep_product=keep_product,
        x_strides=x.stride(),
        gate_up_strides=up.stride(),
        down_strides=down.stride(),
        shared_gate_up_strides=tensors["shared_gate_up"].stride() if shared else (),
        shared_down_strides=tensors["shared_down"].stride() if shared else (),
        pointer_alignment=pointer_alignment(tensors),
    )


def pointer_alignment(tensors: Mapping[str, Tensor]) -> int:
    """Return the largest power of two, at most 16, that divides the addresses of x, weights and biases."""
    read = [tensors[name] for name in ("x", *_WITH_DTYPE_OF_X) if name in tensors]
    if any(type(tensor) not in PLAIN for tensor in read):  # fake tensors have no address
        return 16
    return math.gcd(16, *(tensor.data_ptr() for tensor in read))


def call_key(tensors: Mapping[str, Tensor], options: Options) -> tuple[Any, ...]:
    """Return everything that the preparation of a call depends on: options, and the layout of each tensor.

    Raises:
        InputError: a tensor is not dense, or an option has no hash.
        UnsupportedError: a tensor has no memory of its own.
    """
    layouts: list[Any] = []
    name = ""
    try:
        for name in TENSORS:
            tensor = tensors.get(name)
            if tensor is None:
                layouts.append(None)
                continue
            address = tensor.data_ptr() & 15
            layouts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address, tensor.is_neg()))
    except RuntimeError as error:
        check_dense(name, tensors[name])
        raise UnsupportedError(
            "an input has no memory of its own: torch.vmap and other transforms of torch.func are not served here",
            hint="call it without them: tokens of several batches can be one call",
        ) from error
    try:
        hash(options)
    except TypeError as error:
        check_options(options)
        raise InputError(f"options must have a hash, got {tuple(options)!r}") from error
    return (*layouts, options, *map(type, options))  # True is 1, and no number


def check_operator_call(call: MoeCall) -> None:
    """Check what torch's operator of ``fused_moe`` does not.

    With one tensor on meta, torch runs the fake implementation, which reads nothing. The operator's signature converts
    options of another type, or refuses them with a message of its own.

    Raises:
        InputError: a tensor, a device or an option breaks the contract.
        UnsupportedError: a transform of ``torch.func`` differentiates a tensor.
    """
    for name, tensor in call.tensors.items():
        check_operand(name, tensor)
        if name == "topk_ids":
            check_no_bare_subclass(name, tensor)
    check_before_operator(call.tensors, "x")
    check_options(call.options)


def check_gradients_call(do: Tensor, product: Tensor | None, tensors: Mapping[str, Tensor]) -> None:
    """Check the gradient of the output and the first product of a call with ``tensors``.

    Args:
        do: the gradient of the output.
        product: the first product; None: nothing reads it.
        tensors: what ``fused_moe`` was given, by name.

    Raises:
        InputError: a shape, dtype, device or layout differs from what the call made.
    """
    x = tensors["x"]
    _check_like("do", do, tuple(x.shape), x, "T, HID")
    if product is None:
        return
    rows = tensors["topk_ids"].numel(), tensors["w_gate_up"].shape[1]
    _check_like("product", product, rows, x, "T * K, rows of w_gate_up")
    check_not_negative("product", product)
    _check_contiguous("product", product)
    if behind := product.data_ptr() % 16:
        raise InputError(f"product must begin at a multiple of 16 bytes, got an address {behind} bytes behind one")


def _check_like(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor, letters: str) -> None:
    check_dense(name, tensor)
    _check_shape(name, tensor, shape, letters)
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise InputError(f"{name} must be {x.dtype} on {x.device}, got {tensor.dtype} on {tensor.device}")
