"""How a call of ``sparse_mla`` is served on a GPU: tile, splits of the indices, launches, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, UnsupportedError, shown
from ...gpu.planning import PlannedLaunch, refuse_architecture
from ...gpu.specs import GpuSpec
from ..decode.plan import even_splits
from ..tiles import cdiv
from .problem import SparseProblem

SPARSE_KERNEL = "sparse_mla_triton"
HOPPER_SPARSE_KERNEL = "sparse_mla_gluon_sm90"
SPARSE_KERNELS = (SPARSE_KERNEL, HOPPER_SPARSE_KERNEL, "reference")
HOPPER = 90
MERGE_WARPS = 4
MERGE_COLUMNS = 256  # of one program, at the most: 18.7 us with 8 sequences of 16 heads, and 19.9 with 128
MERGE_SPLITS = 16  # of one step
_WIDEST_VALUES = 512
_WIDEST_REST = 128
_INVARIANT_SPLITS = 16
_FP8_ARCH = 89  # the first with instructions that convert e4m3


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Tile of ``sparse_mla_triton``."""

    block_m: int  # heads of one query
    block_n: int  # indices of one step
    num_warps: int
    num_stages: int  # tiles of rows in flight, and the one that is worked on


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """How one call is served on one GPU."""

    problem: SparseProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: SparseConfig | None
    splits: int  # programs that share the indices of a query
    each: int  # indices of a split
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        if self.config is not None:
            fields = {**dataclasses.asdict(self.config), "splits": self.splits, "each": self.each}
            lines.append("  config  " + ", ".join(f"{name} {value}" for name, value in fields.items()))
        lines += [
            f"  launch  {launch.pattern}, grid {launch.grid}, {launch.block[0]} threads" for launch in self.launches
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


# Architectures -> tiles of sparse_mla_triton by heads of a query, fewest first, those of sm_90 chosen among 20 on an
# H200 (lab/decode/8_sparse_mla_tiles_h200.txt). A row of 576 columns in 16 bits has 1,152 bytes, and all
# tiles in flight lie in shared memory: 227 KB on sm_90, 163 KB on sm_80, 99 KB on sm_89.
_C = SparseConfig
SPARSE_TABLES: dict[tuple[int, ...], tuple[SparseConfig, ...]] = {
    (80,): (_C(16, 32, 4, 3), _C(32, 32, 8, 3)),
    (86, 89, 120): (_C(16, 32, 4, 2), _C(32, 16, 8, 2)),
    (90,): (_C(16, 64, 8, 2), _C(64, 32, 8, 2)),
    (100,): (_C(16, 64, 8, 3), _C(32, 32, 8, 3), _C(64, 32, 8, 2)),
}

# Numbers of 8 bits are registers twice, as keys and as values: larger tiles spill on sm_89, sm_90 or sm_100.
FP8_SPARSE_TILES = (_C(16, 32, 8, 3), _C(32, 32, 8, 2))  # by heads


def sparse_config(problem: SparseProblem, arch: int) -> SparseConfig:
    """Return the tile for a problem on an architecture; one without a table takes that of the one before it."""
    near = max(known for archs in SPARSE_TABLES for known in archs if known <= arch)
    configs = next(configs for archs, configs in SPARSE_TABLES.items() if near in archs)
    configs = FP8_SPARSE_TILES if problem.is_fp8 else configs
    return next((config for config in configs if config.block_m >= problem.heads), configs[-1])


# 8 sequences of 16, 64 and 128 heads: 19.9, 30.0 and 47.9 us on an H200, where sparse_mla_triton takes 27.2, 39.8 and
# 59.7; a chunk of 512 queries of 128 heads: 203 and 156 TFLOP/s (lab/decode/9_sparse_mla_hopper_h200.txt).
HOPPER_SPARSE_TILES = (_C(8, 64, 4, 2), _C(16, 64, 4, 2), _C(32, 64, 4, 2))  # by heads


def hopper_sparse_refusal(problem: SparseProblem, arch: int) -> str | None:
    """Return why ``sparse_mla_gluon_sm90`` cannot serve ``problem``, or None."""
    if arch != HOPPER:
        return "it is for Hopper"
    if (problem.head_dim, problem.head_dim_v) != (576, 512):
        return f"it serves D 576 and DV 512, got {problem.head_dim} and {problem.head_dim_v}"
    if problem.is_fp8:
        return "it serves caches of 16 bits, got one in fp8"
    if min(problem.q_alignment, problem.cache_alignment) < 8:
        return "rows have to start at multiples of 16 bytes"
    return None


def plan_sparse_mla(problem: SparseProblem, gpu: GpuSpec | None, kernel: str = "auto") -> SparsePlan:
    """Return how ``problem`` is served on ``gpu`` (None: CPU tensors). A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, serves the problem.
    """
    if kernel not in ("auto", *SPARSE_KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(SPARSE_KERNELS)}, got {shown(kernel)}")
    if gpu is None and kernel == HOPPER_SPARSE_KERNEL:
        raise UnsupportedError(f"{kernel} needs a Hopper GPU, got CPU tensors", hint="auto runs the reference on CPUs")
    if gpu is None and kernel != SPARSE_KERNEL:
        return SparsePlan(problem, "CPU", 0, "reference", None, 1, problem.top_k, (), "CPU tensors run the reference")
    if gpu is None and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f"{SPARSE_KERNEL} needs an NVIDIA GPU, got CPU tensors",
            hint="TRITON_INTERPRET=1 runs it in Triton's interpreter",
        )
    if gpu is not None and kernel == "reference":
        raise UnsupportedError("the reference serves CPU tensors alone", hint="use kernel='auto'")
    _refuse_columns(problem)
    if gpu is None:  # small tiles and few SMs, so that small problems are split
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        return tiled_plan(problem, "CPU", 0, 8, SparseConfig(16, 16, 4, 1), why)
    refuse_architecture(gpu.arch)
    if problem.is_fp8 and gpu.arch < _FP8_ARCH:
        raise UnsupportedError(f"fp8 caches need sm_{_FP8_ARCH} or newer, got sm_{gpu.arch}")
    refusal = hopper_sparse_refusal(problem, gpu.arch)
    if kernel == HOPPER_SPARSE_KERNEL and refusal:
        raise UnsupportedError(
            f"{kernel} does not serve {problem.describe()}: {refusal}", hint=f"{SPARSE_KERNEL} serves it"
        )
    if kernel != SPARSE_KERNEL and refusal is None:
        tiles = HOPPER_SPARSE_TILES
        config = next((config for config in tiles if config.block_m >= problem.heads), tiles[-1])
        why = "it is the one for Hopper" if kernel == "auto" else "it was asked for"
        return tiled_plan(problem, gpu.name, gpu.arch, gpu.sms, config, why, HOPPER_SPARSE_KERNEL)
    why = f"{HOPPER_SPARSE_KERNEL} is passed over ({refusal})" if kernel == "auto" else "it was asked for"
    return tiled_plan(problem, gpu.name, gpu.arch, gpu.sms, sparse_config(problem, gpu.arch), why)


