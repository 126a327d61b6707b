"""Which kernels give the gradients of a problem on a GPU, with which tiles and grids, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, UnsupportedError, shown
from ...gpu.planning import PlannedLaunch, refuse_architecture
from ...gpu.specs import GpuSpec, shared_memory_limit
from ..forward.plan import MAX_HEAD_DIM
from ..tiles import block_dim, cdiv
from .plan_sm90 import (
    HopperBackwardConfig,
    hopper_backward_config,
    hopper_backward_kernel,
    hopper_backward_launches,
    hopper_backward_refusal,
    is_pack,
    is_wide,
    key_tiles,
    too_short_for_tiles,
)
from .problem import BackwardProblem

BACKWARD_KERNEL = "FLASHMOE_BACKWARD_KERNEL"  # in the environment: a name to force, which never falls back
MASKED_BACKWARD_KERNEL = "backward_masked_triton"
BACKWARD_KERNELS = ("backward_gluon_sm90", "backward_triton", MASKED_BACKWARD_KERNEL, "reference")
DELTA_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one kernel of ``backward_triton``."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int  # tiles in flight of what the loop reads


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of ``backward_triton``."""

    kv: Tile  # of the kernel that owns keys
    q: Tile  # of the kernel that owns queries
    bias: Tile  # of the kernel that owns a part of the bias
    kv_apart: bool = False  # whether dK and dV have a launch each


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """How the gradients of one problem are made on one GPU."""

    problem: BackwardProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: BackwardConfig | HopperBackwardConfig | None
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        if isinstance(self.config, BackwardConfig):
            for name, tile in (("keys", self.config.kv), ("queries", self.config.q)):
                lines.append(f"  {name:7} {_words(tile)}")
        elif self.config is not None:
            lines.append(f"  config  {_words(self.config)}")
        launches = [f"  launch  {at.pattern}, grid {at.grid}, {at.block[0]} threads" for at in self.launches]
        return "\n".join([*lines, *launches])

    def __str__(self) -> str:
        return self.as_text()


