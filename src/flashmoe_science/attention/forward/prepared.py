"""The tiles of the forward kernels for Hopper, as arguments."""

from __future__ import annotations

from ...gpu.signature import Argument, Descriptor
from ..kernel_arguments import HopperTile
from ..problem import AttentionProblem, Strides
from ..tiles import HopperConfig
from .plan_sm90 import HOPPER_REGISTERS, HOPPER_ROWS, hopper_columns, hopper_output_columns


def hopper_tiles(
    problem: AttentionProblem, config: HopperConfig, tokens: tuple[int, int] | None = None
) -> tuple[dict[str, Argument], HopperTile]:
    """Return the descriptors of q, k, v and o, and the constants of a program's tile.

    ``tokens`` are those of q and of k and v in a call with packed sequences: each tensor is one sequence of all.
    """
    p = problem
    (d, d_more), (dv, dv_more) = hopper_columns(p.head_dim), hopper_columns(p.head_dim_v)
    rows, keys = (1, config.pack, HOPPER_ROWS // config.pack), (1, 1, config.block_n)
    batch, seqlen_q, seqlen_k = (p.batch, p.seqlen_q, p.seqlen_k) if tokens is None else (1, *tokens)
    k_strides, v_strides = p.k_strides, p.v_strides
    if tokens is not None and seqlen_k == 0:  # a map of one token: its values are masked
        seqlen_k, k_strides, v_strides = 1, (0, p.head_dim, 0, 1), (0, p.head_dim_v, 0, 1)

    def tiled(name: str, box: tuple[int, ...], shape: tuple[int, ...], strides: Strides, first: str = "") -> Descriptor:
        return Descriptor(p.dtype, box, shape, strides, name, same_as=first)

    q_shape, kv_shape = (batch, p.heads, seqlen_q), (batch, p.heads_kv, seqlen_k)
    q, k, v = (*q_shape, p.head_dim), (*kv_shape, p.head_dim), (*kv_shape, p.head_dim_v)
    o = (*q_shape, p.head_dim_v)
    more = bool(d_more), bool(d_more), bool(dv_more)
    arguments: dict[str, Argument] = {
        "q_desc": tiled("q", (*rows, d), q, p.q_strides),
        "k_desc": tiled("k", (*keys, d), k, k_strides),
        "v_desc": tiled("v", (*keys, dv), v, v_strides),
        "o_desc": tiled("o", (*rows, hopper_output_columns(p, config)), o, p.output_strides),
        "q_more_desc": tiled("q", (*rows, d_more), q, p.q_strides, "q_desc") if more[0] else None,
        "k_more_desc": tiled("k", (*keys, d_more), k, k_strides, "k_desc") if more[1] else None,
        "v_more_desc": tiled("v", (*keys, dv_more), v, v_strides, "v_desc") if more[2] else None,
    }
    registers = HOPPER_REGISTERS[config.warpgroups]
    return arguments, HopperTile(config.warpgroups, config.num_stages, config.ping_pong, registers, d_more, dv, dv_more)
