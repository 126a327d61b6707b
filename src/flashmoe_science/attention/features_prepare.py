"""Turn a plan of ``forward_features_gluon_sm90`` into kernels to compile and launches to make."""

from __future__ import annotations

from typing import Any

from ..gpu.compile import KernelSource
from ..gpu.tensor_map import TensorMap
from .features_plan import ORDER_SEQUENCES, ORDER_WARPS, heads_fit, heads_together
from .forward_features_gluon_sm90 import _forward_features_sm90_kernel
from .hopper_plan import HOPPER_REGISTERS, HOPPER_ROWS
from .prepared import PreparedKernel, hopper_tiles
from .problem import LOG2_E, AttentionProblem
from .sequences_triton import _order_sequences_kernel
from .tiles import HopperConfig, Plan, cdiv


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
    problem = plan.problem
    assert isinstance(plan.config, HopperConfig)
    given = ["sequences_ptr", *(f"{name}_ptr" for name in problem.extras if name != "sinks")]
    fit = heads_fit(problem)
    scalars = {"batch": problem.batch, "heads": problem.heads, **({} if fit is None else {"together_keys": fit})}
    missing = {f"seqused_{side}_ptr": None for side in "qk" if side not in problem.seqused}
    source = KernelSource(
        _order_sequences_kernel,
        (*((name, "*i32") for name in given), *((name, "i32") for name in scalars)),
        (
            *missing.items(),
            *({"together_keys": None}.items() if fit is None else ()),
            ("BLOCK_M", HOPPER_ROWS * plan.config.warpgroups),
            ("BLOCK_B", ORDER_SEQUENCES),
        ),
        frozenset(),
        ORDER_WARPS,
    )
    return PreparedKernel(source, plan.launches[0].grid, (*scalars.values(),))


def _forward(plan: Plan, tokens: tuple[int, int] | None) -> PreparedKernel:
    problem, config = plan.problem, plan.config
    assert isinstance(config, HopperConfig)
    kind, launch = problem.dtype, plan.launches[-1]
    tiles = hopper_tiles(problem, config)
    pointers = {
        "lse_ptr": "*fp32",
        "sinks_ptr": f"*{problem.sinks}" if problem.sinks else None,
        "o_ptr": f"*{kind}" if problem.packed else None,
        "sequences_ptr": "*i32" if problem.packed else None,
        "counter_ptr": "*i32" if problem.packed else None,
    }
    arguments = {
        **tiles.descriptors,
        **{name: pointer for name, pointer in pointers.items() if pointer},
        **tiles.more,
        **dict.fromkeys(("batch", "heads", "seqlen_q", "seqlen_k", "tiles_m"), "i32"),
        **dict.fromkeys(("together", "dealt", "window_left", "window_right"), "i32"),
        **dict.fromkeys(("scale_log2", "cap_scale"), "fp32"),
    }
    constants: dict[str, Any] = {
        "GROUP": problem.group,
        "WARPGROUPS": config.warpgroups,
        "STAGES": config.num_stages,
        "HAS_SEQUSED_Q": "q" in problem.seqused,
        "HAS_SOFTCAP": problem.softcap > 0,
        "BOUND_LEFT": problem.bounded_left,
        "BOUND_RIGHT": problem.bounded_right,
        "PING_PONG": config.ping_pong,
        "STORE_LSE": problem.return_lse,
        "MATRIX_REGISTERS": HOPPER_REGISTERS[config.warpgroups],
        "DV": problem.head_dim_v,
        **tiles.constants,
        **{name: None for name, pointer in pointers.items() if not pointer},
    }
    source = KernelSource(
        _forward_features_sm90_kernel,
        tuple(arguments.items()),
        tuple(constants.items()),
        frozenset(name for name in ("lse_ptr", "o_ptr") if pointers[name]),
        num_warps=4,
        dependent_launch=True,
    )
    left, right = problem.window
    together = 1 if problem.packed else heads_together(problem, config, launch.grid[0])
    dealt = problem.batch * problem.heads if heads_fit(problem) is None else together
    values = (
        problem.batch,
        problem.heads,
        problem.seqlen_q,
        problem.seqlen_k,
        cdiv(problem.seqlen_q, HOPPER_ROWS * config.warpgroups),
        together,
        dealt,
        max(left, 0),
        max(right, 0),
        problem.softcap * LOG2_E if problem.softcap else problem.scale_log2,
        problem.scale / problem.softcap if problem.softcap else 0.0,
    )
    return PreparedKernel(source, launch.grid, values, tiles.maps(_maps(problem, tokens)))


def _maps(problem: AttentionProblem, tokens: tuple[int, int] | None) -> tuple[TensorMap, ...]:
    """Return what TMA is told of q, k, v and o: packed sequences are one of all tokens."""
    p, kind = problem, problem.dtype
    batch, seqlen_q, seqlen_k = (p.batch, p.seqlen_q, p.seqlen_k) if tokens is None else (1, *tokens)
    k_strides, v_strides = p.k_strides, p.v_strides
    if seqlen_k == 0:  # a map of one token: its values are masked
        seqlen_k, k_strides, v_strides = 1, (0, p.head_dim, 0, 1), (0, p.head_dim_v, 0, 1)
    return (
        TensorMap(kind, (batch, p.heads, seqlen_q, p.head_dim), p.q_strides),
        TensorMap(kind, (batch, p.heads_kv, seqlen_k, p.head_dim), k_strides),
        TensorMap(kind, (batch, p.heads_kv, seqlen_k, p.head_dim_v), v_strides),
        TensorMap(kind, (batch, p.heads, seqlen_q, p.head_dim_v), p.output_strides),
    )
