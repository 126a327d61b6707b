"""Which kernel serves a problem on a GPU, with which tile and grid, and why. No Triton: plans are made anywhere."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, UnsupportedError
from ..gpu.specs import OLDEST_TRITON, GpuSpec, shared_memory_limit
from .problem import AttentionProblem

MAX_HEAD_DIM = 256
OLDEST_ARCH = 80  # asynchronous copies to shared memory, and bf16
KERNELS = ("forward_short_gluon", "forward_gluon_sm90", "forward_triton", "reference")


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


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch that a plan promises.

    ``shared_memory_bytes`` is known once the kernel was compiled. Planning compiles nothing, so it is None in every
    plan that ``plan_attention`` and ``explain`` return.
    """

    pattern: str  # the kernel's name in a profiler
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is served on one GPU."""

    problem: AttentionProblem
    gpu: str  # "CPU" for the reference
    arch: int  # 90 for sm_90; 0 for the reference
    kernel: str
    config: ForwardConfig | ShortConfig | HopperConfig | None
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


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# Kernels that mask scores before they scale them: -inf * 0 is NaN, and what is smaller may be 0 to a GPU.
_SMALLEST_SCALE_LOG2 = 2.0**-126

# Tiles of forward_triton:
# (architectures) -> {(bytes of an element, columns of the wider of the D and DV tiles): row tiles, largest first}.
# Every row compiles for its architectures without spills and within their shared memory (test_tables.py), and is a
# choice among those that do. Only 16 and 64 rows of 64 columns on sm_90 were timed against others, over at most 512
# keys (lab/one_pass/1_batched_triton_and_streaming.txt).
_T = ForwardConfig
FORWARD_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (80,): {
        (2, 64): (_T(128, 64, 4, 3), _T(64, 64, 4, 3), _T(16, 64, 4, 3)),
        (2, 128): (_T(128, 32, 8, 3), _T(64, 32, 4, 3), _T(16, 64, 4, 3)),
        (2, 256): (_T(64, 32, 8, 2), _T(32, 32, 4, 2), _T(16, 32, 4, 2)),
        (4, 64): (_T(32, 32, 8, 1), _T(16, 32, 4, 1)),
        (4, 128): (_T(32, 16, 8, 1), _T(16, 32, 8, 1)),
        (4, 256): (_T(16, 16, 8, 1),),
    },
    (86, 89): {
        (2, 64): (_T(128, 32, 4, 3), _T(64, 64, 4, 2), _T(16, 64, 4, 2)),
        (2, 128): (_T(128, 32, 8, 3), _T(64, 32, 4, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(64, 16, 8, 2), _T(32, 16, 4, 2), _T(16, 32, 4, 1)),
        (4, 64): (_T(64, 32, 8, 1), _T(16, 32, 4, 1)),
        (4, 128): (_T(32, 16, 8, 1), _T(16, 32, 8, 1)),
        (4, 256): (_T(16, 16, 8, 1),),
    },
    (90,): {
        (2, 64): (_T(128, 128, 8, 3), _T(64, 128, 4, 2), _T(16, 128, 4, 2)),
        (2, 128): (_T(128, 128, 8, 2), _T(64, 64, 4, 2), _T(16, 64, 4, 3)),
        (2, 256): (_T(128, 32, 8, 3), _T(64, 32, 8, 2), _T(16, 32, 4, 2)),
        (4, 64): (_T(64, 32, 8, 1), _T(16, 32, 4, 1)),
        (4, 128): (_T(32, 16, 8, 1), _T(16, 32, 8, 1)),
        (4, 256): (_T(16, 16, 8, 1),),
    },
    (100,): {
        (2, 64): (_T(128, 64, 8, 3), _T(64, 64, 4, 2), _T(16, 64, 4, 2)),
        (2, 128): (_T(128, 64, 8, 2), _T(64, 64, 4, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(128, 32, 8, 2), _T(64, 32, 8, 2), _T(16, 32, 4, 2)),
        (4, 64): (_T(32, 32, 8, 1), _T(16, 32, 4, 1)),
        (4, 128): (_T(32, 16, 8, 1), _T(16, 32, 8, 1)),
        (4, 256): (_T(16, 16, 8, 1),),
    },
    (120,): {
        (2, 64): (_T(128, 32, 4, 3), _T(64, 64, 4, 2), _T(16, 64, 4, 2)),
        (2, 128): (_T(64, 32, 4, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(64, 16, 8, 2), _T(32, 16, 4, 2), _T(16, 32, 4, 1)),
        (4, 64): (_T(64, 32, 8, 1), _T(16, 32, 4, 1)),
        (4, 128): (_T(32, 16, 8, 1), _T(16, 32, 8, 1)),
        (4, 256): (_T(16, 16, 8, 1),),
    },
}  # fmt: skip

# Rows in place of those above where features would make them spill, chosen like them: with any feature, and with a bias
# or more than two of window, softcap, sinks and ALiBi, for which a thread needs more registers.
_FEATURE_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (80,): {(2, 64): (_T(128, 64, 8, 3), _T(64, 64, 4, 3), _T(16, 64, 4, 3))},
    (90,): {
        (2, 128): (_T(128, 64, 8, 3), _T(64, 64, 4, 2), _T(16, 64, 4, 3)),
        (2, 256): (_T(128, 16, 8, 3), _T(64, 32, 8, 2), _T(16, 32, 4, 2)),
    },
    (100,): {(2, 256): (_T(128, 16, 8, 2), _T(64, 32, 8, 2), _T(16, 32, 4, 2))},
    (86, 89, 120): {(2, 64): (_T(128, 32, 8, 3), _T(64, 64, 4, 2), _T(16, 64, 4, 2))},
}
_MANY_FEATURES_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (80,): {
        (2, 64): (_T(128, 32, 8, 3), _T(64, 32, 4, 3), _T(16, 64, 4, 3)),
        (2, 128): (_T(128, 16, 8, 3), _T(64, 32, 4, 3), _T(16, 64, 4, 3)),
        (2, 256): (_T(64, 16, 8, 2), _T(32, 32, 4, 2), _T(16, 32, 4, 2)),
    },
    (86, 89, 120): {(2, 64): (_T(128, 32, 8, 3), _T(64, 32, 4, 2), _T(16, 64, 4, 2))},
    (90,): {
        (2, 64): (_T(128, 64, 8, 2), _T(64, 64, 4, 2), _T(16, 128, 4, 2)),
        (2, 128): (_T(128, 32, 8, 2), _T(64, 32, 4, 2), _T(16, 64, 4, 3)),
        (2, 256): (_T(128, 16, 8, 2), _T(64, 16, 8, 2), _T(16, 32, 4, 2)),
        (4, 64): (_T(32, 32, 8, 1), _T(16, 32, 4, 1)),
    },
    (100,): {
        (2, 128): (_T(128, 32, 8, 2), _T(64, 32, 4, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(64, 32, 8, 2), _T(16, 32, 4, 2)),
    },
}  # fmt: skip

# When keys are split, and the merge of their shares: choices, none of them measured here yet.
# The part of the SMs that is full enough. Below it, a split or a smaller tile puts idle SMs to work; it costs a second
# launch and the merge, or reuse of K and V. FlashAttention-3 takes 0.8 too, for the split.
_FULL_ENOUGH = 0.8
# More shares put more SMs to work on few rows. Each costs a partial output in fp32, written and read again, and one
# more unrolled step of the merge. FlashAttention-3 goes up to 256.
_MAX_SPLITS = 32
# A shorter share ends sooner; its partial output weighs as much however short it is.
_MIN_SPLIT_KEYS = 256
# More rows a program read partial results in fewer programs, which a problem with few rows does not have to spare.
MERGE_ROWS = 4
MERGE_WARPS = 4


def forward_rows(arch: int, item_bytes: int, columns: int, *, features: int = 0) -> tuple[ForwardConfig, ...]:
    """Return the table row of ``forward_triton`` for an architecture, an element size and a tile width.

    An architecture without a table takes that of the one before it: sm_103 has the tiles of sm_100. ``features`` is 0
    for none, 1 for some and 2 for many (``_weight_of_features``).
    """
    near = max(known for archs in FORWARD_TABLES for known in archs if known <= arch)
    key = item_bytes, max(64, columns)
    for tables in (_MANY_FEATURES_TABLES, _FEATURE_TABLES, FORWARD_TABLES)[2 - features :]:
        for archs, table in tables.items():
            if near in archs and key in table:
                return table[key]
    raise AssertionError(key)


def _weight_of_features(problem: AttentionProblem) -> int:
    """Return which tables serve a problem: those for none, for some or for many features."""
    asked = len(problem.features) - problem.packed
    if problem.bias or asked > 2:
        return 2
    return 1 if problem.features else 0


def share_keys(seqlen_k: int, splits: int, block_n: int) -> int:
    """Return the keys of one share in ``forward_triton``, the last one's apart: whole tiles."""
    return _cdiv(_cdiv(seqlen_k, splits), block_n) * block_n


