"""What callers pass: checked against the contract, and described as a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from ..gpu.device import gpu_of as gpu_of  # noqa: PLC0414 - callers of this module take it from here
from ..gpu.refusals import check_dense, check_not_negative
from .problem import AttentionProblem, canonical_strides, check_share

_LARGEST_FP64 = (2 - 2.0**-52) * 2.0**1023
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> AttentionProblem:
    """Check the arguments against the contract of ``flash_attention`` and describe the call.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    check_flag("return_lse", return_lse)
    check_tensors({"q": q, "k": k, "v": v}, "B, H, S, D")
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    check_shape("k", k, (batch, heads_kv, seqlen_k, head_dim), "B, HK, Sk, D")
    check_shape("v", v, (batch, heads_kv, seqlen_k, v.shape[3]), "B, HK, Sk, DV")
    check_optional(sinks=sinks, alibi=alibi, bias=bias, dropout_seed=dropout_seed)
    dropout_p = check_dropout(dropout_p)
    if dropout_p:
        check_dropout_seed(dropout_seed, q)
    features = describe_heads(q, batch, heads, sinks=sinks, alibi=alibi)
    if bias is not None:
        features |= describe_bias(q, bias, (batch, heads, seqlen_q, seqlen_k), "Sq, Sk")
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=DTYPE_NAMES[q.dtype],
        causal=causal,
        softmax_scale=check_options(causal, softmax_scale),
        return_lse=return_lse,
        q_strides=canonical_strides(q.shape, q.stride()),
        k_strides=canonical_strides(k.shape, k.stride()),
        v_strides=canonical_strides(v.shape, v.stride()),
        pointer_alignment=pointer_alignment(q, k, v),
        window=check_window(window),
        softcap=check_softcap(softcap),
        dropout_p=dropout_p,
        **features,
    )


