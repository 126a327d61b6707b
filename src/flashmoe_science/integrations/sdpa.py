"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``, served by our kernels.

Source: PyTorch's documentation of the function for its meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.api import flash_attention
from ..errors import InputError


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
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() not in (3, 4) or tensor.dim() != query.dim():
            raise InputError(
                f"{name} must have 4 dimensions [B, H, S, D], or all have 3, got shape {list(tensor.shape)}"
            )
    if query.dim() == 3:
        mask = attn_mask[None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        return scaled_dot_product_attention(
            query[None], key[None], value[None], mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise InputError(f"key must have {query.shape[1]} heads without enable_gqa, got {key.shape[1]}")
    if is_causal and attn_mask is not None:
        raise InputError("attn_mask must be None with is_causal, got both")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {}
    if is_causal and seqlen_q > seqlen_k:
        options["window"] = (-1, seqlen_q - seqlen_k)
    elif is_causal:
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]  # no row sees the keys behind
        options["causal"] = True
    if attn_mask is not None:
        options["bias"] = as_bias(attn_mask, (*query.shape[:3], seqlen_k), query.dtype)
    o: Tensor = flash_attention(query, key, value, softmax_scale=scale, dropout_p=dropout_p, **options)
    return o


def as_bias(mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to scores of ``shape``, expanded without a copy. Raises ``InputError``."""
    if not isinstance(mask, Tensor):
        raise InputError(f"attn_mask must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise InputError(f"attn_mask must expand to {list(shape)}, got {list(mask.shape)}") from None
