"""Plans of ``forward_triton``: tiles, and how many programs share the keys."""

from __future__ import annotations

import dataclasses

from ...errors import UnsupportedError
from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..problem import AttentionProblem
from ..tiles import FULL_ENOUGH, ForwardConfig, Plan, block_dim, cdiv

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
        (4, 64): (_T(32, 32, 8, 1), _T(16, 32, 4, 1)),
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

# D above 256, by bytes of an element, on every architecture and with any feature: 32 keys of 512 columns have 32 KB.
# Without features sm_90 takes 64 rows, though Triton spills: 158 TFLOP/s on an H200 (causal, 4k keys, 8 heads over 4).
# 32 rows give 118 with 64 keys a step and 81 with 32, 16 rows 53, and SDPA 18 (lab/hopper/18_head_size_512.txt).
_WIDE_ROWS = {2: (_T(32, 32, 8, 1), _T(16, 32, 8, 1)), 4: (_T(16, 16, 8, 1),)}
_WIDE_ROWS_OF_HOPPER = _T(64, 32, 8, 2), _T(32, 64, 8, 1), _T(16, 32, 8, 1)

# Rows in place of those above where features would make them spill, chosen like them: with any feature; with a bias or
# more than two of window, softcap, sinks, ALiBi and pages, for which a thread needs more registers; with dropout; with
# a bias of packed sequences, dropout or not; and with pages, whose numbers are read ahead.
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

_DROPOUT_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (80,): {(2, 128): (_T(128, 16, 8, 3), _T(64, 32, 8, 3), _T(16, 64, 4, 3))},
    (90,): {(2, 64): (_T(128, 64, 8, 2), _T(64, 32, 4, 2), _T(16, 64, 4, 2))},
    (100,): {(2, 64): (_T(128, 32, 8, 2), _T(64, 32, 4, 2), _T(16, 64, 4, 2))},
    (86, 89): {(2, 128): (_T(128, 16, 8, 3), _T(64, 32, 8, 2), _T(16, 64, 4, 2))},
    (120,): {(2, 128): (_T(64, 32, 8, 2), _T(16, 64, 4, 2))},
}

_PACKED_BIAS_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (90,): {
        (2, 64): (_T(128, 32, 8, 2), _T(64, 32, 4, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(128, 16, 8, 2), _T(32, 32, 8, 2), _T(16, 32, 4, 2)),
    },
    (100,): {
        (2, 128): (_T(128, 32, 8, 2), _T(64, 32, 8, 2), _T(16, 64, 4, 2)),
        (2, 256): (_T(64, 16, 8, 2), _T(16, 32, 4, 2)),
    },
}

_PAGED_TABLES: dict[tuple[int, ...], dict[tuple[int, int], tuple[ForwardConfig, ...]]] = {
    (80,): {(2, 128): (_T(128, 16, 8, 3), _T(64, 32, 4, 3), _T(16, 64, 4, 3))},
    (86, 89): {(2, 128): (_T(128, 16, 8, 3), _T(64, 32, 4, 2), _T(16, 64, 4, 2))},
}

# When keys are split, and the merge of their shares: choices, none of them measured here yet.
# More shares put more SMs to work on few rows. Each costs a partial output in fp32, written and read again, and one
# more unrolled step of the merge. FlashAttention-3 goes up to 256.
_MAX_SPLITS = 32
# A shorter share ends sooner; its partial output weighs as much however short it is.
_MIN_SPLIT_KEYS = 256
# More rows a program read partial results in fewer programs, which a problem with few rows does not have to spare.
MERGE_ROWS = 4
MERGE_WARPS = 4


def forward_rows(
    arch: int, item_bytes: int, columns: int, *, features: int = 0, paged: bool = False
) -> tuple[ForwardConfig, ...]:
    """Return the table row of ``forward_triton`` for an architecture, an element size and a tile width.

    An architecture without a table takes that of the one before it: sm_103 has the tiles of sm_100. ``features`` is 0
    for none, 1 for some, 2 for many, 3 with dropout and 4 with a bias of packed sequences (``_weight_of_features``);
    ``paged``: keys lie in pages.
    """
    if columns > 256:
        is_plain = arch == 90 and item_bytes == 2 and not features and not paged
        return _WIDE_ROWS_OF_HOPPER if is_plain else _WIDE_ROWS[item_bytes]
    near = max(known for archs in FORWARD_TABLES for known in archs if known <= arch)
    key = item_bytes, max(64, columns)
    by_weight = (_PACKED_BIAS_TABLES, _DROPOUT_TABLES, _MANY_FEATURES_TABLES, _FEATURE_TABLES, FORWARD_TABLES)
    of_weight = by_weight[4 - features :]
    for tables in (_PAGED_TABLES, *of_weight) if paged else of_weight:
        for archs, table in tables.items():
            if near in archs and key in table:
                return table[key]
    raise AssertionError(key)


