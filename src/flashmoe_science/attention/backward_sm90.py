"""Turn a plan of ``backward_gluon_sm90`` into its three kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..gpu.compile import KernelSource
from ..gpu.gluon_versions import descriptor_type
from ..gpu.tensor_map import TensorMap
from .backward_192_gluon_sm90 import _backward_192_sm90_kernel
from .backward_gluon_sm90 import _backward_sm90_kernel
from .backward_hopper_plan import (
    HOPPER_KEYS,
    HOPPER_PART,
    HopperBackwardConfig,
    hopper_backward_columns,
    hopper_backward_kernel,
    hopper_backward_tiles,
    hopper_wide_columns,
    is_wide,
)
from .backward_passes_triton import _finish_dq_kernel, _prepare_backward_kernel
from .backward_plan import BackwardPlan
from .backward_problem import BackwardProblem
from .backward_wide_gluon_sm90 import _backward_wide_sm90_kernel
from .prepared import PreparedKernel
from .tiles import block_dim

_KERNELS = {
    kernel.__name__: kernel for kernel in (_backward_sm90_kernel, _backward_192_sm90_kernel, _backward_wide_sm90_kernel)
}
# The tensors of each kernel, in the order of its arguments. ``stats``, ``acc`` and ``dq_semaphore`` belong to one call; the
# first kernel sets the counters of the others, so nobody has to clear anything.
HOPPER_TENSORS = (
    ("o", "do", "lse", "dlse", "stats", "dq_semaphore"),
    ("q", "k", "v", "do", "dk", "dv", "stats", "acc", "dq_semaphore"),
    ("acc", "dq_semaphore", "dq"),
)
_LINE = 32  # numbers in 128 bytes, as TMA takes them from swizzled shared memory
_UNIT = 8  # elements in 16 bytes: strides are multiples of it, and passed so that the compiler knows


def scratch_sizes(problem: BackwardProblem, config: HopperBackwardConfig) -> dict[str, int]:
    """Return the elements of 4 bytes that a call allocates for itself, by name: ``dq_semaphore`` is int32, the others fp32."""
    p = problem.forward
    tiles = hopper_backward_tiles(problem, config)[0] * p.batch * p.heads
    columns, _ = hopper_backward_columns(problem)
    sums = tiles * config.block_m
    return {"stats": 2 * sums, "acc": sums * columns, "dq_semaphore": tiles * config.writers + 1}


def prepare_hopper_backward(plan: BackwardPlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels in the order in which they are launched."""
    assert isinstance(plan.config, HopperBackwardConfig)
    before, main, after = (launch.grid for launch in plan.launches)
    return (
        _prepare(plan.problem, plan.config, before),
        _main(plan.problem, plan.config, main),
        _finish(plan.problem, plan.config, after),
    )


