"""The public functions of attention with a K/V cache: contract, and the way from a call to its prepared launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ...errors import InputError
from ...gpu.device import gpu_at, gpu_of
from ...gpu.subclasses import is_traced
from ..checks import check_fake, refuse_without_memory
from ..context_parallel import refuse_context_parallel
from ..forward.calls import remember
from ..inputs import refuse_tangents
from ..problem import canonical_strides, output_strides
from .calls import Call, prepare_call
from .contract import (
    DETACHED,
    CacheCall,
    CacheOptions,
    NamedCacheOptions,
    cache_problem_of,
    check_contents,
    check_operator_call,
    describe_cache_call,
)
from .plan import DecodePlan, plan_with_kv_cache

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TENSORS = (
    "q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "leftpad_k", "rotary_cos",
    "rotary_sin", "sinks", "alibi", "bias", "k_scale", "v_scale",
)  # fmt: skip
_prepared: dict[tuple[Any, ...], Call] = {}


@overload
def flash_attention_with_kv_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[NamedCacheOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_with_kv_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    return_lse: Literal[True], **options: Unpack[NamedCacheOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attention_with_kv_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, return_lse: bool,
    **options: Unpack[NamedCacheOptions],
) -> Any: ...  # fmt: skip
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32, D contiguous; D from 1 to 512 on a GPU.
        k_cache: ``[B, S, HK, D]``, or with ``page_table`` ``[pages, page_size, HK, D]`` of any page size (fast from
            16), dtype of q or ``torch.float8_e4m3fn`` (sm_89 and newer), device of q, any strides but D contiguous; H
            is a multiple of HK. Positions come before heads, as caches are written token by token: a cache
            ``[B, HK, S, D]`` is passed as ``.transpose(1, 2)``.
        v_cache: the same with DV columns. ``k_cache[..., :DV]`` itself is read once for both: the absorbed form of MLA,
            D 576 and DV 512 with one K/V head. Then nothing can be appended.
        k: ``[B, HK, Sn, D]``, written to ``k_cache`` at positions ``cache_seqlens[b]`` and on. Needs ``v`` and
            ``cache_seqlens``, and memory of its own; then q has its own too. Keys that do not fit the cache are not
            written, and no two may have one place.
        v: ``[B, HK, Sn, DV]``, written to ``v_cache``.
        cache_seqlens: ``[B]`` int32: the keys in the cache before ``k``; or one number for all, which has to leave room
            for ``k``. Default: the cache is full. What lies behind changes no result, and its
            pages are never read. The call does not change it.
        page_table: ``[B, P]`` int32: the page of positions ``[i * page_size, (i + 1) * page_size)`` is
            ``page_table[b, i]``. Entries behind the last key are never read.
        cache_batch_idx: ``[B]`` int32: the row of the cache for each sequence; not with ``page_table``.
        leftpad_k: ``[B]`` int32: positions before it are never read.
        rotary_cos: ``[positions, R / 2]``, R even and at most D, in the dtype of q or fp32: columns 0 to R - 1 of k,
            and of q, are rotated before use. Key n is at position n, whatever ``leftpad_k`` is; query m at
            ``cache_seqlens[b] + m`` where ``causal`` or ``window`` say how rows lie, else at ``cache_seqlens[b]``
            (flash-attn's rules). Needs ``k``. A position behind the table gives NaN.
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
        k_scale: fp32, for an fp8 cache: keys are ``k_cache * k_scale``. ``[]``, one for each head ``[HK]``, or one for
            each key ``[B or pages, positions, HK]``, placed as the cache is. What is appended is divided by it, and
            rounded to the nearest, at most 448 in size; but a scale for each key is made of the key, 1/448 of its
            largest column, and written here. Default: 1.
        v_scale: the same of values. Where values are columns of the keys, it is ``k_scale``, and this is None.
        softmax_scale: as in ``flash_attention``.
        num_splits: the most splits of the keys of a sequence; 0 leaves the choice to the plan. A given number overrides
            ``batch_invariant``, with the same bitwise guarantee.
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
            environment also a length, page, row or position that lies outside, which costs a synchronisation; lengths,
            pages and rows of CPU tensors always are checked. Nothing was written to the cache then.
        UnsupportedError: no kernel serves this call, an input requires grad while gradients are recorded, or one has a
            forward-mode tangent.

    Numerics: those of ``flash_attention``. Keys and values of fp8 are exact. Beside q of 16 bits products are of fp16,
    and scales are applied to scores and to P in fp32; scores above 2**24 may give infinity. Results are bitwise
    reproducible: splits merge in fp32 in a fixed order. CPU tensors run ``cache_reference``. Unchecked, a length on a
    GPU is cut to what the cache holds, and a page that does not exist is read where it would be, or by
    ``decode_gluon_sm90`` as zeros; its scales are read where they would be.
    """
    refuse_context_parallel()
    call = describe_cache_call(
        {
            "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens,
            "page_table": page_table, "cache_batch_idx": cache_batch_idx, "leftpad_k": leftpad_k,
            "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "sinks": sinks, "alibi": alibi, "bias": bias,
            "k_scale": k_scale, "v_scale": v_scale,
        },
        CacheOptions(
            rotary_interleaved, causal, window, softcap, softmax_scale, num_splits, batch_invariant, return_lse, kernel
        ),
    )  # fmt: skip
    o, lse = _call_operator(call) if is_traced(call.tensors.values()) else _run(call)
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
    unknown = [name for name in options if name not in (*_TENSORS, *CacheOptions._fields)]
    if twice or unknown:
        what = (
            f"{twice[0]} once"
            if twice
            else f"options of flash_attention_with_kv_cache, {', '.join(CacheOptions._fields)}"
        )
        raise InputError(f"arguments must be {what}, got {', '.join(twice or unknown)}{' twice' if twice else ''}")
    given.update({name: options.pop(name) for name in named})
    call = describe_cache_call(given, CacheOptions(**options))
    problem = cache_problem_of(call.tensors, **call.options._asdict())
    return plan_with_kv_cache(problem, gpu_of(q), call.options.kernel)


