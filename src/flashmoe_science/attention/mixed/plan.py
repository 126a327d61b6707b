"""When and how ``mixed_triton`` serves packed queries over pages: tiles, shares of the keys, sizes. No Triton."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedError
from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..forward.triton_plan import forward_rows
from ..problem import AttentionProblem
from ..tiles import ForwardConfig, MixedConfig, Plan, block_dim, cdiv

MIXED_KERNEL = "mixed_triton"
WORK_WARPS = 8
MERGE_WARPS = 4
WORK_SEQUENCES = 64  # that one program of ``work_triton`` places, and looks at together
MERGE_ROWS = 4  # of one program of the merge
MERGE_SPLITS = 8  # that the merge adds up in one step
_MOST_SEQUENCES = 1024  # whose records one program looks at together
_FEWEST_ROWS = 16  # of a tile: the step of the matrix unit
_FEW_ROWS = 64  # up to which one tile of as many rows as the longest sequence has serves all
# Programs with few rows, over those that are resident at a time. Two rounds took 74 us instead of 61 with 128 sequences
# of log-normal lengths around 2k, 50 instead of 40 with 32 of 8k and 4 queries; of equal lengths the same
# (lab/mixed/1_h200.txt).
_FEW_ROUNDS = 1
# Steps of a share, at least: each costs partial results, written and read again. More rows have more of them.
_FEW_LEAST, _MANY_LEAST = 2, 8
# Keys of a share of few rows where results do not depend on the batch. Sequences of many rows are not split there:
# the partial results of a batch of prompts would take more memory than its keys.
_FIXED_KEYS = 1024
# What was measured beside ``forward_triton``.
_MEASURED_ARCH, _MEASURED_DIMS, _SMALLEST_PAGE, _FEWEST_KEYS = 90, (64, 128), 16, 1 << 14
# D and DV that differ, and that a GPU test showed right. Wrong were 40 and 24 on an H100, and 48 and 32, and 64 and 32,
# on an H200, with three stages and pages of any size. One or two stages are right there, and so is ptxas without
# optimisation.
_RIGHT_APART = ((64, 128), (128, 64), (192, 128))
_FEW_PROMPTS, _PROMPT_ROWS = 8, 128  # sequences, and rows of a tile of ``forward_triton``
_PAGED = frozenset(("packed sequences", "a page table"))
_SERVED = frozenset(("a sliding window", "a softcap", "attention sinks", "ALiBi", "packed sequences", "a page table"))


# Tiles of few rows: (architectures) -> {columns of the wider of the D and DV tiles: by rows, fewest first, each with
# how many programs an SM has room for}. They are those of decode_triton, which reads keys in the same way; none was
# timed here against others.
_T = ForwardConfig
FEW_TABLES: dict[tuple[int, ...], dict[int, tuple[tuple[ForwardConfig, int], ...]]] = {
    (80,): {
        64: ((_T(16, 64, 4, 4), 3), (_T(32, 64, 4, 4), 2), (_T(64, 64, 4, 3), 2)),
        128: ((_T(16, 64, 4, 3), 2), (_T(32, 64, 4, 3), 2), (_T(64, 64, 8, 3), 1)),
        256: ((_T(16, 32, 4, 3), 2), (_T(32, 32, 4, 2), 2), (_T(64, 32, 8, 2), 1)),
    },
    (86, 89, 120): {
        64: ((_T(16, 64, 4, 3), 2), (_T(32, 64, 4, 3), 2), (_T(64, 64, 4, 2), 2)),
        128: ((_T(16, 32, 4, 3), 2), (_T(32, 32, 4, 3), 2), (_T(64, 32, 4, 2), 2)),
        256: ((_T(16, 32, 4, 2), 2), (_T(32, 32, 4, 2), 1), (_T(64, 16, 8, 2), 1)),
    },
    (90, 100): {
        64: ((_T(16, 64, 4, 4), 3), (_T(32, 128, 4, 3), 2), (_T(64, 128, 4, 3), 2)),
        128: ((_T(16, 64, 4, 3), 2), (_T(32, 64, 4, 3), 2), (_T(64, 64, 4, 3), 2)),
        256: ((_T(16, 32, 4, 3), 2), (_T(32, 32, 4, 3), 2), (_T(64, 32, 8, 3), 1)),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """Programs and partial results of a call, at most; programs and slots are of one K/V head."""

    few_items: int
    many_items: int
    merges: int
    few_slots: int  # partial results of tiles of few rows
    many_slots: int


def mixed_refusal(problem: AttentionProblem) -> str | None:
    """Return why ``mixed_triton`` cannot serve ``problem``, or None."""
    if not problem.page_size:
        return "it serves packed queries over a page table alone"
    lacking = [feature for feature in problem.features if feature not in _SERVED]
    if lacking:
        return f"it does not serve {' and '.join(lacking)}"
    if problem.item_bytes != 2:
        return f"it serves fp16 and bf16, got {problem.dtype}"
    sizes = problem.head_dim, problem.head_dim_v
    if sizes[0] % 16 or sizes[1] % 16:
        return f"it serves head sizes that are multiples of 16, got {sizes[0]} and {sizes[1]}"
    if sizes[0] != sizes[1] and sizes not in _RIGHT_APART:
        served = ", ".join(f"{d} and {dv}" for d, dv in _RIGHT_APART)
        return f"it serves equal head sizes, or {served}, got {sizes[0]} and {sizes[1]}"
    return None


def split_refusal(problem: AttentionProblem) -> str | None:
    """Return why ``num_splits`` and ``batch_invariant`` cannot be served, or None."""
    return mixed_refusal(problem) if problem.num_splits or problem.batch_invariant else None


def mixed_passed_over(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_triton`` is left to serve what this kernel could, or None.

    It is taken for what was measured on an H100 and an H200: ten batches of 1 to 128 sequences took a half to a fifth
    of the time, and two of a few long prompts 0.99 to 1.05 times as long (lab/mixed).
    """
    p = problem
    if gpu.arch != _MEASURED_ARCH:
        return f"it was measured on sm_{_MEASURED_ARCH} alone"
    if p.head_dim != p.head_dim_v or p.head_dim not in _MEASURED_DIMS or not p.causal or p.page_size < _SMALLEST_PAGE:
        return f"it was measured causal, with heads of 64 and 128 and pages of {_SMALLEST_PAGE} and more"
    if set(p.features) - _PAGED:
        return "it was measured without features"
    if p.batch * p.seqlen_k < _FEWEST_KEYS:
        return f"it was measured with {_FEWEST_KEYS} keys and more"
    if p.batch <= _FEW_PROMPTS and cdiv(p.seqlen_q, _PROMPT_ROWS) * p.heads >= gpu.sms:
        return f"row tiles of the longest of {p.batch} prompts fill the GPU"
    return None


