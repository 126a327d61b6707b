"""What callers pass: checked against the contract, and described as a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from ..gpu.refusals import check_dense, check_not_negative
from ..gpu.subclasses import is_untraced
from .problem import ACTIVATIONS, GATED, LARGEST, MoeProblem, columns_up

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ID_NAMES = {torch.int32: "i32", torch.int64: "i64"}
_forward_ad = torch.autograd.forward_ad
# In the order of ``fused_moe``.
TENSORS = (
    "x", "w_gate_up", "w_down", "topk_weights", "topk_ids",
    "bias_gate_up", "bias_down", "shared_gate_up", "shared_down", "shared_weights",
)  # fmt: skip
_REQUIRED, _OPTIONAL = TENSORS[:5], TENSORS[5:]
_WITH_DTYPE_OF_X = ("w_gate_up", "w_down", "bias_gate_up", "bias_down", "shared_gate_up", "shared_down")


def check_are_tensors(given: Mapping[str, object]) -> None:
    """Raise ``InputError`` unless what is needed is a tensor, and what is optional is a tensor or None."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            continue
        if tensor is not None or name not in _OPTIONAL:
            wanted = "a torch.Tensor or None" if name in _OPTIONAL else "a torch.Tensor"
            raise InputError(f"{name} must be {wanted}, got {type(tensor).__name__}")


def cast_under_autocast(given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return x, weights and biases of fp32 in the dtype of the region of autocast, where there is one."""
    x = given["x"]
    if x is None or not (x.is_cuda or x.is_cpu):
        return given
    device = "cuda" if x.is_cuda else "cpu"  # every call comes here: to ask for the name of its device takes longer
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


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ``InputError`` unless all tensors are on one device that is served."""
    x = tensors["x"]
    assert x is not None
    if is_untraced(x) and x.device.type not in ("cpu", "cuda"):
        raise InputError(f"x must be on a CUDA device or the CPU, got {x.device}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise InputError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")


def check_places(tensors: Mapping[str, Tensor]) -> None:
    """Check dtypes and devices. Raises ``InputError``."""
    check_devices(tensors)
    x = tensors["x"]
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        if name == "topk_ids":
            if tensor.dtype not in _ID_NAMES:
                raise InputError(f"topk_ids must be int32 or int64, got {tensor.dtype}")
        elif tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if name in _WITH_DTYPE_OF_X and tensor.dtype != x.dtype:
            raise InputError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
        check_not_negative(name, tensor)


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
    """Check the options that are no tensors; ``MoeProblem`` says how large numbers may be."""
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


def moe_problem_of(
    tensors: Mapping[str, Tensor],
    *,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    batch_invariant: bool = False,
    keep_product: bool = False,
) -> MoeProblem:
    """Check the arguments against the contract of ``fused_moe`` and describe the call.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    check_flags(
        activation,
        {"interleaved": interleaved, "batch_invariant": batch_invariant},
        {"alpha": alpha, "limit": limit},
    )
    check_places(tensors)
    x, up, down, weights, ids = (tensors[name] for name in _REQUIRED)
    _check_axes("x", x, "T, HID")
    tokens, hidden = x.shape
    _check_axes("w_down", down, "E, HID, INTER")
    experts, inter = down.shape[0], down.shape[2]
    columns = inter
    if up.dim() == 3 and up.shape[2] == hidden:  # else it is what w_down says, which may be transposed
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
        alpha=float(alpha or 0.0),
        limit=float(limit or 0.0),
        interleaved=interleaved,
        bias_gate_up="bias_gate_up" in tensors,
        bias_down="bias_down" in tensors,
        weights_dtype=DTYPE_NAMES[weights.dtype],
        ids_dtype=_ID_NAMES[ids.dtype],
        shared_experts=shared,
        shared_inter=shared_inter,
        shared_weights=DTYPE_NAMES[tensors["shared_weights"].dtype] if "shared_weights" in tensors else "",
        batch_invariant=batch_invariant,
        keep_product=keep_product,
        x_strides=x.stride(),
        gate_up_strides=up.stride(),
        down_strides=down.stride(),
        shared_gate_up_strides=tensors["shared_gate_up"].stride() if shared else (),
        shared_down_strides=tensors["shared_down"].stride() if shared else (),
        pointer_alignment=pointer_alignment(tensors),
    )


def pointer_alignment(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes by which the addresses of x, weights and biases are multiples, 16 at the most."""
    read = [tensors[name] for name in ("x", *_WITH_DTYPE_OF_X) if name in tensors]
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in read):  # fake tensors have no address
        return 16
    return math.gcd(16, *(tensor.data_ptr() for tensor in read))


def layout_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return all that a prepared call depends on: not what lies in the tensor, and of where it lies the alignment."""
    if tensor is None:
        return None
    try:
        address = tensor.data_ptr() & 15
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address, tensor.is_neg()
    except RuntimeError as error:
        check_dense("every tensor", tensor)
        raise UnsupportedError(
            "an input has no memory of its own: torch.vmap and other transforms of torch.func are not served here",
            hint="call it without them: tokens of several batches can be one call",
        ) from error


def refuse_tangents(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise ``UnsupportedError`` where an input has a tangent that the call would lose."""
    if _forward_ad._current_level < 0:  # noqa: SLF001 - the public way asks tensor by tensor
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and _forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise UnsupportedError(f"{name} has a forward-mode tangent, and there is no forward-mode derivative")
