"""Attention with a K/V cache: contract, validation, and the way from a call to its prepared launches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from ..gpu.device import gpu_of
from .cache_calls import Call, prepare_call
from .cache_contract import (
    cache_problem_of,
    check_needed,
    check_number_of_keys,
    check_places,
    check_types,
    check_values,
)
from .cache_refusals import check_apart, check_operator_call, check_tuples
from .decode_plan import DecodePlan, plan_with_kv_cache
from .inputs import PLAIN, check_window, refuse_tangents
from .problem import canonical_strides, output_strides
from .checks import check_fake

_TENSORS = (
    "q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "leftpad_k", "rotary_cos",
    "rotary_sin", "sinks", "alibi", "bias",
)  # fmt: skip
_OPTIONS = (
    "rotary_interleaved", "causal", "window", "softcap", "softmax_scale", "num_splits", "batch_invariant", "return_lse",
    "kernel",
)  # fmt: skip
_prepared: dict[tuple[Any, ...], Call] = {}
_MAX_PREPARED = 8192
_HASHABLE = frozenset({bool, int, float, str, tuple, type(None)})  # types of options that a key may hold unchecked
_is_compiling = torch.compiler.is_compiling


def flash_attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Append keys and values to a cache, and attend queries to what each sequence has there.

    With ``length[b] = cache_seqlens[b] + Sn`` keys, row m is at ``p = m + length[b] - Sq`` and sees keys n with
    ``leftpad_k[b] <= n < length[b]`` and ``p - left <= n <= p + right``. Scores, softcap, ALiBi, sinks and the sum over
    the values are those of ``flash_attention``. Lengths, pages and positions stay on the device: nothing synchronises,
    and a captured CUDA graph replays with whatever they hold then.

    Args:
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32, D contiguous; D from 1 to 256 on a GPU.
        k_cache: ``[B, S, HK, D]``, or with ``page_table`` ``[pages, page_size, HK, D]`` of any page size (fast from
            16), dtype and device of q, any strides but D contiguous; H is a multiple of HK. Positions come before
            heads, as caches are written token by token: a cache ``[B, HK, S, D]`` is passed as ``.transpose(1, 2)``.
        v_cache: the same with DV columns. ``k_cache[..., :DV]`` itself is read once for both: the absorbed form of MLA,
            D 576 and DV 512 with one K/V head. Then nothing can be appended.
        k: ``[B, HK, Sn, D]``, written to ``k_cache`` at positions ``cache_seqlens[b]`` and on. Needs ``v`` and
            ``cache_seqlens``. What does not fit the cache is not written.
        v: ``[B, HK, Sn, DV]``, written to ``v_cache``.
        cache_seqlens: ``[B]`` int32: the keys in the cache before ``k``; or one number for all, which has to leave room
            for ``k``. Default: the cache is full. What lies behind changes no result, and its
            pages are never read. The call does not change it.
        page_table: ``[B, P]`` int32: the page of positions ``[i * page_size, (i + 1) * page_size)`` is
            ``page_table[b, i]``. Entries behind the last key are never read.
        cache_batch_idx: ``[B]`` int32: the row of the cache for each sequence; not with ``page_table``.
        leftpad_k: ``[B]`` int32: positions before it are never read.
        rotary_cos: ``[positions, R / 2]``, R even and at most D, in the dtype of q or fp32: columns 0 to R - 1 of k,
            and of q, are rotated before use. Position n is ``n - leftpad_k[b]``. Query m is at
            ``cache_seqlens[b] + m`` where ``causal`` or ``window`` say how rows lie, else at ``cache_seqlens[b]``
            (flash-attn's rule). Needs ``k``. A position behind the table gives NaN.
        rotary_sin: the same.
        rotary_interleaved: columns 2i and 2i + 1 are a pair, else i and i + R / 2.
        causal: a right bound of 0.
        window: ``(left, right)``, -1 for no bound. Keys and pages that no row's window reaches are never read.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: they do not.
        sinks: ``[H]``: a logit of each head that takes its share of the softmax and adds nothing to the output. It is
            in the LSE.
        alibi: ``[H]`` or ``[B, H]``: ``-slope * |p - n|`` is added to the scores.
        bias: ``[B or 1, H or 1, Sq, S]``, any strides, or with ``page_table`` ``[B or 1, H or 1, Sq, P * page_size]``:
            ``bias[b, h, m, n]`` is added to the score of position n; -inf hides it. Columns of positions that are not
            read are not read either. Where all keys of a row have the most negative number, they are equal, and the LSE
            is below -2e38.
        softmax_scale: as in ``flash_attention``.
        num_splits: over how many shares the keys of a sequence are split, at most; 0 leaves it to the plan. Where it is
            given, it counts, and the bits are promised as by ``batch_invariant``.
        batch_invariant: a sequence gets the same bits whatever else is in the batch, and whatever the capacity of the
            cache: its keys are cut by its own length alone. Its left padding, the options, Sq, H, HK, D, DV, dtype,
            page size, GPU and versions must be the same, and for MLA on Hopper whether all rows start at multiples of
            16 bytes, whether q or the cache is expanded, and whether ``cache_batch_idx`` is given.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, ``"decode_gluon_sm90"`` or ``"decode_triton"``; a forced kernel never falls back.

    Returns:
        o ``[B, H, Sq, DV]`` in the dtype of q; with ``return_lse`` the pair of o and lse ``[B, H, Sq]`` fp32, natural
        logarithm. A row that sees no key gives 0, and LSE -inf or its sink.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above; with ``FLASHMOE_CHECK=1`` in the
            environment also a length, page, row or position that lies outside, which costs a synchronisation; pages and
            rows of CPU tensors always are checked. Nothing was written to the cache then.
        UnsupportedError: no kernel serves this call, an input requires grad while gradients are recorded, or one has a
            forward-mode tangent.

    Numerics: those of ``flash_attention``; shares are merged in fp32 in a fixed order, so results have the same bits in
    every run. CPU tensors run ``cache_reference``. Without ``FLASHMOE_CHECK=1`` a length is cut to what the cache
    holds, and a page that does not exist is read where it would be, or by ``decode_gluon_sm90`` as zeros.
    """
    given: dict[str, Any] = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens,
        "page_table": page_table, "cache_batch_idx": cache_batch_idx, "leftpad_k": leftpad_k,
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "sinks": sinks, "alibi": alibi, "bias": bias,
    }  # fmt: skip
    if type(window) is not tuple:
        window = check_window(window)
    options = (
        rotary_interleaved, causal, window, softcap, softmax_scale, num_splits, batch_invariant, return_lse, kernel,
    )  # fmt: skip
    check_needed(given)
    if isinstance(cache_seqlens, int):
        given["cache_seqlens"] = _lengths(cache_seqlens, given)
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if _is_compiling() or any(type(tensor) not in PLAIN for tensor in tensors.values()):
        return _call_operator(given, options)
    refuse_tangents(tensors.values())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        _refuse_grad(given)
    # Equal keys must mean equal calls, and True == 1 == 1.0.
    types = *map(type, options), *map(type, window)
    if not _HASHABLE.issuperset(types):
        check_types(options)
    check_tuples(options, types)
    check_apart(k, k_cache, v_cache)
    shared = k_cache.data_ptr() == v_cache.data_ptr()
    key = *tensors, *map(_describe, tensors.values()), shared, options, types
    call = _prepared.get(key)
    if call is None:
        check_types(options)
        call = _prepare(tensors, options)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    if os.environ.get("FLASHMOE_CHECK") == "1":
        check_values(tensors, window[0])
    elif not q.is_cuda:  # torch would find it out after it wrote the new keys of the sequences before
        check_places(tensors, window[0])
    o, lse = call(tensors)
    return (o, lse) if return_lse else o


