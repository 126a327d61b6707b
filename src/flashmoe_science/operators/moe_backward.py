"""The gradients of experts for the harness: cases, inputs, exact ones, work and kernels.

A call is given what the forward pass keeps, inputs and the first product, and the gradient of the output. It gives
those of x, of both weights, of the routing weights and of the biases, each with an error budget of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from ..moe import reference
from ..moe.backward.api import fused_moe_backward
from ..moe.backward.plan import BackwardPlan, plan_backward
from ..moe.problem import MoeCase
from .baselines.base import Inputs
from .baselines.moe import BASELINES as FORWARD, options_of
from .baselines.moe_backward import BASELINES, NAMES, bind_gradients
from .error_scale import Scale
from .moe import MoeOperator, activation_of
from .moe_routing_cases import active_experts
from .moe_scale import expert_gradients_scale

moe_backward_triton = functools.partial(fused_moe_backward, kernel="moe_backward_triton")
moe_backward_gluon_sm90 = functools.partial(fused_moe_backward, kernel="moe_backward_gluon_sm90")


class MoeBackwardOperator(MoeOperator):
    """The gradients of experts, for the harness."""

    name = "moe_backward"
    fresh = ("do",)  # the product follows from x and the weights
    kernels = {
        "fused_moe_backward": "auto",
        "moe_backward_triton": "moe_backward_triton",
        "moe_backward_gluon_sm90": "moe_backward_gluon_sm90",
    }
    public_module = fused_moe_backward.__module__
    known_baselines = BASELINES
    instead = "moe_backward_triton, in a suite of fp16 or fp32"

    def outputs(self, case: MoeCase) -> Sequence[str]:
        """Return the names of what a call gives, in this order."""
        return tuple(f"d{name}" for name in self._wanted(case))

    @staticmethod
    def _wanted(case: MoeCase) -> tuple[str, ...]:
        has = {"bias_gate_up": case.problem.bias_gate_up, "bias_down": case.problem.bias_down}
        return tuple(name for name in NAMES if has.get(name, True))

    def parse_case(self, table: Mapping[str, Any]) -> MoeCase:
        """Turn one case of a suite file into a problem. Raises ``InputError``."""
        for key in ("shared_experts", "batch_invariant"):
            if table.get(key):
                raise InputError(f"{key} is not a key of a case of {self.name}")
        case: MoeCase = super().parse_case(table)
        if not case.problem.tokens:
            raise InputError("tokens must be at least 1, got 0: the gradients of none are zeros, which no kernel makes")
        return dataclasses.replace(case, problem=dataclasses.replace(case.problem, keep_product=True))

    def work(self, case: MoeCase) -> Work:
        """Count four products of every pair; active weights, all their gradients, and every row once."""
        p = case.problem
        weights = float((active_experts(case) + p.experts) * p.expert_bytes) if p.tokens else 0.0
        rows = (3 * p.tokens * p.hidden + p.pairs * p.columns_up) * p.item_bytes + 12 * p.pairs
        return Work(2 * p.flops, weights + rows, p.tokens)

    def make_inputs(self, case: MoeCase, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return those of the forward pass, the gradient of the output, and the first product in fp32, rounded."""
        inputs = super().make_inputs(case, seed=seed, device=device)
        x, generator = inputs["x"], torch.Generator(device=device).manual_seed(seed + 1)
        do = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float32).to(x.dtype)
        return self.completed(case, {**inputs, "do": do})

    def completed(self, case: MoeCase, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is drawn, with the first product in fp32, rounded."""
        inputs, x, ids = drawn, drawn["x"], drawn["topk_ids"].flatten()
        device = x.device
        order = torch.sort(ids, stable=True).indices
        product = torch.zeros(case.problem.pairs, case.problem.columns_up, dtype=x.dtype, device=device)
        for expert in range(case.problem.experts):
            rows = torch.where(ids[order] == expert)[0]
            found = x[order[rows] // case.problem.top_k].float() @ inputs["w_gate_up"][expert].float().t()
            if "bias_gate_up" in inputs:
                found += inputs["bias_gate_up"][expert].float()
            product[rows] = found.to(x.dtype)
        return {**inputs, "product": product}

    def arguments(self, case: MoeCase, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return the gradient of the output, the product, and tensors and options of ``fused_moe``."""
        tensors, options = super().arguments(case, inputs)
        return [inputs["do"], inputs["product"], *tensors], options

    def exact(self, case: MoeCase, inputs: Inputs) -> Any:
        """Return the gradients in fp64, the product computed anew."""
        options: dict[str, Any] = {**inputs, **options_of(case)}
        do = options.pop("do")
        options.pop("product")
        found = reference.moe_gradients(do, **options, dtype=torch.float64)
        return tuple(found[name] for name in self._wanted(case))

    def low_precision(self, case: MoeCase, inputs: Inputs) -> Any:
        """Return what autograd makes of a loop over experts in the problem's dtype."""
        return bind_gradients(FORWARD["transformers-eager"].load(), case, inputs)()

    def error_scale(self, case: MoeCase, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of each gradient."""
        found = expert_gradients_scale(inputs, activation_of(case))
        return tuple(found[name] for name in self._wanted(case))

    def plan(self, subject: str, case: MoeCase, gpu: GpuSpec) -> BackwardPlan:
        """Return the plan of a call. Raises ``UnsupportedError``."""
        return plan_backward(case.problem, gpu, self._wanted(case), self.kernels[subject])


OPERATOR = MoeBackwardOperator()
