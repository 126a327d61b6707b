"""Tiles of the experts' kernels: what a configuration says, and which there are for an architecture. No Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one of the two products of ``grouped_triton``; its rows are those of ``TileConfig``."""

    block_n: int  # columns of the product's output
    block_k: int  # of one step along the reduction
    num_warps: int
    num_stages: int  # steps in flight, and the one that is worked on
    swap: bool = False  # compute the transpose: few rows then are few columns of the matrix unit's tile


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiles of ``grouped_triton`` and ``few_triton``."""

    block_m: int  # rows of one program: pairs of a token and an expert
    up: Tile
    down: Tile
    group_m: int = 8  # row tiles that are walked over together


@dataclass(frozen=True, slots=True)
class Gemv:
    """Tile of one of the two products of ``gemv_triton``."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # of the first product
    steps: int = 1  # of the second product: parts of experts that are asked for at once


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Tiles of ``gemv_triton``."""

    up: Gemv
    down: Gemv


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """How ``grouped_gluon_sm90`` works: tiles of 128 rows and 256 columns of a product, two warpgroups of 64 rows."""

    num_stages: int = 4  # steps of 64 along the reduction in shared memory
    lead: int = 1  # steps by which the first warpgroup is ahead of the second, whose epilogue then runs later
    group_m: int = 8  # row tiles that are walked over together
    programs: int = 132  # that draw tiles


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of gradients."""

    block_m: int  # rows of a tile: pairs of a token and an expert
    activation: Tile  # dO with w_down
    x: Tile  # the first product's gradient with w_gate_up
    weights: Tile  # outer products of rows, of which block_k at a time
    weights_m: int  # rows of such a tile; block_n are its columns
    group_m: int = 8
    hopper: HopperConfig | None = None  # of x and the weights, where the kernels for Hopper make them
    hopper_activation: bool = False  # and that of the activation as well


Config = TileConfig | GemvConfig | HopperConfig | BackwardConfig


# Tiles by the rows that an expert has: (architectures) -> {bytes of an element: configurations, fewest rows first}.
# Up to 64 rows the weights' bytes count: 16 KB of them a step and two to four steps ahead give an SM more than the 36
# KB that have to be on their way at any time (4.8 TB/s times about 1 us over 132 SMs). At 128 rows the matrix units
# count.
# Every row compiles for its architectures without spills and within their shared memory (test_tables.py). Which is
# fastest was not measured yet.
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
# By bytes of an element, and the most columns of the reduction that a row serves. The first product asks for 16 KB at
# once in each program, and few registers let five of them run on an SM, which needs 36 KB on their way at any time.
# Whole rows, asked for once, took 0.92 to 0.97 of the time of two steps or more of four columns; of two columns, two
# steps of 1,024 were as fast with HID 2048 (lab/moe/4_decode_tiles_h200.txt), and of longer rows such steps, of 8 KB,
# leave the smallest part of the last one empty. Sizes between the powers of two were timed at 2,880 alone. The second
# product has few programs (512 for 2,048 columns, four an SM), so each asks for the next 8 KB before it
# multiplies. With 4 bytes nothing was measured.
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
    """Return the tiles of one token."""
    return next(config for most, config in GEMV_TABLE[item_bytes] if hidden <= most)


# Of shared experts, which every token has, so that their rows are known: few programs read one expert's weights. One
# row tile of narrow columns took 782 to 796 us of DeepSeek-V3's experts with 128 tokens, in place of 853 to 858; with
# 256 tokens 842 in place of 903 (lab/moe/5_skewed_and_shared_h200.txt). Of many tokens TABLES' have enough programs.
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
SHARED_FEWEST_PROGRAMS = 66  # of the usual tiles; half of the SMs of an H200
SHARED_MOST_TOKENS = 256  # with more nobody timed them

# Where rows lie at multiples of 2 bytes only, a thread loads elements one by one, into registers.
NARROW = _C(16, _T(16, 32, 4, 1), _T(32, 32, 4, 1))


def tile_rows(arch: int, item_bytes: int) -> tuple[TileConfig, ...]:
    """Return the configurations for an architecture; one without a table takes that of the one before it."""
    near = max(known for archs in TABLES for known in archs if known <= arch)
    return next(table[item_bytes] for archs, table in TABLES.items() if near in archs)


# Of gradients, as above. The products of 128 rows hold a fourth or a half of the registers in sums, and the
# activation's epilogue needs as many again. Not measured yet.
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
