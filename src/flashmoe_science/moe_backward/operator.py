"""What the harness needs to know of the gradients of experts: cases, inputs, exact ones, work, kernels, rivals.

A call is given what the forward pass keeps, inputs and the first product, and the gradient of the output. It gives
those of x, of both weights, of the routing weights and of the biases, each with an error budget of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..gpu.planning import Work
from ..gpu.specs import GpuSpec
from ..moe import reference
from ..moe.backward_api import fused_moe_backward
from ..moe.backward_plan import BackwardPlan, plan_backward
from ..moe.drawn import active_experts
from ..moe.inputs import TENSORS
from ..moe.operator import MoeOperator
from ..moe.problem import MoeCase
from ..moe.rivals import RIVALS
from . import rivals

moe_backward_triton = functools.partial(fused_moe_backward, kernel="moe_backward_triton")
moe_backward_gluon_sm90 = functools.partial(fused_moe_backward, kernel="moe_backward_gluon_sm90")


class MoeBackwardOperator(MoeOperator):
    """The gradients of experts, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "moe_backward"

    def outputs(self, case: MoeCase) -> Sequence[str]:
        """Return the names of what a call gives, in this order."""
        return tuple(f"d{name}" for name in self._wanted(case))

    @staticmethod
    def _wanted(case: MoeCase) -> tuple[str, ...]:
        has = {"bias_gate_up": case.problem.bias_gate_up, "bias_down": case.problem.bias_down}
        return tuple(name for name in rivals.NAMES if has.get(name, True))

    def parse_case(self, table: Mapping[str, Any]) -> MoeCase:
        """Turn one case of a suite file into a problem. Raises ``InputError``."""
        for key in ("shared_experts", "batch_invariant"):
            if table.get(key):
                raise InputError(f"{key} is not a key of a case of {self.name}")
        case = super().parse_case(table)
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
        x, ids = inputs["x"], inputs["topk_ids"].flatten()
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        do = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float32).to(x.dtype)
        order = torch.sort(ids, stable=True).indices
        product = torch.zeros(case.problem.pairs, case.problem.columns_up, dtype=x.dtype, device=device)
        for expert in range(case.problem.experts):
            rows = torch.where(ids[order] == expert)[0]
            found = x[order[rows] // case.problem.top_k].float() @ inputs["w_gate_up"][expert].float().t()
            if "bias_gate_up" in inputs:
                found += inputs["bias_gate_up"][expert].float()
            product[rows] = found.to(x.dtype)
        return {**inputs, "do": do, "product": product}

    def bind(self, entry: Callable[..., Any], case: MoeCase, inputs: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
        """Return ``entry(do, product, x, ...)`` as a call without arguments; a rival runs its forward before."""
        options = self._options(case)
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], Any] = entry.bind_inputs(inputs, options)
            return bound
        options.update({name: inputs[name] for name in TENSORS[5:] if name in inputs})
        return functools.partial(
            entry, inputs["do"], inputs["product"], *(inputs[name] for name in TENSORS[:5]), **options
        )

    def exact(self, case: MoeCase, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Return the gradients in fp64, the product computed anew."""
        options: dict[str, Any] = {**inputs, **self._options(case)}
        do = options.pop("do")
        options.pop("product")
        found = reference.moe_gradients(do, **options, dtype=torch.float64)
        return tuple(found[name] for name in self._wanted(case))

    def low_precision(self, case: MoeCase, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Return what autograd makes of a loop over experts in the problem's dtype."""
        return rivals.Bound(RIVALS["transformers-eager"].load()).bind_inputs(inputs, self._options(case))()

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = f"{__package__}.operator"
        return {
            "fused_moe_backward": f"{fused_moe_backward.__module__}:fused_moe_backward",
            "moe_backward_triton": f"{here}:moe_backward_triton",
            "moe_backward_gluon_sm90": f"{here}:moe_backward_gluon_sm90",
        }

    def sources(self, subject: str) -> Sequence[str]:
        """Return the files of the forward pass, and those of this room."""
        here = [f"moe_backward/{name}.py" for name in ("__init__", "operator", "rivals")]
        return sorted([*super().sources(subject), *here])

    def _plan(self, subject: str, case: MoeCase, gpu: GpuSpec) -> BackwardPlan:
        kernel = "auto" if subject == "fused_moe_backward" else subject
        return plan_backward(case.problem, gpu, self._wanted(case), kernel)

    def cpu_refusal(self, subject: str, case: MoeCase) -> str | None:
        """Return why Triton's interpreter cannot check ``case``, or None."""
        if subject == "fused_moe_backward":
            other = "moe_backward_triton, in a suite of fp16 or fp32"
            return f"on CPU tensors it runs the reference, which would prove nothing: ask for {other}"
        if subject == "moe_backward_gluon_sm90":
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        return super().cpu_refusal(subject, case)

    def rivals(self) -> Mapping[str, Any]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS


OPERATOR = MoeBackwardOperator()