def explain_with_kv_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *new: Tensor, **options: Any) -> DecodePlan:
    """Return the plan that would serve ``flash_attention_with_kv_cache`` with the same arguments; nothing is launched.

    Arguments and errors are those of ``flash_attention_with_kv_cache``, but inputs may require grad.
    """
    if len(new) > 2:
        raise InputError(f"q, k_cache, v_cache, k and v may be given without a name, got {3 + len(new)} arguments")
    given: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **dict(zip(("k", "v"), new, strict=False))}
    named = [name for name in _TENSORS if name in options]
    twice = [name for name in named if name in given]
    unknown = [name for name in options if name not in (*_TENSORS, *_OPTIONS)]
    if twice or unknown:
        what = f"{twice[0]} once" if twice else f"options of flash_attention_with_kv_cache, {', '.join(_OPTIONS)}"
        raise InputError(f"arguments must be {what}, got {', '.join(twice or unknown)}{' twice' if twice else ''}")
    kernel = options.pop("kernel", "auto")
    given.update({name: options.pop(name) for name in named})
    check_needed(given)
    if isinstance(given.get("cache_seqlens"), int):
        given["cache_seqlens"] = _lengths(given["cache_seqlens"], given)
    if "window" in options:
        options["window"] = check_window(options["window"])
    problem = cache_problem_of({name: tensor for name, tensor in given.items() if tensor is not None}, **options)
    return plan_with_kv_cache(problem, gpu_of(q), kernel)


def _lengths(length: int, given: Mapping[str, Any]) -> Tensor:
    q = given["q"]
    if not q.dim():
        raise InputError(f"q must have 4 dimensions [B, H, S, D], got shape {list(q.shape)}")
    check_number_of_keys(length, given)
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a prepared call depends on: not what lies in the tensor, and of where it lies the alignment."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15, tensor.is_neg()


