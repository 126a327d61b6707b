"""What a plan is turned into: kernels to compile, and the tiles of the forward kernels for Hopper."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..gpu.compile import KernelSource
from ..gpu.gluon_versions import descriptor_type
from ..gpu.tensor_map import TensorMap
from .hopper_plan import HOPPER_ROWS, hopper_columns, hopper_output_columns
from .problem import AttentionProblem
from .tiles import HopperConfig


@dataclass(frozen=True)
class PreparedKernel:
    """One kernel of a plan: its source, its grid, the scalars that follow its pointers, and its tensor maps."""

    source: KernelSource
    grid: tuple[int, int, int]
    scalars: tuple[float, ...]
    tensor_maps: tuple[TensorMap, ...] = ()


@dataclass(frozen=True)
class HopperTiles:
    """The tiles of both forward kernels for Hopper, as arguments: columns lie in two powers of two."""

    descriptors: dict[str, str]  # of q, k, v and o
    more: dict[str, str]  # of the second part of the columns of q, k and v, where there is one
    again: tuple[int, ...]  # the numbers of those tensors: 0 for q, 1 for k, 2 for v
    constants: dict[str, int | None]

    def maps(self, maps: tuple[TensorMap, ...]) -> tuple[TensorMap, ...]:
        """Return the maps of q, k, v and o, and behind them those of the second parts."""
        return (*maps, *(dataclasses.replace(maps[number], of=number) for number in self.again))


def hopper_tiles(problem: AttentionProblem, config: HopperConfig) -> HopperTiles:
    """Return the tiles of a plan for Hopper."""
    kind = problem.dtype
    (d, d_more), (dv, dv_more) = hopper_columns(problem.head_dim), hopper_columns(problem.head_dim_v)
    rows, keys = (1, config.pack, HOPPER_ROWS // config.pack), (1, 1, config.block_n)
    first = {
        "q_desc": (*rows, d),
        "k_desc": (*keys, d),
        "v_desc": (*keys, dv),
        "o_desc": (*rows, hopper_output_columns(problem, config)),
    }
    second = {"q_more_desc": (*rows, d_more), "k_more_desc": (*keys, d_more), "v_more_desc": (*keys, dv_more)}
    return HopperTiles(
        {name: descriptor_type(kind, tile) for name, tile in first.items()},
        {name: descriptor_type(kind, tile) for name, tile in second.items() if tile[-1]},
        tuple(number for number, tile in enumerate(second.values()) if tile[-1]),
        {"D1": d_more, "DV0": dv, "DV1": dv_more, **{name: None for name, tile in second.items() if not tile[-1]}},
    )
