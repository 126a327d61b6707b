"""Turn a plan of ``mixed_triton`` into kernels to compile and launches to make."""

from __future__ import annotations

from typing import Any

from ...gpu.signature import (
    Argument,
    Pointer,
    PreparedKernel,
    Scalar,
    kernel_source,
    prepare_kernel,
    scalars,
)
from ..forward.prepare import (
    MAX_REGISTERS,
    alignment,
    bounds_and_bias,
    optional_pointers,
    output_alignment,
    row_strides,
    strides_of,
)
from ..kernel_arguments import ForwardCall, MixedTile, MixedTiles, WorkQuotas
from ..problem import LOG2_E, AttentionProblem
from ..tiles import ForwardConfig, MixedConfig, Plan, block_dim, cdiv
from .attend_triton import _merge_mixed_kernel, _mixed_kernel
from .plan import (
    MERGE_ROWS,
    MERGE_SPLITS,
    MERGE_WARPS,
    WORK_SEQUENCES,
    WORK_WARPS,
    MixedSizes,
    fixed_steps,
    least_steps,
    merge_columns,
    mixed_launches,
    mixed_sizes,
    mixed_slots,
    most_splits,
    records_together,
    round_tokens,
    schedule_of,
)
from .work_triton import _plan_work_kernel


def prepare_mixed(plan: Plan, sms: int, tokens: int) -> tuple[PreparedKernel, ...]:
    """Return the kernels of a call with ``tokens`` queries, in the order of launches."""
    config = plan.config
    assert isinstance(config, MixedConfig)
    sizes = mixed_sizes(plan.problem, config, sms, round_tokens(tokens))
    kernels = []
    tiles = iter([*[(0, config.few)] * bool(sizes.few_items), (1, config.many)])
    for launch in mixed_launches(plan.problem, config, sms, tokens):
        if launch.pattern == "_plan_work_kernel":
            kernels.append(_work(plan, config, sms, launch.grid))
        elif launch.pattern == "_mixed_kernel":
            field, tile = next(tiles)
            first_part = part_rows(plan.problem, config, sizes)[0] if field else 0
            kernels.append(_attend(plan, tile, field, first_part, launch.grid))
        else:
            kernels.append(_merge(plan, config, sizes, launch.grid))
    return tuple(kernels)


def part_rows(problem: AttentionProblem, config: MixedConfig, sizes: MixedSizes) -> tuple[int, int]:
    """Return the rows of partial results of tiles of few rows, and of those of many."""
    few, many = sizes.few_slots * config.few.block_m, sizes.many_slots * config.many.block_m
    return problem.heads_kv * few, problem.heads_kv * many


def _tiles(problem: AttentionProblem, config: MixedConfig) -> MixedTiles:
    return MixedTiles(
        GROUP=problem.group,
        FEW_ROWS=config.few.block_m,
        FEW_KEYS=config.few.block_n,
        MANY_ROWS=config.many.block_m,
        MANY_KEYS=config.many.block_n,
        MERGE_ROWS=MERGE_ROWS,
        BOUND_LEFT=problem.bounded_left,
        BOUND_RIGHT=problem.bounded_right,
        SCHEDULE=schedule_of(problem),
    )


def _call(problem: AttentionProblem) -> ForwardCall:
    p = problem
    return ForwardCall(
        GROUP=p.group,
        D=p.head_dim,
        DV=p.head_dim_v,
        BLOCK_D=block_dim(p.head_dim),
        BLOCK_DV=block_dim(p.head_dim_v),
        ALIGN=alignment(p),
        ALIGN_O=output_alignment(p),
        ALIGN_BIAS=1,
        STRIDE_ALIBI_B=p.alibi_stride,
        BOUND_LEFT=p.bounded_left,
        BOUND_RIGHT=p.bounded_right,
        EMPTY_ROWS=p.bounded_right or p.bounded_left,
        STORE_LSE=p.return_lse,
        PAGE_SIZE=p.page_size,
        PRECISION="tf32",  # only fp32 operands read it
    )


def _window(problem: AttentionProblem) -> tuple[dict[str, Argument], dict[str, Any]]:
    arguments, constants = bounds_and_bias(problem)
    return arguments, {name: value for name, value in constants.items() if name.startswith("window")}


