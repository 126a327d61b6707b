"""Turn both products of a plan for Hopper into launches, and what all kernels for Hopper are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..gpu.signature import Argument, Descriptor, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from .grouped_gluon_sm90 import _grouped_sm90_kernel
from .hopper_plan import PRODUCT_COLUMNS, REGISTERS, ROWS, STEP, column_tiles, output_columns
from .plan import MoePlan
from .problem import MoeProblem
from .tiles import HopperConfig

WARPGROUP_ROWS, CHUNK = 64, 64  # of one store
RAGGED_TILE = (1, 1, WARPGROUP_ROWS, 1, CHUNK)  # of a store that can end anywhere
COUNTERS = {"up": 1, "down": 2}  # where the table of tiles has them; the sort puts them to 0
Grid = tuple[int, int, int]
Extents = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor, as ``Descriptor`` takes them


def gluon_kernel(
    function: Any, grid: Grid, arguments: Mapping[str, Argument], constants: Mapping[str, Any]
) -> PreparedKernel:
    """Return a kernel for Hopper with the options that all of them have."""
    source = kernel_source(function, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, grid, arguments)


def aligned(dtype: str, tensor: str) -> Pointer:
    """Return the address of a tensor that is a multiple of 16 bytes: x and weights are, or Hopper does not serve it."""
    return Pointer(dtype, tensor, aligned=True)


def matrix(rows: int, columns: int) -> Extents:
    """Return the extents of rows that lie one after the other."""
    return (rows, columns), (columns, 1)


def ragged(columns: int, parts: int = 1) -> Extents:
    """Return the extents of rows of which a store can end anywhere.

    Coordinates are (2^30, end, 2^30 - rows, part, column). Rows past the last coordinate are not stored. The first two
    axes bring the address back, modulo 2^64: see ``triton.tools.ragged_tma``.
    """
    width = parts * columns
    return (0x7FFF0000, 0x7FFF0000, 2**30, parts, columns), (2**34 - width, width, width, columns, 1)


def gate_up_extents(problem: MoeProblem, *, split: bool, columns: int = 0) -> Extents:
    """Return the extents of w_gate_up: experts, gate and up apart where a tile has rows of both, rows, columns.

    ``columns``: where the tensor begins at some of them; else all.
    """
    expert, row, column = problem.gate_up_strides
    parts, rows = (2, problem.inter) if split else (1, problem.columns_up)
    return (problem.experts, parts, rows, columns or problem.hidden), (expert, rows * row, row, column)


def down_extents(problem: MoeProblem) -> Extents:
    """Return the extents of w_down, with an axis of one as w_gate_up has."""
    expert, row, column = problem.down_strides
    return (problem.experts, 1, problem.hidden, problem.inter), (expert, expert, row, column)


def product(plan: MoePlan, grid: Grid, which: str) -> PreparedKernel:
    """Return one of the two products: "up" or "down"."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, HopperConfig)
    is_up = which == "up"
    kind, gated = problem.dtype, is_up and problem.gated
    split = gated and not problem.interleaved
    parts = 2 if split else 1
    tile = (1, parts, PRODUCT_COLUMNS // parts, STEP)
    reduction, columns = (problem.hidden, problem.columns_up) if is_up else (problem.inter, problem.hidden)
    stored = problem.inter if is_up else problem.hidden
    has_bias = problem.bias_gate_up if is_up else problem.bias_down
    keeps = is_up and problem.keep_product
    weights = gate_up_extents(problem, split=split) if is_up else down_extents(problem)
    product_extents = ragged(columns // parts, parts)
    arguments: dict[str, Argument] = {
        "a_desc": None if is_up else Descriptor(kind, (ROWS, STEP), *matrix(problem.pairs, problem.inter), "h"),
        "w_desc": Descriptor(kind, tile, *weights, "w_gate_up" if is_up else "w_down"),
        "out_desc": Descriptor(kind, RAGGED_TILE, *ragged(stored), "h" if is_up else "y"),
        "product_desc": Descriptor(kind, RAGGED_TILE, *product_extents, "product") if keeps else None,
        "a_ptr": aligned(kind, "x") if is_up else None,
        "bias_ptr": aligned(kind, "bias_gate_up" if is_up else "bias_down") if has_bias else None,
        "tiles_ptr": aligned("i32", "tiles_ptr"),
        "order_ptr": aligned("i32", "order_ptr") if is_up else None,
        "drawn": Scalar("i32", 0),
    }
    registers, producer_registers = REGISTERS[which]
    constants: dict[str, Any] = {
        "GATHER": is_up,
        "COUNTER": COUNTERS[which],
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
    }
    return gluon_kernel(_grouped_sm90_kernel, grid, arguments, constants)