def mixed_config(problem: AttentionProblem, arch: int) -> MixedConfig:
    """Return the tiles of few and of many rows.

    Neither the batch nor the longest of its sequences decides where ``batch_invariant`` promises the same bits.
    """
    p = problem
    columns = block_dim(max(p.head_dim, p.head_dim_v))
    weight = 1 if len(p.features) <= 3 else 2
    rows = forward_rows(arch, p.item_bytes, columns, features=weight, paged=True)
    longest = p.seqlen_q * p.group
    few_rows = max(_FEWEST_ROWS, block_dim(p.group))
    if few_rows < longest <= _FEW_ROWS and not p.batch_invariant:
        few_rows = block_dim(longest)
    few, blocks = _few_tile(arch, max(64, columns), few_rows)
    return MixedConfig(few, rows[0], blocks, longest > few.block_m)


def _few_tile(arch: int, columns: int, rows: int) -> tuple[ForwardConfig, int]:
    """Return the tile of few rows, and how many programs an SM has room for."""
    near = max(known for archs in FEW_TABLES for known in archs if known <= arch)
    table = next(table for archs, table in FEW_TABLES.items() if near in archs)
    return next((row for row in table[columns] if row[0].block_m >= rows), table[columns][-1])


def mixed_slots(problem: AttentionProblem, config: MixedConfig, sms: int) -> tuple[int, int]:
    """Return how many programs of few and of many rows there should be for one K/V head."""
    few = _FEW_ROUNDS * sms * config.few_blocks // problem.heads_kv
    return max(1, few), max(1, sms // problem.heads_kv)


def most_steps(problem: AttentionProblem, config: ForwardConfig, group: int) -> int:
    """Return the most steps over keys that a row tile makes."""
    left, right = problem.window
    steps = cdiv(problem.seqlen_k, config.block_n)
    if problem.bounded_left and problem.bounded_right:
        seen = left + max(right, 0) + config.block_m // group + 2
        steps = min(steps, cdiv(seen, config.block_n) + 1)
    return max(1, steps)


def fixed_steps(config: ForwardConfig) -> int:
    """Return the steps of a share where its size is fixed."""
    return max(1, _FIXED_KEYS // config.block_n)


def least_steps() -> tuple[int, int]:
    """Return the steps of a share of few rows and of many, at least."""
    return _FEW_LEAST, _MANY_LEAST


def schedule_of(problem: AttentionProblem) -> str:
    """Return how the keys of each sequence are split."""
    if problem.num_splits:
        return "even"
    return "own length" if problem.batch_invariant else "lengths"


def most_splits(problem: AttentionProblem, config: MixedConfig) -> tuple[int, int]:
    """Return the most shares of a tile of few rows and of one of many."""
    steps = (
        most_steps(problem, config.few, problem.group),
        most_steps(problem, config.many, problem.group),
    )
    schedule = schedule_of(problem)
    if schedule == "even":
        return min(problem.num_splits, steps[0]), min(problem.num_splits, steps[1])
    if schedule == "own length":
        return cdiv(steps[0], fixed_steps(config.few)), 1
    return cdiv(steps[0], _FEW_LEAST), cdiv(steps[1], _MANY_LEAST)


def mixed_sizes(problem: AttentionProblem, config: MixedConfig, sms: int, tokens: int) -> MixedSizes:
    """Return the sizes of a call with ``tokens`` queries, whatever the lengths are."""
    p = problem
    rows, longest = tokens * p.group, p.seqlen_q * p.group
    few_tiles = min(p.batch, tokens)
    many = min(p.batch, tokens * p.group // (config.few.block_m + 1)) if config.has_many else 0
    many_tiles = min(many * cdiv(longest, config.many.block_m), rows // config.many.block_m + many)
    most = most_splits(p, config)
    slots = [tiles * splits if splits > 1 else 0 for tiles, splits in zip((few_tiles, many_tiles), most, strict=True)]
    items = [max(tiles, count) for tiles, count in zip((few_tiles, many_tiles), slots, strict=True)]
    if schedule_of(p) == "lengths":
        # Shares are rounded to the nearest number: from 1.5 on there are two, so at most 4/3 of what was asked for.
        asked = mixed_slots(p, config, sms)
        slots = [min(count, cdiv(4 * wanted, 3)) for count, wanted in zip(slots, asked, strict=True)]
        items = [tiles + count for tiles, count in zip((few_tiles, many_tiles), slots, strict=True)]
    merges = min(few_tiles, slots[0] // 2) * cdiv(config.few.block_m, MERGE_ROWS)
    merges += min(many_tiles, slots[1] // 2) * cdiv(config.many.block_m, MERGE_ROWS)
    return MixedSizes(items[0], items[1], merges, slots[0], slots[1])


def round_tokens(tokens: int) -> int:
    """Round up, by an eighth at most, so that few grids serve all batches."""
    unit = 1 << max(0, tokens.bit_length() - 4)
    return cdiv(tokens, unit) * unit


def merge_columns(problem: AttentionProblem) -> int:
    """Return the columns of one program of the merge."""
    return min(128, block_dim(problem.head_dim_v))


def records_together(problem: AttentionProblem) -> int:
    """Return how many records a program looks at together."""
    return max(16, min(_MOST_SEQUENCES, 1 << (problem.batch - 1).bit_length()))


def mixed_launches(problem: AttentionProblem, config: MixedConfig, sms: int, tokens: int) -> tuple[PlannedLaunch, ...]:
    """Return the launches of a call with ``tokens`` queries, in order."""
    p = problem
    sizes = mixed_sizes(p, config, sms, round_tokens(tokens))
    work = PlannedLaunch("_plan_work_kernel", (cdiv(p.batch, WORK_SEQUENCES), 1, 1), (32 * WORK_WARPS, 1, 1))
    launches = [work]
    if sizes.few_items:
        grid = (p.heads_kv * sizes.few_items, 1, 1)
        launches.append(PlannedLaunch("_mixed_kernel", grid, (32 * config.few.num_warps, 1, 1)))
    if sizes.many_items:
        grid = (p.heads_kv * sizes.many_items, 1, 1)
        launches.append(PlannedLaunch("_mixed_kernel", grid, (32 * config.many.num_warps, 1, 1)))
    if sizes.merges:
        columns = cdiv(block_dim(p.head_dim_v), merge_columns(p))
        grid = (columns * p.heads_kv * sizes.merges, 1, 1)
        launches.append(PlannedLaunch("_merge_mixed_kernel", grid, (32 * MERGE_WARPS, 1, 1)))
    if max(launch.grid[0] for launch in launches) >= 2**31:
        raise UnsupportedError("a grid of 2**31 blocks or more is too large", hint="pass fewer queries or num_splits")
    return tuple(launches)


def mixed_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``mixed_triton`` serves ``problem``; launches are those of as many queries as the maxima allow."""
    config = mixed_config(problem, gpu.arch)
    launches = mixed_launches(problem, config, gpu.sms, problem.batch * problem.seqlen_q)
    return Plan(problem, gpu.name, gpu.arch, MIXED_KERNEL, config, launches, f"{why}; {_reason(problem, config)}")


def _reason(problem: AttentionProblem, config: MixedConfig) -> str:
    how = {
        "lengths": "keys are split by the lengths of all sequences, on the device",
        "even": f"keys of each sequence are split over {problem.num_splits}",
        "own length": f"keys of few rows are split every {fixed_steps(config.few) * config.few.block_n}",
    }[schedule_of(problem)]
    many = f", of more rows tiles of {config.many.block_m}" if config.has_many else ""
    return f"sequences of up to {config.few.block_m} rows a K/V head have one tile{many}; {how}"


def interpreted_plan(problem: AttentionProblem, why: str) -> Plan:
    """Return the plan for Triton's interpreter: small tiles and few SMs, so that small problems are split."""
    few, many = ForwardConfig(16, 16, 4, 1), ForwardConfig(32, 32, 4, 1)
    config = MixedConfig(few, many, 1, problem.seqlen_q * problem.group > few.block_m)
    launches = mixed_launches(problem, config, INTERPRETED_SMS, problem.batch * problem.seqlen_q)
    return Plan(problem, "CPU", 0, MIXED_KERNEL, config, launches, why)


INTERPRETED_SMS = 4