def _refuse_grad(given: Mapping[str, Any]) -> None:
    names = [name for name, tensor in given.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
    raise UnsupportedError(
        f"there is no backward with a cache, and gradients are required of {', '.join(names)}",
        hint="call it under torch.no_grad(), or pass detached tensors",
    )


def _prepare(tensors: Mapping[str, Tensor], options: tuple[Any, ...]) -> Call:
    """Validate one call, plan it, and return it prepared."""
    interleaved, causal, window, softcap, scale, num_splits, invariant, return_lse, kernel = options
    problem = cache_problem_of(
        tensors, rotary_interleaved=interleaved, causal=causal, window=window, softcap=softcap, softmax_scale=scale,
        num_splits=num_splits, batch_invariant=invariant, return_lse=return_lse,
    )  # fmt: skip
    q = tensors["q"]
    return prepare_call(plan_with_kv_cache(problem, gpu_of(q), kernel), q.device)


# Graphs that torch traces hold the operators below; the eager call never does.


@torch.library.custom_op("flashmoe_science::attention_with_kv_cache", mutates_args=())
def _attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    softmax_scale: float | None,
    num_splits: int,
    batch_invariant: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    o: Tensor
    lse: Tensor
    o, lse = flash_attention_with_kv_cache(
        q.detach(), k_cache.detach(), v_cache.detach(), cache_seqlens=cache_seqlens, page_table=page_table,
        cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k, sinks=sinks, alibi=alibi, bias=bias, causal=causal,
        window=(window_left, window_right), softcap=softcap, softmax_scale=softmax_scale, num_splits=num_splits,
        batch_invariant=batch_invariant, return_lse=True, kernel=kernel,
    )  # fmt: skip
    return o, lse


@torch.library.custom_op("flashmoe_science::attention_append_kv_cache", mutates_args=("k_cache", "v_cache"))
def _attention_append_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    softmax_scale: float | None,
    num_splits: int,
    batch_invariant: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    o: Tensor
    lse: Tensor
    o, lse = flash_attention_with_kv_cache(
        q.detach(), k_cache.detach(), v_cache.detach(), k.detach(), v.detach(), cache_seqlens=cache_seqlens,
        page_table=page_table, cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, sinks=sinks, alibi=alibi, bias=bias,
        causal=causal, window=(window_left, window_right), softcap=softcap, softmax_scale=softmax_scale,
        num_splits=num_splits, batch_invariant=batch_invariant, return_lse=True, kernel=kernel,
    )  # fmt: skip
    return o, lse


@_attention_with_kv_cache.register_fake
def _fake_with_kv_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    check_fake(q, k_cache, v_cache, (4, 4, 4), options)
    return _fake_outputs(q, v_cache)


@_attention_append_kv_cache.register_fake
def _fake_append_kv_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    check_fake(q, k_cache, v_cache, (4, 4, 4), options)
    return _fake_outputs(q, v_cache)


def _fake_outputs(q: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs without data, in the memory order of the real ones."""
    batch, heads, seqlen_q, _ = q.shape
    columns = v_cache.shape[3]
    strides = output_strides(batch, heads, seqlen_q, columns, canonical_strides(q.shape, q.stride()))
    o = torch.empty_strided((batch, heads, seqlen_q, columns), strides, dtype=q.dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def _call_operator(given: Mapping[str, Any], options: tuple[Any, ...]) -> Any:
    check_operator_call(given)
    for name, tensor in given.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given.values()):
        _refuse_grad(given)
    interleaved, causal, window, softcap, scale, num_splits, invariant, return_lse, kernel = options
    check_types(options)
    tail = (causal, *window, float(softcap), scale, num_splits, invariant, kernel)
    common = [given[name] for name in ("page_table", "cache_batch_idx", "leftpad_k")]
    heads = (given["sinks"], given["alibi"], given["bias"])
    if given["k"] is None and given["v"] is None and given["rotary_cos"] is None and given["rotary_sin"] is None:
        o, lse = _attention_with_kv_cache(
            given["q"], given["k_cache"], given["v_cache"], given["cache_seqlens"], *common, *heads, *tail
        )
    else:
        for name, other in (("k", "v"), ("v", "k"), ("cache_seqlens", "k")):
            if given[name] is None:
                raise InputError(f"{name} must be given with {other}, got None")
        o, lse = _attention_append_kv_cache(
            given["q"], given["k_cache"], given["v_cache"], given["k"], given["v"], given["cache_seqlens"], *common,
            given["rotary_cos"], given["rotary_sin"], interleaved, *heads, *tail,
        )  # fmt: skip
    return (o, lse) if return_lse else o
