"""What ``backward_gluon_sm90`` is given at a call: the tensors of each kernel, and memory of its own. No Triton."""

from __future__ import annotations

from .backward_hopper_plan import HopperBackwardConfig, hopper_backward_columns, hopper_backward_tiles
from .backward_problem import BackwardProblem

# Of each kernel, in the order of its arguments. ``stats``, ``acc`` and ``turns`` belong to one call; the first kernel
# sets what the others count with, so nobody has to clear anything.
HOPPER_TENSORS = (
    ("o", "do", "lse", "dlse", "stats", "turns"),
    ("q", "k", "v", "do", "dk", "dv", "stats", "acc", "turns"),
    ("acc", "turns", "dq"),
)


def scratch_sizes(problem: BackwardProblem, config: HopperBackwardConfig) -> dict[str, int]:
    """Return how many elements of 4 bytes a call allocates for itself, by name: fp32 but for ``turns``, int32."""
    p = problem.forward
    tiles = hopper_backward_tiles(problem, config)[0] * p.batch * p.heads
    columns, _ = hopper_backward_columns(problem)
    sums = tiles * config.block_m
    return {"stats": 2 * sums, "acc": sums * columns, "turns": tiles * config.turns + 1}
