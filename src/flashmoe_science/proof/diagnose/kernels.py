"""Hypotheses about a kernel: its threads, its instructions, and what of an SM it takes."""

from __future__ import annotations

from collections.abc import Sequence

from ...gpu.occupancy import SCHEDULERS, WARP
from ..judge.rows import format_bytes
from ..text import counted
from .experiments import (
    FULL,
    busy_warps,
    fewest_seconds,
    idle_lanes,
    main_kernel,
    memory_load,
    percent,
    reaches,
    resident,
    summed,
    weighted,
)
from .findings import Hypothesis
from .grid import WORTH
from .observations import Finding, Kernel, Observations

ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"

FEW_LANES = 24  # of 32 threads of a warp
BUSY_ISSUE, IDLE_ISSUE = 60.0, 30.0  # percent of the cycles in which a scheduler issues
HALF_FULL = 0.5  # of the warps that an SM holds
MANY_CONFLICTS = 0.2  # of the passes through shared memory

ROOF = "the GPU's rates: nothing else takes time"


def threads_idle(observations: Observations) -> Finding:  # noqa: PLR0911 - rules in order: the first that fits decides
    """Whether busy SMs have too few threads to issue instructions with."""
    case = Hypothesis(
        "threads idle", "threads a block and warps of a busy SM against its four schedulers", observations
    )
    chip, kernel = observations.chip, main_kernel(observations)
    warps = busy_warps(chip, kernel) if chip is not None and kernel is not None else None
    if kernel is None or kernel.threads is None or warps is None:
        lacking = "grid" if kernel is not None and kernel.threads is not None else "launch"
        return case.cannot_tell(f"no {lacking}: {observations.why_missing('gpu', 'launches')}")
    idle = idle_lanes(kernel) or 0.0
    issue, lanes = weighted(observations, ISSUE), weighted(observations, LANES)
    case.numbers.update(threads=kernel.threads, warps_of_a_busy_sm=warps)
    said = f"{kernel.name} has {kernel.threads} threads a block, and a busy SM {counted(warps, 'warp')}"
    if issue is not None and lanes is not None:
        case.numbers.update(issue_percent=issue, lanes=lanes)
        said += f"; counters: a scheduler issues in {issue:.0f} % of its cycles, for {lanes:.0f} of {WARP} threads"
    roof = fewest_seconds(observations)
    if lanes is not None and lanes < FEW_LANES:
        advice = "let all threads of a warp do the same: no branches by thread, no loops of different length"
        return case.confirmed(said, advice, device_seconds=roof, bound=ROOF)
    if idle >= WORTH:
        advice = f"make the threads of a block a multiple of {WARP}: {idle:.0%} of the lanes have no thread"
        return case.confirmed(said, advice, device_seconds=roof, bound=ROOF)
    if near := reaches(observations):
        return case.ruled_out(f"{said}; {near}")
    if issue is not None and issue >= BUSY_ISSUE:
        return case.ruled_out(said)
    if warps < SCHEDULERS:
        said += f": {SCHEDULERS - warps} of its {SCHEDULERS} schedulers never have an instruction to issue"
        return case.confirmed(said, "more warps a block, or more blocks an SM", device_seconds=roof, bound=ROOF)
    if warps >= 2 * SCHEDULERS:
        return case.ruled_out(said)
    if issue is None:
        return case.cannot_tell(
            f"{said}: one for a scheduler. Whether it waits, counters say: {_counters(observations)}"
        )
    if issue < IDLE_ISSUE:
        return case.confirmed(said, "more warps a block, or more blocks an SM", device_seconds=roof, bound=ROOF)
    return case.cannot_tell(said)


