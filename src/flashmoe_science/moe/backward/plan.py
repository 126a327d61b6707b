"""Choose the kernels, tiles and grids of the gradients of the experts, with a reason. No Triton."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from ...errors import InputError, UnsupportedError, shown
from ...gpu.planning import PlannedLaunch, refuse_architecture
from ...gpu.specs import GpuSpec
from ..grouped import plan_sm90 as hopper_plan
from ..plan import (
    COMBINE_COLUMNS,
    COMBINE_WARPS,
    MoePlan,
    Steps,
    cdiv,
    loads_words,
    most_tiles,
    planned,
    refuse_large_grids,
    sort_steps,
)
from ..problem import MoeProblem
from ..tiles import SMALL_BACKWARD, BackwardConfig, backward_rows

# The gradients of routed experts. Shared experts are a problem of their own, with the same gradients.
GRADIENTS = ("x", "w_gate_up", "w_down", "topk_weights", "bias_gate_up", "bias_down")
KERNELS = ("moe_backward_gluon_sm90", "moe_backward_triton")
ROUTING_PAIRS, ROUTING_WARPS = 64, 4
# Three loads of 8 KB are in flight in each program, which sums all rows of its expert.
BIAS_PAIRS, BIAS_COLUMNS, BIAS_WARPS, BIAS_STAGES = 32, 128, 4, 4

# One scratch buffer holds weighted activations, and later rows of dx, in parts: some columns of all rows, then the
# launch that reads them, then the next columns. The gradient of w_gate_up comes last, so its memory serves as this
# buffer. Its E * 2 * INTER * HID elements hold all weighted activations up to a mean of 2 * HID rows an expert, and
# rows of dx up to 2 * INTER. If that gradient is not wanted, or too small, a buffer of a twelfth of the saved products
# is allocated; with it, sums for the routing and tables of the sort stay below a tenth.
SCRATCH_OF_KEPT = 12
# Smaller buffers do not justify more launches.
SMALL_SCRATCH_BYTES = 64 << 20
# Each part rereads its other operand. For rows of dx that is the gradient of the first product: 2 * INTER columns,
# which C columns use for 2 * INTER * C multiply-adds a row. With 512 columns in 16 bits that is 512 operations a byte;
# an H200 needs 206 (989 TFLOP/s, 4.8 TB/s). 512 columns are two column tiles, so 16,896 rows give each of 132 SMs two
# tiles, and a buffer above SMALL_SCRATCH_BYTES has more rows.
FEWEST_COLUMNS = 512
# A multiple of the columns of every tile.
COLUMN_STEP = hopper_plan.PRODUCT_COLUMNS

Span = tuple[int, int]  # first column and number of columns of a launch


@dataclass(frozen=True, slots=True)
class BackwardPlan(MoePlan):
    """The kernels, tiles and launches of the gradients of one problem on one GPU."""

    wanted: tuple[str, ...]  # of GRADIENTS
    spans: tuple[Span, ...]  # the columns of each step; (0, 0): all
    scratch: int  # elements of the scratch buffer; 0: none, or it is the gradient of w_gate_up


def choose_backward(problem: MoeProblem, arch: int) -> BackwardConfig:
    """Return tiles for the mean number of rows of an expert."""
    if not loads_words(problem) or problem.hidden * problem.item_bytes % 4:
        return SMALL_BACKWARD
    configs = backward_rows(arch, problem.item_bytes)
    rows = problem.pairs / min(problem.experts, problem.pairs)
    return next((config for config in configs if config.block_m >= 1.5 * rows), configs[-1])


def column_sums(problem: MoeProblem, config: BackwardConfig) -> int:
    """Return the partial sums of the gradient of a routing weight: one a column tile of the activation.

    On Hopper the bias has a sum of its own: who makes it has done with the tile.
    """
    if config.hopper_activation:
        return cdiv(problem.inter, hopper_plan.PRODUCT_COLUMNS) + problem.bias_down
    return cdiv(problem.inter, config.activation.block_n)


def _parts(rows: int, columns: int, room: int) -> list[Span]:
    """Split ``columns`` of all rows into as few and equal parts as fit ``room`` elements."""
    if rows * columns <= room:
        return [(0, columns)]
    parts = cdiv(columns, max(room // (rows * COLUMN_STEP) * COLUMN_STEP, FEWEST_COLUMNS))
    width = cdiv(cdiv(columns, parts), COLUMN_STEP) * COLUMN_STEP
    return [(first, min(width, columns - first)) for first in range(0, columns, width)]


def _lay_out(problem: MoeProblem, *, down: bool, x: bool, lent: int) -> tuple[list[Span], list[Span], int]:
    """Return the parts of weighted activations and of dx, and the elements of their buffer (0: the lent one fits)."""
    rows = problem.pairs
    own = max(rows * problem.columns_up // SCRATCH_OF_KEPT, SMALL_SCRATCH_BYTES // problem.item_bytes)
    of_down = _parts(rows, problem.inter, max(lent, own)) if down else [(0, problem.inter)]
    of_x = _parts(rows, problem.hidden, max(lent, own)) if x else []
    need = rows * max(of_down[0][1] if down else 0, of_x[0][1] if x else 0)
    return of_down, of_x, 0 if need <= lent else need


def _bias_steps(problem: MoeProblem, wanted: tuple[str, ...]) -> Steps:
    """Return the launches of bias gradients. Hopper's weight kernel cannot compute them: it never has whole rows."""
    columns = {"bias_down": problem.hidden, "bias_gate_up": problem.columns_up}
    return [
        (
            f"d{bias}",
            planned("_bias_gradient_kernel", cdiv(columns[bias], BIAS_COLUMNS), BIAS_WARPS, problem.experts),
        )
        for bias in columns
        if bias in wanted
    ]


