"""Conclusions from times and launches, as pure functions on numbers. Hypotheses use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...gpu.occupancy import WARP, Occupancy, occupancy
from ...gpu.specs import GpuSpec
from .observations import Chip, Kernel, Observations, Scaled

FULL = 0.6  # of a peak rate. docs/how-to/diagnose.md has the reasons for this and all other thresholds


def spec_of(chip: Chip) -> GpuSpec:
    """Return the limits of ``chip`` as the occupancy model takes them."""
    tflops = {"plain": chip.plain_flops_per_s / 1e12}
    return GpuSpec(chip.name, chip.arch, chip.sms, chip.l2_bytes, chip.bandwidth_bytes_per_s, 1, 1, tflops)


def main_kernel(observations: Observations) -> Kernel | None:
    """Return the kernel that takes most of the time; without times the first of those whose launch is best known."""

    def order(kernel: Kernel) -> tuple[float, bool, bool]:
        return kernel.seconds or 0.0, kernel.grid is not None, kernel.block is not None

    return max(observations.kernels, key=order, default=None)


def share_of_kernel(observations: Observations, kernel: Kernel) -> float:
    """Return the part of the kernels' time that ``kernel`` takes; without times the main kernel stands for all."""
    total = sum(each.seconds or 0.0 for each in observations.kernels)
    if not total:
        return 1.0 if kernel is main_kernel(observations) else 0.0
    return (kernel.seconds or 0.0) / total


def resident(chip: Chip, kernel: Kernel) -> Occupancy | None:
    """Return what one SM holds of ``kernel``, or None where its launch is not known."""
    if kernel.threads is None or kernel.shared_memory_bytes is None:
        return None
    return occupancy(
        spec_of(chip),
        threads=kernel.threads,
        registers=kernel.registers,
        shared_memory_bytes=kernel.shared_memory_bytes,
    )


