"""Turn the plan of a call with a K/V cache into kernels to compile and launches to make."""

from __future__ import annotations

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
from ..forward.plan_sm90 import HOPPER_REGISTERS
from ..kernel_arguments import AppendCall, DecodeCall, DecodeTile
from ..problem import LOG2_E, Strides
from ..tiles import block_dim
from .append_triton import _append_kernel
from .config import DecodeConfig
from .few_fp8_gluon_sm90 import _few_rows_fp8_sm90_kernel
from .few_gluon_sm90 import _few_rows_sm90_kernel
from .gluon_sm90 import _decode_sm90_kernel
from .plan import APPEND_TOKENS, APPEND_WARPS, MERGE_WARPS, DecodePlan, KVSplits, MergeConfig
from .plan_sm90 import FEW_ROWS
from .primitives_sm90 import COLUMNS, KEYS, MORE
from .problem import CacheProblem, alignments
from .split_kv_triton import _decode_kernel, _merge_splits_kernel


def prepare_cache_kernels(plan: DecodePlan) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched."""
    makers = {
        "_append_kernel": _append,
        "_decode_kernel": _decode,
        "_decode_sm90_kernel": _decode_hopper,
        "_few_rows_sm90_kernel": _decode_hopper,
        "_few_rows_fp8_sm90_kernel": _decode_hopper,
        "_merge_splits_kernel": _merge,
    }
    return tuple(makers[launch.pattern](plan, launch.grid) for launch in plan.launches)


def pointer_names(kernel: PreparedKernel) -> tuple[str, ...]:
    """Return the names of the tensors whose addresses a launch is given, in order."""
    return tuple(f"{name}_ptr" for name in kernel.tensors)


def _inputs(problem: CacheProblem, *, pairs: bool = False) -> dict[str, Argument]:
    """Return the pointers of q, k and v: they are aligned where the caller's tensors are.

    With ``pairs``, as a kernel takes the cache that loads two 8-bit numbers as one of 16 bits.
    """
    aligned, kv = problem.pointer_alignment >= 16, "fp8e4nv" if problem.is_fp8 else problem.dtype
    if pairs:
        kv = "i16"
    return {f"{name}_ptr": Pointer(problem.dtype if name == "q" else kv, name, aligned=aligned) for name in "qkv"}


def takes_pairs(problem: CacheProblem) -> bool:
    """Return whether two 8-bit numbers of the cache are loaded as one of 16 bits."""
    p = problem
    columns = p.head_dim_v if p.shared_kv else p.head_dim
    widths = columns, p.head_dim - columns, p.head_dim_v
    sizes = *widths, alignments(p)[1], p.k_strides[1], p.v_strides[1]
    fills = all(
        block_dim(width) >= 32 for width in widths if width
    )  # half of the columns are 16, the least of a product
    return p.is_fp8 and p.item_bytes == 2 and fills and not any(size % 2 for size in sizes)


def _reach(problem: CacheProblem, strides: tuple[int, ...]) -> int:
    """Return a bound on places in a cache, or in its scales, whose first strides are those of pages and rows."""
    return problem.pages * abs(strides[0]) + max(problem.page_size, problem.capacity) * abs(strides[1])


def _scales(problem: CacheProblem) -> dict[str, Argument]:
    """Return the scales of keys and values; those of values that are columns of the keys are the keys' own."""
    p = problem
    found: dict[str, Argument] = {}
    for name, strides, tensor in (
        ("k_scale", p.k_scale_strides, "k_scale"),
        ("v_scale", p.k_scale_strides if p.shared_kv else p.v_scale_strides, "k_scale" if p.shared_kv else "v_scale"),
    ):
        found[f"{name}_ptr"] = Pointer("fp32", tensor) if strides else None
        # Places are as wide as strides are: of 32 bits they take half of the instructions.
        kind = "i32" if strides and _reach(p, strides) < 2**31 else "i64"
        for axis, stride in zip(("page", "row", "h"), strides or (None,) * 3, strict=True):
            found[f"{name}_strides.{axis}"] = None if stride is None else Scalar(kind, stride)
    return found


def _outputs(problem: CacheProblem, *, split: bool) -> dict[str, Argument]:
    """Return the pointers of what a kernel writes, all allocated here."""
    return {
        "o_ptr": Pointer(problem.dtype, "o", aligned=True),
        "lse_ptr": Pointer("fp32", "lse", aligned=True) if problem.return_lse else None,
        "o_part_ptr": Pointer("fp32", "o_part", aligned=True) if split else None,
        "sums_part_ptr": Pointer("fp32", "sums_part", aligned=True) if split else None,
    }


