"""Turn a plan into kernels to compile and launch: the arguments of each kernel, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
from torch import Tensor

from ..gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from .decode.gemv_triton import _gemv_down_kernel, _gemv_gate_up_kernel
from .grouped import prepare_sm90
from .grouped.combine_triton import _combine_kernel
from .grouped.products_triton import _down_kernel, _gate_up_kernel
from .kernel_arguments import Activation, ProductTile, WeightStrides
from .plan import (
    CHUNK,
    COMBINE_COLUMNS,
    COMBINE_UNROLL,
    PLACE_PAIRS,
    SORT_FEW_CHUNK,
    SORTED,
    SUM_CHUNKS,
    SUM_COLUMNS,
    MoePlan,
    block_experts,
    rows_of_tiles,
    sort_chunks,
    sort_pairs,
)
from .prepared import place_of
from .problem import MoeProblem
from .routing.sort_triton import _count_kernel, _place_kernel, _sort_few_kernel, _sum_chunks_kernel
from .tiles import BackwardConfig, GemvConfig, Tile, TileConfig

# The maximum of a thread. By default ptxas spills a few bytes to fit one more block on an SM.
_MAX_REGISTERS = 255
Grid = tuple[int, int, int]
Maker = Callable[[MoePlan, Grid, int], PreparedKernel]


def prepare_moe_kernels(plan: MoePlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in launch order."""
    return tuple(
        MAKERS[step](plan, launch.grid, launch.block[0] // 32)
        for step, launch in zip(plan.steps, plan.launches, strict=True)
    )


def triton_kernel(
    function: Any,
    plan: MoePlan,
    grid: Grid,
    warps: int,
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Any],
    stages: int = 1,
) -> PreparedKernel:
    """Return a Triton kernel with the options that all of them share."""
    source = kernel_source(
        function, arguments, constants, num_warps=warps, num_stages=stages, max_registers=_MAX_REGISTERS,
        dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)


def ours(dtype: str, tensor: str) -> Pointer:
    """Return the pointer to a tensor that the package allocates: it is aligned."""
    return Pointer(dtype, tensor, aligned=True)


def theirs(problem: MoeProblem, tensor: str) -> Pointer:
    """Return the pointer to x, a weight or a bias, aligned if the problem says so."""
    return Pointer(problem.dtype, tensor, aligned=problem.pointer_alignment >= 16)


def tables(*names: str) -> dict[str, Argument]:
    """Return the pointers to parts of the workspace, which have the names of parameters."""
    return {name: ours("i32", name) for name in names}


def ids(problem: MoeProblem) -> Pointer:
    """Return the pointer to the experts of each token."""
    return Pointer(problem.ids_dtype, "topk_ids")


def _offsets(plan: MoePlan) -> dict[str, Argument]:
    """Return the pointer to the first row of each expert, which gradients of weights need."""
    return tables("offsets_ptr") if isinstance(plan.config, BackwardConfig) else {"offsets_ptr": None}


