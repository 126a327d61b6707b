"""The contract of attention with a K/V cache: what its tensors may be, and what lies in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import InputError, UnsupportedError, shown
from ...gpu.checks import (
    check_before_operator,
    check_dense,
    check_memory,
    check_no_bare_subclass,
    check_no_tangent,
    check_not_negative,
    check_storages,
    check_tensor,
)
from ...gpu.memory_overlap import has_internal_overlap, is_expanded, meet, shares_memory
from ...gpu.subclasses import PLAIN
from ..checks import DTYPE_NAMES, check_pages
from ..inputs import check_window, pointer_alignment
from ..problem import LARGEST_SCALE, MAX_SPLITS, canonical_strides
from .problem import CacheProblem

_STRIDED = torch.strided
FP8 = torch.float8_e4m3fn  # the one dtype of caches that is not that of q
DETACHED = ("q", "k_cache", "v_cache", "k", "v")  # tensors that operators take the class of a subclass off


class NamedCacheOptions(TypedDict, total=False):
    """What ``flash_attention_with_kv_cache`` takes by name, but for ``return_lse``: types of its overloads."""

    cache_seqlens: Tensor | int | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad_k: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    alibi: Tensor | None
    bias: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    softmax_scale: float | None
    num_splits: int
    batch_invariant: bool
    kernel: str


class CacheOptions(NamedTuple):
    """What a call with a K/V cache asks for besides its tensors."""

    rotary_interleaved: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    num_splits: int = 0
    batch_invariant: bool = False
    return_lse: bool = False
    kernel: str = "auto"


_OPTION_TYPES = tuple(
    (bool, bool, tuple, float, scale, int, bool, bool, str) for scale in (type(None), float)
)  # where nothing has to be converted


class CacheCall(NamedTuple):
    """One call of ``flash_attention_with_kv_cache``. ``describe_cache_call`` makes it."""

    tensors: Mapping[str, Tensor]  # those that are given
    options: CacheOptions


def describe_cache_call(given: Mapping[str, Any], options: CacheOptions) -> CacheCall:
    """Return what the caller passed as a call, with lengths on the device; ``None`` is left out. Raises ``InputError``.

    The rest of the contract is checked by ``cache_problem_of``, once for all calls of the same layouts.
    """
    _check_needed(given["q"], given["k_cache"], given["v_cache"])
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    length = tensors.get("cache_seqlens")
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN and (name != "cache_seqlens" or not isinstance(length, int)):
            check_tensor(name, tensor)
    if isinstance(length, int):
        q = tensors["q"]
        if not q.dim():
            raise InputError(f"q must have 4 dimensions [B, H, S, D], got shape {list(q.shape)}")
        check_number_of_keys(length, given)
        tensors["cache_seqlens"] = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    if torch.is_grad_enabled():
        _check_no_grad(tensors)
    return CacheCall(tensors, check_types(options))


def check_types(options: CacheOptions) -> CacheOptions:
    """Return options in their types: True == 1 == 1.0, and equal keys must mean equal calls. Raises ``InputError``."""
    types = (*map(type, options),)
    if types in _OPTION_TYPES and [*map(type, options.window)] == [int, int] and abs(options.num_splits) < 2**31:
        return options  # as nearly all are
    interleaved, causal, window, softcap, scale, num_splits, invariant, return_lse, kernel = options
    if type(window) is not tuple:
        window = check_window(window)
    flags = {
        "rotary_interleaved": interleaved, "causal": causal, "batch_invariant": invariant, "return_lse": return_lse,
    }  # fmt: skip
    for name, value in flags.items():
        if type(value) is not bool:
            raise InputError(f"{name} must be True or False, got {shown(value)}")
    if type(window) is not tuple or len(window) != 2 or any(type(size) is not int for size in window):  # type: ignore[redundant-expr] # callers may pass what types rule out
        raise InputError(f"window must be two integers (left, right), -1 for no bound, got {shown(window)}")
    if type(num_splits) is not int or abs(num_splits) >= 2**31:
        raise InputError(f"num_splits must be an integer from 0 to {MAX_SPLITS}, got {shown(num_splits)}")
    for name, value in (("softcap", softcap), ("softmax_scale", scale)):  # type: ignore[assignment] # callers may pass what types rule out
        is_number = isinstance(value, (int, float)) and type(value) is not bool  # type: ignore[redundant-expr] # NumPy's float64 is one
        if not is_number and not (name == "softmax_scale" and value is None):
            raise InputError(f"{name} must be a number, got {shown(value)}")
        if isinstance(value, int) and abs(value) > LARGEST_SCALE:  # type: ignore[redundant-expr] # perhaps too large for a float
            raise InputError(f"{name} must be at most {LARGEST_SCALE:.3g} in size, got a larger integer")
    if type(kernel) is not str:
        raise InputError(f"kernel must be the name of a kernel, got {shown(kernel)}")
    return options._replace(
        window=window, softcap=float(softcap), softmax_scale=None if scale is None else float(scale)
    )


def _check_needed(q: Any, k_cache: Any, v_cache: Any) -> None:
    """Raise ``InputError`` where a tensor is missing that no call can do without."""
    if (
        type(q) is type(k_cache) is type(v_cache) is Tensor
        and q.layout is k_cache.layout is v_cache.layout is _STRIDED
        and not (q.is_nested or k_cache.is_nested or v_cache.is_nested)
    ):
        return  # as nearly all are
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor)
        check_dense(name, tensor)


def check_number_of_keys(length: int, given: Mapping[str, Any]) -> None:
    """Check a length that the host knows against the room in the cache. Raises ``InputError``.

    Tensors of wrong shapes are left to ``cache_problem_of``.
    """
    if isinstance(length, bool) or not 0 <= length < 2**31:
        raise InputError(f"cache_seqlens must be from 0 to 2**31 - 1, got {length}")
    axes = {"k_cache": 4, "page_table": 2, "k": 4}
    found = {name: given.get(name) for name in axes}
    if any(tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() != axes[name])
           for name, tensor in found.items()):  # fmt: skip
        return
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    capacity, new = _room(tensors)
    if length > capacity - new:
        raise InputError(f"cache_seqlens must be {_in_words(capacity, new)}, got {length}")


def _room(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the positions that a sequence has in the cache, and how many are appended to it."""
    table = tensors.get("page_table")
    capacity = tensors["k_cache"].shape[1] * (1 if table is None else table.shape[1])
    return capacity, tensors["k"].shape[2] if "k" in tensors else 0


