"""Turn a plan for Hopper into what its kernels are given."""

from __future__ import annotations

from typing import Any

from ..gpu.compile import KernelSource
from ..gpu.gluon_versions import descriptor_type
from ..gpu.tensor_map import TensorMap
from .activation_gluon_sm90 import _activation_sm90_kernel
from .backward_plan import BackwardPlan, Span, column_sums
from .grouped_gluon_sm90 import _grouped_sm90_kernel
from .hopper_plan import (
    ACTIVATION_REGISTERS,
    ACTIVATION_STAGES,
    ACTIVATION_STEP,
    PRODUCT_COLUMNS,
    REGISTERS,
    ROWS,
    STEP,
    column_tiles,
    output_columns,
    weight_tiles,
)
from .plan import MoePlan
from .prepared import PreparedKernel, within
from .problem import MoeProblem
from .tiles import BackwardConfig, HopperConfig
from .weights_gluon_sm90 import _weights_sm90_kernel

_WARPGROUP_ROWS, _CHUNK = 64, 64  # of one store
_COUNTERS = {"up": 1, "down": 2}  # where the table of tiles has them; the sort puts them to 0


def ragged_map(kind: str, columns: int, parts: int = 1) -> TensorMap:
    """Return the map of rows of which a store can end anywhere: coordinates are (2^30, end, 2^30 - rows, part, column).

    Rows past the last coordinate are not stored. The first two axes bring the address back, modulo 2^64: see
    ``triton.tools.ragged_tma``.
    """
    width = parts * columns
    return TensorMap(kind, (0x7FFF0000, 0x7FFF0000, 2**30, parts, columns), (2**34 - width, width, width, columns, 1))


def _weights(problem: MoeProblem, which: str, *, split: bool, columns: int = 0) -> TensorMap:
    """Return the map of the weights: experts, gate and up apart where a tile has rows of both, rows, columns.

    ``columns``: of w_gate_up, where the map begins at some of them; else all.
    """
    if which == "down":
        strides = problem.down_strides
        return TensorMap(
            problem.dtype, (problem.experts, 1, problem.hidden, problem.inter), (strides[0], strides[0], *strides[1:])
        )
    expert, row, column = problem.gate_up_strides
    parts, rows = (2, problem.inter) if split else (1, problem.columns_up)
    return TensorMap(
        problem.dtype, (problem.experts, parts, rows, columns or problem.hidden), (expert, rows * row, row, column)
    )


