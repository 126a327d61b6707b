"""The errors that right kernels of attention make, element by element, of both passes.

P is rounded before the product with V, and scores may be, before or after the maximum is subtracted: a framework's
eager run does so. So an element of P has a relative error of u (1 + |s|), where s is the score or its distance to the
row's maximum, whichever is larger. The sum of q . k in fp32 adds to that, and so does q times the scale, which is
rounded before that sum unless the scale is a power of two.

On a GPU kernels do the elementwise work, and products of 16-bit inputs are by TF32 where that changes a scale by less
than a thousandth: not those of which little may be left, the scores, dp, o of delta, and the mean of keys.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.reference import _by_group, _grouped, _of_heads, _score_rows, heads_at_once, keys_seen
from ...errors import UnsupportedError
from ...gpu.ambient import without_autocast
from ..error_scale import FIRST_SUMS, WIDE, Estimate, Format, Scale, coarse_products, terms_of
from .errors import ds_with_errors, p_with_errors

_kernels: Any = None
if torch.version.cuda is not None:  # at once: what is loaded later is compared with no snapshot of the harness
    with contextlib.suppress(ImportError):
        from . import errors_triton as _kernels

_CHUNK_SCORES = 1 << 26  # 256 MiB in fp32, of which up to 14 are alive at once


_Product = Callable[[Tensor, Tensor], Tensor]


def _coarse(product: _Product, is_coarse: bool) -> _Product:  # noqa: FBT001
    """Return it by TF32, where it may be."""
    by_tf32: _Product = coarse_products(product)

    def multiply(rows: Tensor, columns: Tensor) -> Tensor:
        shifted = columns * (2**13 + 1)  # rounded to TF32, as a GPU cuts off what it has not
        return by_tf32(rows, shifted - (shifted - columns))

    return multiply if is_coarse else product


@dataclass
class _Scores:
    """P or its gradient with their errors, before any sum in fp32: ``[N, G, M, S]``."""

    value: Tensor
    size: Tensor  # of the value
    bound: Tensor
    variance: Tensor
    terms: Tensor  # how many independent errors each row, or each key's column, has in the product that follows
    is_coarse: bool  # a GPU multiplies by TF32, which takes 16-bit factors as they are

    def multiplied(self, matrix: Tensor) -> Estimate:
        """Return the product with an exact ``matrix``, ``[N, 1, S, X]``, summed in fp32."""
        return self._sums(matrix, _by_group, self.value.shape[-1])

    def transposed_times(self, matrix: Tensor) -> Estimate:
        """Return the product with ``[N, G, M, X]`` summed over rows of all G heads, ``[N, 1, S, X]``."""
        columns = matrix.flatten(1, 2)[:, None]
        return self._sums(columns, lambda scores, x: scores.flatten(1, 2).mT[:, None] @ x, columns.shape[2])

    def _sums(self, matrix: Tensor, product: _Product, terms: int) -> Estimate:
        product = _coarse(product, self.is_coarse)
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
    p: _Scores  # [N, G, M, S]; terms of each row
    capped: Tensor | None  # [N, G, M, S]: tanh of the softcap


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
    is_coarse = q.is_cuda and all(each.dtype.itemsize == 2 for each in (q, k, v))
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
        its_sinks, *added = (
            None if sinks is None else grouped(sinks[mine]),
            None if alibi is None else grouped(alibi.expand(batch, heads)[b, mine]),
            None if bias is None else grouped(bias.expand(batch, heads, -1, -1)[b, mine, chunk, :end]),
        )
        scores, capped = _score_rows(
            some_q, some_k, *added,
            position=first + seqlen_k - seqlen_q, scale=scale, causal=causal, window=window, softcap=softcap,
            mask=None if shown is None else _grouped(shown(b, mine, chunk)[..., :end], group),
        )  # fmt: skip
        own = None  # scores before anything is added, which rounds them once more
        if any(each is not None for each in added):
            own = _by_group(some_q, some_k.mT) * scale if capped is None else softcap * capped
        products = None
        if math.frexp(scale)[0] not in (0.5, -0.5):  # q times the scale is rounded, in each product of the sum
            products = _coarse(_by_group, is_coarse)((some_q * scale).square(), some_k.square().mT)
        lengths = some_q.norm(dim=-1) * abs(scale), some_k.norm(dim=-1)
        of_p, _ = _forms(scores)
        p, bound, variance, spread = of_p(
            scores, its_sinks, own, products, lengths, some_v.square().sum(-1), low=low, head_dim=head_dim
        )
        yield _Rows(
            b, mine, its, chunk, some_q, some_k, some_v, _Scores(p, p, bound, variance, terms_of(*spread), is_coarse),
            capped,
        )  # fmt: skip


def _forms(scores: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what computes P and its gradient with their errors: kernels, where there are some for this device."""
    if scores.is_cuda and _kernels is not None:
        with contextlib.suppress(UnsupportedError):
            _kernels.refuse_device(scores.device)
            return _kernels.p_with_errors, _kernels.ds_with_errors
    return p_with_errors, ds_with_errors


