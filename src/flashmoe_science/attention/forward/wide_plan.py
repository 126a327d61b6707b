"""Plans of ``forward_wide_gluon_sm90``: when it serves heads of 257 to 512 columns."""

from __future__ import annotations

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..problem import AttentionProblem
from ..tiles import Plan, WideConfig, cdiv
from .plan_sm90 import hopper_call_refusal

WIDE_KERNEL = "forward_wide_gluon_sm90"
_WIDTHS = range(257, 513)
WIDE_ROWS = 128  # of two warpgroups
_HALVES = 2  # of the columns of V: a program has one


def wide_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_wide_gluon_sm90`` cannot serve ``problem``, or None."""
    if any(width % 8 or width not in _WIDTHS for width in (problem.head_dim, problem.head_dim_v)):
        return f"it serves head dimensions of {_WIDTHS[0]} to {_WIDTHS[-1]} that are multiples of 8"
    return hopper_call_refusal(problem, gpu, _HALVES * wide_tiles(problem))


def wide_tiles(problem: AttentionProblem) -> int:
    """Return how many row tiles there are; each has two programs."""
    return cdiv(problem.seqlen_q, WIDE_ROWS) * problem.batch * problem.heads


def wide_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_wide_gluon_sm90`` serves ``problem``; it does not refuse it."""
    config, tiles = WideConfig(WIDE_ROWS, 64), wide_tiles(problem)
    # Two warpgroups and a producer, whose warp Triton rounds up to a warpgroup.
    launch = PlannedLaunch("_forward_wide_sm90_kernel", (_HALVES * tiles, 1, 1), (384, 1, 1))
    reason = f"{why}; {tiles} row tiles of {WIDE_ROWS}, in halves of the columns of V, on {gpu.sms} SMs"
    return Plan(problem, gpu.name, gpu.arch, WIDE_KERNEL, config, (launch,), reason)
