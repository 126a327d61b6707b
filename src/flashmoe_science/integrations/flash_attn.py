"""The functions of flash-attn 2.8, served by our kernels.

``import flashmoe_science.integrations.flash_attn as flash_attn`` serves code that calls them. What is not served raises
``UnsupportedError`` by name. Tensors are ``[B, S, H, D]``, packed ``[T, H, D]``, as in flash-attn; no copies are made,
but of caches whose columns are not contiguous. Options may be scalars of numpy and torch, whose value is read at once.

``__version__`` is that of flash-attn whose functions these are, for code that asks for it.

Not as in flash-attn: rows that see no key have an LSE of -inf, there +inf. ``deterministic`` changes nothing: results
have the same bits in every run. ``dropout_p`` drops other probabilities after the same seed. Besides fp16 and bf16,
fp32 is served, and head dimensions need not be multiples of 8.

Source: flash_attn/flash_attn_interface.py of flash-attn 2.8 for the signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ..attention.api import flash_attention
from ..attention.varlen import flash_attention_varlen
from ..errors import UnsupportedError
from .arguments import (
    as_dropout,
    as_flag,
    as_scale,
    as_softcap,
    as_window,
    blame,
    call_by_names,
    check_attended,
    check_integers,
    check_kinds,
    check_per_head,
    check_starts,
    contiguous_columns,
    forward_only,
    plain,
)
from .flash_attn_cache import flash_attn_with_kvcache

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"

_WithProbs = tuple[Tensor, Tensor, Tensor]


class NamedOptions(TypedDict, total=False):
    """What the functions take by name, but for ``return_attn_probs``: types of their overloads."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool


class PackedOptions(NamedOptions, total=False):
    """The same of ``flash_attn_varlen_func``."""

    block_table: Tensor | None


