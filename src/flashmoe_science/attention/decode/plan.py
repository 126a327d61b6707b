"""How a call with a K/V cache is served on a GPU: tile, shares of the keys, launches, and why. No Triton."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, UnsupportedError, shown
from ...gpu.planning import PlannedLaunch, refuse_architecture
from ...gpu.specs import GpuSpec
from ..forward.plan import MAX_HEAD_DIM
from ..problem import MAX_SPLITS
from ..tiles import block_dim
from .config import DecodeConfig
from .plan_sm90 import FEW_ROWS, HOPPER_DECODE_KERNEL, hopper_decode_config, hopper_decode_refusal
from .problem import CacheProblem, alignments

CACHE_KERNELS = (HOPPER_DECODE_KERNEL, "decode_triton", "reference")


@dataclass(frozen=True, slots=True)
class KVSplits:
    """How the keys of a sequence are split, one program a split."""

    schedule: str  # "whole", "even", "own length" or "balanced"
    splits: int  # the most splits of one sequence; "balanced": all splits of a row tile, minus one per sequence
    least_tiles: int  # key tiles of a split, at least
    programs: int  # splits that the grid has room for, over all sequences of a row tile
    most: int  # the most splits that any sequence can get
    uniform: int = 1  # "balanced": splits of each sequence when lengths are about equal


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Tile of the merge."""

    rows: int  # of one program, one after the other
    columns: int  # of one program
    block_s: int  # shares of one step


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one call is served on one GPU."""

    problem: CacheProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: DecodeConfig | None
    shares: KVSplits | None
    merge: MergeConfig | None
    launches: tuple[PlannedLaunch, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return dataclasses.asdict(self)

    def as_text(self) -> str:
        """Return the plan for people."""
        lines = [f"{self.problem.describe()} on {self.gpu}: {self.kernel}", f"  because {self.reason}"]
        for name, part in (("config", self.config), ("shares", self.shares), ("merge", self.merge)):
            if part is not None:
                fields = dataclasses.asdict(part)
                lines.append(f"  {name:7} " + ", ".join(f"{field} {value}" for field, value in fields.items()))
        for launch in self.launches:
            shared = (
                "" if launch.shared_memory_bytes is None else f", {launch.shared_memory_bytes} bytes of shared memory"
            )
            lines.append(f"  launch  {launch.pattern}, grid {launch.grid}, {launch.block[0]} threads{shared}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


def partial_sizes(plan: DecodePlan) -> tuple[int, int]:
    """Return the elements of the partial outputs, and of their largest scores and sums; 0 where nothing is merged."""
    if plan.merge is None or plan.shares is None:
        return 0, 0
    rows = plan.shares.programs * plan.problem.heads * plan.problem.seqlen_q
    return rows * plan.problem.head_dim_v, 2 * rows


# Tiles: (architectures) -> {(bytes of an element, columns of the wider of the D and DV tiles): by rows, fewest first}.
# Decoding is limited by the bytes of K and V in flight per SM: 4.8 TB/s x about 1 us / 132 SMs = 36 KB. A step reads
# 32 KB; two or three steps in flight a block, and two or three blocks an SM, are always more than that. With 16 rows on
# sm_90, the first row of a width serves calls with little to read, where launch latency dominates, and calls whose bits
# must not depend on the batch; _MORE_TO_READ serves the others. Entries for 16-bit elements were measured on an H200
# (lab/decode/1_h200.txt); those for other architectures, fp32 and more rows were not.
_D = DecodeConfig
DECODE_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[DecodeConfig, ...]]] = {
    (80,): {
        (2, 64): (_D(16, 64, 4, 4, 3), _D(32, 64, 4, 4, 2), _D(64, 64, 4, 3, 2)),
        (2, 128): (_D(16, 64, 4, 3, 2), _D(32, 64, 4, 3, 2), _D(64, 64, 8, 3, 1)),
        (2, 256): (_D(16, 32, 4, 3, 2), _D(32, 32, 4, 2, 2), _D(64, 32, 8, 2, 1)),
        (2, 512): (_D(16, 32, 4, 3, 1), _D(32, 32, 8, 2, 1)),
        (4, 64): (_D(16, 32, 4, 3, 2), _D(32, 32, 8, 2, 1)),
        (4, 128): (_D(16, 32, 8, 2, 1), _D(32, 16, 8, 2, 1)),
        (4, 256): (_D(16, 16, 8, 2, 1),),
    },
    (86, 89, 120): {
        (2, 64): (_D(16, 64, 4, 3, 2), _D(32, 64, 4, 3, 2), _D(64, 64, 4, 2, 2)),
        (2, 128): (_D(16, 32, 4, 3, 2), _D(32, 32, 4, 3, 2), _D(64, 32, 4, 2, 2)),
        (2, 256): (_D(16, 32, 4, 2, 2), _D(32, 32, 4, 2, 1), _D(64, 16, 8, 2, 1)),
        (2, 512): (_D(16, 32, 4, 2, 1), _D(32, 16, 8, 2, 1)),
        (4, 64): (_D(16, 32, 4, 2, 2), _D(32, 32, 8, 2, 1)),
        (4, 128): (_D(16, 32, 8, 2, 1), _D(32, 16, 8, 2, 1)),
        (4, 256): (_D(16, 16, 8, 2, 1),),
    },
    (90, 100): {
        (2, 64): (_D(16, 64, 4, 4, 4), _D(32, 128, 4, 3, 2), _D(64, 128, 4, 3, 2)),
        (2, 128): (_D(16, 64, 4, 3, 3), _D(32, 64, 4, 3, 2), _D(64, 64, 4, 3, 2)),
        (2, 256): (_D(16, 32, 4, 3, 3), _D(32, 32, 4, 3, 2), _D(64, 32, 8, 3, 1)),
        (2, 512): (_D(16, 64, 8, 3, 1), _D(32, 32, 8, 3, 1)),
        (4, 64): (_D(16, 32, 8, 3, 2), _D(32, 32, 8, 2, 1)),
        (4, 128): (_D(16, 32, 8, 2, 2), _D(32, 16, 8, 2, 1)),
        (4, 256): (_D(16, 16, 8, 2, 1),),
    },
}  # fmt: skip

# (architectures) -> {(bytes of an element, columns): (bytes of K and V for each SM from which on, tile of 16 rows)}.
# One block an SM with large tiles reads faster than more blocks with smaller ones: 4.32 instead of 4.08 TB/s with 16
# sequences of 8k keys, D 128 and 8 K/V heads; 4.15 instead of 3.80 with 32 sequences of 16k keys, D 256 and one head.
# With one sequence of 8k keys, 64 keys a step and 16 splits, one block an SM, take 12.95 us; 43 splits take 14.26, and
# 128 keys a step 14.03.
_MORE_TO_READ: dict[tuple[int, ...], dict[tuple[int, int], tuple[tuple[int, DecodeConfig], ...]]] = {
    (90, 100): {
        (2, 64): ((384 << 10, _D(16, 128, 4, 3, 2)),),
        (2, 128): ((192 << 10, _D(16, 64, 4, 3, 1)), (384 << 10, _D(16, 128, 8, 3, 1))),
        (2, 256): ((192 << 10, _D(16, 64, 8, 3, 1)),),
    },
}
# The same of caches of 8 bits. A step has half the bytes, so one block an SM waits for its own results. 16 sequences
# of 8k keys: 68.2 us instead of 90.4, and 74.4 instead of 115.6 with a scale for each key (lab/decode/12_fp8_h200.txt).
_MORE_TO_READ_IN_FP8: dict[tuple[int, ...], dict[tuple[int, int], tuple[tuple[int, DecodeConfig], ...]]] = {
    (90, 100): {(2, 128): ((192 << 10, _D(16, 128, 4, 3, 2)),)},
}
# These tiles serve instead if sequences of at most this many keys fill the SMs more than once, so that blocks come and
# go: 244.0 us instead of 245.0 at 64 sequences of 4k keys.
_SHORT_KEYS = 4096
_SHORT_BLOCKS = 1.5  # an SM
_SHORT: dict[tuple[int, ...], dict[tuple[int, int], DecodeConfig]] = {(90, 100): {(2, 128): _D(16, 64, 4, 4, 2)}}

# One short sequence, where launch latency dominates and the host knows the first keys, uses these tiles instead: it
# prefetches keys into L2 before the first wait. 4.40 us instead of 4.76 at 512 keys, 5.16 instead of 5.63 at 1k (8 K/V
# heads). With more keys or sequences it gains nothing. Those times are with registers for 5 blocks an SM, where Triton
# 3.9 spills. With registers for 3 blocks nothing spills, and 8 K/V heads get the same splits, one block an SM.
_FEW_KEYS = 1024
_FEW: dict[tuple[int, ...], dict[tuple[int, int], DecodeConfig]] = {
    (90,): {(2, 128): _D(16, 64, 4, 2, 3, prefetch=True)},
}

# A grid of at least this part of the blocks that are resident at a time is full enough: FlashAttention-3's rule.
_FULL_ENOUGH = 0.8
# The smaller number of splits is taken if it fills the GPU nearly as evenly, because each split costs a partial
# output. FlashAttention-3's 0.85 would leave 14 % of the SMs idle at one block an SM.
_NEARLY_AS_EVEN = 0.95
# Balanced splits: how many rounds of resident blocks the grid has room for. More rounds even out sequences of different
# lengths. With equal lengths the unused blocks start, read the lengths and end.
_BALANCED_ROUNDS = 2
_MAX_BALANCED_BATCH = 1024  # every program reads all lengths
# Batch-invariant splits have at least this many keys per 16 rows, because each row writes a partial output. A sequence
# has at most one split an SM, within these bounds. 8k keys of one sequence, 8 K/V heads: 12.95 us with 16 splits, 13.68
# with 32; 16 such sequences: 133.9 us and 136.1.
_INVARIANT_KEYS = 256
_INVARIANT_SPLITS = (4, 64)
# Prompt-sized queries fill the grid without splits, and their partial outputs would take more memory than the cache.
_INVARIANT_ROW_TILES = 4
_WIDEST_TILE = 256  # columns of K, or of V, of the tables but for MLA's rows
# D above 256 with values of their own, on every architecture, by bytes of an element: 32 keys and values have 64 KB.
_WIDE_CONFIGS = {2: (_D(16, 32, 8, 2, 1), _D(32, 32, 8, 2, 1)), 4: (_D(16, 16, 8, 1, 1),)}
_FP8_ARCH = 89  # the first with instructions that convert e4m3
_FEW_SHARES = 12  # of each sequence, if lengths are alike: up to here MLA's merge takes them in a step or two
MERGE_WARPS = 4
APPEND_WARPS = 4
APPEND_TOKENS = 4  # of one program


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def decode_config(problem: CacheProblem, arch: int, sms: int) -> DecodeConfig:
    """Return the tile for a problem on an architecture; one without a table takes that of the one before it.

    Neither the batch nor the capacity decides where ``batch_invariant`` or ``num_splits`` promise the same bits.
    """
    near = max(known for archs in DECODE_TABLES for known in archs if known <= arch)
    widest = max(problem.head_dim, problem.head_dim_v)
    width = problem.item_bytes, 512 if widest > _WIDEST_TILE else max(64, block_dim(widest))

    def of(tables: Mapping[tuple[int, ...], Mapping[tuple[int, int], Any]]) -> Any:
        return next((table.get(width) for archs, table in tables.items() if near in archs), None)

    is_wide = widest > _WIDEST_TILE and not problem.shared_kv
    configs: tuple[DecodeConfig, ...] = _WIDE_CONFIGS[problem.item_bytes] if is_wide else of(DECODE_TABLES)
    config = next((config for config in configs if config.block_m >= problem.packed_rows), configs[-1])
    if problem.batch_invariant or problem.num_splits or config.block_m != configs[0].block_m or is_wide:
        return config
    is_told = not (problem.has_seqlens or problem.has_leftpad or problem.has_batch_idx or problem.page_size)
    if problem.batch == 1 and problem.seen_keys <= _FEW_KEYS and is_told:
        config = of(_FEW) or config
    # Rows that start elsewhere are copied in smaller pieces, whose addresses spill.
    in_fp8 = of(_MORE_TO_READ_IN_FP8) if problem.is_fp8 and alignments(problem)[1] >= 8 else None
    for least, larger in in_fp8 or of(_MORE_TO_READ) or ():
        if problem.kv_bytes >= least * sms:
            config = larger
    short = problem.batch * problem.heads_kv >= _SHORT_BLOCKS * sms and problem.seen_keys <= _SHORT_KEYS
    return of(_SHORT) or config if short and not in_fp8 else config


def even_splits(tiles: int, units: int, slots: int, partial: float = 0.0) -> int:
    """Return over how many shares ``tiles`` key tiles are split.

    ``units`` programs without a split, ``slots`` resident at a time, all sequences of one length. None where the grid
    fills the slots; else the fewest shares that fill them nearly as evenly as any. A partial output costs as much as
    ``partial`` tiles.
    """
    if units >= _FULL_ENOUGH * slots:
        return 1
    counts = {_cdiv(tiles, _cdiv(tiles, splits)) for splits in range(1, min(tiles, MAX_SPLITS) + 1)} or {1}
    steps = {
        count: _cdiv(units * count, slots) * (_cdiv(tiles, count) + (partial if count > 1 else 0)) for count in counts
    }
    fewest = min(steps.values())
    return min(count for count in counts if steps[count] * _NEARLY_AS_EVEN <= fewest)


def _partial_cost(problem: CacheProblem, config: DecodeConfig) -> float:
    """Return the bytes of a partial output, written and read, over those of a tile of keys.

    Without it 17 sequences of 8k keys and 16 heads of MLA got a share for each tile. Other caches have narrower rows,
    and were measured without it.
    """
    if not problem.shared_kv:
        return 0.0
    rows = min(problem.packed_rows, config.block_m)
    return 2 * 4 * rows * problem.head_dim_v / (config.block_n * problem.head_dim * problem.kv_item_bytes)


def plan_shares(problem: CacheProblem, config: DecodeConfig, sms: int) -> tuple[KVSplits, str]:
    """Return how the keys are cut, and why."""
    tiles = _cdiv(problem.seen_keys, config.block_n)
    if problem.window[0] >= 0:
        tiles = min(tiles + 1, _cdiv(problem.capacity, config.block_n))  # a window may start inside of a tile
    tiles = max(1, tiles)
    slots = sms * config.blocks_per_sm
    tiles_m = _cdiv(problem.packed_rows, config.block_m)
    units = tiles_m * problem.heads_kv
    batch = problem.batch
    if problem.num_splits:
        count = min(problem.num_splits, tiles)
        return _even("even", count, 1, batch, tiles), f"num_splits is {problem.num_splits}"
    if problem.batch_invariant and tiles_m <= _INVARIANT_ROW_TILES:
        least = _cdiv(_INVARIANT_KEYS * config.block_m // 16, config.block_n)
        fewest, most = _INVARIANT_SPLITS
        room = min(most, max(fewest, sms // units))
        why = "batch_invariant: a sequence is cut by its own length alone"
        return _even("own length", room, least, batch, tiles, min(room, _cdiv(tiles, least))), why
    if problem.batch_invariant:
        return _even("whole", 1, 1, batch, tiles), f"batch_invariant: {tiles_m} row tiles of a sequence are enough"
    if units >= _FULL_ENOUGH * slots:
        return _even("whole", 1, 1, batch, tiles), f"one sequence's {units} row tiles fill {slots} programs"
    if problem.has_seqlens and 1 < batch <= _MAX_BALANCED_BATCH and tiles > 1:
        a_head = max(1, _BALANCED_ROUNDS * slots // units)
        uniform = even_splits(tiles, units * batch, slots, _partial_cost(problem, config))
        programs = max(min(a_head + batch, batch * tiles), batch * uniform)
        most = max(min(tiles, a_head + 1), uniform)
        why = (
            f"the lengths lie on the device: about {a_head} shares a head, as equal as can be over all sequences, "
            f"or {uniform} for each where they are alike"
        )
        return KVSplits("balanced", a_head, 1, programs, most, uniform), why
    count = even_splits(tiles, units * batch, slots, _partial_cost(problem, config))
    if count == 1:
        return _even("whole", 1, 1, batch, tiles), f"{units * batch} programs for {slots} that are resident at a time"
    return _even("even", count, 1, batch, tiles), f"{units * batch} row tiles do not fill {slots} programs"


def _even(schedule: str, splits: int, least: int, batch: int, tiles: int, most: int | None = None) -> KVSplits:
    """Return shares that every sequence has by itself."""
    room = splits if most is None else most
    return KVSplits(schedule if room > 1 else "whole", room, least, batch * room, min(room, tiles))


def _merge_config(problem: CacheProblem, shares: KVSplits, sms: int) -> MergeConfig:
    rows, columns = problem.batch * problem.heads * problem.seqlen_q, min(128, block_dim(problem.head_dim_v))
    if problem.batch_invariant or problem.num_splits:
        # The tile decides in which order shares are summed, and where a product and a sum are rounded as one, so it is
        # the same for every batch and capacity: 16 shares, which are all of a sequence with 8 K/V heads on 132 SMs.
        return MergeConfig(1, columns, 16)
    alike = shares.uniform if shares.schedule == "balanced" else shares.splits
    if problem.shared_kv and problem.head_dim_v == 512 and alike <= _FEW_SHARES:
        # One wave of programs with few registers: 4 us at 64 sequences of 4k keys and 16 heads, where 4,096 programs
        # with steps of 64 shares took 29 (lab/decode/11_mla_few_heads_h200.txt). Where one sequence has nearly all
        # keys, many steps in turn cost 10 us.
        if rows <= 8 * sms:
            return MergeConfig(1, 512, 8)
        return MergeConfig(1 if rows <= 16 * sms else 4, 512, 4)
    block_s = min(64, 1 << (shares.most - 1).bit_length())
    if rows >= 8 * sms:
        return MergeConfig(4, columns, min(block_s, 16))
    return MergeConfig(1, columns if rows >= 2 * sms else min(32, columns), block_s)


def _check_kernel_name(kernel: object) -> None:
    if not isinstance(kernel, str) or kernel not in ("auto", *CACHE_KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(CACHE_KERNELS)}, got {shown(kernel)}")


def plan_with_kv_cache(problem: CacheProblem, gpu: GpuSpec | None, kernel: str = "auto") -> DecodePlan:
    """Return how ``problem`` is served on ``gpu`` (None: CPU tensors). A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, serves the problem.
    """
    _check_kernel_name(kernel)
    if gpu is None and kernel == HOPPER_DECODE_KERNEL:
        raise UnsupportedError(f"{kernel} needs a Hopper GPU, got CPU tensors", hint="auto runs the reference on CPUs")
    if gpu is None and kernel != "decode_triton":
        return DecodePlan(problem, "CPU", 0, "reference", None, None, None, (), "CPU tensors run the reference")
    if gpu is None and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            "decode_triton needs an NVIDIA GPU, got CPU tensors",
            hint="TRITON_INTERPRET=1 runs it in Triton's interpreter",
        )
    if gpu is not None and kernel == "reference":
        raise UnsupportedError(
            "the reference reads lengths on the host, so it serves no CUDA tensors", hint="use kernel='auto'"
        )
    _refuse_wide(problem)
    if gpu is None:  # small tiles and few SMs, so that small problems are split
        config = DecodeConfig(16, 16, 4, 1, 1)
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        return _decode_plan(problem, "CPU", 0, 8, "decode_triton", config, why)
    refuse_architecture(gpu.arch)
    if problem.is_fp8 and gpu.arch < _FP8_ARCH:
        raise UnsupportedError(f"fp8 caches need sm_{_FP8_ARCH} or newer, got sm_{gpu.arch}")
    return _gpu_plan(problem, gpu, kernel)


def _gpu_plan(problem: CacheProblem, gpu: GpuSpec, kernel: str) -> DecodePlan:
    refusal = hopper_decode_refusal(problem, gpu)
    if kernel == HOPPER_DECODE_KERNEL and refusal:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {refusal}", hint="auto serves it")
    why = "it was asked for"
    if kernel == "auto":
        passed_over = f"; {HOPPER_DECODE_KERNEL} is passed over ({refusal})" if problem.shared_kv else ""
        why = f"there is a cache{passed_over}" if refusal else "values are columns of the keys, and this is a Hopper"
    if kernel != "decode_triton" and refusal is None:
        config = hopper_decode_config(problem)
        return _decode_plan(problem, gpu.name, gpu.arch, gpu.sms, HOPPER_DECODE_KERNEL, config, why)
    config = decode_config(problem, gpu.arch, gpu.sms)
    return _decode_plan(problem, gpu.name, gpu.arch, gpu.sms, "decode_triton", config, why)


def _refuse_wide(problem: CacheProblem) -> None:
    """Raise ``UnsupportedError`` for heads that are wider than ``MAX_HEAD_DIM``, but for those of MLA."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if not problem.shared_kv and widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"no kernel serves head dimension {widest} with a cache",
            hint=f"the nearest that is served: {MAX_HEAD_DIM}; or 576 with v_cache = k_cache[..., :512] (MLA)",
        )
    if not problem.shared_kv or widest <= _WIDEST_TILE:
        return
    if problem.item_bytes != 2 or problem.head_dim_v > 512 or problem.head_dim - problem.head_dim_v > 64:
        raise UnsupportedError(
            f"no kernel serves D {problem.head_dim} and DV {problem.head_dim_v} in {problem.dtype} with shared values",
            hint="the nearest that is served: 576 and 512 in fp16 and bf16",
        )