def busy_warps(chip: Chip, kernel: Kernel) -> int | None:
    """Return how many warps a busy SM holds: what fits, and no more than the grid has for it."""
    held = resident(chip, kernel)
    if held is None or kernel.blocks is None or not held.blocks:
        return None
    return min(held.blocks, -(-kernel.blocks // chip.sms)) * (held.warps // held.blocks)


def idle_share(chip: Chip, kernel: Kernel) -> float | None:
    """Return the part of the SMs' time that the grid leaves idle, if all blocks take equally long.

    Fewer blocks than SMs leave SMs without work. More of them run in rounds of as many as the SMs hold, and the last
    round may be a small one; up to that many, some SMs have a block more than others.
    """
    held = resident(chip, kernel)
    if kernel.blocks is None or kernel.blocks == 0:
        return None
    capacity = chip.sms * max(1, held.blocks if held else 1)
    unit = chip.sms if kernel.blocks <= capacity else capacity
    rounds = -(-kernel.blocks // unit)
    return 1 - kernel.blocks / (rounds * unit)


@dataclass(frozen=True)
class Growth:
    """How the time grows with a sequential axis: the part of it that is proportional to the axis."""

    share: float
    axis: str
    meaning: str
    factors: tuple[int, ...]
    seconds: tuple[float, ...]


def growth(observations: Observations, *, blocks: int, sms: int) -> Growth | None:
    """Return how much of the time grows with the sequential axis, by the one that leaves the grid as it is.

    The slope and the intercept of a least-squares line through (factor, time). A longer call counts where it has as
    many blocks as this one, or so few that each has an SM of its own.
    """
    base = observations.clock_seconds
    if base is None:
        return None
    best: Growth | None = None
    axes = dict.fromkeys(run.axis for run in observations.scaled if run.kind == "sequential")
    for axis in axes:
        runs = [
            run
            for run in observations.scaled
            if run.axis == axis and run.seconds is not None and run.blocks is not None and run.factor > 1
            if run.blocks == blocks or max(run.blocks, blocks) <= sms
        ]
        if not runs:
            continue
        factors = (1, *(run.factor for run in runs))
        seconds = (base, *(run.seconds or 0.0 for run in runs))
        fixed = all(run.blocks == blocks for run in runs)
        found = Growth(_line_share(factors, seconds), axis, runs[0].meaning, factors, seconds)
        if fixed:
            return found
        best = best or found
    return best


def _line_share(factors: Sequence[float], seconds: Sequence[float]) -> float:
    """Return which part of the time at factor 1 the slope of the line is, from 0 to 1."""
    mean_x, mean_y = sum(factors) / len(factors), sum(seconds) / len(seconds)
    spread = sum((x - mean_x) ** 2 for x in factors)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(factors, seconds, strict=True)) / spread
    at_one = mean_y + slope * (1 - mean_x)
    return 1.0 if at_one <= 0 else min(1.0, max(0.0, slope / at_one))


@dataclass(frozen=True)
class Headroom:
    """What more copies of the work in one call cost: how many times as much is done in the same time."""

    gain: float  # 1: copies cost their full time; the factor: they cost nothing
    run: Scaled

    @property
    def idle(self) -> float:
        """The part of the GPU's throughput that this call leaves unused, as far as the copies showed."""
        return max(0.0, 1 - 1 / self.gain)


def headroom(observations: Observations) -> Headroom | None:
    """Return the most that longer parallel axes gained."""
    base = observations.clock_seconds
    if base is None:
        return None
    runs = [run for run in observations.scaled if run.kind == "parallel" and run.seconds and run.factor > 1]
    found = [Headroom(run.factor * base / run.seconds, run) for run in runs if run.seconds]
    return max(found, key=lambda each: each.gain, default=None)


@dataclass(frozen=True)
class Load:
    """How much of one of the GPU's rates a call is known to use."""

    share: float
    said: str
    exact: bool = False  # counters say so; else it is the least that it can be
    counted: float | None = None  # what counters say of the same units, where that is another thing


def memory_load(observations: Observations) -> Load | None:
    """Return how much of the memory's bandwidth the call uses: counted, or at least."""
    counted = weighted(observations, "dram__throughput.avg.pct_of_peak_sustained_elapsed")
    if counted is not None:
        return Load(counted / 100, f"counters: {counted:.0f} % of the memory's bandwidth is used", exact=True)
    device, chip = observations.times.device, observations.chip
    if device is None or chip is None:
        return None
    share = observations.dram_bytes / chip.bandwidth_bytes_per_s / device
    return Load(share, f"its fewest bytes take {percent(share)} of the time at full bandwidth")


def arithmetic_load(observations: Observations) -> Load | None:
    """Return how much of the arithmetic rate that bounds the problem the call uses, by the work it has to do."""
    device, chip = observations.times.device, observations.chip
    if device is None or chip is None:
        return None
    share = observations.work.flops / chip.flops_per_s / device
    said = f"its operations take {percent(share)} of the time at the peak rate"
    counted = weighted(observations, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    if counted is not None:
        said += f"; counters: the tensor cores of busy SMs are active {counted:.0f} % of the time"
    return Load(share, said, counted=None if counted is None else counted / 100)


def weighted(observations: Observations, metric: str) -> float | None:
    """Return the mean of a counter over the kernels, weighted by their time; None where one of them lacks it."""
    values = [(kernel.counters.get(metric), share_of_kernel(observations, kernel)) for kernel in observations.kernels]
    if not values or any(value is None for value, _ in values):
        return None
    return sum(value * share for value, share in values if value is not None) / sum(share for _, share in values)


def summed(observations: Observations, *metrics: str) -> float | None:
    """Return the sum of counters over the kernels; None where one of them lacks one."""
    values = [kernel.counters.get(metric) for kernel in observations.kernels for metric in metrics]
    if not values or any(value is None for value in values):
        return None
    return sum(value for value in values if value is not None)


def idle_lanes(kernel: Kernel) -> float | None:
    """Return the part of a block's lanes that have no thread: its last warp is not full."""
    if kernel.threads is None:
        return None
    return 1 - kernel.threads / (-(-kernel.threads // WARP) * WARP)


def percent(share: float) -> str:
    """Return a share as text; a share above 0 never reads 0 %."""
    return "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"


def fewest_seconds(observations: Observations) -> float | None:
    """Return the least time that the GPU can take for this call by its rates."""
    chip = observations.chip
    if chip is None:
        return None
    return max(observations.work.flops / chip.flops_per_s, observations.dram_bytes / chip.bandwidth_bytes_per_s)


def reaches(observations: Observations) -> str:
    """Return which rate of the GPU the call is near, as text, or an empty one: then more blocks cannot help."""
    for load in (memory_load(observations), arithmetic_load(observations)):
        if load is not None and load.share >= FULL:
            return load.said
    return ""
