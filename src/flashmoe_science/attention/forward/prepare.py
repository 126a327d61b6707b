"""Turn a plan into kernels to compile and launches to make: what each kernel is given, and in which order."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...gpu.compile import grouped
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
from ..kernel_arguments import ForwardCall, ForwardTile, ShortCall, ShortTile
from ..masks.plan import MASKED_HOPPER_KERNEL, MASKED_KERNEL
from ..masks.prepare import prepare_masked, prepare_masked_hopper
from ..problem import ITEM_BYTES, LOG2_E, AttentionProblem
from ..tiles import ForwardConfig, HopperConfig, Plan, ShortConfig, WideConfig, block_dim
from .gluon_sm90 import _forward_sm90_kernel
from .merge_triton import _merge_partials_kernel
from .plan_sm90 import (
    HOPPER_REGISTERS,
    HOPPER_ROWS,
    hopper_edge_tiles,
    hopper_heads_per_group,
    hopper_is_aligned,
    hopper_tiles_m,
)
from .prepared import hopper_tiles
from .short_gluon import _forward_short_kernel
from .short_plan import short_alignment
from .stream_triton import _forward_kernel
from .triton_plan import MERGE_ROWS, MERGE_WARPS
from .variants_plan import FEATURES_KERNEL
from .variants_prepare import prepare_features
from .wide_gluon_sm90 import HALF, KEYS, _forward_wide_sm90_kernel

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# All that a thread can have. Left to itself, ptxas spills a few bytes to fit one more block of a small tile on an SM,
# and small tiles are chosen where there are no such blocks.
MAX_REGISTERS = 255


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


def _inputs(problem: AttentionProblem) -> dict[str, Argument]:
    """Return the pointers of q, k and v: they are aligned where the caller's tensors are."""
    return {f"{name}_ptr": Pointer(problem.dtype, aligned=problem.pointer_alignment >= 16) for name in "qkv"}