def _in_group(group: str, arguments: dict[str, Argument]) -> dict[str, Argument]:
    return {f"{group}.{name}": value for name, value in arguments.items()}


def _places(problem: CacheProblem, *, lengths_alone: bool = False) -> dict[str, Argument]:
    """Return the pointers that say where the keys of a sequence lie; some kernels read lengths alone."""
    p = problem
    paged, indexed = p.page_size and not lengths_alone, p.has_batch_idx and not lengths_alone
    return {
        "cache.page_table_ptr": Pointer("i32", "page_table") if paged else None,
        "cache.seqlens_ptr": Pointer("i32", "seqlens") if p.has_seqlens else None,
        "cache.leftpad_ptr": Pointer("i32", "leftpad") if p.has_leftpad else None,
        "cache.batch_idx_ptr": Pointer("i32", "batch_idx") if indexed else None,
    }


def _triton(
    function: Any,
    plan: DecodePlan,
    grid: tuple[int, int, int],
    arguments: dict[str, Argument],
    constants: dict[str, Any],
    warps: int,
    stages: int = 1,
    max_registers: int = 255,  # left to itself, ptxas spills a few bytes to fit one more block on an SM
) -> PreparedKernel:
    """Return a kernel in Triton with the options that all of them have."""
    source = kernel_source(
        function, arguments, constants, num_warps=warps, num_stages=stages, max_registers=max_registers,
        dependent_launch=plan.arch >= 90,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)


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


def _schedule(problem: CacheProblem, shares: KVSplits) -> dict[str, Argument]:
    """Return the sizes and splits from which a program finds its split; the merge is given the same."""
    p = problem
    return {
        **scalars(
            "i32",
            "sizes",
            batch=p.batch,
            heads_kv=p.heads_kv,
            seqlen_q=p.seqlen_q,
            seqlen_new=p.seqlen_new,
            capacity=p.capacity,
        ),
        **scalars("i32", "kv_splits", splits=shares.splits, least_tiles=shares.least_tiles, uniform=shares.uniform),
    }


def _block_b(problem: CacheProblem, shares: KVSplits) -> int:
    """Return the lengths that a program reads at once: all of them where it balances shares over sequences."""
    return 1 << (problem.batch - 1).bit_length() if shares.schedule == "balanced" else 1


def _scale(problem: CacheProblem) -> float:
    """Return the factor on q . k: with a softcap as ``cap_scores`` takes it."""
    if problem.softcap and problem.dtype == "fp32":
        return problem.scale / problem.softcap
    return problem.kernel_scale


