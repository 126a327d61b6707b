"""Turn a plan of ``backward_gluon_sm90`` into its three kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...gpu.signature import Argument, Descriptor, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from ..forward.prepare import each, in_units
from ..tiles import block_dim
from .d192_gluon_sm90 import _backward_192_sm90_kernel
from .gluon_sm90 import _backward_sm90_kernel
from .plan import BackwardPlan
from .plan_sm90 import (
    HOPPER_KEYS,
    HOPPER_PART,
    HopperBackwardConfig,
    hopper_backward_columns,
    hopper_backward_kernel,
    hopper_backward_tiles,
    hopper_wide_columns,
    is_wide,
)
from .prepass_triton import _finish_dq_kernel, _prepare_backward_kernel
from .problem import BackwardProblem
from .wide_gluon_sm90 import _backward_wide_sm90_kernel

_KERNELS = {
    kernel.__name__: kernel for kernel in (_backward_sm90_kernel, _backward_192_sm90_kernel, _backward_wide_sm90_kernel)
}
# The tensors of each kernel, in the order of its arguments. ``stats``, ``acc`` and ``dq_semaphore`` belong to one call.
# The first kernel sets the semaphores to 0.
HOPPER_TENSORS = (
    ("o", "do", "lse", "dlse", "stats", "dq_semaphore"),
    ("q", "k", "v", "do", "dk", "dv", "stats", "acc", "dq_semaphore"),
    ("acc", "dq_semaphore", "dq"),
)
_LINE = 32  # numbers in 128 bytes, as TMA takes them from swizzled shared memory
_UNIT = 8  # elements in 16 bytes: strides are multiples of it, and passed so that the compiler knows


def scratch_sizes(problem: BackwardProblem, config: HopperBackwardConfig) -> dict[str, int]:
    """Return the elements of 4 bytes that a call allocates, by name: ``dq_semaphore`` is int32, the others fp32."""
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


def _prepare(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config)
    strides = in_units((*problem.o_strides[:2], *problem.do_strides[:2]), _UNIT)
    arguments: dict[str, Argument] = {
        "o_ptr": Pointer(p.dtype, aligned=True),
        "do_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32"),  # where autograd keeps it, as the gradient below
        "dlse_ptr": Pointer("fp32"),
        "stats_ptr": Pointer("fp32", aligned=True),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        **each("i64", ("stride_ob", "stride_oh", "stride_dob", "stride_doh"), strides),
        **each("i32", ("heads", "seqlen_q", "tiles_m"), (p.heads, p.seqlen_q, tiles_m)),
    }
    constants = {
        "STRIDE_OM": problem.o_strides[2],
        "STRIDE_DOM": problem.do_strides[2],
        "UNIT": _UNIT,
        "DV": p.head_dim_v,
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": config.block_m,
        "WRITERS": config.writers,
        "HAS_DLSE": problem.has_dlse,
    }
    source = kernel_source(_prepare_backward_kernel, arguments, constants, num_warps=config.prepare_warps)
    return prepare_kernel(source, grid, arguments)


def _main(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    kernel = _KERNELS[hopper_backward_kernel(problem)]
    tiles_m, tiles_n = hopper_backward_tiles(problem, config)
    left, right = (max(0, reach) for reach in p.window)
    integers = {
        "heads": p.heads,
        "heads_kv": p.heads_kv,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "heads_total": p.batch * p.heads_kv,
        "heads_per_group": min(config.heads_per_group, p.batch * p.heads_kv),
        "window_left": left,
        "window_right": right,
    }
    arguments: dict[str, Argument] = {
        **_descriptors(problem, config, kernel),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        **{name: Scalar("i32", value) for name, value in integers.items()},
        "scale_log2": Scalar("fp32", p.scale_log2),
        "scale": Scalar("fp32", p.scale),
    }
    constants: dict[str, Any] = {
        "GROUP": p.group,
        "TOGETHER": config.heads_together,
        "BOUND_LEFT": p.bounded_left,
        "BOUND_RIGHT": p.bounded_right,
        "MATRIX_REGISTERS": 240,
    }
    if kernel is _backward_wide_sm90_kernel:
        constants["COLUMNS"] = hopper_wide_columns(problem)
    elif kernel is _backward_sm90_kernel:
        constants |= {"WARPGROUPS": config.warpgroups, "STAGES": config.num_stages, "V_COLUMNS": config.v_columns}
    source = kernel_source(kernel, arguments, constants, num_warps=4, dependent_launch=config.dependent_launch)
    return prepare_kernel(source, grid, arguments)


def _descriptors(problem: BackwardProblem, config: HopperBackwardConfig, kernel: Any) -> dict[str, Argument]:
    """Return the tensors that TMA copies, and the second parts of those whose columns lie in two."""
    p, kind, m = problem.forward, problem.forward.dtype, config.block_m
    dq_columns, dv = hopper_backward_columns(problem)
    columns = hopper_wide_columns(problem) if is_wide(problem) else dq_columns
    d, d_more = (128, 64) if columns == 192 else (columns, 0)  # a box outside of a tensor slows TMA down
    rows, keys, lines = (1, 1, m), (1, 1, HOPPER_KEYS), m * 64 // _LINE  # lines of 64 columns of dQ
    q_shape, kv_shape = (p.batch, p.heads, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
    scratch = scratch_sizes(problem, config)
    stats, acc = (scratch["stats"],), (scratch["acc"] // _LINE, _LINE)
    found: dict[str, Argument] = {
        "q_desc": Descriptor(kind, (*rows, d), (*q_shape, p.head_dim), p.q_strides, "q"),
        "k_desc": Descriptor(kind, (*keys, d), (*kv_shape, p.head_dim), p.k_strides, "k"),
        "v_desc": Descriptor(kind, (*keys, dv), (*kv_shape, p.head_dim_v), p.v_strides, "v"),
        "do_desc": Descriptor(kind, (*rows, dv), (*q_shape, p.head_dim_v), problem.do_strides, "do"),
        "dk_desc": Descriptor(kind, (*keys, d), (*kv_shape, p.head_dim), problem.dk_strides, "dk"),
        "dv_desc": Descriptor(kind, (*keys, dv), (*kv_shape, p.head_dim_v), problem.dv_strides, "dv"),
        "stats_desc": Descriptor("fp32", (2 * m,), stats, (1,), "stats"),
        "dq_desc": Descriptor(
            "fp32", (min(2, dq_columns // 64 // config.writers) * lines, _LINE), acc, (_LINE, 1), "acc"
        ),
    }
    if kernel is _backward_sm90_kernel:
        return found
    for name, box in (("q", rows), ("k", keys), ("dk", keys)):
        first = found[f"{name}_desc"]
        assert isinstance(first, Descriptor)
        more = replace(first, tile=(*box, d_more), same_as=f"{name}_desc") if d_more else None
        found[f"{name}_more_desc"] = more
    if kernel is _backward_192_sm90_kernel:
        found["dq_more_desc"] = Descriptor("fp32", (lines, _LINE), acc, (_LINE, 1), "acc", same_as="dq_desc")
    return found


def _finish(problem: BackwardProblem, config: HopperBackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config)
    arguments: dict[str, Argument] = {
        "acc_ptr": Pointer("fp32", aligned=True),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        "dq_ptr": Pointer(p.dtype, aligned=True),
        **each("i64", ("stride_b", "stride_h"), in_units(problem.dq_strides[:2], _UNIT)),
        **each("i32", ("heads", "seqlen_q", "tiles_m"), (p.heads, p.seqlen_q, tiles_m)),
        "scale": Scalar("fp32", p.scale),
    }
    constants = {
        "STRIDE_M": problem.dq_strides[2],
        "UNIT": _UNIT,
        "D": p.head_dim,
        "BLOCK_M": config.block_m,
        "PARTS": config.block_m * hopper_backward_columns(problem)[0] // HOPPER_PART,
        "WRITERS": config.writers,
    }
    source = kernel_source(
        _finish_dq_kernel, arguments, constants, num_warps=config.finish_warps,
        dependent_launch=config.dependent_launch,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)
