"""Which kernels serve a problem of experts on a GPU, with which tiles and grids, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, UnsupportedError
from ..gpu.planning import PlannedLaunch, refuse_architecture
from ..gpu.specs import GpuSpec
from .problem import MoeProblem

KERNELS = ("gemv_triton", "few_triton", "grouped_triton", "reference")


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
    num_stages: int


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Tiles of ``gemv_triton``."""

    up: Gemv
    down: Gemv


@dataclass(frozen=True, slots=True)
class MoePlan:
    """How one problem is served on one GPU."""

    problem: MoeProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: TileConfig | GemvConfig | None
    shared: TileConfig | None  # of the shared experts
    steps: tuple[str, ...]  # what each launch does
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        for name, config in (("", self.config), ("shared ", self.shared)):
            if config is None:
                continue
            if isinstance(config, TileConfig):
                lines.append(f"  {name}config  block_m {config.block_m}, group_m {config.group_m}")
            tiles = {which: dataclasses.asdict(getattr(config, which)) for which in ("up", "down")}
            lines += [
                f"  {name}{which}  " + ", ".join(f"{field} {value}" for field, value in fields.items())
                for which, fields in tiles.items()
            ]
        for launch in self.launches:
            lines.append(f"  launch  {launch.pattern}, grid {launch.grid}, {launch.block[0]} threads")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


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
GEMV_TABLE: dict[int, GemvConfig] = {  # by bytes of an element
    2: GemvConfig(Gemv(8, 512, 4, 1), Gemv(8, 512, 4, 1)),
    4: GemvConfig(Gemv(8, 256, 4, 1), Gemv(8, 256, 4, 1)),
}

# Up to so many pairs a program finds the rows of its expert by itself, without a sort.
MAX_FEW_PAIRS = 128
# Up to so many pairs each program of the sort counts all of them: one launch in place of three.
MAX_PAIRS_SORTED_AT_ONCE = 4096
SORT_FEW_CHUNK, SORT_FEW_WARPS = 512, 8
CHUNK, COUNT_WARPS = 256, 4
PLACE_WARPS = 8
_PLACE_ELEMENTS = 16384  # a program compares each of its pairs with every expert
SUM_CHUNKS, SUM_COLUMNS, SUM_WARPS = 256, 16, 4
COMBINE_COLUMNS, COMBINE_WARPS, COMBINE_UNROLL = 512, 2, 8
# Whatever the tokens: so that a row gets the same bits in any company.
_INVARIANT_ROWS = {2: 64, 4: 32}


# Where rows lie at multiples of 2 bytes only, a thread loads elements one by one, into registers.
NARROW = _C(16, _T(16, 32, 4, 1), _T(32, 32, 4, 1))


def tile_rows(arch: int, item_bytes: int) -> tuple[TileConfig, ...]:
    """Return the configurations for an architecture; one without a table takes that of the one before it."""
    near = max(known for archs in TABLES for known in archs if known <= arch)
    return next(table[item_bytes] for archs, table in TABLES.items() if near in archs)


def _loads_words(problem: MoeProblem) -> bool:
    """Return whether x and all weights can be copied to shared memory by 4 bytes or more at once."""
    size, is_ok = problem.item_bytes, problem.pointer_alignment >= 4
    (xt, xk), (ue, un, uk), (de, dn, dk) = problem.x_strides, problem.gate_up_strides, problem.down_strides
    in_order = problem.interleaved or not problem.gated  # rows of a tile of w_gate_up are neighbours
    for along, *others in (
        (xk, xt, problem.inter),  # h lies in rows of INTER
        (uk, ue, un) if uk == 1 or not in_order else (un, ue, uk),
        (dk, de, dn) if dk == 1 else (dn, de, dk),
    ):
        is_ok = is_ok and along == 1 and all(stride * size % 4 == 0 for stride in others)
    return is_ok


def choose_tile(problem: MoeProblem, arch: int) -> TileConfig:
    """Return tiles for the rows that an expert has on average, with some room: experts are not equally busy."""
    configs = tile_rows(arch, problem.item_bytes)
    if not _loads_words(problem):
        return NARROW
    if problem.batch_invariant:
        return next(config for config in configs if config.block_m == _INVARIANT_ROWS[problem.item_bytes])
    rows = problem.pairs / min(problem.experts, problem.pairs)
    return next((config for config in configs if config.block_m >= 1.5 * rows), configs[-1])


