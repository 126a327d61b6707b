"""When and how ``grouped_gluon_sm90`` serves the experts on Hopper, and why not. No Triton."""

from __future__ import annotations

from ..gpu.planning import PlannedLaunch
from ..gpu.specs import GpuSpec
from .problem import MoeProblem
from .tiles import HopperConfig

ARCH = 90
ROWS = 128  # of a tile
STEP = 64  # columns of the reduction at a time
PRODUCT_COLUMNS = 256  # of a tile, before the activation
# With 32 rows an expert the weights' bytes count, which Triton's tiles of 64 rows read as well: for Mixtral's experts
# those are 3.5 % faster where all are equally busy, and 6 % slower by Zipf's law, where the busiest expert has two of
# them (lab/moe/4_decode_tiles_h200.txt). Real routing is skewed, too. Where the first product has few tiles for each
# program, the last ones leave SMs idle: with 3.9 of them Triton's tiles are 5 % faster for DeepSeek-V3's experts that
# are equally busy, as fast by Zipf's law, and 4 % faster for OLMoE's (lab/moe/5_skewed_and_shared_h200.txt).
FEWEST_ROWS = 32
ENOUGH_TILES = 4
# Of gradients. Only that of the activation was timed beside Triton's kernel with 64 rows, and is the faster one
# (lab/moe/2_activation_h200.txt); with fewer nobody measured any.
GRADIENTS_FEWEST_ROWS = 48
# Three or four warpgroups share 504 registers a thread: the producer of the first product holds pointers to eight rows.
REGISTERS = {"up": (216, 72), "down": (240, 32), "weights": (192, 120)}
# Of the reduction; beside 64 KB of dA there is room for three. Six of 32 were 2 % faster for Mixtral, 3 % slower for
# Qwen3-30B (lab/moe/2_activation_h200.txt).
ACTIVATION_STEP, ACTIVATION_STAGES = 64, 3
# A third of 504 for each warpgroup: the two that multiply, and the one that is half producer and half who finishes.
ACTIVATION_REGISTERS = 168
# The shorter the reduction, the less time have the two warps that finish a tile. With 512 columns it was 1.55 times as
# fast as Triton's kernel, with 1024 1.67, with 2048 1.76 times (lab/moe/2_activation_h200.txt); with fewer nobody
# measured it.
ACTIVATION_FEWEST_HIDDEN = 512


def output_columns(problem: MoeProblem, which: str) -> int:
    """Return the columns of a tile of what is stored: gate and up become one."""
    return PRODUCT_COLUMNS // 2 if which == "up" and problem.gated else PRODUCT_COLUMNS


def column_tiles(problem: MoeProblem, which: str) -> int:
    """Return the column tiles of one product."""
    columns = problem.inter if which == "up" else problem.hidden
    return -(-columns // output_columns(problem, which))


def refusal(problem: MoeProblem, arch: int) -> str | None:
    """Return why the kernel does not serve a problem, or None."""
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
    """Return how it works: one program an SM.

    132 programs that share g row tiles read g of them and 132 / g column tiles, twice as large, in each step: the
    fewest bytes with g = 16, unless these are of several experts. That is by bytes. Measured on an H200 at 512 and
    2,048 rows an expert (lab/moe/1_h200.txt), g = 8 and 16 and leads of 0 to 2 lie within 2.5 % of each other, but for
    one product of 2,048 rows, in which 16 is 3 % slower than 8. The rows from which on it is 16 were not measured.
    """
    group_m = 16 if problem.pairs / problem.experts >= 8 * ROWS else 8
    return HopperConfig(group_m=group_m, programs=gpu.sms if gpu else 132)


def has_few_tiles(problem: MoeProblem, gpu: GpuSpec) -> bool:
    """Return whether a tile of 64 rows has room, and the tiles of the first product that each program draws are few."""
    tiles = problem.experts * column_tiles(problem, "up")
    return problem.pairs <= FEWEST_ROWS * problem.experts and tiles < ENOUGH_TILES * gpu.sms


def product_steps(problem: MoeProblem, config: HopperConfig, tiles: int) -> list[tuple[str, PlannedLaunch]]:
    """Return the launches of both products, of at most ``tiles`` row tiles."""
    steps = []
    for which in ("up", "down"):
        programs = min(config.programs, tiles * column_tiles(problem, which))
        steps.append((f"{which}_sm90", PlannedLaunch("_grouped_sm90_kernel", (programs, 1, 1), (384, 1, 1))))
    return steps


def serves_gradients(problem: MoeProblem, arch: int) -> bool:
    """Return whether the kernels for Hopper make the gradients of x and of the weights."""
    return refusal(problem, arch) is None and problem.pairs / problem.experts >= GRADIENTS_FEWEST_ROWS


def activation_refusal(problem: MoeProblem, arch: int) -> str | None:
    """Return why ``activation_gluon_sm90`` does not make the activation's gradient, or None."""
    if problem.dtype == "fp16":
        return "it rounds dO @ w_down to 16 bits, and fp16 has no room for the gradients that weights bring down"
    if problem.hidden < ACTIVATION_FEWEST_HIDDEN:
        return f"it was not measured below HID {ACTIVATION_FEWEST_HIDDEN}, got {problem.hidden}"
    return refusal(problem, arch)


def row_programs(config: HopperConfig, tiles: int, columns: int) -> int:
    """Return how many programs draw tiles of some columns of a gradient of rows, of ``tiles`` row tiles."""
    return min(config.programs, tiles * -(-columns // PRODUCT_COLUMNS))


def weight_tiles(problem: MoeProblem, rows: int, columns: int) -> int:
    """Return the tiles of some rows and columns of the gradients of all experts' weights."""
    return problem.experts * -(-rows // ROWS) * -(-columns // PRODUCT_COLUMNS)


def weight_programs(problem: MoeProblem, config: HopperConfig, rows: int, columns: int) -> int:
    """Return how many programs draw tiles of them."""
    return min(config.programs, weight_tiles(problem, rows, columns))
