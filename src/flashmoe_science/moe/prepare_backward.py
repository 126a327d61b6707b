"""Turn a plan of gradients into kernels to compile and launches to make."""

from __future__ import annotations

from typing import Any

from . import prepare_sm90
from .backward_plan import BIAS_COLUMNS, BIAS_PAIRS, BIAS_STAGES, ROUTING_PAIRS, BackwardPlan, Span, column_sums
from .backward_triton import (
    _activation_backward_kernel,
    _bias_gradient_kernel,
    _routing_gradient_kernel,
    _weight_gradient_kernel,
)
from .combine_triton import _combine_kernel
from .grouped_triton import _down_kernel
from .plan import COMBINE_COLUMNS, COMBINE_UNROLL, MoePlan, next_power
from .prepare import MAKERS, activation, precision, prepared_kernel, strides
from .prepared import PreparedKernel, within
from .problem import MoeProblem
from .tiles import BackwardConfig, Tile

_Grid = tuple[int, int, int]
_Pointers = dict[str, tuple[str, str] | None]


def prepare_backward_kernels(plan: BackwardPlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    kernels = []
    for step, launch, span in zip(plan.steps, plan.launches, plan.spans, strict=True):
        grid, warps = launch.grid, launch.block[0] // 32
        maker = _MAKERS.get(step)
        kernels.append(maker(plan, grid, warps, span) if maker else MAKERS[step](plan, grid, warps))
    return tuple(kernels)


def _of(plan: MoePlan) -> tuple[MoeProblem, BackwardConfig, tuple[str, ...]]:
    assert isinstance(plan, BackwardPlan)
    assert isinstance(plan.config, BackwardConfig)
    return plan.problem, plan.config, plan.wanted


def _tile(plan: MoePlan, config: BackwardConfig, tile: Tile, block_m: int) -> dict[str, Any]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": config.group_m,
        "NUM_STAGES": tile.num_stages,
        **precision(plan),
    }


def _sizes(problem: MoeProblem) -> dict[str, int]:
    return {"EXPERTS": problem.experts, "TOPK": problem.top_k, "HID": problem.hidden}


