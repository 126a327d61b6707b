"""The errors that right kernels of attention make, element by element, of both passes.

P is rounded before the product with V, and scores may be, before or after the maximum is subtracted: a framework's
eager run does so. So an element of P has a relative error of u (1 + |s|), where s is the score or its distance to the
row's maximum, whichever is larger. The sum of q . k in fp32 adds to that, and so does q times the scale, which is
rounded before that sum unless the scale is a power of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.reference import _grouped, _of_heads, _weigh_rows, heads_at_once, keys_seen
from ..gpu.ambient import without_autocast
from .error_scale import FIRST_SUMS, WIDE, Estimate, Format, Scale, independent_terms

_CHUNK_SCORES = 1 << 26  # 256 MiB in fp32
_NEVER = 1e-30  # a factor of P so small adds nothing, and its square is no number of fp32


@dataclass
class _Scores:
    """P or its gradient with their errors, before any sum in fp32: ``[N, G, M, S]``, one pass of memory for each step.

    They are the largest tensors here by far, so that steps work in place.
    """

    value: Tensor
    size: Tensor  # of the value
    bound: Tensor
    variance: Tensor

    def add_error(self, bound: Tensor, factor: float) -> None:
        """Add an independent error of uniform distribution, within ``factor`` times ``bound``."""
        self.bound.add_(bound, alpha=factor)
        self.variance.addcmul_(bound, bound, value=factor**2 / 3)

    def multiplied(self, matrix: Tensor) -> Estimate:
        """Return the product with an exact ``matrix``, ``[N, 1, S, X]``, summed in fp32."""
        return self._sums(matrix, lambda scores, columns: scores @ columns, self.value.shape[-1])

    def transposed_times(self, matrix: Tensor) -> Estimate:
        """Return the product with ``[N, G, M, X]`` summed over rows of all G heads, ``[N, 1, S, X]``."""
        columns = matrix.flatten(1, 2)[:, None]
        return self._sums(columns, lambda scores, x: scores.flatten(1, 2).mT[:, None] @ x, columns.shape[2])

    def independent(self, matrix: Tensor) -> Tensor:
        """Return of how many independent errors each row of that product is made, ``[N, G, M, 1]``.

        A row of the matrix has one error in common, and the larger it is the more it counts.
        """
        return independent_terms(self.variance * matrix.square().sum(-1)[..., None, :])

    def transposed_independent(self, matrix: Tensor) -> Tensor:
        """Return the same of the transposed product, ``[N, 1, S, 1]``."""
        size = matrix.square().sum(-1, keepdim=True)
        return independent_terms((self.variance * size).flatten(1, 2), 1).mT[:, None]

    def _sums(self, matrix: Tensor, product: Callable[[Tensor, Tensor], Tensor], terms: int) -> Estimate:
        size = matrix.abs()
        wide = product(self.size, size) * (WIDE * (FIRST_SUMS + math.sqrt(terms)))
        return Estimate(
            product(self.value, matrix), product(self.bound, size), product(self.variance, matrix.square()), wide
        )


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
    p: _Scores  # [N, G, M, S]
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
        weights, total, top, capped = _weigh_rows(
            some_q, some_k, *more,
            position=first + seqlen_k - seqlen_q, scale=scale, causal=causal, window=window, softcap=softcap,
            mask=None if shown is None else _grouped(shown(b, mine, chunk)[..., :end], group),
        )  # fmt: skip
        total = torch.where(total == 0, 1.0, total)[..., None]
        own = softcap * capped if capped is not None else some_q @ some_k.mT * scale
        below = weights.clamp_min(_NEVER).log_().neg_()
        added = None  # a score and what is added to it: their sum is rounded once more
        if any(each is not None for each in more[1:]):
            added = (top[..., None] - below).abs_().clamp_max_(1 / low.u)
        rounded = torch.maximum(below, own.abs_())  # of scores, before and after the maximum is subtracted
        p = weights.div_(total)
        stored = (p > 0) * (low.tiny / total)
        stored.add_(p, alpha=low.u)  # P, before it is divided by the sum
        scores = _Scores(p, p, stored.clone(), stored.square_().div_(3))
        rounded.mul_(p)
        bound, squares = rounded, rounded.square()
        if added is not None:
            bound.add_(added.mul_(p))
            squares.addcmul_(added, added)
        lengths = some_q.norm(dim=-1, keepdim=True) * abs(scale) * some_k.norm(dim=-1)[..., None, :]
        lengths.mul_(p)
        scores.add_error(lengths, 2 * WIDE)
        scores.bound.add_(lengths, alpha=WIDE * math.sqrt(head_dim))
        if math.frexp(scale)[0] not in (0.5, -0.5):  # q times the scale is rounded, in each product of the sum
            bound.add_(lengths)
            products = some_q.square() @ some_k.square().mT
            squares.add_(products.mul_(p).mul_(p), alpha=scale**2)
        # Scores that are rounded change the sum as well, and with it each element.
        scores.bound.add_(bound, alpha=low.u).addcmul_(p, low.u * bound.sum(-1, keepdim=True))
        squares.addcmul_(p, p * squares.sum(-1, keepdim=True))
        scores.variance.add_(squares, alpha=low.u**2 / 3)
        slope = None if capped is None else 1 - capped.square()
        yield _Rows(b, mine, its, chunk, some_q, some_k, some_v, scores, slope)


@without_autocast
def forward_scale(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Scale:
    """Return what is allowed in o, ``[B, H, Sq, DV]``; arguments as ``reference.attention`` has them."""
    shape = (*q.shape[:3], v.shape[3])
    largest = torch.zeros(shape, device=q.device)
    rms = torch.zeros((*shape[:3], 1), device=q.device)
    if largest.numel() and k.shape[2]:
        for rows in _chunks(q, k, v, **options):
            o = rows.p.multiplied(rows.v).rounded(Format.of(q.dtype))
            found = o.scale(rows.p.independent(rows.v))
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
        for whole, part in zip(allowed, o.scale(p.independent(rows.v)), strict=True):
            whole[rows.sequence, rows.heads, rows.rows] = part.flatten(0, 1)
        p.add_error((p.value > 0) * low.tiny, 1.0)  # gradients are sums of P that is divided by its sum
        delta = (gradient * o.value).sum(-1, keepdim=True)
        of_sum = WIDE * gradient.norm(dim=-1, keepdim=True)  # of a sum of products with do, times the other's length
        delta_bound = (gradient.abs() * o.bound).sum(-1, keepdim=True) + 2 * of_sum * o.value.norm(dim=-1, keepdim=True)
        delta_variance = (gradient * gradient * o.variance).sum(-1, keepdim=True)
        delta_variance += (2 * of_sum * o.value.norm(dim=-1, keepdim=True)).square() / 3
        ds = _scores_gradient(rows, gradient, delta, of_sum, low)
        sums["dq"].add(rows.sequence, rows.heads, rows.rows, _dq(ds, p, delta_bound, delta_variance, rows.k, scale))
        # Each row has one error of delta, so it is independent in the sums over rows.
        ds.bound.addcmul_(p.value, delta_bound)
        ds.variance.addcmul_(p.value * delta_variance, p.value)
        keys = slice(rows.k.shape[2])
        for name, left, right, factor in (("dk", ds, rows.q, scale), ("dv", p, gradient, 1.0)):
            found = left.transposed_times(right).times(factor), left.transposed_independent(right)
            sums[name].add(rows.sequence, rows.heads_kv, keys, found)
    return allowed, sums["dq"].scale(low), sums["dk"].scale(low), sums["dv"].scale(low)


def _scores_gradient(rows: _Rows, gradient: Tensor, delta: Tensor, of_sum: Tensor, low: Format) -> _Scores:
    """Return ds = P (dp - delta) with its errors but for that of delta. ``of_sum``: of dp's sums, for V of length 1."""
    p = rows.p
    dp = gradient @ rows.v.mT
    change = dp - delta
    value = p.value * change
    change.abs_()
    bound = p.bound * change
    ds = _Scores(value, value.abs(), bound, (p.variance * change).mul_(change))
    ds.add_error(dp.abs_().mul_(p.value), low.u)  # dp, as a framework's eager run rounds it
    lengths = of_sum * rows.v.norm(dim=-1)[..., None, :]
    ds.add_error(lengths.mul_(p.value), 2.0)
    own = (p.value > 0) * low.tiny
    ds.add_error(own.add_(ds.size, alpha=low.u), 1.0)
    if rows.slope is not None:
        turned = (1 - rows.slope) * ds.size  # tanh is rounded
        for each, factor in ((ds.value, rows.slope), (ds.size, rows.slope), (ds.bound, rows.slope)):
            each.mul_(factor.abs())
        ds.variance.mul_(rows.slope.square())
        ds.add_error(turned, 2 * low.u)
    return ds


def _dq(
    ds: _Scores, p: _Scores, delta_bound: Tensor, delta_variance: Tensor, k: Tensor, scale: float
) -> tuple[Estimate, Tensor]:
    """Return a row's sum over keys: the row's one error of delta is common to all of them."""
    dq, mean = ds.multiplied(k), p.value @ k
    dq.bound, dq.variance = dq.bound + delta_bound * mean.abs(), dq.variance + delta_variance * mean.square()
    terms = torch.minimum(ds.independent(k), torch.tensor(2.0, device=k.device))
    return dq.times(scale), terms


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