def in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return strides in units of ``unit`` elements: the kernel multiplies by it, so the compiler knows it divides."""
    assert all(stride % unit == 0 for stride in strides), (strides, unit)
    return tuple(stride // unit for stride in strides)


def strides_of(name: str, strides: tuple[int, ...], unit: int) -> dict[str, Argument]:
    """Return the strides of sequences and heads of one tensor, in units of ``unit`` elements."""
    b, h = in_units(strides[:2], unit)
    return scalars("i64", name, b=b, h=h)


def row_strides(name: str, strides: tuple[int, ...]) -> dict[str, Any]:
    """Return the strides of rows and columns of one tensor, which are constants."""
    return {f"{name}.ROW": strides[2], f"{name}.COLUMN": strides[3]}


def prepare_kernels(plan: Plan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    if isinstance(plan.config, ShortConfig):
        return (_short(plan, plan.config),)
    if plan.kernel == FEATURES_KERNEL:
        return prepare_features(plan)
    if plan.kernel == MASKED_HOPPER_KERNEL and plan.launches:
        return (prepare_masked_hopper(plan),)
    if isinstance(plan.config, HopperConfig):
        return (_hopper(plan, plan.config),)
    if isinstance(plan.config, WideConfig):
        return (_wide(plan, plan.config),)
    if plan.kernel == MASKED_KERNEL and plan.launches:
        return (prepare_masked(plan, alignment(plan.problem)),)
    if isinstance(plan.config, ForwardConfig):
        forward = _forward(plan, plan.config)
        return (forward, _merge(plan, plan.config)) if plan.config.num_splits > 1 else (forward,)
    return ()


def _short(plan: Plan, config: ShortConfig) -> PreparedKernel:
    p = plan.problem
    align, align_o = min(short_alignment(p.head_dim), short_alignment(p.head_dim_v)), output_alignment(p)
    arguments: dict[str, Argument] = {
        **_inputs(p),
        "o_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True),
        **strides_of("q_strides", p.q_strides, align),
        **strides_of("k_strides", p.k_strides, align),
        **strides_of("v_strides", p.v_strides, align),
        **strides_of("o_strides", p.output_strides, align_o),
        **scalars("i32", seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k),
        "scale_log2": Scalar("fp32", p.scale_log2),
    }
    constants = {
        **row_strides("q_strides", p.q_strides),
        **row_strides("k_strides", p.k_strides),
        **row_strides("v_strides", p.v_strides),
        **row_strides("o_strides", p.output_strides),
        "CALL": ShortCall(
            GROUP=p.group,
            D=p.head_dim,
            DV=p.head_dim_v,
            ALIGN=align,
            ALIGN_O=align_o,
            MASK_M=p.seqlen_q % config.block_m != 0,
            MASK_N=p.seqlen_k != config.block_n * config.key_groups,
            IS_CAUSAL=p.causal,
            STORE_LSE=p.return_lse,
        ),
        "TILE": ShortTile(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            KEY_GROUPS=config.key_groups,
            BLOCK_D=block_dim(p.head_dim),
            BLOCK_DV=block_dim(p.head_dim_v),
        ),
        "num_warps": config.num_warps,
    }
    source = kernel_source(
        _forward_short_kernel, arguments, constants, num_warps=config.num_warps, dependent_launch=plan.arch >= 90
    )
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def _hopper(plan: Plan, config: HopperConfig) -> PreparedKernel:
    p = plan.problem
    heads = p.heads // config.pack
    tiles, tile = hopper_tiles(p, config)
    arguments: dict[str, Argument] = {
        **tiles,
        "lse_ptr": Pointer("fp32", aligned=True),
        "counter_ptr": Pointer("i32"),
        **scalars(
            "i32",
            "sizes",
            heads=heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=hopper_tiles_m(p, config),
            heads_total=p.batch * heads,
            heads_per_group=hopper_heads_per_group(p, config.pack),
        ),
        "scale_log2": Scalar("fp32", p.scale_log2),
    }
    constants = {
        "GROUP": p.group,
        "PACK": config.pack,
        "IS_CAUSAL": p.causal,
        "EDGE_TILES": hopper_edge_tiles(p, config),
        "IS_ALIGNED": hopper_is_aligned(p, config),
        "STORE_LSE": p.return_lse,
        "TILE": tile,
    }
    source = kernel_source(_forward_sm90_kernel, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def _wide(plan: Plan, config: WideConfig) -> PreparedKernel:
    p, align_o = plan.problem, output_alignment(plan.problem)
    rows, keys = (1, 1, HOPPER_ROWS, HALF.value), (1, 1, KEYS.value, HALF.value)
    kv = p.batch, p.heads_kv, p.seqlen_k
    arguments: dict[str, Argument] = {
        "q_desc": Descriptor(p.dtype, rows, (p.batch, p.heads, p.seqlen_q, p.head_dim), p.q_strides, "q"),
        "k_desc": Descriptor(p.dtype, keys, (*kv, p.head_dim), p.k_strides, "k"),
        "v_desc": Descriptor(p.dtype, keys, (*kv, p.head_dim_v), p.v_strides, "v"),
        "o_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True),
        **scalars("i64", "o_strides", **dict(zip("bhm", in_units(p.output_strides[:3], align_o), strict=True))),
        **scalars(
            "i32",
            "sizes",
            heads=p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=-(-p.seqlen_q // config.block_m),
            heads_total=p.batch * p.heads,
            heads_per_group=hopper_heads_per_group(p, 1),
        ),
        "scale_log2": Scalar("fp32", p.scale_log2),
    }
    constants = {
        "GROUP": p.group,
        "DV": p.head_dim_v,
        "ALIGN_O": align_o,
        "IS_CAUSAL": p.causal,
        "STORE_LSE": p.return_lse,
        "REGISTERS": HOPPER_REGISTERS[2],
    }
    source = kernel_source(_forward_wide_sm90_kernel, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def bias_alignment(problem: AttentionProblem) -> int:
    """Return the largest power of two, up to 16 bytes, of which every row of the bias is a multiple, in elements."""
    item_bytes = ITEM_BYTES[problem.bias]
    bytes_ = math.gcd(problem.bias_alignment, *(stride * item_bytes for stride in problem.bias_strides[:3]))
    return max(1, bytes_ // item_bytes)


def _forward(plan: Plan, config: ForwardConfig) -> PreparedKernel:
    p, split, align, align_o = (
        plan.problem,
        config.num_splits > 1,
        alignment(plan.problem),
        output_alignment(plan.problem),
    )
    of_share = p.rows * p.head_dim_v // p.batch if p.batch else 0
    # Partial results are dense [SPLITS, B, H, Sq, DV].
    o_strides = (of_share, p.seqlen_q * p.head_dim_v, p.head_dim_v) if split else p.output_strides
    rows_of = (p.q_strides, p.k_strides, p.v_strides, o_strides, p.bias_strides[1:])
    widest_row = max(abs(s) for strides in rows_of for s in strides[2:])
    unseen_rows = p.seqlen_q > p.seqlen_k + max(0, p.window[1]) or p.packed
    unit = 1.0 if p.bias else LOG2_E  # the kernel's scores are to base e with a bias, else to base 2
    arguments: dict[str, Argument] = {
        **_inputs(p),
        "o_ptr": Pointer("fp32" if split else p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True),
        **optional_pointers(p),
        **strides_of("q_strides", p.q_strides, align),
        **strides_of("k_strides", p.k_strides, align),
        **strides_of("v_strides", p.v_strides, align),
        **strides_of("o_strides", (*o_strides[:2],), align_o),
        **scalars(
            "i32",
            "sizes",
            batch=p.batch,
            heads=p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=-(-p.seqlen_q // config.block_m),
        ),
        "scale": Scalar("fp32", _forward_scale(p)),
        "softcap": Scalar("fp32", p.softcap * unit) if p.softcap else None,
        **dropout_arguments(p),
    }
    more, constants = bounds_and_bias(p)
    arguments |= more
    if p.page_size:
        arguments["stride_table_b"] = Scalar("i64", p.table_stride)
    else:
        constants["stride_table_b"] = 0
    constants |= {
        **row_strides("q_strides", p.q_strides),
        **row_strides("k_strides", p.k_strides),
        **row_strides("v_strides", p.v_strides),
        "o_strides.ROW": o_strides[2],
        "o_strides.COLUMN": 1,
        "CALL": ForwardCall(
            GROUP=p.group,
            D=p.head_dim,
            DV=p.head_dim_v,
            BLOCK_D=block_dim(p.head_dim),
            BLOCK_DV=block_dim(p.head_dim_v),
            ALIGN=align,
            ALIGN_O=align_o,
            ALIGN_BIAS=bias_alignment(p) if p.bias else 1,
            STRIDE_ALIBI_B=p.alibi_stride,
            BOUND_LEFT=p.bounded_left,
            BOUND_RIGHT=p.bounded_right,
            # A tile can hide all its keys from a row: the first rows where there are fewer keys, a share behind the
            # diagonal, a window, or a bias of -inf.
            EMPTY_ROWS=bool((p.bounded_right and (unseen_rows or split)) or p.bounded_left or p.bias),
            STORE_LSE=p.return_lse or split,
            PAGE_SIZE=p.page_size,
            PRECISION="ieee" if p.dtype == "fp32" else "tf32",  # only fp32 operands read it
        ),
        "TILE": ForwardTile(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SPLITS=config.num_splits,
            NUM_STAGES=config.num_stages,
            WIDE=max(config.block_m, config.block_n, 256) * widest_row >= 2**31,
        ),
    }
    source = kernel_source(
        _forward_kernel, arguments, constants, num_warps=config.num_warps, num_stages=config.num_stages,
        max_registers=MAX_REGISTERS,
    )  # fmt: skip
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def _forward_scale(problem: AttentionProblem) -> float:
    if problem.softcap:  # as ``cap_scores`` takes it
        return problem.scale / problem.softcap if problem.dtype == "fp32" else problem.softcap_scale
    return problem.scale if problem.bias else problem.scale_log2


def optional_pointers(problem: AttentionProblem) -> dict[str, Argument]:
    """Return the pointers of what a forward call may be without."""
    p = problem
    aligned = bool(p.bias) and p.bias_alignment >= 16
    return {
        "sinks_ptr": Pointer(p.sinks) if p.sinks else None,
        "alibi_ptr": Pointer(p.alibi) if p.alibi else None,
        "bias_ptr": Pointer(p.bias, aligned=aligned) if p.bias else None,
        "sequences.cu_seqlens_q_ptr": Pointer("i32") if p.packed else None,
        "sequences.cu_seqlens_k_ptr": Pointer("i32") if p.packed else None,
        "sequences.seqused_q_ptr": Pointer("i32") if "q" in p.seqused else None,
        "sequences.seqused_k_ptr": Pointer("i32") if "k" in p.seqused else None,
        "page_table_ptr": Pointer("i32") if p.page_size else None,
        "dropout_seed_ptr": Pointer("i64") if p.dropout_p else None,
    }


def bounds_and_bias(problem: AttentionProblem) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Return the arguments of a window and of a bias' strides, and the constants for those that a call is without."""
    left, right = problem.window
    arguments: dict[str, Argument] = {}
    constants: dict[str, Any] = {"bias_strides.COLUMN": problem.bias_strides[3] if problem.bias else 0}
    for name, bound in (("window.left", left), ("window.right", right)):
        if bound >= 0:
            arguments[name] = Scalar("i32", bound)
        else:
            constants[name] = 0
    if problem.bias:
        b, h, m = in_units(problem.bias_strides[:3], bias_alignment(problem))
        arguments |= scalars("i64", "bias_strides", b=b, h=h, m=m)
    else:
        constants |= {f"bias_strides.{axis}": 0 for axis in "bhm"}
    return arguments, constants