def block_experts(experts: int) -> int:
    """Return the columns of counts: those that name no expert, and pairs past the last, have one each."""
    return max(16, next_power(experts + 2))


def sort_pairs(experts: int) -> int:
    """Return the pairs of one program of ``_sort_few_kernel``."""
    return max(1, min(32, _PLACE_ELEMENTS // block_experts(experts)))


def place_pairs(experts: int) -> int:
    """Return the pairs of one program of ``_place_kernel``, a divisor of ``CHUNK``."""
    return max(1, min(64, _PLACE_ELEMENTS // block_experts(experts)))


def most_tiles(problem: MoeProblem, block_m: int) -> int:
    """Return the most row tiles that there can be: full ones, and a last one for every expert that has rows."""
    return problem.pairs // block_m + min(problem.experts, problem.pairs)


def slots(problem: MoeProblem) -> int:
    """Return how many programs of ``few_triton`` look for an expert with rows, for each tile of columns."""
    return min(problem.pairs, problem.experts)


def shared_tiles(problem: MoeProblem, block_m: int) -> int:
    """Return the row tiles of shared experts; ``problem`` is theirs."""
    return problem.experts * _cdiv(problem.tokens, block_m)


def sort_chunks(problem: MoeProblem) -> int:
    """Return the chunks of pairs that are counted apart, or 0 where one kernel sorts."""
    return 0 if problem.pairs <= MAX_PAIRS_SORTED_AT_ONCE else _cdiv(problem.pairs, CHUNK)


def workspace_sizes(plan: MoePlan) -> dict[str, int]:
    """Return the int32 numbers of each part of the workspace that sorting needs, in the order in which they lie."""
    if "up" not in plan.steps or plan.kernel != "grouped_triton":
        return {}
    assert isinstance(plan.config, TileConfig)
    problem = plan.problem
    pairs = _cdiv(problem.pairs, 4) * 4
    sizes = {
        "tiles_ptr": 4 + 4 * most_tiles(problem, plan.config.block_m),
        "order_ptr": pairs,
        "positions_ptr": pairs,
    }
    chunks = sort_chunks(problem)
    if chunks:
        sizes["counts_ptr"] = (chunks + 1) * block_experts(problem.experts)
    return sizes


_Steps = list[tuple[str, PlannedLaunch]]


def _launch(pattern: str, blocks: int, warps: int, more: int = 1) -> PlannedLaunch:
    return PlannedLaunch(pattern, (blocks, more, 1), (32 * warps, 1, 1))


def _sort_steps(problem: MoeProblem) -> _Steps:
    chunks = sort_chunks(problem)
    if not chunks:
        return [
            ("sort", _launch("_sort_few_kernel", _cdiv(problem.pairs, sort_pairs(problem.experts)), SORT_FEW_WARPS))
        ]
    return [
        ("count", _launch("_count_kernel", chunks, COUNT_WARPS)),
        ("sum", _launch("_sum_chunks_kernel", block_experts(problem.experts) // SUM_COLUMNS, SUM_WARPS)),
        ("place", _launch("_place_kernel", _cdiv(problem.pairs, place_pairs(problem.experts)), PLACE_WARPS)),
    ]


def _product_steps(problem: MoeProblem, config: TileConfig, tiles: int, prefix: str = "") -> _Steps:
    up, down = config.up, config.down
    up_blocks, down_blocks = tiles * _cdiv(problem.inter, up.block_n), tiles * _cdiv(problem.hidden, down.block_n)
    return [
        (f"{prefix}up", _launch("_gate_up_kernel", up_blocks, up.num_warps)),
        (f"{prefix}down", _launch("_down_kernel", down_blocks, down.num_warps)),
    ]


def _gemv_steps(problem: MoeProblem, config: GemvConfig) -> _Steps:
    up_blocks = problem.top_k * _cdiv(problem.inter, config.up.block_n)
    return [
        ("gemv_up", _launch("_gemv_gate_up_kernel", up_blocks, config.up.num_warps)),
        ("gemv_down", _launch("_gemv_down_kernel", _cdiv(problem.hidden, config.down.block_n), config.down.num_warps)),
    ]


def make_plan(
    problem: MoeProblem,
    gpu: str,
    arch: int,
    kernel: str,
    config: TileConfig | GemvConfig,
    shared: TileConfig | None,
    reason: str,
) -> MoePlan:
    """Return the plan of these kernels with these tiles.

    Raises:
        UnsupportedError: a grid would be too large.
    """
    steps: _Steps = []
    if problem.shared_experts:
        assert shared is not None
        theirs = problem.shared()
        steps += _product_steps(theirs, shared, shared_tiles(theirs, shared.block_m), "shared_")
    if isinstance(config, GemvConfig):
        steps += _gemv_steps(problem, config)
    else:
        if kernel == "grouped_triton":
            steps += _sort_steps(problem)
            tiles = most_tiles(problem, config.block_m)
        else:
            tiles = slots(problem)
        steps += _product_steps(problem, config, tiles)
        columns = _cdiv(problem.hidden, COMBINE_COLUMNS)
        steps.append(("combine", _launch("_combine_kernel", problem.tokens, COMBINE_WARPS, columns)))
    for _, launch in steps:
        if launch.grid[0] >= 2**31 or launch.grid[1] > 65535:
            raise UnsupportedError(f"a grid of {launch.grid} blocks is too large for {launch.pattern}")
    names, launches = tuple(name for name, _ in steps), tuple(launch for _, launch in steps)
    return MoePlan(problem, gpu, arch, kernel, config, shared, names, launches, reason)


def _refusal(kernel: str, problem: MoeProblem) -> str | None:
    """Return why a kernel does not serve a problem, or None."""
    if kernel == "gemv_triton":
        if problem.batch_invariant:
            return "a token would get other bits than in a batch"
        if problem.tokens != 1:
            return f"it serves one token, got {problem.tokens}"
    if kernel == "few_triton":
        if problem.batch_invariant:
            return "a token would get other bits than in a larger batch"
        if problem.pairs > MAX_FEW_PAIRS:
            return f"it serves up to {MAX_FEW_PAIRS} pairs of a token and an expert, got {problem.pairs}"
    return None


def _choose(problem: MoeProblem) -> tuple[str, str]:
    if problem.batch_invariant:
        return "grouped_triton", "batch_invariant: one tile for any number of tokens"
    if problem.tokens == 1:
        return "gemv_triton", "one token: matrices times vectors, and the sum over experts in the second"
    if problem.pairs <= MAX_FEW_PAIRS:
        return "few_triton", f"{problem.pairs} pairs of a token and an expert are too few to sort"
    return "grouped_triton", f"{problem.pairs} pairs of a token and an expert are sorted by expert"


def plan_moe(problem: MoeProblem, gpu: GpuSpec | None, kernel: str = "auto") -> MoePlan:
    """Return how ``problem`` is served on ``gpu`` (None: CPU tensors). A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, serves the problem.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {kernel!r}")
    if gpu is None and kernel in ("auto", "reference"):
        return MoePlan(problem, "CPU", 0, "reference", None, None, (), (), "CPU tensors run the reference")
    if gpu is None and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f"{kernel} needs an NVIDIA GPU, got CPU tensors", hint="TRITON_INTERPRET=1 runs it in Triton's interpreter"
        )
    if kernel == "reference":
        raise UnsupportedError(
            "the reference reads the routing on the host, so it serves no CUDA tensors", hint="use kernel='auto'"
        )
    name, why = _choose(problem)
    if kernel != "auto":
        name, why = kernel, "it was asked for"
    if gpu is not None:
        refuse_architecture(gpu.arch)
    where, arch = ("CPU", 0) if gpu is None else (gpu.name, gpu.arch)
    if problem.tokens == 0:
        return MoePlan(problem, where, arch, name, None, None, (), (), "the output is empty: nothing is launched")
    refusal = _refusal(name, problem)
    if refusal:
        raise UnsupportedError(f"{name} does not serve {problem.describe()}: {refusal}", hint="use kernel='auto'")
    if gpu is None:  # small tiles, so that small problems have many
        tile = TileConfig(16, Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), 2)
        config: TileConfig | GemvConfig = (
            GemvConfig(Gemv(8, 32, 4, 1), Gemv(8, 32, 4, 1)) if name == "gemv_triton" else tile
        )
        why, shared = "Triton's interpreter runs it (TRITON_INTERPRET=1)", tile
    else:
        config = GEMV_TABLE[problem.item_bytes] if name == "gemv_triton" else choose_tile(problem, arch)
        shared = choose_tile(problem.shared(), arch) if problem.shared_experts else config  # type: ignore[assignment]
    return make_plan(problem, where, arch, name, config, shared if problem.shared_experts else None, why)
