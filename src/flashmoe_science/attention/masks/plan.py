"""Plans of ``forward_masked_triton``."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..forward.triton_plan import forward_rows
from ..problem import AttentionProblem
from ..tiles import FULL_ENOUGH, ForwardConfig, Plan, block_dim, cdiv

MASKED_KERNEL = "forward_masked_triton"
_MANY_FEATURES = 2  # of ``forward_rows``: bits of partial blocks take registers, as a bias does


def masked_launch(problem: AttentionProblem, config: ForwardConfig) -> PlannedLaunch:
    """Return the launch of a tile. Raises ``UnsupportedError``: the grid would be too large."""
    programs = cdiv(problem.seqlen_q, config.block_m) * problem.batch * problem.heads
    if programs >= 2**31:
        raise UnsupportedError(f"a grid of {programs} blocks is too large; at most 2**31 - 1 are possible")
    return PlannedLaunch("_masked_forward_kernel", (programs, 1, 1), (32 * config.num_warps, 1, 1))


def masked_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_masked_triton`` serves ``problem``: with the largest tile that fills the GPU.

    Raises:
        UnsupportedError: the grid would be too large.
    """
    columns = block_dim(max(problem.head_dim, problem.head_dim_v))
    rows = forward_rows(gpu.arch, problem.item_bytes, columns, features=_MANY_FEATURES)
    heads = problem.batch * problem.heads
    fitting = [row for row in rows if row.block_m < 2 * problem.seqlen_q] or list(rows[-1:])  # no tile half empty
    enough = FULL_ENOUGH * gpu.sms
    config = next((row for row in fitting if cdiv(problem.seqlen_q, row.block_m) * heads >= enough), fitting[-1])
    launch = masked_launch(problem, config)
    reason = f"{why}; {launch.grid[0]} row tiles of {config.block_m} on {gpu.sms} SMs"
    return Plan(problem, gpu.name, gpu.arch, MASKED_KERNEL, config, (launch,), reason)


def masked_refusal(problem: AttentionProblem) -> str | None:
    """Return why ``forward_masked_triton`` cannot serve ``problem``, or None."""
    return None if problem.mask_heads else "it serves calls with a mask"
