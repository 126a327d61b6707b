"""What attention means: eager torch, on CPU or GPU, in any floating-point dtype up to fp64.

    s[b, h, m, n] = softmax_scale * sum_d q[b, h, m, d] * k[b, h // G, n, d]      G = H / HK
    s             = softcap * tanh(s / softcap)                                    where there is a softcap
    s            -= alibi[b, h] * |m + Sk - Sq - n|                                where there are slopes
    s            += bias[b, h, m, n]                                               where there is a bias
    s[b, h, m, n] = -inf where causal and n > m + Sk - Sq                          (aligned bottom-right)
    s[b, h, m, n] = -inf where n < m + Sk - Sq - left or n > m + Sk - Sq + right   where the window has these bounds
    s[b, h, m, n] = -inf where mask[b, h // (H / masks), m, n] is False            where there is a mask
    z[b, h, m]    = sum_n exp(s[m, n]) + exp(sinks[h])                             the latter where there are sinks
    o[b, h, m]    = sum_n exp(s[m, n]) / z * d[b, h, m, n] * v[b, h // G, n]
    lse[b, h, m]  = log(z)                                                         (natural logarithm)

A sink is the score of a key that every row sees and whose value is 0. A row that sees no key has o = 0, and lse = -inf
or its sink. d is 1 without dropout; with it 1 / (1 - dropout_p) where ``philox.dropout_keeps``, else 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gpu.ambient import without_autocast
from .philox import dropout_keeps

# Scores of one chunk of rows, so that fp64 references of long sequences fit: 2**27 elements are 1 GiB.
_CHUNK_SCORES = 1 << 27


@without_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)``, computed in ``dtype``.

    Args:
        q: ``[B, H, Sq, D]``.
        k: ``[B, HK, Sk, D]``; H is a multiple of HK.
        v: ``[B, HK, Sk, DV]``.
        causal: hide key n from row m where n > m + Sk - Sq.
        softmax_scale: factor on the scores. Default ``D ** -0.5``.
        window: (left, right), hide keys further than that from m + Sk - Sq; -1 for no bound.
        softcap: bound on the size of the scores; 0 for none.
        sinks: ``[H]``.
        alibi: slopes ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, Sq, Sk]``.
        mask: boolean ``[B or 1, what divides H, Sq, Sk]``, False hides a key.
        dropout_p: share of the probabilities that are dropped; 0 for none.
        dropout_seed: ``[2]`` int64, seed and offset.
        first_sequence: what the random numbers take b from.
        dtype: of every step. Default: fp32 for 16-bit inputs, else the inputs' own.

    Returns:
        o ``[B, H, Sq, DV]`` and lse ``[B, H, Sq]``, both in ``dtype``.
    """
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    o = torch.zeros(batch, heads, seqlen_q, head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        lse[:] = sinks.to(dtype)[:, None]
    if o.numel() == 0 or seqlen_k == 0:
        return o, lse
    group = heads // heads_kv
    temporaries = 8 if dropout_p else 1  # random numbers are made of int64
    kv_heads, rows = _chunk(heads_kv, seqlen_q, temporaries * group * seqlen_k)
    slopes = None if alibi is None else alibi.expand(batch, heads)
    added = None if bias is None else bias.expand(batch, heads, seqlen_q, seqlen_k)
    shown = _of_heads(mask, batch, heads)
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dtype": dtype}
    for b, h, first in itertools.product(range(batch), range(0, heads_kv, kv_heads), range(0, seqlen_q, rows)):
        its, mine, chunk = slice(h, h + kv_heads), slice(h * group, (h + kv_heads) * group), slice(first, first + rows)
        end = keys_seen(first + rows, seqlen_q, seqlen_k, causal=causal)
        dropout |= {"keys": end, "first_head": (first_sequence + b) * heads + h * group, "first_row": first}
        kept = _kept(q[b, mine, chunk], **dropout)
        found = _attend_rows(
            _grouped(q[b, mine, chunk].to(dtype), group),
            k[b, its, None, :end].to(dtype),
            v[b, its, None, :end].to(dtype),
            None if sinks is None else _grouped(sinks[mine].to(dtype), group),
            None if slopes is None else _grouped(slopes[b, mine].to(dtype), group),
            None if added is None else _grouped(added[b, mine, chunk, :end].to(dtype), group),
            None if kept is None else _grouped(kept, group),
            mask=None if shown is None else _grouped(shown(b, mine, chunk)[..., :end], group),
            position=first + seqlen_k - seqlen_q,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
        )
        o[b, mine, chunk], lse[b, mine, chunk] = (each.flatten(0, 1) for each in found)
    return o, lse


def _of_heads(mask: Tensor | None, batch: int, heads: int) -> Callable[[int, slice, slice], Tensor] | None:
    """Return what gives the mask of rows of some heads of a sequence, ``[heads, rows, Sk]``."""
    if mask is None:
        return None
    masks = mask.expand(batch, -1, -1, -1)
    of_head = torch.arange(heads, device=mask.device) * mask.shape[1] // max(1, heads)
    return lambda b, mine, rows: masks[b, :, rows][of_head[mine]]


def _chunk(heads_kv: int, seqlen_q: int, scores_of_row: int) -> tuple[int, int]:
    """Return how many K/V heads, and rows of the heads that share each, have their scores at once.

    Few chunks: with small ones a GPU would do less than its host has to say.
    """
    rows = max(1, min(seqlen_q, _CHUNK_SCORES // scores_of_row))
    return heads_at_once(heads_kv, scores_of_row * rows), rows


def keys_seen(end: int, seqlen_q: int, seqlen_k: int, *, causal: bool) -> int:
    """Return how many keys, at least one, the rows before ``end`` need: a causal mask hides all that follow."""
    return max(1, min(seqlen_k, min(end, seqlen_q) + seqlen_k - seqlen_q)) if causal else seqlen_k


def heads_at_once(heads_kv: int, scores: int) -> int:
    """Return how many K/V heads are computed together, where each has so many scores."""
    return max(1, min(heads_kv, _CHUNK_SCORES // max(1, scores)))


def _grouped(of_heads: Tensor, group: int) -> Tensor:
    """Return ``[N * G, ...]`` as ``[N, G, ...]``: N K/V heads, each with the G heads that share it."""
    return of_heads.reshape(-1, group, *of_heads.shape[1:])


def _kept(
    q: Tensor,
    *,
    keys: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    first_head: int,
    first_row: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the factors that dropout puts on the probabilities of rows ``[G, M, D]``, or None where there is none."""
    if not dropout_p:
        return None
    assert dropout_seed is not None
    heads, rows = (
        torch.arange(first, first + size, device=q.device)
        for first, size in ((first_head, q.shape[0]), (first_row, q.shape[1]))
    )
    kept = dropout_keeps(dropout_seed, dropout_p, heads=heads, rows=rows, keys=torch.arange(keys, device=q.device))
    return kept.to(dtype) / (1 - dropout_p)


def _by_group(rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``rows`` ``[N, G, M, X]`` times ``columns`` ``[N, 1, X, Y]``, which are not copied for each of G heads."""
    return (rows.flatten(1, 2) @ columns[:, 0]).reshape(*rows.shape[:3], columns.shape[-1])


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    kept: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` of rows of N K/V heads, each shared by G heads; the first is at key ``position``.

    q is ``[N, G, M, D]``, k ``[N, 1, Sk, D]``, sinks and slopes ``[N, G]``, bias and what dropout multiplies with
    ``[N, G, M, Sk]``. Autograd goes through it, also in rows that see no key, whose gradients are 0.
    """
    weights, total, top, _ = _weigh_rows(q, k, sinks, slopes, bias, **options)
    unseen = total == 0
    total = torch.where(unseen, 1.0, total)
    weights = weights if kept is None else weights * kept
    return _by_group(weights, v) / total[..., None], torch.where(unseen, -torch.inf, top + torch.log(total))


def _weigh_rows(
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return exp(s - top), its sum with the sinks', top, and tanh of the scores where there is a softcap."""
    scores, capped = _score_rows(q, k, slopes, bias, **options)
    return *_exponentials(scores, sinks), capped


def _score_rows(
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None,
    bias: Tensor | None,
    *,
    position: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the scores, -inf of hidden keys, and their tanh where there is a softcap."""
    scores = _by_group(q, k.mT) * scale
    capped = None
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores = softcap * capped
    rows, keys = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
    ahead = keys - rows[:, None] - position
    if slopes is not None:
        scores -= slopes[..., None, None] * ahead.abs()
    if bias is not None:
        scores += bias
    _hide(scores, ahead, causal=causal, window=window)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return scores, capped


def _exponentials(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(s - top), its sum with the sinks', and top."""
    # Not exp(s - lse): beside a bias of -3e38, a common mask, the logarithm of the sum is lost.
    top = scores.detach().amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach()[..., None])
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks[..., None] - top)
    return weights, total, top


@without_autocast
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
    dtype: torch.dtype | None = None,
    output: bool = False,
) -> dict[str, Tensor]:
    """Return the gradients of q, k, v and, where they are given, sinks and bias, computed in ``dtype``.

        p = exp(s - lse)      delta[m] = sum_d do[m, d] o[m, d] - dlse[m]      ds[m, n] = p (do[m] . v[n] - delta[m])
        dv = p.T do           dbias = ds, summed over what one bias serves      dsinks = - sum_m exp(sinks - lse) delta
        dq = scale ds' k      dk = scale ds'.T q      with ds' = ds, times 1 - tanh^2 where there is a softcap

    With dropout p is times d in dv, and do[m] . v[n] in ds.

    Args:
        q: as in ``attention``, like all that is not named here.
        k: ``[B, HK, Sk, D]``.
        v: ``[B, HK, Sk, DV]``.
        do: gradient of o, ``[B, H, Sq, DV]``.
        dlse: gradient of lse, ``[B, H, Sq]``; None for 0.
        causal: hide later keys.
        softmax_scale: factor on the scores.
        window: (left, right).
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: slopes, of which there is no gradient.
        bias: ``[B or 1, H or 1, Sq, Sk]``.
        mask: boolean ``[B or 1, what divides H, Sq, Sk]``.
        dropout_p: share of the probabilities that are dropped.
        dropout_seed: ``[2]`` int64.
        first_sequence: what the random numbers take b from.
        dtype: of every step. Default: fp32 for 16-bit inputs, else the inputs' own.
        output: return o too, which its gradient needs anyhow.

    Returns:
        Gradients by name, of the shapes of what they are of, in ``dtype``; and ``o``, where it is asked for.
    """
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    given = {"q": q, "k": k, "v": v, **{n: t for n, t in (("sinks", sinks), ("bias", bias)) if t is not None}}
    given_or_asked = {**given, **({"o": do} if output else {})}
    grads = {name: torch.zeros(x.shape, dtype=dtype, device=q.device) for name, x in given_or_asked.items()}
    dlse = torch.zeros(do.shape[:3], dtype=dtype, device=q.device) if dlse is None else dlse.to(dtype)
    if seqlen_k == 0 and sinks is not None:  # the LSE is the sink
        grads["sinks"] += dlse.sum((0, 2))
    if do.numel() == 0 or seqlen_k == 0:
        return grads
    group = heads // heads_kv
    kv_heads, rows = _chunk(heads_kv, seqlen_q, (2 if q.is_cuda and not dropout_p else 8) * group * seqlen_k)
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    options["scale"] = head_dim**-0.5 if softmax_scale is None else softmax_scale
    slopes = None if alibi is None else alibi.expand(batch, heads)
    shown = _of_heads(mask, batch, heads)
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dtype": dtype}
    for b, h, first in itertools.product(range(batch), range(0, heads_kv, kv_heads), range(0, seqlen_q, rows)):
        its, mine, chunk = slice(h, h + kv_heads), slice(h * group, (h + kv_heads) * group), slice(first, first + rows)
        end = keys_seen(first + rows, seqlen_q, seqlen_k, causal=causal)
        places: dict[str, tuple[Any, ...]] = {"q": (b, mine, chunk), "sinks": (mine,)}
        places |= dict.fromkeys(("k", "v"), (b, its, slice(end)))
        if bias is not None:
            own_b, own_h = b if bias.shape[0] > 1 else 0, mine if bias.shape[1] > 1 else slice(0, 1)
            places["bias"] = own_b, own_h, chunk, slice(end)
        chosen = {name: given[name][places[name]].to(dtype) for name in given}
        dropout |= {"keys": end, "first_head": (first_sequence + b) * heads + h * group, "first_row": first}
        kept = _kept(q[b, mine, chunk], **dropout)
        # K, V and a bias that all heads share have a second axis of one.
        shared = {"k", "v"} if bias is None or bias.shape[1] > 1 else {"k", "v", "bias"}
        found = _differentiate_rows(
            {name: _grouped(tensor, 1 if name in shared else group) for name, tensor in chosen.items()},
            None if slopes is None else _grouped(slopes[b, mine].to(dtype), group),
            None if kept is None else _grouped(kept, group),
            _grouped(do[b, mine, chunk].to(dtype), group),
            _grouped(dlse[b, mine, chunk], group),
            mask=None if shown is None else _grouped(shown(b, mine, chunk)[..., :end], group),
            position=first + seqlen_k - seqlen_q,
            **options,
        )
        if output:
            grads["o"][b, mine, chunk] = found["o"].flatten(0, 1)
        for name in given:
            grads[name][places[name]] += found[name].flatten(0, 1).sum_to_size(chosen[name].shape)
    return grads


def _differentiate_rows(
    given: dict[str, Tensor], slopes: Tensor | None, kept: Tensor | None, do: Tensor, dlse: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Return what ``_attend_rows`` of the same rows gives to each gradient; that of the bias as ``[N, G, M, Sk]``."""
    q, k, v, sinks = given["q"], given["k"], given["v"], given.get("sinks")
    weights, total, top, capped = _weigh_rows(q, k, sinks, slopes, given.get("bias"), **options)
    unseen = total == 0
    total = torch.where(unseen, 1.0, total)[..., None]
    p = weights / total
    kept_p = p if kept is None else p * kept
    o = _by_group(kept_p, v)
    delta = (do * o).sum(-1) - dlse
    delta = torch.where(unseen, 0.0, delta)[..., None]  # the gradient of an LSE of -inf may be NaN
    dp = _by_group(do, v.mT) if kept is None else _by_group(do, v.mT) * kept
    dbias = p * (dp - delta)
    ds = dbias if capped is None else dbias * (1 - capped**2)
    found = {
        "q": _by_group(ds, k) * options["scale"],
        "k": (ds.flatten(1, 2).mT @ q.flatten(1, 2))[:, None] * options["scale"],
        "v": (kept_p.flatten(1, 2).mT @ do.flatten(1, 2))[:, None],
        "bias": dbias,
        "o": o,
    }
    if sinks is not None:
        found["sinks"] = -(torch.exp(sinks[..., None] - top)[..., None] / total * delta).sum((2, 3))
    return found


def _hide(scores: Tensor, ahead: Tensor, *, causal: bool, window: tuple[int, int]) -> None:
    """Hide keys, so far ahead of their rows, that a mask hides."""
    left, right = window
    if causal:
        scores.masked_fill_(ahead > 0, -torch.inf)
    if left >= 0:
        scores.masked_fill_(ahead < -left, -torch.inf)
    if right >= 0:
        scores.masked_fill_(ahead > right, -torch.inf)


@without_autocast
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` of packed sequences: each by ``attention``.

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, HK, D]``, or with ``page_table`` ``[pages, page_size, HK, D]``.
        v: ``[Tk, HK, DV]``, or with ``page_table`` ``[pages, page_size, HK, DV]``.
        cu_seqlens_q: ``[B + 1]``, where sequences start; the last one is where they end.
        cu_seqlens_k: ``[B + 1]``.
        seqused_q: ``[B]``, their lengths where they end earlier.
        seqused_k: ``[B]``.
        page_table: ``[B, P]``: the page of key n of sequence b is ``page_table[b, n // page_size]``.
        alibi: slopes ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, queries, keys]`` of the longest sequences, or more.
        **options: of ``attention``.

    Returns:
        o ``[Tq, H, DV]`` and lse ``[H, Tq]``; rows that are in no sequence have 0 and -inf.
    """
    total, heads = q.shape[:2]
    o, lse = None, None
    for b, (place_q, place_k) in enumerate(
        zip(_places(cu_seqlens_q, seqused_q), _places(cu_seqlens_k, seqused_k), strict=True)
    ):
        rows, keys = slice(*place_q), (0, place_k[1] - place_k[0])
        if page_table is None:
            own_k, own_v = (tensor[slice(*place_k)] for tensor in (k, v))
        else:
            keys = keys_in_reach(place_q, place_k, options.get("window", (-1, -1)))
            places = torch.arange(*keys, device=q.device)
            pages = page_table[b, places // k.shape[1]].long()
            own_k, own_v = (tensor[pages, places % k.shape[1]] for tensor in (k, v))
        inputs = (tensor.transpose(0, 1)[None] for tensor in (q[rows], own_k, own_v))
        slopes = alibi[b] if alibi is not None and alibi.dim() == 2 else alibi
        added = None if bias is None else bias[_bias_of(bias, b, place_q, keys)]
        one, one_lse = attention(*inputs, alibi=slopes, bias=added, first_sequence=b, **options)
        if o is None or lse is None:
            o = torch.zeros(total, heads, v.shape[-1], dtype=one.dtype, device=q.device)
            lse = torch.full((heads, total), -torch.inf, dtype=one.dtype, device=q.device)
        o[rows], lse[:, rows] = one[0].transpose(0, 1), one_lse[0]
    if o is None or lse is None:  # there are no sequences
        o = torch.zeros(total, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.full((heads, total), -torch.inf, device=q.device)
    return o, lse


def keys_in_reach(place_q: tuple[int, int], place_k: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """Return first and end of the keys of one sequence that its rows can see, counted from its first key.

    A right bound hides none of the last ones: they are seen by the last row.
    """
    rows, keys = place_q[1] - place_q[0], place_k[1] - place_k[0]
    if rows == 0:
        return keys, keys
    return min(max(0, keys - rows - window[0]), keys) if window[0] >= 0 else 0, keys


@without_autocast
def attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the gradients of packed sequences: of each by ``attention_backward``, 0 of tokens in none.

    Args:
        q: as in ``attention_varlen``, like all that is not named here.
        k: ``[Tk, HK, D]``.
        v: ``[Tk, HK, DV]``.
        do: gradient of o, ``[Tq, H, DV]``.
        dlse: gradient of lse, ``[H, Tq]``; None for 0.
        cu_seqlens_q: ``[B + 1]``.
        cu_seqlens_k: ``[B + 1]``.
        seqused_q: ``[B]``.
        seqused_k: ``[B]``.
        alibi: slopes.
        bias: ``[B or 1, H or 1, queries, keys]``.
        **options: of ``attention_backward``.

    Returns:
        Gradients by name, of the shapes of what they are of.
    """
    dtype = options.get("dtype")
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    grads = {name: torch.zeros(x.shape, dtype=dtype, device=q.device) for name, x in (("q", q), ("k", k), ("v", v))}
    sinks = options.get("sinks")
    if sinks is not None:
        grads["sinks"] = torch.zeros(sinks.shape, dtype=dtype, device=q.device)
    if bias is not None:
        grads["bias"] = torch.zeros(bias.shape, dtype=dtype, device=q.device)
    for b, (place_q, place_k) in enumerate(
        zip(_places(cu_seqlens_q, seqused_q), _places(cu_seqlens_k, seqused_k), strict=True)
    ):
        rows, keys = slice(*place_q), slice(*place_k)
        own = [tensor.transpose(0, 1)[None] for tensor in (q[rows], k[keys], v[keys], do[rows])]
        own += [] if dlse is None else [dlse[None, :, rows]]
        slopes = alibi[b] if alibi is not None and alibi.dim() == 2 else alibi
        added = None
        if bias is not None:
            its = _bias_of(bias, b, place_q, (0, place_k[1] - place_k[0]))
            added = bias[its]
        differentiate: Any = attention_backward
        one = differentiate(*own, alibi=slopes, bias=added, first_sequence=b, **options)
        grads["q"][rows] = one["q"][0].transpose(0, 1)
        for name in ("k", "v"):
            grads[name][keys] = one[name][0].transpose(0, 1)
        if sinks is not None:
            grads["sinks"] += one["sinks"]
        if bias is not None:
            grads["bias"][its] += one["bias"]
    return grads


def _bias_of(bias: Tensor, b: int, place_q: tuple[int, int], keys: tuple[int, int]) -> tuple[slice, ...]:
    """Return where the bias of one sequence is: of its rows, and of its keys from the first of ``keys`` to the last."""
    own = slice(b, b + 1) if bias.shape[0] > 1 else slice(0, 1)
    return own, slice(None), slice(0, place_q[1] - place_q[0]), slice(*keys)


def _places(cu_seqlens: Tensor, seqused: Tensor | None) -> list[tuple[int, int]]:
    """Return where each sequence starts and ends."""
    starts: list[int] = cu_seqlens.tolist()
    if seqused is None:
        return list(itertools.pairwise(starts))
    return [(start, start + length) for start, length in zip(starts, seqused.tolist(), strict=False)]


def attention_low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
) -> Tensor:
    """Return o as the framework's own eager code computes it in the dtype of the inputs: scores, softmax, product.

    What it loses against fp64 sets the error budget of the kernels.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ k.transpose(-1, -2)
    row, key = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    ahead = key - row[:, None] - (k.shape[2] - q.shape[2])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        scores = (scores - alibi.float()[..., None, None] * ahead.abs()).to(q.dtype)
    if bias is not None:
        scores = (scores + bias.float()).to(q.dtype)
    _hide(scores, ahead, causal=causal, window=window)
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat_interleave(q.shape[1] // max(1, mask.shape[1]), 1), -torch.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)  # rows without keys: NaN, 0 by definition
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    weights = weights[..., : k.shape[2]]
    if dropout_p:
        flat = q.flatten(0, 1)  # [B * H, Sq, D]
        kept = _kept(
            flat, keys=k.shape[2], dropout_p=dropout_p, dropout_seed=dropout_seed,
            first_head=first_sequence * q.shape[1], first_row=0, dtype=torch.float32,
        )  # fmt: skip
        assert kept is not None
        weights = weights * kept.to(q.dtype).view(weights.shape)
    return weights @ v
