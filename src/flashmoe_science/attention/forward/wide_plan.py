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
# The part of the SMs that is full enough. 64 programs on the 132 SMs of an H100 took 507 us with 16k keys, and
# forward_triton, which splits them, 752; fewer programs were not tried (lab/hopper/19_head_size_512_h100.txt).
_FULL_ENOUGH = 0.48
_FEW_ROWS = 64
_HALVES = 2  # of the columns of V: a program has one


def wide_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_wide_gluon_sm90`` cannot serve ``problem``, or None."""
    if any(width % 8 or width not in _WIDTHS for width in (problem.head_dim, problem.head_dim_v)):
        return f"it serves head dimensions of {_WIDTHS[0]} to {_WIDTHS[-1]} that are multiples of 8"
    return hopper_call_refusal(problem, gpu, _HALVES * wide_tiles(problem))


def wide_tiles(problem: AttentionProblem) -> int:
    """Return how many row tiles there are; each has two programs."""
    return cdiv(problem.seqlen_q, WIDE_ROWS) * problem.batch * problem.heads


def wide_underfills(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_triton``, which has smaller tiles and can split the keys, is left to serve it, or None."""
    if problem.seqlen_q <= _FEW_ROWS:
        return f"most of a row tile of {WIDE_ROWS} would be empty"
    programs = _HALVES * wide_tiles(problem)
    if programs >= _FULL_ENOUGH * gpu.sms:
        return None
    return f"its {programs} programs do not fill {gpu.sms} SMs, and it does not split the keys"


def wide_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_wide_gluon_sm90`` serves ``problem``; it does not refuse it."""
    config, tiles = WideConfig(WIDE_ROWS, 64), wide_tiles(problem)
    # Two warpgroups and a producer, whose warp Triton rounds up to a warpgroup.
    launch = PlannedLaunch("_forward_wide_sm90_kernel", (_HALVES * tiles, 1, 1), (384, 1, 1))
    reason = f"{why}; {tiles} row tiles of {WIDE_ROWS}, in halves of the columns of V, on {gpu.sms} SMs"
    return Plan(problem, gpu.name, gpu.arch, WIDE_KERNEL, config, (launch,), reason)
