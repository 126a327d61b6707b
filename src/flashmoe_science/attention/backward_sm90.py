"""Launch the backward kernels for Hopper: what each is given, and in which order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..gpu.compile import KernelSource
from ..gpu.gluon_versions import descriptor_type
from ..gpu.tensor_map import TensorMap
from .backward_gluon_sm90 import _backward_sm90_kernel
from .backward_passes_triton import _finish_dq_kernel, _prepare_backward_kernel
from .prepare import PreparedKernel
from .problem import LOG2_E

KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_ROWS = 64  # keys of a warpgroup
_PART = 4096  # numbers of dQ that a warpgroup computes of a query tile
_LINE = 32  # numbers in 128 bytes, as TMA takes them from swizzled shared memory


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the backward kernel for Hopper splits its work."""

    block_m: int  # query rows of a step
    warpgroups: int = 2  # 64 keys each
    num_stages: int = 2  # query tiles in flight
    deterministic: bool = True
    programs: int = 132  # that draw key tiles; more than the GPU runs at a time find none left
    # K/V heads whose first key tiles are drawn first, then their second ones... 132 programs then walk over the same
    # query tiles eight at a time: fewer, and Q, dO and dQ come from memory; more, and all wait for one another.
    heads_per_group: int = 16
    dependent_launch: bool = True  # a kernel is set up while the one before ends
    prepare_warps: int = 4
    finish_warps: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardShape:
    """What the kernels of a backward pass depend on. Strides in elements, without the innermost, which is 1."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    scale: float
    has_dlse: bool  # the LSE has a gradient of its own
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    o_strides: tuple[int, ...]
    do_strides: tuple[int, ...]
    dq_strides: tuple[int, ...]
    dk_strides: tuple[int, ...]
    dv_strides: tuple[int, ...]


def default_config(shape: BackwardShape) -> BackwardConfig:
    """Return the configuration of a head size."""
    return BackwardConfig(block_m=128 if columns_of(shape)[0] == 64 else 64)


def columns_of(shape: BackwardShape) -> tuple[int, int]:
    """Return the columns of Q and of V that the kernel computes: 64 or 128, of which TMA fills in what there is not."""
    dv = 64 if shape.head_dim_v <= 64 else 128
    return 64 if max(shape.head_dim, shape.head_dim_v) <= 64 else 128, dv


def tiles_of(shape: BackwardShape, config: BackwardConfig) -> tuple[int, int]:
    """Return the query tiles and the key tiles of one head."""
    return -(-shape.seqlen_q // config.block_m), -(-shape.seqlen_k // (_ROWS * config.warpgroups))


def prepare(shape: BackwardShape, config: BackwardConfig) -> tuple[PreparedKernel, PreparedKernel, PreparedKernel]:
    """Return the kernels in the order in which they are launched."""
    kind, d, dv, m = shape.dtype, shape.head_dim, shape.head_dim_v, config.block_m
    tiles_m, tiles_n = tiles_of(shape, config)
    d_block, dv_block = columns_of(shape)
    heads_total, tile = shape.batch * shape.heads, m * d_block
    before = KernelSource(
        _prepare_backward_kernel,
        tuple(
            {
                **dict.fromkeys(("o_ptr", "do_ptr"), f"*{kind}"),
                **dict.fromkeys(("lse_ptr", "dlse_ptr", "stats_ptr", "dq_ptr"), "*fp32"),
                "turn_ptr": "*i32",
                **dict.fromkeys(("stride_ob", "stride_oh", "stride_dob", "stride_doh"), "i64"),
                **dict.fromkeys(("heads", "seqlen_q", "tiles_m"), "i32"),
            }.items()
        ),
        tuple(
            {
                "STRIDE_OM": shape.o_strides[2],
                "STRIDE_DOM": shape.do_strides[2],
                "DV": dv,
                "BLOCK_DV": 1 << (dv - 1).bit_length(),
                "BLOCK_M": m,
                "TILE": tile,
                "HAS_DLSE": shape.has_dlse,
                "HAS_TO_ZERO": not config.deterministic,
            }.items()
        ),
        frozenset(
            ("o_ptr", "do_ptr", "lse_ptr", "stats_ptr", "dq_ptr", "stride_ob", "stride_oh", "stride_dob", "stride_doh")
        ),
        config.prepare_warps,
    )
    before_values = (*shape.o_strides[:2], *shape.do_strides[:2], shape.heads, shape.seqlen_q, tiles_m)

    parts = tile // _PART
    rows, keys = (1, 1, m), (1, 1, _ROWS)
    descriptors = {
        "q_desc": descriptor_type(kind, (*rows, d_block)),
        "k_desc": descriptor_type(kind, (*keys, d_block)),
        "v_desc": descriptor_type(kind, (*keys, dv_block)),
        "do_desc": descriptor_type(kind, (*rows, dv_block)),
        "dk_desc": descriptor_type(kind, (*keys, d_block)),
        "dv_desc": descriptor_type(kind, (*keys, dv_block)),
        "stats_desc": descriptor_type("fp32", (2 * m,)),
        "dq_desc": descriptor_type("fp32", (parts * _PART // _LINE, _LINE)),
    }
    integers = ("heads", "heads_kv", "seqlen_q", "seqlen_k", "tiles_m", "tiles_n", "heads_total", "heads_per_group")
    main = KernelSource(
        _backward_sm90_kernel,
        tuple(
            {
                **descriptors,
                "turn_ptr": "*i32",
                **dict.fromkeys(integers, "i32"),
                **dict.fromkeys(("scale_log2", "scale"), "fp32"),
            }.items()
        ),
        tuple(
            {
                "GROUP": shape.heads // shape.heads_kv,
                "WARPGROUPS": config.warpgroups,
                "STAGES": config.num_stages,
                "IS_CAUSAL": shape.causal,
                "IS_ORDERED": config.deterministic,
                "MATRIX_REGISTERS": 240,
            }.items()
        ),
        frozenset(("turn_ptr",)),
        num_warps=4,
        dependent_launch=config.dependent_launch,
    )
    kv_total = shape.batch * shape.heads_kv
    main_values = (
        shape.heads, shape.heads_kv, shape.seqlen_q, shape.seqlen_k, tiles_m, tiles_n, kv_total,
        min(config.heads_per_group, kv_total), shape.scale * LOG2_E, shape.scale,
    )  # fmt: skip
    q_shape = (shape.batch, shape.heads, shape.seqlen_q)
    kv_shape = (shape.batch, shape.heads_kv, shape.seqlen_k)
    maps = (
        TensorMap(kind, (*q_shape, d), (*shape.q_strides[:3], 1)),
        TensorMap(kind, (*kv_shape, d), (*shape.k_strides[:3], 1)),
        TensorMap(kind, (*kv_shape, dv), (*shape.v_strides[:3], 1)),
        TensorMap(kind, (*q_shape, dv), (*shape.do_strides[:3], 1)),
        TensorMap(kind, (*kv_shape, d), (*shape.dk_strides[:3], 1)),
        TensorMap(kind, (*kv_shape, dv), (*shape.dv_strides[:3], 1)),
        TensorMap("fp32", (heads_total * tiles_m * 2 * m,), (1,)),
        TensorMap("fp32", (heads_total * tiles_m * tile // _LINE, _LINE), (_LINE, 1)),
    )
    after = KernelSource(
        _finish_dq_kernel,
        tuple(
            {
                "acc_ptr": "*fp32",
                "turn_ptr": "*i32",
                "dq_ptr": f"*{kind}",
                **dict.fromkeys(("stride_b", "stride_h"), "i64"),
                **dict.fromkeys(("heads", "seqlen_q", "tiles_m"), "i32"),
                "scale": "fp32",
            }.items()
        ),
        tuple(
            {
                "STRIDE_M": shape.dq_strides[2],
                "D": d,
                "BLOCK_M": m,
                "PARTS": parts,
                "IS_ZEROED": not config.deterministic,
            }.items()
        ),
        frozenset(("acc_ptr", "turn_ptr", "dq_ptr", "stride_b", "stride_h")),
        config.finish_warps,
        dependent_launch=config.dependent_launch,
    )
    after_values = (*shape.dq_strides[:2], shape.heads, shape.seqlen_q, tiles_m, shape.scale)
    return (
        PreparedKernel(before, (heads_total * tiles_m, 1, 1), before_values),
        PreparedKernel(main, (min(kv_total * tiles_n, config.programs), 1, 1), main_values, maps),
        PreparedKernel(after, (heads_total * tiles_m * parts, 1, 1), after_values),
    )


@functools.lru_cache(maxsize=4096)
def _launches(shape: BackwardShape, config: BackwardConfig, device: int) -> tuple[Callable[..., None], ...]:
    from ..gpu.launch import prepare_launch

    return tuple(
        prepare_launch(kernel.source, 90, device, kernel.grid, kernel.scalars, kernel.tensor_maps)
        for kernel in prepare(shape, config)
    )


def shape_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, do: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, causal: bool,
    scale: float | None, has_dlse: bool = False,
) -> BackwardShape:  # fmt: skip
    """Return what the kernels depend on; callers have validated the tensors."""
    strides = (tuple(x.stride()[:3]) for x in (q, k, v, o, do, *outputs))
    return BackwardShape(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], KINDS[q.dtype], causal,
        q.shape[3] ** -0.5 if scale is None else scale, has_dlse, *strides,
    )  # fmt: skip


def launch(
    q: torch.Tensor,  # [B, H, Sq, D]
    k: torch.Tensor,  # [B, HK, Sk, D]
    v: torch.Tensor,  # [B, HK, Sk, DV]
    o: torch.Tensor,  # [B, H, Sq, DV]
    lse: torch.Tensor,  # [B, H, Sq] fp32, natural log
    do: torch.Tensor,  # [B, H, Sq, DV]
    *,
    causal: bool = False,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,  # [B, H, Sq] fp32: the gradient of lse
    config: BackwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK and dV, in the dtype of their tensors; callers have validated shapes, dtypes and strides."""
    dq, dk, dv = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (q, k, v))
    shape = shape_of(q, k, v, o, do, (dq, dk, dv), causal=causal, scale=scale, has_dlse=dlse is not None)
    config = config or default_config(shape)
    tiles_m, _ = tiles_of(shape, config)
    tiles = shape.batch * shape.heads * tiles_m
    floats: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    stats = torch.empty(tiles * 2 * config.block_m, **floats)
    acc = torch.empty(tiles * config.block_m * columns_of(shape)[0], **floats)
    turns = torch.empty(tiles + 1, dtype=torch.int32, device=q.device)
    device = q.device.index or 0
    before, main, after = _launches(shape, config, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    address = torch.Tensor.data_ptr
    before(stream, *map(address, (o, do, lse, lse if dlse is None else dlse, stats, acc, turns)))
    main(stream, *map(address, (q, k, v, do, dk, dv, stats, acc, turns)))
    after(stream, *map(address, (acc, turns, dq)), 0)
    return dq, dk, dv