def _in_words(capacity: int, new: int) -> str:
    room = f"{capacity} positions" + (f" less {new} new ones" if new else "")
    return f"from 0 to {capacity - new} ({room})"


def cache_problem_of(tensors: Mapping[str, Tensor], **options: Any) -> CacheProblem:
    """Check a call against the contract of ``flash_attention_with_kv_cache``, and describe its problem.

    Args:
        tensors: the tensors that are given, by name.
        options: fields of ``CacheOptions``.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    asked = check_types(CacheOptions(**options))
    _check_tensors(tensors)
    q, k_cache, v_cache = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    batch, heads, seqlen_q, head_dim = q.shape
    pages, length, heads_kv, _ = k_cache.shape
    head_dim_v = v_cache.shape[3]
    table, new = tensors.get("page_table"), tensors.get("k")
    _check_shape("k_cache", k_cache, (pages, length, heads_kv, head_dim), "pages or B, positions, HK, D")
    _check_shape("v_cache", v_cache, (pages, length, heads_kv, head_dim_v), "pages or B, positions, HK, DV")
    if table is None and "cache_batch_idx" not in tensors and pages != batch:
        raise InputError(
            f"k_cache must have one row for each of {batch} sequences, got {pages}",
            hint="cache_batch_idx says which rows they have; page_table says so of pages",
        )
    _check_vectors(tensors, batch)
    _check_scales(tensors)
    seqlen_new = _check_new(tensors, batch, heads_kv, head_dim, head_dim_v)
    rotary = _check_rotary(tensors, q, head_dim)
    alibi = tensors.get("alibi")
    _check_head_values(tensors, batch, heads)
    bias = tensors.get("bias")
    if bias is not None:
        _check_bias(bias, (batch, heads, seqlen_q, _room(tensors)[0]))
    return CacheProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        capacity=length if table is None else table.shape[1] * length,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=DTYPE_NAMES[q.dtype],
        seqlen_new=seqlen_new,
        page_size=length if table is not None else 0,
        pages=pages,
        has_seqlens="cache_seqlens" in tensors,
        has_leftpad="leftpad_k" in tensors,
        has_batch_idx="cache_batch_idx" in tensors,
        is_fp8=k_cache.dtype == FP8,
        k_scale_strides=_scale_strides(tensors, "k"),
        v_scale_strides=_scale_strides(tensors, "v"),
        k_by_token="k_scale" in tensors and tensors["k_scale"].dim() == 3,
        v_by_token="v_scale" in tensors and tensors["v_scale"].dim() == 3,
        shared_kv=shares_memory(k_cache, v_cache),
        causal=asked.causal,
        window=asked.window,
        softcap=asked.softcap,
        sinks=DTYPE_NAMES[tensors["sinks"].dtype] if "sinks" in tensors else "",
        alibi="" if alibi is None else DTYPE_NAMES[alibi.dtype],
        alibi_stride=alibi.stride(0) if alibi is not None and alibi.dim() == 2 else 0,
        bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        bias_strides=() if bias is None else _bias_strides(bias),  # type: ignore[arg-type]
        softmax_scale=asked.softmax_scale,
        rotary_dim=rotary[0],
        rotary_length=rotary[1],
        rotary_dtype=rotary[2],
        rotary_stride=rotary[3],
        rotary_interleaved=asked.rotary_interleaved and rotary[0] > 0,
        rotary_advance=rotary[0] > 0 and (asked.causal or asked.window != (-1, -1)),
        num_splits=asked.num_splits,
        batch_invariant=asked.batch_invariant,
        return_lse=asked.return_lse,
        q_strides=canonical_strides(q.shape, q.stride()),
        k_strides=canonical_strides(k_cache.shape, k_cache.stride()),
        v_strides=canonical_strides(v_cache.shape, v_cache.stride()),
        new_k_strides=() if new is None else canonical_strides(new.shape, new.stride()),  # type: ignore[arg-type]
        new_v_strides=() if new is None else canonical_strides(tensors["v"].shape, tensors["v"].stride()),  # type: ignore[arg-type]
        table_stride=0 if table is None else table.stride(0),
        pointer_alignment=pointer_alignment(q, k_cache, v_cache),
    )


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    q = tensors["q"]
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
        check_memory(name, tensor)
        any_strides = name in ("bias", "k_scale", "v_scale")
        if not any_strides and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InputError(
                f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}",
                hint=".contiguous() makes a copy that is",
            )
    for name in ("q", "k_cache", "v_cache", "k", "v"):
        if name in tensors and tensors[name].dim() != 4:
            letters = "pages or B, positions, HK, D" if "cache" in name else "B, H, S, D"
            raise InputError(f"{name} must have 4 dimensions [{letters}], got shape {list(tensors[name].shape)}")
        if name in tensors and "cache" in name and tensors[name].dtype == FP8 and q.dtype in DTYPE_NAMES:
            continue
        if name in tensors and (tensors[name].dtype not in DTYPE_NAMES or tensors[name].dtype != q.dtype):
            expected = (
                f"the dtype of q, {q.dtype}"
                if q.dtype in DTYPE_NAMES and name != "q"
                else "float16, bfloat16 or float32"
            )
            raise InputError(f"{name} must be {expected}, got {tensors[name].dtype}")
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")


def _check_vectors(tensors: Mapping[str, Tensor], batch: int) -> None:
    """Check what is int32: lengths, pages, rows of the cache, padding."""
    for name in ("cache_seqlens", "cache_batch_idx", "leftpad_k", "page_table"):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            raise InputError(f"{name} must be int32, got {tensor.dtype}")
        if name == "page_table":
            if tensor.dim() != 2 or tensor.shape[0] != batch:
                raise InputError(f"page_table must have shape [B, P] = [{batch}, P], got {list(tensor.shape)}")
        else:
            _check_shape(name, tensor, (batch,), "B")
    if "page_table" in tensors:
        if "cache_batch_idx" in tensors:
            raise InputError("cache_batch_idx must be None with a page_table, got one: the table names the pages")
        if tensors["k_cache"].shape[1] == 0:
            raise InputError("k_cache must have pages of at least 1 position, got 0")


def _check_scales(tensors: Mapping[str, Tensor]) -> None:
    """Check the dtypes of the caches, and the scales of fp8 caches."""
    k_cache, v_cache = tensors["k_cache"], tensors["v_cache"]
    if v_cache.dtype != k_cache.dtype:
        raise InputError(f"v_cache must have the dtype of k_cache, {k_cache.dtype}, got {v_cache.dtype}")
    for side, cache in (("k", k_cache), ("v", v_cache)):
        name = f"{side}_scale"
        scale = tensors.get(name)
        if scale is None:
            continue
        if cache.dtype != FP8:
            raise InputError(f"{name} must be None unless caches are {FP8}, got one with {cache.dtype}")
        if scale.dtype != torch.float32:
            raise InputError(f"{name} must be float32, got {scale.dtype}")
        shapes = (), (cache.shape[2],), tuple(cache.shape[:3])
        if tuple(scale.shape) not in shapes:
            expected = f"[], [HK] = {list(shapes[1])} or [B or pages, positions, HK] = {list(shapes[2])}"
            raise InputError(f"{name} must have shape {expected}, got {list(scale.shape)}")
        if scale.dim() == 3 and "k" in tensors and (is_expanded(scale) or has_internal_overlap(scale)):
            raise InputError(f"{name} must have memory for every key, as scales of k and v are written to it")
    if "v_scale" in tensors and shares_memory(k_cache, v_cache):
        raise InputError("v_scale must be None where values are columns of the keys, which k_scale is of, got one")


def _scale_strides(tensors: Mapping[str, Tensor], side: str) -> tuple[int, ...]:
    """Return strides of a scale along pages, positions and heads; 0 along axes that share one."""
    scale = tensors.get(f"{side}_scale")
    if scale is None:
        return ()
    shape = tensors[f"{side}_cache"].shape[:3]
    return tuple(
        stride if n > 1 else 0 for n, stride in zip(shape, (0,) * (3 - scale.dim()) + scale.stride(), strict=True)
    )


def _check_new(tensors: Mapping[str, Tensor], batch: int, heads_kv: int, head_dim: int, head_dim_v: int) -> int:
    """Check what is appended, and return how many positions."""
    k, v = tensors.get("k"), tensors.get("v")
    if (k is None) != (v is None):
        raise InputError(f"k and v must be given both or neither, got {'v' if k is None else 'k'} alone")
    if k is None or v is None:
        return 0
    if "cache_seqlens" not in tensors:
        raise InputError("cache_seqlens must say where k and v are appended, got None")
    caches = f"caches are [B or pages, positions, HK, D], so HK is {heads_kv}"
    _check_shape("k", k, (batch, heads_kv, k.shape[2], head_dim), "B, HK, Sn, D", caches)
    _check_shape("v", v, (batch, heads_kv, k.shape[2], head_dim_v), "B, HK, Sn, DV", caches)
    if shares_memory(tensors["k_cache"], tensors["v_cache"]):
        raise InputError(
            "v_cache must have memory of its own, as k and v are written to it, got columns of k_cache",
            hint="where values are columns of the keys, write them before the call, and leave k and v out",
        )
    for name in ("k_cache", "v_cache"):
        cache = tensors[name]
        why = f"as k and v are written to it, got strides {list(cache.stride())}"
        if is_expanded(cache):
            raise InputError(f"{name} must not be expanded, {why}")
        if has_internal_overlap(cache):
            raise InputError(f"{name} must not overlap itself, {why}")
    return int(k.shape[2])


def _check_rotary(tensors: Mapping[str, Tensor], q: Tensor, head_dim: int) -> tuple[int, int, str, int]:
    """Check the tables, and return columns rotated, positions, dtype and stride."""
    cos, sin = tensors.get("rotary_cos"), tensors.get("rotary_sin")
    if (cos is None) != (sin is None):
        given = "rotary_sin" if cos is None else "rotary_cos"
        raise InputError(f"rotary_cos and rotary_sin must be given both or neither, got {given} alone")
    if cos is None or sin is None:
        return 0, 0, "", 0
    if "k" not in tensors:
        raise InputError("rotary_cos needs new keys k: queries are rotated where keys are appended, got None")
    if cos.dim() != 2 or 2 * cos.shape[1] > head_dim or not cos.shape[1]:
        raise InputError(
            f"rotary_cos must have shape [positions, R / 2] with R from 2 to D = {head_dim}, got {list(cos.shape)}"
        )
    _check_shape("rotary_sin", sin, tuple(cos.shape), "positions, R / 2")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype not in (q.dtype, torch.float32):
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, or float32, got {table.dtype}")
    if sin.dtype != cos.dtype or (sin.shape[0] > 1 and sin.stride(0) != cos.stride(0)):
        raise InputError(
            f"rotary_sin must have dtype and strides of rotary_cos, {cos.dtype} and {list(cos.stride())}, "
            f"got {sin.dtype} and {list(sin.stride())}"
        )
    return 2 * cos.shape[1], cos.shape[0], DTYPE_NAMES[cos.dtype], cos.stride(0)


def _check_head_values(tensors: Mapping[str, Tensor], batch: int, heads: int) -> None:
    for name in ("sinks", "alibi"):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        shapes = [(heads,)] + ([(batch, heads)] if name == "alibi" else [])
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(f"{list(shape)}" for shape in shapes)
            raise InputError(f"{name} must have shape {expected}, got {list(tensor.shape)}")


def _check_bias(bias: Tensor, shape: tuple[int, int, int, int]) -> None:
    if bias.dtype not in DTYPE_NAMES:
        raise InputError(f"bias must be float16, bfloat16 or float32, got {bias.dtype}")
    fits = bias.dim() == 4 and tuple(bias.shape[2:]) == shape[2:]
    if not fits or bias.shape[0] not in (1, shape[0]) or bias.shape[1] not in (1, shape[1]):
        expected = f"[{shape[0]} or 1, {shape[1]} or 1, {shape[2]}, {shape[3]}]"
        raise InputError(
            f"bias must have shape [B or 1, H or 1, Sq, positions] = {expected}, got {list(bias.shape)}",
            hint="it has a column for every position of the cache, those of all pages in the table",
        )


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    return tuple(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True))


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str, hint: str = "") -> None:
    if tuple(tensor.shape) != expected:
        words = f"{name} must have shape [{letters}] = {list(expected)}, got {list(tensor.shape)}"
        raise InputError(words, hint=hint)


def check_values(tensors: Mapping[str, Tensor], options: CacheOptions) -> None:
    """Check lengths, pages, rows and positions on the host: ``FLASHMOE_CHECK=1``. It waits for the device.

    Raises:
        InputError: with the sequence, what was expected and what was got.
        UnsupportedError: a CUDA graph is being captured, which cannot wait.
    """
    q = tensors["q"]
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "FLASHMOE_CHECK=1 reads lengths, and a graph is being captured", hint="capture without FLASHMOE_CHECK=1"
        )
    check_places(tensors, options.window[0])
    new, queries = _room(tensors)[1], q.shape[2]
    if not options.causal and options.window == (-1, -1):
        queries = min(queries, 1)  # all are rotated as the first
    for b, (length, pad) in enumerate(_lengths_and_padding(tensors)):
        if not 0 <= pad <= length + new:
            parts = f" ({length} keys and {new} new)" if new else ""
            raise InputError(f"leftpad_k[{b}] must be from 0 to the length {length + new}{parts}, got {pad}")
        if "rotary_cos" in tensors:
            last = length + max(new, queries) - 1
            if last >= tensors["rotary_cos"].shape[0]:
                raise InputError(
                    f"rotary_cos must have a row for position {last} of sequence {b}, "
                    f"got {tensors['rotary_cos'].shape[0]} rows"
                )


def _lengths_and_padding(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Return of each sequence the keys before the new ones, and where they start."""
    batch = tensors["q"].shape[0]
    before = tensors["cache_seqlens"].tolist() if "cache_seqlens" in tensors else [_room(tensors)[0]] * batch
    padding = tensors["leftpad_k"].tolist() if "leftpad_k" in tensors else [0] * batch
    return list(zip(before, padding, strict=True))