def no_tensor_cores(observations: Observations) -> Finding:
    """Whether the products run on the ordinary arithmetic units."""
    case = Hypothesis(
        "no tensor-core instructions",
        "the matrix instructions in the machine code of the kernels that ran",
        observations,
    )
    chip, kernels = observations.chip, observations.kernels
    if chip is not None and chip.flops_per_s <= chip.plain_flops_per_s:
        return case.ruled_out("for this type the tensor cores are not faster than the ordinary arithmetic units")
    known = [kernel for kernel in kernels if kernel.code is not None]
    count = sum(kernel.code.tensor_core for kernel in known if kernel.code)
    if count:
        case.numbers["tensor_core_instructions"] = count
        return case.ruled_out(_matrix_said(known))
    if not known or len(known) < len(kernels):
        return case.cannot_tell(_code_missing(observations))
    total = sum(kernel.code.instructions for kernel in known if kernel.code)
    case.numbers.update(tensor_core_instructions=0, instructions=total)
    said = f"none among the {counted(total, 'instruction')} of {_names(known)}"
    memory = memory_load(observations)
    if memory is not None and memory.share >= FULL:
        return case.ruled_out(f"{said}, but the arithmetic is not what it waits for: {memory.said}")
    advice = "multiply tiles with tensor-core instructions (mma, wgmma; tl.dot in Triton)"
    device, kernel = observations.times.device, main_kernel(observations)
    if chip is None or device is None:
        return case.confirmed(
            f"{said}; what that costs is not known: {observations.why_missing('times')}", advice, bound=""
        )
    used = min(1.0, (kernel.blocks or chip.sms) / chip.sms) if kernel is not None else 1.0
    plain = observations.work.flops / (chip.plain_flops_per_s * used)
    tensor = observations.work.flops / (chip.flops_per_s * used)
    case.numbers.update(plain_s=plain, tensor_s=tensor)
    said += (
        f"; without them the products take at least {percent(min(1.0, plain / device))} of the time on the SMs in use"
    )
    return case.confirmed(
        said,
        advice,
        share=min(1.0, plain / device) * (1 - tensor / plain),
        device_seconds=tensor,
        bound="the products at the tensor cores' rate on the SMs in use; nothing else takes time",
    )


def _matrix_said(kernels: Sequence[Kernel]) -> str:
    found = [
        f"{kernel.code.tensor_core} in {kernel.name}" for kernel in kernels if kernel.code and kernel.code.tensor_core
    ]
    return f"there are matrix instructions: {', '.join(found)}"


def local_memory(observations: Observations) -> Finding:
    """Whether registers spill to memory, or arrays live there."""
    case = Hypothesis(
        "spills and local memory", "loads and stores of local memory in the machine code, within loops", observations
    )
    known = [kernel for kernel in observations.kernels if kernel.code is not None]
    looped = {kernel.name: kernel.code.local_in_loops for kernel in known if kernel.code and kernel.code.local_in_loops}
    total = sum(kernel.code.local for kernel in known if kernel.code)
    most_bytes = max((kernel.code.local_bytes for kernel in known if kernel.code), default=0)
    case.numbers.update(local_instructions=total, in_loops=sum(looped.values()), local_bytes=most_bytes)
    if looped:
        said = ", ".join(f"{count} in loops of {name}" for name, count in looped.items())
        said = f"loads and stores of local memory: {said}; {counted(most_bytes, 'byte')} a thread"
        advice = (
            "fewer live values: a smaller tile, or more warps for it; no array with an index known at run time only"
        )
        return case.confirmed(said, advice, device_seconds=fewest_seconds(observations), bound=ROOF)
    if not known or len(known) < len(observations.kernels):
        return case.cannot_tell(_code_missing(observations))
    if total:
        return case.ruled_out(f"{total} loads and stores of local memory, none in a loop: each runs once a thread")
    return case.ruled_out(f"no load or store of local memory in {_names(known)}")


