"""Turn a plan into kernels to compile and launches to make: what each kernel is given, and in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..gpu.compile import KernelSource
from ..gpu.tensor_map import TensorMap
from .features_plan import FEATURES_KERNEL
from .features_prepare import prepare_features
from .forward_gluon_sm90 import _forward_sm90_kernel
from .forward_short_gluon import _forward_short_kernel
from .forward_triton import _forward_kernel
from .hopper_plan import (
    HOPPER_REGISTERS,
    hopper_edge_tiles,
    hopper_heads_per_group,
    hopper_is_aligned,
    hopper_tiles_m,
)
from .merge_triton import _merge_partials_kernel
from .prepared import PreparedKernel, hopper_tiles
from .problem import ITEM_BYTES, LOG2_E, AttentionProblem
from .short_plan import short_alignment
from .tiles import ForwardConfig, HopperConfig, Plan, ShortConfig, block_dim
from .triton_plan import MERGE_ROWS, MERGE_WARPS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# All that a thread can have. Left to itself, ptxas spills a few bytes to fit one more block of a small tile on an SM,
# and small tiles are chosen where there are no such blocks.
_MAX_REGISTERS = 255


def alignment(problem: AttentionProblem) -> int:
    """Return the largest power of two, up to 16 bytes, of which every row of q, k and v is a multiple, in elements."""
    bytes_ = problem.pointer_alignment
    for strides in (problem.q_strides, problem.k_strides, problem.v_strides):
        for stride in strides[:3]:
            bytes_ = math.gcd(bytes_, stride * problem.item_bytes)
    return max(1, bytes_ // problem.item_bytes)


def output_alignment(problem: AttentionProblem) -> int:
    """Return the largest power of two, up to 8, of which every row of o is a multiple, in elements."""
    return math.gcd(8, problem.head_dim_v)


def _aligned(problem: AttentionProblem) -> frozenset[str]:
    """Outputs and partials are ours and always aligned; inputs as they come."""
    inputs = ("q_ptr", "k_ptr", "v_ptr") if problem.pointer_alignment >= 16 else ()
    bias = ("bias_ptr",) if problem.bias and problem.bias_alignment >= 16 else ()
    return frozenset((*inputs, *bias, "o_ptr", "lse_ptr", "o_part_ptr", "lse_part_ptr"))


def _in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return strides in units of ``unit`` elements: the kernel multiplies by it, so the compiler knows it divides."""
    assert all(stride % unit == 0 for stride in strides), (strides, unit)
    return tuple(stride // unit for stride in strides)


def _head_strides(problem: AttentionProblem, align: int) -> tuple[int, ...]:
    return _in_units((*problem.q_strides[:2], *problem.k_strides[:2], *problem.v_strides[:2]), align)


def prepare_kernels(plan: Plan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    if isinstance(plan.config, ShortConfig):
        return (_short(plan, plan.config),)
    if plan.kernel == FEATURES_KERNEL:
        return prepare_features(plan)
    if isinstance(plan.config, HopperConfig):
        return (_hopper(plan, plan.config),)
    if isinstance(plan.config, ForwardConfig):
        forward = _forward(plan, plan.config)
        return (forward, _merge(plan, plan.config)) if plan.config.num_splits > 1 else (forward,)
    return ()


def _short(plan: Plan, config: ShortConfig) -> PreparedKernel:
    problem = plan.problem
    align = min(short_alignment(problem.head_dim), short_alignment(problem.head_dim_v))
    kind = problem.dtype
    scalars = {
        **dict.fromkeys(("stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh"), "i64"),
        **dict.fromkeys(("stride_ob", "stride_oh"), "i64"),
        **dict.fromkeys(("seqlen_q", "seqlen_k"), "i32"),
        "scale_log2": "fp32",
    }
    constants = {
        "STRIDE_QM": problem.q_strides[2],
        "STRIDE_KN": problem.k_strides[2],
        "STRIDE_VN": problem.v_strides[2],
        "STRIDE_OM": problem.output_strides[2],
        "ALIGN": align,
        "ALIGN_O": output_alignment(problem),
        "GROUP": problem.group,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KEY_GROUPS": config.key_groups,
        "MASK_M": problem.seqlen_q % config.block_m != 0,
        "MASK_N": problem.seqlen_k != config.block_n * config.key_groups,
        "IS_CAUSAL": problem.causal,
        "STORE_LSE": problem.return_lse,
        "DEPENDENT_LAUNCH": plan.arch >= 90,
        "num_warps": config.num_warps,
    }
    pointers = {"q_ptr": f"*{kind}", "k_ptr": f"*{kind}", "v_ptr": f"*{kind}", "o_ptr": f"*{kind}", "lse_ptr": "*fp32"}
    source = KernelSource(
        _forward_short_kernel,
        tuple({**pointers, **scalars}.items()),
        tuple(constants.items()),
        _aligned(problem),
        config.num_warps,
        dependent_launch=plan.arch >= 90,
    )
    values = (
        *_head_strides(problem, align),
        *_in_units(problem.output_strides[:2], output_alignment(problem)),
        problem.seqlen_q,
        problem.seqlen_k,
        problem.scale_log2,
    )
    return PreparedKernel(source, plan.launches[0].grid, values)


def _hopper(plan: Plan, config: HopperConfig) -> PreparedKernel:
    problem = plan.problem
    kind = problem.dtype
    tiles = hopper_tiles(problem, config)
    scalars = {
        **dict.fromkeys(("heads", "seqlen_q", "seqlen_k", "tiles_m", "heads_total", "heads_per_group"), "i32"),
        "scale_log2": "fp32",
    }
    constants = {
        "GROUP": problem.group,
        "PACK": config.pack,
        "WARPGROUPS": config.warpgroups,
        "STAGES": config.num_stages,
        "IS_CAUSAL": problem.causal,
        "EDGE_TILES": hopper_edge_tiles(problem, config),
        "IS_ALIGNED": hopper_is_aligned(problem, config),
        "PING_PONG": config.ping_pong,
        "STORE_LSE": problem.return_lse,
        "MATRIX_REGISTERS": HOPPER_REGISTERS[config.warpgroups],
        **tiles.constants,
    }
    source = KernelSource(
        _forward_sm90_kernel,
        tuple({**tiles.descriptors, "lse_ptr": "*fp32", "counter_ptr": "*i32", **tiles.more, **scalars}.items()),
        tuple(constants.items()),
        frozenset(("lse_ptr",)),
        num_warps=4,
        dependent_launch=True,
    )
    heads = problem.heads // config.pack
    values = (
        heads,
        problem.seqlen_q,
        problem.seqlen_k,
        hopper_tiles_m(problem, config),
        problem.batch * heads,
        hopper_heads_per_group(problem, config),
        problem.scale_log2,
    )
    q_shape = (problem.batch, problem.heads, problem.seqlen_q)
    kv_shape = (problem.batch, problem.heads_kv, problem.seqlen_k)
    inputs = (
        TensorMap(kind, (*q_shape, problem.head_dim), problem.q_strides),
        TensorMap(kind, (*kv_shape, problem.head_dim), problem.k_strides),
        TensorMap(kind, (*kv_shape, problem.head_dim_v), problem.v_strides),
    )
    output = TensorMap(kind, (*q_shape, problem.head_dim_v), problem.output_strides)
    return PreparedKernel(source, plan.launches[0].grid, values, tiles.maps((*inputs, output)))


def bias_alignment(problem: AttentionProblem) -> int:
    """Return the largest power of two, up to 16 bytes, of which every row of the bias is a multiple, in elements."""
    item_bytes = ITEM_BYTES[problem.bias]
    bytes_ = math.gcd(problem.bias_alignment, *(stride * item_bytes for stride in problem.bias_strides[:3]))
    return max(1, bytes_ // item_bytes)


def _forward(plan: Plan, config: ForwardConfig) -> PreparedKernel:
    problem = plan.problem
    align = alignment(problem)
    split = config.num_splits > 1
    kind = problem.dtype
    partial = problem.rows * problem.head_dim_v  # elements of one share's output
    # Partial results are dense [SPLITS, B, H, Sq, DV].
    o_strides = (
        (partial // problem.batch, problem.seqlen_q * problem.head_dim_v, problem.head_dim_v)
        if split
        else problem.output_strides
    )
    rows_of = (problem.q_strides, problem.k_strides, problem.v_strides, o_strides, problem.bias_strides[1:])
    widest_row = max(abs(s) for strides in rows_of for s in strides[2:])
    out = "fp32" if split else kind
    asked = _features(problem)
    arguments = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{kind}"),
        "o_ptr": f"*{out}",
        "lse_ptr": "*fp32",
        **{name: argument.kind for name, argument in asked.items() if argument.kind.startswith("*")},
        **dict.fromkeys(("stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh"), "i64"),
        **dict.fromkeys(("stride_ob", "stride_oh"), "i64"),
        **dict.fromkeys(("batch", "heads", "seqlen_q", "seqlen_k", "tiles_m"), "i32"),
        "scale": "fp32",
        **{name: argument.kind for name, argument in asked.items() if argument.kind in ("i32", "fp32", "i64")},
    }
    tiles = -(-problem.seqlen_q // config.block_m)
    unseen_rows = problem.seqlen_q > problem.seqlen_k + max(0, problem.window[1]) or problem.packed
    constants = {
        "STRIDE_QM": problem.q_strides[2],
        "STRIDE_QD": problem.q_strides[3],
        "STRIDE_KN": problem.k_strides[2],
        "STRIDE_KD": problem.k_strides[3],
        "STRIDE_VN": problem.v_strides[2],
        "STRIDE_VD": problem.v_strides[3],
        "STRIDE_OM": o_strides[2],
        "STRIDE_ALIBI_B": problem.alibi_stride,
        "STRIDE_BIAS_N": problem.bias_strides[3] if problem.bias else 0,
        "ALIGN": align,
        "ALIGN_O": output_alignment(problem),
        "ALIGN_BIAS": bias_alignment(problem) if problem.bias else 1,
        "GROUP": problem.group,
        "SPLITS": config.num_splits,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BOUND_LEFT": problem.bounded_left,
        "BOUND_RIGHT": problem.bounded_right,
        # A tile can hide all its keys from a row: the first rows where there are fewer keys, a share behind the
        # diagonal, a window, or a bias of -inf.
        "EMPTY_ROWS": bool((problem.bounded_right and (unseen_rows or split)) or problem.bounded_left or problem.bias),
        "WIDE": max(config.block_m, config.block_n, 256) * widest_row >= 2**31,
        "STORE_LSE": problem.return_lse or split,
        "PAGE_SIZE": problem.page_size,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",  # only fp32 operands read it
        "NUM_STAGES": config.num_stages,
        **{name: argument.value for name, argument in asked.items() if argument.kind == "constant"},
    }
    source = KernelSource(
        _forward_kernel,
        tuple(arguments.items()),
        tuple(constants.items()),
        _aligned(problem),
        config.num_warps,
        config.num_stages,
        max_registers=_MAX_REGISTERS,
    )
    values = (
        *_head_strides(problem, align),
        *_in_units(o_strides[:2], output_alignment(problem)),
        problem.batch,
        problem.heads,
        problem.seqlen_q,
        problem.seqlen_k,
        tiles,
        _forward_scale(problem),
        *(argument.value for argument in asked.values() if argument.kind in ("i32", "fp32", "i64")),
    )
    return PreparedKernel(source, plan.launches[0].grid, values)


@dataclass(frozen=True)
class _Argument:
    """One argument of ``_forward_kernel`` that a feature needs: a type and, but for pointers, a value."""

    kind: str  # of Triton; "constant" for what the call does not ask for
    value: Any = None


_ABSENT = _Argument("constant")


def _forward_scale(problem: AttentionProblem) -> float:
    if problem.softcap:  # as ``cap_scores`` takes it
        return problem.scale / problem.softcap if problem.dtype == "fp32" else problem.softcap_scale
    return problem.scale if problem.bias else problem.scale_log2


def _features(problem: AttentionProblem) -> dict[str, _Argument]:
    """Return what features add to ``_forward_kernel``, in the order of its arguments."""
    p = problem
    left, right = p.window
    bias_strides = _in_units(p.bias_strides[:3], bias_alignment(p)) if p.bias else ()
    unit = 1.0 if p.bias else LOG2_E  # the kernel's scores are to base e with a bias, else to base 2
    return {
        "sinks_ptr": _Argument(f"*{p.sinks}") if p.sinks else _ABSENT,
        "alibi_ptr": _Argument(f"*{p.alibi}") if p.alibi else _ABSENT,
        "bias_ptr": _Argument(f"*{p.bias}") if p.bias else _ABSENT,
        "cu_seqlens_q_ptr": _Argument("*i32") if p.packed else _ABSENT,
        "cu_seqlens_k_ptr": _Argument("*i32") if p.packed else _ABSENT,
        "seqused_q_ptr": _Argument("*i32") if "q" in p.seqused else _ABSENT,
        "seqused_k_ptr": _Argument("*i32") if "k" in p.seqused else _ABSENT,
        "page_table_ptr": _Argument("*i32") if p.page_size else _ABSENT,
        "dropout_seed_ptr": _Argument("*i64") if p.dropout_p else _ABSENT,
        "window_left": _Argument("i32", left) if left >= 0 else _Argument("constant", 0),
        "window_right": _Argument("i32", right) if right >= 0 else _Argument("constant", 0),
        "softcap": _Argument("fp32", p.softcap * unit) if p.softcap else _ABSENT,
        **{
            f"stride_bias_{axis}": _Argument("i64", bias_strides[i]) if p.bias else _Argument("constant", 0)
            for i, axis in enumerate("bhm")
        },
        "stride_table_b": _Argument("i64", p.table_stride) if p.page_size else _Argument("constant", 0),
        "dropout_last": _Argument("i32", dropout_last(p)) if p.dropout_p else _ABSENT,
        "dropout_scale": _Argument("fp32", p.dropout_scale) if p.dropout_p else _ABSENT,
    }


def dropout_last(problem: AttentionProblem) -> int:
    """Return the largest random number that drops a probability, as an int32 of the same bits as that uint32."""
    last = problem.dropout_threshold - 1
    return last - 2**32 if last >= 2**31 else last


def _merge(plan: Plan, config: ForwardConfig) -> PreparedKernel:
    problem = plan.problem
    pointers = {"o_part_ptr": "*fp32", "lse_part_ptr": "*fp32", "o_ptr": f"*{problem.dtype}", "lse_ptr": "*fp32"}
    scalars = {
        **dict.fromkeys(("stride_ob", "stride_oh", "rows_total"), "i64"),
        **dict.fromkeys(("heads", "seqlen_q", "tiles_m"), "i32"),
    }
    constants = {
        "ALIGN_O": output_alignment(problem),
        "STRIDE_OM": problem.output_strides[2],
        "SPLITS": config.num_splits,
        "DV": problem.head_dim_v,
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "BLOCK_M": MERGE_ROWS,
        "STORE_LSE": problem.return_lse,
    }
    source = KernelSource(
        _merge_partials_kernel,
        tuple({**pointers, **scalars}.items()),
        tuple(constants.items()),
        _aligned(problem),
        MERGE_WARPS,
    )
    tiles = -(-problem.seqlen_q // MERGE_ROWS)
    o_strides = _in_units(problem.output_strides[:2], output_alignment(problem))
    values = (*o_strides, problem.rows, problem.heads, problem.seqlen_q, tiles)
    return PreparedKernel(source, plan.launches[1].grid, values)


def interpret(kernel: PreparedKernel, tensors: tuple[Any, ...]) -> None:
    """Run one kernel in Triton's interpreter on CPU tensors (the process was started with TRITON_INTERPRET=1)."""
    pointers = [name for name, kind in kernel.source.signature if kind.startswith("*")]
    names = [name for name, kind in kernel.source.signature if not kind.startswith("*")]
    arguments = {
        **dict(zip(pointers, tensors, strict=True)),
        **dict(zip(names, kernel.scalars, strict=True)),
        **dict(kernel.source.constants),
    }
    kernel.source.function[kernel.grid](**grouped(kernel.source.function, arguments))
