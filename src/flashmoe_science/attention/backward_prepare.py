"""Turn a plan of gradients into kernels to compile and launches to make."""

from __future__ import annotations

import math
from typing import Any

from ..gpu.compile import KernelSource
from .backward_hopper_plan import HopperBackwardConfig
from .backward_plan import DELTA_WARPS, BackwardConfig, BackwardPlan, Tile, delta_rows
from .backward_problem import BackwardProblem
from .backward_q_triton import _backward_bias_kernel, _backward_q_kernel
from .backward_triton import _backward_kv_kernel, _delta_kernel
from .prepare import bias_alignment, dropout_last
from .prepared import PreparedKernel
from .problem import LOG2_E, AttentionProblem
from .tiles import block_dim

_MAX_REGISTERS = 255  # left to itself, ptxas spills a few bytes to fit one more block on an SM
# What a call allocates itself. The LSE and its gradient come from saved tensors and from autograd: they lie anywhere.
_OURS = ("delta_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "dbias_ptr")


def prepare_backward_kernels(plan: BackwardPlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    if plan.config is None or not plan.launches:
        return ()
    if isinstance(plan.config, HopperBackwardConfig):
        from .backward_sm90 import prepare_hopper_backward  # it imports the whole of Gluon

        return prepare_hopper_backward(plan)
    problem, config = plan.problem, plan.config
    grids = {launch.pattern: launch.grid for launch in plan.launches}
    kernels = [_delta(problem, grids["_delta_kernel"])]
    if problem.wants_kv:
        makes = (("dk_ptr",), ("dv_ptr",)) if config.kv_apart else (("dk_ptr", "dv_ptr"),)
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


def _units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return the strides of B and H in units of ``unit`` elements."""
    assert all(stride % unit == 0 for stride in strides[:2]), (strides, unit)
    return tuple(stride // unit for stride in strides[:2])


class _Arguments:
    """The arguments of one kernel: what it is compiled with, and the values of its scalars."""

    def __init__(self, problem: BackwardProblem, pointers: dict[str, str]) -> None:
        self.problem, self.pointers = problem, pointers
        self.scalars: dict[str, tuple[str, Any]] = {}
        self.constants: dict[str, Any] = {}

    def add(self, kind: str, **values: Any) -> None:
        """Add scalars of one type."""
        self.scalars.update({name: (kind, value) for name, value in values.items()})

    def prepare(self, function: Any, grid: tuple[int, int, int], num_warps: int, num_stages: int = 1) -> PreparedKernel:
        """Return the kernel."""
        types = {**self.pointers, **{name: kind for name, (kind, _) in self.scalars.items()}}
        p = self.problem.forward
        aligned = {*_OURS, *(("bias_ptr",) if p.bias and p.bias_alignment >= 16 else ())}
        if p.pointer_alignment >= 16:
            aligned |= {"q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr"}
        order = [name for name in function.arg_names if name in types]
        constants = {name: self.constants.get(name) for name in function.arg_names if name not in types}
        source = KernelSource(
            function,
            tuple((name, types[name]) for name in order),
            tuple(constants.items()),
            frozenset(aligned & types.keys()),
            num_warps,
            num_stages,
            max_registers=_MAX_REGISTERS,
        )
        values = tuple(self.scalars[name][1] for name in order if name in self.scalars)
        return PreparedKernel(source, grid, values)


def _precision(problem: BackwardProblem) -> str:
    """Return ``input_precision`` of the products, which only fp32 operands read."""
    return "ieee" if problem.forward.dtype == "fp32" else "tf32"


def _delta(problem: BackwardProblem, grid: tuple[int, int, int]) -> PreparedKernel:
    p = problem.forward
    kind = f"*{p.dtype}"
    pointers = {"o_ptr": kind, "do_ptr": kind, "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    if problem.has_dlse:
        pointers["dlse_ptr"] = "*fp32"
    if p.packed:
        pointers["cu_seqlens_q_ptr"] = "*i32"
    arguments = _Arguments(problem, pointers)
    align = alignment(problem)
    (ob, oh), (dob, doh) = _units(problem.o_strides, align), _units(problem.do_strides, align)
    arguments.add("i64", stride_ob=ob, stride_oh=oh, stride_dob=dob, stride_doh=doh)
    arguments.add("i32", heads=p.heads, seqlen_q=p.seqlen_q, tiles_m=-(-p.seqlen_q // delta_rows(problem)))
    arguments.constants = {
        "STRIDE_OM": problem.o_strides[2],
        "STRIDE_OD": problem.o_strides[3],
        "STRIDE_DOM": problem.do_strides[2],
        "STRIDE_DOD": problem.do_strides[3],
        "ALIGN": align,
        "DV": p.head_dim_v,
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": delta_rows(problem),
        "PRECISION": _precision(problem),
    }
    return arguments.prepare(_delta_kernel, grid, DELTA_WARPS)


def _shared(problem: BackwardProblem, outputs: tuple[str, ...], tile: Tile) -> _Arguments:
    """Return what the kernels that recompute P have in common."""
    p = problem.forward
    kind, align = f"*{p.dtype}", alignment(problem)
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "do_ptr", *outputs), kind),
        **dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32"),
    }
    if p.alibi:
        pointers["alibi_ptr"] = f"*{p.alibi}"
    if p.bias:
        pointers["bias_ptr"] = f"*{p.bias}"
    for name in p.extras:
        if name.startswith(("cu_seqlens", "seqused")):
            pointers[f"{name}_ptr"] = "*i32"
    if p.dropout_p:
        pointers["dropout_seed_ptr"] = "*i64"
    arguments = _Arguments(problem, pointers)
    inputs = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides, "do": problem.do_strides}
    for name, strides in inputs.items():
        b, h = _units(strides, align)
        arguments.add("i64", **{f"stride_{name}b": b, f"stride_{name}h": h})
    arguments.add("i32", heads=p.heads, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k)
    arguments.add("fp32", scale=_scale(p))
    left, right = p.window
    arguments.constants = {
        **dict.fromkeys(("window_left", "window_right", "stride_bias_b", "stride_bias_h", "stride_bias_m"), 0),
        "STRIDE_QM": p.q_strides[2],
        "STRIDE_QD": p.q_strides[3],
        "STRIDE_KN": p.k_strides[2],
        "STRIDE_KD": p.k_strides[3],
        "STRIDE_VN": p.v_strides[2],
        "STRIDE_VD": p.v_strides[3],
        "STRIDE_DOM": problem.do_strides[2],
        "STRIDE_DOD": problem.do_strides[3],
        "STRIDE_ALIBI_B": p.alibi_stride,
        "STRIDE_BIAS_N": p.bias_strides[3] if p.bias else 0,
        "ALIGN": align,
        "ALIGN_BIAS": bias_alignment(p) if p.bias else 1,
        "GROUP": p.group,
        "D": p.head_dim,
        "DV": p.head_dim_v,
        "BLOCK_D": block_dim(p.head_dim),
        "BLOCK_DV": block_dim(p.head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BOUND_LEFT": p.bounded_left,
        "BOUND_RIGHT": p.bounded_right,
        "WIDE": max(tile.block_m, tile.block_n, 256) * _widest_row(problem) >= 2**31,
        "PRECISION": _precision(problem),
        "NUM_STAGES": tile.num_stages,
    }
    if left >= 0:
        arguments.add("i32", window_left=left)
    if right >= 0:
        arguments.add("i32", window_right=right)
    if p.softcap:
        arguments.add("fp32", softcap=p.softcap * (1.0 if p.bias else LOG2_E))
    if p.bias:
        b, h, m = (stride // bias_alignment(p) for stride in p.bias_strides[:3])
        arguments.add("i64", stride_bias_b=b, stride_bias_h=h, stride_bias_m=m)
    if p.dropout_p:
        arguments.add("i32", dropout_last=dropout_last(p))
        arguments.add("fp32", dropout_scale=p.dropout_scale)
    return arguments


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
    arguments = _shared(problem, outputs, tile)
    align = math.gcd(8, p.head_dim, p.head_dim_v)
    (dkb, dkh), (dvb, dvh) = _units(problem.dk_strides, align), _units(problem.dv_strides, align)
    arguments.add("i64", stride_dkb=dkb, stride_dkh=dkh, stride_dvb=dvb, stride_dvh=dvh)
    arguments.add("i32", heads_kv=p.heads_kv, tiles_n=-(-p.seqlen_k // tile.block_n))
    arguments.add("fp32", grad_scale=p.scale)
    arguments.constants |= {
        "STRIDE_DKN": problem.dk_strides[2],
        "STRIDE_DVN": problem.dv_strides[2],
        "ALIGN_OUT": align,
        "MASK_M": p.packed or p.seqlen_q % tile.block_m != 0,
    }
    return arguments.prepare(_backward_kv_kernel, grid, tile.num_warps, tile.num_stages)


def _q(problem: BackwardProblem, config: BackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p, tile = problem.forward, config.q
    arguments = _shared(problem, ("dq_ptr",), tile)
    align = math.gcd(8, p.head_dim)
    dqb, dqh = _units(problem.dq_strides, align)
    arguments.add("i64", stride_dqb=dqb, stride_dqh=dqh)
    arguments.add("i32", tiles_m=-(-p.seqlen_q // tile.block_m))
    arguments.add("fp32", grad_scale=p.scale)
    arguments.constants |= {"STRIDE_DQM": problem.dq_strides[2], "ALIGN_OUT": align}
    return arguments.prepare(_backward_q_kernel, grid, tile.num_warps, tile.num_stages)


def _bias(problem: BackwardProblem, config: BackwardConfig, grid: tuple[int, int, int]) -> PreparedKernel:
    p, tile = problem.forward, config.bias
    assert problem.bias_sums is not None
    arguments = _shared(problem, (), tile)
    arguments.pointers["dbias_ptr"] = f"*{p.bias}"
    sum_batch, sum_heads = problem.bias_sums
    arguments.add("i32", batch=p.batch, bias_heads=1 if sum_heads else p.heads)
    arguments.add("i32", tiles_m=-(-p.seqlen_q // tile.block_m), tiles_n=-(-p.seqlen_k // tile.block_n))
    arguments.constants |= {"SUM_BATCH": sum_batch, "SUM_HEADS": sum_heads}
    return arguments.prepare(_backward_bias_kernel, grid, tile.num_warps, tile.num_stages)