def product(plan: MoePlan, grid: tuple[int, int, int], which: str) -> PreparedKernel:
    """Return one of the two products: "up" or "down"."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, HopperConfig)
    is_up = which == "up"
    kind, gated = problem.dtype, is_up and problem.gated
    split = gated and not problem.interleaved
    tile = (2, PRODUCT_COLUMNS // 2) if split else (1, PRODUCT_COLUMNS)
    reduction, columns = (problem.hidden, problem.columns_up) if is_up else (problem.inter, problem.hidden)
    stored = problem.inter if is_up else problem.hidden
    bias = problem.bias_gate_up if is_up else problem.bias_down
    stored_tile = descriptor_type(kind, (1, 1, _WARPGROUP_ROWS, 1, _CHUNK))
    given = {
        "a_desc": None if is_up else (descriptor_type(kind, (ROWS, STEP)), "h"),
        "w_desc": (descriptor_type(kind, (1, *tile, STEP)), "w_gate_up" if is_up else "w_down"),
        "out_desc": (stored_tile, "h" if is_up else "y"),
        "product_desc": (stored_tile, "product") if is_up and problem.keep_product else None,
        "a_ptr": (f"*{kind}", "x") if is_up else None,
        "bias_ptr": (f"*{kind}", "bias_gate_up" if is_up else "bias_down") if bias else None,
        "tiles_ptr": ("*i32", "tiles_ptr"),
        "order_ptr": ("*i32", "order_ptr") if is_up else None,
    }
    maps = (
        *(() if is_up else (TensorMap(kind, (problem.pairs, problem.inter), (problem.inter, 1)),)),
        _weights(problem, which, split=split),
        ragged_map(kind, stored),
        *((ragged_map(kind, columns // tile[0], tile[0]),) if given["product_desc"] else ()),
    )
    registers, producer_registers = REGISTERS[which]
    constants: dict[str, Any] = {
        "GATHER": is_up,
        "COUNTER": _COUNTERS[which],
        "TOPK": problem.top_k,
        "STRIDE": problem.x_strides[0],
        "K": reduction,
        "COLUMNS": columns,
        "OUT": output_columns(problem, which),
        "TILES_N": column_tiles(problem, which),
        "GROUP_M": config.group_m,
        "STAGES": config.num_stages,
        "LEAD": config.lead,
        "GATED": gated,
        "INTERLEAVED": gated and problem.interleaved,
        "ACTIVATION": problem.activation if is_up else "",
        "ALPHA": problem.alpha,
        "LIMIT": problem.limit,
        "IS_TURNED": False,
        "MATRIX_REGISTERS": registers,
        "PRODUCER_REGISTERS": producer_registers,
        **{name: None for name, what in given.items() if what is None},
    }
    found = {name: what for name, what in given.items() if what is not None}
    return _prepared(_grouped_sm90_kernel, found, constants, grid, maps)


def _backward(plan: MoePlan) -> tuple[MoeProblem, HopperConfig]:
    assert isinstance(plan, BackwardPlan)
    assert isinstance(plan.config, BackwardConfig)
    assert plan.config.hopper is not None
    return plan.problem, plan.config.hopper


def activation_gradient(plan: MoePlan, grid: tuple[int, int, int], span: Span) -> PreparedKernel:
    """Return the product of dO with w_down, and what the activation's gradients make of it."""
    problem, config = _backward(plan)
    assert isinstance(plan, BackwardPlan)
    assert isinstance(plan.config, BackwardConfig)
    kind, (first, columns), wanted = problem.dtype, span, plan.wanted
    routing, down = "topk_weights" in wanted, bool({"w_down", "bias_down"} & set(wanted))
    pointer, tile = f"*{kind}", (1, 1, ACTIVATION_STEP, PRODUCT_COLUMNS)
    given = {
        "w_desc": (descriptor_type(kind, tile), "w_down"),
        "do_ptr": (pointer, "do"),
        "bias_ptr": (pointer, "bias_down") if problem.bias_down and routing else None,
        "weights_ptr": (f"*{problem.weights_dtype}", "topk_weights"),
        "product_ptr": (pointer, "product"),
        "tiles_ptr": ("*i32", "tiles_ptr"),
        "order_ptr": ("*i32", "order_ptr"),
        "dproduct_ptr": (pointer, "dproduct"),
        "wh_ptr": (pointer, "scratch") if down else None,
        "sums_ptr": ("*fp32", "sums") if routing else None,
    }
    constants: dict[str, Any] = {
        "COUNTER": _COUNTERS["down"], "TOPK": problem.top_k, "HID": problem.hidden, "INTER": problem.inter,
        "COLUMNS": problem.columns_up, "WH_COLUMNS": columns, "SUMS": column_sums(problem, plan.config),
        "TILES_N": -(-columns // PRODUCT_COLUMNS), "GROUP_M": config.group_m,
        "STEP": ACTIVATION_STEP, "STAGES": ACTIVATION_STAGES,
        "GATED": problem.gated, "INTERLEAVED": problem.gated and problem.interleaved,
        "ACTIVATION": problem.activation, "ALPHA": problem.alpha, "LIMIT": problem.limit,
        "REGISTERS": ACTIVATION_REGISTERS,
        **{name: None for name, what in given.items() if what is None},
    }  # fmt: skip
    found = {name: what for name, what in given.items() if what is not None}
    maps = (_weights(problem, "down", split=False),)
    return _prepared(_activation_sm90_kernel, found, constants, grid, maps, first // PRODUCT_COLUMNS)


def x_gradient(plan: MoePlan, grid: tuple[int, int, int], span: Span) -> PreparedKernel:
    """Return the product of the first product's gradient with w_gate_up, whose rows are the reduction."""
    problem, config = _backward(plan)
    kind, (first, columns) = problem.dtype, span
    given = {
        "a_desc": (descriptor_type(kind, (ROWS, STEP)), "dproduct"),
        "w_desc": (descriptor_type(kind, (1, 1, STEP, PRODUCT_COLUMNS)), within("w_gate_up", 2 * first)),
        "out_desc": (descriptor_type(kind, (1, 1, _WARPGROUP_ROWS, 1, _CHUNK)), "scratch"),
        "tiles_ptr": ("*i32", "tiles_ptr"),
    }
    maps = (
        TensorMap(kind, (problem.pairs, problem.columns_up), (problem.columns_up, 1)),
        _weights(problem, "up", split=False, columns=columns),
        ragged_map(kind, columns),
    )
    registers, producer_registers = REGISTERS["down"]
    constants: dict[str, Any] = {
        "GATHER": False, "COUNTER": _COUNTERS["up"], "TOPK": problem.top_k, "STRIDE": 0,
        "K": problem.columns_up, "COLUMNS": columns, "OUT": PRODUCT_COLUMNS,
        "TILES_N": -(-columns // PRODUCT_COLUMNS), "GROUP_M": config.group_m,
        "STAGES": config.num_stages, "LEAD": config.lead, "GATED": False, "INTERLEAVED": False, "ACTIVATION": "",
        "ALPHA": 0.0, "LIMIT": 0.0, "IS_TURNED": True,
        "MATRIX_REGISTERS": registers, "PRODUCER_REGISTERS": producer_registers,
        **dict.fromkeys(("product_desc", "a_ptr", "bias_ptr", "order_ptr")),
    }  # fmt: skip
    return _prepared(_grouped_sm90_kernel, given, constants, grid, maps, first // PRODUCT_COLUMNS)


def weight_gradient(plan: MoePlan, grid: tuple[int, int, int], which: str, span: Span) -> PreparedKernel:
    """Return the sum of outer products that is the gradient of ``w_gate_up`` ("up") or ``w_down`` ("down")."""
    problem, config = _backward(plan)
    kind, is_up, (first, columns) = problem.dtype, which == "up", span
    rows, stride = (problem.columns_up, problem.hidden) if is_up else (problem.hidden, problem.inter)
    out = within("d_w_gate_up" if is_up else "d_w_down", 2 * first)
    in_order = rows if is_up else columns
    box = _WARPGROUP_ROWS if is_up else PRODUCT_COLUMNS
    given = {
        "rows_desc": (descriptor_type(kind, (1, 1, STEP, 1, box)), "dproduct" if is_up else "scratch"),
        "out_desc": (descriptor_type(kind, (1, _WARPGROUP_ROWS, _CHUNK)), out),
        "rows_ptr": (f"*{kind}", "x" if is_up else "do"),
        "order_ptr": ("*i32", "order_ptr"),
        "offsets_ptr": ("*i32", "offsets_ptr"),
    }
    maps = (
        ragged_map(kind, in_order),
        TensorMap(kind, (problem.experts, rows, columns), (rows * stride, stride, 1)),
    )
    registers, producer_registers = REGISTERS["weights"]
    constants: dict[str, Any] = {
        "GATHER_A": not is_up, "EXPERTS": problem.experts, "TOPK": problem.top_k,
        "STRIDE": problem.x_strides[0] if is_up else problem.hidden, "COUNTER": _COUNTERS[which],
        "M": rows, "N": columns, "GROUP_M": config.group_m, "STAGES": config.num_stages, "LEAD": config.lead,
        "MATRIX_REGISTERS": registers, "PRODUCER_REGISTERS": producer_registers,
    }  # fmt: skip
    return _prepared(_weights_sm90_kernel, given, constants, grid, maps, weight_tiles(problem, rows, first))


def _prepared(
    function: Any,
    given: dict[str, tuple[str, str]],
    constants: dict[str, Any],
    grid: tuple[int, int, int],
    maps: tuple[TensorMap, ...],
    drawn: int = 0,
) -> PreparedKernel:
    source = KernelSource(
        function,
        (*((name, kind) for name, (kind, _) in given.items()), ("drawn", "i32")),
        tuple(constants.items()),
        frozenset(name for name in given if name.endswith("_ptr") and name != "weights_ptr"),  # theirs lie anywhere
        num_warps=4,
        dependent_launch=True,
    )
    return PreparedKernel(source, grid, (drawn,), tuple(tensor for _, tensor in given.values()), maps)
