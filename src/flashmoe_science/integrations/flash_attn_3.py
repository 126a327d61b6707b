"""The functions of FlashAttention-3's ``flash_attn_interface``, served by our kernels.

``import flashmoe_science.integrations.flash_attn_3 as flash_attn_interface`` serves code that calls them. What is not
served raises ``UnsupportedError`` by name. Options that tune FlashAttention-3's kernels change nothing here:
``pack_gqa``, ``deterministic``, ``scheduler_metadata``, and ``num_splits`` without a cache. Descales are scales of fp8
caches; where nothing is fp8 they are checked and mean nothing, as there. Rows that see no key have an LSE of -inf,
there +inf.

Source: hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 0251105 for the signatures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.api import flash_attention
from ..attention.checks import DTYPE_NAMES
from ..attention.decode.api import flash_attention_with_kv_cache
from ..attention.decode.merge import merge_attention_states
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, UnsupportedError, shown
from .arguments import (
    as_flag,
    as_scale,
    as_softcap,
    as_window,
    blames_tensors,
    call_by_names,
    check_count,
    check_descales,
    check_kinds,
    contiguous_columns,
    described,
    forward_only,
    is_fp8,
    plain,
    refuse_fp8,
    refuse_given,
    require_usual,
    write_out,
)

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_CACHE_NAMES = {
    "leftpad_k": "cache_leftpad", "seqused_k": "cache_seqlens", "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip


@blames_tensors
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend ``q`` ``[B, Sq, H, D]`` to ``k`` and ``v`` ``[B, Sk, HK, D]``; see ``flash_attention``.

    Returns:
        o ``[B, Sq, H, DV]``; with ``return_attn_probs`` the pair of o and lse ``[B, H, Sq]`` fp32.
    """
    refuse_given(qv=qv)
    options = _options(softmax_scale, causal, window_size, softcap)
    _check_tuning(attention_chunk, num_splits, pack_gqa, deterministic, sm_margin)
    _refuse_scaled((q, k, v), q_descale, k_descale, v_descale)
    return_lse = as_flag("return_attn_probs", return_attn_probs)
    check_kinds(q=q, k=k, v=v)
    q, k, v = _turned(q=q, k=k, v=v)
    result = flash_attention(q, k, v, return_lse=return_lse, **options)
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


@blames_tensors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend packed sequences ``[T, H, D]``; see ``flash_attention_varlen``.

    Returns:
        o ``[Tq, H, DV]``; with ``return_attn_probs`` the pair of o and lse ``[H, Tq]`` fp32.
    """
    refuse_given(qv=qv)
    options = _options(softmax_scale, causal, window_size, softcap)
    _check_tuning(attention_chunk, num_splits, pack_gqa, deterministic, sm_margin)
    _refuse_scaled((q, k, v), q_descale, k_descale, v_descale)
    check_kinds(q=q, k=k, v=v)
    return flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, plain(max_seqlen_q), plain(max_seqlen_k), seqused_q=seqused_q,
        seqused_k=seqused_k, return_lse=as_flag("return_attn_probs", return_attn_probs), **options,
    )  # fmt: skip


@blames_tensors
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint keys; see ``merge_attention_states``.

    Args:
        out_partial: ``[splits, B, S, H, D]`` fp32.
        lse_partial: ``[splits, B, S, H]`` fp32.
        out: where o is written, in the dtype that is asked for.
        out_dtype: of o. Default: fp32.

    Returns:
        o ``[B, S, H, D]`` and lse ``[B, S, H]`` fp32.
    """
    given: tuple[tuple[str, Any, int], ...] = (("out_partial", out_partial, 5), ("lse_partial", lse_partial, 4))
    for name, tensor, axes in given:
        check_kinds(**{name: tensor})
        if not isinstance(tensor, Tensor) or tensor.dim() != axes or tensor.dtype != torch.float32:
            raise InputError(f"{name} must be a float32 tensor of {axes} dimensions, got {described(tensor)}")
    if out_dtype not in (None, *DTYPE_NAMES):
        raise InputError(f"out_dtype must be None, float16, bfloat16 or float32, got {shown(out_dtype)}")
    names = {"outs": "out_partial", "lses": "lse_partial"}
    o, lse = call_by_names(merge_attention_states, names, out_partial.transpose(2, 3), lse_partial.transpose(2, 3))
    o = o.transpose(1, 2).to(out_dtype or torch.float32)
    found: tuple[Tensor, Tensor] = write_out(out, (o, lse.transpose(1, 2)))
    return found