def check_places(tensors: Mapping[str, Tensor], left: int) -> None:
    """Check on the host the lengths, and the rows and pages of all keys that are read or written.

    Raises ``InputError``.
    """
    rows, page_size = tensors["k_cache"].shape[:2]
    (capacity, new), lengths_and_padding = _room(tensors), _lengths_and_padding(tensors)
    for b, (length, _) in enumerate(lengths_and_padding):
        if not 0 <= length <= capacity - new:
            raise InputError(f"cache_seqlens[{b}] must be {_in_words(capacity, new)}, got {length}")
    if "cache_batch_idx" in tensors:
        named = tensors["cache_batch_idx"].tolist()
        for b, row in enumerate(named):
            if not 0 <= row < rows:
                raise InputError(f"cache_batch_idx[{b}] must be from 0 to {rows - 1}, got {row}")
        if new and len(set(named)) < len(named):
            raise InputError(f"cache_batch_idx must name a row once where k is appended, got {named}")
    if "page_table" not in tensors:
        return
    seqlen_q = tensors["q"].shape[2]
    keys = []
    for before, pad in lengths_and_padding:
        end = before + new
        seen = max(pad, end - seqlen_q - left if left >= 0 else 0, 0)
        keys.append((min(seen, before), end))
    check_pages(tensors["page_table"], rows, page_size, keys)
    tables, taken = tensors["page_table"].tolist() if new else [], set()
    for b, table in enumerate(tables):
        for n in range(keys[b][1] - new, keys[b][1]):
            place = table[n // page_size], n % page_size
            if place in taken:
                got = f"position {place[1]} of page {place[0]} twice, the second time for sequence {b}"
                raise InputError(f"page_table must give each new key a place of its own, got {got}")
            taken.add(place)


def check_contents(tensors: Mapping[str, Tensor], options: CacheOptions) -> None:
    """Check at each call what a prepared call does not depend on: where the caches lie, and read integers.

    A prepared call serves caches that lie elsewhere too, also one inside the other. Raises ``InputError`` and
    ``UnsupportedError``.
    """
    k_cache, v_cache = tensors["k_cache"], tensors["v_cache"]
    if not k_cache.is_cuda:
        check_storages(tensors)
    # Values that are columns of the keys are refused later, with the problem.
    if "k" in tensors and not shares_memory(k_cache, v_cache) and meet(k_cache, v_cache):
        raise InputError("v_cache must have memory of its own, as k and v are written to it, got some of k_cache")
    if "k" in tensors:
        _check_apart_from_caches(tensors)
        _check_scales_apart(tensors)
    if os.environ.get("FLASHMOE_CHECK") == "1":
        check_values(tensors, options)
    elif not tensors["q"].is_cuda:  # torch would find it out after it wrote the new keys of the sequences before
        check_places(tensors, options.window[0])


def _check_scales_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where scales of each key and of each value, which are written, share memory."""
    scales = [tensors[name] for name in ("k_scale", "v_scale") if name in tensors and tensors[name].dim() == 3]
    if len(scales) == 2 and meet(*scales):
        raise InputError("v_scale must have memory of its own, as scales of k and v are written, got some of k_scale")


def _check_apart_from_caches(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where q, what is appended or its scales lie in a cache, where new keys overwrite them."""
    storages = {name: _storage(tensors[name]) for name in ("k_cache", "v_cache")}
    for name in ("q", "k", "v", "k_scale", "v_scale"):
        tensor = tensors.get(name)
        if tensor is None or tensor.dim() < 3:
            continue
        storage = _storage(tensor)
        for other, place in storages.items():
            if storage is not None and storage == place:
                axes = tensor[..., None] if tensor.dim() == 3 else tensor.transpose(1, 2)
                in_bytes = (x[..., None].view(torch.uint8) for x in (axes, tensors[other]))
                if meet(*in_bytes):
                    hint = "" if "scale" in name else ".clone() makes a copy"
                    raise InputError(f"{name} must have memory of its own, got some of {other}", hint=hint)


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if type(tensor) in PLAIN else None


def check_operator_call(call: CacheCall) -> None:
    """Check a call before its operator is called. Raises ``InputError`` and ``UnsupportedError``."""
    tensors = call.tensors
    check_before_operator(tensors, "q")
    for name, tensor in tensors.items():
        check_not_negative(name, tensor)
        if name not in DETACHED:
            check_no_bare_subclass(name, tensor)
        check_no_tangent(name, tensor)
    numbers = {"num_splits": call.options.num_splits, "window": max(map(abs, call.options.window))}
    for name, number in numbers.items():
        if number >= 2**63:
            raise InputError(f"{name} must be less than 2**63, got {shown(getattr(call.options, name))}")
    for name in ("k_cache", "v_cache"):
        if "k" in tensors and is_traceable_wrapper_subclass(tensors[name]):
            raise UnsupportedError(
                f"{name} is a {type(tensors[name]).__name__}, which has no memory of its own to append to",
                hint="append to it before the call, and leave k and v out",
            )
    for name in ("rotary_cos", "rotary_sin"):
        if name in tensors and "k" not in tensors:
            raise InputError(f"{name} needs new keys k: queries are rotated where keys are appended, got None")


def _check_no_grad(tensors: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedError`` where autograd would want gradients."""
    names = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
    if names:
        raise UnsupportedError(
            f"there is no backward with a cache, and gradients are required of {', '.join(names)}",
            hint="call it under torch.no_grad(), or pass detached tensors",
        )
