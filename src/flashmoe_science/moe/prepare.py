"""Turn a plan into kernels to compile and launches to make: what each kernel is given, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..gpu.compile import KernelSource
from . import prepare_sm90
from .combine_triton import _combine_kernel
from .gemv_triton import _gemv_down_kernel, _gemv_gate_up_kernel
from .grouped_triton import _down_kernel, _gate_up_kernel
from .plan import (
    CHUNK,
    COMBINE_COLUMNS,
    COMBINE_UNROLL,
    SORT_FEW_CHUNK,
    SORTED,
    SUM_CHUNKS,
    SUM_COLUMNS,
    MoePlan,
    block_experts,
    next_power,
    place_pairs,
    rows_of_tiles,
    sort_chunks,
    sort_pairs,
)
from .prepared import PreparedKernel, place_of
from .problem import MoeProblem, columns_up
from .sort_triton import _count_kernel, _place_kernel, _sort_few_kernel, _sum_chunks_kernel
from .tiles import BackwardConfig, GemvConfig, Tile, TileConfig

_OURS = frozenset(
    (
        "h_ptr",
        "y_ptr",
        "out_ptr",
        "y_shared_ptr",
        "tiles_ptr",
        "order_ptr",
        "positions_ptr",
        "counts_ptr",
        "product_ptr",
        "offsets_ptr",
        "do_ptr",
        "dproduct_ptr",
        "wh_ptr",
        "sums_ptr",
    )
)  # allocated here, so aligned
# All that a thread can have. Left to itself, ptxas spills a few bytes to fit one more block on an SM.
_MAX_REGISTERS = 255


def prepare_moe_kernels(plan: MoePlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    return tuple(
        MAKERS[step](plan, launch.grid, launch.block[0] // 32)
        for step, launch in zip(plan.steps, plan.launches, strict=True)
    )


def prepared_kernel(
    function: Any,
    plan: MoePlan,
    grid: tuple[int, int, int],
    warps: int,
    pointers: dict[str, tuple[str, str] | None],
    scalars: dict[str, int],
    constants: dict[str, Any],
    stages: int = 1,
    also_aligned: tuple[str, ...] = (),
) -> PreparedKernel:
    """Return a kernel in which a pointer that is None is a constant; each other has a type and a tensor."""
    given = {name: pointer for name, pointer in pointers.items() if pointer is not None}
    ours = plan.problem.pointer_alignment >= 16
    missing = {name: None for name in pointers if name not in given}
    dependent = plan.arch >= 90
    source = KernelSource(
        function,
        (*((name, kind) for name, (kind, _) in given.items()), *((name, "i32") for name in scalars)),
        tuple({**constants, **missing, "DEPENDENT_LAUNCH": dependent}.items()),
        frozenset(
            name
            for name in given
            if name in _OURS or name in also_aligned or (name in ("x_ptr", "w_ptr", "bias_ptr") and ours)
        ),
        warps,
        stages,
        max_registers=_MAX_REGISTERS,
        dependent_launch=dependent,
    )
    return PreparedKernel(source, grid, tuple(scalars.values()), tuple(tensor for _, tensor in given.values()))


def ids(problem: MoeProblem) -> tuple[str, str]:
    """Return type and tensor of the experts of each token."""
    return f"*{problem.ids_dtype}", "topk_ids"


def _offsets(plan: MoePlan) -> dict[str, tuple[str, str] | None]:
    """Gradients of weights sum over an expert's rows, so they ask where these begin."""
    return {"offsets_ptr": ("*i32", "offsets_ptr") if isinstance(plan.config, BackwardConfig) else None}


