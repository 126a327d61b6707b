"""The errors that right kernels of attention make, element by element, of both passes.

P is rounded before the product with V, and scores may be, before or after the maximum is subtracted: a framework's
eager run does so. So an element of P has a relative error of u (1 + |s|), where s is the score or its distance to the
row's maximum, whichever is larger. The sum of q . k in fp32 adds to that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention.reference import _grouped, _of_heads, _weigh_rows, heads_at_once, keys_seen
from ..gpu.ambient import without_autocast
from .error_scale import WIDE, Estimate, Format, Scale, independent_terms

_CHUNK_SCORES = 1 << 26  # 256 MiB in fp32
_NEVER = 1e-30  # a factor of P so small adds nothing, and its square is no number of fp32


@dataclass(frozen=True)
class _Rows:
    """Rows of some K/V heads of one sequence, each head shared by G heads: ``[N, G, M, ...]``."""

    sequence: int
    heads: slice  # of queries
    heads_kv: slice
    rows: slice
    q: Tensor  # [N, G, M, D]
    k: Tensor  # [N, 1, S, D]: of the S keys that they may see
    v: Tensor  # [N, 1, S, DV]
    p: Estimate  # [N, G, M, S]
    slope: Tensor | None  # [N, G, M, S]: the derivative of the softcap


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Iterator[_Rows]:
    """Yield P, with its error, of as many rows at once as fit."""
    (batch, heads, seqlen_q, head_dim), (heads_kv, seqlen_k) = q.shape, k.shape[1:3]
    group, scale = heads // heads_kv, head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows = max(1, min(seqlen_q, _CHUNK_SCORES // max(1, group * seqlen_k)))
    at_once = heads_at_once(heads_kv, 2 * rows * group * seqlen_k)
    low = Format.of(q.dtype)
    shown = _of_heads(mask, batch, heads)

    def grouped(tensor: Tensor) -> Tensor:
        return tensor.float().reshape(-1, group, *tensor.shape[1:])

    for b, h, first in itertools.product(range(batch), range(0, heads_kv, at_once), range(0, seqlen_q, rows)):
        its = slice(h, min(heads_kv, h + at_once))
        mine, chunk = slice(its.start * group, its.stop * group), slice(first, first + rows)
        end = keys_seen(first + rows, seqlen_q, seqlen_k, causal=causal)
        some_q, some_k, some_v = (
            grouped(q[b, mine, chunk]),
            k[b, its, None, :end].float(),
            v[b, its, None, :end].float(),
        )
        more = (
            None if sinks is None else grouped(sinks[mine]),
            None if alibi is None else grouped(alibi.expand(batch, heads)[b, mine]),
            None if bias is None else grouped(bias.expand(batch, heads, -1, -1)[b, mine, chunk, :end]),
        )
        weights, total, _, capped = _weigh_rows(
            some_q, some_k, *more,
            position=first + seqlen_k - seqlen_q, scale=scale, causal=causal, window=window, softcap=softcap,
            mask=None if shown is None else _grouped(shown(b, mine, chunk)[..., :end], group),
        )  # fmt: skip
        total = torch.where(total == 0, 1.0, total)[..., None]
        own = softcap * capped if capped is not None else some_q @ some_k.mT * scale
        size = torch.maximum(-torch.log(weights.clamp_min(_NEVER)), own.abs())
        p = weights / total
        lengths = some_q.norm(dim=-1, keepdim=True) * some_k.norm(dim=-1)[..., None, :] * abs(scale)
        seen = p > 0
        estimate = Estimate.exact(p).with_error(
            low.u * p + seen * low.tiny / total,  # P, before it is divided by the sum
            low.u * p * size,
            2 * WIDE * p * lengths,
        )
        # Scores that are rounded change the sum as well.
        estimate.bound += low.u * p * (p * size).sum(-1, keepdim=True) + WIDE * math.sqrt(head_dim) * p * lengths
        slope = None if capped is None else 1 - capped.square()
        yield _Rows(b, mine, its, chunk, some_q, some_k, some_v, estimate, slope)


@without_autocast
def forward_scale(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Scale:
    """Return what is allowed in o, ``[B, H, Sq, DV]``; arguments as ``reference.attention`` has them."""
    shape = (*q.shape[:3], v.shape[3])
    largest = torch.zeros(shape, device=q.device)
    rms = torch.zeros((*shape[:3], 1), device=q.device)
    if largest.numel() and k.shape[2]:
        for rows in _chunks(q, k, v, **options):
            o = rows.p.multiplied(rows.v).rounded(Format.of(q.dtype))
            found = o.scale(independent_terms(rows.p.variance))
            for whole, part in zip((largest, rms), found, strict=True):
                whole[rows.sequence, rows.heads, rows.rows] = part.flatten(0, 1)
    return Scale(largest, rms)


def backward_scale(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> tuple[Scale, Scale, Scale]:
    """Return what is allowed in dq, dk and dv, where o has the error of a forward pass."""
    return step_scale(q, k, v, do, **options)[1:]


@without_autocast
def step_scale(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, softmax_scale: float | None, **options: Any
) -> tuple[Scale, Scale, Scale, Scale]:
    """Return what is allowed in o, dq, dk and dv, where the gradients follow from such an o."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    low = Format.of(q.dtype)
    allowed = Scale(torch.zeros(do.shape, device=q.device), torch.zeros((*do.shape[:3], 1), device=q.device))
    sums = {name: _Sum(like) for name, like in (("dq", q), ("dk", k), ("dv", v))}
    chunks = _chunks(q, k, v, softmax_scale=softmax_scale, **options) if do.numel() and k.shape[2] else ()
    for rows in chunks:
        p = rows.p
        gradient = do[rows.sequence, rows.heads, rows.rows].float().reshape(*rows.q.shape[:3], -1)  # [N, G, M, DV]
        o = p.multiplied(rows.v).rounded(low)
        for whole, part in zip(allowed, o.scale(independent_terms(p.variance)), strict=True):
            whole[rows.sequence, rows.heads, rows.rows] = part.flatten(0, 1)
        delta = (gradient * o.value).sum(-1, keepdim=True)
        of_sum = WIDE * gradient.norm(dim=-1, keepdim=True)  # of a sum of products with do, times the other's length
        delta_bound = (gradient.abs() * o.bound).sum(-1, keepdim=True) + 2 * of_sum * o.value.norm(dim=-1, keepdim=True)
        delta_variance = (gradient * gradient * o.variance).sum(-1, keepdim=True)
        delta_variance += (2 * of_sum * o.value.norm(dim=-1, keepdim=True)).square() / 3
        dp = gradient @ rows.v.mT
        ds_over_p = dp - delta
        ds = p.times(ds_over_p)
        lengths = of_sum * rows.v.norm(dim=-1)[..., None, :]
        seen = p.value > 0
        ds = ds.with_error(
            low.u * p.value * dp.abs(),  # dp, as a framework's eager run rounds it
            2 * p.value * lengths,
            low.u * ds.value.abs() + seen * low.tiny,
        )
        if rows.slope is not None:
            ds = ds.times(rows.slope).with_error(2 * low.u * (1 - rows.slope) * ds.value.abs())  # tanh is rounded
        sums["dq"].add(rows.sequence, rows.heads, rows.rows, _dq(ds, p, delta_bound, delta_variance, rows.k, scale))
        # Each row has one error of delta, so it is independent in the sums over rows.
        by_keys = replace(
            ds,
            bound=ds.bound + p.value * delta_bound,
            variance=ds.variance + p.value.square() * delta_variance,
        ).times(scale)
        keys = slice(rows.k.shape[2])
        for name, left, right in (("dk", by_keys, rows.q), ("dv", p, gradient)):
            summed = _transposed(left).multiplied(right.flatten(1, 2)[:, None])
            terms = independent_terms(_transposed(left).variance)
            sums[name].add(rows.sequence, rows.heads_kv, keys, (summed, terms))
    return allowed, sums["dq"].scale(low), sums["dk"].scale(low), sums["dv"].scale(low)


