"""The baselines of our experts: how each is called. All take ``fused_moe``'s arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from ...moe import reference
from ...moe.problem import MoeCase
from ..moe_routing_cases import weight_bytes
from .base import Baseline, MemoryCopy, by_name

_MAX_GATHERED_BYTES = 32 << 30  # of weights that batched_mm copies, one expert's for each pair


def options_of(case: MoeCase) -> dict[str, Any]:
    """Return the options of ``fused_moe`` that are not its defaults."""
    p = case.problem
    named = {"activation": p.activation, "alpha": p.alpha, "limit": p.limit, "interleaved": p.interleaved}
    return {name: value for name, value in named.items() if value and value != "swiglu"}


def add_shared(out: Tensor, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Add what shared experts make of all tokens, as models do: beside the routed ones."""
    up, down, weights = (options.get(name) for name in ("shared_gate_up", "shared_down", "shared_weights"))
    if up is None or down is None:
        return out
    for s in range(up.shape[0]):
        y = F.linear(activate(F.linear(x, up[s]), options), down[s])
        out = out + (y if weights is None else y * weights[:, s, None].to(x.dtype))
    return out


def activate(product: Tensor, options: dict[str, Any]) -> Tensor:
    """Return what an activation with these options of ``fused_moe`` makes of the first product."""
    names = ("alpha", "limit", "interleaved")
    chosen = {name: options[name] for name in names if options.get(name)}
    return reference.activate(product, options.get("activation", "swiglu"), **chosen)


def _grouped_mm(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """Do what transformers does with ``experts_implementation="grouped_mm"``, step by step."""
    tokens, top_k = topk_ids.shape
    experts = w_gate_up.shape[0]
    ids = topk_ids.reshape(-1)
    order = torch.argsort(ids)
    ids_sorted = ids[order]
    back = torch.argsort(order)
    counts = torch.histc(ids_sorted.float(), bins=experts, min=0, max=experts - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[order // top_k]
    product = torch._grouped_mm(rows, w_gate_up.transpose(-2, -1), offs=offsets)  # noqa: SLF001 - transformers calls it
    bias_gate_up, bias_down = options.get("bias_gate_up"), options.get("bias_down")
    if bias_gate_up is not None:
        product = product + bias_gate_up[ids_sorted]
    hidden = activate(product, options)
    y = torch._grouped_mm(hidden, w_down.transpose(-2, -1), offs=offsets)  # noqa: SLF001 - as above
    if bias_down is not None:
        y = y + bias_down[ids_sorted]
    y = y * topk_weights.reshape(-1)[order, None].to(x.dtype)
    return add_shared(y[back].view(tokens, top_k, -1).sum(1), x, options)


def _batched_mm(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """Do what transformers does with ``experts_implementation="batched_mm"``: a copy of the weights for each pair."""
    tokens, top_k = topk_ids.shape
    ids = topk_ids.reshape(-1)
    rows = x.repeat_interleave(top_k, 0)
    product = torch.bmm(w_gate_up[ids], rows[:, :, None]).squeeze(-1)
    bias_gate_up, bias_down = options.get("bias_gate_up"), options.get("bias_down")
    if bias_gate_up is not None:
        product = product + bias_gate_up[ids]
    y = torch.bmm(w_down[ids], activate(product, options)[:, :, None]).squeeze(-1)
    if bias_down is not None:
        y = y + bias_down[ids]
    y = y * topk_weights.reshape(-1, 1).to(x.dtype)
    return add_shared(y.view(tokens, top_k, -1).sum(1), x, options)


def _eager(*tensors: Tensor, **options: Any) -> Tensor:
    """Loop over experts that have tokens, as transformers' models do by themselves."""
    options.pop("batch_invariant", None)
    return reference.fused_moe(*tensors, **options)


class Function(Baseline):
    """A baseline that is a function of this file."""

    def __init__(self, name: str, function: Callable[..., Tensor], refuse: Callable[[MoeCase], str | None]) -> None:
        """``refuse`` returns why it cannot serve a case, or None."""
        self.name, self._function, self._refuse = name, function, refuse

    def load(self) -> Callable[..., Any]:
        """Return it."""
        return self._function

    def refusal(self, case: MoeCase) -> str | None:
        """Ask the function's own."""
        return self._refuse(case)


class Liger(Baseline):
    """Liger-Kernel's fused experts, in Triton; it reads the number of its tiles on the host."""

    name = "liger"
    kernels = ("*_fused_up_proj_swiglu_kernel*", "*_fused_down_proj_kernel*")
    distribution = "liger-kernel"

    def load(self) -> Callable[..., Any]:
        """Return it, shared experts beside it."""
        run = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply

        def liger(
            x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
        ) -> Tensor:
            return add_shared(run(x, w_gate_up, w_down, topk_ids.to(torch.int32), topk_weights), x, options)

        return liger

    def refusal(self, case: MoeCase) -> str | None:
        """It knows one activation, and no biases."""
        lacking = [feature for feature in case.problem.features if feature != "shared experts"]
        return f"it has no {', '.join(lacking)}" if lacking else None


def _refuse_grouped(case: MoeCase) -> str | None:
    problem = case.problem
    if problem.dtype != "bf16":
        return "torch._grouped_mm serves bf16"
    if problem.hidden % 8 or problem.inter % 8:
        return "torch._grouped_mm serves sizes that are multiples of 8"
    return None


def _refuse_batched(case: MoeCase) -> str | None:
    copied = case.problem.pairs * case.problem.expert_bytes
    if copied > _MAX_GATHERED_BYTES:
        return f"it would copy {copied / 1e9:.0f} GB of weights, one expert's for each pair"
    return None


def _refuse_nothing(_case: MoeCase) -> str | None:
    return None


BASELINES = by_name(
    Function("grouped_mm", _grouped_mm, _refuse_grouped),
    Function("batched_mm", _batched_mm, _refuse_batched),
    Function("transformers-eager", _eager, _refuse_nothing),
    Liger(),
    MemoryCopy(weight_bytes),
)
