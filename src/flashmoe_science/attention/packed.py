"""Packed sequences: what callers pass, checked against the contract, and described as a problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .inputs import (
    DTYPE_NAMES,
    check_dropout_seed,
    check_shape,
    check_tensors,
    describe_heads,
    layout_of,
    pointer_alignment,
)
from .problem import AttentionProblem


def planned_length(name: str, length: object) -> int:
    """Round a longest length up, so that few plans serve all batches: to a power of two, or a multiple of 128.

    Programs behind the end of a sequence leave at once, and no loop is bounded by it. Raises ``InputError``.
    """
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {length!r}")
    if length <= 128 or name == "max_seqlen_k":
        return min(1 << (length - 1).bit_length(), 2**31 - 1) if length > 1 else length
    return min(-(-length // 128) * 128, 2**31 - 1)


def packed_problem(
    tensors: dict[str, Any], lengths: tuple[int, int], *, return_lse: bool, **options: Any
) -> AttentionProblem:
    """Check the tensors against the contract and describe the call. Raises ``InputError``."""
    q, k, v = (tensors[name] for name in "qkv")
    check_tensors({"q": q, "k": k, "v": v}, "T, H, D")
    (_, heads, head_dim), heads_kv = q.shape, k.shape[1]
    check_shape("k", k, (k.shape[0], heads_kv, head_dim), "Tk, HK, D")
    check_shape("v", v, (k.shape[0], heads_kv, v.shape[2]), "Tk, HK, DV")
    batch = _check_integers("cu_seqlens_q", tensors["cu_seqlens_q"], q) - 1
    if batch < 0:
        raise InputError("cu_seqlens_q must have shape [B + 1], so at least one element, got []")
    for name, size in (("cu_seqlens_k", batch + 1), ("seqused_q", batch), ("seqused_k", batch)):
        tensor = tensors[name]
        if tensor is not None and _check_integers(name, tensor, q) != size:
            letters = "B + 1" if name == "cu_seqlens_k" else "B"
            raise InputError(f"{name} must have shape [{letters}] = [{size}], got {list(tensor.shape)}")
    check_dropout_seed(tensors["dropout_seed"], q)
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        head_dim=head_dim,
        head_dim_v=v.shape[2],
        dtype=DTYPE_NAMES[q.dtype],
        return_lse=return_lse,
        q_strides=_packed_strides(q),
        k_strides=_packed_strides(k),
        v_strides=_packed_strides(v),
        pointer_alignment=pointer_alignment(q, k, v),
        packed=True,
        seqused="".join(side for side in "qk" if tensors[f"seqused_{side}"] is not None),
        **options,
        **describe_heads(q, batch, heads, sinks=tensors["sinks"], alibi=tensors["alibi"]),
    )


def _packed_strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of ``[B, H, S, D]``; that of tokens also where there is one: their number decides nothing."""
    token, head, column = tensor.stride()
    return 0, head if tensor.shape[1] > 1 else 0, token, column if tensor.shape[2] > 1 else 1


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> int:
    """Check a vector of lengths and return its size."""
    if tensor.dtype != torch.int32:
        raise InputError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InputError(
            f"{name} must have 1 dimension and be contiguous, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )
    if tensor.device != q.device:
        raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    return tensor.shape[0]


def layout_of_tokens(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return ``layout_of`` but for the number of tokens, which decides nothing."""
    layout = layout_of(tensor)
    return layout and (layout[0][1:], len(layout[0]), *layout[1:])
