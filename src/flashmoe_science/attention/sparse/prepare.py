"""Turn a plan of ``sparse_mla`` into kernels to compile and launches to make."""

from __future__ import annotations

from typing import Any

from ...gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from .arguments import SparseCall, SparseTile
from .gluon_sm90 import _sparse_sm90_kernel
from .plan import HOPPER_SPARSE_KERNEL, MERGE_COLUMNS, MERGE_SPLITS, MERGE_WARPS, SparsePlan
from .problem import SparseProblem
from .rows_triton import _merge_sparse_kernel, _sparse_kernel

_MAX_REGISTERS = 255  # all that a thread can have


def prepare_sparse_kernels(plan: SparsePlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    makers = {"_sparse_kernel": _attend, "_sparse_sm90_kernel": _attend, "_merge_sparse_kernel": _merge}
    return tuple(makers[launch.pattern](plan, launch.grid) for launch in plan.launches)


def partial_sizes(plan: SparsePlan) -> tuple[int, int]:
    """Return the elements of the partial outputs, and of their largest scores and sums; 0 where nothing is merged."""
    p = plan.problem
    rows = plan.splits * p.batch * p.seqlen_q * p.heads if plan.splits > 1 else 0
    return rows * p.head_dim_v, 2 * rows


def _attend(plan: SparsePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p, config = plan.problem, plan.config
    assert config is not None
    call = _call(p)
    q, (page, row) = p.q_strides, p.kv_strides
    arguments = {
        "q_ptr": Pointer(p.dtype, aligned=p.pointer_alignment >= 16),
        **_cache(plan),
        "indices_ptr": Pointer("i32"),
        "page_table_ptr": Pointer("i32") if p.page_size else None,
        **_outputs(plan),
        "q_strides.b": Scalar("i64", q[0] // call.ALIGN_Q),
        "q_strides.h": Scalar("i64", q[1] // call.ALIGN_Q),
        "strides.page": Scalar("i64", page // call.ALIGN),
        "strides.ib": Scalar("i64", p.index_strides[0]),
        "strides.im": Scalar("i64", p.index_strides[1]),
        "strides.tb": Scalar("i64", p.table_stride),
        "sizes.seqlen_q": Scalar("i32", p.seqlen_q),
        "sizes.capacity": Scalar("i32", p.capacity),
        "sizes.top_k": Scalar("i32", p.top_k),
        "sizes.splits": Scalar("i32", plan.splits),
        "sizes.each": Scalar("i32", plan.each),
        "scale": Scalar("fp32", p.scale_log2),
    }
    constants = {
        "q_strides.ROW": q[2], "q_strides.COLUMN": 1, "o_strides.ROW": p.output_strides[2], "o_strides.COLUMN": 1,
        "strides.ROW": row, "CALL": call,
        "TILE": SparseTile(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            TILES_M=-(-p.heads // config.block_m),
            SPLIT=plan.splits > 1,
            NUM_STAGES=config.num_stages,
        ),
    }  # fmt: skip
    function = _sparse_sm90_kernel if plan.kernel == HOPPER_SPARSE_KERNEL else _sparse_kernel
    return _prepare(function, plan, grid, arguments, constants, config.num_warps, config.num_stages)


def _cache(plan: SparsePlan) -> dict[str, Argument]:
    """Return where the cache lies: in fp8 one address, as three dtypes."""
    p = plan.problem
    if p.is_fp8:
        kinds = {"kv_ptr": "fp8e4nv", "scales_ptr": "fp32", "rotated_ptr": "bf16"}
        return {name: Pointer(kind, "kv_ptr", aligned=True) for name, kind in kinds.items()}
    found: dict[str, Argument] = {"kv_ptr": Pointer(p.dtype, aligned=p.pointer_alignment >= 16)}
    if plan.kernel == HOPPER_SPARSE_KERNEL:
        return found
    return {**found, "scales_ptr": None, "rotated_ptr": None}


def _merge(plan: SparsePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p = plan.problem
    arguments = {
        **_outputs(plan),
        "seqlen_q": Scalar("i32", p.seqlen_q),
        "splits": Scalar("i32", plan.splits),
    }
    columns = min(p.head_dim_v, MERGE_COLUMNS)
    constants = {
        "o_strides.ROW": p.output_strides[2], "o_strides.COLUMN": 1, "CALL": _call(p), "COLUMNS": columns,
        "BLOCK_S": MERGE_SPLITS,
    }  # fmt: skip
    return _prepare(_merge_sparse_kernel, plan, grid, arguments, constants, MERGE_WARPS, 1)


def _outputs(plan: SparsePlan) -> dict[str, Argument]:
    """Return what both kernels take: where they write, sinks, and the strides of the output."""
    p, is_split = plan.problem, plan.splits > 1
    align = _output_alignment(p)
    return {
        "o_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True) if p.return_lse else None,
        "o_part_ptr": Pointer("fp32", aligned=True) if is_split else None,
        "sums_part_ptr": Pointer("fp32", aligned=True) if is_split else None,
        "sinks_ptr": Pointer(p.sinks) if p.sinks else None,
        "o_strides.b": Scalar("i64", p.output_strides[0] // align),
        "o_strides.h": Scalar("i64", p.output_strides[1] // align),
    }


def _output_alignment(problem: SparseProblem) -> int:
    return min(8, problem.head_dim_v)


def _call(p: SparseProblem) -> SparseCall:
    page, row = p.kv_strides
    align = p.cache_alignment
    reach = p.pages * abs(page) + p.page_size * abs(row) if p.page_size else p.capacity * abs(row)
    return SparseCall(
        HEADS=p.heads,
        DV=p.head_dim_v,
        REST=p.rest,
        ALIGN_Q=p.q_alignment,
        ALIGN=align,
        ALIGN_O=_output_alignment(p),
        PAGE_SIZE=p.page_size,
        WIDE=reach // align >= 2**31,
        STORE_LSE=p.return_lse,
    )


def _prepare(
    function: Any, plan: SparsePlan, grid: tuple[int, int, int], arguments: dict[str, Argument],
    constants: dict[str, Any], warps: int, stages: int,
) -> PreparedKernel:  # fmt: skip
    source = kernel_source(
        function, arguments, constants, num_warps=warps, num_stages=stages, max_registers=_MAX_REGISTERS,
        dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)
