"""Turn a plan of ``forward_features_gluon_sm90`` into kernels to compile and launches to make."""

from __future__ import annotations

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
from ..kernel_arguments import VariantCall
from ..problem import LOG2_E, AttentionProblem
from ..tiles import HopperConfig, Plan, cdiv
from .plan_sm90 import HOPPER_ROWS
from .prepared import hopper_tiles
from .sequences_triton import _order_sequences_kernel
from .variants_gluon_sm90 import _forward_features_sm90_kernel
from .variants_plan import ORDER_SEQUENCES, ORDER_WARPS, batch_inner, heads_fit, heads_together


def prepare_features(plan: Plan, tokens: tuple[int, int] | None = None) -> tuple[PreparedKernel, ...]:
    """Return the kernels of ``plan``, in the order in which they are launched.

    ``tokens`` are those of q and of k and v in a call with packed sequences; left out, all are the longest.
    """
    if not plan.launches:
        return ()
    problem = plan.problem
    if not problem.packed:
        return (_forward(plan, None),)
    longest = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    return _order(plan), _forward(plan, tokens or longest)


def _order(plan: Plan) -> PreparedKernel:
    p = plan.problem
    assert isinstance(plan.config, HopperConfig)
    fit = heads_fit(p)
    arguments: dict[str, Argument] = {
        "sequences_ptr": Pointer("i32"),
        "cu_seqlens_q_ptr": Pointer("i32"),
        "cu_seqlens_k_ptr": Pointer("i32"),
        "seqused_q_ptr": Pointer("i32") if "q" in p.seqused else None,
        "seqused_k_ptr": Pointer("i32") if "k" in p.seqused else None,
        "batch": Scalar("i32", p.batch),
        "heads": Scalar("i32", p.heads),
        "together_keys": None if fit is None else Scalar("i32", fit),
    }
    constants = {"BLOCK_M": HOPPER_ROWS * plan.config.warpgroups, "BLOCK_B": ORDER_SEQUENCES}
    source = kernel_source(_order_sequences_kernel, arguments, constants, num_warps=ORDER_WARPS)
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def _scales(problem: AttentionProblem, config: HopperConfig) -> tuple[float, float]:
    """Return by what scores are multiplied as exponents of two, and before a softcap or what is added."""
    p = problem
    if p.softcap:
        return p.softcap * LOG2_E, p.scale / p.softcap
    if p.bias:  # its exponentials are to base e
        return LOG2_E, p.scale
    return (1.0, p.scale_log2) if p.alibi and not config.slope_product else (p.scale_log2, 0.0)


def _bias(problem: AttentionProblem, config: HopperConfig) -> Descriptor:
    """Return the tiles of a bias for the rows of one warpgroup; of one row where it has one for all."""
    p = problem
    sizes = (p.batch, p.heads, p.seqlen_q)
    own = tuple(size if stride else 1 for size, stride in zip(sizes, p.bias_strides, strict=False))
    tile = (1, 1, HOPPER_ROWS if p.bias_strides[2] else 1, config.block_n)
    return Descriptor(p.bias, tile, (*own, p.seqlen_k), p.bias_strides, "bias")


def _forward(plan: Plan, tokens: tuple[int, int] | None) -> PreparedKernel:
    p, config, grid = plan.problem, plan.config, plan.launches[-1].grid
    assert isinstance(config, HopperConfig)
    left, right = p.window
    together = 1 if p.packed else heads_together(p, config, grid[0])
    dealt = p.batch * p.heads if heads_fit(p) is None else together
    tiles, tile = hopper_tiles(p, config, tokens)
    outer, inner = _scales(p, config)
    arguments: dict[str, Argument] = {
        **tiles,
        "lse_ptr": Pointer("fp32", aligned=True),
        "sinks_ptr": Pointer(p.sinks) if p.sinks else None,
        "alibi_ptr": Pointer(p.alibi) if p.alibi else None,
        "bias_desc": _bias(p, config) if p.bias else None,
        "o_ptr": Pointer(p.dtype, aligned=True) if p.packed else None,
        "sequences_ptr": Pointer("i32") if p.packed else None,
        "counter_ptr": Pointer("i32") if p.packed else None,
        **scalars(
            "i32",
            "sizes",
            batch=p.batch,
            heads=p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=cdiv(p.seqlen_q, HOPPER_ROWS * config.warpgroups),
            together=together,
            dealt=dealt,
        ),
        **scalars("i32", "window", left=max(left, 0), right=max(right, 0)),
        **scalars("fp32", scale_log2=outer, inner_scale=inner),
        "alibi_stride": Scalar("i32", p.alibi_stride) if p.alibi else None,
    }
    constants = {
        "CALL": VariantCall(
            GROUP=p.group,
            HAS_SEQUSED_Q="q" in p.seqused,
            HAS_SOFTCAP=p.softcap > 0,
            BOUND_LEFT=p.bounded_left,
            BOUND_RIGHT=p.bounded_right,
            SEES_AHEAD=bool(p.alibi) and not (p.bounded_right and right <= 0),
            SLOPE_PRODUCT=config.slope_product,
            BIAS_BATCH=bool(p.bias) and p.bias_strides[0] != 0,
            BIAS_HEADS=bool(p.bias) and p.bias_strides[1] != 0,
            BIAS_ROWS=bool(p.bias) and p.bias_strides[2] != 0,
            BATCH_INNER=batch_inner(p),
            STORE_LSE=p.return_lse,
            DV=p.head_dim_v,
        ),
        "TILE": tile,
    }
    source = kernel_source(_forward_features_sm90_kernel, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, grid, arguments)
