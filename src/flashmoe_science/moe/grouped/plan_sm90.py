"""Decide when the kernels for Hopper serve a problem, and with which configuration. No Triton."""

from __future__ import annotations

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..problem import MoeProblem
from ..tiles import HopperConfig

ARCH = 90
ROWS = 128  # of a tile
STEP = 64  # of the reduction
PRODUCT_COLUMNS = 256  # of a tile, before the activation
# With 32 rows an expert, reading weights dominates, and Triton's tiles of 64 rows read the same bytes. For Mixtral they
# are 3.5 % faster with uniform routing and 6 % slower with Zipf-distributed routing, where the busiest expert has two
# tiles (lab/moe/4_decode_tiles_h200.txt). Real routing is skewed, too. If the first product has few tiles a program,
# the last ones leave SMs idle: with 3.9, Triton's tiles are 5 % faster for DeepSeek-V3 with uniform routing, equal with
# Zipf-distributed routing, and 4 % faster for OLMoE (lab/moe/5_skewed_and_shared_h200.txt).
FEWEST_ROWS = 32
ENOUGH_TILES = 4
# Rows an expert from which Hopper's kernels compute gradients. With 64 rows only the activation's kernel is measured:
# it is faster than Triton's (lab/moe/2_activation_h200.txt). Fewer rows are not measured.
GRADIENTS_FEWEST_ROWS = 48
# Registers a thread of (matrix warpgroups, producer), together at most 504. The first product's producer needs more: it
# holds pointers to eight rows.
REGISTERS = {"up": (216, 72), "down": (240, 32), "weights": (192, 120)}
# Columns of a step of the reduction, and steps in flight. Shared memory has room for three steps beside 64 KB of dA.
# Six steps of 32 were 2 % faster for Mixtral and 3 % slower for Qwen3-30B (lab/moe/2_activation_h200.txt).
ACTIVATION_STEP, ACTIVATION_STAGES = 64, 3
# A third of 504 for each warpgroup: two multiply, the third has two producer and two epilogue warps.
ACTIVATION_REGISTERS = 168
# A short reduction leaves the two epilogue warps little time. Speedup over Triton's kernel by HID: 1.55 at 512, 1.67 at
# 1024, 1.76 at 2048 (lab/moe/2_activation_h200.txt). Smaller sizes are not measured.
ACTIVATION_FEWEST_HIDDEN = 512


def output_columns(problem: MoeProblem, which: str) -> int:
    """Return the stored columns of a tile: gate and up become one."""
    return PRODUCT_COLUMNS // 2 if which == "up" and problem.gated else PRODUCT_COLUMNS


def column_tiles(problem: MoeProblem, which: str) -> int:
    """Return the column tiles of one product."""
    columns = problem.inter if which == "up" else problem.hidden
    return -(-columns // output_columns(problem, which))


def unsupported_reason(problem: MoeProblem, arch: int) -> str | None:
    """Return why ``grouped_gluon_sm90`` does not serve a problem, or None."""
    if arch != ARCH:
        return "it needs Hopper (sm_90)"
    if problem.item_bytes != 2:
        return f"it multiplies fp16 and bf16, got {problem.dtype}"
    if problem.batch_invariant:
        return "one token would be served by another kernel"
    (xt, xk), (ue, un, uk), (de, dn, dk) = problem.x_strides, problem.gate_up_strides, problem.down_strides
    if (xk, uk, dk) != (1, 1, 1):
        return "the last axis of x, w_gate_up and w_down must have stride 1"
    if problem.pointer_alignment < 16 or any(size % 8 for size in (xt, ue, un, de, dn, problem.hidden, problem.inter)):
        return "rows of x and weights must be multiples of 16 bytes"
    for name, (expert, row, _) in (("w_gate_up", problem.gate_up_strides), ("w_down", problem.down_strides)):
        if row == 0 or (expert == 0 and problem.experts > 1):
            return f"{name} is expanded: TMA does not step by 0"
    if problem.pairs > 2**30:
        return f"it serves up to {2**30} pairs of a token and an expert"
    return None


def choose_config(problem: MoeProblem, gpu: GpuSpec | None) -> HopperConfig:
    """Return the configuration: one program an SM.

    132 programs over groups of g row tiles read g row tiles and 132 / g column tiles, twice as large, in each step. By
    bytes g = 16 is best, unless a group spans several experts. Measured on an H200 at 512 and 2,048 rows an expert
    (lab/moe/1_h200.txt), g of 8 and 16 and leads of 0 to 2 are within 2.5 %, except that 16 is 3 % slower than 8 in one
    product of 2,048 rows. The threshold for 16 is not measured.
    """
    group_m = 16 if problem.pairs / problem.experts >= 8 * ROWS else 8
    return HopperConfig(group_m=group_m, programs=gpu.sms if gpu else 132)


def has_few_tiles(problem: MoeProblem, gpu: GpuSpec) -> bool:
    """Return whether experts fit tiles of 64 rows, and each program has few tiles of the first product."""
    tiles = problem.experts * column_tiles(problem, "up")
    return problem.pairs <= FEWEST_ROWS * problem.experts and tiles < ENOUGH_TILES * gpu.sms


def product_steps(problem: MoeProblem, config: HopperConfig, tiles: int) -> list[tuple[str, PlannedLaunch]]:
    """Return the launches of both products, for at most ``tiles`` row tiles."""
    steps = []
    for which in ("up", "down"):
        programs = min(config.programs, tiles * column_tiles(problem, which))
        steps.append((f"{which}_sm90", PlannedLaunch("_grouped_sm90_kernel", (programs, 1, 1), (384, 1, 1))))
    return steps


def serves_gradients(problem: MoeProblem, arch: int) -> bool:
    """Return whether the kernels for Hopper compute the gradients of x and of the weights."""
    return unsupported_reason(problem, arch) is None and problem.pairs / problem.experts >= GRADIENTS_FEWEST_ROWS


def activation_unsupported_reason(problem: MoeProblem, arch: int) -> str | None:
    """Return why ``activation_gluon_sm90`` does not serve a problem, or None."""
    if problem.dtype == "fp16":
        return "it rounds dO @ w_down to 16 bits, and fp16 has no room for the gradients that weights bring down"
    if problem.hidden < ACTIVATION_FEWEST_HIDDEN:
        return f"it was not measured below HID {ACTIVATION_FEWEST_HIDDEN}, got {problem.hidden}"
    return unsupported_reason(problem, arch)


def row_programs(config: HopperConfig, tiles: int, columns: int) -> int:
    """Return the programs of a gradient with one row a pair, for ``tiles`` row tiles and some columns."""
    return min(config.programs, tiles * -(-columns // PRODUCT_COLUMNS))


def weight_tiles(problem: MoeProblem, rows: int, columns: int) -> int:
    """Return the tiles of ``rows`` x ``columns`` of the weight gradients of all experts."""
    return problem.experts * -(-rows // ROWS) * -(-columns // PRODUCT_COLUMNS)


def weight_programs(problem: MoeProblem, config: HopperConfig, rows: int, columns: int) -> int:
    """Return the programs of a weight gradient."""
    return min(config.programs, weight_tiles(problem, rows, columns))
