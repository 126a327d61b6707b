"""How large an error a right kernel may make in each element: its unavoidable roundings, to first order.

A kernel rounds to the dtype of its inputs at a few places, and sums in fp32. Each rounding changes a number by at most
u, half of the dtype's ``eps``, of its size. Rounding errors are independent and of mean 0 to a good approximation, so
they add up like a random walk: six standard deviations are never seen in a right kernel. Where few roundings meet, the
sum of their bounds is smaller than that, and counts instead.

Sources: N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41
(2019), and, for sums in a wider format, Sharper Probabilistic Backward Error Analysis, SIAM J. Sci. Comput. 42 (2020).
docs/explanation/error-scale.md derives the operators' formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDE = 2.0**-24  # unit roundoff of fp32, in which kernels sum
SIGMAS = 6.0
FIRST_SUMS = 4  # roundings of fp32 that a sum has besides those of its terms: exponential, maximum, sum, quotient


class Scale(NamedTuple):
    """What is allowed in one output."""

    largest: Tensor  # absolute error of each element, of the output's shape
    rms: Tensor  # root mean square of the errors of each row, ``[..., 1]``; a row is the last axis


class Format(NamedTuple):
    """A floating-point format to which a kernel rounds."""

    u: float  # the most that a rounding changes, relative to the number
    tiny: float  # the most that it changes a number close to 0

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return that of ``dtype``."""
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.tiny * info.eps / 2)

    def rounding(self, value: Tensor) -> Tensor:
        """Return the most by which a rounding changes each number."""
        return self.u * value.abs() + self.tiny


@dataclass
class Estimate:
    """Numbers that a kernel computes, and the errors that they have by then; all fp32 and of one shape."""

    value: Tensor
    bound: Tensor  # sum of the bounds of its roundings to the low precision
    variance: Tensor  # of the sum of these roundings
    wide: Tensor  # the error of sums in fp32, which is always added

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """Return numbers without an error."""
        zeros = torch.zeros_like(value)
        return cls(value, zeros, zeros, zeros)

    def map(self, change: Callable[[Tensor], Tensor]) -> Estimate:
        """Return the same in another layout, or a part of it."""
        return Estimate(*(change(each) for each in (self.value, self.bound, self.variance, self.wide)))

    def with_error(self, bound: Tensor, *more: Tensor) -> Estimate:
        """Return the same with independent errors of uniform distribution, each within its bound."""
        variance = torch.addcmul(self.variance, bound, bound, value=1 / 3)
        found = replace(self, bound=self.bound + bound, variance=variance)
        return found.with_error(*more) if more else found

    def rounded(self, to: Format, *, times: int = 1) -> Estimate:
        """Return the same, rounded so many times."""
        return self.with_error(*[to.rounding(self.value)] * times)

    def times(self, factor: Tensor | float) -> Estimate:
        """Return the product with exact factors, one for each number, or one that broadcasts."""
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return Estimate(self.value * factor, self.bound * size, self.variance * size**2, self.wide * size)

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum of two whose errors are independent."""
        bound, variance = self.bound + other.bound, self.variance + other.variance
        return Estimate(self.value + other.value, bound, variance, self.wide + other.wide)

    def add_(self, other: Estimate) -> None:
        """Add another in place, whose errors are independent."""
        self.value += other.value
        self.bound += other.bound
        self.variance += other.variance
        self.wide += other.wide

    def multiplied(self, matrix: Tensor, *, terms: int | None = None) -> Estimate:
        """Return the matrix product with an exact ``matrix``, summed in fp32, or a part of sums of ``terms``."""
        size, terms = matrix.abs(), self.value.shape[-1] if terms is None else terms
        wide = (WIDE * (FIRST_SUMS + math.sqrt(terms)) * self.value.abs() + self.wide) @ size
        return Estimate(self.value @ matrix, self.bound @ size, self.variance @ matrix.square(), wide)

    def scale(self, independent: Tensor | float) -> Scale:
        """Return what is allowed.

        ``independent``: how many independent errors a row's have at the least, which says how far its mean square may
        lie above the expected one. Where few elements carry that mean square, as those of a channel of outliers do,
        their number counts instead.
        """
        deviation = self.variance.sqrt()
        largest = torch.minimum(self.bound, SIGMAS * deviation) + self.wide
        elements = independent_terms(self.variance)
        freedom = torch.minimum(torch.as_tensor(independent, device=largest.device), elements).clamp_min(1)
        rms = root_mean_square(deviation) * (1 + SIGMAS / (2 * freedom).sqrt()) + root_mean_square(self.wide)
        return Scale(largest, torch.minimum(rms, root_mean_square(largest)))


def coarse_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a GPU multiply fp32 by TF32 within ``function``, as a scale may err by a thousandth."""

    @functools.wraps(function)
    def coarse(*arguments: Any, **options: Any) -> Any:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            return function(*arguments, **options)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    return coarse


def root_mean_square(rows: Tensor) -> Tensor:
    """Return it for each row, ``[..., 1]``."""
    return rows.square().mean(-1, keepdim=True).sqrt()


def independent_terms(variance: Tensor, dim: int = -1) -> Tensor:
    """Return how many equal terms have the same spread as the terms of each sum, at least 1; ``dim`` is kept."""
    return terms_of(*spread_of(variance, dim))


def spread_of(variance: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the sums of terms and of their squares, from which ``terms_of`` follows; ``dim`` is kept."""
    squares = torch.linalg.vector_norm(variance, dim=dim, keepdim=True).square()
    return variance.sum(dim, keepdim=True), squares


def terms_of(total: Tensor, squares: Tensor) -> Tensor:
    """Return what ``independent_terms`` does, of the sums of terms and of their squares."""
    return torch.where(squares > 0, total.square() / squares, 1.0)
