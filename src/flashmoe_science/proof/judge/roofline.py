"""The time that no implementation can beat: a time below it is impossible, and refused.

The bound errs on the side of the subject, so that a fast kernel is never called impossible: the highest clock, the
GPU's datasheet rates, and only those bytes that cannot have been in the L2 cache. For a model that is not in the table,
only what its architecture's SMs can compute in a clock is known, and nothing of its memory.

For reading there is another, simpler line: the roofline of the datasheet. It refuses nothing, and small cases, whose
inputs stay in L2, may lie above it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ...errors import InputError
from ...gpu.specs import FP16_FLOPS_PER_SM_AND_CLOCK, GpuSpec, find_gpu
from ..records.evidence import CaseRecord, Gpu, Record, TimeKind, Work


@dataclass(frozen=True)
class Roofline:
    """The rates of a card's datasheet: what its matrix or other units compute, and what its memory delivers."""

    gpu: str  # the name in ``gpu.specs``
    peak: str  # which of its rates, e.g. bf16
    flops_per_s: float
    bytes_per_s: float

    @property
    def knee(self) -> float:
        """The arithmetic intensity, in FLOP a byte, at which memory stops and arithmetic starts to be the limit."""
        return self.flops_per_s / self.bytes_per_s

    def flops_at(self, intensity: float) -> float:
        """Return the most FLOP a second at so many FLOP a byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, work: Work) -> float:
        """Return the time of ``work`` at these rates, every byte moved once."""
        return max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)


def roofline_of(work: Work, gpu: Gpu) -> Roofline | None:
    """Return the roofline that ``work`` lies under on this card, or None for a model that is not in the table."""
    spec = known_spec(gpu)
    if spec is None:
        return None
    peak = (
        work.peak if work.peak in spec.peak_tflops else max(spec.peak_tflops, key=lambda name: spec.peak_tflops[name])
    )
    return Roofline(spec.name, peak, spec.peak_tflops[peak] * 1e12, spec.bandwidth_bytes_per_s)


def known_spec(gpu: Gpu) -> GpuSpec | None:
    """Return what is known of this card, or None for a model that is not in the table of ``gpu.specs``."""
    try:
        spec = find_gpu(gpu.name)
    except InputError:
        return None
    # Models share words of their names (RTX 4090, RTX 4090 D): the number of SMs tells them apart.
    return spec if (spec.arch, spec.sms) == (gpu.arch, gpu.sms) else None


def has_limits(gpu: Gpu) -> bool:
    """Return whether ``fewest_seconds`` has a bound on this card."""
    return known_spec(gpu) is not None or _flops_of_architecture(gpu) is not None


def fewest_seconds(case: CaseRecord, kind: TimeKind, gpu: Gpu, cache: Literal["cold", "rotating"]) -> float | None:
    """Return the least time that one call of ``case`` can take on ``gpu``, or None where that is not known."""
    spec = known_spec(gpu)
    if spec is None:
        most = _flops_of_architecture(gpu)
        # No rate is known for types that such a card computes faster than fp16: those cases have no bound.
        return case.work.flops / most if most is not None and case.work.peak in _NO_FASTER_THAN_FP16 else None
    peak_tflops = spec.peak_tflops.get(case.work.peak, max(spec.peak_tflops.values()))
    highest_clock = max(spec.max_sm_clock_mhz, gpu.max_sm_clock_mhz or 0)
    flops_per_s = peak_tflops * 1e12 * highest_clock / spec.boost_sm_clock_mhz
    moved = fewest_dram_bytes(case, gpu, flushed=kind == "kernel" and cache == "cold")
    return max(case.work.flops / flops_per_s, moved / spec.bandwidth_bytes_per_s)


def impossible_time(record: Record, kind: TimeKind, arms: Container[str]) -> str | None:
    """Return which time of this kind cannot be, of any arm, or, below the bound, of one of ``arms``; None: none."""
    gpu = record.environment.gpu
    for case in record.cases:
        fewest = fewest_seconds(case, kind, gpu, record.settings.cache) if gpu else None
        for rounds in case.rounds:
            for arm, column in rounds.seconds.get(kind, {}).items():
                wrong = next((s for s in column if not (math.isfinite(s) and s > 0)), None)
                if wrong is not None:
                    return f"case {case.name} has an impossible {kind} time: {arm} took {wrong} s"
                if arm.partition("#")[0] in arms and (beaten := _beaten(column, fewest)):
                    return f"case {case.name} has an impossible {kind} time: {arm} took {beaten}"
    return None


def _beaten(column: Sequence[float], fewest: float | None) -> str | None:
    """Return by how much the median of ``column`` is below the ``fewest`` seconds of the hardware, or None."""
    if fewest is None or not column or median(column) >= fewest:
        return None
    return f"{median(column) * 1e6:.3g} us, and no kernel can take less than {fewest * 1e6:.3g} us on this GPU"


_NO_FASTER_THAN_FP16 = ("fp16", "bf16", "tf32", "fp32")


def _flops_of_architecture(gpu: Gpu) -> float | None:
    """Return the most floating-point operations a second of any card with these SMs and this clock, if known."""
    per_clock = FP16_FLOPS_PER_SM_AND_CLOCK.get(gpu.arch)
    if per_clock is None or gpu.max_sm_clock_mhz is None:
        return None
    return per_clock * gpu.sms * gpu.max_sm_clock_mhz * 1e6


def fewest_dram_bytes(case: CaseRecord, gpu: Gpu, *, flushed: bool) -> float:
    """Return the fewest bytes that one call moves from memory. Outputs do not count: they may stay in L2."""
    if not case.input_set_bytes:
        return max(0.0, case.work.bytes - gpu.l2_bytes)
    inputs = min(case.work.bytes, case.input_set_bytes)
    if flushed:
        return inputs
    # However L2 is managed, it keeps at most its size of all the sets that the calls rotate over.
    return inputs * max(0.0, 1 - gpu.l2_bytes / (case.input_set_bytes * case.input_sets))