def _work(plan: Plan, config: MixedConfig, sms: int, grid: tuple[int, int, int]) -> PreparedKernel:
    p = plan.problem
    schedule = schedule_of(p)
    quotas: dict[str, int] = {}
    if schedule == "lengths":
        quotas["few_slots"], quotas["many_slots"] = mixed_slots(p, config, sms)
        quotas["few_least"], quotas["many_least"] = least_steps()
    elif schedule == "even":
        quotas["num_splits"] = p.num_splits
    else:
        quotas["fixed_steps"] = fixed_steps(config.few)
    quotas["few_most"], quotas["many_most"] = most_splits(p, config)
    rows = p.seqlen_q * p.group
    quotas["most_tiles"] = cdiv(rows, config.many.block_m) if config.has_many else 0
    window, constants = _window(p)
    pointers = {name: value for name, value in optional_pointers(p).items() if name.startswith("sequences.")}
    arguments: dict[str, Argument] = {
        "records_ptr": Pointer("i32"),
        **pointers,
        "batch": Scalar("i32", p.batch),
        **window,
        **{f"quotas.{name}": Scalar("i32", quotas[name]) if name in quotas else None for name in WorkQuotas._fields},
    }
    source = kernel_source(
        _plan_work_kernel, arguments, {**constants, "TILES": _tiles(p, config), "BLOCK_B": WORK_SEQUENCES},
        num_warps=WORK_WARPS, max_registers=MAX_REGISTERS, dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)


def _outputs(problem: AttentionProblem, *, split: bool) -> dict[str, Argument]:
    return {
        "o_ptr": Pointer(problem.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True) if problem.return_lse else None,
        "partials.o_ptr": Pointer("fp32", "o_part", aligned=True) if split else None,
        "partials.sums_ptr": Pointer("fp32", "sums_part", aligned=True) if split else None,
        "sinks_ptr": Pointer(problem.sinks) if problem.sinks else None,
    }


def _attend(
    plan: Plan, tile: ForwardConfig, field: int, first_part: int, grid: tuple[int, int, int]
) -> PreparedKernel:  # fmt: skip
    p = plan.problem
    align = alignment(p)
    widest_row = max(abs(s) for strides in (p.k_strides, p.v_strides) for s in strides[2:])
    window, constants = _window(p)
    arguments: dict[str, Argument] = {
        **{f"{name}_ptr": Pointer(p.dtype, aligned=p.pointer_alignment >= 16) for name in "qkv"},
        **_outputs(p, split=True),
        "alibi_ptr": Pointer(p.alibi) if p.alibi else None,
        "records_ptr": Pointer("i32"),
        "page_table_ptr": Pointer("i32"),
        **strides_of("q_strides", p.q_strides, align),
        **strides_of("k_strides", p.k_strides, align),
        **strides_of("v_strides", p.v_strides, align),
        **strides_of("o_strides", p.output_strides, output_alignment(p)),
        **scalars("i32", batch=p.batch, heads_kv=p.heads_kv),
        "stride_table_b": Scalar("i64", p.table_stride),
        "first_part": Scalar("i64", first_part),
        "scale": Scalar("fp32", p.softcap_scale if p.softcap else p.scale_log2),
        **window,
        "softcap": Scalar("fp32", p.softcap * LOG2_E) if p.softcap else None,
    }
    constants |= {
        **row_strides("q_strides", p.q_strides),
        **row_strides("k_strides", p.k_strides),
        **row_strides("v_strides", p.v_strides),
        "o_strides.ROW": p.output_strides[2],
        "o_strides.COLUMN": 1,
        "CALL": _call(p),
        "TILE": MixedTile(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            FIELD=field,
            BLOCK_B=records_together(p),
            NUM_STAGES=tile.num_stages,
            WIDE=max(p.page_size, 256) * widest_row >= 2**31,
        ),
    }
    source = kernel_source(
        _mixed_kernel, arguments, constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
        max_registers=MAX_REGISTERS, dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)


def _merge(plan: Plan, config: MixedConfig, sizes: MixedSizes, grid: tuple[int, int, int]) -> PreparedKernel:
    p = plan.problem
    window, constants = _window(p)
    columns = merge_columns(p)
    arguments: dict[str, Argument] = {
        **_outputs(p, split=True),
        "records_ptr": Pointer("i32"),
        **strides_of("o_strides", p.output_strides, output_alignment(p)),
        **scalars("i32", batch=p.batch, heads_kv=p.heads_kv),
        "many_part": Scalar("i64", part_rows(p, config, sizes)[0]),
        **window,
    }
    constants |= {
        "o_strides.ROW": p.output_strides[2],
        "o_strides.COLUMN": 1,
        "CALL": _call(p),
        "TILES": _tiles(p, config),
        "COLUMNS": columns,
        "TILES_DV": cdiv(block_dim(p.head_dim_v), columns),
        "BLOCK_B": records_together(p),
        "BLOCK_S": MERGE_SPLITS,
    }
    source = kernel_source(
        _merge_mixed_kernel, arguments, constants, num_warps=MERGE_WARPS, max_registers=MAX_REGISTERS,
        dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)