@blames_tensors
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,  # noqa: ARG001 - kernels plan on the device
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append k and v ``[B, Sn, HK, D]`` to the caches and attend q ``[B, Sq, H, D]`` to them.

    Caches are ``[B, S, HK, D]``, or ``[pages, page_size, HK, D]`` with ``page_table`` ``[B, P]``. See
    ``flash_attention_with_kv_cache``. With ``cu_seqlens_q`` q is packed, ``[Tq, H, D]``: over pages, without new keys
    (``flash_attention_varlen``). Any ``num_splits`` but 0 gives a sequence the same bits whatever else is in the batch.

    Caches of fp8 have queries and new keys of 16 bits. ``k_descale`` and ``v_descale`` ``[B, HK]`` fp32 are their
    scales: one for all sequences, expanded along B; or one for each, over contiguous caches without new keys.

    With ``qv`` ``[B, Sq, H, DV]`` scores are ``q . k + qv . v`` (MLA): where each row of
    ``v_cache`` lies right before that of ``k_cache``, in one tensor.

    Returns:
        o in the shape of q with DV columns; with ``return_softmax_lse`` the pair of o and lse ``[B, H, Sq]``, packed
        ``[H, Tq]``.
    """
    refuse_given(cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
    options = _options(softmax_scale, causal, window_size, softcap)
    _check_tuning(attention_chunk, num_splits, pack_gqa, False, sm_margin)  # noqa: FBT003 - there is no such option
    options["return_lse"] = return_lse = as_flag("return_softmax_lse", return_softmax_lse)
    check_kinds(q=q, k=k, v=v, qv=qv)
    refuse_fp8("queries of 16 bits are served over fp8 caches", q=q)
    check_descales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "qv": qv}
    if cu_seqlens_q is not None:
        only_dense = {
            "k": k, "v": v, "qv": qv, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
            "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
        }  # fmt: skip
        _refuse_with_packed(only_dense, page_table, cache_seqlens, max_seqlen_q)
        refuse_fp8("pass queries [B, Sq, H, D]", k_cache=k_cache, v_cache=v_cache)
        assert page_table is not None
        _check_axes("k_cache", k_cache, "pages, page_size, HK, D")
        _check_axes("page_table", page_table, "B, P")
        most_queries: Any = plain(max_seqlen_q)
        longest = page_table.shape[-1] * k_cache.shape[1]
        return forward_only(
            "a cache", given,
            lambda: call_by_names(
                flash_attention_varlen, {"seqused_k": "cache_seqlens", "k": "k_cache", "v": "v_cache"},
                contiguous_columns(q), k_cache, v_cache, cu_seqlens_q, cu_seqlens_q, most_queries, longest,
                seqused_k=cache_seqlens, page_table=page_table, num_splits=plain(num_splits),
                batch_invariant=plain(num_splits) > 0, **options,
            ),
        )  # fmt: skip
    if is_fp8(k_cache) or is_fp8(v_cache):
        refuse_given(q_descale=q_descale, qv=qv)
        can_differ = page_table is None and cache_batch_idx is None and k is None
        options["k_scale"] = _scale("k_descale", k_descale, q, k_cache, can_differ=can_differ)
        options["v_scale"] = _scale("v_descale", v_descale, q, v_cache, can_differ=can_differ)
    if qv is not None:
        q, k_cache, v_cache = _absorbed(q, qv, k_cache, v_cache)
    queries, new_k, new_v = _turned(q=q, k=k, v=v)
    result = forward_only(
        "a cache", given,
        lambda: call_by_names(
            flash_attention_with_kv_cache, _CACHE_NAMES, queries, k_cache, v_cache, new_k, new_v,
            cache_seqlens=cache_seqlens, page_table=contiguous_columns(page_table),
            cache_batch_idx=contiguous_columns(cache_batch_idx), leftpad_k=cache_leftpad, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=as_flag("rotary_interleaved", rotary_interleaved),
            num_splits=plain(num_splits), **options,
        ),
    )  # fmt: skip
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


def _options(softmax_scale: object, causal: object, window_size: object, softcap: object) -> dict[str, Any]:
    return {
        "softmax_scale": as_scale("softmax_scale", softmax_scale),
        "causal": as_flag("causal", causal),
        "window": as_window("window_size", window_size),
        "softcap": as_softcap("softcap", softcap),
    }


def _check_tuning(
    attention_chunk: object, num_splits: object, pack_gqa: object, deterministic: object, sm_margin: object
) -> None:
    """Check what changes nothing here, and refuse what would change something."""
    require_usual(0, attention_chunk=attention_chunk, sm_margin=sm_margin)
    check_count("num_splits", plain(num_splits))
    as_flag("pack_gqa", pack_gqa)
    as_flag("deterministic", deterministic)


def _refuse_scaled(
    attended: tuple[Tensor, Tensor, Tensor], q_descale: object, k_descale: object, v_descale: object
) -> None:
    """Refuse inputs of fp8, and check descales, which mean nothing for others."""
    check_descales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    q, k, v = attended
    refuse_fp8("flash_attn_with_kvcache serves fp8 caches, with queries of 16 bits", q=q, k=k, v=v)


def _scale(name: str, descale: Tensor | None, q: Any, cache: Any, *, can_differ: bool) -> Tensor | None:
    """Return the scales of an fp8 cache: one for each head, or with ``can_differ`` one for each sequence too."""
    if descale is None or any(not isinstance(x, Tensor) or x.dim() != 4 for x in (q, cache)):
        return None  # the call refuses other shapes
    batch = q.shape[0]
    if tuple(descale.shape) != (batch, cache.shape[2]):
        raise InputError(f"{name} must have shape [B, HK] = {[batch, cache.shape[2]]}, got {list(descale.shape)}")
    if not batch:
        return None
    if batch == 1 or descale.stride(0) == 0:
        return descale[0]
    if not can_differ:
        raise UnsupportedError(
            f"{name} of each sequence is served over contiguous caches alone, without new keys and cache_batch_idx",
            hint=f"one scale for each head serves all caches: {name}.expand(B, HK) of [1, HK]",
        )
    return descale[:, None].expand(batch, cache.shape[1], cache.shape[2])


def _turned(**given: Any) -> list[Any]:
    """Return tensors ``[B, S, H, D]`` as ``[B, H, S, D]``. Raises ``InputError``."""
    for name, tensor in given.items():
        if tensor is not None:
            _check_axes(name, tensor, "B, S, H, D")
    return [None if tensor is None else contiguous_columns(tensor).transpose(1, 2) for tensor in given.values()]


def _check_axes(name: str, tensor: object, letters: str) -> None:
    """Raise ``InputError`` unless it is a tensor with as many axes as there are letters."""
    axes = letters.count(",") + 1
    if not isinstance(tensor, Tensor) or tensor.dim() != axes:
        raise InputError(f"{name} must be a torch.Tensor of {axes} dimensions [{letters}], got {described(tensor)}")


def _refuse_with_packed(
    only_dense: dict[str, Any], page_table: object, cache_seqlens: object, max_seqlen_q: object
) -> None:
    for name, value in only_dense.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not served with cu_seqlens_q", hint="pass queries [B, Sq, H, D]")
    if not isinstance(page_table, Tensor):
        raise UnsupportedError("cu_seqlens_q is served with a page_table only", hint="pass queries [B, Sq, H, D]")
    if not isinstance(cache_seqlens, Tensor):
        raise InputError(f"cache_seqlens must be a tensor with cu_seqlens_q, got {shown(cache_seqlens)}")
    if max_seqlen_q is None:
        raise InputError("max_seqlen_q must be a number with cu_seqlens_q, got None")


def _absorbed(q: Any, qv: Any, k_cache: Any, v_cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and caches of ``q . k + qv . v`` as of one product, where values and keys lie in one row."""
    for name, tensor in (("q", q), ("qv", qv)):
        _check_axes(name, tensor, "B, Sq, H, D")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_axes(name, tensor, "B or pages, positions, HK, D")
    columns = v_cache.shape[3]
    expected = [*q.shape[:3], columns]
    if [*qv.shape] != expected:
        raise InputError(f"qv must have shape [B, Sq, H, DV] = {expected}, got {list(qv.shape)}")
    side_by_side = (
        k_cache.stride() == v_cache.stride()
        and k_cache.shape[:3] == v_cache.shape[:3]
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        and k_cache.storage_offset() == v_cache.storage_offset() + columns
    )
    if not side_by_side:
        raise UnsupportedError(
            "qv is served where k_cache and v_cache are columns of one tensor, values first",
            hint="as of MLA: cache[..., 512:] and cache[..., :512]",
        )
    both = v_cache.as_strided((*v_cache.shape[:3], columns + k_cache.shape[3]), v_cache.stride())
    return torch.cat([qv, q], -1), both, both[..., :columns]
