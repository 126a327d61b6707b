"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, served by our kernels.

Source: PyTorch's documentation of the function for its meaning.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..attention import reference
from ..attention.api import flash_attention
from ..attention.inputs import DTYPE_NAMES, check_flag
from ..errors import InputError
from .arguments import (
    as_bias,
    as_dropout,
    as_scale,
    blame,
    call_by_names,
    check_kinds,
    check_mask,
    check_place,
    check_tensor,
    is_cast_to_one,
    plain,
)

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as ``torch.nn.functional.scaled_dot_product_attention`` does.

    Args:
        query: ``[..., H, Sq, D]`` fp16, bf16, fp32 or fp64, any strides; batch and heads of query, key and value expand
            to one another, and all of them may be left out. fp64 is served by the reference, in plain PyTorch.
        key: ``[..., H, Sk, D]``; with ``enable_gqa`` fewer heads, a number that divides those of query.
        value: ``[..., H, Sk, DV]``; the same.
        attn_mask: boolean, True where a key is seen, or added to the scores; of a shape that expands to
            ``[..., H, Sq, Sk]``, which copies nothing. A mask on the CPU is copied to a GPU. Also a
            ``torch.nn.attention.bias.CausalBias``.
        dropout_p: share of the probabilities that are dropped, from 0 to 1, drawn from torch's default generator;
            another draw than PyTorch's. As there, pass 0 where a model is not trained.
        is_causal: row m sees keys up to m (aligned top-left, unlike ``flash_attention``).
        scale: factor on the scores. Default ``D ** -0.5``.
        enable_gqa: let several heads of the query share one of key and value.

    Returns:
        ``[..., H, Sq, DV]``. A row that sees no key is 0.

    Raises:
        InputError: an argument breaks the contract above.
        UnsupportedError: no kernel serves this call.
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    dropout_p = plain(dropout_p)
    drops_all = type(dropout_p) in (int, float) and dropout_p == 1
    dropout_p = 0.0 if drops_all else as_dropout("dropout_p", dropout_p)
    scale = as_scale("scale", scale)
    try:
        o = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except Exception:
        blame(_check_tensors, query, key, value, attn_mask, enable_gqa)
        raise
    return o.masked_fill(torch.ones((), dtype=torch.bool, device=o.device), 0.0) if drops_all else o


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    check_kinds(query=query, key=key, value=value)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    if value.shape[-2] != seqlen_k:  # causal, both are cut to the queries
        raise InputError(f"value must have as many keys as key, {seqlen_k}, got {value.shape[-2]}")
    if is_causal and attn_mask is not None:
        raise InputError("attn_mask must be None with is_causal, got both")
    most = max(query.dim(), key.dim(), value.dim())
    leading: tuple[int, ...] = query.shape[:-2]  # of the output: batch and heads
    is_plain = most == 4 == query.dim() and query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]
    if not is_plain or (not enable_gqa and query.shape[1] != key.shape[1]):
        query, key, value, leading = _as_batches(query, key, value, enable_gqa=enable_gqa)
        leading = leading[len(leading) - (most - 2) :]
    options: dict[str, Any] = {}
    if type(attn_mask).__name__ == "CausalBias":
        from torch.nn.attention.bias import CausalBias, CausalVariant

        if isinstance(attn_mask, CausalBias):
            sizes = attn_mask.seq_len_q, attn_mask.seq_len_kv
            if sizes != (seqlen_q, seqlen_k):
                raise InputError(f"attn_mask must be of {seqlen_q} queries and {seqlen_k} keys, got {list(sizes)}")
            is_causal = attn_mask.variant == CausalVariant.UPPER_LEFT
            options["causal"] = not is_causal
            attn_mask = None
    if attn_mask is not None:
        if attn_mask.device.type == "cpu":
            attn_mask = attn_mask.to(query.device)
        bias = as_bias("attn_mask", attn_mask, (*leading, seqlen_q, seqlen_k), query.dtype)
        options["bias"] = bias.reshape(*query.shape[:3], seqlen_k)
    if is_causal and seqlen_q > seqlen_k:
        options["window"] = (-1, seqlen_q - seqlen_k)
    elif is_causal:
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]  # no row sees the keys behind
        options["causal"] = True
    attend = _attend_in_fp64 if query.dtype == torch.float64 else flash_attention
    o: Tensor = call_by_names(attend, _NAMES, query, key, value, softmax_scale=scale, dropout_p=dropout_p, **options)
    return o.reshape(*leading, seqlen_q, o.shape[-1]) if len(leading) != 2 else o


