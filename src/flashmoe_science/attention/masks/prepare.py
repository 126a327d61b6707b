"""Turn a plan of a call with a mask into kernels to compile and launches to make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel, scalars
from ..backward.problem import BackwardProblem
from ..forward.plan_sm90 import hopper_heads_per_group
from ..forward.prepared import hopper_tiles
from ..problem import LOG2_E, AttentionProblem, Strides
from ..tiles import ForwardConfig, HopperConfig, Plan, block_dim, cdiv
from .arguments import MaskedCall, MaskedTile
from .dkv_triton import _masked_kv_kernel
from .dq_triton import _masked_q_kernel
from .forward_triton import _masked_forward_kernel
from .gluon_sm90 import _masked_forward_sm90_kernel
from .lists import BLOCK

Grid = tuple[int, int, int]
Parts = tuple[dict[str, Argument], dict[str, Any]]  # arguments and constants
_MAX_REGISTERS = 255  # all that a thread can have


def prepare_masked(plan: Plan, align: int) -> PreparedKernel:
    """Return the forward kernel; ``align`` elements divide every row of q, k and v."""
    p, config = plan.problem, plan.config
    assert isinstance(config, ForwardConfig)
    align_out = math.gcd(8, p.head_dim_v)
    tensors = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides}
    arguments, constants = _shared(p, tensors, {"o": p.output_strides}, align, align_out, of_queries=True)
    arguments |= {
        **{f"{name}_ptr": Pointer(p.dtype, aligned=p.pointer_alignment >= 16) for name in "qkv"},
        "o_ptr": Pointer(p.dtype, aligned=True),
        "lse_ptr": Pointer("fp32", aligned=True),
        "sinks_ptr": Pointer(p.sinks) if p.sinks else None,
        "sizes.tiles": Scalar("i32", cdiv(p.seqlen_q, config.block_m)),
    }
    constants["TILE"] = _tile(config, [*tensors.values(), p.output_strides])
    return _prepare(_masked_forward_kernel, plan.launches[0].grid, arguments, constants, config)


def prepare_masked_hopper(plan: Plan) -> PreparedKernel:
    """Return the forward kernel for Hopper."""
    p, config = plan.problem, plan.config
    assert isinstance(config, HopperConfig)
    tiles, tile = hopper_tiles(p, config)
    arguments: dict[str, Argument] = {
        **tiles,
        "lse_ptr": Pointer("fp32", aligned=True),
        "mask_lists_ptr": Pointer("i32"),
        "mask_bits_ptr": Pointer("i32"),
        **scalars("i32", "lists", **_lists(p, of_queries=True)),
        "order": Scalar("i32", _order_of_blocks(p)),
        **scalars(
            "i32",
            "sizes",
            heads=p.heads,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            tiles_m=cdiv(p.seqlen_q, BLOCK),
            heads_total=p.batch * p.heads,
            heads_per_group=hopper_heads_per_group(p, 1),
        ),
        "scale_log2": Scalar("fp32", p.scale_log2),
    }
    constants = {"GROUP": p.group, "STORE_LSE": p.return_lse, "TILE": tile}
    source = kernel_source(_masked_forward_sm90_kernel, arguments, constants, num_warps=4, dependent_launch=True)
    return prepare_kernel(source, plan.launches[0].grid, arguments)


def prepare_masked_gradients(
    problem: BackwardProblem, tiles: tuple[Any, Any], grids: dict[str, Grid], outputs: Sequence[tuple[str, ...]],
    align: int,
) -> list[PreparedKernel]:  # fmt: skip
    """Return the kernels behind delta.

    Args:
        problem: the gradients.
        tiles: of the kernel that owns keys, and of the one that owns queries.
        grids: by the kernels' names.
        outputs: what each launch of the first kernel writes.
        align: elements that divide every row that is read.
    """
    p, kernels = problem.forward, []
    tensors = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides, "do": problem.do_strides}
    inputs: dict[str, Argument] = {
        **{f"{name}_ptr": Pointer(p.dtype, aligned=p.pointer_alignment >= 16) for name in tensors},
        "lse_ptr": Pointer("fp32"),  # where autograd keeps it
        "delta_ptr": Pointer("fp32", aligned=True),
        "grad_scale": Scalar("fp32", p.scale),
    }
    written = {"dk": problem.dk_strides, "dv": problem.dv_strides}
    for names in outputs if problem.wants_kv else ():
        align_out = math.gcd(8, p.head_dim, p.head_dim_v)
        arguments, constants = _shared(p, tensors, written, align, align_out, of_queries=False)
        arguments |= inputs
        arguments |= {f"{d}_ptr": Pointer(p.dtype, aligned=True) if f"{d}_ptr" in names else None for d in written}
        arguments["sizes.tiles"] = Scalar("i32", cdiv(p.seqlen_k, tiles[0].block_n))
        constants["TILE"] = _tile(tiles[0], [*tensors.values(), *written.values()])
        kernels.append(_prepare(_masked_kv_kernel, grids["_masked_kv_kernel"], arguments, constants, tiles[0]))
    if problem.wants_q:
        of_q = {"dq": problem.dq_strides}
        arguments, constants = _shared(p, tensors, of_q, align, math.gcd(8, p.head_dim), of_queries=True)
        arguments |= inputs
        arguments["dq_ptr"] = Pointer(p.dtype, aligned=True)
        arguments["sizes.tiles"] = Scalar("i32", cdiv(p.seqlen_q, tiles[1].block_m))
        constants["TILE"] = _tile(tiles[1], [*tensors.values(), problem.dq_strides])
        kernels.append(_prepare(_masked_q_kernel, grids["_masked_q_kernel"], arguments, constants, tiles[1]))
    return kernels


def _prepare(
    function: Any, grid: Grid, arguments: dict[str, Argument], constants: dict[str, Any], tile: Any
) -> PreparedKernel:
    source = kernel_source(
        function, arguments, constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
        max_registers=_MAX_REGISTERS,
    )  # fmt: skip
    return prepare_kernel(source, grid, arguments)


def _tile(tile: Any, strides: Sequence[tuple[int, ...]]) -> MaskedTile:
    widest = max(abs(stride) for of_tensor in strides for stride in of_tensor[2:])
    wide = max(tile.block_m, tile.block_n, 256) * widest >= 2**31
    return MaskedTile(BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, NUM_STAGES=tile.num_stages, WIDE=wide)


def _shared(
    p: AttentionProblem, read: Mapping[str, Strides], written: Mapping[str, Strides], align: int,
    align_out: int, *, of_queries: bool,
) -> Parts:  # fmt: skip
    """Return what all kernels have in common; strides are those of tensors that are read, and that are written."""
    sizes = {"heads": p.heads, "heads_kv": p.heads_kv, "seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k}
    arguments: dict[str, Argument] = {
        "mask_lists_ptr": Pointer("i32"),
        "mask_bits_ptr": Pointer("i32"),
        **{f"lists.{name}": Scalar("i32", value) for name, value in _lists(p, of_queries=of_queries).items()},
        **{f"sizes.{name}": Scalar("i32", value) for name, value in sizes.items()},
        "scale": Scalar("fp32", _scale(p)),
        "softcap": Scalar("fp32", p.softcap * LOG2_E) if p.softcap else None,
    }
    constants: dict[str, Any] = {}
    for tensors, unit in ((read, align), (written, align_out)):
        for name, (b, h, row, column) in tensors.items():
            assert b % unit == h % unit == 0, (name, b, h, unit)
            arguments[f"{name}_strides.b"] = Scalar("i64", b // unit)
            arguments[f"{name}_strides.h"] = Scalar("i64", h // unit)
            constants |= {f"{name}_strides.ROW": row, f"{name}_strides.COLUMN": column}
    constants["CALL"] = MaskedCall(
        GROUP=p.group,
        D=p.head_dim,
        DV=p.head_dim_v,
        BLOCK_D=block_dim(p.head_dim),
        BLOCK_DV=block_dim(p.head_dim_v),
        ALIGN=align,
        ALIGN_OUT=align_out,
        MASK_M=p.seqlen_q % BLOCK != 0,
        MASK_N=p.seqlen_k % BLOCK != 0,
        STORE_LSE=p.return_lse,
        PRECISION="ieee" if p.dtype == "fp32" else "tf32",  # only fp32 operands read it
    )
    return arguments, constants


def _scale(p: AttentionProblem) -> float:
    if p.softcap:  # as ``cap_scores`` takes it
        return p.scale / p.softcap if p.dtype == "fp32" else p.softcap_scale
    return p.scale_log2


def _order_of_blocks(p: AttentionProblem) -> int:
    """Return where the order of the blocks of queries lies in the lists."""
    return sum(2 * (p.mask_batch * p.mask_heads * cdiv(length, BLOCK) + 1) for length in (p.seqlen_q, p.seqlen_k))


def _lists(p: AttentionProblem, *, of_queries: bool) -> dict[str, int]:
    """Return the fields of ``MaskLists``."""
    blocks_q, blocks_k = cdiv(p.seqlen_q, BLOCK), cdiv(p.seqlen_k, BLOCK)
    masks, blocks = p.mask_batch * p.mask_heads, blocks_q if of_queries else blocks_k
    return {
        "heads": p.mask_heads if p.mask_batch > 1 else 0,
        "share": p.heads // p.mask_heads,
        "blocks": blocks,
        "first": 0 if of_queries else 2 * (masks * blocks_q + 1),
        "count": masks * blocks + 1,
    }
