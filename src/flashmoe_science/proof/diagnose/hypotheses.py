"""The hypotheses about a slow call, each with its experiment, and the causes that follow, by the time each explains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...gpu.occupancy import SCHEDULERS, WARP
from ..judge.rows import format_bytes, format_seconds
from ..text import counted
from .case import HYPOTHESES, Case, hypothesis
from .experiments import (
    FULL,
    IDLE_HIGH,
    WORTH,
    arithmetic_load,
    busy_warps,
    capacity_of,
    copies_are_free,
    growth,
    headroom,
    idle_share,
    main_kernel,
    memory_load,
    no_runs,
    percent,
    reaches,
    resident,
    share_of_kernel,
    smaller_tail,
    summed,
    weighted,
)
from .observations import (
    CONFLICTS,
    ISSUE,
    LANES,
    READ,
    WARPS,
    WAVEFRONTS,
    WRITTEN,
    CaseDiagnosis,
    Code,
    Finding,
    Kernel,
    Observations,
    Scaled,
    Status,
)

OTHER_KERNEL = "another kernel than promised"

# docs/how-to/diagnose.md has the reasons.
HOST_HIGH, HOST_LOW = 0.25, 0.10  # of wall time outside of kernels
GROWS, GROWS_LITTLE = 0.5, 0.2  # of the time that is proportional to an axis
IDLE_LOW = 0.2  # of the GPU's throughput that copies of the work find unused
FEW_LANES = 24  # of 32 threads of a warp
BUSY_ISSUE, IDLE_ISSUE = 60.0, 30.0  # percent of the cycles in which a scheduler issues
HALF_FULL = 0.5  # of the warps that an SM holds
MANY_CONFLICTS = 0.2  # of the passes through shared memory
MANY_BYTES = 1.5  # times the fewest
LOW_CLOCK = 0.95  # of the highest clock


# Hypotheses about the call as a whole: its launches, their blocks, and their waits.


@hypothesis(OTHER_KERNEL, "the launches captured against those promised")
def _other_kernel(case: Case) -> Finding:
    seen, broken = case.seen, case.seen.broken_promises
    if broken is None:
        raise case.need("cannot be seen", "launches")
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        advice = "mend what chooses the kernel first: all that follows is about the kernel that ran"
        return case.confirmed(f"{broken[0]}{more}", advice)
    if not seen.promised:
        ran = ", ".join(kernel.name for kernel in seen.kernels) or "no kernel"
        return case.cannot_tell(f"nothing is promised: [launch] of a kernel.toml says what should run; what ran: {ran}")
    return case.ruled_out("the kernels that ran are those promised")


@hypothesis("launch-bound", "wall time of eager calls against the time of their kernels")
def _launch_bound(case: Case) -> Finding:
    times = case.seen.times
    # The graph's time is of the same rounds as wall time. The profiler's is of another process, which may have found
    # the GPU at another clock: under a power limit that alone is a tenth of a long call.
    device = times.device if times.graph is None else times.graph
    if times.wall is None or device is None:
        raise case.need("no times", "wall", "times")
    share = max(0.0, 1 - device / times.wall)
    launches = sum(kernel.count for kernel in case.seen.kernels)
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
        advice += f" (measured: {format_seconds(times.graph)} a call, {times.wall / times.graph:.2f}x)"
    bound = "wall time over the kernels' time: the host costs nothing at all"
    found = {"part": "host", "share": share, "most": times.wall / device, "bound": bound}
    return case.confirmed(said, advice).model_copy(update=found)


@hypothesis("grid too small", "the grid captured against the SMs; the time of several copies of the work")
def _grid_too_small(case: Case) -> Finding:
    chip, kernels, _, said = case.gridded()
    lost = sum(share_of_kernel(case.seen, each) * max(0.0, 1 - (each.blocks or 0) / chip.sms) for each in kernels)
    if lost < WORTH:
        return case.ruled_out(said)
    said += f": {lost:.0%} of the SMs' time is idle"
    if near := reaches(case.seen):
        return case.ruled_out(f"{said}, and yet {near}: more blocks would not be faster")
    found = headroom(case.seen)
    if found is None:
        return case.cannot_tell(f"{said}; whether that costs time is not known: {no_runs(case.seen, 'parallel')}")
    said += f"; {_copies(found.run, found.gain)}"
    share = min(lost, found.idle)
    if share < WORTH:
        return case.ruled_out(f"{said}, so the idle SMs are not what it waits for")
    return case.confirmed(
        said,
        "give the idle SMs work: smaller tiles, or several blocks that share one tile's work and a merge",
        share=share,
        device_seconds=case.left(1 - lost),
        bound="the same work spread evenly over all SMs, and not faster than the GPU's rates",
    )


@hypothesis("wave tail", "blocks against what the SMs hold at a time; the time of grids with another tail")
def _wave_tail(case: Case) -> Finding:
    chip, kernels, kernel, said = case.gridded()
    lost = sum(
        share_of_kernel(case.seen, each) * (idle_share(chip, each) or 0.0)
        for each in kernels
        if (each.blocks or 0) >= chip.sms
    )
    blocks, capacity = kernel.blocks or 1, capacity_of(chip, kernel)
    if blocks < chip.sms:
        return case.ruled_out(f"{said}: there is one round only, and not a full one (see grid too small)")
    said += f", which hold {capacity} at a time"
    if lost < WORTH:
        return case.ruled_out(f"{said}: {percent(lost)} of the SMs' time is idle if all blocks take equally long")
    said += f": {lost:.0%} of the SMs' time is idle if all blocks take equally long"
    if near := reaches(case.seen):
        return case.ruled_out(f"{said}; and yet {near}")
    best = smaller_tail(case.seen, chip, kernel)
    if best is None:
        return case.cannot_tell(f"{said}; no call with a smaller tail was timed")
    run, predicted, gained = best
    said += f"; {_copies(run, gained)}, predicted {predicted:.2f} times"
    if gained - 1 <= (predicted - 1) / 4:
        return case.ruled_out(f"{said}: filling the last round gains nothing")
    if gained - 1 < (predicted - 1) / 2:
        return case.cannot_tell(said)
    return case.confirmed(
        said,
        "choose tiles so that the blocks fill whole rounds, or let a grid as large as the GPU deal tiles to its blocks",
        share=min(lost, 1 - 1 / gained),
        device_seconds=case.left(1 - lost),
        bound="the same blocks without an idle SM, and not faster than the GPU's rates",
    )


@hypothesis(
    "serial loop",
    "the time against the length of the sequential axis at a fixed grid, and against more copies of the work",
)
def _serial_loop(case: Case) -> Finding:
    chip, _, kernel, _ = case.gridded()
    blocks = kernel.blocks or 1
    grown = growth(case.seen, blocks=blocks, sms=chip.sms)
    if grown is None:
        return case.cannot_tell(f"no longer call with the same grid: {no_runs(case.seen, 'sequential')}")
    steps = [*zip(grown.factors, grown.seconds, strict=True)]
    ratios = ", ".join(f"{seconds / grown.seconds[0]:.2f} at x{factor}" for factor, seconds in steps[1:])
    said = (
        f"the time grows with {grown.meaning} ({ratios}) at {counted(blocks, 'block')}: "
        f"{grown.share:.0%} of it is in proportion"
    )
    if grown.share < GROWS_LITTLE:
        return case.ruled_out(said)
    if near := reaches(case.seen):
        return case.ruled_out(f"{said}, but {near}: longer calls have more work, and the GPU is full")
    found = headroom(case.seen)
    if found is None:
        why = no_runs(case.seen, "parallel")
        return case.cannot_tell(f"{said}; whether the GPU is full meanwhile is not known: {why}")
    said += f"; {_copies(found.run, found.gain)}"
    if found.idle < IDLE_LOW:
        return case.ruled_out(f"{said}: longer calls have more work, and the GPU is full")
    if found.idle < IDLE_HIGH or grown.share < GROWS:
        return case.cannot_tell(said)
    room = max(found.gain, capacity_of(chip, kernel) / blocks)
    return case.confirmed(
        f"{said}: each block runs a loop whose length decides the time",
        "split the loop over several blocks, with a merge of their partial results",
        share=grown.share * found.idle,
        device_seconds=case.left(1 - grown.share + grown.share / room),
        bound=f"the loop's part over {room:.1f} times the blocks, as many as the SMs hold; the merge costs nothing",
    )


def _copies(run: Scaled, gain: float) -> str:
    """Return what the time of more copies showed."""
    return f"{run.factor} times {run.meaning} takes {run.factor / gain:.2f} times as long"


# Hypotheses about a kernel: its threads, its instructions, and what of an SM it takes.


@hypothesis("threads idle", "threads a block and warps of a busy SM against its four schedulers")
def _threads_idle(case: Case) -> Finding:
    chip, kernel = case.seen.chip, main_kernel(case.seen.kernels)
    if kernel is None or kernel.threads is None:
        raise case.need("no launch", "gpu", "launches")
    warps = None if chip is None else busy_warps(chip, kernel)
    if warps is None:
        raise case.need("no grid", "gpu", "launches")
    idle = 1 - kernel.threads / (-(-kernel.threads // WARP) * WARP)  # lanes of the last warp that have no thread
    issue, lanes = weighted(case.seen, ISSUE), weighted(case.seen, LANES)
    said = f"{kernel.name} has {kernel.threads} threads a block, and a busy SM {counted(warps, 'warp')}"
    if issue is not None and lanes is not None:
        said += f"; counters: a scheduler issues in {issue:.0f} % of its cycles, for {lanes:.0f} of {WARP} threads"
    if lanes is not None and lanes < FEW_LANES:
        return case.at_the_rates(
            said, "let all threads of a warp do the same: no branches by thread, no loops of different length"
        )
    if idle >= WORTH:
        advice = f"make the threads of a block a multiple of {WARP}: {idle:.0%} of the lanes have no thread"
        return case.at_the_rates(said, advice)
    if near := reaches(case.seen):
        return case.ruled_out(f"{said}; {near}")
    if issue is not None and issue >= BUSY_ISSUE:
        return case.ruled_out(said)
    if warps < SCHEDULERS:
        said += f": {SCHEDULERS - warps} of its {SCHEDULERS} schedulers never have an instruction to issue"
    elif warps >= 2 * SCHEDULERS:
        return case.ruled_out(said)
    elif issue is None:
        raise case.need(f"{said}: one for a scheduler. Whether it waits, counters say", "counters")
    elif issue >= IDLE_ISSUE:
        return case.cannot_tell(said)
    return case.at_the_rates(said, "more warps a block, or more blocks an SM")


@hypothesis("no tensor-core instructions", "the matrix instructions in the machine code of the kernels that ran")
def _no_tensor_cores(case: Case) -> Finding:
    chip, device, codes = case.seen.chip, case.seen.times.device, case.codes()
    if chip is not None and chip.flops_per_s <= chip.plain_flops_per_s:
        return case.ruled_out("for this type the tensor cores are not faster than the ordinary arithmetic units")
    if found := [f"{code.tensor_core} in {kernel.name}" for kernel, code in codes if code.tensor_core]:
        return case.ruled_out(f"there are matrix instructions: {', '.join(found)}")
    case.need_all_codes()
    total = sum(code.instructions for _, code in codes)
    said = f"none among the {counted(total, 'instruction')} of {_names(codes)}"
    memory = memory_load(case.seen)
    if memory is not None and memory.share >= FULL:
        return case.ruled_out(f"{said}, but the arithmetic is not what it waits for: {memory.said}")
    advice = "multiply tiles with tensor-core instructions (mma, wgmma; tl.dot in Triton)"
    if chip is None or device is None:
        return case.confirmed(f"{said}; what that costs is not known: {case.seen.why_missing('times')}", advice)
    kernel = main_kernel(case.seen.kernels)
    used = min(1.0, ((kernel and kernel.blocks) or chip.sms) / chip.sms)
    plain, tensor = (case.seen.work.flops / (rate * used) for rate in (chip.plain_flops_per_s, chip.flops_per_s))
    part = min(1.0, plain / device)
    return case.confirmed(
        f"{said}; without them the products take at least {percent(part)} of the time on the SMs in use",
        advice,
        share=part * (1 - chip.plain_flops_per_s / chip.flops_per_s),
        device_seconds=tensor,
        bound="the products at the tensor cores' rate on the SMs in use; nothing else takes time",
    )


@hypothesis("spills and local memory", "loads and stores of local memory in the machine code, within loops")
def _local_memory(case: Case) -> Finding:
    codes = case.codes()
    looped = {kernel.name: code.local_in_loops for kernel, code in codes if code.local_in_loops}
    total = sum(code.local for _, code in codes)
    most_bytes = max((code.local_bytes for _, code in codes), default=0)
    if looped:
        said = ", ".join(f"{count} in loops of {name}" for name, count in looped.items())
        said = f"loads and stores of local memory: {said}; {counted(most_bytes, 'byte')} a thread"
        return case.at_the_rates(
            said,
            "fewer live values: a smaller tile, or more warps for it; no array with an index known at run time only",
        )
    case.need_all_codes()
    if total:
        return case.ruled_out(f"{total} loads and stores of local memory, none in a loop: each runs once a thread")
    return case.ruled_out(f"no load or store of local memory in {_names(codes)}")


def _names(codes: Sequence[tuple[Kernel, Code]]) -> str:
    return ", ".join(dict.fromkeys(kernel.name for kernel, _ in codes))


@hypothesis("occupancy capped", "the occupancy model: what an SM holds, and what sets that")
def _occupancy_capped(case: Case) -> Finding:
    chip, kernel = case.seen.chip, main_kernel(case.seen.kernels)
    held = resident(chip, kernel) if chip is not None and kernel is not None else None
    if chip is None or kernel is None or held is None:
        raise case.need("no launch", "gpu", "launches")
    share = held.warps / held.most_warps
    limits = [name for name in held.limited_by if name in ("registers", "shared memory")]
    shared = kernel.shared_memory_bytes or 0
    registers = f"{kernel.registers} registers a thread, " if kernel.registers else ""
    needs = f"{registers}{format_bytes(shared)} shared memory a block"
    if shared > chip.shared_memory_per_block_bytes:
        needs += f", of which {chip.name} gives {format_bytes(chip.shared_memory_per_block_bytes)}"
    if not held.blocks or shared > chip.shared_memory_per_block_bytes:
        return case.confirmed(f"{kernel.name} cannot be launched: {needs}", "a smaller tile")
    said = (
        f"an SM holds {counted(held.blocks, 'block')} of {kernel.name}, {held.warps} of {held.most_warps} warps, "
        f"by {' and '.join(held.limited_by)} ({needs})"
    )
    if not limits or share >= HALF_FULL:
        return case.ruled_out(said)
    if kernel.blocks is None:
        raise case.need(f"{said}; whether the grid fills them is not known", "launches")
    if kernel.blocks <= chip.sms * held.blocks:
        blocks = counted(kernel.blocks, "block")
        return case.ruled_out(f"{said}; the {blocks} of the grid fit at once: there are no more to hold")
    if near := reaches(case.seen):
        return case.ruled_out(f"{said}; and yet {near}")
    issue, active = weighted(case.seen, ISSUE), weighted(case.seen, WARPS)
    if issue is None or active is None:
        lacking = "times" if case.seen.times.device is None else "counters"
        raise case.need(f"{said}. Whether it waits for want of warps, counters say", lacking)
    said += f"; counters: {active:.0f} % of the warps are active, and a scheduler issues in {issue:.0f} % of its cycles"
    if issue >= IDLE_ISSUE:
        return case.ruled_out(said) if issue >= BUSY_ISSUE else case.cannot_tell(said)
    return case.at_the_rates(
        said,
        f"take less of the {' and of the '.join(limits)}: a smaller tile, fewer stages, or more warps a block",
    )


@hypothesis("bank conflicts", "counters: passes through shared memory that conflicts added")
def _bank_conflicts(case: Case) -> Finding:
    shared = [kernel.shared_memory_bytes for kernel in case.seen.kernels]
    if shared and not any(size is None or size > 0 for size in shared):
        return case.ruled_out("no kernel uses shared memory")
    conflicts, wavefronts = summed(case.seen, CONFLICTS), summed(case.seen, WAVEFRONTS)
    if conflicts is None or wavefronts is None:
        raise case.need("only counters say", "counters")
    share = conflicts / wavefronts if wavefronts else 0.0
    said = f"conflicts added {share:.0%} of the {wavefronts:.3g} passes through shared memory"
    if share < MANY_CONFLICTS:
        return case.ruled_out(said)
    return case.at_the_rates(said, "pad or swizzle the rows of tiles in shared memory")


# Hypotheses about the GPU's rates: bytes, operations and clocks.


@hypothesis("more bytes moved than needed", "bytes of the memory, counted, against inputs and outputs once")
def _excess_bytes(case: Case) -> Finding:
    (chip, device), fewest = case.timed(), case.seen.work.bytes
    if not fewest:
        raise case.need("no times", "gpu", "times")
    moved = summed(case.seen, READ, WRITTEN)
    if moved is None:
        ceiling = chip.bandwidth_bytes_per_s * device
        said = (
            f"in its time the memory moves {ceiling / fewest:.1f} times the fewest ({format_bytes(fewest)}) at the most"
        )
        if ceiling < MANY_BYTES * fewest:
            return case.ruled_out(said)
        raise case.need(f"{said}; how many it moved, only counters say", "counters")
    ratio, extra = moved / fewest, max(0.0, moved - fewest) / chip.bandwidth_bytes_per_s
    said = (
        f"{format_bytes(moved)} moved, {ratio:.2f} times the fewest ({format_bytes(fewest)}); what is beyond takes "
        f"{percent(min(1.0, extra / device))} of the time at full bandwidth"
    )
    if ratio < MANY_BYTES or extra / device < WORTH:
        return case.ruled_out(said)
    return case.confirmed(
        said,
        "keep in shared memory or registers what is read again; let neighbouring threads touch neighbouring bytes",
        share=extra / device,
        device_seconds=device / ratio,
        bound="a time in proportion to the bytes, of which the fewest are left",
    )


@hypothesis("bound by memory bandwidth", "the roofline: bytes against time and bandwidth")
def _bandwidth_bound(case: Case) -> Finding:
    (chip, _), load = case.timed(), memory_load(case.seen)
    assert load is not None
    if load.share >= FULL:
        return case.confirmed(
            load.said,
            "move fewer bytes (smaller types, fused operations): no other change helps much",
            share=load.share,
            device_seconds=case.seen.dram_bytes / chip.bandwidth_bytes_per_s,
            bound="the fewest bytes at full bandwidth",
        )
    if load.exact:
        return case.ruled_out(load.said)
    if free := copies_are_free(case.seen, "the bytes move"):
        return case.ruled_out(f"{load.said}; {free}")
    raise case.need(f"at least {load.share:.0%}: {load.said}; what it moves, counters say", "counters")


@hypothesis("bound by arithmetic", "the roofline: operations against time and peak rate")
def _compute_bound(case: Case) -> Finding:
    (chip, _), load = case.timed(), arithmetic_load(case.seen)
    assert load is not None
    fewest = case.seen.work.flops / chip.flops_per_s
    bound = "the fewest operations at the peak rate"
    if load.share >= FULL:
        advice = "fewer operations, or a type with a higher rate: no other change helps much"
        return case.confirmed(load.said, advice, share=load.share, device_seconds=fewest, bound=bound)
    tensor = load.counted
    if tensor is not None and tensor >= FULL:
        said = f"{load.said}: more operations than needed"
        advice = "skip what a mask hides, and do not pad to tiles that are mostly empty"
        return case.confirmed(said, advice, share=tensor, device_seconds=fewest, bound=bound)
    if free := copies_are_free(case.seen, "the work is done"):
        return case.ruled_out(f"{load.said}; {free}")
    if tensor is not None:
        return case.ruled_out(load.said)
    raise case.need(f"{load.said}; whether it makes more operations than needed, counters say", "counters")


@hypothesis("throttled clocks", "SM clock and the driver's throttle reasons after every round")
def _throttled(case: Case) -> Finding:
    sensors = case.seen.sensors
    clocks = [clock for clock in sensors.sm_clock_mhz if clock is not None]
    highest = sensors.max_sm_clock_mhz
    if not clocks or not highest:
        raise case.need("no clocks", "sensors", "times")
    middle = statistics.median(clocks)
    reasons = [reason for reason in sensors.throttle if reason]
    said = f"SM clock {middle:.0f} MHz of {highest}"
    if reasons:
        named = sorted({name for reason in reasons for name in reason.split(",")})
        said += f"; {len(reasons)} of {len(sensors.throttle)} rounds throttled: {', '.join(named)}"
    if middle >= LOW_CLOCK * highest:
        return case.ruled_out(said)
    memory = memory_load(case.seen)
    if memory is not None and memory.share >= FULL:
        return case.ruled_out(f"{said}; but {memory.said}, which the SM clock does not set")
    if not reasons:
        return case.cannot_tell(f"{said}, and the driver names no reason: it may have been read while the GPU idled")
    return case.confirmed(
        said,
        "look at power limit, cooling and who else uses the card; compare times only within a run",
        share=1 - middle / highest,
        device_seconds=case.left(middle / highest),
        bound="a time in proportion to the SM clock, at the highest that the card has",
    )


# From the findings to the causes.


def diagnose_case(seen: Observations) -> CaseDiagnosis:
    """Return the findings of all hypotheses, and the causes by the time that each explains.

    Causes without a share come last. Another kernel than promised comes first: the rest is about a kernel that nobody
    meant.
    """
    findings = [test(seen) for test in HYPOTHESES]
    causes = sorted(
        (finding for finding in findings if finding.status is Status.CONFIRMED),
        key=lambda each: (each.hypothesis != OTHER_KERNEL, each.share is None, -(each.share or 0.0)),
    )
    names = [cause.hypothesis for cause in causes]
    return CaseDiagnosis(observations=seen, findings=findings, causes=names, overlap=_overlap(causes, seen))


def _overlap(causes: Sequence[Finding], seen: Observations) -> str:
    """Return how far the shares of the causes may be added, or an empty text where there is nothing to add."""
    shares = [cause.share for cause in causes if cause.share is not None]
    device = {c.hypothesis: c.share for c in causes if c.share is not None and c.part == "device"}
    if len(shares) < 2:
        return ""
    if len(device) < 2:
        return "These causes explain different parts of a call, the host's and the kernels': their shares add up."
    kernels = (seen.times.device or 0.0) / (seen.times.call or 1.0)
    return (
        f"The shares of {', '.join(device)} overlap and must not be added: they are parts of the same {kernels:.0%} of "
        f"a call that kernels take. Together they explain between {max(device.values()):.0%} and "
        f"{min(kernels, sum(device.values())):.0%}."
    )
