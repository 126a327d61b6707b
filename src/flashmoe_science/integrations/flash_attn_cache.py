"""``flash_attn_with_kvcache`` of flash-attn 2.8, served by ``flash_attention_with_kv_cache``.

Tensors are as in flash-attn. As there, q, k and v are copied where their columns are not contiguous, and nothing has
gradients: only their use raises. Not as there: pages hold any number of positions, not multiples of
256; dtypes and head dimensions are those of ours; rows that see no key have an LSE of -inf, there +inf.

Source: flash_attn/flash_attn_interface.py of flash-attn 2.8 for the signature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from ..attention.decode.api import flash_attention_with_kv_cache
from ..errors import InputError, shown
from .arguments import (
    Named,
    as_flag,
    as_scale,
    as_softcap,
    as_window,
    blame,
    call_by_names,
    check_attended,
    check_columns,
    check_count,
    check_integers,
    check_kinds,
    check_optional_tensor,
    check_per_head,
    contiguous_columns,
    forward_only,
    plain,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = {"alibi": "alibi_slopes", "leftpad_k": "cache_leftpad", "page_table": "block_table"}


class NamedOptions(TypedDict, total=False):
    """What ``flash_attn_with_kvcache`` takes by name, but for ``return_softmax_lse``: types of its overloads."""

    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: Tensor | None
    num_splits: int


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_softmax_lse: Literal[False] = False,
    **options: Unpack[NamedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_softmax_lse: Literal[True], **options: Unpack[NamedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any: ...  # fmt: skip
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
    ``window``, ``alibi``, ``return_lse``. Errors have the names of here.

    Returns:
        o ``[B, Sq, H, D]``; with ``return_softmax_lse`` the pair of o and lse ``[B, H, Sq]``.
    """
    options = {
        "causal": as_flag("causal", causal),
        "rotary_interleaved": as_flag("rotary_interleaved", rotary_interleaved),
        "return_lse": as_flag("return_softmax_lse", return_softmax_lse),
        "window": as_window("window_size", window_size),
        "softcap": as_softcap("softcap", softcap),
        "softmax_scale": as_scale("softmax_scale", softmax_scale),
        "num_splits": plain(num_splits),
    }
    check_count("num_splits", options["num_splits"])
    check_kinds(q=q, k=k, v=v)
    try:
        q, k, v = (contiguous_columns(tensor) for tensor in (q, k, v))
        new_k, new_v = (None if tensor is None else tensor.transpose(1, 2) for tensor in (k, v))
        result = forward_only(
            "a cache",
            {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v},
            lambda: call_by_names(
                flash_attention_with_kv_cache,
                _NAMES,
                q.transpose(1, 2),
                k_cache,
                v_cache,
                new_k,
                new_v,
                cache_seqlens=cache_seqlens,
                page_table=contiguous_columns(block_table),
                cache_batch_idx=contiguous_columns(cache_batch_idx),
                leftpad_k=cache_leftpad,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                alibi=alibi_slopes,
                **options,
            ),
        )
    except Exception:
        given = (cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes)
        blame(_check_tensors, (q, k_cache, v_cache, k, v), *given)
        raise
    return (result[0].transpose(1, 2), result[1]) if options["return_lse"] else result.transpose(1, 2)


def _check_tensors(
    attended: tuple[Any, ...],
    cache_seqlens: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    alibi_slopes: Any,
) -> None:
    _check_attended(*attended)
    q = attended[0]
    first = ("q", q)
    batch, heads = q.shape[0], q.shape[2]
    _check_lengths(cache_seqlens, first)
    for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        check_optional_tensor(name, tensor)
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            check_integers(name, tensor, first, "B", (batch,))
    if block_table is not None:
        check_integers("block_table", block_table, first, "B, P", (batch, None))
    check_per_head("alibi_slopes", alibi_slopes, first, {"H": (heads,), "B, H": (batch, heads)})


def _check_attended(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
    given = {
        "q": (q, "B, Sq, H, D"),
        "k_cache": (k_cache, "B or pages, positions, HK, D"),
        "v_cache": (v_cache, "B or pages, positions, HK, DV"),
        **({} if k is None else {"k": (k, "B, Sn, HK, D")}),
        **({} if v is None else {"v": (v, "B, Sn, HK, DV")}),
    }
    check_attended(given)
    for name in ("k_cache", "v_cache"):
        check_columns(name, given[name][0])


def _check_lengths(cache_seqlens: Any, first: Named) -> None:
    if cache_seqlens is None:
        return
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        check_count("cache_seqlens", cache_seqlens)  # the cache may have less room, of which we are told
        return
    if not isinstance(cache_seqlens, Tensor):
        raise InputError(f"cache_seqlens must be a torch.Tensor, an integer or None, got {shown(cache_seqlens)}")
    check_integers("cache_seqlens", cache_seqlens, first, "B", (first[1].shape[0],))
