"""Choose the kernels, tiles and grids of a forward problem, with a reason. No Triton."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, UnsupportedError, shown
from ..gpu.planning import PlannedLaunch, refuse_architecture
from ..gpu.specs import GpuSpec
from .grouped import plan_sm90 as hopper_plan
from .problem import MoeProblem
from .tiles import (
    NARROW,
    SHARED_FEWEST_PROGRAMS,
    SHARED_MOST_TOKENS,
    SHARED_TABLES,
    TABLES,
    BackwardConfig,
    Config,
    Gemv,
    GemvConfig,
    HopperConfig,
    Tile,
    TileConfig,
    gemv_tiles,
    tile_rows,
)

__all__ = ["NARROW", "TABLES", "Gemv", "GemvConfig", "HopperConfig", "MoePlan", "Tile", "TileConfig", "plan_moe"]

KERNELS = ("gemv_triton", "few_triton", "grouped_gluon_sm90", "grouped_triton", "reference")
SORTED = ("grouped_gluon_sm90", "grouped_triton")  # these kernels need rows sorted by expert


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The kernels, tiles and launches of one problem on one GPU."""

    problem: MoeProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: Config | None
    shared: TileConfig | None  # tiles of the shared experts
    steps: tuple[str, ...]  # the name of each launch
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan as text."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        for name, config in (("", self.config), ("shared ", self.shared)):
            if config is None:
                continue
            if isinstance(config, (HopperConfig, BackwardConfig)):
                numbers = dataclasses.asdict(config).items()
                lines.append("  config  " + ", ".join(f"{field} {value}" for field, value in numbers))
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


