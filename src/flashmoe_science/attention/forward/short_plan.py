"""Plans of ``forward_short_gluon``: when it serves, and with which tile."""

from __future__ import annotations

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..problem import AttentionProblem
from ..tiles import SMALLEST_SCALE_LOG2, Plan, ShortConfig, block_dim, cdiv

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
    blocks = cdiv(problem.seqlen_q, 16) * problem.batch * problem.heads
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


def short_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_short_gluon`` cannot serve ``problem``, or None."""
    if problem.item_bytes != 2:
        return "it serves fp16 and bf16 only"
    if not 0 < problem.seqlen_k <= SHORT_MAX_KEYS:
        return f"it serves at most {SHORT_MAX_KEYS} keys" if problem.seqlen_k else "there are no keys"
    if problem.scale_log2 < SMALLEST_SCALE_LOG2:
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


def short_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_short_gluon`` serves ``problem``; it does not refuse it."""
    config = short_config(problem, gpu)
    grid = (cdiv(problem.seqlen_q, config.block_m), problem.heads, problem.batch)
    launch = PlannedLaunch("_forward_short_kernel", grid, (32 * config.num_warps, 1, 1))
    return Plan(problem, gpu.name, gpu.arch, "forward_short_gluon", config, (launch,), why)


def short_passed_over(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why another kernel is likely to be faster than ``forward_short_gluon``, or None.

    With more than two blocks an SM throughput counts, not latency. Where the line lies is a choice. At 3.9 blocks an
    SM, (B, H, S, D) = (32, 8, 64, 64), it still took half the time of SDPA, at 15.5, (64, 8, 128, 64), 1.3 times as
    long (an H200, lab/one_pass/5_merge_without_conflicts.txt). Against ``forward_triton``, which serves instead, it was
    not measured.
    """
    config = short_config(problem, gpu)
    if cdiv(problem.seqlen_q, config.block_m) * problem.heads * problem.batch > 2 * gpu.sms:
        return "its grid would be more than two blocks an SM"
    return None


def short_slower_than_hopper(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_gluon_sm90``, which can serve ``problem`` too, is likely to be faster, or None.

    With 32 rows a block it is where a block holds more than 256 keys of 64 columns: 11.1 us to 13.3 at
    (1, 32, 256, 128), 10.5 to 11.6 at (1, 16, 512, 64), and 8.8 to 8.5 at (1, 32, 256, 64), on an H200
    (lab/hopper/15_few_tiles.txt).
    """
    columns = max(64, block_dim(max(problem.head_dim, problem.head_dim_v)))
    if short_config(problem, gpu).block_m == 32 and problem.seqlen_k * columns > 256 * 64:
        return f"32 rows to {problem.seqlen_k} keys of {columns} columns are for the matrix units of a warpgroup"
    return None