@without_autocast
def forward_scale(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Scale:
    """Return what is allowed in o, ``[B, H, Sq, DV]``; arguments as ``reference.attention`` has them."""
    shape = (*q.shape[:3], v.shape[3])
    largest = torch.zeros(shape, device=q.device)
    rms = torch.zeros((*shape[:3], 1), device=q.device)
    if largest.numel() and k.shape[2]:
        for rows in _chunks(q, k, v, **options):
            o = rows.p.multiplied(rows.v).rounded(Format.of(q.dtype))
            for whole, part in zip((largest, rms), o.scale(rows.p.terms), strict=True):
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
        o = p.multiplied(rows.v)
        o.value = _by_group(p.value, rows.v)  # of delta and dp little may be left
        o = o.rounded(low)
        for whole, part in zip(allowed, o.scale(p.terms), strict=True):
            whole[rows.sequence, rows.heads, rows.rows] = part.flatten(0, 1)
        delta = _Delta.of(o, gradient)
        of_rows, of_keys, of_values = _gradients(rows, gradient, delta, low)
        sums["dq"].add(rows.sequence, rows.heads, rows.rows, _dq(of_rows, p, delta, rows.k, scale))
        keys = slice(rows.k.shape[2])
        for name, left, right, factor in (("dk", of_keys, rows.q, scale), ("dv", of_values, gradient, 1.0)):
            found = left.transposed_times(right).times(factor), left.terms
            sums[name].add(rows.sequence, rows.heads_kv, keys, found)
    return allowed, sums["dq"].scale(low), sums["dk"].scale(low), sums["dv"].scale(low)


@dataclass(frozen=True)
class _Delta:
    """The sum of do . o of each row with its error, ``[N, G, M, 1]``."""

    value: Tensor
    bound: Tensor
    variance: Tensor
    of_sum: Tensor  # the error of a sum of products with do, times the other's length

    @classmethod
    def of(cls, o: Estimate, gradient: Tensor) -> _Delta:
        of_sum = WIDE * gradient.norm(dim=-1, keepdim=True)
        wide = 2 * of_sum * o.value.norm(dim=-1, keepdim=True)
        return cls(
            (gradient * o.value).sum(-1, keepdim=True),
            (gradient.abs() * o.bound).sum(-1, keepdim=True) + wide,
            (gradient * gradient * o.variance).sum(-1, keepdim=True) + wide.square() / 3,
            of_sum,
        )


def _gradients(rows: _Rows, gradient: Tensor, delta: _Delta, low: Format) -> tuple[_Scores, _Scores, _Scores]:
    """Return ds as the sums over keys need it, ds as those over rows do, and P as it is summed over rows."""
    p = rows.p
    _, of_ds = _forms(p.value)
    squares = [each.square().sum(-1) for each in (rows.q, gradient, rows.k)]
    ds, size, bound, variance, all_bound, all_variance, of_rows, of_keys, of_values = of_ds(
        (p.value, p.bound, p.variance), _by_group(gradient, rows.v.mT), rows.capped,
        (delta.value, delta.of_sum, delta.bound, delta.variance), rows.v.norm(dim=-1), squares, low=low,
    )  # fmt: skip
    return (
        _Scores(ds, size, bound, variance, terms_of(*of_rows), p.is_coarse),
        _Scores(ds, size, all_bound, all_variance, terms_of(*of_keys), p.is_coarse),
        replace(p, terms=terms_of(*of_values)),
    )


def _dq(ds: _Scores, p: _Scores, delta: _Delta, k: Tensor, scale: float) -> tuple[Estimate, Tensor]:
    """Return a row's sum over keys: the row's one error of delta is common to all of them."""
    dq, mean = ds.multiplied(k), _by_group(p.value, k)  # the mean of keys may be small beside their sizes
    dq.bound, dq.variance = dq.bound + delta.bound * mean.abs(), dq.variance + delta.variance * mean.square()
    return dq.times(scale), ds.terms.clamp_max(2.0)


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
