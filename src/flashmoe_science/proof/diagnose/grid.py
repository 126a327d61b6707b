"""Hypotheses about the call as a whole: its launches, their blocks, and their waits."""

from __future__ import annotations

from ..judge.rows import format_seconds
from ..text import counted
from .experiments import (
    growth,
    headroom,
    idle_share,
    main_kernel,
    percent,
    reaches,
    resident,
    share_of_kernel,
)
from .findings import Hypothesis
from .observations import Chip, Finding, Kernel, Observations, Scaled

OTHER_KERNEL = "another kernel than promised"

# docs/how-to/diagnose.md has the reasons.
HOST_HIGH, HOST_LOW = 0.25, 0.10  # of wall time outside of kernels
WORTH = 0.10  # of the kernels' time: less is not worth a cause's name
GROWS, GROWS_LITTLE = 0.5, 0.2  # of the time that is proportional to an axis
IDLE_HIGH, IDLE_LOW = 0.5, 0.2  # of the GPU's throughput that copies of the work find unused


def other_kernel(observations: Observations) -> Finding:
    """Whether another kernel ran than the one that is meant."""
    case = Hypothesis(OTHER_KERNEL, "the launches captured against those promised", observations)
    broken = observations.broken_promises
    if broken is None:
        return case.cannot_tell(f"cannot be seen: {observations.why_missing('launches')}")
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        return case.confirmed(
            f"{broken[0]}{more}",
            "mend what chooses the kernel first: all that follows is about the kernel that ran",
            bound="",
        )
    if not observations.promised:
        ran = ", ".join(kernel.name for kernel in observations.kernels) or "no kernel"
        return case.cannot_tell(f"nothing is promised: [launch] of a kernel.toml says what should run; what ran: {ran}")
    return case.ruled_out("the kernels that ran are those promised")


def launch_bound(observations: Observations) -> Finding:
    """Whether the host is slower than the GPU."""
    times = observations.times
    case = Hypothesis("launch-bound", "wall time of eager calls against the time of their kernels", observations)
    # The graph's time is of the same rounds as wall time. The profiler's is of another process, which may have found
    # the GPU at another clock: under a power limit that alone is a tenth of a long call.
    device = times.device if times.graph is None else times.graph
    if times.wall is None or device is None:
        return case.cannot_tell(f"no times: {observations.why_missing('wall', 'times')}")
    share = max(0.0, 1 - device / times.wall)
    launches = sum(kernel.count for kernel in observations.kernels)
    case.numbers.update(wall_s=times.wall, device_s=device, host_share=share, launches=launches)
    said = (
        f"a call takes {format_seconds(times.wall)}, its kernels {format_seconds(device)}: "
        f"{percent(share)} is the host's, for {counted(launches, 'kernel')}"
    )
    if share < HOST_LOW:
        return case.ruled_out(said)
    if share < HOST_HIGH:
        return case.cannot_tell(f"{said}, about as much as wall time varies")
    advice = "launch less often, or replay a CUDA graph"
    if times.graph is not None:
        case.numbers["graph_s"] = times.graph
        advice += f" (measured: {format_seconds(times.graph)} a call, {times.wall / times.graph:.2f}x)"
    finding = case.confirmed(said, advice, bound="")
    return finding.model_copy(
        update={
            "part": "host",
            "share": share,
            "most": times.wall / device,
            "bound": "wall time over the kernels' time: the host costs nothing at all",
        }
    )


def _chip_and_kernels(observations: Observations) -> tuple[Chip, list[Kernel], str]:
    """Return the GPU and the kernels whose grid is known, as text too; no kernels where one of the two is lacking."""
    chip = observations.chip
    known = [kernel for kernel in observations.kernels if kernel.blocks]
    if chip is None or not known:
        return Chip.model_construct(), [], ""
    shown = ", ".join(f"{kernel.blocks} blocks of {kernel.name}" for kernel in known[:3])
    return chip, known, f"{shown} for {chip.sms} SMs"


