"""References of routing, experts and gradients: eager torch on CPU or GPU, up to fp64. They wait for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from ..gpu.ambient import without_autocast
from .problem import DEFAULT_ALPHA, DEFAULT_LIMIT, GATED

_ELEMENTS_AT_ONCE = 2**25  # of the first product in fp64: 256 MiB, of which a dozen are alive at once


@without_autocast
def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the weights ``[T, K]`` in ``dtype`` and the experts ``[T, K]`` int32 that ``moe.api.route`` describes.

    A NaN is never chosen before a number. Ties go to the lower expert.
    """
    values = logits.to(dtype)
    scores = torch.softmax(values, -1) if score == "softmax" else torch.sigmoid(values)
    # Without a bias, compare logits: scores are monotonic in them, but different logits can round to one score.
    choice = values.detach() if bias is None else scores.detach() + bias.detach().to(dtype)
    choice = choice.masked_fill(choice.isnan(), -math.inf)
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    if groups > 1:
        of_groups = choice.reshape(*choice.shape[:-1], groups, choice.shape[-1] // groups)
        best = min(1 if bias is None else 2, of_groups.shape[-1])
        worth = of_groups.topk(best, -1).values.sum(-1)
        worth = worth.masked_fill(worth.isnan(), -math.inf)
        chosen = torch.sort(worth, dim=-1, descending=True, stable=True).indices[..., :top_groups]
        allowed = torch.zeros(worth.shape, dtype=torch.int8, device=worth.device).scatter_(-1, chosen, value=1)
        allowed = allowed.repeat_interleave(of_groups.shape[-1], -1).gather(-1, order)
        order = order.gather(-1, torch.sort(allowed, dim=-1, descending=True, stable=True).indices)
    ids = order[..., :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


@without_autocast
def route_gradient(
    dweights: Tensor,
    logits: Tensor,
    ids: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the gradient of the logits of ``route`` in ``dtype``, given that of the weights."""
    values, chosen = logits.to(dtype), ids.long()
    scores = torch.softmax(values, -1) if score == "softmax" else torch.sigmoid(values)
    weights, gradient = scores.gather(-1, chosen), dweights.to(dtype) * scale
    if renormalize:
        total = weights.sum(-1, keepdim=True) + 1e-20
        gradient = (gradient - (gradient * weights).sum(-1, keepdim=True) / total) / total
    dscores = torch.zeros_like(scores).scatter(-1, chosen, gradient)
    if score == "softmax":
        return scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
    return dscores * scores * (1 - scores)


def activate(
    product: Tensor, activation: str, *, alpha: float = 0.0, limit: float = 0.0, interleaved: bool = False
) -> Tensor:
    """Return the activation of the first product ``[..., 2 * INTER]``, or ``[..., INTER]`` where there is no gate."""
    if activation not in GATED:
        if activation == "relu2":
            return torch.relu(product).square()
        return F.silu(product) if activation == "silu" else _gelu(product, activation)
    if interleaved:
        gate, up = product[..., 0::2], product[..., 1::2]
    else:
        gate, up = product.chunk(2, -1)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "swiglu_clamped":
        alpha, limit = alpha or DEFAULT_ALPHA, limit or DEFAULT_LIMIT
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return _gelu(gate, activation) * up


def rows_at_once(columns: int, dtype: torch.dtype) -> int:
    """Return how many pairs of an expert are worked out at once: all, or in fp64 as many as fit in little memory.

    Sums over pairs are then made in parts. A lower precision would round each part.
    """
    return max(1, _ELEMENTS_AT_ONCE // columns) if dtype == torch.float64 else 2**31 - 1


def pairs_of(chosen: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and slots where ``chosen`` ``[T, K]`` is true, at most so many at once."""
    tokens, slots = torch.where(chosen)
    yield from zip(torch.split(tokens, at_once), torch.split(slots, at_once), strict=True)


def _gelu(x: Tensor, activation: str) -> Tensor:
    return F.gelu(x, approximate="tanh" if activation.endswith("_tanh") else "none")


@without_autocast
def fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float = 0.0,
    limit: float = 0.0,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the output ``[T, HID]`` of ``moe.api.fused_moe`` in ``dtype`` (default: that of x), which every step uses.

    An expert at a time, over the tokens that go to it.
    """
    dtype = dtype or x.dtype
    x = x.to(dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)

    def expert(rows: Tensor, up: Tensor, down: Tensor, bias_up: Tensor | None, bias: Tensor | None) -> Tensor:
        product = F.linear(rows, up.to(dtype), None if bias_up is None else bias_up.to(dtype))
        hidden = activate(product, activation, alpha=alpha, limit=limit, interleaved=interleaved)
        return F.linear(hidden, down.to(dtype), None if bias is None else bias.to(dtype))

    for e in torch.unique(topk_ids).tolist():
        if not 0 <= e < w_gate_up.shape[0]:
            continue
        biases = [None if b is None else b[e] for b in (bias_gate_up, bias_down)]
        for tokens, slots in pairs_of(topk_ids == e, rows_at_once(w_gate_up.shape[1], dtype)):
            y = expert(x[tokens], w_gate_up[e], w_down[e], *biases)
            out = out.index_add(0, tokens, y * topk_weights[tokens, slots, None].to(dtype))
    if shared_gate_up is not None and shared_down is not None:
        for s in range(shared_gate_up.shape[0]):
            some = torch.split(x, rows_at_once(shared_gate_up.shape[1], dtype))
            parts = [expert(rows, shared_gate_up[s], shared_down[s], None, None) for rows in some]
            y = parts[0] if len(parts) == 1 else torch.cat(parts)
            out = out + (y if shared_weights is None else y * shared_weights[:, s, None].to(dtype))
    return out


def halves_of(product: Tensor, activation: str, *, interleaved: bool) -> tuple[Tensor, ...]:
    """Return gate and up columns, or all columns where there is no gate."""
    if activation not in GATED:
        return (product,)
    return (product[..., 0::2], product[..., 1::2]) if interleaved else product.chunk(2, -1)


def joined(halves: Sequence[Tensor], *, interleaved: bool) -> Tensor:
    """Return the inverse of ``halves_of``."""
    if len(halves) == 1:
        return halves[0]
    return torch.stack([*halves], -1).flatten(-2) if interleaved else torch.cat([*halves], -1)


def activation_slopes(
    product: Tensor, activation: str, *, alpha: float = 0.0, limit: float = 0.0, interleaved: bool = False
) -> tuple[Tensor, ...]:
    """Return the derivatives of ``activate`` by gate and by up; without a gate by its one argument."""
    halves = halves_of(product, activation, interleaved=interleaved)
    return slopes_of_halves(halves, activation, alpha=alpha, limit=limit)


def slopes_of_halves(
    halves: Sequence[Tensor], activation: str, *, alpha: float = 0.0, limit: float = 0.0
) -> tuple[Tensor, ...]:
    """Return what ``activation_slopes`` does, of gate and up columns, or of all columns where there is no gate."""
    if activation not in GATED:
        (product,) = halves
        if activation == "relu2":
            return (2 * torch.relu(product),)
        if activation != "silu":
            return (_gelu_slope(product, activation),)
        sigmoid = torch.sigmoid(product)
        return (sigmoid * (1 + product * (1 - sigmoid)),)
    gate, up = halves
    if activation == "swiglu":
        sigmoid = torch.sigmoid(gate)
        return up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid
    if activation == "swiglu_clamped":
        alpha, limit = alpha or DEFAULT_ALPHA, limit or DEFAULT_LIMIT
        inside_gate, inside_up = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * gate)
        by_gate = (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
        return torch.where(inside_gate, by_gate, 0), torch.where(inside_up, gate * sigmoid, 0)
    return _gelu_slope(gate, activation) * up, _gelu(gate, activation)


def _gelu_slope(x: Tensor, activation: str) -> Tensor:
    if activation.endswith("_tanh"):
        factor = 2 * math.sqrt(2 / math.pi)
        sigmoid = torch.sigmoid(factor * (x + 0.044715 * x**3))
        return sigmoid + x * sigmoid * (1 - sigmoid) * factor * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@without_autocast
def moe_gradients(
    do: Tensor,
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float = 0.0,
    limit: float = 0.0,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    dtype: torch.dtype | None = None,
    output: bool = False,
) -> dict[str, Tensor]:
    """Return the gradients of routed experts by name, in ``dtype`` (default: that of x), for ``do`` of the output.

    Matrix products are rounded to ``dtype``; elementwise steps and sums over experts are at least fp32. ``output``:
    return ``out`` of the forward pass too, from the same products.
    """
    options = {"alpha": alpha, "limit": limit, "interleaved": interleaved}
    given = {"w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights}
    given.update({n: b for n, b in (("bias_gate_up", bias_gate_up), ("bias_down", bias_down)) if b is not None})
    dtype = dtype or x.dtype
    between = torch.promote_types(dtype, torch.float32)
    do, x = do.to(dtype), x.to(dtype)
    found = {name: torch.zeros(tensor.shape, dtype=dtype, device=x.device) for name, tensor in given.items()}
    rows_of = {name: torch.zeros(x.shape, dtype=between, device=x.device) for name in ("x", *["out"] * output)}
    for e in torch.unique(topk_ids).tolist():
        if not 0 <= e < w_gate_up.shape[0]:
            continue
        up, down = w_gate_up[e].to(dtype), w_down[e].to(dtype)
        bias_up, bias = (None if each is None else each[e].to(dtype) for each in (bias_gate_up, bias_down))
        for tokens, slots in pairs_of(topk_ids == e, rows_at_once(w_gate_up.shape[1], dtype)):
            rows, do_rows = x[tokens], do[tokens]
            product = F.linear(rows, up, bias_up).to(between)
            h = activate(product, activation, **options).to(dtype)  # type: ignore[arg-type]
            weight = topk_weights[tokens, slots, None].to(between)
            da = (do_rows @ down).to(between) * weight
            slopes = activation_slopes(product, activation, **options)  # type: ignore[arg-type]
            dproduct = joined([(da * slope).to(dtype) for slope in slopes], interleaved=interleaved)
            rows_of["x"].index_add_(0, tokens, (dproduct @ up).to(between))
            found["w_gate_up"][e].addmm_(dproduct.t(), rows)
            weighted = (do_rows * weight).to(dtype)
            found["w_down"][e].addmm_(weighted.t(), h)
            y = F.linear(h, down, bias)
            found["topk_weights"][tokens, slots] = (do_rows.to(between) * y).sum(-1).to(dtype)
            if output:
                rows_of["out"].index_add_(0, tokens, y * weight)
            for name, gradient in (("bias_gate_up", dproduct), ("bias_down", weighted)):
                if name in found:
                    found[name][e] += gradient.sum(0)
    return {**found, **{name: rows.to(dtype) for name, rows in rows_of.items()}}