def _decode_plan(
    problem: CacheProblem, gpu: str, arch: int, sms: int, kernel: str, config: DecodeConfig, why: str
) -> DecodePlan:
    launches = []
    if (problem.seqlen_new or problem.rotary_dim) and problem.batch and problem.heads_kv:
        tokens = max(problem.seqlen_new, problem.seqlen_q if problem.rotary_dim else 0)
        heads = problem.heads_kv + (problem.heads if problem.rotary_dim else 0)
        grid = (_cdiv(tokens, APPEND_TOKENS), heads, problem.batch)
        launches.append(PlannedLaunch("_append_kernel", grid, (32 * APPEND_WARPS, 1, 1)))
    if problem.batch * problem.heads * problem.seqlen_q == 0:
        reason = f"{why}; the output is empty"
        _refuse_large_grids(launches)
        return DecodePlan(problem, gpu, arch, kernel, None, None, None, tuple(launches), reason)
    if max(abs(problem.k_strides[1]), abs(problem.v_strides[1])) * config.block_n >= 2**31:
        raise UnsupportedError(
            f"positions of the cache are too far apart: {problem.k_strides[1]} elements",
            hint=f"less than {2**31 // config.block_n} are served",
        )
    shares, reason = plan_shares(problem, config, sms)
    tiles_m = _cdiv(problem.packed_rows, config.block_m)
    grid = (tiles_m * problem.heads_kv * shares.programs, 1, 1)
    main = "_decode_kernel"
    if kernel == HOPPER_DECODE_KERNEL:
        few = "_few_rows_fp8_sm90_kernel" if problem.is_fp8 else "_few_rows_sm90_kernel"
        main = few if config.block_m <= FEW_ROWS else "_decode_sm90_kernel"
    launches.append(PlannedLaunch(main, grid, (32 * config.num_warps, 1, 1)))
    merge = None
    if shares.most > 1:
        merge = _merge_config(problem, shares, sms)
        blocks = _cdiv(block_dim(problem.head_dim_v), merge.columns) * _cdiv(problem.packed_rows, merge.rows)
        grid = (blocks, problem.heads_kv, problem.batch)
        launches.append(PlannedLaunch("_merge_splits_kernel", grid, (32 * MERGE_WARPS, 1, 1)))
    _refuse_large_grids(launches)
    return DecodePlan(problem, gpu, arch, kernel, config, shares, merge, tuple(launches), f"{why}; {reason}")


def _refuse_large_grids(launches: Sequence[PlannedLaunch]) -> None:
    for launch in launches:
        if launch.grid[0] >= 2**31 or max(launch.grid[1:]) > 65535:
            raise UnsupportedError(
                f"a grid of {launch.grid} blocks is too large for {launch.pattern}",
                hint="at most 65535 sequences, and 65535 heads, are served",
            )
