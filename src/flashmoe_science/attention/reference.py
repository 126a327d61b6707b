"""What attention means: eager torch, on CPU or GPU, in any floating-point dtype up to fp64.

    s[b, h, m, n] = softmax_scale * sum_d q[b, h, m, d] * k[b, h // G, n, d]      G = H / HK
    s             = softcap * tanh(s / softcap)                                    where there is a softcap
    s            -= alibi[b, h] * |m + Sk - Sq - n|                                where there are slopes
    s            += bias[b, h, m, n]                                               where there is a bias
    s[b, h, m, n] = -inf where causal and n > m + Sk - Sq                          (aligned bottom-right)
    s[b, h, m, n] = -inf where n < m + Sk - Sq - left or n > m + Sk - Sq + right   where the window has these bounds
    z[b, h, m]    = sum_n exp(s[m, n]) + exp(sinks[h])                             the latter where there are sinks
    o[b, h, m]    = sum_n exp(s[m, n]) / z * v[b, h // G, n]
    lse[b, h, m]  = log(z)                                                         (natural logarithm)

A sink is the score of a key that every row sees and whose value is 0. A row that sees no key has o = 0, and lse = -inf
or its sink.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

# Scores of one chunk of rows, so that fp64 references of long sequences fit: 2**27 elements are 1 GiB.
_CHUNK_SCORES = 1 << 27


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
    rows = max(1, min(seqlen_q, _CHUNK_SCORES // (group * seqlen_k)))
    keys = torch.arange(seqlen_k, device=q.device)
    slopes = None if alibi is None else alibi.to(dtype).expand(batch, heads)
    added = None if bias is None else bias.expand(batch, heads, seqlen_q, seqlen_k)
    for b in range(batch):
        for h in range(heads_kv):
            kh, vh = k[b, h].to(dtype), v[b, h].to(dtype)
            mine = slice(h * group, (h + 1) * group)
            for first in range(0, seqlen_q, rows):
                last = min(first + rows, seqlen_q)
                scores = (q[b, mine, first:last].to(dtype) @ kh.T) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                ahead = keys - torch.arange(first, last, device=q.device)[:, None] - (seqlen_k - seqlen_q)
                if slopes is not None:
                    scores -= slopes[b, mine, None, None] * ahead.abs()
                if added is not None:
                    scores += added[b, mine, first:last].to(dtype)
                _hide(scores, ahead, causal=causal, window=window)
                # Not exp(s - lse): beside a bias of -3e38, a common mask, the logarithm of the sum is lost.
                top = scores.amax(-1)
                if sinks is not None:
                    top = torch.maximum(top, sinks[mine, None].to(dtype))
                top = torch.where(top == -torch.inf, 0.0, top)
                weights = torch.exp(scores - top[..., None])
                total = weights.sum(-1)
                if sinks is not None:
                    total += torch.exp(sinks[mine, None].to(dtype) - top)
                lse[b, mine, first:last] = top + torch.log(total)
                o[b, mine, first:last] = (weights @ vh) / torch.where(total == 0, 1.0, total)[..., None]
    return o, lse


def _hide(scores: Tensor, ahead: Tensor, *, causal: bool, window: tuple[int, int]) -> None:
    """Hide keys, so far ahead of their rows, that a mask hides."""
    left, right = window
    if causal:
        scores.masked_fill_(ahead > 0, -torch.inf)
    if left >= 0:
        scores.masked_fill_(ahead < -left, -torch.inf)
    if right >= 0:
        scores.masked_fill_(ahead > right, -torch.inf)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` of packed sequences: each by ``attention``.

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, HK, D]``.
        v: ``[Tk, HK, DV]``.
        cu_seqlens_q: ``[B + 1]``, where sequences start; the last one is where they end.
        cu_seqlens_k: ``[B + 1]``.
        seqused_q: ``[B]``, their lengths where they end earlier.
        seqused_k: ``[B]``.
        alibi: slopes ``[H]`` or ``[B, H]``.
        **options: of ``attention``.

    Returns:
        o ``[Tq, H, DV]`` and lse ``[H, Tq]``; rows that are in no sequence have 0 and -inf.
    """
    total, heads = q.shape[:2]
    o, lse = None, None
    for b, (place_q, place_k) in enumerate(
        zip(_places(cu_seqlens_q, seqused_q), _places(cu_seqlens_k, seqused_k), strict=True)
    ):
        rows, keys = slice(*place_q), slice(*place_k)
        inputs = (tensor.transpose(0, 1)[None] for tensor in (q[rows], k[keys], v[keys]))
        slopes = alibi[b] if alibi is not None and alibi.dim() == 2 else alibi
        one, one_lse = attention(*inputs, alibi=slopes, **options)
        if o is None or lse is None:
            o = torch.zeros(total, heads, v.shape[2], dtype=one.dtype, device=q.device)
            lse = torch.full((heads, total), -torch.inf, dtype=one.dtype, device=q.device)
        o[rows], lse[:, rows] = one[0].transpose(0, 1), one_lse[0]
    if o is None or lse is None:  # there are no sequences
        o = torch.zeros(total, heads, v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.full((heads, total), -torch.inf, device=q.device)
    return o, lse


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
    if sinks is not None:
        column = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.nan_to_num(torch.softmax(scores, -1), nan=0.0)  # rows without keys: NaN, 0 by definition
    return weights[..., : k.shape[2]] @ v
