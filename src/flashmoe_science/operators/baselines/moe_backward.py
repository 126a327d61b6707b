"""The baselines of our gradients of experts: autograd through baselines of the forward pass.

A baseline runs its forward once, on its own leaves, where it is bound and outside of any timing; timed is its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...moe.checks import TENSORS
from ...moe.problem import MoeCase
from .base import Baseline, Bound, Call, Inputs, by_name
from .moe import BASELINES as FORWARD, options_of
from .moe_sonicmoe import SonicMoe

NAMES = ("x", "w_gate_up", "w_down", "topk_weights", "bias_gate_up", "bias_down")


def bind_gradients(forward: Callable[..., Tensor], case: MoeCase, inputs: Inputs) -> Call:
    """Run ``forward``, which takes what ``fused_moe`` takes, and return the call that makes its gradients."""
    with torch.enable_grad():
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in NAMES if name in inputs}
        tensors = {name: inputs[name] for name in TENSORS if name in inputs} | leaves
        required = [tensors.pop(name) for name in TENSORS[:5]]
        out = forward(*required, **tensors, **options_of(case))
    do, wanted = inputs["do"].clone(), list(leaves.values())

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, wanted, do, retain_graph=True)

    return run


class Autograd(Baseline):
    """Autograd through one baseline of the forward pass."""

    def __init__(self, forward: Baseline, kernels: Sequence[str] = ()) -> None:
        """Take its name and what it cannot serve; ``kernels`` are those of its gradients."""
        self.name, self._forward = forward.name, forward
        self.distribution, self.kernels = forward.distribution, kernels

    def load(self) -> Callable[..., Any]:
        """Return what runs the forward where it is bound."""
        return Bound(functools.partial(bind_gradients, self._forward.load()))

    def version(self) -> str:
        """Return that of the forward, whose gradients torch's autograd asks for."""
        return f"{self._forward.version()}, autograd"

    def refusal(self, case: MoeCase) -> str | None:
        """Ask the baseline of the forward."""
        return self._forward.refusal(case)


BASELINES = by_name(
    Autograd(FORWARD["grouped_mm"]),
    Autograd(FORWARD["transformers-eager"]),
    Autograd(FORWARD["liger"], ("*_moe_bwd_dW1_kernel*", "*_moe_bwd_dW2_kernel*")),
    Autograd(SonicMoe(), ("*GemmDGatedSm*",)),
)