_NAMES = {"alibi": "alibi_slopes", "page_table": "block_table"}
_NAMES_QKVPACKED = {
    "q": "qkv",
    "k": "qkv",
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: Literal[False] = False, **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: Literal[True], **options: Unpack[NamedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend ``q`` ``[B, Sq, H, D]`` to ``k`` and ``v`` ``[B, Sk, HK, D]``; see ``flash_attention``.

    Returns:
        o ``[B, Sq, H, D]``; with ``return_attn_probs`` o, lse ``[B, H, Sq]`` and, as without dropout there, a tensor
        of no elements in the place of the probabilities. With dropout they are refused: nobody keeps them.
    """
    options, probs = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic=deterministic, probs=return_attn_probs
    )
    check_kinds(q=q, k=k, v=v)
    try:
        result = call_by_names(
            flash_attention,
            _NAMES,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            alibi=alibi_slopes,
            return_lse=probs,
            **options,
        )
    except Exception:
        blame(_check_batch, q, k, v, alibi_slopes)
        raise
    return (result[0].transpose(1, 2), result[1], _no_probs(q)) if probs else result.transpose(1, 2)


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *, return_attn_probs: Literal[False] = False, **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *, return_attn_probs: Literal[True], **options: Unpack[NamedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of ``qkv`` ``[B, S, 3, H, D]``."""
    check_kinds(qkv=qkv)
    try:
        q, k, v = qkv.unbind(2)
        return call_by_names(
            flash_attn_func,
            {"q": "qkv"},
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except Exception:
        blame(check_attended, {"qkv": (qkv, "B, S, 3, H, D")})
        raise


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *, return_attn_probs: Literal[False] = False, **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *, return_attn_probs: Literal[True], **options: Unpack[NamedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of ``q`` ``[B, Sq, H, D]`` and ``kv`` ``[B, Sk, 2, HK, D]``."""
    check_kinds(q=q, kv=kv)
    try:
        k, v = kv.unbind(2)
        return flash_attn_func(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except Exception:
        blame(check_attended, {"q": (q, "B, Sq, H, D"), "kv": (kv, "B, Sk, 2, HK, D")})
        raise


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_attn_probs: Literal[False] = False, **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, return_attn_probs: Literal[True], **options: Unpack[PackedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend packed sequences; see ``flash_attention_varlen``.

    With ``block_table`` ``[B, P]``, its ``page_table``, k and v are caches ``[pages, page_size, HK, D]``, of any page
    size, and ``cu_seqlens_k`` has their lengths.

    Returns:
        o ``[Tq, H, D]``; with ``return_attn_probs`` o, lse ``[H, Tq]`` and, as without dropout there, a tensor of no
        elements in the place of the probabilities. With dropout they are refused.
    """
    options, probs = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic=deterministic, probs=return_attn_probs
    )
    check_kinds(q=q, k=k, v=v)
    try:
        if block_table is not None:
            k, v = contiguous_columns(k), contiguous_columns(v)
        result = forward_only(
            "a block_table",
            {} if block_table is None else {"q": q, "k": k, "v": v},
            lambda: call_by_names(
                flash_attention_varlen,
                _NAMES,
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                plain(max_seqlen_q),
                plain(max_seqlen_k),
                alibi=alibi_slopes,
                page_table=block_table,
                return_lse=probs,
                **options,
            ),
        )
    except Exception:
        blame(_check_packed, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table, options["dropout_p"])
        raise
    return (*result, _no_probs(q)) if probs else result


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, return_attn_probs: Literal[False] = False,
    **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, return_attn_probs: Literal[True],
    **options: Unpack[NamedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of ``qkv`` ``[T, 3, H, D]``."""
    check_kinds(qkv=qkv)
    try:
        q, k, v = qkv.unbind(1)
        return call_by_names(
            flash_attn_varlen_func,
            _NAMES_QKVPACKED,
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except Exception:
        blame(check_attended, {"qkv": (qkv, "T, 3, H, D")})
        raise


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_attn_probs: Literal[False] = False, **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_attn_probs: Literal[True], **options: Unpack[NamedOptions],
) -> _WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of ``q`` ``[Tq, H, D]`` and ``kv`` ``[Tk, 2, HK, D]``."""
    check_kinds(q=q, kv=kv)
    try:
        k, v = kv.unbind(1)
        return call_by_names(
            flash_attn_varlen_func,
            {"k": "kv"},
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
        )
    except Exception:
        blame(check_attended, {"q": (q, "Tq, H, D"), "kv": (kv, "Tk, 2, HK, D")})
        raise


def _options(
    dropout_p: object,
    softmax_scale: object,
    causal: object,
    window_size: object,
    softcap: object,
    *,
    deterministic: object,
    probs: object,
) -> tuple[dict[str, Any], bool]:
    """Return the options of ``flash_attention``, and whether the LSE is asked for. Raises ``InputError``."""
    as_flag("deterministic", deterministic)
    probs = as_flag("return_attn_probs", probs)
    options: dict[str, Any] = {
        "dropout_p": as_dropout("dropout_p", dropout_p),
        "softmax_scale": as_scale("softmax_scale", softmax_scale),
        "causal": as_flag("causal", causal),
        "window": as_window("window_size", window_size),
        "softcap": as_softcap("softcap", softcap),
    }
    if options["dropout_p"] and probs:
        raise UnsupportedError(
            f"return_attn_probs must be False with dropout_p of {dropout_p}: the probabilities are not kept",
            hint="flash_attention(..., return_lse=True) returns the LSE with dropout too",
        )
    return options, probs


def _check_batch(q: Any, k: Any, v: Any, alibi_slopes: Any) -> None:
    check_attended({"q": (q, "B, Sq, H, D"), "k": (k, "B, Sk, HK, D"), "v": (v, "B, Sk, HK, DV")})
    _check_slopes(alibi_slopes, q, q.shape[0])


def _check_packed(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, alibi_slopes: Any, block_table: Any, dropout_p: float
) -> None:
    if block_table is None:
        check_attended({"q": (q, "Tq, H, D"), "k": (k, "Tk, HK, D"), "v": (v, "Tk, HK, DV")})
    else:
        axes = "pages, page_size, HK"
        check_attended({"q": (q, "Tq, H, D"), "k": (k, f"{axes}, D"), "v": (v, f"{axes}, DV")}, " with a block_table")
    batch = check_starts(("q", q), {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    _check_slopes(alibi_slopes, q, batch)
    _check_table(block_table, q, batch, dropout_p)


def _check_slopes(alibi_slopes: Any, q: Tensor, batch: int) -> None:
    heads = q.shape[-2]
    check_per_head("alibi_slopes", alibi_slopes, ("q", q), {"H": (heads,), "B, H": (batch, heads)})


def _check_table(block_table: Any, q: Tensor, batch: int, dropout_p: float) -> None:
    if block_table is None:
        return
    check_integers("block_table", block_table, ("q", q), "B, P", (batch, None))
    if dropout_p:
        raise UnsupportedError(f"dropout_p must be 0 with a block_table, which is for inference, got {dropout_p}")


def _no_probs(q: Tensor) -> Tensor:
    return torch.zeros(0, dtype=q.dtype, device=q.device)
