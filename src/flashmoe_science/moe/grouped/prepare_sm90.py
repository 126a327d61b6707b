"""Turn both products of a plan for Hopper into launches; arguments that all kernels for Hopper share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...gpu.signature import Argument, Descriptor, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from ..kernel_arguments import Activation
from ..plan import MoePlan
from ..problem import MoeProblem
from ..tiles import HopperConfig
from .gluon_sm90 import _grouped_sm90_kernel
from .plan_sm90 import PRODUCT_COLUMNS, REGISTERS, ROWS, STEP, column_tiles, output_columns

WARPGROUP_ROWS, CHUNK = 64, 64  # of one store
RAGGED_TILE = (1, 1, WARPGROUP_ROWS, 1, CHUNK)  # of a store with a ragged end
COUNTERS = {"up": 1, "down": 2}  # their places in the table of tiles; the sort sets them to 0
Grid = tuple[int, int, int]
Extents = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor, for ``Descriptor``


def gluon_kernel(
    function: Any, grid: Grid, arguments: Mapping[str, Argument], constants: Mapping[str, Any]
) -> PreparedKernel:
    """Return a kernel for Hopper with the options that all of them share."""
    source = kernel_source(function, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, grid, arguments)


def aligned(dtype: str, tensor: str) -> Pointer:
    """Return a pointer that is 16-byte aligned. The plan for Hopper requires that of x, weights and biases."""
    return Pointer(dtype, tensor, aligned=True)


def matrix(rows: int, columns: int) -> Extents:
    """Return the extents of a contiguous matrix."""
    return (rows, columns), (columns, 1)


def ragged(columns: int, parts: int = 1) -> Extents:
    """Return the extents of rows whose tiles can end at any row: stores skip rows past the end, loads give zeros.

    Coordinates are (2^30, end, 2^30 - rows, part, column). The first two axes cancel the offset of the third, modulo
    2^64: see ``triton.tools.ragged_tma``.
    """
    width = parts * columns
    return (0x7FFF0000, 0x7FFF0000, 2**30, parts, columns), (2**34 - width, width, width, columns, 1)


def gate_up_extents(problem: MoeProblem, *, split: bool, columns: int = 0) -> Extents:
    """Return the extents of w_gate_up: experts, parts, rows, columns.

    ``split``: gate and up are two parts, as a tile has rows of both. ``columns``: of a slice; 0: all.
    """
    expert, row, column = problem.gate_up_strides
    parts, rows = (2, problem.inter) if split else (1, problem.columns_up)
    return (problem.experts, parts, rows, columns or problem.hidden), (expert, rows * row, row, column)


def down_extents(problem: MoeProblem) -> Extents:
    """Return the extents of w_down: experts, one part, rows, columns."""
    expert, row, column = problem.down_strides
    return (problem.experts, 1, problem.hidden, problem.inter), (expert, expert, row, column)


def product(plan: MoePlan, grid: Grid, which: str) -> PreparedKernel:
    """Return the launch of one product: "up" or "down"."""
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
        "ACT": Activation(
            problem.activation if is_up else "", gated, gated and problem.interleaved, problem.alpha, problem.limit
        ),
        "IS_TURNED": False,
        "MATRIX_REGISTERS": registers,
        "PRODUCER_REGISTERS": producer_registers,
    }
    return gluon_kernel(_grouped_sm90_kernel, grid, arguments, constants)
