"""Turn a plan of gradients into kernels to compile and launch."""

from __future__ import annotations

from typing import Any

import triton

from ...gpu.signature import Argument, Descriptor, Pointer, PreparedKernel, Scalar
from ..grouped.combine_triton import _combine_kernel
from ..grouped.gluon_sm90 import _grouped_sm90_kernel
from ..grouped.plan_sm90 import (
    ACTIVATION_REGISTERS,
    ACTIVATION_STAGES,
    ACTIVATION_STEP,
    PRODUCT_COLUMNS,
    REGISTERS,
    ROWS,
    STEP,
    weight_tiles,
)
from ..grouped.prepare_sm90 import (
    CHUNK,
    COUNTERS,
    RAGGED_TILE,
    WARPGROUP_ROWS,
    Grid,
    aligned,
    down_extents,
    gate_up_extents,
    gluon_kernel,
    matrix,
    ragged,
)
from ..grouped.products_triton import _down_kernel
from ..kernel_arguments import Activation, WeightStrides
from ..plan import COMBINE_COLUMNS, COMBINE_UNROLL, MoePlan, cdiv
from ..prepare import MAKERS, activation, ours, product_tile, tables, theirs, triton_kernel
from ..prepared import within
from ..problem import MoeProblem
from ..tiles import BackwardConfig, HopperConfig
from .activation_gluon_sm90 import _activation_sm90_kernel
from .plan import BIAS_COLUMNS, BIAS_PAIRS, BIAS_STAGES, ROUTING_PAIRS, BackwardPlan, Span, column_sums
from .products_triton import (
    _activation_backward_kernel,
    _bias_gradient_kernel,
    _routing_gradient_kernel,
    _weight_gradient_kernel,
)
from .weights_gluon_sm90 import _weights_sm90_kernel

_Arguments = dict[str, Argument]