def dropout_arguments(problem: AttentionProblem) -> dict[str, Argument]:
    """Return what dropout needs beside its seed."""
    p = problem
    return {
        "dropout.last": Scalar("i32", dropout_last(p)) if p.dropout_p else None,
        "dropout.scale": Scalar("fp32", p.dropout_scale) if p.dropout_p else None,
    }


def dropout_last(problem: AttentionProblem) -> int:
    """Return the largest random number that drops a probability, as an int32 of the same bits as that uint32."""
    last = problem.dropout_threshold - 1
    return last - 2**32 if last >= 2**31 else last


def _merge(plan: Plan, config: ForwardConfig) -> PreparedKernel:
    p = plan.problem
    stride_ob, stride_oh = in_units(p.output_strides[:2], output_alignment(p))
    arguments: dict[str, Argument] = {
        "o_part_ptr": Pointer("fp32", aligned=True),
        "lse_part_ptr": Pointer("fp32", aligned=True),
        "o_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True),
        **scalars("i64", stride_ob=stride_ob, stride_oh=stride_oh, rows_total=p.rows),
        **scalars("i32", heads=p.heads, seqlen_q=p.seqlen_q, tiles_m=-(-p.seqlen_q // MERGE_ROWS)),
    }
    constants = {
        "ALIGN_O": output_alignment(p),
        "STRIDE_OM": p.output_strides[2],
        "SPLITS": config.num_splits,
        "DV": p.head_dim_v,
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": MERGE_ROWS,
        "STORE_LSE": p.return_lse,
    }
    source = kernel_source(_merge_partials_kernel, arguments, constants, num_warps=MERGE_WARPS)
    return prepare_kernel(source, plan.launches[1].grid, arguments)


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
