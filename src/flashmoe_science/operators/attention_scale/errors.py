"""P of attention and its gradient with their errors, by PyTorch's operations: what ``errors_triton`` does on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.reference import _exponentials
from ..error_scale import WIDE, Format, spread_of

_FAR = 69.0  # below the maximum of a row: a factor of P so small adds nothing, and its square is no number of fp32


def p_with_errors(
    scores: Tensor,
    sinks: Tensor | None,
    own: Tensor | None,
    products: Tensor | None,
    lengths: tuple[Tensor, Tensor],
    v_squares: Tensor,
    *,
    low: Format,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return P, the bound and the variance of its error, and their spread in the product with V.

    Args:
        scores: ``[N, G, M, S]``, -inf of hidden keys; the memory may be used for P.
        sinks: ``[N, G]``.
        own: the scores before a bias or ALiBi is added.
        products: the sum of squared products of which a score is the sum, where q times the scale is rounded.
        lengths: of q times the scale, ``[N, G, M]``, and of k, ``[N, 1, S]``.
        v_squares: of V's lengths, ``[N, 1, S]``.
        low: to what P is rounded.
        head_dim: D.
    """
    weights, total, top = _exponentials(scores, sinks)
    total, top = torch.where(total == 0, 1.0, total)[..., None], top[..., None]
    seen = torch.maximum(scores, top - _FAR)
    rounded = torch.maximum(top - seen, (seen if own is None else own).abs())
    p = weights.div_(total)
    stored = (p > 0) * (low.tiny / total)
    stored.add_(p, alpha=low.u)  # P, before it is divided by the sum
    size = rounded.mul_(p)  # of scores, before and after the maximum is subtracted
    squares = size.square()
    if own is not None:
        added = seen.abs_().clamp_max_(1 / low.u).mul_(p)
        size.add_(added)
        squares.addcmul_(added, added)
    of_sum = (lengths[0][..., None] * lengths[1][..., None, :]).mul_(p)
    if products is not None:
        size.add_(of_sum)
        squares.add_(products.mul_(p).mul_(p))
    bound, variance = stored.clone(), stored.square_()
    bound.add_(of_sum, alpha=WIDE * (2 + math.sqrt(head_dim)))
    variance.addcmul_(of_sum, of_sum, value=(2 * WIDE) ** 2).div_(3)
    # Scores that are rounded change the sum as well, and with it each element.
    bound.add_(size, alpha=low.u).addcmul_(p, low.u * size.sum(-1, keepdim=True))
    squares.addcmul_(p, p * squares.sum(-1, keepdim=True))
    variance.add_(squares, alpha=low.u**2 / 3)
    return p, bound, variance, spread_of(variance * v_squares[..., None, :], -1)


def ds_with_errors(
    p: tuple[Tensor, Tensor, Tensor],
    dp: Tensor,
    capped: Tensor | None,
    delta: tuple[Tensor, Tensor, Tensor, Tensor],
    v_lengths: Tensor,
    squares: Sequence[Tensor],
    *,
    low: Format,
) -> tuple[Any, ...]:
    """Return ds = P (dp - delta) with its errors; the errors of P then have what fp16 loses of small numbers.

    Args:
        p: P, and the bound and the variance of its error, ``[N, G, M, S]``; these two change in place.
        dp: do . v, ``[N, G, M, S]``; the memory may be used for ds.
        capped: tanh of the softcap.
        delta: its value, the error of its sum for an o of length 1, its bound and its variance, ``[N, G, M, 1]``.
        v_lengths: ``[N, 1, S]``.
        squares: of the lengths of q and do, ``[N, G, M]``, and of k, ``[N, 1, S]``.
        low: to what ds is rounded.

    Returns:
        ds, its size, and bound and variance of its error without that of delta, which a row's elements share; the same
        two with it; and three spreads: of ds in the products with K and with Q, and of P in the product with do.
    """
    p_value, p_bound, p_variance = p
    lost = (p_value > 0) * low.tiny
    _add_error(p_bound, p_variance, lost, 1.0)
    change = dp - delta[0]
    value = p_value * change
    size, bound, variance = value.abs(), p_bound * change.abs_(), (p_variance * change).mul_(change)
    _add_error(bound, variance, dp.abs_().mul_(p_value), low.u)  # as a framework's eager run rounds it
    _add_error(bound, variance, (delta[1] * v_lengths[..., None, :]).mul_(p_value), 2.0)
    _add_error(bound, variance, lost.add_(size, alpha=low.u), 1.0)
    if capped is not None:
        slope = 1 - capped.square()
        turned = (1 - slope).mul_(size)  # tanh is rounded
        for each in (value, size, bound, variance, variance):
            each.mul_(slope)
        _add_error(bound, variance, turned, 2 * low.u)
    # Each row has one error of delta, so it is independent in the sums over rows.
    all_bound = torch.addcmul(bound, p_value, delta[2])
    all_variance = torch.addcmul(variance, p_value * delta[3], p_value)
    of_rows = spread_of(variance * squares[2][..., None, :], -1)
    of_keys, of_values = (
        tuple(each.mT[:, None] for each in spread_of((found * its[..., None]).flatten(1, 2), 1))
        for found, its in ((all_variance, squares[0]), (p_variance, squares[1]))
    )
    return value, size, bound, variance, all_bound, all_variance, of_rows, of_keys, of_values


def _add_error(bound: Tensor, variance: Tensor, error: Tensor, factor: float) -> None:
    """Add an independent error of uniform distribution, within ``factor`` times ``error``."""
    bound.add_(error, alpha=factor)
    variance.addcmul_(error, error, value=factor**2 / 3)
