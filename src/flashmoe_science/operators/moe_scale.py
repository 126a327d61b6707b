"""The errors that right kernels of experts make, element by element, of both passes.

A framework's eager run rounds after every step: both products, the activation, the weighting, and each partial sum over
a token's experts. A fused kernel rounds less often. What is allowed is what all these roundings add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..gpu.ambient import without_autocast
from ..moe.problem import GATED
from ..moe.reference import activate, activation_slopes
from .error_scale import WIDE, Estimate, Format, Scale, coarse_products, independent_terms

# A function in fp32 errs by so much of the size of its arguments, also where it is close to 0, as GELU's tail is.
_OF_FUNCTION = 4 * WIDE
_POWER = {1: 2, 2: 1}  # of the size of arguments, by their number: relu2 and gated activations are products of two
_STEPS_OF_SLOPE = 3  # roundings of an eager run on the way from the gradient of h to that of the first product


@dataclass(frozen=True)
class _Expert:
    """One expert, and the pairs that go to it: R rows."""

    name: int
    tokens: Tensor | slice  # of its rows
    slots: Tensor | None  # None: of a shared expert
    x: Tensor  # [R, HID]
    up: Tensor  # [2 * INTER, HID]
    down: Tensor  # [HID, INTER]
    weights: Tensor  # [R, 1]
    product: Estimate  # [R, 2 * INTER], before the activation
    bias: Tensor | None  # [HID], of the output


def _experts(inputs: Mapping[str, Tensor], low: Format) -> Iterator[_Expert]:
    """Yield the experts that have tokens, and those that all tokens share."""
    x, ids, weights = inputs["x"].float(), inputs["topk_ids"], inputs["topk_weights"].float()
    biases = inputs.get("bias_gate_up"), inputs.get("bias_down")
    for e in torch.unique(ids).tolist():
        if not 0 <= e < inputs["w_gate_up"].shape[0]:
            continue
        tokens, slots = torch.where(ids == e)
        up, down = inputs["w_gate_up"][e].float(), inputs["w_down"][e].float()
        bias_up, bias = (None if each is None else each[e].float() for each in biases)
        product = _product(x[tokens], up, bias_up, low)
        yield _Expert(e, tokens, slots, x[tokens], up, down, weights[tokens, slots, None], product, bias)
    for s in range(inputs["shared_gate_up"].shape[0] if "shared_gate_up" in inputs else 0):
        up, down = inputs["shared_gate_up"][s].float(), inputs["shared_down"][s].float()
        shared = inputs.get("shared_weights")
        factor = torch.ones_like(weights[:, :1]) if shared is None else shared[:, s, None].float()
        yield _Expert(s, slice(None), None, x, up, down, factor, _product(x, up, None, low), None)


def _product(x: Tensor, up: Tensor, bias: Tensor | None, low: Format) -> Estimate:
    """Return the first product, rounded before and after the bias."""
    lengths = x.norm(dim=-1, keepdim=True) * up.norm(dim=-1)
    product = Estimate.exact(x @ up.T).with_error(2 * WIDE * lengths).rounded(low)
    if bias is None:
        return product
    return replace(product, value=product.value + bias).rounded(low)


def _slopes(product: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the derivatives of the activation by the columns of its product: two where there is a gate."""
    found = activation_slopes(product, **options)
    return found if options["activation"] in GATED else found[:1]


