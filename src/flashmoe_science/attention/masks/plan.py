"""Plans of ``forward_masked_triton`` and ``forward_masked_gluon_sm90``."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..forward.plan_sm90 import HOPPER_ROWS, hopper_call_refusal, hopper_head_refusal
from ..forward.triton_plan import forward_rows
from ..problem import AttentionProblem
from ..tiles import FULL_ENOUGH, MASK_BLOCK, ForwardConfig, HopperConfig, Plan, block_dim, cdiv

MASKED_KERNEL = "forward_masked_triton"
MASKED_HOPPER_KERNEL = "forward_masked_gluon_sm90"
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


# Tiles of ``forward_masked_gluon_sm90``: columns up to which -> configuration.
_HOPPER_ROWS: tuple[tuple[int, HopperConfig], ...] = (
    (64, HopperConfig(2, 128, 2, ping_pong=True)),
    (128, HopperConfig(2, 128, 2, ping_pong=False)),
    (256, HopperConfig(2, 64, 2, ping_pong=True)),
)


def masked_hopper_config(problem: AttentionProblem) -> HopperConfig:
    """Return tile and schedule of ``forward_masked_gluon_sm90``."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(config for columns, config in _HOPPER_ROWS if widest <= columns)


def masked_hopper_tiles(problem: AttentionProblem) -> int:
    """Return how many row tiles there are: blocks of queries."""
    return cdiv(problem.seqlen_q, MASK_BLOCK) * problem.batch * problem.heads


def masked_hopper_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_masked_gluon_sm90`` cannot serve ``problem``, or None."""
    if not problem.mask_heads:
        return "it serves calls with a mask"
    if len(problem.features) > 1:
        return "it serves a mask without sinks and softcap"
    if problem.seqlen_k % MASK_BLOCK:
        return f"it serves numbers of keys that are multiples of {MASK_BLOCK}, got {problem.seqlen_k}"
    return hopper_head_refusal(problem) or hopper_call_refusal(problem, gpu, masked_hopper_tiles(problem))


def masked_hopper_underfills(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_masked_triton``, which has smaller tiles, is left to serve it, or None.

    With 1,024 row tiles and more this kernel takes 0.22 to 0.41 of its time (lab/README.md); fewer were not timed.
    """
    tiles = masked_hopper_tiles(problem)
    return None if tiles >= gpu.sms else f"its {tiles} row tiles do not fill {gpu.sms} SMs"


def masked_hopper_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_masked_gluon_sm90`` serves ``problem``; it does not refuse it."""
    tiles, config = masked_hopper_tiles(problem), masked_hopper_config(problem)
    # Triton rounds the producer's warp up to a warpgroup.
    threads = 128 * (config.warpgroups + 1)
    launch = PlannedLaunch("_masked_forward_sm90_kernel", (min(tiles, gpu.sms), 1, 1), (threads, 1, 1))
    reason = f"{why}; {tiles} row tiles of {HOPPER_ROWS * config.warpgroups} on {gpu.sms} SMs"
    return Plan(problem, gpu.name, gpu.arch, MASKED_HOPPER_KERNEL, config, (launch,), reason)