def _decode(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p, config, shares = plan.problem, plan.config, plan.shares
    assert isinstance(config, DecodeConfig)
    assert isinstance(shares, KVSplits)
    (align_q, align), align_o = alignments(p), _output_alignment(p)
    items = 2 if takes_pairs(p) else 1
    q, k, v, o, bias = _queries(p), p.k_strides, p.v_strides, p.output_strides, p.bias_strides
    (qb, qh), (kp, kh, vp, vh) = _units(q[:2], align_q), _units((k[0], k[2], v[0], v[2]), align)
    ob, oh = _units(o[:2], align_o)
    arguments: dict[str, Argument] = {
        **_in_group("inputs", _inputs(p, pairs=takes_pairs(p))),
        **_places(p),
        "sinks_ptr": Pointer(p.sinks, "sinks") if p.sinks else None,
        "alibi_ptr": Pointer(p.alibi, "alibi") if p.alibi else None,
        "bias_ptr": Pointer(p.bias, "bias") if p.bias else None,
        **_scales(p),
        **_in_group("outputs", _outputs(p, split=shares.most > 1)),
        **scalars("i64", "q_strides", b=qb, h=qh),
        **scalars("i64", "k_strides", b=kp, h=kh),
        **scalars("i64", "v_strides", b=vp, h=vh),
        **scalars("i64", "o_strides", b=ob, h=oh),
        "stride_tb": Scalar("i64", p.table_stride),
        **{f"bias_strides.{axis}": Scalar("i64", bias[i]) if p.bias else None for i, axis in enumerate("bhm")},
        **_schedule(p, shares),
        **scalars("i32", "window", left=p.window[0], right=p.window[1]),
        "scale": Scalar("fp32", _scale(p)),
        "softcap": Scalar("fp32", p.softcap * LOG2_E) if p.softcap else None,
    }
    columns = p.head_dim_v if p.shared_kv else p.head_dim
    rest = p.head_dim - columns
    reach = max(p.pages * abs(strides[0]) + p.page_size * abs(strides[1]) for strides in (k, v))
    wide = p.page_size > 0 and reach // align >= 2**31
    constants = {
        "q_strides.ROW": q[2],
        "k_strides.ROW": k[1] // items,
        "v_strides.ROW": v[1] // items,
        "o_strides.ROW": o[2],
        **{f"{name}_strides.COLUMN": 1 for name in "qkvo"},
        "bias_strides.COLUMN": bias[3] if p.bias else 0,
        "CALL": DecodeCall(
            GROUP=p.group,
            D=columns,
            DV=p.head_dim_v,
            BLOCK_D=block_dim(columns),
            BLOCK_DV=block_dim(p.head_dim_v),
            ALIGN_Q=align_q,
            ALIGN=align // items,
            ALIGN_O=align_o,
            IN_FP16=p.is_fp8 and p.item_bytes == 2,
            ITEMS=items,
            HAS_PTX=plan.arch > 0,
            K_BY_TOKEN=p.k_by_token,
            V_BY_TOKEN=p.k_by_token if p.shared_kv else p.v_by_token,
            SHARED_KV=p.shared_kv,
            REST=rest,
            BLOCK_REST=block_dim(rest) if rest else 16,
            PAGE_SIZE=p.page_size,
            WIDE=wide,
            HAS_LEFT=p.window[0] >= 0,
            HAS_RIGHT=p.window[1] >= 0,
            STRIDE_ALIBI_B=p.alibi_stride,
            STORE_LSE=p.return_lse,
            PRECISION="ieee" if p.dtype == "fp32" else "tf32",  # only fp32 operands read it
        ),
        "TILE": DecodeTile(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_B=_block_b(p, shares),
            TILES_M=-(-p.packed_rows // config.block_m),
            SPLIT=shares.most > 1,
            BALANCED=shares.schedule == "balanced",
            NUM_STAGES=config.num_stages,
            PREFETCH=config.prefetch,
        ),
    }
    # Addresses of 64 bits take more registers than the table's blocks leave: one block an SM less.
    blocks = max(1, config.blocks_per_sm - int(wide))
    registers = min(255, 65536 // (blocks * 32 * config.num_warps) // 8 * 8)
    return _triton(_decode_kernel, plan, grid, arguments, constants, config.num_warps, config.num_stages, registers)


def _decode_hopper(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p, config, shares = plan.problem, plan.config, plan.shares
    assert isinstance(config, DecodeConfig)
    assert isinstance(shares, KVSplits)
    rows, items = config.block_m, 2 if p.is_fp8 else 1
    kind = "fp16" if p.is_fp8 else p.dtype  # of a pair of 8-bit numbers: TMA copies its bits
    keys, k_shape = (1, KEYS.value), (p.pages, p.page_size or p.capacity, p.head_dim // items)
    k_strides = *_units(p.k_strides[:2], items), 1
    places, schedule = _places(p), _schedule(p, shares)
    columns, more = COLUMNS.value // items, MORE.value // items
    arguments: dict[str, Argument] = {
        "k_desc": Descriptor(kind, (*keys, columns), k_shape, k_strides, "k"),
        "page_table_ptr": places["cache.page_table_ptr"],
        "seqlens_ptr": places["cache.seqlens_ptr"],
        **_outputs(p, split=shares.most > 1),
        "k_more_desc": Descriptor(kind, (*keys, more), k_shape, k_strides, "k", same_as="k_desc"),
        "stride_tb": Scalar("i64", p.table_stride),
        **scalars("i64", "o_strides", **dict(zip("bhm", p.output_strides[:3], strict=True))),
        **{name: value for name, value in schedule.items() if name != "sizes.heads_kv"},
        "scale_log2": Scalar("fp32", _scale(p)),
    }
    constants = {
        "HEADS": p.heads,
        "PAGE_SIZE": p.page_size,
        "IS_CAUSAL": p.window[1] == 0,
        "BALANCED": shares.schedule == "balanced",
        "BLOCK_B": _block_b(p, shares),
        "STORE_LSE": p.return_lse,
    }
    if p.is_fp8:
        function = _few_rows_fp8_sm90_kernel
        arguments |= {
            "q_ptr": Pointer(p.dtype, "q", aligned=True),
            **scalars("i64", "q_strides", **dict(zip("bhm", _units(p.q_strides[:3], 8), strict=True))),
            **{name: value for name, value in _scales(p).items() if name.startswith("k_")},
        }
        constants["BY_TOKEN"] = p.k_by_token
    else:
        function = _few_rows_sm90_kernel
        heads = min(p.heads, rows)  # of a tile
        queries, q_shape = (1, rows // heads, heads), (p.batch, p.seqlen_q, p.heads, p.head_dim)
        q_strides = p.q_strides[0], p.q_strides[2], p.q_strides[1], 1
        arguments |= {
            "q_desc": Descriptor(kind, (*queries, columns), q_shape, q_strides, "q"),
            "q_more_desc": Descriptor(kind, (*queries, more), q_shape, q_strides, "q", same_as="q_desc"),
        }
    if rows > FEW_ROWS:
        function = _decode_sm90_kernel
        constants |= {"TILES_M": -(-p.packed_rows // rows), "REGISTERS": HOPPER_REGISTERS[2]}
    source = kernel_source(function, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, grid, arguments)


def _merge(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p, config, shares, merge = plan.problem, plan.config, plan.shares, plan.merge
    assert isinstance(config, DecodeConfig)
    assert isinstance(shares, KVSplits)
    assert isinstance(merge, MergeConfig)
    align_o = _output_alignment(p)
    ob, oh = _units(p.output_strides[:2], align_o)
    arguments: dict[str, Argument] = {
        **_outputs(p, split=True),
        **_places(p, lengths_alone=True),
        "sinks_ptr": Pointer(p.sinks, "sinks") if p.sinks else None,
        **scalars("i64", "o_strides", b=ob, h=oh),
        **_schedule(p, shares),
        "window_left": Scalar("i32", p.window[0]),
    }
    constants = {
        "o_strides.ROW": p.output_strides[2],
        "o_strides.COLUMN": 1,
        "ALIGN_O": align_o,
        "GROUP": p.group,
        "DV": p.head_dim_v,
        "BLOCK_N": config.block_n,
        "BLOCK_B": _block_b(p, shares),
        "BLOCK_S": merge.block_s,
        "ROWS": merge.rows,
        "COLUMNS": merge.columns,
        "TILES_DV": -(-block_dim(p.head_dim_v) // merge.columns),
        "HAS_LEFT": p.window[0] >= 0,
        "BALANCED": shares.schedule == "balanced",
        "STORE_LSE": p.return_lse,
    }
    return _triton(_merge_splits_kernel, plan, grid, arguments, constants, MERGE_WARPS)


def _append(plan: DecodePlan, grid: tuple[int, int, int]) -> PreparedKernel:
    p = plan.problem
    rotary = p.rotary_dim > 0
    k, v, q = p.k_strides, p.v_strides, p.q_strides
    inputs = _inputs(p)
    arguments: dict[str, Argument] = {
        "k_new_ptr": Pointer(p.dtype, "k_new"),
        "v_new_ptr": Pointer(p.dtype, "v_new"),
        **inputs,
        **_places(p),
        "cache.leftpad_ptr": None,  # it would be taken from the positions that are rotated by
        "q_ptr": inputs["q_ptr"] if rotary else None,
        "q_out_ptr": Pointer(p.dtype, "q_out", aligned=True) if rotary else None,
        "cos_ptr": Pointer(p.rotary_dtype, "cos") if rotary else None,
        "sin_ptr": Pointer(p.rotary_dtype, "sin") if rotary else None,
        **_scales(p),
        **scalars("i64", "k_new_strides", **dict(zip("bhm", p.new_k_strides[:3], strict=True))),
        **scalars("i64", "v_new_strides", **dict(zip("bhm", p.new_v_strides[:3], strict=True))),
        **scalars("i64", "k_strides", page=k[0], row=k[1], h=k[2]),
        **scalars("i64", "v_strides", page=v[0], row=v[1], h=v[2]),
        **scalars("i64", "q_strides", b=q[0], h=q[1], m=q[2]),
        "stride_cos": Scalar("i64", p.rotary_stride),
        "stride_tb": Scalar("i64", p.table_stride),
        **scalars("i32", "sizes", heads=p.heads, heads_kv=p.heads_kv, seqlen_q=p.seqlen_q, seqlen_new=p.seqlen_new),
        **scalars("i32", "sizes", capacity=p.capacity, seqlen_rotary=p.rotary_length),
    }
    call = AppendCall(
        D=p.head_dim,
        DV=p.head_dim_v,
        BLOCK_D=block_dim(p.head_dim),
        BLOCK_DV=block_dim(p.head_dim_v),
        BLOCK_T=APPEND_TOKENS,
        PAGE_SIZE=p.page_size,
        ROTARY_DIM=p.rotary_dim,
        INTERLEAVED=p.rotary_interleaved,
        ADVANCE=p.rotary_advance,
        FP8=p.is_fp8,
        K_BY_TOKEN=p.k_by_token,
        V_BY_TOKEN=p.v_by_token,
    )
    return _triton(_append_kernel, plan, grid, arguments, {"CALL": call}, APPEND_WARPS)
