"""Turn a plan of ``backward_gluon_sm90`` into its three kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...gpu.signature import (
    Argument,
    Descriptor,
    Pointer,
    PreparedKernel,
    Scalar,
    kernel_source,
    prepare_kernel,
    scalars,
)
from ..forward.prepare import in_units
from ..kernel_arguments import HopperBackwardCall
from ..problem import LOG2_E
from ..tiles import block_dim, cdiv
from .d192_gluon_sm90 import _backward_192_sm90_kernel
from .gluon_sm90 import _backward_sm90_kernel
from .plan import BackwardPlan
from .plan_sm90 import (
    CLEAR_WARPS,
    CLEARED,
    HOPPER_KEYS,
    HOPPER_PART,
    ORDER_WARPS,
    ORDERED,
    SINK_ROWS,
    SINK_WARPS,
    HopperBackwardConfig,
    hopper_backward_columns,
    hopper_backward_kernel,
    hopper_backward_launches,
    hopper_backward_tiles,
    hopper_wide_columns,
    is_wide,
    key_tiles,
    query_tiles,
)
from .prepass_triton import (
    _clear_kernel,
    _finish_dq_kernel,
    _order_key_tiles_kernel,
    _prepare_backward_kernel,
    _sinks_gradient_kernel,
)
from .primitives_sm90 import FAR
from .problem import BackwardProblem
from .wide_gluon_sm90 import _backward_wide_sm90_kernel

_KERNELS = {
    kernel.__name__: kernel for kernel in (_backward_sm90_kernel, _backward_192_sm90_kernel, _backward_wide_sm90_kernel)
}
# What a call allocates for its kernels; the first sets the semaphores to 0. These are int32, the others fp32.
INTEGERS = ("dq_semaphore", "sequences")
_FIELDS = 7  # that ``_order_key_tiles_kernel`` stores of a sequence
Grid = tuple[int, int, int]
_LONG_AXIS = 2**31 - 2**16
_LINE = 32  # numbers in 128 bytes, as TMA takes them from swizzled shared memory
_UNIT = 8  # elements in 16 bytes: strides are multiples of it, and passed so that the compiler knows


Tokens = tuple[int, int]  # of q and of k, in a call with packed sequences


def scratch_sizes(
    problem: BackwardProblem, config: HopperBackwardConfig, tokens: Tokens | None = None
) -> dict[str, int]:
    """Return the elements of 4 bytes that a call allocates, by name: those of ``INTEGERS`` int32, the others fp32."""
    tiles = query_tiles(problem, config, tokens)
    columns, columns_v = hopper_backward_columns(problem)
    sums = tiles * config.block_m
    more = {"sequences": _FIELDS * problem.forward.batch} if problem.forward.packed else {}
    if config.shares > 1:
        more["shares"] = key_tiles(problem, config, tokens) * config.keys * (columns + columns_v)
    semaphores = tiles * _semaphores(problem, config, tokens) + 1
    return {"stats": 2 * sums, "acc": sums * columns, "dq_semaphore": semaphores, **more}


def _semaphores(problem: BackwardProblem, config: HopperBackwardConfig, tokens: Tokens | None) -> int:
    """Return how many numbers are set to 0 for each query tile, a power of two.

    Where programs share heads, each key tile has a counter too. Usually there are fewer of them than query tiles.
    """
    if config.shares == 1:
        return config.writers
    counters = cdiv(key_tiles(problem, config, tokens), query_tiles(problem, config, tokens))
    return 1 << counters.bit_length()


def prepare_hopper_backward(plan: BackwardPlan, tokens: Tokens | None = None) -> tuple[PreparedKernel, ...]:
    """Return the kernels in the order in which they are launched.

    ``tokens`` are those of a call with packed sequences; left out, all are the longest.
    """
    problem, config = plan.problem, plan.config
    assert isinstance(config, HopperBackwardConfig)
    p = problem.forward
    if p.packed and tokens is None:
        tokens = p.batch * p.seqlen_q, p.batch * p.seqlen_k
    makers: list[Callable[..., PreparedKernel]] = [_prepare, _main, _finish]
    if p.packed:
        makers = [_order, *([] if p.seqused else [_clear]), *makers]
    if problem.wants_sinks:
        makers.append(_sinks_gradient)
    grids = [launch.grid for launch in hopper_backward_launches(problem, config, tokens)]
    return tuple(make(problem, config, grid, tokens) for make, grid in zip(makers, grids, strict=True))


def _lengths(problem: BackwardProblem, *sides: str) -> dict[str, Argument]:
    """Return the pointers to the lengths of packed sequences, which a kernel is compiled without if there are none."""
    p = problem.forward
    given: dict[str, Argument] = {}
    for side in sides:
        given[f"cu_seqlens_{side}_ptr"] = Pointer("i32") if p.packed else None
        given[f"seqused_{side}_ptr"] = Pointer("i32") if side in p.seqused else None
    return given


def _batch(problem: BackwardProblem) -> Scalar | None:
    return Scalar("i32", problem.forward.batch) if problem.forward.packed else None


def _slopes(problem: BackwardProblem) -> dict[str, Argument]:
    """Return the slopes of ALiBi, which a kernel is compiled without if there are none."""
    p = problem.forward
    stride = Scalar("i32", p.alibi_stride) if p.alibi else None
    return {"alibi_ptr": Pointer(p.alibi) if p.alibi else None, "alibi_stride": stride}


def _order(
    problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, _tokens: Tokens | None
) -> PreparedKernel:
    p = problem.forward
    arguments: dict[str, Argument] = {
        "sequences_ptr": Pointer("i32", aligned=True),
        **_lengths(problem, "q", "k"),
        **scalars("i32", batch=p.batch, heads_kv=p.heads_kv * config.shares, window_left=max(0, p.window[0])),
    }
    constants = {
        "BOUND_LEFT": p.bounded_left, "BLOCK_M": config.block_m, "KEYS": config.keys, "BLOCK_B": ORDERED,
    }  # fmt: skip
    source = kernel_source(_order_key_tiles_kernel, arguments, constants, num_warps=ORDER_WARPS)
    return prepare_kernel(source, grid, arguments)


def _clear(problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, tokens: Tokens | None) -> PreparedKernel:
    p = problem.forward
    assert tokens is not None
    arguments: dict[str, Argument] = {
        **{f"d{name}_ptr": Pointer(p.dtype, aligned=True) for name in "qkv"},
        "cu_seqlens_q_ptr": Pointer("i32"),
        "cu_seqlens_k_ptr": Pointer("i32"),
        **scalars(
            "i32",
            batch=p.batch,
            tokens_q=tokens[0],
            tokens_k=tokens[1],
            columns_q=p.heads * p.head_dim,
            columns_k=p.heads_kv * p.head_dim,
            columns_v=p.heads_kv * p.head_dim_v,
            window_left=max(0, p.window[0]),
        ),
    }
    constants = {"BOUND_LEFT": p.bounded_left, "KEYS": config.keys, "BLOCK_T": CLEARED}
    source = kernel_source(_clear_kernel, arguments, constants, num_warps=CLEAR_WARPS)
    return prepare_kernel(source, grid, arguments)


def _prepare(
    problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, tokens: Tokens | None
) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config, tokens)
    ob, oh, dob, doh = in_units((*problem.o_strides[:2], *problem.do_strides[:2]), _UNIT)
    arguments: dict[str, Argument] = {
        "o_ptr": Pointer(p.dtype, aligned=True),
        "do_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32"),  # where autograd keeps it, as the gradient below
        "dlse_ptr": Pointer("fp32"),
        "stats_ptr": Pointer("fp32", aligned=True),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        **_lengths(problem, "q"),
        **_slopes(problem),
        **scalars("i64", stride_ob=ob, stride_oh=oh, stride_dob=dob, stride_doh=doh),
        **scalars("i32", "sizes", heads=p.heads, seqlen_q=p.seqlen_q, tiles_m=tiles_m),
        "batch": _batch(problem),
    }
    constants = {
        "STRIDE_OM": problem.o_strides[2],
        "STRIDE_DOM": problem.do_strides[2],
        "UNIT": _UNIT,
        "DV": p.head_dim_v,
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": config.block_m,
        "WRITERS": _semaphores(problem, config, tokens),
        "HAS_DLSE": problem.has_dlse,
    }
    source = kernel_source(_prepare_backward_kernel, arguments, constants, num_warps=config.prepare_warps)
    return prepare_kernel(source, grid, arguments)


def _main(problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, tokens: Tokens | None) -> PreparedKernel:
    p = problem.forward
    kernel = _KERNELS[hopper_backward_kernel(problem)]
    tiles_m, tiles_n = hopper_backward_tiles(problem, config, tokens)
    left, right = (max(0, reach) for reach in p.window)
    seqlen_q, seqlen_k = tokens or (p.seqlen_q, p.seqlen_k)
    heads_kv = p.heads_kv * config.shares
    heads_total = heads_kv if p.packed else p.batch * heads_kv
    arguments: dict[str, Argument] = {
        **_descriptors(problem, config, kernel, tokens),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        "sequences_ptr": Pointer("i32", aligned=True) if p.packed else None,
        "batch": _batch(problem),
        **scalars(
            "i32",
            "sizes",
            heads=p.heads,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            heads_total=heads_total,
            heads_per_group=min(config.heads_per_group, heads_total),
        ),
        **scalars("i32", "window", left=left, right=right),
        "scale_log2": Scalar("fp32", p.softcap * LOG2_E if p.softcap else p.scale_log2),
        "scale": Scalar("fp32", p.scale),
        "cap_scale": Scalar("fp32", p.scale / p.softcap) if p.softcap else None,
        **_slopes(problem),
    }
    constants: dict[str, Any] = {
        "CALL": HopperBackwardCall(
            GROUP=p.group // config.shares,
            TOGETHER=config.heads_together,
            BOUND_LEFT=p.bounded_left,
            BOUND_RIGHT=p.bounded_right,
            SEES_AHEAD=bool(p.alibi) and not (p.bounded_right and right == 0),
        ),
        "MATRIX_REGISTERS": 240,
    }
    if kernel is _backward_wide_sm90_kernel:
        constants["COLUMNS"] = hopper_wide_columns(problem)
    elif kernel is _backward_sm90_kernel:
        arguments["shares.shares_ptr"] = Pointer("fp32", aligned=True) if config.shares > 1 else None
        constants |= {"WARPGROUPS": config.warpgroups, "STAGES": config.num_stages, "V_COLUMNS": config.v_columns}
        constants["shares.COUNT"] = config.shares
    source = kernel_source(kernel, arguments, constants, num_warps=4, dependent_launch=config.dependent_launch)
    return prepare_kernel(source, grid, arguments)


def _descriptors(
    problem: BackwardProblem, config: HopperBackwardConfig, kernel: Any, tokens: Tokens | None
) -> dict[str, Argument]:
    """Return the tensors that TMA copies, and the second parts of those whose columns lie in two."""
    p, kind, m = problem.forward, problem.forward.dtype, config.block_m
    dq_columns, dv = hopper_backward_columns(problem)
    columns = hopper_wide_columns(problem) if is_wide(problem) else dq_columns
    d, d_more = (128, 64) if columns == 192 else (columns, 0)  # a box outside of a tensor slows TMA down
    rows, keys, lines = (1, 1, m), (1, 1, HOPPER_KEYS), m * 64 // _LINE  # lines of 64 columns of dQ
    q_shape, kv_shape = (p.batch, p.heads, p.seqlen_q), (p.batch, p.heads_kv, p.seqlen_k)
    scratch = scratch_sizes(problem, config, tokens)
    stats, acc = (scratch["stats"],), (scratch["acc"] // _LINE, _LINE)

    def tiled(name: str, box: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> Descriptor:
        if p.packed:
            (box, shape, strides) = (1, *box), *_ragged(shape[1], shape[3], strides)
        return Descriptor(kind, box, shape, strides, name)

    found: dict[str, Argument] = {
        "q_desc": tiled("q", (*rows, d), (*q_shape, p.head_dim), p.q_strides),
        "k_desc": tiled("k", (*keys, d), (*kv_shape, p.head_dim), p.k_strides),
        "v_desc": tiled("v", (*keys, dv), (*kv_shape, p.head_dim_v), p.v_strides),
        "do_desc": tiled("do", (*rows, dv), (*q_shape, p.head_dim_v), problem.do_strides),
        "dk_desc": tiled("dk", (*keys, d), (*kv_shape, p.head_dim), problem.dk_strides),
        "dv_desc": tiled("dv", (*keys, dv), (*kv_shape, p.head_dim_v), problem.dv_strides),
        "stats_desc": Descriptor("fp32", (2 * m,), stats, (1,), "stats"),
        "dq_desc": Descriptor(
            "fp32", (min(2, dq_columns // 64 // config.writers) * lines, _LINE), acc, (_LINE, 1), "acc"
        ),
    }
    if kernel is _backward_sm90_kernel:
        return found
    for name in ("q", "k", "dk"):
        first = found[f"{name}_desc"]
        assert isinstance(first, Descriptor)
        more = replace(first, tile=(*first.tile[:-1], d_more), same_as=f"{name}_desc") if d_more else None
        found[f"{name}_more_desc"] = more
    if kernel is _backward_192_sm90_kernel:
        found["dq_more_desc"] = Descriptor("fp32", (lines, _LINE), acc, (_LINE, 1), "acc", same_as="dq_desc")
    return found


def _ragged(heads: int, columns: int, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a map of packed sequences: see ``primitives_sm90``, and the elements have 2 bytes."""
    _, head, token, column = strides
    # One head is given a second, which nobody reads: an axis of one would get the stride of all before it.
    shape = (_LONG_AXIS, _LONG_AXIS, max(2, heads), FAR.value, columns)
    return shape, (2**64 // FAR.value - token, token, head if heads > 1 else columns, token, column)


def _finish(
    problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, tokens: Tokens | None
) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config, tokens)
    stride_b, stride_h = in_units(problem.dq_strides[:2], _UNIT)
    arguments: dict[str, Argument] = {
        "acc_ptr": Pointer("fp32", aligned=True),
        "dq_semaphore_ptr": Pointer("i32", aligned=True),
        "dq_ptr": Pointer(p.dtype, aligned=True),
        **_lengths(problem, "q"),
        **scalars("i64", stride_b=stride_b, stride_h=stride_h),
        **scalars("i32", heads=p.heads, seqlen_q=p.seqlen_q, tiles_m=tiles_m),
        "scale": Scalar("fp32", p.scale),
        "batch": _batch(problem),
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


def _sinks_gradient(
    problem: BackwardProblem, config: HopperBackwardConfig, grid: Grid, tokens: Tokens | None
) -> PreparedKernel:
    p = problem.forward
    tiles_m, _ = hopper_backward_tiles(problem, config, tokens)
    beside, of_head = (1, tiles_m) if p.packed else (tiles_m, p.batch * tiles_m)
    arguments: dict[str, Argument] = {
        "stats_ptr": Pointer("fp32", aligned=True),
        "sinks_ptr": Pointer(p.sinks),
        "dsinks_ptr": Pointer(p.sinks),
        **scalars("i32", heads=p.heads, tiles_m=beside, tiles=of_head),
    }
    constants = {"BLOCK_M": config.block_m, "BLOCK_T": SINK_ROWS // config.block_m}
    source = kernel_source(_sinks_gradient_kernel, arguments, constants, num_warps=SINK_WARPS)
    return prepare_kernel(source, grid, arguments)