def _as_batches(
    query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return all as ``[B, H, S, D]``, and the batch and heads to which theirs expand. Raises ``InputError``."""
    given = [tensor[(None,) * (3 - tensor.dim())] for tensor in (query, key, value)]
    leading = _leading(*(tuple(tensor.shape) for tensor in given), enable_gqa=enable_gqa)
    heads = given[0].shape[-3], given[1].shape[-3], given[2].shape[-3]
    if enable_gqa:
        shared = math.lcm(heads[1], heads[2])
        given[1:] = (
            x if x.shape[-3] in (0, shared) else x.repeat_interleave(shared // x.shape[-3], -3) for x in given[1:]
        )
        own = [heads[0], shared, shared]
    else:
        own = [leading[-1], *([1, 1] if heads[1] == heads[2] == 1 else [leading[-1]] * 2)]
    batch = math.prod(leading[:-1])
    q, k, v = (
        x.expand(*leading[:-1], h, *x.shape[-2:]).reshape(batch, h, *x.shape[-2:])
        for x, h in zip(given, own, strict=True)
    )
    return q, k, v, leading


def _leading(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *, enable_gqa: bool
) -> tuple[int, ...]:
    """Return batch and heads to which those of the three shapes expand; with ``enable_gqa`` heads are query's."""
    found = query[:-2]
    for name, shape in (("key", key), ("value", value)):
        its = shape[:-2]
        if enable_gqa:
            if its[-1] != query[-3] and (not its[-1] or query[-3] % its[-1]):
                divides = f"a number of heads that divides those of query, {query[-3]}"
                raise InputError(f"{name} must have {divides}, got {its[-1]}")
            its = (*its[:-1], query[-3])
        try:
            found = tuple(torch.broadcast_shapes(found, its))  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise InputError(
                f"{name} must have batch and heads that expand with {[*found]}, got {[*shape[:-2]]}",
                hint="" if enable_gqa else "enable_gqa=True lets heads of query share those of key and value",
            ) from None
    return found


def _attend_in_fp64(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float | None, dropout_p: float, **options: Any
) -> Tensor:
    """Attend by the reference, which autograd goes through."""
    _check_tensors(query, key, value, options.get("bias"), enable_gqa=True)
    seed = torch.randint(2**62, (2,), device=query.device) if dropout_p else None
    o, _ = reference.attention(
        query, key, value, softmax_scale=softmax_scale, dropout_p=dropout_p, dropout_seed=seed, **options
    )
    return o


def _check_tensors(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> None:
    first = ("query", query)
    for name, tensor in (first, ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() < 2:
            raise InputError(f"{name} must have 2 dimensions [S, D] or more, got shape {list(tensor.shape)}")
        if tensor.dtype not in (*DTYPE_NAMES, torch.float64):
            raise InputError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.dtype is not query.dtype and not is_cast_to_one(tensor, query):
            raise InputError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")
        check_place(name, tensor, first)
        if not tensor.shape[-1]:
            raise InputError(f"{name} must have D of 1 or more, got shape {list(tensor.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise InputError(f"key must have as many columns as query, {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise InputError(f"value must have as many keys as key, {key.shape[-2]}, got {value.shape[-2]}")
    shapes = ((*(1,) * (3 - tensor.dim()), *tensor.shape) for tensor in (query, key, value))
    _leading(*shapes, enable_gqa=enable_gqa)
    if type(attn_mask).__name__ == "CausalBias":  # it has no elements
        return
    check_kinds(attn_mask=attn_mask)
    if isinstance(attn_mask, Tensor) and attn_mask.device.type == "cpu":  # it is copied
        first = ("query", attn_mask)
    if not (isinstance(attn_mask, Tensor) and attn_mask.dtype == query.dtype == torch.float64):
        check_mask("attn_mask", attn_mask, first)
