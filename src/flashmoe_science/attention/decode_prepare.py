"""Turn the plan of a call with a K/V cache into kernels to compile and launches to make."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..gpu.compile import KernelSource
from ..gpu.gluon_versions import descriptor_type
from ..gpu.tensor_map import TensorMap
from .append_triton import _append_kernel
from .cache_problem import CacheProblem, alignment
from .decode_config import DecodeConfig
from .decode_gluon_sm90 import COLUMNS, KEYS, MORE, ROWS, _decode_sm90_kernel
from .decode_plan import (
    APPEND_TOKENS,
    APPEND_WARPS,
    MERGE_WARPS,
    DecodePlan,
    MergeConfig,
    Shares,
)
from .decode_triton import _decode_kernel, _merge_shares_kernel
from .hopper_plan import HOPPER_REGISTERS
from .prepared import PreparedKernel
from .problem import LOG2_E, Strides
from .tiles import block_dim

_OURS = ("q_out_ptr", "o_ptr", "lse_ptr", "o_part_ptr", "sums_part_ptr")  # allocated here, so aligned


def prepare_cache_kernels(plan: DecodePlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    makers = {
        "_append_kernel": _append,
        "_decode_kernel": _decode,
        "_decode_sm90_kernel": _decode_hopper,
        "_merge_shares_kernel": _merge,
    }
    return tuple(makers[launch.pattern](plan, launch.grid) for launch in plan.launches)


_MAPPED = {"q_desc": "q_ptr", "k_desc": "k_ptr"}  # those of second parts have the address of the first


def pointer_names(kernel: PreparedKernel) -> tuple[str, ...]:
    """Return the pointers that a kernel takes, in order; a tensor that TMA copies is one, too."""
    names = [name for name, kind in kernel.source.signature if kind.startswith("*") or name in _MAPPED]
    return tuple(_MAPPED.get(name, name) for name in names)


def _optional(problem: CacheProblem) -> dict[str, str | None]:
    """Return the types of the pointers that a call may be without."""
    return {
        "page_table_ptr": "*i32" if problem.page_size else None,
        "seqlens_ptr": "*i32" if problem.has_seqlens else None,
        "leftpad_ptr": "*i32" if problem.has_leftpad else None,
        "batch_idx_ptr": "*i32" if problem.has_batch_idx else None,
        "sinks_ptr": f"*{problem.sinks}" if problem.sinks else None,
        "alibi_ptr": f"*{problem.alibi}" if problem.alibi else None,
        "bias_ptr": f"*{problem.bias}" if problem.bias else None,
    }


def _source(
    function: Any,
    plan: DecodePlan,
    pointers: dict[str, str | None],
    scalars: dict[str, tuple[str, float] | None],
    constants: dict[str, Any],
    warps: int,
    stages: int = 1,
    max_registers: int = 255,  # left to itself, ptxas spills a few bytes to fit one more block on an SM
) -> tuple[KernelSource, tuple[float, ...]]:
    """Return a source in which what is None is a constant, and the values of its scalars, in the kernel's order."""
    order = list(function.arg_names)
    given = {name: kind for name in order if (kind := pointers.get(name)) is not None}
    numbers = {name: value for name in order if (value := scalars.get(name)) is not None}
    missing = {name: None for name in (*pointers, *scalars) if name not in given and name not in numbers}
    aligned = {"q_ptr", "k_ptr", "v_ptr"} if plan.problem.pointer_alignment >= 16 else set()
    dependent = plan.arch >= 90
    source = KernelSource(
        function,
        (*given.items(), *((name, kind) for name, (kind, _) in numbers.items())),
        tuple({**constants, **missing, "DEPENDENT_LAUNCH": dependent}.items()),
        frozenset(name for name in given if name in aligned or name in _OURS),
        warps,
        stages,
        max_registers=max_registers,
        dependent_launch=dependent,
    )
    return source, tuple(value for _, value in numbers.values())


