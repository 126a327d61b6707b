"""The time that no implementation can beat: what is measured below it is impossible, and refused.

The bound errs on the side of the subject, so that a fast kernel is never called impossible: the highest clock, the
GPU's datasheet rates, and only those bytes that cannot have been in the L2 cache.
"""

from __future__ import annotations

from typing import Literal

from ..errors import InputError
from ..gpu.specs import GpuSpec, find_gpu
from .evidence import CaseRecord, Gpu, TimeKind


def known_spec(gpu: Gpu) -> GpuSpec | None:
    """Return what is known of this card, or None for a model that is not in the table of ``gpu.specs``."""
    try:
        spec = find_gpu(gpu.name)
    except InputError:
        return None
    # A name can contain another's (L4, L40): the number of SMs tells them apart.
    return spec if (spec.arch, spec.sms) == (gpu.arch, gpu.sms) else None


def fewest_seconds(case: CaseRecord, kind: TimeKind, gpu: Gpu, cache: Literal["cold", "rotating"]) -> float | None:
    """Return the least time that one call of ``case`` can take on ``gpu``, or None where the card is not known."""
    spec = known_spec(gpu)
    if spec is None:
        return None
    peak_tflops = spec.peak_tflops.get(case.work.peak, max(spec.peak_tflops.values()))
    highest_clock = max(spec.max_sm_clock_mhz, gpu.max_sm_clock_mhz or 0)
    flops_per_s = peak_tflops * 1e12 * highest_clock / spec.boost_sm_clock_mhz
    moved = _dram_bytes(case, gpu, flushed=kind == "kernel" and cache == "cold")
    return max(case.work.flops / flops_per_s, moved / spec.bandwidth_bytes_per_s)


def _dram_bytes(case: CaseRecord, gpu: Gpu, *, flushed: bool) -> float:
    """Return the fewest bytes that one call moves from memory. Outputs do not count: they may stay in L2."""
    if not case.input_set_bytes:
        return max(0.0, case.work.bytes - gpu.l2_bytes)
    inputs = min(case.work.bytes, case.input_set_bytes / case.input_sets)
    if flushed:
        return inputs
    # However L2 is managed, it keeps at most its size of all the sets that the calls rotate over.
    return inputs * max(0.0, 1 - gpu.l2_bytes / case.input_set_bytes)
