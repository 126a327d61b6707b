"""Hypotheses about the GPU's rates: bytes, operations and clocks."""

from __future__ import annotations

import statistics

from ..judge.rows import format_bytes
from .experiments import FULL, arithmetic_load, headroom, memory_load, percent, summed
from .findings import Hypothesis
from .grid import IDLE_HIGH, WORTH
from .observations import Finding, Observations

MANY_BYTES = 1.5  # times the fewest
LOW_CLOCK = 0.95  # of the highest clock


def excess_bytes(observations: Observations) -> Finding:
    """Whether more bytes move from and to memory than the problem needs."""
    case = Hypothesis(
        "more bytes moved than needed", "bytes of the memory, counted, against inputs and outputs once", observations
    )
    chip, device, fewest = observations.chip, observations.times.device, observations.work.bytes
    moved = summed(observations, "dram__bytes_read.sum", "dram__bytes_write.sum")
    if chip is None or device is None or not fewest:
        return case.cannot_tell(f"no times: {observations.why_missing('gpu', 'times')}")
    case.numbers.update(fewest_bytes=fewest)
    if moved is None:
        ceiling = chip.bandwidth_bytes_per_s * device
        case.numbers.update(most_bytes=ceiling)
        said = (
            f"in its time the memory moves {ceiling / fewest:.1f} times the fewest ({format_bytes(fewest)}) at the most"
        )
        if ceiling < MANY_BYTES * fewest:
            return case.ruled_out(said)
        return case.cannot_tell(f"{said}; how many it moved, only counters say: {observations.why_missing('counters')}")
    ratio, extra = moved / fewest, max(0.0, moved - fewest) / chip.bandwidth_bytes_per_s
    case.numbers.update(moved_bytes=moved, ratio=ratio)
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


def bandwidth_bound(observations: Observations) -> Finding:
    """Whether the memory's bandwidth sets the time."""
    case = Hypothesis("bound by memory bandwidth", "the roofline: bytes against time and bandwidth", observations)
    load, chip, device = memory_load(observations), observations.chip, observations.times.device
    if load is None or chip is None or device is None:
        return case.cannot_tell(f"no times: {observations.why_missing('gpu', 'times')}")
    case.numbers.update(bandwidth_share=load.share)
    if load.share >= FULL:
        return case.confirmed(
            load.said,
            "move fewer bytes (smaller types, fused operations): no other change helps much",
            share=load.share,
            device_seconds=observations.dram_bytes / chip.bandwidth_bytes_per_s,
            bound="the fewest bytes at full bandwidth",
        )
    if load.exact:
        return case.ruled_out(load.said)
    found = headroom(observations)
    if found is not None and found.idle >= IDLE_HIGH:
        return case.ruled_out(
            f"{load.said}; with {found.run.factor} times {found.run.meaning}, "
            f"{found.gain:.1f} times the bytes move in the same time"
        )
    return case.cannot_tell(
        f"at least {load.share:.0%}: {load.said}; what it moves, counters say: {_why(observations)}"
    )


def compute_bound(observations: Observations) -> Finding:
    """Whether the arithmetic rate of the problem's type sets the time."""
    case = Hypothesis("bound by arithmetic", "the roofline: operations against time and peak rate", observations)
    load, chip, device = arithmetic_load(observations), observations.chip, observations.times.device
    if load is None or chip is None or device is None:
        return case.cannot_tell(f"no times: {observations.why_missing('gpu', 'times')}")
    case.numbers.update(arithmetic_share=load.share)
    if load.share >= FULL:
        return case.confirmed(
            load.said,
            "fewer operations, or a type with a higher rate: no other change helps much",
            share=load.share,
            device_seconds=observations.work.flops / chip.flops_per_s,
            bound="the fewest operations at the peak rate",
        )
    tensor = load.counted
    if tensor is not None and tensor >= FULL:
        case.numbers.update(tensor_active=tensor)
        return case.confirmed(
            f"{load.said}: more operations than needed",
            "skip what a mask hides, and do not pad to tiles that are mostly empty",
            share=tensor,
            device_seconds=observations.work.flops / chip.flops_per_s,
            bound="the fewest operations at the peak rate",
        )
    found = headroom(observations)
    if found is not None and found.idle >= IDLE_HIGH:
        return case.ruled_out(
            f"{load.said}; with {found.run.factor} times {found.run.meaning}, "
            f"{found.gain:.1f} times the work is done in the same time"
        )
    if tensor is not None:
        return case.ruled_out(load.said)
    return case.cannot_tell(
        f"{load.said}; whether it makes more operations than needed, counters say: {_why(observations)}"
    )


def throttled(observations: Observations) -> Finding:
    """Whether the SM clock is held below what the card can do."""
    case = Hypothesis("throttled clocks", "SM clock and the driver's throttle reasons after every round", observations)
    sensors = observations.sensors
    clocks = [clock for clock in sensors.sm_clock_mhz if clock is not None]
    highest = sensors.max_sm_clock_mhz
    if not clocks or not highest:
        return case.cannot_tell(f"no clocks: {observations.why_missing('sensors', 'times')}")
    middle = statistics.median(clocks)
    reasons = [reason for reason in sensors.throttle if reason]
    case.numbers.update(sm_clock_mhz=middle, max_sm_clock_mhz=highest, throttled_rounds=len(reasons))
    said = f"SM clock {middle:.0f} MHz of {highest}"
    if reasons:
        named = sorted({name for reason in reasons for name in reason.split(",")})
        said += f"; {len(reasons)} of {len(sensors.throttle)} rounds throttled: {', '.join(named)}"
    if middle >= LOW_CLOCK * highest:
        return case.ruled_out(said)
    memory = memory_load(observations)
    if memory is not None and memory.share >= FULL:
        return case.ruled_out(f"{said}; but {memory.said}, which the SM clock does not set")
    if not reasons:
        return case.cannot_tell(f"{said}, and the driver names no reason: it may have been read while the GPU idled")
    device = observations.times.device
    return case.confirmed(
        said,
        "look at power limit, cooling and who else uses the card; compare times only within a run",
        share=1 - middle / highest,
        device_seconds=None if device is None else device * middle / highest,
        bound="a time in proportion to the SM clock, at the highest that the card has",
    )


def _why(observations: Observations) -> str:
    return observations.why_missing("counters")