def grid_too_small(observations: Observations) -> Finding:
    """Whether SMs have no work because the grid has fewer blocks than there are SMs."""
    case = Hypothesis(
        "grid too small", "the grid captured against the SMs; the time of several copies of the work", observations
    )
    chip, kernels, said = _chip_and_kernels(observations)
    if not kernels:
        return case.cannot_tell(f"no grid: {observations.why_missing('gpu', 'launches')}")
    lost = sum(
        share_of_kernel(observations, kernel) * max(0.0, 1 - (kernel.blocks or 0) / chip.sms) for kernel in kernels
    )
    blocks = (main_kernel(observations) or kernels[0]).blocks or 1
    case.numbers.update(blocks=blocks, sms=chip.sms, idle_sm_share=lost)
    if lost < WORTH:
        return case.ruled_out(said)
    said += f": {lost:.0%} of the SMs' time is idle"
    if near := reaches(observations):
        return case.ruled_out(f"{said}, and yet {near}: more blocks would not be faster")
    found = headroom(observations)
    if found is None:
        return case.cannot_tell(f"{said}; whether that costs time is not known: {_no_copies(observations)}")
    case.numbers.update(copies=found.run.factor, gain=found.gain)
    said += f"; {_copies(found.run, found.gain)}"
    share = min(lost, found.idle)
    if share < WORTH:
        return case.ruled_out(f"{said}, so the idle SMs are not what it waits for")
    device = observations.times.device
    return case.confirmed(
        said,
        "give the idle SMs work: smaller tiles, or several blocks that share one tile's work and a merge",
        share=share,
        device_seconds=None if device is None else device * (1 - lost),
        bound="the same work spread evenly over all SMs, and not faster than the GPU's rates",
    )


def wave_tail(observations: Observations) -> Finding:
    """Whether the last round of blocks leaves most SMs idle."""
    case = Hypothesis(
        "wave tail", "blocks against what the SMs hold at a time; the time of grids with another tail", observations
    )
    chip, kernels, said = _chip_and_kernels(observations)
    if not kernels:
        return case.cannot_tell(f"no grid: {observations.why_missing('gpu', 'launches')}")
    lost = sum(
        share_of_kernel(observations, kernel) * (idle_share(chip, kernel) or 0.0)
        for kernel in kernels
        if (kernel.blocks or 0) >= chip.sms
    )
    kernel = main_kernel(observations) or kernels[0]
    blocks, held = kernel.blocks or 1, resident(chip, kernel)
    capacity = chip.sms * max(1, held.blocks if held else 1)
    case.numbers.update(blocks=blocks, capacity=capacity, waves=blocks / capacity, tail_share=lost)
    if blocks < chip.sms:
        return case.ruled_out(f"{said}: there is one round only, and not a full one (see grid too small)")
    said += f", which hold {capacity} at a time"
    if lost < WORTH:
        return case.ruled_out(f"{said}: {percent(lost)} of the SMs' time is idle if all blocks take equally long")
    said += f": {lost:.0%} of the SMs' time is idle if all blocks take equally long"
    if near := reaches(observations):
        return case.ruled_out(f"{said}; and yet {near}")
    best = _smaller_tail(observations, chip, kernel)
    if best is None:
        return case.cannot_tell(f"{said}; no call with a smaller tail was timed")
    run, predicted, gained = best
    case.numbers.update(predicted_gain=predicted, gain=gained)
    said += f"; {_copies(run, gained)}, predicted {predicted:.2f} times"
    if gained - 1 <= (predicted - 1) / 4:
        return case.ruled_out(f"{said}: filling the last round gains nothing")
    if gained - 1 < (predicted - 1) / 2:
        return case.cannot_tell(said)
    device = observations.times.device
    return case.confirmed(
        said,
        "choose tiles so that the blocks fill whole rounds, or let a grid as large as the GPU deal tiles to its blocks",
        share=min(lost, 1 - 1 / gained),
        device_seconds=None if device is None else device * (1 - lost),
        bound="the same blocks without an idle SM, and not faster than the GPU's rates",
    )