def check_tensors(tensors: Mapping[str, object], letters: str) -> None:
    """Check q, k and v: kind, axes (``letters``), dtype and device. Raises ``InputError``."""
    axes = letters.count(",") + 1
    q = tensors["q"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not isinstance(q, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.dim() != axes:
            raise InputError(f"{name} must have {axes} dimensions [{letters}], got shape {list(tensor.shape)}")
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
        check_place(name, tensor, q)
        if q.device.type not in ("cpu", "cuda"):
            raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")


def check_place(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise ``InputError`` unless a tensor is where q is, and its memory holds its elements and not their negatives."""
    check_dense(name, tensor)
    check_not_negative(name, tensor)
    if tensor.device != q.device:
        raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    """Raise ``InputError`` unless ``tensor`` has the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise InputError(f"{name} must have shape [{letters}] = {list(expected)}, got {list(tensor.shape)}")


def check_flag(name: str, flag: object) -> None:
    """Raise ``InputError`` unless ``flag`` is True or False."""
    if not isinstance(flag, bool):
        raise InputError(f"{name} must be True or False, got {shown(flag)}")


def check_options(causal: object, softmax_scale: object) -> float | None:
    """Return the scale as a float, or None. Raises ``InputError``."""
    check_flag("causal", causal)
    return None if softmax_scale is None else _check_number("softmax_scale", softmax_scale, "a number or None")


def _check_number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")
    if abs(value) > _LARGEST_FP64 and value not in (math.inf, -math.inf):
        raise InputError(f"{name} must be finite in fp32, got an integer beyond fp64")
    return float(value)  # AttentionProblem says how large it may be


def check_window(window: object) -> tuple[int, int]:
    """Return the window as a pair. Raises ``InputError``."""
    if isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n < 2**63 for n in window):
        return window[0], window[1]  # AttentionProblem says how small they may be
    raise InputError(f"window must be two integers (left, right), -1 for no bound, got {shown(window)}")


def check_softcap(softcap: object) -> float:
    """Return the softcap as a float. Raises ``InputError``."""
    return _check_number("softcap", softcap, "a number, 0 for none")


def check_dropout(dropout_p: object) -> float:
    """Return the share that is dropped as a float; a seed is drawn only after this. Raises ``InputError``."""
    share = _check_number("dropout_p", dropout_p, "a number, 0 for no dropout")
    check_share(share)
    return share


def check_dropout_seed(dropout_seed: Tensor | None, q: Tensor) -> None:
    """Raise ``InputError`` unless it is None, or a seed and an offset where q is."""
    if dropout_seed is None:
        return
    if dropout_seed.dtype != torch.int64:
        raise InputError(f"dropout_seed must be int64, got {dropout_seed.dtype}")
    check_shape("dropout_seed", dropout_seed, (2,), "seed, offset")
    if not dropout_seed.is_contiguous():
        raise InputError(f"dropout_seed must be contiguous, got strides {list(dropout_seed.stride())}")
    check_place("dropout_seed", dropout_seed, q)


def seed_of_call(dropout_p: float, dropout_seed: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the seed and offset of a call, None where there is no dropout; drawn, without waiting, if not given.

    By a function of torch and outside of our operators, so what replays its generator replays the mask.
    """
    if dropout_p == 0:
        return None
    if dropout_seed is not None:
        return dropout_seed
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


def refuse_undrawn(dropout_p: float, dropout_seed: Tensor | None) -> None:
    """Raise ``InputError`` where an operator would draw its seed: its backward pass could not know it."""
    if dropout_p and dropout_seed is None:
        raise InputError(f"dropout_seed must be given to the operator where dropout_p is {dropout_p}, got None")


def describe_heads(q: Tensor, batch: int, heads: int, *, sinks: Tensor | None, alibi: Tensor | None) -> dict[str, Any]:
    """Check sinks and slopes, and return them as fields of a problem. Raises ``InputError``."""
    found: dict[str, Any] = {}
    if sinks is not None:
        found["sinks"] = _check_heads("sinks", sinks, q)
        check_shape("sinks", sinks, (heads,), "H")
    if alibi is not None:
        found["alibi"] = _check_heads("alibi", alibi, q)
        if alibi.shape not in ((heads,), (batch, heads)):
            expected = f"[H] = {[heads]} or [B, H] = {[batch, heads]}"
            raise InputError(f"alibi must have shape {expected}, got {list(alibi.shape)}")
        found["alibi_stride"] = alibi.stride(0) if alibi.dim() == 2 and batch > 1 else 0
    return found


def _check_heads(name: str, tensor: Tensor, q: Tensor) -> str:
    """Check a tensor with one number a head, and return the name of its dtype."""
    _check_dtype(name, tensor)
    check_place(name, tensor, q)
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must be contiguous along its last axis, got stride {tensor.stride(-1)}")
    return DTYPE_NAMES[tensor.dtype]


def check_optional(**tensors: object) -> None:
    """Raise ``InputError`` unless each is a tensor or None."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")


def describe_bias(q: Tensor, bias: Tensor, shape: tuple[int, int, int, int], letters: str) -> dict[str, Any]:
    """Check a bias, and return it as fields of a problem; ``letters`` name the last two axes. Raises ``InputError``."""
    _check_dtype("bias", bias)
    check_place("bias", bias, q)
    fits = bias.dim() == 4 and tuple(bias.shape[2:]) == shape[2:]
    if not fits or bias.shape[0] not in (1, shape[0]) or bias.shape[1] not in (1, shape[1]):
        expected = f"[B or 1, H or 1, {letters}] = [{shape[0]} or 1, {shape[1]} or 1, {shape[2]}, {shape[3]}]"
        raise InputError(f"bias must have shape {expected}, got {list(bias.shape)}")
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True))
    return {"bias": DTYPE_NAMES[bias.dtype], "bias_strides": strides, "bias_alignment": pointer_alignment(bias)}


def pointer_alignment(*tensors: Tensor) -> int:
    """Return the bytes by which all addresses are multiples, 16 at the most."""
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):  # fake tensors have no address
        return 16
    return math.gcd(16, *(tensor.data_ptr() for tensor in tensors))


def layout_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return all that a plan and a prepared launch depend on, but the address."""
    if tensor is None:
        return None
    try:
        address = tensor.data_ptr() & 15 if tensor.device.type != "meta" else 0
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address, tensor.is_neg()
    except RuntimeError as error:
        check_dense("every tensor", tensor)
        raise UnsupportedError(
            "an input has no memory of its own: torch.vmap and other transforms of torch.func are not served here",
            hint="call it without them: a batch is an axis of its own",
        ) from error


def cast_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return those of q, k and v that are fp32 in the dtype of the region of autocast, where there is one."""
    if torch.float32 not in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in (q, k, v))
    return q, k, v