def _sort(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem = plan.problem
    arguments: dict[str, Argument] = {
        "ids_ptr": ids(problem),
        **tables("tiles_ptr", "order_ptr", "positions_ptr"),
        **_offsets(plan),
        "pairs": Scalar("i32", problem.pairs),
    }
    constants = {
        "EXPERTS": problem.experts,
        "BLOCK_E": block_experts(problem.experts),
        "BLOCK_M": rows_of_tiles(plan.config),
        "BLOCK_P": sort_pairs(problem.experts),
        "CHUNK": SORT_FEW_CHUNK,
    }
    return triton_kernel(_sort_few_kernel, plan, grid, warps, arguments, constants)


def _count(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem = plan.problem
    constants = {"EXPERTS": problem.experts, "BLOCK_E": block_experts(problem.experts), "CHUNK": CHUNK}
    arguments = {"ids_ptr": ids(problem), **tables("counts_ptr"), "pairs": Scalar("i32", problem.pairs)}
    return triton_kernel(_count_kernel, plan, grid, warps, arguments, constants)


def _sum(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem = plan.problem
    constants = {"BLOCK_E": block_experts(problem.experts), "BLOCK_C": SUM_CHUNKS, "COLUMNS": SUM_COLUMNS}
    arguments = {**tables("counts_ptr"), "chunks": Scalar("i32", sort_chunks(problem))}
    return triton_kernel(_sum_chunks_kernel, plan, grid, warps, arguments, constants)


def _place(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem = plan.problem
    arguments: dict[str, Argument] = {
        "ids_ptr": ids(problem),
        **tables("counts_ptr", "tiles_ptr", "order_ptr", "positions_ptr"),
        **_offsets(plan),
        "pairs": Scalar("i32", problem.pairs),
        "chunks": Scalar("i32", sort_chunks(problem)),
    }
    constants = {
        "EXPERTS": problem.experts,
        "BLOCK_E": block_experts(problem.experts),
        "BLOCK_M": rows_of_tiles(plan.config),
        "BLOCK_P": PLACE_PAIRS,
        "CHUNK": CHUNK,
    }
    return triton_kernel(_place_kernel, plan, grid, warps, arguments, constants)


def activation(problem: MoeProblem) -> Activation:
    """Return the constants of the activation."""
    return Activation(problem.activation, problem.gated, problem.interleaved, problem.alpha, problem.limit)


def product_tile(plan: MoePlan, tile: Tile, block_m: int, group_m: int) -> ProductTile:
    """Return the constants of a product's tile."""
    return ProductTile(block_m, tile.block_n, tile.block_k, group_m, tile.swap, _precision(plan), tile.num_stages)


def _precision(plan: MoePlan) -> str:
    """Return how fp32 operands are multiplied; other dtypes ignore it.

    "bf16x6" splits an fp32 number into three bf16 parts, and six products of parts have a relative error of 2^-24;
    Triton sums each step of a reduction separately. "ieee" is one chain of multiply-adds over all steps: its error is
    up to 1.7 times the budget for 256 and 384 terms (H200). Triton's interpreter supports only "ieee".
    """
    if plan.problem.dtype != "fp32":
        return "tf32"
    return "bf16x6" if plan.arch else "ieee"


def _product(plan: MoePlan, problem: MoeProblem, config: TileConfig, tile: Tile, rows: str) -> dict[str, Any]:
    """Return the constants of both products."""
    few = rows == "few"
    return {
        "EXPERTS": problem.experts,
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "ROWS": rows,
        "BY_EXPERT": few and problem.experts < problem.pairs,
        "BLOCK_P": max(16, triton.next_power_of_2(problem.pairs)) if few else 16,
        "TILE": product_tile(plan, tile, config.block_m, config.group_m),
    }


def _which(plan: MoePlan, *, shared: bool) -> tuple[MoeProblem, TileConfig, str, str]:
    """Return problem, tiles, ROWS and the prefix of tensor names, of the routed or the shared experts."""
    if shared:
        assert plan.shared is not None
        return plan.problem.shared(), plan.shared, "all", "shared_"
    assert isinstance(plan.config, TileConfig)
    return plan.problem, plan.config, "few" if plan.kernel == "few_triton" else "sorted", ""


def _rows(problem: MoeProblem, rows: str, *, with_order: bool) -> dict[str, Argument]:
    names = ("tiles_ptr", "order_ptr") if with_order else ("tiles_ptr",)
    return {
        "ids_ptr": ids(problem) if rows == "few" else None,
        **(tables(*names) if rows == "sorted" else dict.fromkeys(names)),
        "tokens": Scalar("i32", problem.tokens),
    }


def _up(plan: MoePlan, grid: Grid, warps: int, *, shared: bool = False) -> PreparedKernel:
    problem, config, rows, prefix = _which(plan, shared=shared)
    arguments: dict[str, Argument] = {
        "x_ptr": theirs(problem, "x"),
        "w_ptr": theirs(problem, "shared_gate_up" if shared else "w_gate_up"),
        "bias_ptr": theirs(problem, "bias_gate_up") if problem.bias_gate_up else None,
        **_rows(problem, rows, with_order=True),
        "product_ptr": ours(problem.dtype, f"{prefix}product") if problem.keep_product else None,
        "h_ptr": ours(problem.dtype, f"{prefix}h"),
    }
    constants = {
        **_product(plan, problem, config, config.up, rows),
        "COLUMNS": problem.columns_up,
        "STRIDE_XT": problem.x_strides[0],
        "STRIDE_XK": problem.x_strides[1],
        "W": WeightStrides(*problem.gate_up_strides),
        "ACT": activation(problem),
    }
    stages = config.up.num_stages
    return triton_kernel(_gate_up_kernel, plan, grid, warps, arguments, constants, stages)


def _down(plan: MoePlan, grid: Grid, warps: int, *, shared: bool = False) -> PreparedKernel:
    problem, config, rows, prefix = _which(plan, shared=shared)
    arguments: dict[str, Argument] = {
        "h_ptr": ours(problem.dtype, f"{prefix}h"),
        "w_ptr": theirs(problem, "shared_down" if shared else "w_down"),
        "bias_ptr": theirs(problem, "bias_down") if problem.bias_down else None,
        **_rows(problem, rows, with_order=False),
        "y_ptr": ours(problem.dtype, f"{prefix}y"),
    }
    constants = {
        **_product(plan, problem, config, config.down, rows),
        "W": WeightStrides(*problem.down_strides),
    }
    stages = config.down.num_stages
    return triton_kernel(_down_kernel, plan, grid, warps, arguments, constants, stages)


def _shared_up(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    return _up(plan, grid, warps, shared=True)


def _shared_down(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    return _down(plan, grid, warps, shared=True)


def _up_sm90(plan: MoePlan, grid: Grid, _warps: int) -> PreparedKernel:
    return prepare_sm90.product(plan, grid, "up")


def _down_sm90(plan: MoePlan, grid: Grid, _warps: int) -> PreparedKernel:
    return prepare_sm90.product(plan, grid, "down")


def _sources(problem: MoeProblem) -> dict[str, Argument]:
    """Return the pointers to the output and to the outputs of shared experts, which the last kernel adds."""
    return {
        "y_shared_ptr": ours(problem.dtype, "shared_y") if problem.shared_experts else None,
        "shared_weights_ptr": Pointer(problem.shared_weights, "shared_weights") if problem.shared_weights else None,
        "out_ptr": ours(problem.dtype, "out"),
    }


def _combine(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem = plan.problem
    is_sorted = plan.kernel in SORTED
    arguments: dict[str, Argument] = {
        "y_ptr": ours(problem.dtype, "y"),
        "weights_ptr": Pointer(problem.weights_dtype, "topk_weights"),
        "ids_ptr": None if is_sorted else ids(problem),
        "positions_ptr": ours("i32", "positions_ptr") if is_sorted else None,
        **_sources(problem),
        "tokens": Scalar("i32", problem.tokens),
    }
    constants = {
        "EXPERTS": problem.experts,
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "SHARED": problem.shared_experts,
        "STRIDE_OUT": problem.hidden,
        "UNROLL": min(COMBINE_UNROLL, problem.top_k),
        "BLOCK_N": COMBINE_COLUMNS,
    }
    return triton_kernel(_combine_kernel, plan, grid, warps, arguments, constants)


def _gemv_up(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GemvConfig)
    arguments: dict[str, Argument] = {
        "x_ptr": theirs(problem, "x"),
        "w_ptr": theirs(problem, "w_gate_up"),
        "bias_ptr": theirs(problem, "bias_gate_up") if problem.bias_gate_up else None,
        "ids_ptr": ids(problem),
        "h_ptr": ours(problem.dtype, "h"),
    }
    constants = {
        "EXPERTS": problem.experts,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "COLUMNS": problem.columns_up,
        "STRIDE_XK": problem.x_strides[1],
        "W": WeightStrides(*problem.gate_up_strides),
        "ACT": activation(problem),
        "BLOCK_N": config.up.block_n,
        "BLOCK_K": config.up.block_k,
        "NUM_STAGES": config.up.num_stages,
    }
    return triton_kernel(_gemv_gate_up_kernel, plan, grid, warps, arguments, constants, config.up.num_stages)


def _gemv_down(plan: MoePlan, grid: Grid, warps: int) -> PreparedKernel:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GemvConfig)
    arguments: dict[str, Argument] = {
        "h_ptr": ours(problem.dtype, "h"),
        "w_ptr": theirs(problem, "w_down"),
        "bias_ptr": theirs(problem, "bias_down") if problem.bias_down else None,
        "weights_ptr": Pointer(problem.weights_dtype, "topk_weights"),
        "ids_ptr": ids(problem),
        **_sources(problem),
    }
    constants = {
        "EXPERTS": problem.experts,
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "SHARED": problem.shared_experts,
        "W": WeightStrides(*problem.down_strides),
        "BLOCK_N": config.down.block_n,
        "BLOCK_K": config.down.block_k,
        "STEPS": config.down.steps,
    }
    return triton_kernel(_gemv_down_kernel, plan, grid, warps, arguments, constants)


MAKERS: Mapping[str, Maker] = {
    "sort": _sort,
    "count": _count,
    "sum": _sum,
    "place": _place,
    "up": _up,
    "down": _down,
    "up_sm90": _up_sm90,
    "down_sm90": _down_sm90,
    "shared_up": _shared_up,
    "shared_down": _shared_down,
    "combine": _combine,
    "gemv_up": _gemv_up,
    "gemv_down": _gemv_down,
}


def _at(tensors: dict[str, Tensor], place: str) -> Tensor:
    """Return a tensor that begins at a place, which is a name and an offset."""
    name, offset = place_of(place)
    tensor = tensors[name]
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.itemsize) if offset else tensor


def interpret(kernel: PreparedKernel, tensors: dict[str, Tensor]) -> None:
    """Run one kernel in Triton's interpreter on CPU tensors (the process was started with TRITON_INTERPRET=1)."""
    pointers = [name for name, kind in kernel.source.signature if kind.startswith("*")]
    names = [name for name, kind in kernel.source.signature if not kind.startswith("*")]
    arguments = {
        **{name: _at(tensors, place) for name, place in zip(pointers, kernel.tensors, strict=True)},
        **dict(zip(names, kernel.scalars, strict=True)),
        **dict(kernel.source.constants),
    }
    kernel.source.function[kernel.grid](**arguments)