def _smaller_tail(observations: Observations, chip: Chip, kernel: Kernel) -> tuple[Scaled, float, float] | None:
    """Return the longer call whose last round is fuller: with the gain predicted from that, and the gain measured."""
    base, idle = observations.clock_seconds, idle_share(chip, kernel)
    best: tuple[Scaled, float, float] | None = None
    for run in observations.scaled:
        if run.kind != "parallel" or not run.seconds or run.blocks != run.factor * (kernel.blocks or 0):
            continue
        other = idle_share(chip, kernel.model_copy(update={"grid": (run.blocks, 1, 1)}))
        if base is None or idle is None or other is None:
            continue
        predicted = (1 - other) / (1 - idle)
        if predicted >= 1 + WORTH / 2 and (best is None or predicted > best[1]):
            best = run, predicted, run.factor * base / run.seconds
    return best


def serial_loop(observations: Observations) -> Finding:
    """Whether the time is that of one block's loop, while the GPU could do much more beside it."""
    case = Hypothesis(
        "serial loop",
        "the time against the length of the sequential axis at a fixed grid, and against more copies of the work",
        observations,
    )
    chip, kernels, _ = _chip_and_kernels(observations)
    if not kernels:
        return case.cannot_tell(f"no grid: {observations.why_missing('gpu', 'launches')}")
    kernel = main_kernel(observations) or kernels[0]
    blocks = kernel.blocks or 1
    grown = growth(observations, blocks=blocks, sms=chip.sms)
    if grown is None:
        return case.cannot_tell(f"no longer call with the same grid: {_no_runs(observations, 'sequential')}")
    case.numbers.update(grows_share=grown.share, blocks=blocks)
    case.numbers.update({f"{grown.axis}_x{f}_s": s for f, s in zip(grown.factors, grown.seconds, strict=True)})
    ratios = ", ".join(
        f"{s / grown.seconds[0]:.2f} at x{f}" for f, s in zip(grown.factors, grown.seconds, strict=True) if f > 1
    )
    said = (
        f"the time grows with {grown.meaning} ({ratios}) at {counted(blocks, 'block')}: "
        f"{grown.share:.0%} of it is in proportion"
    )
    if grown.share < GROWS_LITTLE:
        return case.ruled_out(said)
    if near := reaches(observations):
        return case.ruled_out(f"{said}, but {near}: longer calls have more work, and the GPU is full")
    found = headroom(observations)
    if found is None:
        return case.cannot_tell(f"{said}; whether the GPU is full meanwhile is not known: {_no_copies(observations)}")
    case.numbers.update(copies=found.run.factor, gain=found.gain)
    said += f"; {_copies(found.run, found.gain)}"
    if found.idle < IDLE_LOW:
        return case.ruled_out(f"{said}: longer calls have more work, and the GPU is full")
    if found.idle < IDLE_HIGH or grown.share < GROWS:
        return case.cannot_tell(said)
    held = resident(chip, kernel)
    room = max(found.gain, chip.sms * max(1, held.blocks if held else 1) / blocks)
    case.numbers["room"] = room
    device = observations.times.device
    return case.confirmed(
        f"{said}: each block runs a loop whose length decides the time",
        "split the loop over several blocks, with a merge of their partial results",
        share=grown.share * found.idle,
        device_seconds=None if device is None else device * (1 - grown.share + grown.share / room),
        bound=f"the loop's part over {room:.1f} times the blocks, as many as the SMs hold; the merge costs nothing",
    )


def _copies(run: Scaled, gain: float) -> str:
    """Return what the time of more copies showed."""
    return f"{run.factor} times {run.meaning} takes {run.factor / gain:.2f} times as long"


def _no_copies(observations: Observations) -> str:
    return _no_runs(observations, "parallel")


def _no_runs(observations: Observations, kind: str) -> str:
    """Return why there is no time of a longer axis of this kind."""
    reasons = dict.fromkeys(run.reason for run in observations.scaled if run.kind == kind and run.reason)
    if reasons:
        return "; ".join(reasons)
    tried = [run for run in observations.scaled if run.kind == kind and run.seconds is not None]
    if tried:
        grids = ", ".join(str(run.blocks) for run in tried)
        return f"the longer calls have other grids (blocks: {grids})"
    return observations.why_missing("scaled", "times")