def prepare_backward_kernels(plan: BackwardPlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in launch order."""
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


def _sizes(problem: MoeProblem) -> dict[str, int]:
    return {"EXPERTS": problem.experts, "TOPK": problem.top_k, "HID": problem.hidden}


def _dactivation(plan: MoePlan, grid: Grid, warps: int, span: Span) -> PreparedKernel:
    problem, config, wanted = _of(plan)
    kind = problem.dtype
    routing, down = "topk_weights" in wanted, bool({"w_down", "bias_down"} & set(wanted))
    arguments: _Arguments = {
        "do_ptr": ours(kind, "do"),
        "w_ptr": theirs(problem, "w_down"),
        "bias_ptr": theirs(problem, "bias_down") if problem.bias_down and routing else None,
        "weights_ptr": Pointer(problem.weights_dtype, "topk_weights"),
        "product_ptr": ours(kind, "product"),
        **tables("tiles_ptr", "order_ptr"),
        "dproduct_ptr": ours(kind, "dproduct"),
        "wh_ptr": ours(kind, "scratch") if down else None,
        "sums_ptr": ours("fp32", "sums") if routing else None,
        "first_tile": Scalar("i32", span[0] // config.activation.block_n),
    }
    constants = {
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "COLUMNS": problem.columns_up,
        "WH_COLUMNS": span[1],
        "W": WeightStrides(*problem.down_strides),
        "ACT": activation(problem),
        "TILE": product_tile(plan, config.activation, config.block_m, config.group_m),
    }
    stages = config.activation.num_stages
    return triton_kernel(_activation_backward_kernel, plan, grid, warps, arguments, constants, stages)


def _drouting(plan: MoePlan, grid: Grid, warps: int, _span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    count = column_sums(problem, config)
    arguments: _Arguments = {
        "sums_ptr": ours("fp32", "sums"),
        **tables("positions_ptr"),
        "out_ptr": ours(problem.weights_dtype, "d_topk_weights"),
        "pairs": Scalar("i32", problem.pairs),
    }
    constants = {"COUNT": count, "BLOCK_C": min(32, triton.next_power_of_2(count)), "BLOCK_P": ROUTING_PAIRS}
    return triton_kernel(_routing_gradient_kernel, plan, grid, warps, arguments, constants)


def _dx(plan: MoePlan, grid: Grid, warps: int, span: Span) -> PreparedKernel:
    """Return dproduct @ w_gate_up: the kernel of the second product with transposed weights."""
    problem, config, _ = _of(plan)
    kind = problem.dtype
    expert, row, column = problem.gate_up_strides
    arguments: _Arguments = {
        "h_ptr": ours(kind, "dproduct"),
        "w_ptr": theirs(problem, within("w_gate_up", span[0] * column * problem.item_bytes)),
        "bias_ptr": None,
        "ids_ptr": None,
        **tables("tiles_ptr"),
        "y_ptr": ours(kind, "scratch"),
        "tokens": Scalar("i32", problem.tokens),
    }
    constants = {
        **_sizes(problem),
        "HID": span[1],
        "INTER": problem.columns_up,
        "W": WeightStrides(expert, column, row),
        "ROWS": "sorted",
        "BY_EXPERT": False,
        "BLOCK_P": 16,
        "TILE": product_tile(plan, config.x, config.block_m, config.group_m),
    }
    return triton_kernel(_down_kernel, plan, grid, warps, arguments, constants, config.x.num_stages)


def _dcombine(plan: MoePlan, grid: Grid, warps: int, span: Span) -> PreparedKernel:
    problem, _, _ = _of(plan)
    kind = problem.dtype
    arguments: _Arguments = {
        "y_ptr": ours(kind, "scratch"),
        "weights_ptr": None,
        "ids_ptr": None,
        **tables("positions_ptr"),
        "y_shared_ptr": None,
        "shared_weights_ptr": None,
        "out_ptr": ours(kind, within("d_x", span[0] * problem.item_bytes)),
        "tokens": Scalar("i32", problem.tokens),
    }
    constants = {
        **_sizes(problem),
        "HID": span[1],
        "SHARED": 0,
        "STRIDE_OUT": problem.hidden,
        "UNROLL": min(COMBINE_UNROLL, problem.top_k),
        "BLOCK_N": COMBINE_COLUMNS,
    }
    return triton_kernel(_combine_kernel, plan, grid, warps, arguments, constants)


def _dgate_up(plan: MoePlan, grid: Grid, warps: int, _span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    kind = problem.dtype
    arguments: _Arguments = {
        "a_ptr": ours(kind, "dproduct"),
        "b_ptr": theirs(problem, "x"),
        **tables("order_ptr", "offsets_ptr"),
        "out_ptr": ours(kind, "d_w_gate_up"),
    }
    constants = {
        "TOPK": problem.top_k,
        "M": problem.columns_up,
        "N": problem.hidden,
        "STRIDE_A": problem.columns_up,
        "STRIDE_AM": 1,
        "STRIDE_B": problem.x_strides[0],
        "STRIDE_BN": problem.x_strides[1],
        "STRIDE_OUT": problem.hidden,
        "GATHER_A": False,
        "GATHER_B": True,
        "TILE": product_tile(plan, config.weights, config.weights_m, config.group_m),
    }
    stages = config.weights.num_stages
    return triton_kernel(_weight_gradient_kernel, plan, grid, warps, arguments, constants, stages)


def _ddown(plan: MoePlan, grid: Grid, warps: int, span: Span) -> PreparedKernel:
    problem, config, _ = _of(plan)
    kind = problem.dtype
    arguments: _Arguments = {
        "a_ptr": ours(kind, "do"),
        "b_ptr": ours(kind, "scratch"),
        **tables("order_ptr", "offsets_ptr"),
        "out_ptr": ours(kind, within("d_w_down", span[0] * problem.item_bytes)),
    }
    constants = {
        "TOPK": problem.top_k,
        "M": problem.hidden,
        "N": span[1],
        "STRIDE_A": problem.hidden,
        "STRIDE_AM": 1,
        "STRIDE_B": span[1],
        "STRIDE_BN": 1,
        "STRIDE_OUT": problem.inter,
        "GATHER_A": True,
        "GATHER_B": False,
        "TILE": product_tile(plan, config.weights, config.weights_m, config.group_m),
    }
    stages = config.weights.num_stages
    return triton_kernel(_weight_gradient_kernel, plan, grid, warps, arguments, constants, stages)


def _dbias_gate_up(plan: MoePlan, grid: Grid, warps: int, _span: Span) -> PreparedKernel:
    return _dbias(plan, grid, warps, "bias_gate_up")


def _dbias_down(plan: MoePlan, grid: Grid, warps: int, _span: Span) -> PreparedKernel:
    return _dbias(plan, grid, warps, "bias_down")


def _dbias(plan: MoePlan, grid: Grid, warps: int, bias: str) -> PreparedKernel:
    """Return the sum of an expert's rows: of the first product's gradient, or of dO times the routing weights."""
    problem, down = plan.problem, bias == "bias_down"
    kind = problem.dtype
    arguments: _Arguments = {
        "rows_ptr": ours(kind, "do" if down else "dproduct"),
        "weights_ptr": Pointer(problem.weights_dtype, "topk_weights") if down else None,
        **tables("order_ptr", "offsets_ptr"),
        "out_ptr": ours(kind, f"d_{bias}"),
    }
    constants = {
        "TOPK": problem.top_k,
        "N": problem.hidden if down else problem.columns_up,
        "GATHER": down,
        "BLOCK_P": BIAS_PAIRS,
        "BLOCK_N": BIAS_COLUMNS,
        "NUM_STAGES": BIAS_STAGES,
    }
    return triton_kernel(_bias_gradient_kernel, plan, grid, warps, arguments, constants, BIAS_STAGES)


def _hopper(plan: MoePlan) -> tuple[MoeProblem, HopperConfig]:
    problem, config, _ = _of(plan)
    assert config.hopper is not None
    return problem, config.hopper


def _dactivation_sm90(plan: MoePlan, grid: Grid, _warps: int, span: Span) -> PreparedKernel:
    """Return dO @ w_down with the activation's gradient in its epilogue."""
    problem, hopper = _hopper(plan)
    _, config, wanted = _of(plan)
    kind, (first, columns) = problem.dtype, span
    routing, down = "topk_weights" in wanted, bool({"w_down", "bias_down"} & set(wanted))
    arguments: _Arguments = {
        "w_desc": Descriptor(kind, (1, 1, ACTIVATION_STEP, PRODUCT_COLUMNS), *down_extents(problem), "w_down"),
        "do_ptr": aligned(kind, "do"),
        "bias_ptr": aligned(kind, "bias_down") if problem.bias_down and routing else None,
        "weights_ptr": Pointer(problem.weights_dtype, "topk_weights"),
        "product_ptr": aligned(kind, "product"),
        **tables("tiles_ptr", "order_ptr"),
        "dproduct_ptr": aligned(kind, "dproduct"),
        "wh_ptr": aligned(kind, "scratch") if down else None,
        "sums_ptr": aligned("fp32", "sums") if routing else None,
        "drawn": Scalar("i32", first // PRODUCT_COLUMNS),
    }
    constants: dict[str, Any] = {
        "COUNTER": COUNTERS["down"], "TOPK": problem.top_k, "HID": problem.hidden, "INTER": problem.inter,
        "COLUMNS": problem.columns_up, "WH_COLUMNS": columns, "SUMS": column_sums(problem, config),
        "TILES_N": cdiv(columns, PRODUCT_COLUMNS), "GROUP_M": hopper.group_m,
        "STEP": ACTIVATION_STEP, "STAGES": ACTIVATION_STAGES, "ACT": activation(problem),
        "REGISTERS": ACTIVATION_REGISTERS,
    }  # fmt: skip
    return gluon_kernel(_activation_sm90_kernel, grid, arguments, constants)


def _dx_sm90(plan: MoePlan, grid: Grid, _warps: int, span: Span) -> PreparedKernel:
    """Return dproduct @ w_gate_up, which reduces over the rows of the weights."""
    problem, hopper = _hopper(plan)
    kind, (first, columns) = problem.dtype, span
    dproduct, w_tile = matrix(problem.pairs, problem.columns_up), (1, 1, STEP, PRODUCT_COLUMNS)
    weights = gate_up_extents(problem, split=False, columns=columns)
    arguments: _Arguments = {
        "a_desc": Descriptor(kind, (ROWS, STEP), *dproduct, "dproduct"),
        "w_desc": Descriptor(kind, w_tile, *weights, within("w_gate_up", 2 * first)),
        "out_desc": Descriptor(kind, RAGGED_TILE, *ragged(columns), "scratch"),
        **tables("tiles_ptr"),
        "drawn": Scalar("i32", first // PRODUCT_COLUMNS),
        **dict.fromkeys(("product_desc", "a_ptr", "bias_ptr", "order_ptr")),
    }
    registers, producer_registers = REGISTERS["down"]
    constants: dict[str, Any] = {
        "GATHER": False, "COUNTER": COUNTERS["up"], "TOPK": problem.top_k, "STRIDE": 0,
        "K": problem.columns_up, "COLUMNS": columns, "OUT": PRODUCT_COLUMNS,
        "TILES_N": cdiv(columns, PRODUCT_COLUMNS), "GROUP_M": hopper.group_m,
        "STAGES": hopper.num_stages, "LEAD": hopper.lead, "ACT": Activation(), "IS_TURNED": True,
        "MATRIX_REGISTERS": registers, "PRODUCER_REGISTERS": producer_registers,
    }  # fmt: skip
    return gluon_kernel(_grouped_sm90_kernel, grid, arguments, constants)


def _dgate_up_sm90(plan: MoePlan, grid: Grid, _warps: int, span: Span) -> PreparedKernel:
    return _weights_sm90(plan, grid, "up", span)


def _ddown_sm90(plan: MoePlan, grid: Grid, _warps: int, span: Span) -> PreparedKernel:
    return _weights_sm90(plan, grid, "down", span)


def _weights_sm90(plan: MoePlan, grid: Grid, which: str, span: Span) -> PreparedKernel:
    """Return the gradient of ``w_gate_up`` ("up") or ``w_down`` ("down"): a sum of outer products."""
    problem, hopper = _hopper(plan)
    kind, is_up, (first, columns) = problem.dtype, which == "up", span
    rows, stride = (problem.columns_up, problem.hidden) if is_up else (problem.hidden, problem.inter)
    in_order = ragged(rows if is_up else columns)
    rows_tile = (1, 1, STEP, 1, WARPGROUP_ROWS if is_up else PRODUCT_COLUMNS)
    shape, steps = (problem.experts, rows, columns), (rows * stride, stride, 1)
    out = within("d_w_gate_up" if is_up else "d_w_down", 2 * first)
    arguments: _Arguments = {
        "rows_desc": Descriptor(kind, rows_tile, *in_order, "dproduct" if is_up else "scratch"),
        "out_desc": Descriptor(kind, (1, WARPGROUP_ROWS, CHUNK), shape, steps, out),
        "rows_ptr": aligned(kind, "x" if is_up else "do"),
        **tables("order_ptr", "offsets_ptr"),
        "drawn": Scalar("i32", weight_tiles(problem, rows, first)),
    }
    registers, producer_registers = REGISTERS["weights"]
    constants: dict[str, Any] = {
        "GATHER_A": not is_up, "EXPERTS": problem.experts, "TOPK": problem.top_k,
        "STRIDE": problem.x_strides[0] if is_up else problem.hidden, "COUNTER": COUNTERS[which],
        "M": rows, "N": columns, "GROUP_M": hopper.group_m, "STAGES": hopper.num_stages, "LEAD": hopper.lead,
        "MATRIX_REGISTERS": registers, "PRODUCER_REGISTERS": producer_registers,
    }  # fmt: skip
    return gluon_kernel(_weights_sm90_kernel, grid, arguments, constants)


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
