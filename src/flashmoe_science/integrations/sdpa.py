"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, served by our kernels.

Source: PyTorch's documentation of the function for its meaning.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.api import flash_attention
from ..attention.inputs import check_flag
from ..errors import InputError
from .arguments import (
    as_bias,
    blame,
    call_by_names,
    check_attended,
    check_dropout,
    check_mask,
    check_scale,
    check_tensor,
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
        query: ``[B, H, Sq, D]`` or ``[H, Sq, D]`` fp16, bf16 or fp32, any strides.
        key: ``[B, H, Sk, D]`` or ``[H, Sk, D]``; with ``enable_gqa`` fewer heads.
        value: ``[B, H, Sk, DV]`` or ``[H, Sk, DV]``.
        attn_mask: boolean, True where a key is seen, or added to the scores; of a shape that expands to
            ``[B, H, Sq, Sk]``, which copies nothing.
        dropout_p: share of the probabilities that are dropped, at least 0 and less than 1, drawn from torch's default
            generator; another draw than PyTorch's. As there, pass 0 where a model is not trained.
        is_causal: row m sees keys up to m (aligned top-left, unlike ``flash_attention``).
        scale: factor on the scores. Default ``D ** -0.5``.
        enable_gqa: let several heads of the query share one of key and value.

    Returns:
        ``[B, H, Sq, DV]`` or ``[H, Sq, DV]``. A row that sees no key is 0.

    Raises:
        InputError: an argument breaks the contract above.
        UnsupportedError: no kernel serves this call.
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_dropout("dropout_p", dropout_p)
    check_scale("scale", scale)
    try:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except Exception:
        blame(_check_tensors, query, key, value, attn_mask)
        raise


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
    if not enable_gqa and key.shape[-3] != query.shape[-3]:
        raise InputError(f"key must have {query.shape[-3]} heads without enable_gqa, got {key.shape[-3]}")
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    if value.shape[-2] != seqlen_k:  # causal, both are cut to the queries
        raise InputError(f"value must have as many keys as key, {seqlen_k}, got {value.shape[-2]}")
    if is_causal and attn_mask is not None:
        raise InputError("attn_mask must be None with is_causal, got both")
    bias = None
    if attn_mask is not None:
        bias = as_bias("attn_mask", attn_mask, (*query.shape[:-1], seqlen_k), query.dtype)
    is_one = query.dim() == 3
    if is_one:
        query, key, value, bias = query[None], key[None], value[None], None if bias is None else bias[None]
    options: dict[str, Any] = {}
    if is_causal and seqlen_q > seqlen_k:
        options["window"] = (-1, seqlen_q - seqlen_k)
    elif is_causal:
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]  # no row sees the keys behind
        options["causal"] = True
    if bias is not None:
        options["bias"] = bias
    o: Tensor = call_by_names(
        flash_attention, _NAMES, query, key, value, softmax_scale=scale, dropout_p=dropout_p, **options
    )
    return o[0] if is_one else o


def _check_tensors(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    _check_attended(query, key, value)
    check_mask("attn_mask", attn_mask, ("query", query))


def _check_attended(query: Any, key: Any, value: Any) -> None:
    check_tensor("query", query)
    if query.dim() not in (3, 4):
        raise InputError(f"query must have 4 dimensions [B, H, Sq, D], or 3 without B, got shape {list(query.shape)}")
    before = "B, " if query.dim() == 4 else ""
    given = {
        "query": (query, f"{before}H, Sq, D"),
        "key": (key, f"{before}HK, Sk, D"),
        "value": (value, f"{before}HK, Sk, DV"),
    }
    check_attended(given, " as query has")
