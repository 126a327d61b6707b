"""The meaning of routing and of the experts: eager torch, on CPU or GPU, up to fp64. It syncs with the host freely."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from .problem import DEFAULT_ALPHA, DEFAULT_LIMIT, GATED


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

    A NaN is never chosen before a number. Of equal choices the lower expert comes first.
    """
    values = logits.to(dtype)
    scores = torch.softmax(values, -1) if score == "softmax" else torch.sigmoid(values)
    # Without a bias by the logits: scores rise with them, and round different ones to one number.
    choice = values.detach() if bias is None else scores.detach() + bias.detach().to(dtype)
    choice = choice.masked_fill(choice.isnan(), -math.inf)
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    if groups > 1:
        of_groups = choice.reshape(*choice.shape[:-1], groups, -1)
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


def _gelu(x: Tensor, activation: str) -> Tensor:
    return F.gelu(x, approximate="tanh" if activation.endswith("_tanh") else "none")


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
    """Return the output ``[T, HID]`` of ``moe.api.fused_moe`` in ``dtype`` (default: that of x), each step in it.

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
        tokens, slots = torch.where(topk_ids == e)
        biases = (None if b is None else b[e] for b in (bias_gate_up, bias_down))
        y = expert(x[tokens], w_gate_up[e], w_down[e], *biases)
        out = out.index_add(0, tokens, y * topk_weights[tokens, slots, None].to(dtype))
    if shared_gate_up is not None and shared_down is not None:
        for s in range(shared_gate_up.shape[0]):
            y = expert(x, shared_gate_up[s], shared_down[s], None, None)
            out = out + (y if shared_weights is None else y * shared_weights[:, s, None].to(dtype))
    return out