def _units(*strides: int) -> tuple[int, ...]:
    assert all(stride % _UNIT == 0 for stride in strides), strides
    return tuple(stride // _UNIT for stride in strides)


def _prepare(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    source = KernelSource(
        _prepare_backward_kernel,
        tuple(
            {
                **dict.fromkeys(("o_ptr", "do_ptr"), f"*{p.dtype}"),
                **dict.fromkeys(("lse_ptr", "dlse_ptr", "stats_ptr"), "*fp32"),
                "dq_semaphore_ptr": "*i32",
                **dict.fromkeys(("stride_ob", "stride_oh", "stride_dob", "stride_doh"), "i64"),
                **dict.fromkeys(("heads", "seqlen_q", "tiles_m"), "i32"),
            }.items()
        ),
        tuple(
            {
                "STRIDE_OM": problem.o_strides[2],
                "STRIDE_DOM": problem.do_strides[2],
                "UNIT": _UNIT,
                "DV": p.head_dim_v,
                "BLOCK_DV": block_dim(p.head_dim_v),
                "BLOCK_M": config.block_m,
                "WRITERS": config.writers,
                "HAS_DLSE": problem.has_dlse,
            }.items()
        ),
        frozenset(("o_ptr", "do_ptr", "stats_ptr", "dq_semaphore_ptr")),  # the LSE lies where autograd keeps it
        config.prepare_warps,
    )
    tiles_m, _ = hopper_backward_tiles(problem, config)
    strides = _units(*problem.o_strides[:2], *problem.do_strides[:2])
    return PreparedKernel(source, grid, (*strides, p.heads, p.seqlen_q, tiles_m))


def _main(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p, kind, m = problem.forward, problem.forward.dtype, config.block_m
    dq_columns, dv = hopper_backward_columns(problem)
    columns = hopper_wide_columns(problem) if is_wide(problem) else dq_columns
    d, d_more = (128, 64) if columns == 192 else (columns, 0)  # a box outside of a tensor slows TMA down
    rows, keys = (1, 1, m), (1, 1, HOPPER_KEYS)
    lines = m * 64 // _LINE  # of 64 columns of dQ
    kernel = _KERNELS[hopper_backward_kernel(problem)]
    descriptors = {
        "q_desc": descriptor_type(kind, (*rows, d)),
        "k_desc": descriptor_type(kind, (*keys, d)),
        "v_desc": descriptor_type(kind, (*keys, dv)),
        "do_desc": descriptor_type(kind, (*rows, dv)),
        "dk_desc": descriptor_type(kind, (*keys, d)),
        "dv_desc": descriptor_type(kind, (*keys, dv)),
        "stats_desc": descriptor_type("fp32", (2 * m,)),
        "dq_desc": descriptor_type("fp32", (min(2, dq_columns // 64 // config.writers) * lines, _LINE)),
    }
    integers = (
        "heads", "heads_kv", "seqlen_q", "seqlen_k", "tiles_m", "tiles_n", "heads_total", "heads_per_group",
        "window_left", "window_right",
    )  # fmt: skip
    scalars = {**dict.fromkeys(integers, "i32"), **dict.fromkeys(("scale_log2", "scale"), "fp32")}
    constants: dict[str, Any] = {
        "GROUP": p.group, "TOGETHER": config.heads_together, "BOUND_LEFT": p.bounded_left,
        "BOUND_RIGHT": p.bounded_right, "MATRIX_REGISTERS": 240,
    }  # fmt: skip
    more: dict[str, str] = {}
    if d_more:
        more = {
            "q_more_desc": descriptor_type(kind, (*rows, d_more)),
            **dict.fromkeys(("k_more_desc", "dk_more_desc"), descriptor_type(kind, (*keys, d_more))),
        }
    if kernel is _backward_wide_sm90_kernel:
        nothing = {} if d_more else dict.fromkeys(("q_more_desc", "k_more_desc", "dk_more_desc"))
        constants |= {"COLUMNS": columns, **nothing}
    elif kernel is _backward_192_sm90_kernel:
        more["dq_more_desc"] = descriptor_type("fp32", (lines, _LINE))
    else:
        constants |= {"WARPGROUPS": config.warpgroups, "STAGES": config.num_stages, "V_COLUMNS": config.v_columns}
    source = KernelSource(
        kernel,
        tuple({**descriptors, "dq_semaphore_ptr": "*i32", **more, **scalars}.items()),
        tuple(constants.items()),
        frozenset(("dq_semaphore_ptr",)),
        num_warps=4,
        dependent_launch=config.dependent_launch,
    )
    tiles_m, tiles_n = hopper_backward_tiles(problem, config)
    kv_total = p.batch * p.heads_kv
    values = (
        p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, tiles_m, tiles_n, kv_total,
        min(config.heads_per_group, kv_total), *(max(0, reach) for reach in p.window), p.scale_log2, p.scale,
    )  # fmt: skip
    q_shape, kv_shape = (p.batch, p.heads, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
    scratch = scratch_sizes(problem, config)
    maps = (
        TensorMap(kind, (*q_shape, p.head_dim), p.q_strides),
        TensorMap(kind, (*kv_shape, p.head_dim), p.k_strides),
        TensorMap(kind, (*kv_shape, p.head_dim_v), p.v_strides),
        TensorMap(kind, (*q_shape, p.head_dim_v), problem.do_strides),
        TensorMap(kind, (*kv_shape, p.head_dim), problem.dk_strides),
        TensorMap(kind, (*kv_shape, p.head_dim_v), problem.dv_strides),
        TensorMap("fp32", (scratch["stats"],), (1,)),
        TensorMap("fp32", (scratch["acc"] // _LINE, _LINE), (_LINE, 1)),
    )
    firsts = [list(descriptors).index(name.replace("_more", "")) for name in more]
    repeated = tuple(replace(maps[first], of=first) for first in firsts)
    return PreparedKernel(source, grid, values, maps + repeated)


def _finish(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config)
    source = KernelSource(
        _finish_dq_kernel,
        tuple(
            {
                "acc_ptr": "*fp32",
                "dq_semaphore_ptr": "*i32",
                "dq_ptr": f"*{p.dtype}",
                **dict.fromkeys(("stride_b", "stride_h"), "i64"),
                **dict.fromkeys(("heads", "seqlen_q", "tiles_m"), "i32"),
                "scale": "fp32",
            }.items()
        ),
        tuple(
            {
                "STRIDE_M": problem.dq_strides[2],
                "UNIT": _UNIT,
                "D": p.head_dim,
                "BLOCK_M": config.block_m,
                "PARTS": config.block_m * hopper_backward_columns(problem)[0] // HOPPER_PART,
                "WRITERS": config.writers,
            }.items()
        ),
        frozenset(("acc_ptr", "dq_semaphore_ptr", "dq_ptr")),
        config.finish_warps,
        dependent_launch=config.dependent_launch,
    )
    values = (*_units(*problem.dq_strides[:2]), p.heads, p.seqlen_q, tiles_m, p.scale)
    return PreparedKernel(source, grid, values)
