"""What plans are made of: the tile of each kernel, and the plan that holds one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..gpu.planning import PlannedLaunch
from .problem import AttentionProblem

# Kernels that mask scores before they scale them: -inf * 0 is NaN, and what is smaller may be 0 to a GPU.
SMALLEST_SCALE_LOG2 = 2.0**-126

# The part of the SMs that is full enough. Below it, a split or a smaller tile puts idle SMs to work; it costs a second
# launch and the merge, or reuse of K and V. FlashAttention-3 takes 0.8 too, for the split.
MASK_BLOCK = 128  # queries, and keys, of a block of a block mask
FULL_ENOUGH = 0.8


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Tile of ``forward_triton``."""

    block_m: int  # query rows of one program
    block_n: int  # keys of one step
    num_warps: int
    num_stages: int  # tiles of K and V in flight
    num_splits: int = 1  # programs that share the keys of one row tile; more than one needs a merge


@dataclass(frozen=True, slots=True)
class ShortConfig:
    """Tile of ``forward_short_gluon``."""

    block_m: int  # query rows of one program
    block_n: int  # keys of one group of warps
    key_groups: int  # groups of warps with a share of the keys each
    num_warps: int


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Tile and schedule of ``forward_gluon_sm90``."""

    warpgroups: int  # that multiply matrices, 64 query rows each: 2 or 3
    block_n: int  # keys of one step
    num_stages: int  # tiles of K, and of V, in flight
    ping_pong: bool  # the warpgroups take turns at issuing products
    pack: int = 1  # query heads of one KV head that share the rows of a warpgroup
    slope_product: bool = False  # a matrix product gives each score its part of ALiBi


@dataclass(frozen=True, slots=True)
class WideConfig:
    """Tile of ``forward_wide_gluon_sm90``."""

    block_m: int  # query rows of one program
    block_n: int  # keys of one step


@dataclass(frozen=True, slots=True)
class MixedConfig:
    """Tiles of ``mixed_triton``."""

    few: ForwardConfig  # of sequences whose rows, of the query heads of one K/V head, fit one tile
    many: ForwardConfig  # of the others
    few_blocks: int  # programs of few rows that an SM has room for
    has_many: bool  # whether the longest sequence is one of the others


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is served on one GPU."""

    problem: AttentionProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: ForwardConfig | ShortConfig | HopperConfig | WideConfig | MixedConfig | None
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        if self.config is not None:
            fields = dataclasses.asdict(self.config)
            lines.append("  config  " + ", ".join(f"{name} {value}" for name, value in fields.items()))
        for launch in self.launches:
            shared = (
                "" if launch.shared_memory_bytes is None else f", {launch.shared_memory_bytes} bytes of shared memory"
            )
            lines.append(f"  launch  {launch.pattern}, grid {launch.grid}, {launch.block[0]} threads{shared}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


def block_dim(head_dim: int) -> int:
    """Return the columns of a tile that holds ``head_dim``: a power of two, 16 (the matrix unit's step) or more."""
    return max(16, 1 << (head_dim - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