def _sort(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem = plan.problem
    pointers: dict[str, tuple[str, str] | None] = {
        "ids_ptr": ids(problem),
        **{name: ("*i32", name) for name in ("tiles_ptr", "order_ptr", "positions_ptr")},
        **_offsets(plan),
    }
    constants = {
        "EXPERTS": problem.experts,
        "BLOCK_E": block_experts(problem.experts),
        "BLOCK_M": rows_of_tiles(plan.config),
        "BLOCK_P": sort_pairs(problem.experts),
        "CHUNK": SORT_FEW_CHUNK,
    }
    return prepared_kernel(_sort_few_kernel, plan, grid, warps, pointers, {"pairs": problem.pairs}, constants)


def _count(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem = plan.problem
    constants = {"EXPERTS": problem.experts, "BLOCK_E": block_experts(problem.experts), "CHUNK": CHUNK}
    pointers: dict[str, tuple[str, str] | None] = {"ids_ptr": ids(problem), "counts_ptr": ("*i32", "counts_ptr")}
    return prepared_kernel(_count_kernel, plan, grid, warps, pointers, {"pairs": problem.pairs}, constants)


def _sum(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem = plan.problem
    constants = {"BLOCK_E": block_experts(problem.experts), "BLOCK_C": SUM_CHUNKS, "COLUMNS": SUM_COLUMNS}
    pointers: dict[str, tuple[str, str] | None] = {"counts_ptr": ("*i32", "counts_ptr")}
    return prepared_kernel(_sum_chunks_kernel, plan, grid, warps, pointers, {"chunks": sort_chunks(problem)}, constants)


def _place(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem = plan.problem
    pointers: dict[str, tuple[str, str] | None] = {
        "ids_ptr": ids(problem),
        **{name: ("*i32", name) for name in ("counts_ptr", "tiles_ptr", "order_ptr", "positions_ptr")},
        **_offsets(plan),
    }
    constants = {
        "EXPERTS": problem.experts,
        "BLOCK_E": block_experts(problem.experts),
        "BLOCK_M": rows_of_tiles(plan.config),
        "BLOCK_P": place_pairs(problem.experts),
        "CHUNK": CHUNK,
    }
    scalars = {"pairs": problem.pairs, "chunks": sort_chunks(problem)}
    return prepared_kernel(_place_kernel, plan, grid, warps, pointers, scalars, constants)


def activation(problem: MoeProblem) -> dict[str, Any]:
    """Return the constants of the activation."""
    return {
        "GATED": problem.gated,
        "INTERLEAVED": problem.interleaved,
        "ACTIVATION": problem.activation,
        "ALPHA": problem.alpha,
        "LIMIT": problem.limit,
    }


def strides(prefix: str, axes: Sequence[str], values: tuple[int, ...]) -> dict[str, int]:
    """Return the constants of a tensor's strides, in elements."""
    return {f"STRIDE_{prefix}{axis}": stride for axis, stride in zip(axes, values, strict=True)}


def precision(plan: MoePlan) -> dict[str, str]:
    """Return how fp32 is multiplied; other operands do not read it.

    Three parts in bf16 hold an fp32 number, and six products of them all but what lies below 2^-24 of theirs; Triton
    sums each step of a reduction apart. With "ieee" all steps are one chain of multiply-adds: up to 1.7 times the error
    that the rule allows, of 256 and 384 terms (H200). Triton's interpreter has no products of parts.
    """
    if plan.problem.dtype != "fp32":
        return {"PRECISION": "tf32"}
    return {"PRECISION": "bf16x6" if plan.arch else "ieee"}


def _product(problem: MoeProblem, config: TileConfig, tile: Tile, rows: str) -> dict[str, Any]:
    """Return the constants that both products have."""
    few = rows == "few"
    return {
        "EXPERTS": problem.experts,
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "ROWS": rows,
        "BY_EXPERT": few and problem.experts < problem.pairs,
        "BLOCK_P": max(16, next_power(problem.pairs)) if few else 16,
        "BLOCK_M": config.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": config.group_m,
        "SWAP": tile.swap,
        "NUM_STAGES": tile.num_stages,
    }


def _which(plan: MoePlan, *, shared: bool) -> tuple[MoeProblem, TileConfig, str, str]:
    """Return problem, tiles, rows, and what names of tensors begin with, of the routed or of the shared experts."""
    if shared:
        assert plan.shared is not None
        return plan.problem.shared(), plan.shared, "all", "shared_"
    assert isinstance(plan.config, TileConfig)
    return plan.problem, plan.config, "few" if plan.kernel == "few_triton" else "sorted", ""


def _rows_pointers(problem: MoeProblem, rows: str, *, with_order: bool) -> dict[str, tuple[str, str] | None]:
    order = {"order_ptr": ("*i32", "order_ptr") if rows == "sorted" else None} if with_order else {}
    return {
        "ids_ptr": ids(problem) if rows == "few" else None,
        "tiles_ptr": ("*i32", "tiles_ptr") if rows == "sorted" else None,
        **order,
    }


def _up(plan: MoePlan, grid: tuple[int, int, int], warps: int, *, shared: bool = False) -> PreparedKernel:
    problem, config, rows, prefix = _which(plan, shared=shared)
    kind = f"*{problem.dtype}"
    pointers: dict[str, tuple[str, str] | None] = {
        "x_ptr": (kind, "x"),
        "w_ptr": (kind, "shared_gate_up" if shared else "w_gate_up"),
        "bias_ptr": (kind, "bias_gate_up") if problem.bias_gate_up else None,
        **_rows_pointers(problem, rows, with_order=True),
        "product_ptr": (kind, f"{prefix}product") if problem.keep_product else None,
        "h_ptr": (kind, f"{prefix}h"),
    }
    constants = {
        **_product(problem, config, config.up, rows),
        **precision(plan),
        "COLUMNS": problem.columns_up,
        **strides("X", "TK", problem.x_strides),
        **strides("W", "ENK", problem.gate_up_strides),
        **activation(problem),
    }
    stages = config.up.num_stages
    return prepared_kernel(_gate_up_kernel, plan, grid, warps, pointers, {"tokens": problem.tokens}, constants, stages)


def _down(plan: MoePlan, grid: tuple[int, int, int], warps: int, *, shared: bool = False) -> PreparedKernel:
    problem, config, rows, prefix = _which(plan, shared=shared)
    kind = f"*{problem.dtype}"
    pointers: dict[str, tuple[str, str] | None] = {
        "h_ptr": (kind, f"{prefix}h"),
        "w_ptr": (kind, "shared_down" if shared else "w_down"),
        "bias_ptr": (kind, "bias_down") if problem.bias_down else None,
        **_rows_pointers(problem, rows, with_order=False),
        "y_ptr": (kind, f"{prefix}y"),
    }
    constants = {
        **_product(problem, config, config.down, rows),
        **precision(plan),
        **strides("W", "ENK", problem.down_strides),
    }
    stages = config.down.num_stages
    return prepared_kernel(_down_kernel, plan, grid, warps, pointers, {"tokens": problem.tokens}, constants, stages)


def _shared_up(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    return _up(plan, grid, warps, shared=True)


def _shared_down(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    return _down(plan, grid, warps, shared=True)


def _up_sm90(plan: MoePlan, grid: tuple[int, int, int], _warps: int) -> PreparedKernel:
    return prepare_sm90.product(plan, grid, "up")


def _down_sm90(plan: MoePlan, grid: tuple[int, int, int], _warps: int) -> PreparedKernel:
    return prepare_sm90.product(plan, grid, "down")


def _sources(problem: MoeProblem) -> dict[str, tuple[str, str] | None]:
    """Return what the kernel that writes the output adds, besides what the routed experts gave."""
    return {
        "y_shared_ptr": (f"*{problem.dtype}", "shared_y") if problem.shared_experts else None,
        "shared_weights_ptr": (f"*{problem.shared_weights}", "shared_weights") if problem.shared_weights else None,
        "out_ptr": (f"*{problem.dtype}", "out"),
    }


def _combine(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem = plan.problem
    is_sorted = plan.kernel in SORTED
    pointers: dict[str, tuple[str, str] | None] = {
        "y_ptr": (f"*{problem.dtype}", "y"),
        "weights_ptr": (f"*{problem.weights_dtype}", "topk_weights"),
        "ids_ptr": None if is_sorted else ids(problem),
        "positions_ptr": ("*i32", "positions_ptr") if is_sorted else None,
        **_sources(problem),
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
    return prepared_kernel(_combine_kernel, plan, grid, warps, pointers, {"tokens": problem.tokens}, constants)


def _gemv_up(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GemvConfig)
    kind = f"*{problem.dtype}"
    pointers: dict[str, tuple[str, str] | None] = {
        "x_ptr": (kind, "x"),
        "w_ptr": (kind, "w_gate_up"),
        "bias_ptr": (kind, "bias_gate_up") if problem.bias_gate_up else None,
        "ids_ptr": ids(problem),
        "h_ptr": (kind, "h"),
    }
    constants = {
        "EXPERTS": problem.experts,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "COLUMNS": columns_up(problem.inter, problem.activation),
        "STRIDE_XK": problem.x_strides[1],
        **strides("W", "ENK", problem.gate_up_strides),
        **activation(problem),
        "BLOCK_N": config.up.block_n,
        "BLOCK_K": config.up.block_k,
        "NUM_STAGES": config.up.num_stages,
    }
    return prepared_kernel(_gemv_gate_up_kernel, plan, grid, warps, pointers, {}, constants, config.up.num_stages)


def _gemv_down(plan: MoePlan, grid: tuple[int, int, int], warps: int) -> PreparedKernel:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GemvConfig)
    kind = f"*{problem.dtype}"
    pointers: dict[str, tuple[str, str] | None] = {
        "h_ptr": (kind, "h"),
        "w_ptr": (kind, "w_down"),
        "bias_ptr": (kind, "bias_down") if problem.bias_down else None,
        "weights_ptr": (f"*{problem.weights_dtype}", "topk_weights"),
        "ids_ptr": ids(problem),
        **_sources(problem),
    }
    constants = {
        "EXPERTS": problem.experts,
        "TOPK": problem.top_k,
        "HID": problem.hidden,
        "INTER": problem.inter,
        "SHARED": problem.shared_experts,
        **strides("W", "ENK", problem.down_strides),
        "BLOCK_N": config.down.block_n,
        "BLOCK_K": config.down.block_k,
        "STEPS": config.down.steps,
    }
    return prepared_kernel(_gemv_down_kernel, plan, grid, warps, pointers, {}, constants)


MAKERS = {
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
    """Return a tensor that begins at a place."""
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
