"""``flash_attn_with_kvcache`` of flash-attn 2.8, served by ``flash_attention_with_kv_cache``.

Tensors are as in flash-attn, and no copies are made. Not as there: pages hold any number of positions, not multiples of
256; dtypes and head dimensions are those of ours; rows that see no key have an LSE of -inf, there +inf.

Source: flash_attn/flash_attn_interface.py of flash-attn 2.8 for the signature.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.cache_api import flash_attention_with_kv_cache
from ..errors import InputError


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append k and v ``[B, Sn, HK, D]`` to the caches and attend q ``[B, Sq, H, D]`` to them.

    Caches are ``[B, S, HK, D]``, or ``[pages, page_size, HK, D]`` with ``block_table`` ``[B, P]``. See
    ``flash_attention_with_kv_cache``; its names for what is called otherwise here: ``page_table``, ``leftpad_k``,
    ``window``, ``alibi``, ``return_lse``.

    Returns:
        o ``[B, Sq, H, D]``; with ``return_softmax_lse`` the pair of o and lse ``[B, H, Sq]``.
    """
    given: tuple[tuple[str, Any], ...] = (("q", q), ("k", k), ("v", v))
    for name, tensor in given:
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() != 4):
            raise InputError(f"{name} must be a torch.Tensor [B, S, H, D], got {getattr(tensor, 'shape', tensor)}")
    result = flash_attention_with_kv_cache(
        q.transpose(1, 2),
        k_cache,
        v_cache,
        None if k is None else k.transpose(1, 2),
        None if v is None else v.transpose(1, 2),
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi=alibi_slopes,
        softmax_scale=softmax_scale,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    return (result[0].transpose(1, 2), result[1]) if return_softmax_lse else result.transpose(1, 2)