def _units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return strides in units of ``unit`` elements: the kernel multiplies by it, so the compiler knows it divides."""
    assert all(stride % unit == 0 for stride in strides), (strides, unit)
    return tuple(stride // unit for stride in strides)


def _output_alignment(problem: CacheProblem) -> int:
    return min(8, problem.head_dim_v & -problem.head_dim_v)


def _queries(problem: CacheProblem) -> Strides:
    """Return the strides of the queries that are attended with: rotated ones are a dense copy."""
    if not problem.rotary_dim:
        return problem.q_strides
    rows, dim = problem.seqlen_q, problem.head_dim
    return problem.heads * rows * dim, rows * dim, dim, 1


def _schedule(problem: CacheProblem, shares: Shares) -> dict[str, tuple[str, float] | None]:
    """Return what tells a program its share; the merge is told the same."""
    return {
        "batch": ("i32", problem.batch),
        "heads_kv": ("i32", problem.heads_kv),
        "seqlen_q": ("i32", problem.seqlen_q),
        "seqlen_new": ("i32", problem.seqlen_new),
        "capacity": ("i32", problem.capacity),
        "window_left": ("i32", problem.window[0]),
        "splits": ("i32", shares.splits),
        "least_tiles": ("i32", shares.least_tiles),
        "alike": ("i32", shares.alike),
    }


def _block_b(problem: CacheProblem, shares: Shares) -> int:
    """Return the lengths that a program reads at once: all of them where it balances shares over sequences."""
    return 1 << (problem.batch - 1).bit_length() if shares.schedule == "balanced" else 1


def _scale(problem: CacheProblem) -> float:
    """Return the factor on q . k: with a softcap as ``cap_scores`` takes it."""
    if problem.softcap and problem.dtype == "fp32":
        return problem.scale / problem.softcap
    return problem.kernel_scale


def _decode(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    problem, config, shares = plan.problem, plan.config, plan.shares
    assert isinstance(config, DecodeConfig)
    assert isinstance(shares, Shares)
    kind, align, align_o = problem.dtype, alignment(problem), _output_alignment(problem)
    split = shares.most > 1
    q_strides = _queries(problem)
    pointers: dict[str, str | None] = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{kind}"),
        **_optional(problem),
        "o_ptr": f"*{kind}",
        "lse_ptr": "*fp32" if problem.return_lse else None,
        "o_part_ptr": "*fp32" if split else None,
        "sums_part_ptr": "*fp32" if split else None,
    }
    names = ("stride_qb", "stride_qh", "stride_kp", "stride_kh", "stride_vp", "stride_vh", "stride_ob", "stride_oh")
    k, v = problem.k_strides, problem.v_strides
    strides = (*_units((*q_strides[:2], k[0], k[2], v[0], v[2]), align), *_units(problem.output_strides[:2], align_o))
    scalars: dict[str, tuple[str, float] | None] = {
        **{name: ("i64", value) for name, value in zip(names, strides, strict=True)},
        "stride_tb": ("i64", problem.table_stride),
        **{
            f"stride_bias_{axis}": ("i64", problem.bias_strides[i]) if problem.bias else None
            for i, axis in enumerate("bhm")
        },
        **_schedule(problem, shares),
        "window_right": ("i32", problem.window[1]),
        "scale": ("fp32", _scale(problem)),
        "softcap": ("fp32", problem.softcap * LOG2_E) if problem.softcap else None,
    }
    columns = problem.head_dim_v if problem.shared_kv else problem.head_dim
    rest = problem.head_dim - columns
    reach = max(problem.pages * abs(strides[0]) + problem.page_size * abs(strides[1]) for strides in (k, v))
    wide = problem.page_size > 0 and reach // align >= 2**31
    constants = {
        "STRIDE_QM": q_strides[2],
        "STRIDE_KN": k[1],
        "STRIDE_VN": v[1],
        "STRIDE_OM": problem.output_strides[2],
        "ALIGN": align,
        "ALIGN_O": align_o,
        "GROUP": problem.group,
        "D": columns,
        "DV": problem.head_dim_v,
        "BLOCK_D": block_dim(columns),
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "SHARED_KV": problem.shared_kv,
        "REST": rest,
        "BLOCK_REST": block_dim(rest) if rest else 16,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_B": _block_b(problem, shares),
        "PAGE_SIZE": problem.page_size,
        "WIDE": wide,
        "TILES_M": -(-problem.packed_rows // config.block_m),
        "HAS_LEFT": problem.window[0] >= 0,
        "HAS_RIGHT": problem.window[1] >= 0,
        "STRIDE_ALIBI_B": problem.alibi_stride,
        "STRIDE_BIAS_N": problem.bias_strides[3] if problem.bias else 0,
        "SPLIT": split,
        "BALANCED": shares.schedule == "balanced",
        "STORE_LSE": problem.return_lse,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",  # only fp32 operands read it
        "NUM_STAGES": config.num_stages,
        "PREFETCH": config.prefetch,
    }
    # Addresses of 64 bits take more registers than the table's blocks leave: one block an SM less.
    blocks = max(1, config.blocks_per_sm - int(wide))
    registers = 65536 // (blocks * 32 * config.num_warps) // 8 * 8
    source, values = _source(
        _decode_kernel, plan, pointers, scalars, constants, config.num_warps, config.num_stages, min(255, registers)
    )
    return PreparedKernel(source, grid, values)


def _decode_hopper(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p, shares, kind = plan.problem, plan.shares, plan.problem.dtype
    assert isinstance(shares, Shares)
    split, strides = shares.most > 1, p.q_strides
    heads = min(p.heads, ROWS.value)  # of a tile
    queries, keys = (1, ROWS.value // heads, heads), (1, KEYS.value)
    optional = {
        "page_table_ptr": "*i32" if p.page_size else None,
        "seqlens_ptr": "*i32" if p.has_seqlens else None,
        "o_ptr": f"*{kind}",
        "lse_ptr": "*fp32" if p.return_lse else None,
        "o_part_ptr": "*fp32" if split else None,
        "sums_part_ptr": "*fp32" if split else None,
    }
    schedule = {name: value for name, value in _schedule(p, shares).items() if name not in ("heads_kv", "window_left")}
    scalars: dict[str, Any] = {
        "stride_tb": ("i64", p.table_stride),
        **dict(zip(("stride_ob", "stride_oh", "stride_om"), (("i64", n) for n in p.output_strides), strict=False)),
        **schedule,
        "scale_log2": ("fp32", _scale(p)),
    }
    signature = {
        "q_desc": descriptor_type(kind, (*queries, COLUMNS.value)),
        "k_desc": descriptor_type(kind, (*keys, COLUMNS.value)),
        **{name: pointer for name, pointer in optional.items() if pointer},
        "q_more_desc": descriptor_type(kind, (*queries, MORE.value)),
        "k_more_desc": descriptor_type(kind, (*keys, MORE.value)),
        **{name: type_ for name, (type_, _) in scalars.items()},
    }
    constants = {
        **{name: None for name, pointer in optional.items() if not pointer},
        "HEADS": p.heads,
        "PAGE_SIZE": p.page_size,
        "TILES_M": -(-p.packed_rows // ROWS.value),
        "IS_CAUSAL": p.window[1] == 0,
        "BALANCED": shares.schedule == "balanced",
        "BLOCK_B": _block_b(p, shares),
        "STORE_LSE": p.return_lse,
        "REGISTERS": HOPPER_REGISTERS[2],
    }
    source = KernelSource(
        _decode_sm90_kernel,
        tuple(signature.items()),
        tuple(constants.items()),
        frozenset(name for name, pointer in optional.items() if pointer and name in _OURS),
        num_warps=4,
        dependent_launch=True,
    )
    q_map = TensorMap(kind, (p.batch, p.seqlen_q, p.heads, p.head_dim), (strides[0], strides[2], strides[1], 1))
    k_map = TensorMap(kind, (p.pages, p.page_size or p.capacity, p.head_dim), (*p.k_strides[:2], 1))
    maps = q_map, k_map, dataclasses.replace(q_map, of=0), dataclasses.replace(k_map, of=1)
    return PreparedKernel(source, grid, tuple(value for _, value in scalars.values()), maps)


def _merge(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    problem, config, shares, merge = plan.problem, plan.config, plan.shares, plan.merge
    assert isinstance(config, DecodeConfig)
    assert isinstance(shares, Shares)
    assert isinstance(merge, MergeConfig)
    align_o, optional = _output_alignment(problem), _optional(problem)
    pointers = {
        "o_part_ptr": "*fp32",
        "sums_part_ptr": "*fp32",
        "o_ptr": f"*{problem.dtype}",
        "lse_ptr": "*fp32" if problem.return_lse else None,
        **{name: optional[name] for name in ("seqlens_ptr", "leftpad_ptr", "sinks_ptr")},
    }
    strides = _units(problem.output_strides[:2], align_o)
    scalars: dict[str, tuple[str, float] | None] = {
        "stride_ob": ("i64", strides[0]),
        "stride_oh": ("i64", strides[1]),
        **_schedule(problem, shares),
    }
    constants = {
        "STRIDE_OM": problem.output_strides[2],
        "ALIGN_O": align_o,
        "GROUP": problem.group,
        "DV": problem.head_dim_v,
        "BLOCK_N": config.block_n,
        "BLOCK_B": _block_b(problem, shares),
        "BLOCK_S": merge.block_s,
        "ROWS": merge.rows,
        "COLUMNS": merge.columns,
        "TILES_DV": -(-block_dim(problem.head_dim_v) // merge.columns),
        "HAS_LEFT": problem.window[0] >= 0,
        "BALANCED": shares.schedule == "balanced",
        "STORE_LSE": problem.return_lse,
    }
    source, values = _source(_merge_shares_kernel, plan, pointers, scalars, constants, MERGE_WARPS)
    return PreparedKernel(source, grid, values)


def _append(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    problem = plan.problem
    kind, optional = problem.dtype, _optional(problem)
    rotary = f"*{problem.rotary_dtype}" if problem.rotary_dim else None
    pointers = {
        **dict.fromkeys(("k_new_ptr", "v_new_ptr", "k_ptr", "v_ptr"), f"*{kind}"),
        **{name: optional[name] for name in ("page_table_ptr", "seqlens_ptr", "leftpad_ptr", "batch_idx_ptr")},
        "q_ptr": f"*{kind}" if rotary else None,
        "q_out_ptr": f"*{kind}" if rotary else None,
        "cos_ptr": rotary,
        "sin_ptr": rotary,
    }
    k, v, nk, nv, q = (
        problem.k_strides, problem.v_strides, problem.new_k_strides, problem.new_v_strides, problem.q_strides,
    )  # fmt: skip
    strides = {
        "stride_nb": nk[0], "stride_nh": nk[1], "stride_nm": nk[2],
        "stride_wb": nv[0], "stride_wh": nv[1], "stride_wm": nv[2],
        "stride_kp": k[0], "stride_kn": k[1], "stride_kh": k[2],
        "stride_vp": v[0], "stride_vn": v[1], "stride_vh": v[2],
        "stride_qb": q[0], "stride_qh": q[1], "stride_qm": q[2],
        "stride_cos": problem.rotary_stride, "stride_tb": problem.table_stride,
    }  # fmt: skip
    sizes = {
        "heads": problem.heads, "heads_kv": problem.heads_kv, "seqlen_q": problem.seqlen_q,
        "seqlen_new": problem.seqlen_new, "capacity": problem.capacity, "seqlen_rotary": problem.rotary_length,
    }  # fmt: skip
    scalars: dict[str, tuple[str, float] | None] = {
        **{name: ("i64", value) for name, value in strides.items()},
        **{name: ("i32", value) for name, value in sizes.items()},
    }
    constants = {
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "BLOCK_T": APPEND_TOKENS,
        "PAGE_SIZE": problem.page_size,
        "ROTARY_DIM": problem.rotary_dim,
        "INTERLEAVED": problem.rotary_interleaved,
        "ADVANCE": problem.rotary_advance,
    }
    source, values = _source(_append_kernel, plan, pointers, scalars, constants, APPEND_WARPS)
    return PreparedKernel(source, grid, values)