def _weight_of_features(problem: AttentionProblem) -> int:
    """Return which tables serve a problem: those for none, some or many features, dropout, or a bias when packed."""
    asked = len(problem.features) - problem.packed
    if problem.packed and problem.bias:
        return 4
    if problem.dropout_p:
        return 3
    if problem.bias or asked > 2:
        return 2
    return 1 if problem.features else 0


def share_keys(seqlen_k: int, splits: int, block_n: int) -> int:
    """Return the keys of one share in ``forward_triton``, the last one's apart: whole tiles."""
    return cdiv(cdiv(seqlen_k, splits), block_n) * block_n


def _nonempty_splits(seqlen_k: int, splits: int, block_n: int) -> int:
    """Return how many of ``splits`` shares have keys: as shares are whole tiles, the first ones may take them all.

    With so many, shares are no longer than before, so the last one has keys.
    """
    return cdiv(seqlen_k, share_keys(seqlen_k, splits, block_n))


def _keys_of_a_tile(problem: AttentionProblem, block_m: int) -> int:
    """Return the most keys that a row tile sees: all, or with bounds on both sides those between them."""
    left, right = problem.window
    if not (problem.bounded_left and problem.bounded_right):
        return problem.seqlen_k
    return min(problem.seqlen_k, left + max(0, right) + block_m)


def forward_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_triton`` serves ``problem``.

    Raises:
        UnsupportedError: the grid would be too large.
    """
    columns = block_dim(max(problem.head_dim, problem.head_dim_v))
    weight = _weight_of_features(problem)
    rows = forward_rows(gpu.arch, problem.item_bytes, columns, features=weight, paged=problem.page_size > 0)
    heads = problem.batch * problem.heads

    def blocks(config: ForwardConfig) -> int:
        return cdiv(problem.seqlen_q, config.block_m) * heads

    enough = FULL_ENOUGH * gpu.sms
    keys = _keys_of_a_tile(problem, rows[-1].block_m)
    # The shares of packed sequences would be of unlike lengths, which only the GPU knows.
    most_splits = 1 if problem.packed else max(1, min(keys // _MIN_SPLIT_KEYS, _MAX_SPLITS))
    fitting = [row for row in rows if row.block_m < 2 * problem.seqlen_q] or list(rows[-1:])  # no tile half empty
    config = next((row for row in fitting if blocks(row) * most_splits >= enough), fitting[-1])
    reason = f"{why}; {blocks(config)} row tiles of {config.block_m} "
    if blocks(config) >= gpu.sms:
        reason += f"fill {gpu.sms} SMs"
    elif blocks(config) >= enough:
        reason += f"leave {gpu.sms - blocks(config)} of {gpu.sms} SMs idle, and the keys are not split where "
        reason += f"{FULL_ENOUGH:.0%} have one"
    elif problem.packed:
        reason += f"do not fill {gpu.sms} SMs, and the keys of packed sequences are not split"
    elif most_splits == 1:
        reason += f"do not fill {gpu.sms} SMs, and the keys are too few to be split"
    else:
        splits = min(most_splits, max(1, round(gpu.sms / blocks(config))))
        splits = _nonempty_splits(keys, splits, config.block_n)
        config = dataclasses.replace(config, num_splits=splits)
        reason += f"do not fill {gpu.sms} SMs, "
        reason += f"so the keys are split over {splits}" if splits > 1 else "and are too many for the keys to be split"
    tiles = cdiv(problem.seqlen_q, config.block_m)
    launches = [
        PlannedLaunch("_forward_kernel", (tiles * config.num_splits * heads, 1, 1), (32 * config.num_warps, 1, 1))
    ]
    if config.num_splits > 1:
        merge_grid = (cdiv(problem.seqlen_q, MERGE_ROWS) * heads, 1, 1)
        launches.append(PlannedLaunch("_merge_partials_kernel", merge_grid, (32 * MERGE_WARPS, 1, 1)))
    if launches[0].grid[0] >= 2**31:
        raise UnsupportedError(f"a grid of {launches[0].grid[0]} blocks is too large; at most 2**31 - 1 are possible")
    return Plan(problem, gpu.name, gpu.arch, "forward_triton", config, tuple(launches), reason)
