"""Attention of packed sequences: contract, validation, and the way from a call to its prepared launch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from .cache_contract import check_pages
from .gradients import PLAIN, Options, differentiable, kernel_after, records, refuse_tangents, register_gradients
from .inputs import (
    cast_under_autocast,
    check_dropout,
    check_optional,
    check_options,
    check_softcap,
    check_window,
    gpu_of,
    layout_of,
    refuse_undrawn,
    seed_of_call,
)
from .packed import (
    check_lengths,
    check_room,
    layout_of_table,
    layout_of_tokens,
    packed_problem,
    planned_lengths,
    refuse_dropout_of_pages,
)
from .packed_calls import prepare_packed_call
from .plan import plan_attention
from .reference import keys_in_reach
from .refusals import check_call, check_devices, check_longest, check_stand_in
from .tiles import Plan

_prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}
_MAX_PREPARED = 8192
_is_compiling = torch.compiler.is_compiling


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query of a packed batch to the keys of its own sequence.

    What ``flash_attention`` computes, for each sequence b with q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and the k and v
    of cu_seqlens_k; masks are aligned to the ends of its own queries and keys.

    Args:
        q: ``[Tq, H, D]`` fp16, bf16 or fp32, any strides; D from 1 to 256 on a GPU.
        k: ``[Tk, HK, D]``, dtype and device of q; H is a multiple of HK. With ``page_table`` it is a cache
            ``[pages, page_size, HK, D]`` of any page size, any strides but D contiguous.
        v: ``[Tk, HK, DV]``, dtype and device of q; DV from 1 to 256 on a GPU. With ``page_table``
            ``[pages, page_size, HK, DV]``.
        cu_seqlens_q: ``[B + 1]`` int32, contiguous, on the device of q: where sequences start in q, and where the last
            one ends. A sequence may be empty.
        cu_seqlens_k: ``[B + 1]`` int32, the same of k and v. With ``page_table`` only the differences count: the keys
            of each sequence.
        max_seqlen_q: queries of the longest sequence, or more. Most grids are of it: a longer one may not be finished.
        max_seqlen_k: keys of the longest sequence, or more. It decides tiles; a window as wide as it is dropped.
        causal: as in ``flash_attention``, like the other options.
        softmax_scale: factor on the scores. Default ``D ** -0.5``.
        window: (left, right), -1 for no bound.
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, rows, columns]`` fp16, bf16 or fp32, any strides (0 too), with ``max_seqlen_q`` rows
            and ``max_seqlen_k`` columns or more: element (b, h, m, n) is added to the score of query m and key n of
            sequence b, both counted from its start; -inf hides the key. Elements behind the ends of all sequences that
            it serves decide nothing, whatever they are; their gradient is 0. A call is prepared, and has programs, for
            the size of its bias and not for the maxima: pad it to few sizes, and pass of a much larger one a slice.
        seqused_q: ``[B]`` int32, contiguous: queries of each sequence, where it ends before its place does.
        seqused_k: ``[B]`` int32, the same of its keys. Keys behind it decide nothing, whatever they are.
        dropout_p: as in ``flash_attention``, with m and n counted from the start of the sequence b.
        dropout_seed: ``[2]`` int64, contiguous, on the device of q. Default: drawn from torch's default generator.
        page_table: ``[B, P]`` int32, contiguous along P, on the device of q: key n of sequence b lies in row
            ``n % page_size`` of page ``page_table[b, n // page_size]``. Entries behind the last key are never read, nor
            are pages of which a window hides all keys from the rows of a tile. Without gradients and dropout.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, or one name to force; a forced kernel never falls back.

    Returns:
        o ``[Tq, H, DV]`` in the dtype of q, contiguous. Rows in the place of a sequence behind ``seqused_q`` are 0;
        rows in no sequence's place are not written on a GPU. With ``return_lse`` the pair of o and lse ``[H, Tq]``
        fp32, natural logarithm, the transpose of a contiguous tensor; -inf where o is 0 for want of a query.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above. Lengths on a GPU are not read, as that
            would wait for it; with ``FLASHMOE_CHECK=1`` in the environment they are read and checked, except while a
            CUDA graph is captured. Those on a CPU always are. So are pages.
        UnsupportedError: as in ``flash_attention``; with ``page_table`` also for dropout, and where gradients are
            recorded and an input requires grad.

    Numerics: as in ``flash_attention``. A sequence has the same bits whatever else is in the batch, as long as
    ``max_seqlen_q``, ``max_seqlen_k``, B and H lead to the same tile (``explain_varlen`` shows it).

    The host reads no tensor, so a CUDA graph replays with other lengths in the same tensors, up to the maxima.
    """
    check_call(return_lse, kernel)
    softmax_scale = check_options(causal, softmax_scale)
    window, softcap, dropout_p = check_window(window), check_softcap(softcap), check_dropout(dropout_p)
    check_optional(
        sinks=sinks, alibi=alibi, bias=bias, seqused_q=seqused_q, seqused_k=seqused_k, dropout_seed=dropout_seed,
        page_table=page_table,
    )  # fmt: skip
    refuse_dropout_of_pages(page_table, dropout_p)
    needed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in needed.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    q, k, v = cast_under_autocast(q, k, v)
    dropout_seed = seed_of_call(dropout_p, dropout_seed, q)
    optional = (sinks, alibi, bias, seqused_q, seqused_k, dropout_seed, page_table)
    refuse_tangents((q, k, v, sinks, alibi, bias))
    recording = records({"q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias})
    if recording and page_table is not None:
        raise _no_gradients({"q": q, "k": k, "v": v, "sinks": sinks, "bias": bias})
    if _is_compiling() or any(
        type(tensor) not in PLAIN for tensor in (q, k, v, cu_seqlens_q, cu_seqlens_k, *optional) if tensor is not None
    ):
        check_longest(max_seqlen_q, max_seqlen_k)
        check_devices({
            **needed, "sinks": sinks, "alibi": alibi, "bias": bias, "seqused_q": seqused_q, "seqused_k": seqused_k,
            "page_table": page_table,
        })  # fmt: skip
        masks = max_seqlen_q, max_seqlen_k, causal, softmax_scale, *window, softcap
        o, lse = (
            _attention_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, *masks, *optional[:6], dropout_p, return_lse or recording, kernel
            )
            if page_table is None
            else _attention_varlen_paged(
                q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, *masks, *optional[:5], return_lse, kernel
            )
        )
        return (o, lse) if return_lse else o
    lengths = planned_lengths(max_seqlen_q, max_seqlen_k, bias)
    if recording:
        attend = functools.partial(
            flash_attention_varlen, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
            softmax_scale=softmax_scale, window=window, softcap=softcap, dropout_p=dropout_p, return_lse=True,
            kernel=kernel,
        )  # fmt: skip
        asked = Options(causal, softmax_scale, window, softcap, lengths, kernel_after(kernel), dropout_p)
        names = ("sinks", "alibi", "bias", "seqused_q", "seqused_k", "dropout_seed")
        given = dict(zip(names, optional, strict=False))
        o, lse = differentiable(attend, asked, {**needed, "q": q, "k": k, "v": v, **given})
        return (o, lse) if return_lse else o
    options = {
        "causal": causal, "softmax_scale": softmax_scale, "window": window, "softcap": softcap, "dropout_p": dropout_p,
    }  # fmt: skip
    tensors = {
        "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "page_table": page_table, "dropout_seed": dropout_seed,
    }  # fmt: skip
    key = (*options.values(), *lengths, return_lse, kernel, *map(layout_of_tokens, (q, k, v)))
    key = (*key, layout_of_table(page_table), *map(layout_of, (*optional[:6], cu_seqlens_q, cu_seqlens_k)))
    call = _prepared.get(key)
    if call is None:
        problem = packed_problem(tensors, lengths, return_lse=return_lse, **options)
        call = prepare_packed_call(plan_attention(problem, gpu_of(q), kernel), q)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    if k.shape[0] != v.shape[0]:
        what = "tokens" if page_table is None else "pages"
        raise InputError(f"v must have as many {what} as k, {k.shape[0]}, got {v.shape[0]}")
    if page_table is not None:
        check_room(page_table, k, max_seqlen_k)
    if _reads_lengths(q):
        _check_what_lies_in(tensors, (max_seqlen_q, max_seqlen_k), window)
    extras = [tensor for tensor in list(tensors.values())[3:] if tensor is not None]
    return call(q, k, v, q.data_ptr(), k.data_ptr(), v.data_ptr(), *extras)


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Plan:
    """Return the plan that would serve ``flash_attention_varlen`` with the same arguments; nothing is launched.

    The lengths in it are those that are planned for: the maxima, rounded up, or the sizes of a bias.
    """
    check_call(return_lse, kernel)
    check_optional(
        sinks=sinks, alibi=alibi, bias=bias, seqused_q=seqused_q, seqused_k=seqused_k, dropout_seed=dropout_seed,
        page_table=page_table,
    )  # fmt: skip
    dropout_p = check_dropout(dropout_p)
    refuse_dropout_of_pages(page_table, dropout_p)
    problem = packed_problem(
        {
            "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi, "bias": bias,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
            "page_table": page_table, "dropout_seed": dropout_seed,
        },
        planned_lengths(max_seqlen_q, max_seqlen_k, bias),
        causal=causal,
        softmax_scale=check_options(causal, softmax_scale),
        window=check_window(window),
        softcap=check_softcap(softcap),
        dropout_p=dropout_p,
        return_lse=return_lse,
    )  # fmt: skip
    if page_table is not None:
        check_room(page_table, k, max_seqlen_k)
    return plan_attention(problem, gpu_of(q), kernel)


def _reads_lengths(q: Tensor) -> bool:
    """Whether lengths are read: a GPU would have to be waited for, which a capture does not allow."""
    if q.device.type != "cuda":
        return True
    return os.environ.get("FLASHMOE_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()


def _check_what_lies_in(tensors: dict[str, Any], longest: tuple[int, int], window: tuple[int, int]) -> None:
    """Read lengths, and the pages of keys that are seen, and raise ``InputError`` where they are wrong."""
    q, k, page_table = tensors["q"], tensors["k"], tensors["page_table"]
    tokens_k = k.shape[0] if page_table is None else None
    places_q = check_lengths("q", q.shape[0], tensors["cu_seqlens_q"], longest[0], tensors["seqused_q"])
    places_k = check_lengths("k", tokens_k, tensors["cu_seqlens_k"], longest[1], tensors["seqused_k"])
    if page_table is not None:
        reached = [keys_in_reach(*places, window) for places in zip(places_q, places_k, strict=True)]
        check_pages(page_table, k.shape[0], k.shape[1], reached)


def _no_gradients(tensors: dict[str, Tensor | None]) -> UnsupportedError:
    names = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    return UnsupportedError(
        f"there is no backward with a page_table, and gradients are required of {', '.join(names)}",
        hint="call it under torch.no_grad(), or pass detached tensors",
    )


@torch.library.custom_op("flashmoe_science::attention_varlen", mutates_args=())
def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return o and, where it is not asked for, an LSE of no elements."""
    refuse_undrawn(dropout_p, dropout_seed)
    result = flash_attention_varlen(
        q.detach(),
        k.detach(),
        v.detach(),
        cu_seqlens_q.detach(),
        cu_seqlens_k.detach(),
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        alibi=None if alibi is None else alibi.detach(),
        bias=None if bias is None else bias.detach(),
        seqused_q=None if seqused_q is None else seqused_q.detach(),
        seqused_k=None if seqused_k is None else seqused_k.detach(),
        dropout_p=dropout_p,
        dropout_seed=None if dropout_seed is None else dropout_seed.detach(),
        return_lse=return_lse,
        kernel=kernel,
    )
    return result if return_lse else (result, torch.empty(0, dtype=torch.float32, device=q.device))


# Of its own: what has gradients saves its inputs by name, and torch leaves those out that are as by default.
@torch.library.custom_op("flashmoe_science::attention_varlen_paged", mutates_args=())
def _attention_varlen_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    page_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return the same over pages; there are no gradients."""
    result = flash_attention_varlen(
        q.detach(), k.detach(), v.detach(), cu_seqlens_q.detach(), cu_seqlens_k.detach(), max_seqlen_q, max_seqlen_k,
        causal=causal, softmax_scale=softmax_scale, window=(window_left, window_right), softcap=softcap,
        sinks=None if sinks is None else sinks.detach(), alibi=None if alibi is None else alibi.detach(),
        bias=None if bias is None else bias.detach(), seqused_q=None if seqused_q is None else seqused_q.detach(),
        seqused_k=None if seqused_k is None else seqused_k.detach(), page_table=page_table.detach(),
        return_lse=return_lse, kernel=kernel,
    )  # fmt: skip
    return result if return_lse else (result, torch.empty(0, dtype=torch.float32, device=q.device))


@_attention_varlen.register_fake
def _fake_varlen(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    check_stand_in(q, k, v, (3, 3, 3), options)
    return _fake_outputs(q, v, has_lse=bool(options[-2]))


@_attention_varlen_paged.register_fake
def _fake_varlen_paged(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    check_stand_in(q, k, v, (3, 4, 4), options)
    return _fake_outputs(q, v, has_lse=bool(options[-2]))


def _fake_outputs(q: Tensor, v: Tensor, *, has_lse: bool) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    o = torch.empty((tokens, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    if not has_lse:
        return o, torch.empty(0, dtype=torch.float32, device=q.device)
    return o, torch.empty((tokens, heads), dtype=torch.float32, device=q.device).t()


def _options_of(
    *, max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None, window_left: int,
    window_right: int, softcap: float, dropout_p: float, kernel: str, **_others: object,
) -> Options:  # fmt: skip
    longest = max_seqlen_q, max_seqlen_k  # which may be symbols: what they stand for is planned for when it is known
    return Options(
        causal, softmax_scale, (window_left, window_right), softcap, longest, kernel_after(kernel), dropout_p
    )


register_gradients(_attention_varlen, _options_of)
