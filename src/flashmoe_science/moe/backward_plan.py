"""Which kernels make the gradients of the experts on a GPU, with which tiles and grids, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from ..errors import InputError, UnsupportedError
from ..gpu.planning import refuse_architecture
from ..gpu.specs import GpuSpec
from . import hopper_plan
from .plan import (
    COMBINE_COLUMNS,
    COMBINE_WARPS,
    MoePlan,
    Steps,
    cdiv,
    loads_words,
    most_tiles,
    planned,
    refuse_large_grids,
    sort_steps,
)
from .problem import MoeProblem
from .tiles import SMALL_BACKWARD, BackwardConfig, backward_rows

# What gradients there are of routed experts; those of shared experts are the same of a problem of their own.
GRADIENTS = ("x", "w_gate_up", "w_down", "topk_weights", "bias_gate_up", "bias_down")
KERNELS = ("moe_backward_gluon_sm90", "moe_backward_triton")
ROUTING_PAIRS, ROUTING_WARPS = 64, 4


@dataclass(frozen=True, slots=True)
class BackwardPlan(MoePlan):
    """How the gradients of one problem are made on one GPU."""

    wanted: tuple[str, ...]  # of GRADIENTS


def choose_backward(problem: MoeProblem, arch: int) -> BackwardConfig:
    """Return tiles for the rows that an expert has on average."""
    if not loads_words(problem) or problem.hidden * problem.item_bytes % 4:
        return SMALL_BACKWARD
    configs = backward_rows(arch, problem.item_bytes)
    rows = problem.pairs / min(problem.experts, problem.pairs)
    return next((config for config in configs if config.block_m >= 1.5 * rows), configs[-1])


def column_tiles(problem: MoeProblem, config: BackwardConfig) -> int:
    """Return how many tiles the columns of the activation have: so many sums has the gradient of a routing weight."""
    return cdiv(problem.inter, config.activation.block_n)


def make_backward_plan(
    problem: MoeProblem, gpu: str, arch: int, config: BackwardConfig, wanted: tuple[str, ...], reason: str
) -> BackwardPlan:
    """Return the plan of these tiles. Raises ``UnsupportedError`` where a grid would be too large."""
    tiles, experts = most_tiles(problem, config.block_m), problem.experts
    activation, weights = config.activation, config.weights
    steps: Steps = sort_steps(problem)
    blocks = tiles * column_tiles(problem, config)
    steps.append(("dactivation", planned("_activation_backward_kernel", blocks, activation.num_warps)))
    if "topk_weights" in wanted:
        blocks = cdiv(problem.pairs, ROUTING_PAIRS)
        steps.append(("drouting", planned("_routing_gradient_kernel", blocks, ROUTING_WARPS)))
    hopper = config.hopper
    if "x" in wanted:
        if hopper:
            programs = hopper_plan.gradient_programs(problem, hopper, "dx", tiles)
            steps.append(("dx_sm90", planned("_grouped_sm90_kernel", programs, 12)))
        else:
            blocks = tiles * cdiv(problem.hidden, config.x.block_n)
            steps.append(("dx", planned("_down_kernel", blocks, config.x.num_warps)))
        columns = cdiv(problem.hidden, COMBINE_COLUMNS)
        steps.append(("dcombine", planned("_combine_kernel", problem.tokens, COMBINE_WARPS, columns)))
    for step, names, rows, columns in (
        ("dgate_up", ("w_gate_up", "bias_gate_up"), problem.columns_up, problem.hidden),
        ("ddown", ("w_down", "bias_down"), problem.hidden, problem.inter),
    ):
        if not set(names) & set(wanted):
            continue
        # Only Triton's kernel sums rows for the bias beside.
        if hopper and names[1] not in wanted:
            programs = hopper_plan.gradient_programs(problem, hopper, step, tiles)
            steps.append((f"{step}_sm90", planned("_weights_sm90_kernel", programs, 12)))
        else:
            blocks = cdiv(rows, config.weights_m) * cdiv(columns, weights.block_n)
            steps.append((step, planned("_weight_gradient_kernel", blocks, weights.num_warps, experts)))
    refuse_large_grids(steps)
    what, launches = tuple(name for name, _ in steps), tuple(launch for _, launch in steps)
    name = "moe_backward_gluon_sm90" if hopper else "moe_backward_triton"
    return BackwardPlan(problem, gpu, arch, name, config, None, what, launches, reason, wanted)


def plan_backward(
    problem: MoeProblem, gpu: GpuSpec | None, wanted: tuple[str, ...], kernel: str = "auto"
) -> BackwardPlan:
    """Return how the gradients ``wanted`` of ``problem`` are made on ``gpu`` (None: Triton's interpreter).

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, makes them.
    """
    if kernel not in ("auto", *KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {kernel!r}")
    if gpu is None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise UnsupportedError("moe_backward_triton needs an NVIDIA GPU, got CPU tensors")
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        return make_backward_plan(problem, "CPU", 0, SMALL_BACKWARD, wanted, why)
    refuse_architecture(gpu.arch)
    config = choose_backward(problem, gpu.arch)
    why = f"{problem.pairs} pairs of a token and an expert are sorted by expert; h is computed again"
    refusal = hopper_plan.refusal(problem, gpu.arch)
    if kernel == "moe_backward_gluon_sm90" and refusal:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {refusal}", hint="use kernel='auto'")
    if kernel == "moe_backward_gluon_sm90" or (kernel == "auto" and hopper_plan.serves_gradients(problem, gpu.arch)):
        config = backward_rows(gpu.arch, problem.item_bytes)[-1]
        config = dataclasses.replace(config, hopper=hopper_plan.choose_config(problem, gpu))
        why += "; gradients of x and of the weights by Hopper's TMA and warpgroup products"
    return make_backward_plan(problem, gpu.name, gpu.arch, config, wanted, why)