def _run(call: CacheCall) -> tuple[Tensor, Tensor | None]:
    """Make a call, prepared once for all that have its options and layouts."""
    tensors, options = call
    refuse_tangents(tensors.values())
    try:
        shared = tensors["k_cache"].data_ptr() == tensors["v_cache"].data_ptr()
        key = *tensors, *map(_describe, tensors.values()), shared, options
    except RuntimeError:
        refuse_without_memory(tensors)
    prepared = _prepared.get(key)
    if prepared is None:
        device = tensors["q"].device
        plan = plan_with_kv_cache(cache_problem_of(tensors, **options._asdict()), gpu_at(device), options.kernel)
        prepared = remember(_prepared, key, prepare_call(plan, device))
    check_contents(tensors, options)
    return prepared(tensors)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a prepared call depends on: not the elements, and of the address only the alignment."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15, tensor.is_neg()


# Graphs that torch traces hold the operators below; the eager call never does.
_PLACES = "Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad_k"
_HEADS = "Tensor? sinks, Tensor? alibi, Tensor? bias"
_TAIL = (
    "bool causal, SymInt window_left, SymInt window_right, float softcap, float? softmax_scale, SymInt num_splits, "
    "bool batch_invariant, str kernel"
)
_ATTEND = (
    f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, {_PLACES}, {_HEADS}, "
    f"Tensor? k_scale, Tensor? v_scale, {_TAIL}"
)
_APPEND = (
    "Tensor q, Tensor(a1!) k_cache, Tensor(a2!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    f"{_PLACES}, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, {_HEADS}, "
    f"Tensor(a3!)? k_scale, Tensor(a4!)? v_scale, {_TAIL}"
)
_ATTEND_NAMES, _APPEND_NAMES = ([part.split()[-1] for part in schema.split(", ")] for schema in (_ATTEND, _APPEND))


def _serve(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run an operator."""
    refuse_context_parallel()
    window = given.pop("window_left"), given.pop("window_right")
    tensors = {name: given.pop(name) for name in _TENSORS if name in given}
    tensors |= {name: tensors[name].detach() for name in DETACHED if name in tensors}
    o, lse = _run(describe_cache_call(tensors, CacheOptions(**given, window=window, return_lse=True)))
    assert lse is not None
    return o, lse


@torch.library.custom_op(
    "flashmoe_science::attention_with_kv_cache", mutates_args=(), schema=f"({_ATTEND}) -> (Tensor, Tensor)"
)
def _attention_with_kv_cache(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _serve(dict(zip(_ATTEND_NAMES, arguments, strict=True)))


@torch.library.custom_op(
    "flashmoe_science::attention_append_kv_cache",
    mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"),
    schema=f"({_APPEND}) -> (Tensor, Tensor)",
)
def _attention_append_kv_cache(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _serve(dict(zip(_APPEND_NAMES, arguments, strict=True)))


@_attention_with_kv_cache.register_fake
@_attention_append_kv_cache.register_fake
def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Return outputs without data, in the memory order of the real ones."""
    check_fake(q, k_cache, v_cache, (4, 4, 4), others)
    batch, heads, seqlen_q, _ = q.shape
    columns = v_cache.shape[3]
    strides = output_strides(batch, heads, seqlen_q, columns, canonical_strides(q.shape, q.stride()))
    o = torch.empty_strided((batch, heads, seqlen_q, columns), strides, dtype=q.dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def _call_operator(call: CacheCall) -> tuple[Tensor, Tensor]:
    check_operator_call(call)
    tensors, options = call
    given: dict[str, Any] = {**tensors, **options._asdict()}
    given["window_left"], given["window_right"] = options.window
    found: tuple[Tensor, Tensor]
    if not any(name in tensors for name in ("k", "v", "rotary_cos", "rotary_sin")):
        found = _attention_with_kv_cache(*map(given.get, _ATTEND_NAMES))
        return found
    for name, other in (("k", "v"), ("v", "k"), ("cache_seqlens", "k")):
        if name not in tensors:
            raise InputError(f"{name} must be given with {other}, got None")
    for name in ("k_scale", "v_scale"):
        if name in tensors and tensors[name].dim() < 3:  # not written, but declared as what is: a view is refused
            given[name] = tensors[name].clone()
    found = _attention_append_kv_cache(*map(given.get, _APPEND_NAMES))
    return found