def cdiv(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def next_power(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


# With at most this many pairs, each program finds the rows of its expert without a sort.
MAX_FEW_PAIRS = 128
# With at most this many pairs, each program of the sort counts all of them: one launch instead of three.
MAX_PAIRS_SORTED_AT_ONCE = 4096
SORT_FEW_CHUNK, SORT_FEW_WARPS = 512, 8
CHUNK, COUNT_WARPS = 256, 4
PLACE_PAIRS, PLACE_WARPS = 64, 2  # a divisor of CHUNK: a program compares its pairs with each other
_FEW_ELEMENTS = 16384  # a program of ``_sort_few_kernel`` compares each of its pairs with every expert
SUM_CHUNKS, SUM_COLUMNS, SUM_WARPS = 256, 16, 4
COMBINE_COLUMNS, COMBINE_WARPS, COMBINE_UNROLL = 512, 2, 8
# Tile rows for batch_invariant: independent of the number of tokens.
_INVARIANT_ROWS = {2: 64, 4: 32}


def loads_words(problem: MoeProblem) -> bool:
    """Return whether x and all weights can be copied to shared memory in units of at least 4 bytes."""
    size, is_ok = problem.item_bytes, problem.pointer_alignment >= 4
    (xt, xk), (ue, un, uk), (de, dn, dk) = problem.x_strides, problem.gate_up_strides, problem.down_strides
    in_order = problem.interleaved or not problem.gated  # rows of a tile of w_gate_up are neighbours
    for along, *others in (
        (xk, xt, problem.inter),  # rows of h have INTER elements
        (uk, ue, un) if uk == 1 or not in_order else (un, ue, uk),
        (dk, de, dn) if dk == 1 else (dn, de, dk),
    ):
        is_ok = is_ok and along == 1 and all(stride * size % 4 == 0 for stride in others)
    return is_ok


def choose_tile(problem: MoeProblem, arch: int) -> TileConfig:
    """Return tiles with room for twice the mean number of rows of an expert, as experts are not equally busy.

    With room for 1.5 times the mean, the busiest of few experts had two tiles, and its weights were read twice: Mixtral
    with 32 tokens and Zipf-distributed routing took 738 us instead of 647. For a mean of 32 rows, tiles of 64 are
    enough: with 128, products take longer than memory (lab/moe/5_skewed_and_shared_h200.txt).
    """
    configs = tile_rows(arch, problem.item_bytes)
    if not loads_words(problem):
        return NARROW
    if problem.batch_invariant:
        return next(config for config in configs if config.block_m == _INVARIANT_ROWS[problem.item_bytes])
    rows = problem.pairs / min(problem.experts, problem.pairs)
    enough = (config for config in configs if config.block_m > 2 * rows or config.block_m == 2 * rows == 64)
    return next(enough, configs[-1])


def choose_shared_tile(problem: MoeProblem, arch: int) -> TileConfig:
    """Return tiles of shared experts, which have a row for every token; ``problem`` describes the shared experts."""
    if problem.batch_invariant or not loads_words(problem):
        return choose_tile(problem, arch)

    def with_room(configs: Sequence[TileConfig]) -> TileConfig:
        return next((config for config in configs if config.block_m >= problem.tokens), configs[-1])

    usual = with_room(tile_rows(arch, problem.item_bytes))
    narrow = SHARED_TABLES.get(arch, {}).get(problem.item_bytes)
    if narrow is None or problem.tokens > SHARED_MOST_TOKENS:
        return usual
    programs = shared_tiles(problem, usual.block_m) * cdiv(problem.inter, usual.up.block_n)
    return with_room(narrow) if programs < SHARED_FEWEST_PROGRAMS else usual


def block_experts(experts: int) -> int:
    """Return the columns of the table of counts: one an expert, one for invalid ids, one for padding."""
    return max(16, next_power(experts + 2))


def sort_pairs(experts: int) -> int:
    """Return the pairs of one program of ``_sort_few_kernel``."""
    return max(1, min(32, _FEW_ELEMENTS // block_experts(experts)))


def most_tiles(problem: MoeProblem, block_m: int) -> int:
    """Return an upper bound on row tiles: the full ones, and a partial one for each active expert."""
    return problem.pairs // block_m + min(problem.experts, problem.pairs)


def rows_of_tiles(config: Config | None) -> int:
    """Return the rows of a tile of a kernel with sorted rows."""
    if isinstance(config, HopperConfig):
        return hopper_plan.ROWS
    assert isinstance(config, (TileConfig, BackwardConfig))
    return config.block_m


def slots(problem: MoeProblem) -> int:
    """Return how many programs of ``few_triton`` look for an active expert, for each column tile."""
    return min(problem.pairs, problem.experts)


def shared_tiles(problem: MoeProblem, block_m: int) -> int:
    """Return the row tiles of shared experts, which ``problem`` describes."""
    return problem.experts * cdiv(problem.tokens, block_m)


def sort_chunks(problem: MoeProblem) -> int:
    """Return the number of chunks that are counted separately, or 0 if one kernel sorts."""
    return 0 if problem.pairs <= MAX_PAIRS_SORTED_AT_ONCE else cdiv(problem.pairs, CHUNK)


def workspace_sizes(plan: MoePlan) -> dict[str, int]:
    """Return the int32 elements of each part of the workspace of the sort, in memory order."""
    if not {"sort", "count"} & set(plan.steps):
        return {}
    problem = plan.problem
    pairs = cdiv(problem.pairs, 4) * 4
    sizes = {
        "tiles_ptr": 4 + 4 * most_tiles(problem, rows_of_tiles(plan.config)),
        "order_ptr": pairs,
        "positions_ptr": pairs,
    }
    chunks = sort_chunks(problem)
    if chunks:
        sizes["counts_ptr"] = (chunks + 1) * block_experts(problem.experts)
    if isinstance(plan.config, BackwardConfig):
        sizes["offsets_ptr"] = cdiv(problem.experts + 5, 4) * 4
    return sizes


Steps = list[tuple[str, PlannedLaunch]]


def planned(pattern: str, blocks: int, warps: int, more: int = 1) -> PlannedLaunch:
    """Return a launch of ``blocks`` x ``more`` blocks."""
    return PlannedLaunch(pattern, (blocks, more, 1), (32 * warps, 1, 1))


def sort_steps(problem: MoeProblem) -> Steps:
    """Return the launches that sort pairs by expert."""
    chunks = sort_chunks(problem)
    if not chunks:
        return [("sort", planned("_sort_few_kernel", cdiv(problem.pairs, sort_pairs(problem.experts)), SORT_FEW_WARPS))]
    return [
        ("count", planned("_count_kernel", chunks, COUNT_WARPS)),
        ("sum", planned("_sum_chunks_kernel", block_experts(problem.experts) // SUM_COLUMNS, SUM_WARPS)),
        ("place", planned("_place_kernel", cdiv(problem.pairs, PLACE_PAIRS), PLACE_WARPS)),
    ]


def _product_steps(problem: MoeProblem, config: TileConfig, tiles: int, prefix: str = "") -> Steps:
    up, down = config.up, config.down
    up_blocks, down_blocks = tiles * cdiv(problem.inter, up.block_n), tiles * cdiv(problem.hidden, down.block_n)
    return [
        (f"{prefix}up", planned("_gate_up_kernel", up_blocks, up.num_warps)),
        (f"{prefix}down", planned("_down_kernel", down_blocks, down.num_warps)),
    ]


def _gemv_steps(problem: MoeProblem, config: GemvConfig) -> Steps:
    up_blocks = problem.top_k * cdiv(problem.inter, config.up.block_n)
    return [
        ("gemv_up", planned("_gemv_gate_up_kernel", up_blocks, config.up.num_warps)),
        ("gemv_down", planned("_gemv_down_kernel", cdiv(problem.hidden, config.down.block_n), config.down.num_warps)),
    ]


def make_plan(
    problem: MoeProblem,
    gpu: str,
    arch: int,
    kernel: str,
    config: Config,
    shared: TileConfig | None,
    reason: str,
) -> MoePlan:
    """Return the plan of a kernel with given tiles.

    Raises:
        UnsupportedError: a grid would be too large.
    """
    steps: Steps = []
    if problem.shared_experts:
        assert shared is not None
        theirs = problem.shared()
        steps += _product_steps(theirs, shared, shared_tiles(theirs, shared.block_m), "shared_")
    if isinstance(config, GemvConfig):
        steps += _gemv_steps(problem, config)
    else:
        tiles = slots(problem)
        if kernel in SORTED:
            steps += sort_steps(problem)
            tiles = most_tiles(problem, rows_of_tiles(config))
        if isinstance(config, HopperConfig):
            steps += hopper_plan.product_steps(problem, config, tiles)
        else:
            assert isinstance(config, TileConfig)
            steps += _product_steps(problem, config, tiles)
        columns = cdiv(problem.hidden, COMBINE_COLUMNS)
        steps.append(("combine", planned("_combine_kernel", problem.tokens, COMBINE_WARPS, columns)))
    refuse_large_grids(steps)
    names, launches = tuple(name for name, _ in steps), tuple(launch for _, launch in steps)
    return MoePlan(problem, gpu, arch, kernel, config, shared, names, launches, reason)


def refuse_large_grids(steps: Steps) -> None:
    """Raise ``UnsupportedError`` if a launch exceeds the hardware's limits on grids."""
    for _, launch in steps:
        if launch.grid[0] >= 2**31 or launch.grid[1] > 65535:
            raise UnsupportedError(f"a grid of {launch.grid} blocks is too large for {launch.pattern}")


def _unsupported_reason(kernel: str, problem: MoeProblem, arch: int) -> str | None:
    """Return why a kernel does not serve a problem, or None."""
    if kernel == "grouped_gluon_sm90":
        return hopper_plan.unsupported_reason(problem, arch)
    if problem.keep_product and kernel in ("gemv_triton", "few_triton"):
        return "it keeps nothing for gradients"
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


def _choose_hopper(problem: MoeProblem, gpu: GpuSpec, name: str, why: str) -> tuple[str, str]:
    """Return the kernel for Hopper or ``name``, and the reason."""
    unsupported = hopper_plan.unsupported_reason(problem, gpu.arch)
    if gpu.arch != hopper_plan.ARCH or name != "grouped_triton" or problem.batch_invariant:
        return name, why
    if unsupported:
        return name, f"{why}; grouped_gluon_sm90 does not serve it: {unsupported}"
    rows = problem.pairs / problem.experts
    if rows < hopper_plan.FEWEST_ROWS:
        return name, f"{why}; fewer than {hopper_plan.FEWEST_ROWS} rows an expert, for tiles of {hopper_plan.ROWS}"
    if hopper_plan.has_few_tiles(problem, gpu):
        return name, f"{why}; {rows:.0f} rows an expert, and few tiles of {hopper_plan.ROWS} for each SM"
    return "grouped_gluon_sm90", f"{why}; Hopper's TMA and warpgroup products, {rows:.0f} rows an expert"


def _choose(problem: MoeProblem) -> tuple[str, str]:
    if problem.batch_invariant:
        return "grouped_triton", "batch_invariant: one tile for any number of tokens"
    if problem.keep_product:
        return "grouped_triton", "gradients need the first product, in rows that are sorted by expert"
    if problem.tokens == 1:
        return "gemv_triton", "one token: matrices times vectors, and the sum over experts in the second"
    if problem.pairs <= MAX_FEW_PAIRS:
        return "few_triton", f"{problem.pairs} pairs of a token and an expert are too few to sort"
    return "grouped_triton", f"{problem.pairs} pairs of a token and an expert are sorted by expert"


def check_kernel_name(kernel: object) -> None:
    """Raise ``InputError`` unless ``kernel`` is ``auto`` or one of ``KERNELS``."""
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {shown(kernel)}")


def plan_moe(problem: MoeProblem, gpu: GpuSpec | None, kernel: str = "auto") -> MoePlan:
    """Return the plan of ``problem`` on ``gpu`` (None: CPU tensors). A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, serves the problem.
    """
    check_kernel_name(kernel)
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
    if gpu is not None:
        refuse_architecture(gpu.arch)
        name, why = _choose_hopper(problem, gpu, name, why)
    if kernel != "auto":
        name, why = kernel, "it was asked for"
    where, arch = ("CPU", 0) if gpu is None else (gpu.name, gpu.arch)
    if problem.tokens == 0:
        return MoePlan(problem, where, arch, name, None, None, (), (), "the output is empty: nothing is launched")
    unsupported = _unsupported_reason(name, problem, arch)
    if unsupported:
        raise UnsupportedError(f"{name} does not serve {problem.describe()}: {unsupported}", hint="use kernel='auto'")
    if gpu is None:  # small tiles, so that tests of small problems have several
        tile = TileConfig(16, Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), 2)
        config: Config = GemvConfig(Gemv(8, 32, 4, 1), Gemv(8, 32, 4, 1, steps=2)) if name == "gemv_triton" else tile
        why, shared = "Triton's interpreter runs it (TRITON_INTERPRET=1)", tile
    else:
        config = gemv_tiles(problem.hidden, problem.item_bytes) if name == "gemv_triton" else choose_tile(problem, arch)
        if name == "grouped_gluon_sm90":
            config = hopper_plan.choose_config(problem, gpu)
        shared = choose_shared_tile(problem.shared(), arch) if problem.shared_experts else NARROW
    return make_plan(problem, where, arch, name, config, shared if problem.shared_experts else None, why)
