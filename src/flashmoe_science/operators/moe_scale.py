"""The errors that right kernels of experts make, element by element, of both passes.

A framework's eager run rounds after every step: both products, the activation, the weighting, and each partial sum over
a token's experts. A fused kernel rounds less often. What is allowed is what all these roundings add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..gpu.ambient import without_autocast
from ..moe.reference import activate, halves_of, joined, pairs_of, slopes_of_halves
from .error_scale import WIDE, Estimate, Format, Scale, coarse_products, independent_terms, spread_of, terms_of

# A function in fp32 errs by so much of the size of its arguments, also where it is close to 0, as GELU's tail is.
_OF_FUNCTION = 4 * WIDE
_POWER = {1: 2, 2: 1}  # of the size of arguments, by their number: relu2 and gated activations are products of two
_STEPS_OF_SLOPE = 3  # roundings of an eager run on the way from the gradient of h to that of the first product
_ELEMENTS_AT_ONCE = 2**25  # of the first product: 128 MiB, of which some 30 are alive at once


@dataclass(frozen=True)
class _Pairs:
    """Some pairs that go to one expert: R rows."""

    expert: int
    of: int  # how many go to it in all
    is_last: bool  # of the parts of its pairs
    tokens: Tensor | slice  # of its rows
    slots: Tensor | None  # None: of a shared expert
    x: Tensor  # [R, HID]
    up: Tensor  # [2 * INTER, HID]
    down: Tensor  # [HID, INTER]
    weights: Tensor  # [R, 1]
    product: Estimate  # [R, 2 * INTER], before the activation
    bias: Tensor | None  # [HID], of the output


def _pairs(inputs: Mapping[str, Tensor], low: Format) -> Iterator[_Pairs]:
    """Yield the pairs of experts that have tokens, some at a time, and those of experts that all tokens share."""
    x, ids, weights = inputs["x"], inputs["topk_ids"], inputs["topk_weights"].float()
    biases = inputs.get("bias_gate_up"), inputs.get("bias_down")
    at_once = max(1, _ELEMENTS_AT_ONCE // inputs["w_gate_up"].shape[1])
    for e in torch.unique(ids).tolist():
        if not 0 <= e < inputs["w_gate_up"].shape[0]:
            continue
        up, down = inputs["w_gate_up"][e].float(), inputs["w_down"][e].float()
        bias_up, bias = (None if each is None else each[e].float() for each in biases)
        parts = [*pairs_of(ids == e, at_once)]
        count = sum(len(tokens) for tokens, _ in parts)
        for place, (tokens, slots) in enumerate(parts, 1):
            rows, factor = x[tokens].float(), weights[tokens, slots, None]
            product = _product(rows, up, bias_up, low)
            yield _Pairs(e, count, place == len(parts), tokens, slots, rows, up, down, factor, product, bias)
    for s in range(inputs["shared_gate_up"].shape[0] if "shared_gate_up" in inputs else 0):
        up, down = inputs["shared_gate_up"][s].float(), inputs["shared_down"][s].float()
        shared, at_once = inputs.get("shared_weights"), max(1, _ELEMENTS_AT_ONCE // up.shape[0])
        for first in range(0, x.shape[0], at_once):
            span = slice(first, first + at_once)
            rows, is_last = x[span].float(), first + at_once >= x.shape[0]
            factor = torch.ones_like(rows[:, :1]) if shared is None else shared[span, s, None].float()
            product = _product(rows, up, None, low)
            yield _Pairs(s, x.shape[0], is_last, span, None, rows, up, down, factor, product, None)


def _product(x: Tensor, up: Tensor, bias: Tensor | None, low: Format) -> Estimate:
    """Return the first product, rounded before and after the bias."""
    lengths = x.norm(dim=-1, keepdim=True) * up.norm(dim=-1)
    product = Estimate.exact(x @ up.T).with_error(2 * WIDE * lengths).rounded(low)
    if bias is None:
        return product
    return replace(product, value=product.value + bias).rounded(low)


class _Activation:
    """The activation of a call: what it makes of products whose gate and up columns lie apart."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """``options``: activation, alpha, limit and interleaved."""
        self._options = options
        self._name: str = options["activation"]
        self._interleaved: bool = options["interleaved"]

    def halves(self, product: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up columns, or all columns where there is no gate."""
        return halves_of(product, self._name, interleaved=self._interleaved)

    def joined(self, halves: Sequence[Tensor]) -> Tensor:
        """Return the inverse of ``halves``."""
        return joined(halves, interleaved=self._interleaved)

    def slopes(self, halves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the derivatives by each half."""
        return slopes_of_halves(halves, self._name, alpha=self._options["alpha"], limit=self._options["limit"])

    def size(self, product: Tensor) -> Tensor:
        """Return the size of the arguments."""
        return torch.stack([half.abs() + 1 for half in self.halves(product)]).prod(0)

    def forward(self, product: Estimate, low: Format) -> Estimate:
        """Return h, rounded after each of its two steps."""
        h = Estimate.exact(activate(product.value, **self._options))
        slopes = self.slopes(self.halves(product.value))
        parts = [*zip(*(self.halves(each) for each in (product.bound, product.variance)), strict=True)]
        for slope, (bound, variance) in zip(slopes, parts, strict=True):
            h.bound = h.bound + bound * slope.abs()
            h.variance = h.variance + variance * slope.square()
        size = self.size(product.value) ** _POWER[len(slopes)]
        return h.with_error(_OF_FUNCTION * size).rounded(low, times=2)

    def backward(self, da: Estimate, product: Estimate, low: Format) -> Estimate:
        """Return the gradient of the first product, whose own error changes the slopes."""
        slopes = self.slopes(self.halves(product.value))
        changes = [torch.zeros_like(slope) for slope in slopes]
        for side, bound in enumerate(self.halves(product.bound)):
            for sign in (-1, 1):
                # The copy keeps its layout: a CPU rounds functions of dense and of strided tensors differently.
                moved = self.halves(product.value.clone())
                moved[side].add_(bound, alpha=sign)
                new = self.slopes(moved)
                changes = [torch.maximum(c, (n - s).abs()) for c, n, s in zip(changes, new, slopes, strict=True)]
        error = _OF_FUNCTION * self.size(product.value)
        parts = [
            da.times(slope)
            .with_error(da.value.abs() * (change * len(slopes) + error))
            .rounded(low, times=_STEPS_OF_SLOPE)
            for slope, change in zip(slopes, changes, strict=True)
        ]
        names = ("value", "bound", "variance", "wide")
        return Estimate(*(self.joined([getattr(part, name) for part in parts]) for name in names))


def _output(h: Estimate, pairs: _Pairs, low: Format) -> Estimate:
    """Return the output of an expert, before it is weighted."""
    y = h.multiplied(pairs.down.T).rounded(low)
    if pairs.bias is not None:
        y = replace(y, value=y.value + pairs.bias).rounded(low)
    return y


def _weighted(y: Estimate, weights: Tensor, low: Format) -> Estimate:
    """Return the product with the routing weights: they are rounded, and so is the product."""
    return y.times(weights).rounded(low, times=2)


class _Rows:
    """Rows of all tokens, summed expert by expert, and rounded each time."""

    def __init__(self, like: Tensor, low: Format) -> None:
        self._parts = [torch.zeros(like.shape, device=like.device) for _ in range(4)]
        self._terms = torch.full((*like.shape[:-1], 1), torch.inf, device=like.device)
        self._low = low

    def add(self, tokens: Tensor | slice, term: Estimate, independent: Tensor) -> None:
        sums = Estimate(*(part[tokens] for part in self._parts)).plus(term).rounded(self._low)
        for part, new in zip(self._parts, (sums.value, sums.bound, sums.variance, sums.wide), strict=True):
            part[tokens] = new
        self._terms[tokens] = torch.minimum(self._terms[tokens], independent)

    def add_output(self, h: Estimate, y: Estimate, pairs: _Pairs) -> None:
        """Add the output of an expert, weighted."""
        terms = independent_terms(h.variance * pairs.down.square().sum(0))
        self.add(pairs.tokens, _weighted(y, pairs.weights, self._low), terms)

    def scale(self) -> Scale:
        return Estimate(*self._parts).scale(self._terms)


class _Sum:
    """A gradient of the weights of one expert, ``[N, M]``, or of a bias, M = 1: a sum over pairs, some at a time."""

    def __init__(self) -> None:
        self._sum: Estimate | None = None
        self._spread = (torch.zeros(()), torch.zeros(()))

    def add(self, left: Estimate, right: Tensor | Estimate, pairs: _Pairs) -> None:
        """Add ``left.T @ right``: both have R rows, and are summed over rows in fp32."""
        columns, value = left.map(lambda x: x.T), right.value if isinstance(right, Estimate) else right
        product = columns.multiplied(value, terms=pairs.of)
        if isinstance(right, Estimate):
            product.bound.addmm_(columns.value.abs(), right.bound)
            product.variance.addmm_(columns.value.square(), right.variance)
        spread = spread_of(left.variance * value.square().sum(-1, keepdim=True), 0)
        if self._sum is None:
            self._sum, self._spread = product, spread
        else:
            self._sum.add_(product)
            self._spread = self._spread[0] + spread[0], self._spread[1] + spread[1]

    def store(self, scale: Scale, place: int, low: Format) -> None:
        """Write what is allowed, and begin anew."""
        assert self._sum is not None
        if scale.largest.dim() == 2:  # of a bias: one row
            some = self._sum.map(lambda x: x[:, 0]).rounded(low).scale(torch.inf)
        else:
            some = self._sum.rounded(low).scale(terms_of(*self._spread).T)
        scale.largest[place], scale.rms[place] = some.largest, some.rms
        self._sum = None


@without_autocast
@coarse_products
def experts_scale(inputs: Mapping[str, Tensor], options: dict[str, Any]) -> Scale:
    """Return what is allowed in the output ``[T, HID]``.

    Args:
        inputs: tensors by the names of ``fused_moe``.
        options: activation, alpha, limit and interleaved, all of them.
    """
    low, activation = Format.of(inputs["x"].dtype), _Activation(options)
    out = _Rows(inputs["x"], low)
    for pairs in _pairs(inputs, low):
        h = activation.forward(pairs.product, low)
        out.add_output(h, _output(h, pairs, low), pairs)
    return out.scale()


@without_autocast
@coarse_products
def expert_gradients_scale(
    inputs: Mapping[str, Tensor],
    options: dict[str, Any],
    *,
    of_tokens: bool = True,
    of_experts: bool = True,
    output: bool = False,
) -> dict[str, Scale]:
    """Return what is allowed in the gradient of each input, by its name; ``inputs`` have ``do`` besides.

    ``of_tokens``: of x and the routing weights. ``of_experts``: of all others. ``output``: of ``out`` too, beside those
    of tokens.
    """
    low, activation = Format.of(inputs["x"].dtype), _Activation(options)
    names = (*["topk_weights"] * of_tokens, *("w_gate_up", "w_down", "bias_gate_up", "bias_down") * of_experts)
    found = {name: _nothing(inputs[name]) for name in names if name in inputs}
    rows = {name: _Rows(inputs["x"], low) for name in (*["x"] * of_tokens, *["out"] * output)}
    sums = {name: _Sum() for name in found if name != "topk_weights"}
    for pairs in _pairs(inputs, low):
        assert pairs.slots is not None
        do = inputs["do"][pairs.tokens].float()
        h = activation.forward(pairs.product, low)
        dy = _weighted(Estimate.exact(do), pairs.weights, low)
        da = dy.multiplied(pairs.down).rounded(low)
        dproduct = activation.backward(da, pairs.product, low)
        if of_tokens:
            terms = independent_terms(dproduct.variance * pairs.up.square().sum(-1))
            rows["x"].add(pairs.tokens, dproduct.multiplied(pairs.up).rounded(low), terms)
            y = _output(h, pairs, low)
            if output:
                rows["out"].add_output(h, y, pairs)
            scale = _weight_gradient(do, y, h, da, pairs.weights, low)
            found["topk_weights"].largest[pairs.tokens, pairs.slots] = scale.largest[:, 0]
        ones = torch.ones_like(do[:, :1])
        factors: dict[str, tuple[Estimate, Tensor | Estimate]] = {
            "w_gate_up": (dproduct, pairs.x),
            "w_down": (dy, h),
            "bias_gate_up": (dproduct, ones),
            "bias_down": (dy, ones),
        }
        for name, each in sums.items():
            each.add(*factors[name], pairs)
            if pairs.is_last:
                each.store(found[name], pairs.expert, low)
    if of_tokens:
        found["topk_weights"].rms.copy_(found["topk_weights"].largest.square().mean(-1, keepdim=True).sqrt())
    return {**found, **{name: each.scale() for name, each in rows.items()}}


def _nothing(like: Tensor) -> Scale:
    """Return that no error is allowed: of experts without a token gradients are 0."""
    zeros = torch.zeros(like.shape, device=like.device)
    return Scale(zeros, torch.zeros((*like.shape[:-1], 1), device=like.device))


def _weight_gradient(do: Tensor, y: Estimate, h: Estimate, da: Estimate, weights: Tensor, low: Format) -> Scale:
    """Return what is allowed in do . y, or h . da by the weight: a kernel may take either."""
    by_output = y.times(do).with_error(low.rounding(do * y.value))
    size = torch.where(weights == 0, 1.0, weights)
    by_h = h.times(da.value)
    by_h.bound = by_h.bound + h.value.abs() * da.bound
    by_h.variance = by_h.variance + h.value.square() * da.variance
    by_h = by_h.times(1 / size)

    def summed(products: Estimate) -> Scale:
        return products.multiplied(torch.ones(products.value.shape[-1], 1, device=do.device)).rounded(low).scale(1.0)

    first, second = summed(by_output), summed(by_h)
    return Scale(torch.maximum(first.largest, second.largest), first.rms)
