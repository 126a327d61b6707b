"""Which kernels give the gradients of a problem on a GPU, with which tiles and grids, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, UnsupportedError
from ..gpu.specs import GpuSpec
from .backward_problem import BackwardProblem
from .plan import MAX_HEAD_DIM, PlannedLaunch, block_dim, refuse_architecture

BACKWARD_KERNELS = ("backward_triton", "reference")
DELTA_ROWS = 32  # of one program of the pass that makes delta
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


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """How the gradients of one problem are made on one GPU."""

    problem: BackwardProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: BackwardConfig | None
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        if self.config is not None:
            for name, tile in (("keys", self.config.kv), ("queries", self.config.q)):
                fields = dataclasses.asdict(tile)
                lines.append(f"  {name:7} " + ", ".join(f"{field} {value}" for field, value in fields.items()))
        for launch in self.launches:
            lines.append(f"  launch  {launch.pattern}, grid {launch.grid}, {launch.block[0]} threads")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


_T = Tile
_Tiles = dict[tuple[int, int], BackwardConfig]


def _config(kv: Tile, q: Tile, bias: Tile | None = None) -> BackwardConfig:
    return BackwardConfig(kv, q, bias or dataclasses.replace(q, num_stages=1))


# Tiles: (architectures) -> {(bytes of an element, columns of the wider of the D and DV tiles): tiles}.
BACKWARD_TABLES: dict[tuple[int, ...], _Tiles] = {
    (80,): {
        (2, 64): _config(_T(64, 128, 8, 2), _T(128, 64, 8, 2)),
        (2, 128): _config(_T(32, 64, 8, 2), _T(64, 64, 8, 2)),
        (2, 256): _config(_T(16, 32, 8, 1), _T(32, 32, 8, 1)),
        (4, 64): _config(_T(16, 32, 8, 1), _T(32, 16, 8, 1)),
        (4, 128): _config(_T(16, 16, 8, 1), _T(16, 16, 8, 1)),
        (4, 256): _config(_T(16, 16, 8, 1), _T(16, 16, 8, 1)),
    },
}


def backward_config(arch: int, item_bytes: int, columns: int) -> BackwardConfig:
    """Return the tiles of ``backward_triton`` for an architecture, an element size and a tile width."""
    near = max(known for archs in BACKWARD_TABLES for known in archs if known <= arch)
    key = item_bytes, max(64, columns)
    return next(table[key] for archs, table in BACKWARD_TABLES.items() if near in archs)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _launches(problem: BackwardProblem, config: BackwardConfig) -> tuple[PlannedLaunch, ...]:
    p = problem.forward
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv

    def launch(name: str, programs: int, warps: int) -> PlannedLaunch:
        if programs >= 2**31:
            raise UnsupportedError(f"a grid of {programs} blocks is too large; at most 2**31 - 1 are possible")
        return PlannedLaunch(name, (programs, 1, 1), (32 * warps, 1, 1))

    launches = [launch("_delta_kernel", _cdiv(p.seqlen_q, DELTA_ROWS) * heads, DELTA_WARPS)]
    if problem.wants_kv:
        tiles = _cdiv(p.seqlen_k, config.kv.block_n)
        launches.append(launch("_backward_kv_kernel", tiles * heads_kv, config.kv.num_warps))
    if problem.wants_q:
        tiles = _cdiv(p.seqlen_q, config.q.block_m)
        launches.append(launch("_backward_q_kernel", tiles * heads, config.q.num_warps))
    if problem.bias_sums is not None:
        sum_batch, sum_heads = problem.bias_sums
        own = (1 if sum_batch else p.batch) * (1 if sum_heads else p.heads)
        tiles = _cdiv(p.seqlen_q, config.bias.block_m) * _cdiv(p.seqlen_k, config.bias.block_n)
        launches.append(launch("_backward_bias_kernel", tiles * own, config.bias.num_warps))
    return tuple(launches)


def plan_backward(problem: BackwardProblem, gpu: GpuSpec | None, kernel: str = "auto") -> BackwardPlan:
    """Return how the gradients of ``problem`` are made on ``gpu`` (None: CPU tensors).

    A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: the kernel forced, or every kernel, refuses.
    """
    if kernel != "auto" and kernel not in BACKWARD_KERNELS:
        raise InputError(f"kernel must be auto or one of {', '.join(BACKWARD_KERNELS)}, got {kernel!r}")
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
    if p.rows == 0 or p.seqlen_k == 0:
        why = "no query sees a key, so gradients are 0: nothing is launched"
        return BackwardPlan(problem, gpu.name, gpu.arch, "backward_triton", None, (), why)
    config = backward_config(gpu.arch, p.item_bytes, block_dim(widest))
    why = "it is the one that serves every GPU" if kernel == "auto" else "it was asked for"
    return BackwardPlan(
        problem, gpu.name, gpu.arch, "backward_triton", config, _launches(problem, config), why
    )


def _cpu_plan(problem: BackwardProblem, kernel: str) -> BackwardPlan:
    if kernel in ("auto", "reference"):
        return BackwardPlan(problem, "CPU", 0, "reference", None, (), "CPU tensors run the reference")
    if os.environ.get("TRITON_INTERPRET") == "1":
        config = _config(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 32, 4, 1))
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        return BackwardPlan(problem, "CPU", 0, kernel, config, _launches(problem, config), why)
    raise UnsupportedError(
        f"{kernel} needs an NVIDIA GPU, got CPU tensors", hint="TRITON_INTERPRET=1 runs it in Triton's interpreter"
    )