def occupancy_capped(observations: Observations) -> Finding:  # noqa: PLR0911 - rules in order: the first that fits decides
    """Whether shared memory or registers keep the SMs from holding the warps that would hide waiting."""
    case = Hypothesis(
        "occupancy capped",
        "the occupancy model: what an SM holds, and what sets that",
        observations,
    )
    chip, kernel = observations.chip, main_kernel(observations)
    held = resident(chip, kernel) if chip is not None and kernel is not None else None
    if chip is None or kernel is None or held is None:
        return case.cannot_tell(f"no launch: {observations.why_missing('gpu', 'launches')}")
    share = held.warps / held.most_warps
    limits = [name for name in held.limited_by if name in ("registers", "shared memory")]
    case.numbers.update({f"blocks_by_{name.replace(' ', '_')}": blocks for name, blocks in held.limits.items()})
    case.numbers.update(blocks_of_an_sm=held.blocks, warps=held.warps, occupancy=share)
    shared = kernel.shared_memory_bytes or 0
    registers = f"{kernel.registers} registers a thread, " if kernel.registers else ""
    needs = f"{registers}{format_bytes(shared)} shared memory a block"
    if shared > chip.shared_memory_per_block_bytes:
        needs += f", of which {chip.name} gives {format_bytes(chip.shared_memory_per_block_bytes)}"
    if not held.blocks or shared > chip.shared_memory_per_block_bytes:
        return case.confirmed(f"{kernel.name} cannot be launched: {needs}", "a smaller tile", bound="")
    said = (
        f"an SM holds {counted(held.blocks, 'block')} of {kernel.name}, {held.warps} of {held.most_warps} warps, "
        f"by {' and '.join(held.limited_by)} ({needs})"
    )
    if not limits or share >= HALF_FULL:
        return case.ruled_out(said)
    if kernel.blocks is None:
        return case.cannot_tell(
            f"{said}; whether the grid fills them is not known: {observations.why_missing('launches')}"
        )
    if kernel.blocks <= chip.sms * held.blocks:
        return case.ruled_out(
            f"{said}; the {counted(kernel.blocks, 'block')} of the grid fit at once: there are no more to hold"
        )
    if near := reaches(observations):
        return case.ruled_out(f"{said}; and yet {near}")
    issue, active = weighted(observations, ISSUE), weighted(observations, WARPS)
    if issue is None or active is None:
        why = observations.why_missing("times") if observations.times.device is None else _counters(observations)
        return case.cannot_tell(f"{said}. Whether it waits for want of warps, counters say: {why}")
    case.numbers.update(issue_percent=issue, active_warps_percent=active)
    said += f"; counters: {active:.0f} % of the warps are active, and a scheduler issues in {issue:.0f} % of its cycles"
    if issue >= BUSY_ISSUE:
        return case.ruled_out(said)
    if issue >= IDLE_ISSUE:
        return case.cannot_tell(said)
    advice = f"take less of the {' and of the '.join(limits)}: a smaller tile, fewer stages, or more warps a block"
    return case.confirmed(said, advice, device_seconds=fewest_seconds(observations), bound=ROOF)


def bank_conflicts(observations: Observations) -> Finding:
    """Whether accesses to shared memory wait for one another."""
    case = Hypothesis("bank conflicts", "counters: passes through shared memory that conflicts added", observations)
    shared = [kernel.shared_memory_bytes for kernel in observations.kernels]
    if shared and not any(size is None or size > 0 for size in shared):
        return case.ruled_out("no kernel uses shared memory")
    conflicts, wavefronts = summed(observations, CONFLICTS), summed(observations, WAVEFRONTS)
    if conflicts is None or wavefronts is None:
        return case.cannot_tell(f"only counters say: {_counters(observations)}")
    share = conflicts / wavefronts if wavefronts else 0.0
    case.numbers.update(conflicts=conflicts, wavefronts=wavefronts, conflict_share=share)
    said = f"conflicts added {share:.0%} of the {wavefronts:.3g} passes through shared memory"
    if share < MANY_CONFLICTS:
        return case.ruled_out(said)
    advice = "pad or swizzle the rows of tiles in shared memory"
    return case.confirmed(said, advice, device_seconds=fewest_seconds(observations), bound=ROOF)


def _names(kernels: Sequence[Kernel]) -> str:
    return ", ".join(dict.fromkeys(kernel.name for kernel in kernels))


def _code_missing(observations: Observations) -> str:
    reasons = dict.fromkeys(
        f"{kernel.name}: {kernel.code_missing}" for kernel in observations.kernels if kernel.code is None
    )
    said = "; ".join(reasons) or observations.why_missing("launches", "code")
    return f"no machine code: {said}"


def _counters(observations: Observations) -> str:
    return observations.why_missing("counters")