def _nonempty_splits(seqlen_k: int, splits: int, block_n: int) -> int:
    """Return how many of ``splits`` shares have keys: as shares are whole tiles, the first ones may take them all.

    With so many, shares are no longer than before, so the last one has keys.
    """
    return _cdiv(seqlen_k, share_keys(seqlen_k, splits, block_n))


def _keys_of_a_tile(problem: AttentionProblem, block_m: int) -> int:
    """Return the most keys that a row tile sees: all, or with bounds on both sides those between them."""
    left, right = problem.window
    if not (problem.bounded_left and problem.bounded_right):
        return problem.seqlen_k
    return min(problem.seqlen_k, left + max(0, right) + block_m)


def _forward_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    columns = block_dim(max(problem.head_dim, problem.head_dim_v))
    rows = forward_rows(gpu.arch, problem.item_bytes, columns, features=_weight_of_features(problem))
    heads = problem.batch * problem.heads

    def blocks(config: ForwardConfig) -> int:
        return _cdiv(problem.seqlen_q, config.block_m) * heads

    enough = _FULL_ENOUGH * gpu.sms
    keys = _keys_of_a_tile(problem, rows[-1].block_m)
    # The shares of packed sequences would be of unlike lengths, which only the GPU knows.
    most_splits = 1 if problem.packed else max(1, min(keys // _MIN_SPLIT_KEYS, _MAX_SPLITS))
    fitting = [row for row in rows if row.block_m < 2 * problem.seqlen_q] or list(rows[-1:])  # no tile half empty
    config = next((row for row in fitting if blocks(row) * most_splits >= enough), fitting[-1])
    reason = f"{why}; {blocks(config)} row tiles of {config.block_m} "
    if blocks(config) >= enough:
        reason += f"fill {gpu.sms} SMs"
    elif problem.packed:
        reason += f"do not fill {gpu.sms} SMs, and the keys of packed sequences are not split"
    elif most_splits == 1:
        reason += f"do not fill {gpu.sms} SMs, and the keys are too few to be split"
    else:
        splits = min(most_splits, max(1, round(gpu.sms / blocks(config))))
        splits = _nonempty_splits(keys, splits, config.block_n)
        config = dataclasses.replace(config, num_splits=splits)
        reason += f"do not fill {gpu.sms} SMs, so the keys are split over {splits}"
    tiles = _cdiv(problem.seqlen_q, config.block_m)
    launches = [
        PlannedLaunch("_forward_kernel", (tiles * config.num_splits * heads, 1, 1), (32 * config.num_warps, 1, 1))
    ]
    if config.num_splits > 1:
        merge_grid = (_cdiv(problem.seqlen_q, MERGE_ROWS) * heads, 1, 1)
        launches.append(PlannedLaunch("_merge_partials_kernel", merge_grid, (32 * MERGE_WARPS, 1, 1)))
    if launches[0].grid[0] >= 2**31:
        raise UnsupportedError(f"a grid of {launches[0].grid[0]} blocks is too large; at most 2**31 - 1 are possible")
    return Plan(problem, gpu.name, gpu.arch, "forward_triton", config, tuple(launches), reason)


def _refusal(kernel: str, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``kernel`` cannot serve ``problem``, or None."""
    refuse = {"forward_short_gluon": _short_refusal, "forward_gluon_sm90": _hopper_refusal}.get(kernel)
    if refuse is None:
        return None
    if not problem.features:
        return refuse(problem, gpu)
    *first, last = problem.features
    return f"it does not serve {', '.join(first)}{' and ' if first else ''}{last}"


SHORT_MAX_KEYS = 512


def short_alignment(head_dim: int) -> int:
    """Return the elements that one thread of ``forward_short_gluon`` copies at once; rows are multiples of it."""
    return min(8, block_dim(head_dim) // 4)


def short_config(problem: AttentionProblem, gpu: GpuSpec) -> ShortConfig:
    """Return the tile of ``forward_short_gluon``.

    Four groups of warps share the keys, 16 keys a group at the least, while 16-row tiles do not fill the GPU: rows are
    cheap there, and latency counts. Up to two blocks an SM two groups do, since four merge more than they save; beyond,
    two rows of warps read K and V once for 32 rows. Measured on an H200, microseconds a call with four groups, two, and
    with 32 rows: 3.07, 2.98 and 3.14 at (B, H, S, D) = (8, 4, 128, 64); 2.61, 2.69 and 2.91 at (4, 4, 128, 64).
    """
    keys = max(16, 1 << (problem.seqlen_k - 1).bit_length())
    blocks = _cdiv(problem.seqlen_q, 16) * problem.batch * problem.heads
    if blocks <= gpu.sms or (keys > 128 and blocks <= 2 * gpu.sms):
        groups = min(4, keys // 16)
        return ShortConfig(16, keys // groups, groups, groups)
    groups = min(2 if keys <= 128 else 4, keys // 16)
    if blocks <= 2 * gpu.sms:
        return ShortConfig(16, keys // groups, groups, groups)
    return ShortConfig(32, keys // groups, groups, 2 * groups)


def short_shared_bytes(problem: AttentionProblem, config: ShortConfig) -> int:
    """Return the shared memory of ``forward_short_gluon``: Q, K, V and the partial results of the merge."""
    d, dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    keys = config.key_groups * config.block_n
    return 2 * (config.block_m * d + keys * (d + dv)) + 4 * config.key_groups * config.block_m * (dv + 2)


def _short_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_short_gluon`` cannot serve ``problem``, or None."""
    if problem.item_bytes != 2:
        return "it serves fp16 and bf16 only"
    if not 0 < problem.seqlen_k <= SHORT_MAX_KEYS:
        return f"it serves at most {SHORT_MAX_KEYS} keys" if problem.seqlen_k else "there are no keys"
    if problem.scale_log2 < _SMALLEST_SCALE_LOG2:
        return "it needs a positive softmax_scale, of normal size in fp32"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "it serves head dimensions up to 128"
    if problem.heads > 65535 or problem.batch > 65535:
        return "its grid has at most 65535 heads and sequences"
    layout = _short_layout_refusal(problem)
    if layout is not None:
        return layout
    shared = short_shared_bytes(problem, short_config(problem, gpu))
    if shared > gpu.shared_memory_per_block_bytes:
        return (
            f"it would need {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_memory_per_block_bytes}"
        )
    return None


def _short_layout_refusal(problem: AttentionProblem) -> str | None:
    """Return why rows lie in memory as ``forward_short_gluon`` cannot copy them, or None."""
    limit = 2**31 // max(1, problem.seqlen_q, problem.seqlen_k)
    for name, strides, dim in (
        ("q", problem.q_strides, problem.head_dim),
        ("k", problem.k_strides, problem.head_dim),
        ("v", problem.v_strides, problem.head_dim_v),
    ):
        step = short_alignment(dim)
        if strides[3] != 1:
            return f"rows of {name} are not contiguous"
        if dim % step or any(stride % step for stride in strides[:3]) or problem.pointer_alignment < 2 * step:
            return f"rows of {name} do not start at multiples of {2 * step} bytes"
        if strides[2] >= limit:
            return f"rows of {name} are too far apart"
    if problem.output_strides[2] >= limit:
        return "rows of the output are too far apart"
    return None


def _short_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    config = short_config(problem, gpu)
    grid = (_cdiv(problem.seqlen_q, config.block_m), problem.heads, problem.batch)
    launch = PlannedLaunch("_forward_short_kernel", grid, (32 * config.num_warps, 1, 1))
    return Plan(problem, gpu.name, gpu.arch, "forward_short_gluon", config, (launch,), why)


def _short_pays(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """Whether ``forward_short_gluon`` has at most two blocks an SM: beyond, throughput counts, not latency.

    Where the line lies is a choice. At 3.9 blocks an SM, (B, H, S, D) = (32, 8, 64, 64), it still took half the time of
    SDPA, at 15.5, (64, 8, 128, 64), 1.3 times as long (an H200, lab/one_pass/5_merge_without_conflicts.txt). Against
    ``forward_triton``, which serves instead, it was not measured.
    """
    config = short_config(problem, gpu)
    return _cdiv(problem.seqlen_q, config.block_m) * problem.heads * problem.batch <= 2 * gpu.sms


HOPPER_ROWS = 64  # of one warpgroup
HOPPER_REGISTERS = {2: 240, 3: 160}  # of a thread that multiplies, by warpgroups; the producer's have the rest, 32
_HOPPER_BARRIER_BYTES = 1024  # and what else lies in shared memory: barriers, where row tiles lie, alignment
_HOPPER_L2_BYTES = 32 << 20  # of K and V of a group of heads: what FlashAttention-3 takes for an L2 of 50 MB
# Rows, keys, tiles: a sum of two of them, rounded up, stays in 32 bits. So does the count of key tiles over all row
# tiles of a program, at about 1 us each in any call of less than half an hour.
_HOPPER_MAX = 2**29

# Tiles of forward_gluon_sm90: (columns of Q and K, columns of V, causal) -> (keys up to which, configuration).
# The numbers are TFLOP/s at 512, 1k, 2k, 4k, 8k and 16k keys, measured on an H200 (Triton 3.6, bf16, 16,384 tokens, L2
# flushed, median of 10 calls): lab/hopper, run 10, and run 12 for 96 and 192 columns. Lengths between two of them take
# the longer one's configuration; fp16 takes bf16's; widths take the first entry that covers both.
_HC = HopperConfig
_ANY = 2**63
HOPPER_TABLE: dict[tuple[int, int, bool], tuple[tuple[int, HopperConfig], ...]] = {
    # 128 keys 444 503 572 573 594 594, not in turns 419 482 548 545 566 569; 64 keys 415 478 547 550 576 577.
    (64, 64, False): ((_ANY, _HC(3, 128, 2, ping_pong=True)),),
    # 128 rows in turns 263 351 428 471 463 472; 192 rows 247 325 456 514 543 566, in turns 215 309 448 514 543 574,
    # with 64 keys 244 325 454 520 547 563.
    (64, 64, True): (
        (1024, _HC(2, 128, 2, ping_pong=True)),
        (2048, _HC(3, 128, 2, ping_pong=False)),
        (_ANY, _HC(3, 128, 2, ping_pong=True)),
    ),
    # 128 rows 508 599 651 668 628 622, not in turns 447 504 528 522 474 474; 192 rows 485 577 683 651 684 681 (4k:
    # two sequences only, where 192 rows fill 5.3 rounds).
    (96, 96, False): (
        (1024, _HC(2, 128, 2, ping_pong=True)),
        (_ANY, _HC(3, 64, 2, ping_pong=True)),
    ),
    # 128 rows 318 454 567 620 682 633, not in turns 297 402 486 532 593 533; 192 rows 267 377 538 605 684 663, but more
    # registers spill than is allowed where the diagonal is not aligned with the tiles.
    (96, 96, True): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # 572 688 755 778 763 728, in turns 571 689 754 777 761 726.
    (128, 128, False): ((_ANY, _HC(2, 128, 2, ping_pong=False)),),
    # In turns 343 519 656 740 770 746, not 340 515 654 744 776 754.
    (128, 128, True): (
        (2048, _HC(2, 128, 2, ping_pong=True)),
        (_ANY, _HC(2, 128, 2, ping_pong=False)),
    ),
    # In turns 617 730 789 807 748 743, not 607 724 785 807 749 735; 64 keys x 3 stages 612 719 775 801 743 737.
    (192, 128, False): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # In turns 385 552 683 742 729 709, not 372 542 679 739 726 704; 64 keys x 3 stages 376 542 675 736 718 708.
    (192, 128, True): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # 3 stages in turns 624 728 771 789 728 738, not 607 704 750 777 710 741; 2 stages 602 722 776 790 718 744.
    (192, 192, False): ((_ANY, _HC(2, 64, 3, ping_pong=True)),),
    # 3 stages in turns 390 552 676 742 699 720, not 400 561 686 747 705 723; 2 stages 386 558 688 746 706 723.
    (192, 192, True): ((_ANY, _HC(2, 64, 3, ping_pong=False)),),
    # In turns 603 722 792 824 757 751, not 594 713 789 823 757 755.
    (256, 256, False): ((_ANY, _HC(2, 64, 2, ping_pong=True)),),
    # 396 558 678 763 810 754, in turns 396 552 667 757 807 752.
    (256, 256, True): ((_ANY, _HC(2, 64, 2, ping_pong=False)),),
}


def hopper_config(problem: AttentionProblem) -> HopperConfig:
    """Return tile and schedule of ``forward_gluon_sm90``."""
    rows = next(
        rows
        for (columns, columns_v, causal), rows in HOPPER_TABLE.items()
        if problem.head_dim <= columns and problem.head_dim_v <= columns_v and problem.causal == causal
    )
    return next(config for keys, config in rows if problem.seqlen_k <= keys)


def _hopper_tiles(problem: AttentionProblem) -> int:
    rows = HOPPER_ROWS * hopper_config(problem).warpgroups
    return _cdiv(problem.seqlen_q, rows) * problem.batch * problem.heads


def hopper_columns(head_dim: int) -> tuple[int, int]:
    """Return the columns that are multiplied: a power of two, and the power of two, or 0, that covers the rest.

    So 96 costs 64 + 32 columns and 192 costs 128 + 64, where one power of two would cost a third more. Up to 64 there
    is nothing to save: exp is the limit, not the matrix units.
    """
    if head_dim <= 64:
        return block_dim(head_dim), 0
    columns = _cdiv(head_dim, 16) * 16
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    second = block_dim(rest) if rest else 0
    return (2 * first, 0) if first == second else (first, second)


def hopper_output_columns(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many columns of the output a warpgroup stages at once on the way to memory.

    All, up to 128; half as many where shared memory holds no more beside the tiles of Q, K and V.
    """
    d, dv = sum(hopper_columns(problem.head_dim)), sum(hopper_columns(problem.head_dim_v))
    rows, columns = HOPPER_ROWS * config.warpgroups, min(block_dim(problem.head_dim_v), 128)
    tiles = problem.item_bytes * (rows * d + config.num_stages * config.block_n * (d + dv))
    fits = tiles + problem.item_bytes * rows * columns + _HOPPER_BARRIER_BYTES <= shared_memory_limit(90)
    return columns if fits else columns // 2


def hopper_is_aligned(problem: AttentionProblem, config: HopperConfig) -> bool:
    """Return whether, in turns and causal, the diagonal crosses key tiles as it does at the start of both sequences."""
    further = problem.seqlen_k - problem.seqlen_q
    return problem.causal and config.ping_pong and further >= 0 and further % config.block_n == 0


def hopper_edge_tiles(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many key tiles the first warpgroup masks, counted from the last that it walks over.

    In turns it walks over those of the last warpgroup, whose rows come after its own.
    """
    if not problem.causal:
        return 1 if problem.seqlen_k % config.block_n else 0
    behind = (config.warpgroups - 1) * HOPPER_ROWS if config.ping_pong else 0
    further = problem.seqlen_k - problem.seqlen_q
    if hopper_is_aligned(problem, config) or (not config.ping_pong and further % HOPPER_ROWS == 0):
        return 1 + behind // config.block_n
    # Its first row does not see the last HOPPER_ROWS - 1 + behind keys, which may begin anywhere in a tile.
    return 1 + (HOPPER_ROWS - 2 + behind + config.block_n - 1) // config.block_n


def hopper_heads_per_group(problem: AttentionProblem) -> int:
    """Return how many heads are walked over together when causal.

    As many as have their K and V in L2 together: the longest row tiles of all come first, and the next row tiles of a
    head find its K and V there. The groups are as equal as they can be: the row tiles of a small last one would not
    fill the GPU.
    """
    heads = problem.batch * problem.heads
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.item_bytes
    fitting = max(1, _HOPPER_L2_BYTES * problem.group // kv_bytes)
    return _cdiv(heads, _cdiv(heads, fitting))


def _hopper_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_gluon_sm90`` cannot serve ``problem``, or None."""
    if gpu.arch != 90:
        return f"it is for sm_90, this GPU is sm_{gpu.arch}"
    if problem.item_bytes != 2:
        return "it serves fp16 and bf16 only"
    if problem.seqlen_k == 0:
        return "there are no keys"
    if problem.scale_log2 < _SMALLEST_SCALE_LOG2:
        return "it needs a positive softmax_scale, of normal size in fp32"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "it serves head dimensions that are multiples of 8 (TMA steps by 16 bytes)"
    if problem.pointer_alignment < 16:
        return "TMA reads tensors that start at multiples of 16 bytes"
    if max(problem.seqlen_q, problem.seqlen_k, _hopper_tiles(problem)) >= _HOPPER_MAX:
        return f"it counts rows, keys and tiles up to {_HOPPER_MAX}"
    return _hopper_layout_refusal(problem)


def _hopper_layout_refusal(problem: AttentionProblem) -> str | None:
    """Return why TMA cannot step through q, k or v, or None."""
    for name, strides, sizes in (
        ("q", problem.q_strides, (problem.batch, problem.heads, problem.seqlen_q)),
        ("k", problem.k_strides, (problem.batch, problem.heads_kv, problem.seqlen_k)),
        ("v", problem.v_strides, (problem.batch, problem.heads_kv, problem.seqlen_k)),
    ):
        if strides[3] != 1:
            return f"rows of {name} are not contiguous"
        stepped = [stride for stride, size in zip(strides, sizes, strict=False) if size > 1]
        if 0 in stepped:
            return f"{name} is expanded: TMA does not step by 0"
        if any(stride % 8 for stride in stepped):
            return f"rows of {name} do not start at multiples of 16 bytes"
        if any(stride >= 2**39 for stride in stepped):
            return f"rows of {name} are too far apart"
    return None


def _hopper_underfills(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_triton``, which has smaller tiles and can split the keys, is left to serve it, or None."""
    tiles = _hopper_tiles(problem)
    if tiles >= _FULL_ENOUGH * gpu.sms:
        return None
    return f"its {tiles} row tiles do not fill {gpu.sms} SMs, and it does not split the keys"


def _hopper_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    config, tiles = hopper_config(problem), _hopper_tiles(problem)
    programs = min(tiles, gpu.sms)
    # Triton rounds the producer's warp up to a warpgroup.
    launch = PlannedLaunch("_forward_sm90_kernel", (programs, 1, 1), (128 * (config.warpgroups + 1), 1, 1))
    reason = f"{why}; {tiles} row tiles of {HOPPER_ROWS * config.warpgroups} on {gpu.sms} SMs"
    return Plan(problem, gpu.name, gpu.arch, "forward_gluon_sm90", config, (launch,), reason)


def plan_attention(problem: AttentionProblem, gpu: GpuSpec | None, kernel: str = "auto") -> Plan:
    """Return how ``problem`` is served on ``gpu`` (None: CPU tensors).

    A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: the kernel forced, or every kernel, refuses; the message names the nearest problem served.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {kernel!r}")
    if gpu is None:
        return _cpu_plan(problem, kernel)
    if kernel == "reference":
        return Plan(problem, gpu.name, gpu.arch, "reference", None, (), "the reference was asked for")
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"no kernel serves head dimension {widest}", hint=f"the nearest that is served: {MAX_HEAD_DIM}"
        )
    refuse_architecture(gpu.arch)
    if problem.rows == 0:
        name = "forward_triton" if kernel == "auto" else kernel
        return Plan(problem, gpu.name, gpu.arch, name, None, (), "the output is empty: nothing is launched")
    if kernel == "auto":
        return _auto_plan(problem, gpu)
    return _forced_plan(problem, gpu, kernel)


def refuse_architecture(arch: int) -> None:
    """Raise ``UnsupportedError`` where the Triton that is installed does not compile for ``sm_<arch>``."""
    if arch < OLDEST_ARCH:
        raise UnsupportedError(
            f"kernels need sm_{OLDEST_ARCH} or newer, this GPU is sm_{arch}", hint="A100, L4 and H100 are served"
        )
    if arch not in OLDEST_TRITON:
        served = ", ".join(f"sm_{known}" for known in OLDEST_TRITON)
        raise UnsupportedError(f"Triton compiles no kernel for sm_{arch}", hint=f"the architectures served: {served}")
    needed, installed = OLDEST_TRITON[arch], _installed_triton()
    if installed is not None and installed < needed:
        wanted = ".".join(map(str, needed))
        raise UnsupportedError(
            f"sm_{arch} needs Triton {wanted} or newer, got Triton {'.'.join(map(str, installed))}",
            hint=f"install triton>={wanted}, and a torch that goes with it",
        )


@functools.cache
def _installed_triton() -> tuple[int, ...] | None:
    """Return major and minor version without importing Triton; None where plans are made without it."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


def _forced_plan(problem: AttentionProblem, gpu: GpuSpec, kernel: str) -> Plan:
    plans = {"forward_short_gluon": _short_plan, "forward_gluon_sm90": _hopper_plan, "forward_triton": _forward_plan}
    refusal = _refusal(kernel, problem, gpu)
    if refusal:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {refusal}", hint="use kernel='auto'")
    return plans[kernel](problem, gpu, "it was asked for")


def _auto_plan(problem: AttentionProblem, gpu: GpuSpec) -> Plan:
    refusal = _refusal("forward_short_gluon", problem, gpu)
    if refusal is None and _short_pays(problem, gpu):
        return _short_plan(
            problem, gpu, f"{problem.seqlen_k} keys fit one pass, and the grid is at most two blocks an SM"
        )
    passed = f"forward_short_gluon is passed over ({refusal or 'its grid would be more than two blocks an SM'})"
    if gpu.arch == 90:
        refusal = _refusal("forward_gluon_sm90", problem, gpu) or _hopper_underfills(problem, gpu)
        if refusal is None:
            return _hopper_plan(problem, gpu, passed)
        passed += f", forward_gluon_sm90 too ({refusal})"
    return _forward_plan(problem, gpu, passed)


def _cpu_plan(problem: AttentionProblem, kernel: str) -> Plan:
    if kernel in ("auto", "reference"):
        return Plan(problem, "CPU", 0, "reference", None, (), "CPU tensors run the reference")
    if kernel == "forward_triton" and os.environ.get("TRITON_INTERPRET") == "1":
        config = ForwardConfig(16, 32, 4, 1)
        grid = (_cdiv(problem.seqlen_q, 16) * problem.batch * problem.heads, 1, 1)
        launch = PlannedLaunch("_forward_kernel", grid, (128, 1, 1))
        return Plan(problem, "CPU", 0, kernel, config, (launch,), "Triton's interpreter runs it (TRITON_INTERPRET=1)")
    hint = "TRITON_INTERPRET=1 runs it in Triton's interpreter" if kernel == "forward_triton" else "use kernel='auto'"
    raise UnsupportedError(f"{kernel} needs an NVIDIA GPU, got CPU tensors", hint=hint)