def _dactivation(plan: MoePlan, grid: _Grid, warps: int, span: Span) -> PreparedKernel:
    problem, config, wanted = _of(plan)
    kind = f"*{problem.dtype}"
    routing, down = "topk_weights" in wanted, bool({"w_down", "bias_down"} & set(wanted))
    pointers: _Pointers = {
        "do_ptr": (kind, "do"),
        "w_ptr": (kind, "w_down"),
        "bias_ptr": (kind, "bias_down") if problem.bias_down and routing else None,
        "weights_ptr": (f"*{problem.weights_dtype}", "topk_weights"),
        "product_ptr": (kind, "product"),
        "tiles_ptr": ("*i32", "tiles_ptr"),
        "order_ptr": ("*i32", "order_ptr"),
        "dproduct_ptr": (kind, "dproduct"),
        "wh_ptr": (kind, "scratch") if down else None,
        "sums_ptr": ("*fp32", "sums") if routing else None,
    }
    constants = {
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "COLUMNS": problem.columns_up,
        "WH_COLUMNS": span[1],
        **strides("W", "ENK", problem.down_strides),
        **activation(problem),
        **_tile(plan, config, config.activation, config.block_m),
    }
    scalars = {"first_tile": span[0] // config.activation.block_n}
    stages = config.activation.num_stages
    return prepared_kernel(_activation_backward_kernel, plan, grid, warps, pointers, scalars, constants, stages)


def _drouting(plan: MoePlan, grid: _Grid, warps: int, _span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    count = column_sums(problem, config)
    pointers: _Pointers = {
        "sums_ptr": ("*fp32", "sums"),
        "positions_ptr": ("*i32", "positions_ptr"),
        "out_ptr": (f"*{problem.weights_dtype}", "d_topk_weights"),
    }
    constants = {"COUNT": count, "BLOCK_C": min(32, next_power(count)), "BLOCK_P": ROUTING_PAIRS}
    return prepared_kernel(
        _routing_gradient_kernel, plan, grid, warps, pointers, {"pairs": problem.pairs}, constants
    )  # fmt: skip


def _dx(plan: MoePlan, grid: _Grid, warps: int, span: Span) -> PreparedKernel:
    """Return the product of the first product's gradient with w_gate_up: a second product, the weights turned."""
    problem, config, _ = _of(plan)
    kind = f"*{problem.dtype}"
    expert, row, column = problem.gate_up_strides
    pointers: _Pointers = {
        "h_ptr": (kind, "dproduct"),
        "w_ptr": (kind, within("w_gate_up", span[0] * column * problem.item_bytes)),
        "bias_ptr": None,
        "ids_ptr": None,
        "tiles_ptr": ("*i32", "tiles_ptr"),
        "y_ptr": (kind, "scratch"),
    }
    constants = {
        **_sizes(problem),
        "HID": span[1],
        "INTER": problem.columns_up,
        **strides("W", "ENK", (expert, column, row)),
        "ROWS": "sorted",
        "BY_EXPERT": False,
        "BLOCK_P": 16,
        "SWAP": False,
        **_tile(plan, config, config.x, config.block_m),
    }
    scalars = {"tokens": problem.tokens}
    return prepared_kernel(_down_kernel, plan, grid, warps, pointers, scalars, constants, config.x.num_stages)


def _dcombine(plan: MoePlan, grid: _Grid, warps: int, span: Span) -> PreparedKernel:
    problem, _, _ = _of(plan)
    kind = f"*{problem.dtype}"
    pointers: _Pointers = {
        "y_ptr": (kind, "scratch"),
        "weights_ptr": None,
        "ids_ptr": None,
        "positions_ptr": ("*i32", "positions_ptr"),
        "y_shared_ptr": None,
        "shared_weights_ptr": None,
        "out_ptr": (kind, within("d_x", span[0] * problem.item_bytes)),
    }
    constants = {
        **_sizes(problem),
        "HID": span[1],
        "SHARED": 0,
        "STRIDE_OUT": problem.hidden,
        "UNROLL": min(COMBINE_UNROLL, problem.top_k),
        "BLOCK_N": COMBINE_COLUMNS,
    }
    return prepared_kernel(_combine_kernel, plan, grid, warps, pointers, {"tokens": problem.tokens}, constants)


def _dgate_up(plan: MoePlan, grid: _Grid, warps: int, _span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    kind = f"*{problem.dtype}"
    pointers: _Pointers = {
        "a_ptr": (kind, "dproduct"),
        "b_ptr": (kind, "x"),
        "order_ptr": ("*i32", "order_ptr"),
        "offsets_ptr": ("*i32", "offsets_ptr"),
        "out_ptr": (kind, "d_w_gate_up"),
    }
    constants = {
        "TOPK": problem.top_k,
        "M": problem.columns_up,
        "N": problem.hidden,
        **strides("A", ("", "M"), (problem.columns_up, 1)),
        **strides("B", ("", "N"), problem.x_strides),
        "STRIDE_OUT": problem.hidden,
        "GATHER_A": False,
        "GATHER_B": True,
        **_tile(plan, config, config.weights, config.weights_m),
    }
    aligned = ("a_ptr", *(("b_ptr",) if problem.pointer_alignment >= 16 else ()))
    stages = config.weights.num_stages
    return prepared_kernel(_weight_gradient_kernel, plan, grid, warps, pointers, {}, constants, stages, aligned)


def _ddown(plan: MoePlan, grid: _Grid, warps: int, span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    kind = f"*{problem.dtype}"
    pointers: _Pointers = {
        "a_ptr": (kind, "do"),
        "b_ptr": (kind, "scratch"),
        "order_ptr": ("*i32", "order_ptr"),
        "offsets_ptr": ("*i32", "offsets_ptr"),
        "out_ptr": (kind, within("d_w_down", span[0] * problem.item_bytes)),
    }
    constants = {
        "TOPK": problem.top_k,
        "M": problem.hidden,
        "N": span[1],
        **strides("A", ("", "M"), (problem.hidden, 1)),
        **strides("B", ("", "N"), (span[1], 1)),
        "STRIDE_OUT": problem.inter,
        "GATHER_A": True,
        "GATHER_B": False,
        **_tile(plan, config, config.weights, config.weights_m),
    }
    stages = config.weights.num_stages
    aligned = ("a_ptr", "b_ptr")
    return prepared_kernel(_weight_gradient_kernel, plan, grid, warps, pointers, {}, constants, stages, aligned)


def _dbias_gate_up(plan: MoePlan, grid: _Grid, warps: int, _span: Span) -> PreparedKernel:
    return _dbias(plan, grid, warps, "bias_gate_up")


def _dbias_down(plan: MoePlan, grid: _Grid, warps: int, _span: Span) -> PreparedKernel:
    return _dbias(plan, grid, warps, "bias_down")


def _dbias(plan: MoePlan, grid: _Grid, warps: int, bias: str) -> PreparedKernel:
    """Return the sum of an expert's rows: of the first product's gradient, or of dO by the routing's weights."""
    problem, down = plan.problem, bias == "bias_down"
    kind = f"*{problem.dtype}"
    pointers: _Pointers = {
        "rows_ptr": (kind, "do" if down else "dproduct"),
        "weights_ptr": (f"*{problem.weights_dtype}", "topk_weights") if down else None,
        "order_ptr": ("*i32", "order_ptr"),
        "offsets_ptr": ("*i32", "offsets_ptr"),
        "out_ptr": (kind, f"d_{bias}"),
    }
    constants = {
        "TOPK": problem.top_k,
        "N": problem.hidden if down else problem.columns_up,
        "GATHER": down,
        "BLOCK_P": BIAS_PAIRS,
        "BLOCK_N": BIAS_COLUMNS,
        "NUM_STAGES": BIAS_STAGES,
    }
    aligned = ("rows_ptr",)
    return prepared_kernel(_bias_gradient_kernel, plan, grid, warps, pointers, {}, constants, BIAS_STAGES, aligned)


def _dactivation_sm90(plan: MoePlan, grid: _Grid, _warps: int, span: Span) -> PreparedKernel:
    return prepare_sm90.activation_gradient(plan, grid, span)


def _dx_sm90(plan: MoePlan, grid: _Grid, _warps: int, span: Span) -> PreparedKernel:
    return prepare_sm90.x_gradient(plan, grid, span)


def _dgate_up_sm90(plan: MoePlan, grid: _Grid, _warps: int, span: Span) -> PreparedKernel:
    return prepare_sm90.weight_gradient(plan, grid, "up", span)


def _ddown_sm90(plan: MoePlan, grid: _Grid, _warps: int, span: Span) -> PreparedKernel:
    return prepare_sm90.weight_gradient(plan, grid, "down", span)


_MAKERS = {
    "dactivation_sm90": _dactivation_sm90,
    "dx_sm90": _dx_sm90,
    "dgate_up_sm90": _dgate_up_sm90,
    "ddown_sm90": _ddown_sm90,
    "dactivation": _dactivation,
    "drouting": _drouting,
    "dx": _dx,
    "dcombine": _dcombine,
    "dgate_up": _dgate_up,
    "ddown": _ddown,
    "dbias_gate_up": _dbias_gate_up,
    "dbias_down": _dbias_down,
}