def _halves(product: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return gate and up columns, or all columns where there is no gate."""
    if options["activation"] not in GATED:
        return (product,)
    return (product[..., 0::2], product[..., 1::2]) if options["interleaved"] else product.chunk(2, -1)


def _joined(halves: list[Tensor], options: dict[str, Any]) -> Tensor:
    """Return the inverse of ``_halves``."""
    if options["activation"] not in GATED:
        return halves[0]
    return torch.stack(halves, -1).flatten(-2) if options["interleaved"] else torch.cat(halves, -1)


def _activated(product: Estimate, options: dict[str, Any], low: Format) -> Estimate:
    """Return h, rounded after each of its two steps."""
    h = Estimate.exact(activate(product.value, **options))
    parts = [*zip(*(_halves(each, options) for each in (product.bound, product.variance)), strict=True)]
    for slope, (bound, variance) in zip(_slopes(product.value, options), parts, strict=True):
        h.bound = h.bound + bound * slope.abs()
        h.variance = h.variance + variance * slope.square()
    size = torch.stack([half.abs() + 1 for half in _halves(product.value, options)]).prod(0) ** _POWER[len(parts)]
    return h.with_error(_OF_FUNCTION * size).rounded(low).rounded(low)


def _output(h: Estimate, expert: _Expert, low: Format) -> Estimate:
    """Return the output of an expert, before it is weighted."""
    y = h.multiplied(expert.down.T).rounded(low)
    if expert.bias is not None:
        y = replace(y, value=y.value + expert.bias).rounded(low)
    return y


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

    def scale(self) -> Scale:
        return Estimate(*self._parts).scale(self._terms)


@without_autocast
@coarse_products
def experts_scale(inputs: Mapping[str, Tensor], options: dict[str, Any]) -> Scale:
    """Return what is allowed in the output ``[T, HID]``.

    Args:
        inputs: tensors by the names of ``fused_moe``.
        options: activation, alpha, limit and interleaved, all of them.
    """
    low = Format.of(inputs["x"].dtype)
    out = _Rows(inputs["x"], low)
    for expert in _experts(inputs, low):
        h = _activated(expert.product, options, low)
        y = _output(h, expert, low).times(expert.weights)
        weighted = y.with_error(low.rounding(y.value), low.rounding(y.value))  # the weight, and the product with it
        out.add(expert.tokens, weighted, independent_terms(h.variance * expert.down.square().sum(0)))
    return out.scale()


@without_autocast
@coarse_products
def expert_gradients_scale(
    inputs: Mapping[str, Tensor], options: dict[str, Any], *, of_tokens: bool = True, of_experts: bool = True
) -> dict[str, Scale]:
    """Return what is allowed in the gradient of each input, by its name; ``inputs`` have ``do`` besides.

    ``of_tokens``: of x and the routing weights. ``of_experts``: of all others.
    """
    low = Format.of(inputs["x"].dtype)
    names = (*["topk_weights"] * of_tokens, *("w_gate_up", "w_down", "bias_gate_up", "bias_down") * of_experts)
    found = {name: _nothing(inputs[name]) for name in names if name in inputs}
    dx = _Rows(inputs["x"], low)
    for expert in _experts(inputs, low):
        assert expert.slots is not None
        do = inputs["do"][expert.tokens].float()
        h = _activated(expert.product, options, low)
        dy = Estimate.exact(do * expert.weights)
        dy = dy.with_error(low.rounding(dy.value), low.rounding(dy.value))
        da = dy.multiplied(expert.down).rounded(low)
        dproduct = _through_activation(da, expert.product, options, low)
        if of_tokens:
            terms = independent_terms(dproduct.variance * expert.up.square().sum(-1))
            dx.add(expert.tokens, dproduct.multiplied(expert.up).rounded(low), terms)
            scale = _weight_gradient(do, _output(h, expert, low), h, da, expert.weights, low)
            found["topk_weights"].largest[expert.tokens, expert.slots] = scale.largest[:, 0]
        if not of_experts:
            continue
        columns = {
            "w_gate_up": (dproduct, expert.x, dproduct.map(lambda x: x.T).multiplied(expert.x)),
            "w_down": (dy, h.value, _product_of_two(dy, h)),
        }
        for name, (left, right, product) in columns.items():
            terms = independent_terms(left.variance * right.square().sum(-1, keepdim=True), 0).T
            _set(found[name], expert.name, product.rounded(low), terms)
        for name, gradient in (("bias_gate_up", dproduct), ("bias_down", dy)):
            if name in found:
                ones = torch.ones(gradient.value.shape[0], 1, device=do.device)
                _set(found[name], expert.name, gradient.map(lambda x: x.T).multiplied(ones).rounded(low), None)
    if not of_tokens:
        return found
    found["topk_weights"].rms.copy_(found["topk_weights"].largest.square().mean(-1, keepdim=True).sqrt())
    return {"x": dx.scale(), **found}


def _nothing(like: Tensor) -> Scale:
    """Return that no error is allowed: of experts without a token gradients are 0."""
    zeros = torch.zeros(like.shape, device=like.device)
    return Scale(zeros, torch.zeros((*like.shape[:-1], 1), device=like.device))


def _set(scale: Scale, place: int, estimate: Estimate, terms: Tensor | None) -> None:
    if scale.largest.dim() == 2:  # of a bias: one row
        estimate = Estimate(
            *(part[:, 0] for part in (estimate.value, estimate.bound, estimate.variance, estimate.wide))
        )
    some = estimate.scale(torch.inf if terms is None else terms)
    scale.largest[place], scale.rms[place] = some.largest, some.rms


def _product_of_two(left: Estimate, right: Estimate) -> Estimate:
    """Return ``left.T @ right``, summed over rows in fp32, where both have errors."""
    product = left.map(lambda x: x.T).multiplied(right.value)
    product.bound = product.bound + left.value.abs().T @ right.bound
    product.variance = product.variance + left.value.square().T @ right.variance
    return product


def _through_activation(da: Estimate, product: Estimate, options: dict[str, Any], low: Format) -> Estimate:
    """Return the gradient of the first product, whose own error changes the slopes."""
    slopes = _slopes(product.value, options)
    changes = [torch.zeros_like(slope) for slope in slopes]
    for side, half in enumerate(_halves(product.bound, options)):
        for sign in (-1, 1):
            moved = [torch.zeros_like(half) for _ in slopes]
            moved[side] = sign * half
            new = _slopes(product.value + _joined(moved, options), options)
            changes = [torch.maximum(c, (n - s).abs()) for c, n, s in zip(changes, new, slopes, strict=True)]
    size = torch.stack([half.abs() + 1 for half in _halves(product.value, options)]).prod(0)
    parts = []
    for slope, change in zip(slopes, changes, strict=True):
        part = da.times(slope).with_error(da.value.abs() * (change * len(slopes) + _OF_FUNCTION * size))
        for _ in range(_STEPS_OF_SLOPE):
            part = part.rounded(low)
        parts.append(part)
    names = ("value", "bound", "variance", "wide")
    return Estimate(*(_joined([getattr(part, name) for part in parts], options) for name in names))


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
