"""The experts for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ..gpu.planning import Axis, Work
from ..moe import reference
from ..moe.api import fused_moe
from ..moe.checks import TENSORS
from ..moe.plan import MoePlan, plan_moe
from ..moe.problem import MoeCase, MoeProblem
from .base import DTYPES, KernelOperator
from .baselines.base import Inputs, by_name
from .baselines.moe import BASELINES, options_of
from .baselines.moe_scattermoe import ScatterMoe
from .baselines.moe_sonicmoe import SonicMoe
from .baselines.moe_triton_kernels import TritonKernels
from .baselines.moe_vllm import Vllm
from .error_scale import Scale
from .moe_routing_cases import draw_ids, weight_bytes
from .moe_scale import experts_scale
from .stress import halved

_MATRIX_KERNELS = (
    "_gate_up_kernel", "_down_kernel", "_grouped_sm90_kernel", "_activation_backward_kernel", "_weight_gradient_kernel",
    "_weights_sm90_kernel", "_activation_sm90_kernel",
)  # fmt: skip

gemv_triton = functools.partial(fused_moe, kernel="gemv_triton")
few_triton = functools.partial(fused_moe, kernel="few_triton")
grouped_triton = functools.partial(fused_moe, kernel="grouped_triton")
grouped_gluon_sm90 = functools.partial(fused_moe, kernel="grouped_gluon_sm90")


def activation_of(case: MoeCase) -> dict[str, Any]:
    """Return the options of the activation."""
    return {name: getattr(case.problem, name) for name in ("activation", "alpha", "limit", "interleaved")}


class MoeOperator(KernelOperator):
    """The experts, for the harness."""

    name = "moe"
    spill_bytes: ClassVar[dict[str, int]] = {"_gate_up_kernel": 8}  # on a B200
    fresh: ClassVar[tuple[str, ...]] = (
        "x", "w_gate_up", "w_down", "bias_gate_up", "bias_down", "shared_gate_up", "shared_down",
    )  # fmt: skip
    keys = {
        "tokens": int, "experts": int, "top_k": int, "hidden": int, "inter": int, "dtype": str, "activation": str,
        "alpha": float, "limit": float, "interleaved": bool, "bias_gate_up": bool, "bias_down": bool,
        "shared_experts": int, "shared_inter": int, "shared_weights": str, "batch_invariant": bool, "routing": str,
    }  # fmt: skip
    required = ("tokens", "experts", "top_k", "hidden", "inter", "dtype")
    omitted = {**{item.name: item.default for item in dataclasses.fields(MoeProblem)}, "routing": "uniform"}
    kernels = {
        "fused_moe": "auto",
        **{name: name for name in ("gemv_triton", "few_triton", "grouped_triton", "grouped_gluon_sm90")},
    }
    public_module = fused_moe.__module__
    rooms = ("moe",)
    framework = ("*cutlass*gemm*grouped*", "*GroupProblemShape*")
    known_baselines = {**BASELINES, **by_name(ScatterMoe(), SonicMoe(), TritonKernels(), Vllm())}
    planner: ClassVar[Callable[..., Any]] = staticmethod(lambda case, *more: plan_moe(case.problem, *more))
    preparer = "..moe.calls:kernels_of"
    instead = "few_triton or grouped_triton, in a suite of fp16 or fp32"
    cpu_hint = ": a suite of fp16 or fp32 can be checked here"
    max_interpreter_steps = 4096
    stress_draws = (
        "outliers", "large_activations", "peaked_routing", "repeated_rows", "neighbours", "strided", "odd_offset",
    )  # fmt: skip
    laid_out = ("x", "do")

    def make_problem(self, table: dict[str, Any]) -> MoeCase:
        """Return the problem of a case."""
        routing = table.pop("routing", "uniform")
        return MoeCase(MoeProblem(**table), routing)

    def sizes(self, case: MoeCase) -> MoeProblem:
        """Return the problem of a call, without its routing."""
        return case.problem

    def values(self, case: MoeCase) -> dict[str, Any]:
        """Return the value of each key."""
        return {key: getattr(case if key == "routing" else case.problem, key) for key in self.keys}

    def axes(self) -> Sequence[Axis]:
        """Return the one axis: each token gives a row of its own."""
        return (Axis("tokens", "parallel", "the tokens"),)

    def scaled(self, case: MoeCase, axis: str, factor: int) -> MoeCase | None:
        """Return a case of more tokens, by the kernels that serve as many."""
        assert axis == "tokens", axis
        longer: MoeCase = self.changed(case, tokens=case.problem.tokens * factor)
        return longer

    def describe(self, case: MoeCase) -> str:
        """Return a short name of a problem."""
        return case.problem.describe() + ("" if case.routing == "uniform" else f"_{case.routing}")

    def work(self, case: MoeCase) -> Work:
        """Count both products of every pair; and the weights of active experts, x, routing and output once."""
        p = case.problem
        rows = 2 * p.tokens * p.hidden * p.item_bytes + 8 * p.pairs
        return Work(p.flops, float(weight_bytes(case) + rows), p.tokens)

    def make_inputs(self, case: MoeCase, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal x and biases, weights that keep that size, and a routing whose weights sum to 1."""
        p, dtype = case.problem, DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            for part in tensor if len(shape) == 3 else (tensor,):  # an expert at a time: fp32 of all may not fit
                part.copy_(torch.randn(part.shape, generator=generator, device=device) * scale)
            return tensor

        drawn = torch.rand(p.tokens, p.top_k, generator=generator, device=device) + 0.1
        inputs = {
            "x": normal(p.tokens, p.hidden),
            "w_gate_up": normal(p.experts, p.columns_up, p.hidden, scale=p.hidden**-0.5),
            "w_down": normal(p.experts, p.hidden, p.inter, scale=p.inter**-0.5),
            "topk_weights": (drawn / drawn.sum(-1, keepdim=True)).to(DTYPES[p.weights_dtype]),
            "topk_ids": draw_ids(case, generator, device),
        }
        if p.bias_gate_up:
            inputs["bias_gate_up"] = normal(p.experts, p.columns_up)
        if p.bias_down:
            inputs["bias_down"] = normal(p.experts, p.hidden)
        if p.shared_experts:
            theirs = p.shared()
            inputs["shared_gate_up"] = normal(theirs.experts, theirs.columns_up, p.hidden, scale=p.hidden**-0.5)
            inputs["shared_down"] = normal(theirs.experts, p.hidden, theirs.inter, scale=theirs.inter**-0.5)
        if p.shared_weights:
            weights = torch.rand(p.tokens, p.shared_experts, generator=generator, device=device)
            inputs["shared_weights"] = weights.to(DTYPES[p.shared_weights])
        return inputs

    def deviation(self, case: MoeCase, name: str) -> float:
        """Return the standard deviation of an input: weights keep the size of what they are multiplied with."""
        if name.endswith("gate_up") and not name.startswith("bias"):
            return float(case.problem.hidden**-0.5)
        theirs = case.problem.shared() if name == "shared_down" else case.problem
        return float(theirs.inter**-0.5) if name.endswith("w_down") or name == "shared_down" else 1.0

    def arguments(self, case: MoeCase, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return tensors and options of ``fused_moe``."""
        options = options_of(case)
        if case.problem.batch_invariant:
            options["batch_invariant"] = True
        options.update({name: inputs[name] for name in TENSORS[5:] if name in inputs})
        return [inputs[name] for name in TENSORS[:5]], options

    def exact(self, case: MoeCase, inputs: Inputs) -> Any:
        """Return the answer in fp64."""
        arguments: dict[str, Any] = {**inputs, **options_of(case)}
        return reference.fused_moe(**arguments, dtype=torch.float64)

    def low_precision(self, case: MoeCase, inputs: Inputs) -> Any:
        """Return the framework's eager answer: a loop over experts in the problem's dtype."""
        arguments: dict[str, Any] = {**inputs, **options_of(case)}
        return reference.fused_moe(**arguments)

    def error_scale(self, case: MoeCase, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of the output."""
        return (experts_scale(inputs, activation_of(case)),)

    def smaller(self, case: MoeCase, device: str) -> MoeCase:
        """Return a case of fewer tokens, on a CPU of fewer and smaller experts."""
        p = case.problem
        sizes = {"tokens": min(p.tokens, 256)}
        if device == "cpu":
            experts = min(p.experts, max(4, p.top_k))
            sizes = {"tokens": min(p.tokens, 8), "experts": experts, "top_k": min(p.top_k, experts)}
            sizes |= {name: halved(getattr(p, name), 64, lambda _: False) for name in ("hidden", "inter")}
            sizes |= {"shared_inter": halved(p.shared_inter, 64, lambda _: False)} if p.shared_experts else {}
        found: MoeCase = self.changed(case, **sizes)
        return found

    def change_values(self, draw: str, case: MoeCase, inputs: Inputs) -> bool:
        """Change x and the routing's weights."""
        x, weights = inputs["x"], inputs["topk_weights"]
        if draw == "outliers":  # a channel, and a token
            x[:, 0] *= 16
            x[-1] *= 4
        elif draw == "large_activations":
            x *= 6
        elif draw == "peaked_routing":  # all tokens ask for the same experts, of which one has all the weight, not 1
            inputs["topk_ids"].copy_(inputs["topk_ids"][:1].clone())
            weights.zero_()
            weights[:, 0] = 1.5
        elif draw == "repeated_rows":
            x[1::2] = x[: x.shape[0] // 2 * 2 : 2]
        elif draw == "neighbours":
            x[1:] *= 6
        return draw in ("outliers", "large_activations", "peaked_routing") or case.problem.tokens > 1

    def instruction(self, plan: MoePlan, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
        return "*MMA*" if plan.problem.item_bytes == 2 and kernel in _MATRIX_KERNELS else ""

    def interpreter_steps(self, case: MoeCase) -> int:
        """Count tiles of both products, by steps of 32 columns."""
        p = case.problem
        tiles = (p.pairs // 16 + min(p.experts, p.pairs)) * (-(-p.inter // 16) + -(-p.hidden // 32))
        return tiles * -(-max(p.hidden, p.inter) // 32)


OPERATOR = MoeOperator()
