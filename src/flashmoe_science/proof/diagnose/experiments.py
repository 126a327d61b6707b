"""Conclusions from times and launches, as pure functions on numbers. Hypotheses use them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...gpu.occupancy import Occupancy, occupancy
from ...gpu.specs import GpuSpec
from .observations import BANDWIDTH, TENSOR, Chip, Kernel, Observations, Scaled

# docs/how-to/diagnose.md has the reasons for these and all other thresholds.
FULL = 0.6  # of a peak rate
WORTH = 0.10  # of the kernels' time: less is not worth a cause's name
IDLE_HIGH = 0.5  # of the GPU's throughput that copies of the work find unused


def main_kernel(kernels: Sequence[Kernel]) -> Kernel | None:
    """Return the kernel that takes most of the time; without times the first of those whose launch is best known."""

    def order(kernel: Kernel) -> tuple[float, bool, bool]:
        return kernel.seconds or 0.0, kernel.grid is not None, kernel.block is not None

    return max(kernels, key=order, default=None)


def share_of_kernel(observations: Observations, kernel: Kernel) -> float:
    """Return the part of the kernels' time that ``kernel`` takes; without times the main kernel stands for all."""
    total = sum(each.seconds or 0.0 for each in observations.kernels)
    if not total:
        return 1.0 if kernel is main_kernel(observations.kernels) else 0.0
    return (kernel.seconds or 0.0) / total


def resident(chip: Chip, kernel: Kernel) -> Occupancy | None:
    """Return what one SM holds of ``kernel``, or None where its launch is not known."""
    if kernel.threads is None or kernel.shared_memory_bytes is None:
        return None
    spec = GpuSpec(chip.name, chip.arch, chip.sms, chip.l2_bytes, chip.bandwidth_bytes_per_s, 1, 1, {})
    shared = kernel.shared_memory_bytes
    return occupancy(spec, threads=kernel.threads, registers=kernel.registers, shared_memory_bytes=shared)


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
    if not kernel.blocks:
        return None
    capacity = capacity_of(chip, kernel)
    unit = chip.sms if kernel.blocks <= capacity else capacity
    rounds = -(-kernel.blocks // unit)
    return 1 - kernel.blocks / (rounds * unit)


def capacity_of(chip: Chip, kernel: Kernel) -> int:
    """Return how many blocks the SMs hold at a time."""
    held = resident(chip, kernel)
    return chip.sms * max(1, held.blocks if held else 1)


def smaller_tail(seen: Observations, chip: Chip, kernel: Kernel) -> tuple[Scaled, float, float] | None:
    """Return the longer call with the fullest last round, the gain predicted from that, and the gain measured."""
    base, idle = seen.clock_seconds, idle_share(chip, kernel)
    best: tuple[Scaled, float, float] | None = None
    for run in seen.scaled:
        if run.kind != "parallel" or not run.seconds or run.blocks != run.factor * (kernel.blocks or 0):
            continue
        other = idle_share(chip, kernel.model_copy(update={"grid": (run.blocks, 1, 1)}))
        if base is None or idle is None or other is None:
            continue
        predicted = (1 - other) / (1 - idle)
        if predicted >= 1 + WORTH / 2 and (best is None or predicted > best[1]):
            best = run, predicted, run.factor * base / run.seconds
    return best


def no_runs(seen: Observations, kind: str) -> str:
    """Return why there is no time of a longer axis of this kind."""
    runs = [run for run in seen.scaled if run.kind == kind]
    if reasons := dict.fromkeys(run.reason for run in runs if run.reason):
        return "; ".join(reasons)
    if tried := [str(run.blocks) for run in runs if run.seconds is not None]:
        return f"the longer calls have other grids (blocks: {', '.join(tried)})"
    return seen.why_missing("scaled", "times")


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
    usable = [
        run
        for run in observations.scaled
        if run.kind == "sequential" and run.seconds is not None and run.blocks is not None and run.factor > 1
        if run.blocks == blocks or max(run.blocks, blocks) <= sms
    ]
    for axis in dict.fromkeys(run.axis for run in usable):
        runs = [run for run in usable if run.axis == axis]
        factors, seconds = (1, *(run.factor for run in runs)), (base, *(run.seconds or 0.0 for run in runs))
        found = Growth(_line_share(factors, seconds), axis, runs[0].meaning, factors, seconds)
        if all(run.blocks == blocks for run in runs):
            return found
        best = best or found
    return best


def _line_share(factors: Sequence[float], seconds: Sequence[float]) -> float:
    """Return which part of the time at factor 1 the slope of the least-squares line is, from 0 to 1."""
    slope, intercept = statistics.linear_regression(factors, seconds)
    return 1.0 if slope + intercept <= 0 else min(1.0, max(0.0, slope / (slope + intercept)))


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


def copies_are_free(seen: Observations, what: str) -> str:
    """Return that copies of the work find most of the GPU's throughput unused, or an empty text."""
    found = headroom(seen)
    if found is None or found.idle < IDLE_HIGH:
        return ""
    return f"with {found.run.factor} times {found.run.meaning}, {found.gain:.1f} times {what} in the same time"


@dataclass(frozen=True)
class Load:
    """How much of one of the GPU's rates a call is known to use."""

    share: float
    said: str
    exact: bool = False  # counters say so; else it is the least that it can be
    counted: float | None = None  # what counters say of the same units, where that is another thing


def memory_load(observations: Observations) -> Load | None:
    """Return how much of the memory's bandwidth the call uses: counted, or at least."""
    counted = weighted(observations, BANDWIDTH)
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
    if (counted := weighted(observations, TENSOR)) is None:
        return Load(share, said)
    said += f"; counters: the tensor cores of busy SMs are active {counted:.0f} % of the time"
    return Load(share, said, counted=counted / 100)


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