def _words(config: Tile | HopperBackwardConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """One row of the tables: what features and rests need in registers decides between tiles."""

    kv: Tile  # queries are a multiple of its rows, and there are no features
    kv_ragged: Tile  # they are not, or sequences are packed
    kv_features: Tile  # with a window, a softcap, ALiBi or a bias
    q: Tile
    q_features: Tile
    bias: Tile
    kv_apart: bool = False  # whether dK and dV have a launch each where there are no features


def _row(
    kv: str, kv_ragged: str, kv_features: str, q: str, q_features: str, bias: str, *, kv_apart: bool = False
) -> BackwardTiles:
    """Return a row from tiles written as rows x keys x warps x stages."""
    a, b, c, d, e, f = (Tile(*map(int, tile.split("x"))) for tile in (kv, kv_ragged, kv_features, q, q_features, bias))
    return BackwardTiles(a, b, c, d, e, f, kv_apart)


# (architectures) -> {(bytes of an element, columns of the wider of the D and DV tiles): tiles}.
# Each is the first of a list, largest first, that compiles for its architectures within their shared memory, with the
# oldest and the newest Triton, and whose loop over whole tiles touches no local memory; those over tiles at an edge may
# a few times (test_backward_tables.py).
# fp32, whose products take more registers, is held to it up to 64 columns. None was timed against others.
BACKWARD_TABLES: dict[tuple[int, ...], dict[tuple[int, int], BackwardTiles]] = {
    (80,): {
        (2, 64): _row("64x128x8x2", "32x128x8x2", "32x64x4x1", "128x64x8x2", "64x64x4x2", "32x64x4x1"),
        (2, 128): _row("64x64x8x2", "64x64x8x2", "32x64x8x2", "64x64x8x2", "64x32x4x2", "32x32x4x1"),
        (2, 256): _row("32x64x8x2", "32x32x8x2", "16x32x8x1", "64x32x8x1", "32x32x8x1", "16x64x8x1"),
        (4, 64): _row("32x32x8x1", "32x32x8x1", "16x32x8x1", "32x32x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 128): _row("16x32x8x1", "16x32x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 256): _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
    },
    (86, 89): {
        (2, 64): _row("32x128x8x2", "32x128x8x2", "32x64x4x1", "128x64x8x2", "64x64x4x2", "32x64x4x1"),
        (2, 128): _row("64x64x8x2", "64x64x8x2", "32x64x8x2", "64x64x8x2", "64x32x8x2", "32x32x4x1"),
        (2, 256): _row("32x32x8x2", "32x32x8x2", "16x32x8x1", "64x32x8x1", "32x32x8x1", "16x64x8x1"),
        (4, 64): _row("32x32x8x1", "32x32x8x1", "16x32x8x1", "32x32x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 128): _row("16x32x8x1", "16x32x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 256): _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
    },
    (90,): {
        (2, 64): _row("64x128x8x3", "64x128x8x1", "32x64x4x2", "128x128x8x2", "128x64x8x2", "32x64x4x1"),
        (2, 128): _row("64x128x8x2", "32x128x8x3", "16x64x8x2", "128x64x8x2", "128x64x8x2", "64x64x8x1"),
        (2, 256): _row("32x128x8x2", "16x128x8x1", "32x32x8x2", "128x32x8x2", "32x32x8x2", "64x64x8x1", kv_apart=True),
        (4, 64): _row("32x32x8x1", "32x32x8x1", "16x32x8x1", "32x32x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 128): _row("16x32x8x1", "16x32x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 256): _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
    },
    (100,): {
        (2, 64): _row("64x128x8x2", "32x64x4x1", "32x64x4x1", "128x64x8x2", "64x64x4x2", "32x64x4x1"),
        (2, 128): _row("64x128x8x1", "64x64x8x2", "32x128x8x1", "128x64x8x2", "128x32x8x2", "64x64x8x1"),
        (2, 256): _row("64x128x8x1", "32x128x8x1", "32x32x8x2", "128x32x8x2", "64x32x8x1", "64x64x8x1", kv_apart=True),
        (4, 64): _row("32x32x8x1", "32x32x8x1", "16x32x8x1", "32x32x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 128): _row("16x32x8x1", "16x32x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 256): _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
    },
    (120,): {
        (2, 64): _row("64x128x8x2", "32x128x8x2", "32x64x4x1", "128x64x8x2", "64x64x4x2", "32x64x4x1"),
        (2, 128): _row("64x64x8x2", "64x64x8x2", "32x64x8x2", "64x64x8x2", "64x32x8x2", "32x32x4x1"),
        (2, 256): _row("32x32x8x2", "32x32x8x2", "16x32x8x1", "64x32x8x1", "32x32x8x1", "16x64x8x1"),
        (4, 64): _row("32x32x8x1", "32x32x8x1", "16x32x8x1", "32x32x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 128): _row("16x32x8x1", "16x32x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
        (4, 256): _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1"),
    },
}


# D above 256, on every architecture, by bytes of an element: dK and dV have a launch each.
_WIDE_TILES = {
    2: _row("16x32x8x1", "16x32x8x1", "16x32x8x1", "32x16x8x1", "32x16x8x1", "16x16x8x1", kv_apart=True),
    4: _row("16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", "16x16x8x1", kv_apart=True),
}
_WIDE_FP32_BYTES = 131_072  # of shared memory: K, V, Q and dO of 16 rows and 512 columns each
# sm_90: 5.9 ms on an H200, where those above take 10.4 and SDPA 11.9 (lab/hopper/18_head_size_512.txt). Two more took
# 5.1 and 5.2, but spill 2 kB a thread in the kernel of dQ.
_WIDE_TILES_OF_HOPPER = _row(
    "32x32x8x1", "32x32x8x1", "32x32x8x1", "32x32x8x1", "32x32x8x1", "16x16x8x1", kv_apart=True
)
# Tiles for dropout (random numbers take registers) and for packed biases (sequence ends do): (bytes of an element,
# columns) -> tiles of the kernels that own keys, queries and the bias. The same on every architecture, and checked
# there with all features; fp32 has its own.
_SMALL_TILES = {
    (2, 64): (Tile(32, 32, 8, 1), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)),
    (2, 128): (Tile(32, 32, 8, 1), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
    (2, 256): (Tile(16, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 64, 8, 1)),
}


def backward_tiles(arch: int, item_bytes: int, columns: int) -> BackwardTiles:
    """Return the row of the tables for an architecture, an element size and a tile width.

    An architecture without a table takes that of the one before it: sm_103 has the tiles of sm_100.
    """
    if columns > 256:
        return _WIDE_TILES_OF_HOPPER if arch == 90 and item_bytes == 2 else _WIDE_TILES[item_bytes]
    near = max(known for archs in BACKWARD_TABLES for known in archs if known <= arch)
    key = item_bytes, max(64, columns)
    return next(table[key] for archs, table in BACKWARD_TABLES.items() if near in archs)


def backward_config(problem: BackwardProblem, arch: int) -> BackwardConfig:
    """Return the tiles of ``backward_triton``."""
    p = problem.forward
    columns = block_dim(max(p.head_dim, p.head_dim_v))
    if columns > 256 and p.item_bytes == 4 and shared_memory_limit(arch) < _WIDE_FP32_BYTES:
        raise UnsupportedError(
            f"gradients of fp32 with head sizes above 256 need {_WIDE_FP32_BYTES} bytes of shared memory a block, "
            f"sm_{arch} has {shared_memory_limit(arch)}",
            hint="use bf16 or fp16",
        )
    tiles = backward_tiles(arch, p.item_bytes, columns)
    apart = columns > 256  # also with features
    if p.dropout_p or (p.packed and p.bias):
        featured = tiles.kv_features, tiles.q_features, tiles.bias
        return BackwardConfig(*_SMALL_TILES.get((p.item_bytes, max(64, columns)), featured), kv_apart=apart)
    if p.mask_heads:
        return BackwardConfig(tiles.kv_features, tiles.q_features, tiles.bias, tiles.kv_apart)
    if p.window != (-1, -1) or p.softcap or p.alibi or p.bias:
        return BackwardConfig(tiles.kv_features, tiles.q_features, tiles.bias, kv_apart=apart)
    whole = not p.packed and p.seqlen_q % tiles.kv.block_m == 0
    return BackwardConfig(tiles.kv if whole else tiles.kv_ragged, tiles.q, tiles.bias, tiles.kv_apart)


def delta_rows(problem: BackwardProblem) -> int:
    """Return the query rows of one program of the pass that makes delta.

    Its products have to be made as dP is: on Hopper 64 rows are the least for ``wgmma``.
    """
    return 64 if problem.forward.item_bytes == 2 else 16


def _launches(problem: BackwardProblem, config: BackwardConfig) -> tuple[PlannedLaunch, ...]:
    p = problem.forward
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    prefix = "masked" if p.mask_heads else "backward"

    def launch(name: str, programs: int, warps: int) -> PlannedLaunch:
        if programs >= 2**31:
            raise UnsupportedError(f"a grid of {programs} blocks is too large; at most 2**31 - 1 are possible")
        return PlannedLaunch(name, (programs, 1, 1), (32 * warps, 1, 1))

    launches = [launch("_delta_kernel", cdiv(p.seqlen_q, delta_rows(problem)) * heads, DELTA_WARPS)]
    if problem.wants_kv:
        tiles = cdiv(p.seqlen_k, config.kv.block_n)
        one = launch(f"_{prefix}_kv_kernel", tiles * heads_kv, config.kv.num_warps)
        launches += [one, one] if config.kv_apart else [one]
    if problem.wants_q:
        tiles = cdiv(p.seqlen_q, config.q.block_m)
        launches.append(launch(f"_{prefix}_q_kernel", tiles * heads, config.q.num_warps))
    if problem.bias_sums is not None:
        sum_batch, sum_heads = problem.bias_sums
        own = (1 if sum_batch else p.batch) * (1 if sum_heads else p.heads)
        tiles = cdiv(p.seqlen_q, config.bias.block_m) * cdiv(p.seqlen_k, config.bias.block_n)
        launches.append(launch("_backward_bias_kernel", tiles * own, config.bias.num_warps))
    return tuple(launches)


def check_backward_kernel_name(kernel: object, name: str = "kernel") -> None:
    """Raise ``InputError`` unless ``kernel`` is ``auto`` or one of ``BACKWARD_KERNELS``; ``name`` says what it is."""
    if not isinstance(kernel, str) or kernel not in ("auto", *BACKWARD_KERNELS):
        raise InputError(f"{name} must be auto or one of {', '.join(BACKWARD_KERNELS)}, got {shown(kernel)}")


def plan_backward(problem: BackwardProblem, gpu: GpuSpec | None, kernel: str = "auto") -> BackwardPlan:
    """Return how the gradients of ``problem`` are made on ``gpu`` (None: CPU tensors).

    A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: the kernel forced, or every kernel, refuses.
    """
    check_backward_kernel_name(kernel)
    if gpu is None:
        return _cpu_plan(problem, kernel)
    if kernel == "reference":
        return BackwardPlan(problem, gpu.name, gpu.arch, "reference", None, (), "the reference was asked for")
    p = problem.forward
    widest = max(p.head_dim, p.head_dim_v)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"no kernel serves head dimension {widest}", hint=f"the nearest that is served: {MAX_HEAD_DIM}"
        )
    refuse_architecture(gpu.arch)
    portable = _portable(problem)
    if kernel in (MASKED_BACKWARD_KERNEL, "backward_triton") and kernel != portable:
        what = "calls without a mask" if p.mask_heads else "calls with a mask"
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: it serves {what}", hint="auto serves it")
    if p.rows == 0 or p.seqlen_k == 0:
        why = "no query sees a key, so gradients are 0: nothing is launched"
        name = portable if kernel == "auto" else kernel
        return BackwardPlan(problem, gpu.name, gpu.arch, name, None, (), why)
    refusal = None if kernel == portable else hopper_backward_refusal(problem, gpu)
    if kernel == "auto" and refusal is None:
        refusal = too_short_for_tiles(problem, gpu)
    if kernel == "backward_gluon_sm90" and refusal:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {refusal}", hint="auto serves it")
    why = "it was asked for"
    if kernel != portable and refusal is None:
        if kernel == "auto":
            why = "it is the one for Hopper"
            if is_wide(problem):
                why += f", where {hopper_backward_kernel(problem)} serves heads of this width"
        return _hopper_plan(problem, gpu, why)
    if kernel == "auto":
        why = f"it is the one that serves every GPU; backward_gluon_sm90 is passed over ({refusal})"
    config = backward_config(problem, gpu.arch)
    return BackwardPlan(problem, gpu.name, gpu.arch, portable, config, _launches(problem, config), why)


def _portable(problem: BackwardProblem) -> str:
    """Return the kernel that serves a problem on every GPU."""
    return MASKED_BACKWARD_KERNEL if problem.forward.mask_heads else "backward_triton"


def _hopper_plan(problem: BackwardProblem, gpu: GpuSpec, why: str) -> BackwardPlan:
    config = hopper_backward_config(problem, gpu)
    launches = hopper_backward_launches(problem, config)
    if config.shares > 1:
        few = f"{key_tiles(problem, config)} key tiles are few for {gpu.sms} SMs"
        cause = "one long walk would outlast the others" if is_pack(problem) else few
        why += f"; {config.shares} programs share the heads of a group, as {cause}"
    return BackwardPlan(problem, gpu.name, gpu.arch, "backward_gluon_sm90", config, launches, why)


def _cpu_plan(problem: BackwardProblem, kernel: str) -> BackwardPlan:
    if kernel in ("auto", "reference"):
        return BackwardPlan(problem, "CPU", 0, "reference", None, (), "CPU tensors run the reference")
    is_own = kernel == _portable(problem)
    if is_own and os.environ.get("TRITON_INTERPRET") == "1":
        p = problem.forward
        apart = max(p.head_dim, p.head_dim_v) > 128  # as on some GPUs
        config = BackwardConfig(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 32, 4, 1), kv_apart=apart)
        if p.mask_heads:  # blocks of 128 in few steps
            config = BackwardConfig(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1), config.bias, kv_apart=apart)
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        launches = _launches(problem, config) if p.rows and p.seqlen_k else ()  # as on a GPU
        return BackwardPlan(problem, "CPU", 0, kernel, config, launches, why)
    hint = "TRITON_INTERPRET=1 runs it in Triton's interpreter" if is_own else "auto serves them"
    raise UnsupportedError(f"{kernel} needs an NVIDIA GPU, got CPU tensors", hint=hint)
