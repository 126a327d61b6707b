"""Tile configurations of the experts' kernels, and the tables for each architecture. No Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one of the two products of ``grouped_triton``; its rows are those of ``TileConfig``."""

    block_n: int  # columns of the product's output
    block_k: int  # of one step along the reduction
    num_warps: int
    num_stages: int  # steps in flight, and the current one
    swap: bool = False  # compute the transpose: few rows become few columns of the matrix unit's tile


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiles of ``grouped_triton`` and ``few_triton``."""

    block_m: int  # rows of one program: pairs of a token and an expert
    up: Tile
    down: Tile
    group_m: int = 8  # row tiles whose column tiles are visited together, for L2 reuse


@dataclass(frozen=True, slots=True)
class Gemv:
    """Tile of one of the two products of ``gemv_triton``."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # of the first product
    steps: int = 1  # of the second product: steps whose loads are in flight together


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Tiles of ``gemv_triton``."""

    up: Gemv
    down: Gemv


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Configuration of ``grouped_gluon_sm90``: tiles of 128 x 256, two warpgroups of 64 rows each."""

    num_stages: int = 4  # reduction steps of 64 in shared memory
    lead: int = 1  # steps by which the first warpgroup leads the second, so that their epilogues alternate
    group_m: int = 8  # row tiles whose column tiles are visited together, for L2 reuse
    programs: int = 132  # persistent: each fetches one tile after another


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of gradients."""

    block_m: int  # rows of a tile: pairs of a token and an expert
    activation: Tile  # dO with w_down
    x: Tile  # the first product's gradient with w_gate_up
    weights: Tile  # outer products, block_k rows a step
    weights_m: int  # rows of a tile of a weight gradient; block_n are its columns
    group_m: int = 8
    hopper: HopperConfig | None = None  # of the gradients of x and of weights, if Hopper's kernels compute them
    hopper_activation: bool = False  # Hopper's kernel computes the activation's gradient as well


Config = TileConfig | GemvConfig | HopperConfig | BackwardConfig


# (architectures) -> {bytes of an element: configurations, fewest rows first}.
# Up to 64 rows, reading weights dominates: 16 KB a step and two to four steps ahead keep more than 36 KB in flight on
# each SM, which the memory needs (4.8 TB/s times about 1 us over 132 SMs). At 128 rows the matrix units dominate.
# Every row compiles for its architectures without spills and within their shared memory (test_tables.py). The rows are
# not measured against each other.
_T, _C = Tile, TileConfig
TABLES: dict[tuple[int, ...], dict[int, tuple[TileConfig, ...]]] = {
    (80,): {
        2: (
            _C(16, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(32, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(64, _T(64, 64, 4, 4), _T(128, 64, 4, 4)),
            _C(128, _T(64, 64, 8, 4), _T(128, 64, 8, 4)),
        ),
        4: (_C(16, _T(16, 32, 4, 2), _T(32, 32, 4, 2)), _C(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2))),
    },
    (86, 89, 120): {
        2: (
            _C(16, _T(32, 128, 4, 3), _T(64, 128, 4, 3)),
            _C(32, _T(32, 64, 4, 4), _T(64, 64, 4, 4)),
            _C(64, _T(64, 64, 4, 3), _T(128, 64, 4, 3)),
            _C(128, _T(64, 32, 8, 4), _T(128, 32, 8, 4)),
        ),
        4: (_C(16, _T(16, 32, 4, 2), _T(32, 32, 4, 2)), _C(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2))),
    },
    (90,): {
        2: (
            _C(16, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(32, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(64, _T(64, 64, 4, 4), _T(128, 64, 4, 4)),
            _C(128, _T(128, 64, 8, 4), _T(256, 64, 8, 4)),
        ),
        4: (_C(16, _T(16, 32, 4, 2), _T(32, 32, 4, 2)), _C(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2))),
    },
    (100,): {
        2: (
            _C(16, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(32, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(64, _T(64, 64, 4, 4), _T(128, 64, 4, 4)),
            _C(128, _T(128, 64, 8, 3), _T(256, 64, 8, 3)),
        ),
        4: (_C(16, _T(16, 32, 4, 2), _T(32, 32, 4, 2)), _C(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2))),
    },
}
# {bytes of an element: (largest HID, tiles)}. Each program of the first product loads 16 KB at once, and uses so few
# registers that five run on an SM, which needs 36 KB in flight. Loading whole rows at once took 0.92 to 0.97 of the
# time of two or more steps of four columns (lab/moe/4_decode_tiles_h200.txt). With HID 2048, two steps of 1,024 for two
# columns were as fast; longer rows use these steps, as they leave the smallest remainder. 2,880 is the only size
# measured between powers of two. The second product has few programs (512 for 2,048 columns, four an SM), so each loads
# the next 8 KB before it multiplies. Elements of 4 bytes are not measured.
_GEMV_DOWN = Gemv(4, 256, 4, 1, steps=4)
GEMV_TABLE: dict[int, tuple[tuple[float, GemvConfig], ...]] = {
    2: (
        (1024, GemvConfig(Gemv(4, 1024, 4, 1), _GEMV_DOWN)),
        (2048, GemvConfig(Gemv(2, 2048, 4, 1), _GEMV_DOWN)),
        (4096, GemvConfig(Gemv(1, 4096, 4, 1), _GEMV_DOWN)),
        (math.inf, GemvConfig(Gemv(2, 1024, 4, 1), _GEMV_DOWN)),
    ),
    4: ((math.inf, GemvConfig(Gemv(4, 512, 4, 1), Gemv(8, 128, 4, 1, steps=4))),),
}


def gemv_tiles(hidden: int, item_bytes: int) -> GemvConfig:
    """Return the tiles of ``gemv_triton``, for one token."""
    return next(config for most, config in GEMV_TABLE[item_bytes] if hidden <= most)


# Shared experts process every token, and few programs read the weights of each. With one row tile and narrow columns,
# DeepSeek-V3's experts took 782 to 796 us with 128 tokens instead of 853 to 858, and 842 us with 256 tokens instead of
# 903 (lab/moe/5_skewed_and_shared_h200.txt). With many tokens, the tiles of TABLES have enough programs.
SHARED_TABLES: dict[int, dict[int, tuple[TileConfig, ...]]] = {
    90: {
        2: (
            _C(16, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(32, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(64, _T(32, 128, 4, 4), _T(64, 128, 4, 4)),
            _C(128, _T(32, 64, 8, 5), _T(64, 64, 8, 5)),
        ),
    },
}
SHARED_FEWEST_PROGRAMS = 66  # with the tiles of TABLES; half of the SMs of an H200
SHARED_MOST_TOKENS = 256  # not measured beyond

# If rows are aligned to 2 bytes only, threads load single elements into registers.
NARROW = _C(16, _T(16, 32, 4, 1), _T(32, 32, 4, 1))


def tile_rows(arch: int, item_bytes: int) -> tuple[TileConfig, ...]:
    """Return the configurations for an architecture, or for the closest older one with a table."""
    near = max(known for archs in TABLES for known in archs if known <= arch)
    return next(table[item_bytes] for archs, table in TABLES.items() if near in archs)


# Gradients, as TABLES. With 128 rows, accumulators hold a quarter to a half of the registers, and the activation's
# epilogue needs as many again. Not measured.
_B = BackwardConfig
SMALL_BACKWARD = _B(16, _T(32, 32, 4, 1), _T(32, 32, 4, 1), _T(32, 32, 4, 1), 32)
BACKWARD_TABLES: dict[tuple[int, ...], dict[int, tuple[BackwardConfig, ...]]] = {
    (80,): {
        2: (
            _B(64, _T(64, 64, 4, 3), _T(128, 64, 4, 3), _T(128, 32, 8, 4), 128),
            _B(128, _T(64, 64, 8, 3), _T(128, 64, 8, 3), _T(128, 32, 8, 4), 128),
        ),
        4: (_B(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 4, 2), 32),),
    },
    (86, 89, 120): {
        2: (
            _B(64, _T(64, 32, 4, 3), _T(128, 32, 4, 3), _T(128, 32, 8, 3), 128),
            _B(128, _T(64, 32, 8, 3), _T(128, 32, 8, 3), _T(128, 32, 8, 3), 128),
        ),
        4: (_B(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 4, 2), 32),),
    },
    (90, 100): {
        2: (
            _B(64, _T(64, 64, 4, 4), _T(128, 64, 4, 4), _T(128, 64, 8, 4), 128),
            _B(128, _T(128, 64, 8, 3), _T(256, 64, 8, 3), _T(256, 64, 8, 3), 128),
        ),
        4: (_B(32, _T(16, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 4, 2), 32),),
    },
}


def backward_rows(arch: int, item_bytes: int) -> tuple[BackwardConfig, ...]:
    """Return the configurations of gradients for an architecture, fewest rows first."""
    near = max(known for archs in BACKWARD_TABLES for known in archs if known <= arch)
    return next(table[item_bytes] for archs, table in BACKWARD_TABLES.items() if near in archs)