def _dq(
    ds: Estimate, p: Estimate, delta_bound: Tensor, delta_variance: Tensor, k: Tensor, scale: float
) -> tuple[Estimate, Tensor]:
    """Return a row's sum over keys: the row's one error of delta is common to all of them."""
    dq, mean = ds.multiplied(k), p.value @ k
    dq.bound, dq.variance = dq.bound + delta_bound * mean.abs(), dq.variance + delta_variance * mean.square()
    terms = torch.minimum(independent_terms(ds.variance), torch.tensor(2.0, device=k.device))
    return dq.times(scale), terms


def _transposed(scores: Estimate) -> Estimate:
    """Return ``[N, G, M, S]`` as ``[N, 1, S, G * M]``."""
    return scores.map(lambda x: x.flatten(1, 2).mT[:, None])


class _Sum:
    """One gradient, summed chunk by chunk."""

    def __init__(self, like: Tensor) -> None:
        self._parts = [torch.zeros(like.shape, device=like.device) for _ in range(4)]
        self._terms = torch.full((*like.shape[:-1], 1), math.inf, device=like.device)

    def add(self, sequence: int, heads: slice, rows: slice, found: tuple[Estimate, Tensor]) -> None:
        estimate, terms = found
        parts = (estimate.value, estimate.bound, estimate.variance, estimate.wide)
        for whole, part in zip(self._parts, parts, strict=True):
            whole[sequence, heads, rows] += part.flatten(0, 1)
        place = self._terms[sequence, heads, rows]
        place.copy_(torch.minimum(place, terms.flatten(0, 1)))

    def scale(self, low: Format) -> Scale:
        return Estimate(*self._parts).rounded(low).scale(self._terms)
