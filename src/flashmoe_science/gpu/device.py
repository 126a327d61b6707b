"""The only place that asks which GPU this is."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import InputError
from .specs import SPECS, GpuSpec, find_gpu

_CLOSEST = {80: "A100", 86: "A10G", 89: "L4", 90: "H100", 100: "B200", 120: "RTX 5090"}


@functools.cache
def gpu_of_device(index: int) -> GpuSpec:
    """Return what is known of CUDA device ``index``: sizes from the driver, peak rates from the closest known model."""
    return gpu_of_properties(torch.cuda.get_device_properties(index))


def gpu_of(tensor: torch.Tensor) -> GpuSpec | None:
    """Return the GPU that holds a tensor, or None for a CPU tensor."""
    return gpu_at(tensor.device)


def gpu_at(device: torch.device) -> GpuSpec | None:
    """Return the GPU of a device, or None for the CPU.

    Thereafter this thread has a CUDA context: what is prepared for that GPU next asks the driver, which, unlike the
    runtime, makes none for a thread that has not used the GPU yet, such as autograd's.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()  # the one call of the runtime that is allowed while capturing too
    return gpu_of_device(device.index)


def gpu_of_properties(properties: Any) -> GpuSpec:
    """Return what is known of a card from the properties that torch gives."""
    return spec_of(
        properties.name,
        arch=properties.major * 10 + properties.minor,
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
    )


def spec_of(name: str, *, arch: int, sms: int, l2_bytes: int) -> GpuSpec:
    """Return what is known of a card that the driver describes so; peak rates from the closest known model."""
    try:
        model = find_gpu(name)
        name = model.name
    except InputError:  # a model that the table does not know: its own sizes, the closest one's peak rates
        model = SPECS[_CLOSEST[max((known for known in _CLOSEST if known <= arch), default=min(_CLOSEST))]]
    return GpuSpec(
        name=name,
        arch=arch,
        sms=sms,
        l2_bytes=l2_bytes,
        bandwidth_bytes_per_s=model.bandwidth_bytes_per_s,
        max_sm_clock_mhz=model.max_sm_clock_mhz,
        boost_sm_clock_mhz=model.boost_sm_clock_mhz,
        peak_tflops=model.peak_tflops,
    )


def current_gpu() -> GpuSpec | None:
    """Return the current CUDA device, or None on a machine without one."""
    if not torch.cuda.is_available():
        return None
    return gpu_of_device(torch.cuda.current_device())