def tiled_plan(
    problem: SparseProblem, gpu: str, arch: int, sms: int, config: SparseConfig, why: str, kernel: str = SPARSE_KERNEL
) -> SparsePlan:
    """Return the plan of a tile on a GPU of so many SMs. Raises ``UnsupportedError``: a grid would be too large."""
    p, step = problem, config.block_n
    if not p.batch * p.seqlen_q * p.heads:
        return SparsePlan(p, gpu, arch, SPARSE_KERNEL, config, 1, p.top_k, (), f"{why}; the output is empty")
    tiles, units = max(1, cdiv(p.top_k, step)), cdiv(p.heads, config.block_m) * p.seqlen_q
    if p.num_splits:
        count, reason = min(p.num_splits, tiles), f"num_splits is {p.num_splits}"
    elif p.batch_invariant:
        count = max(1, min(_INVARIANT_SPLITS, tiles, sms // units))
        reason = "batch_invariant: the indices of a query are split by their number alone"
    else:
        units *= p.batch
        count, reason = even_splits(tiles, units, sms), f"{units} row tiles on {sms} SMs"
    each = cdiv(tiles, count) * step
    splits = max(1, cdiv(p.top_k, each))
    grid = cdiv(p.heads, config.block_m) * splits * p.seqlen_q * p.batch
    name = "_sparse_kernel" if kernel == SPARSE_KERNEL else "_sparse_sm90_kernel"
    launches = [PlannedLaunch(name, (grid, 1, 1), (32 * config.num_warps, 1, 1))]
    if splits > 1:
        tiles_dv = cdiv(p.head_dim_v, MERGE_COLUMNS)
        merge_grid = (tiles_dv * p.seqlen_q * p.heads, p.batch, 1)
        launches.append(PlannedLaunch("_merge_sparse_kernel", merge_grid, (32 * MERGE_WARPS, 1, 1)))
    for launch in launches:
        if launch.grid[0] >= 2**31 or launch.grid[1] > 65535:
            raise UnsupportedError(
                f"a grid of {launch.grid} blocks is too large for {launch.pattern}",
                hint="at most 65535 sequences, and 2**31 tiles, are served",
            )
    return SparsePlan(p, gpu, arch, kernel, config, splits, each, tuple(launches), f"{why}; {reason}")


def _refuse_columns(problem: SparseProblem) -> None:
    values, rest = problem.head_dim_v, problem.rest
    if problem.item_bytes != 2:
        raise UnsupportedError(f"no kernel attends to indexed rows in {problem.dtype}", hint="fp16 and bf16 are served")
    if values not in _powers(16, _WIDEST_VALUES) or rest not in (0, *_powers(16, _WIDEST_REST)):
        raise UnsupportedError(
            f"no kernel attends to indexed rows of D {problem.head_dim} and DV {values}",
            hint=f"DV has to be a power of two from 16 to {_WIDEST_VALUES}, and D - DV 0 or one from 16 to "
            f"{_WIDEST_REST}: 576 and 512, say",
        )


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(first.bit_length() - 1, last.bit_length()))
