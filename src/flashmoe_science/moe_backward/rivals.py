"""The rivals of our gradients of experts: autograd through each rival of the forward pass.

A rival runs its forward once, on its own leaves, where it is bound and outside of any timing; timed is its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..moe.inputs import TENSORS
from ..moe.problem import MoeCase
from ..moe.rival_registry import RIVALS as FORWARD_RIVALS
from ..moe.rivals import MoeRival

Inputs = Mapping[str, Tensor]
NAMES = ("x", "w_gate_up", "w_down", "topk_weights", "bias_gate_up", "bias_down")


class Bound:
    """An entry point that runs its forward before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        """``forward`` takes what ``fused_moe`` takes."""
        self._forward = forward

    def __call__(self, *_arguments: object, **_options: object) -> tuple[Tensor, ...]:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")

    def bind_inputs(self, inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
        """Run the forward pass, and return the call that makes its gradients."""
        with torch.enable_grad():
            leaves = {name: inputs[name].detach().clone().requires_grad_() for name in NAMES if name in inputs}
            tensors = {name: inputs[name] for name in TENSORS if name in inputs} | leaves
            required = [tensors.pop(name) for name in TENSORS[:5]]
            out = self._forward(*required, **tensors, **options)
        do, wanted = inputs["do"].clone(), list(leaves.values())

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, wanted, do, retain_graph=True)

        return run


class BackwardRival(MoeRival):
    """Autograd through one rival of the forward pass."""

    def __init__(self, forward: MoeRival, kernels: Sequence[str] = ()) -> None:
        """Take its name and what it cannot serve; ``kernels`` are those of its gradients."""
        self.name, self._forward, self.also_called = forward.name, forward, forward.also_called
        self.distribution, self.kernels = forward.distribution, kernels

    def load(self) -> Callable[..., Any]:
        """Return what runs the forward where it is bound."""
        return Bound(self._forward.load())

    def version(self) -> str:
        """Return that of the forward, whose gradients torch's autograd asks for."""
        return f"{self._forward.version()}, autograd"

    def refusal(self, case: MoeCase) -> str | None:
        """Ask the rival of the forward."""
        return self._forward.refusal(case)


_KERNELS: dict[str, Sequence[str]] = {
    "grouped_mm": (),
    "transformers-eager": (),
    "liger": ("*_moe_bwd_dW1_kernel*", "*_moe_bwd_dW2_kernel*"),
    "sonicmoe": ("*GemmDGatedSm*",),
}
RIVALS: dict[str, BackwardRival] = {
    called: BackwardRival(FORWARD_RIVALS[called], theirs) for called, theirs in _KERNELS.items()
}