def make_backward_plan(
    problem: MoeProblem, gpu: str, arch: int, config: BackwardConfig, wanted: tuple[str, ...], reason: str
) -> BackwardPlan:
    """Return the plan of given tiles. Raises ``UnsupportedError`` if a grid would be too large."""
    tiles, hopper = most_tiles(problem, config.block_m), config.hopper
    gate_up, down = ({f"w_{name}", f"bias_{name}"} & set(wanted) for name in ("gate_up", "down"))
    lent = problem.experts * problem.columns_up * problem.hidden if gate_up else 0
    of_down, of_x, scratch = _lay_out(problem, down=bool(down), x="x" in wanted, lent=lent)
    steps: Steps = sort_steps(problem)
    spans: list[Span] = [(0, 0)] * len(steps)

    def add(step: str, launch: PlannedLaunch, span: Span = (0, 0)) -> None:
        steps.append((step, launch))
        spans.append(span)

    def add_weights(step: str, rows: int, span: Span) -> None:
        if hopper:
            programs = hopper_plan.weight_programs(problem, hopper, rows, span[1])
            add(f"{step}_sm90", planned("_weights_sm90_kernel", programs, 12), span)
        else:
            tile = config.weights
            blocks = cdiv(rows, config.weights_m) * cdiv(span[1], tile.block_n)
            add(step, planned("_weight_gradient_kernel", blocks, tile.num_warps, problem.experts), span)

    for span in of_down:
        if hopper and config.hopper_activation:
            programs = hopper_plan.row_programs(hopper, tiles, span[1])
            add("dactivation_sm90", planned("_activation_sm90_kernel", programs, 12), span)
        else:
            blocks = tiles * cdiv(span[1], config.activation.block_n)
            add("dactivation", planned("_activation_backward_kernel", blocks, config.activation.num_warps), span)
        if down:
            add_weights("ddown", problem.hidden, span)
    if "topk_weights" in wanted:
        add("drouting", planned("_routing_gradient_kernel", cdiv(problem.pairs, ROUTING_PAIRS), ROUTING_WARPS))
    for span in of_x:
        if hopper:
            programs = hopper_plan.row_programs(hopper, tiles, span[1])
            add("dx_sm90", planned("_grouped_sm90_kernel", programs, 12), span)
        else:
            add("dx", planned("_down_kernel", tiles * cdiv(span[1], config.x.block_n), config.x.num_warps), span)
        columns = cdiv(span[1], COMBINE_COLUMNS)
        add("dcombine", planned("_combine_kernel", problem.tokens, COMBINE_WARPS, columns), span)
    for step, launch in _bias_steps(problem, wanted):
        add(step, launch)
    if gate_up:  # last: its memory is the scratch buffer of the steps before
        add_weights("dgate_up", problem.columns_up, (0, problem.hidden))
    refuse_large_grids(steps)
    what, launches = tuple(name for name, _ in steps), tuple(launch for _, launch in steps)
    name = "moe_backward_gluon_sm90" if hopper else "moe_backward_triton"
    return BackwardPlan(problem, gpu, arch, name, config, None, what, launches, reason, wanted, tuple(spans), scratch)


def check_backward_kernel_name(kernel: object) -> None:
    """Raise ``InputError`` unless ``kernel`` is ``auto`` or one of ``KERNELS``."""
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {shown(kernel)}")


def plan_backward(
    problem: MoeProblem, gpu: GpuSpec | None, wanted: tuple[str, ...], kernel: str = "auto"
) -> BackwardPlan:
    """Return the plan of the gradients ``wanted`` on ``gpu`` (None: Triton's interpreter).

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: no kernel, or not the one forced, makes them.
    """
    check_backward_kernel_name(kernel)
    if gpu is None:
        if os.environ.get("TRITON_INTERPRET") != "1" or kernel == "moe_backward_gluon_sm90":
            raise UnsupportedError(
                f"{'moe_backward_triton' if kernel == 'auto' else kernel} needs an NVIDIA GPU, got CPU tensors",
                hint="TRITON_INTERPRET=1 runs moe_backward_triton in Triton's interpreter",
            )
        why = "Triton's interpreter runs it (TRITON_INTERPRET=1)"
        return make_backward_plan(problem, "CPU", 0, SMALL_BACKWARD, wanted, why)
    refuse_architecture(gpu.arch)
    config = choose_backward(problem, gpu.arch)
    why = f"{problem.pairs} pairs of a token and an expert are sorted by expert; h is computed again"
    unsupported = hopper_plan.unsupported_reason(problem, gpu.arch)
    if kernel == "moe_backward_gluon_sm90" and unsupported:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {unsupported}", hint="use kernel='auto'")
    if kernel == "moe_backward_gluon_sm90" or (kernel == "auto" and hopper_plan.serves_gradients(problem, gpu.arch)):
        config = backward_rows(gpu.arch, problem.item_bytes)[-1]
        without = hopper_plan.activation_unsupported_reason(problem, gpu.arch)
        config = dataclasses.replace(
            config,
            hopper=hopper_plan.choose_config(problem, gpu),
            hopper_activation=without is None,
        )
        why += "; gradients of x and of the weights by Hopper's TMA and warpgroup products"
        why += f"; not that of the activation: {without}" if without else ", that of the activation as well"
    return make_backward_plan(problem, gpu.name, gpu.arch, config, wanted, why)
