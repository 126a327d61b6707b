"""Turn a plan of gradients into kernels to compile and launches to make."""

from __future__ import annotations

import math
from typing import Any

from ...gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel, scalars
from ..forward.prepare import (
    MAX_REGISTERS,
    bias_alignment,
    bounds_and_bias,
    dropout_arguments,
    in_units,
    optional_pointers,
    row_strides,
    strides_of,
)
from ..kernel_arguments import BackwardCall, BackwardTile
from ..masks.prepare import prepare_masked_gradients
from ..problem import LOG2_E, AttentionProblem
from ..tiles import block_dim
from .dkv_triton import _backward_kv_kernel, _delta_kernel
from .dq_triton import _backward_bias_kernel, _backward_q_kernel
from .plan import DELTA_WARPS, BackwardConfig, BackwardPlan, Tile, delta_rows
from .plan_sm90 import HopperBackwardConfig
from .problem import BackwardProblem


def prepare_backward_kernels(plan: BackwardPlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    if plan.config is None or not plan.launches:
        return ()
    if isinstance(plan.config, HopperBackwardConfig):
        from .prepare_sm90 import prepare_hopper_backward  # it imports the whole of Gluon

        return prepare_hopper_backward(plan)
    problem, config = plan.problem, plan.config
    grids = {launch.pattern: launch.grid for launch in plan.launches}
    kernels = [_delta(problem, grids["_delta_kernel"])]
    makes = (("dk_ptr",), ("dv_ptr",)) if config.kv_apart else (("dk_ptr", "dv_ptr"),)
    if problem.forward.mask_heads:
        tiles = config.kv, config.q
        return (*kernels, *prepare_masked_gradients(problem, tiles, grids, makes, alignment(problem)))
    if problem.wants_kv:
        kernels += [_kv(problem, config, grids["_backward_kv_kernel"], outputs) for outputs in makes]
    if problem.wants_q:
        kernels.append(_q(problem, config, grids["_backward_q_kernel"]))
    if problem.bias_sums is not None:
        kernels.append(_bias(problem, config, grids["_backward_bias_kernel"]))
    return tuple(kernels)


def alignment(problem: BackwardProblem) -> int:
    """Return the largest power of two, up to 16 bytes, of which every row that is read is a multiple, in elements."""
    p = problem.forward
    bytes_ = p.pointer_alignment
    for strides in (p.q_strides, p.k_strides, p.v_strides, problem.o_strides, problem.do_strides):
        for stride in strides[:3]:
            bytes_ = math.gcd(bytes_, stride * p.item_bytes)
    return max(1, bytes_ // p.item_bytes)


def _input(problem: BackwardProblem) -> Pointer:
    """Return the pointer of a tensor of the call: it is aligned where the caller's tensors are."""
    return Pointer(problem.forward.dtype, aligned=problem.forward.pointer_alignment >= 16)


def _output(problem: BackwardProblem) -> Pointer:
    """Return the pointer of a gradient, which is allocated here."""
    return Pointer(problem.forward.dtype, aligned=True)


def _output_of_keys(problem: BackwardProblem) -> tuple[Pointer, int]:
    """Return the pointer of the gradient of k or v, and the elements of which each row's start is a multiple."""
    p = problem.forward
    if problem.sums is None:
        return _output(problem), math.gcd(8, p.head_dim, p.head_dim_v)
    return Pointer("fp32"), math.gcd(*(stride for of_sum in problem.sums for stride in of_sum[:3])) or 1


def _prepare(
    function: Any, grid: tuple[int, int, int], arguments: dict[str, Argument], constants: dict[str, Any], warps: int,
    stages: int = 1,
) -> PreparedKernel:  # fmt: skip
    """Return a kernel with the options that all of them have."""
    source = kernel_source(
        function, arguments, constants, num_warps=warps, num_stages=stages, max_registers=MAX_REGISTERS
    )
    return prepare_kernel(source, grid, arguments)


def _precision(problem: BackwardProblem) -> str:
    """Return ``input_precision`` of the products, which only fp32 operands read."""
    return "ieee" if problem.forward.dtype == "fp32" else "tf32"


def _delta(problem: BackwardProblem, grid: tuple[int, int, int]) -> PreparedKernel:
    p, align, rows = problem.forward, alignment(problem), delta_rows(problem)
    (ob, oh), (dob, doh) = in_units(problem.o_strides[:2], align), in_units(problem.do_strides[:2], align)
    arguments: dict[str, Argument] = {
        "o_ptr": _input(problem),
        "do_ptr": _input(problem),
        "lse_ptr": Pointer("fp32"),  # where autograd keeps it, as the gradient below
        "delta_ptr": Pointer("fp32", aligned=True),
        "dlse_ptr": Pointer("fp32") if problem.has_dlse else None,
        "cu_seqlens_q_ptr": Pointer("i32") if p.packed else None,
        **scalars("i64", stride_ob=ob, stride_oh=oh, stride_dob=dob, stride_doh=doh),
        **scalars("i32", heads=p.heads, seqlen_q=p.seqlen_q, tiles_m=-(-p.seqlen_q // rows)),
    }
    constants = {
        "STRIDE_OM": problem.o_strides[2],
        "STRIDE_OD": problem.o_strides[3],
        "STRIDE_DOM": problem.do_strides[2],
        "STRIDE_DOD": problem.do_strides[3],
        "ALIGN": align,
        "DV": p.head_dim_v,
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": rows,
        "PRECISION": _precision(problem),
    }
    return _prepare(_delta_kernel, grid, arguments, constants, DELTA_WARPS)


def _shared(problem: BackwardProblem, tile: Tile, align_out: int = 1) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Return the arguments and constants that the kernels which recompute P have in common."""
    p, align = problem.forward, alignment(problem)
    strides = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides, "do": problem.do_strides}
    bounds, constants = bounds_and_bias(p)
    optional = optional_pointers(p)
    arguments: dict[str, Argument] = {
        **{f"inputs.{name}_ptr": _input(problem) for name in strides},
        "inputs.lse_ptr": Pointer("fp32"),  # where autograd keeps it
        "inputs.delta_ptr": Pointer("fp32", aligned=True),
        **{name: pointer for name, pointer in optional.items() if name not in ("sinks_ptr", "page_table_ptr")},
        **bounds,
        "scale": Scalar("fp32", _scale(p)),
        "softcap": Scalar("fp32", p.softcap * (1.0 if p.bias else LOG2_E)) if p.softcap else None,
        **dropout_arguments(p),
    }
    for name, of_tensor in strides.items():
        arguments |= strides_of(f"{name}_strides", of_tensor, align)
        constants |= row_strides(f"{name}_strides", of_tensor)
    constants["CALL"] = BackwardCall(
        GROUP=p.group,
        D=p.head_dim,
        DV=p.head_dim_v,
        BLOCK_D=block_dim(p.head_dim),
        BLOCK_DV=block_dim(p.head_dim_v),
        ALIGN=align,
        ALIGN_OUT=align_out,
        ALIGN_BIAS=bias_alignment(p) if p.bias else 1,
        STRIDE_ALIBI_B=p.alibi_stride,
        BOUND_LEFT=p.bounded_left,
        BOUND_RIGHT=p.bounded_right,
        PRECISION=_precision(problem),
        ADD=problem.sums is not None,
    )
    constants["TILE"] = BackwardTile(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_STAGES=tile.num_stages,
        WIDE=max(tile.block_m, tile.block_n, 256) * _widest_row(problem) >= 2**31,
    )
    return arguments, constants


def _gradient(name: str, strides: tuple[int, ...], align: int) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Return the strides of a gradient that a kernel writes, and those of its rows, which are constants."""
    return strides_of(f"{name}_strides", strides, align), row_strides(f"{name}_strides", strides)


def _scale(p: AttentionProblem) -> float:
    """Return the factor on the scores, as the forward has it."""
    if p.softcap:  # as ``cap_scores`` takes it
        return p.scale / p.softcap if p.dtype == "fp32" else p.softcap_scale
    return p.scale if p.bias else p.scale_log2


def _widest_row(problem: BackwardProblem) -> int:
    p = problem.forward
    outputs = (problem.dq_strides, problem.dk_strides, problem.dv_strides)
    inputs = (p.q_strides, p.k_strides, p.v_strides, problem.do_strides, p.bias_strides[1:])
    return max(abs(stride) for strides in (*inputs, *outputs) for stride in strides[2:])


def _kv(
    problem: BackwardProblem, config: BackwardConfig, grid: tuple[int, int, int], outputs: tuple[str, ...]
) -> PreparedKernel:
    p, tile = problem.forward, config.kv
    output, align = _output_of_keys(problem)
    arguments, constants = _shared(problem, tile, align)
    arguments |= {
        **{name: output if name in outputs else None for name in ("dk_ptr", "dv_ptr")},
        **scalars(
            "i32",
            "sizes",
            heads=p.heads,
            heads_kv=p.heads_kv,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_n=-(-p.seqlen_k // tile.block_n),
        ),
        "grad_scale": Scalar("fp32", p.scale),
    }
    for name, strides in (("dk", problem.dk_strides), ("dv", problem.dv_strides)):
        more, fixed = _gradient(name, strides, align)
        arguments |= more
        constants |= fixed
    constants["MASK_M"] = p.packed or p.seqlen_q % tile.block_m != 0
    return _prepare(_backward_kv_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages)


def _q(problem: BackwardProblem, config: BackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p, tile = problem.forward, config.q
    align = math.gcd(8, p.head_dim)
    arguments, constants = _shared(problem, tile, align)
    more, fixed = _gradient("dq", problem.dq_strides, align)
    arguments |= {
        **more,
        "dq_ptr": _output(problem),
        **scalars(
            "i32",
            "sizes",
            heads=p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=-(-p.seqlen_q // tile.block_m),
        ),
        "grad_scale": Scalar("fp32", p.scale),
    }
    return _prepare(_backward_q_kernel, grid, arguments, constants | fixed, tile.num_warps, tile.num_stages)


def _bias(problem: BackwardProblem, config: BackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p, tile = problem.forward, config.bias
    assert problem.bias_sums is not None
    sum_batch, sum_heads = problem.bias_sums
    arguments, constants = _shared(problem, tile)
    arguments |= {
        "dbias_ptr": Pointer(p.bias, aligned=True),
        **scalars(
            "i32",
            "sizes",
            batch=p.batch,
            heads=p.heads,
            bias_heads=1 if sum_heads else p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=-(-p.seqlen_q // tile.block_m),
            tiles_n=-(-p.seqlen_k // tile.block_n),
        ),
    }
    constants |= {"SUM_BATCH": sum_batch, "SUM_HEADS": sum_heads}
    return _prepare(_backward_bias_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages)
