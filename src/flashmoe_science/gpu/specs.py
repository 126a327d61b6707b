"""What is known of each GPU without asking a driver: sizes, limits and peak rates.

Peak rates are those of the vendors' datasheets (dense, no sparsity), at the boost clock. ``max_sm_clock_mhz`` is the
highest clock the driver reports for the part: the roofline of the harness scales peaks to it, so that a time is called
impossible only when no clock could have produced it.

Sources: NVIDIA datasheets and architecture whitepapers of L4, A10G, A100, H100, H200, B200 and GeForce RTX 4090/5090;
shared memory and registers from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import InputError


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU model."""

    name: str
    arch: int  # 90 for sm_90
    sms: int
    l2_bytes: int
    bandwidth_bytes_per_s: float
    max_sm_clock_mhz: int
    boost_sm_clock_mhz: int  # the clock of peak_tflops
    peak_tflops: dict[str, float] = field(hash=False)  # dense, by operand dtype; fp32 is the FMA rate

    @property
    def shared_memory_per_block_bytes(self) -> int:
        """The most shared memory that one block may opt in to."""
        return shared_memory_limit(self.arch)

    @property
    def shared_memory_per_sm_bytes(self) -> int:
        """Shared memory of one SM."""
        return _limits(self.arch).shared_memory_per_sm_kib * 1024

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers of one SM."""
        return 65536

    @property
    def threads_per_sm(self) -> int:
        """The most threads resident on one SM."""
        return _limits(self.arch).threads_per_sm

    @property
    def blocks_per_sm(self) -> int:
        """The most blocks resident on one SM."""
        return _limits(self.arch).blocks_per_sm


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits that hold for a whole architecture."""

    shared_memory_per_block_kib: int
    shared_memory_per_sm_kib: int
    threads_per_sm: int
    blocks_per_sm: int


_LIMITS = {
    80: _Limits(163, 164, 2048, 32),
    86: _Limits(99, 100, 1536, 16),
    89: _Limits(99, 100, 1536, 24),
    90: _Limits(227, 228, 2048, 32),
    100: _Limits(227, 228, 2048, 32),
    120: _Limits(99, 100, 1536, 24),
}


# The first Triton, of those admitted, whose compiler knows an architecture; tried with 3.6, 3.7, 3.8 and 3.9. Asked for
# another (sm_88, sm_101), ptxas refuses, or LLVM ends the process.
OLDEST_TRITON = {
    80: (3, 6),
    86: (3, 6),
    87: (3, 6),
    89: (3, 6),
    90: (3, 6),
    100: (3, 6),
    103: (3, 6),
    110: (3, 7),
    120: (3, 6),
    121: (3, 6),
}


def _limits(arch: int) -> _Limits:
    """Return the limits of ``sm_<arch>``: of the architecture before it where the table does not know it."""
    return _LIMITS[max((known for known in _LIMITS if known <= arch), default=min(_LIMITS))]


def shared_memory_limit(arch: int) -> int:
    """Return the most shared memory, in bytes, that one block of ``sm_<arch>`` may opt in to."""
    return _limits(arch).shared_memory_per_block_kib * 1024


_MIB = 1 << 20


def _spec(
    name: str, arch: int, sms: int, l2_mib: float, tb_per_s: float, max_clock: int, boost: int, **peak: float
) -> GpuSpec:
    return GpuSpec(name, arch, sms, int(l2_mib * _MIB), tb_per_s * 1e12, max_clock, boost, peak)


# fmt: off
SPECS = {spec.name: spec for spec in (
    #      name       arch  SMs  L2    TB/s    MHz max, boost
    _spec("A100",       80, 108,  40, 2.039,  1410, 1410, fp16=312, bf16=312, tf32=156, fp32=19.5),
    _spec("A10G",       86,  80,   6, 0.600,  1710, 1710, fp16=70, bf16=70, tf32=35, fp32=31.5),
    _spec("L4",         89,  58,  48, 0.300,  2040, 2040, fp16=121, bf16=121, tf32=60, fp32=30.3),
    _spec("RTX 4090",   89, 128,  72, 1.008,  3105, 2520, fp16=330, bf16=165, tf32=82.6, fp32=82.6),
    _spec("H100",       90, 132,  50, 3.352,  1980, 1830, fp16=989, bf16=989, tf32=494, fp32=67),
    # The tensor rates of these two are datasheet values at a clock below that of their fp32 rate.
    _spec("H100 PCIe",  90, 114,  50, 2.039,  1755, 1620, fp16=756, bf16=756, tf32=378, fp32=51),
    _spec("H100 NVL",   90, 132,  50, 3.938,  1980, 1545, fp16=835, bf16=835, tf32=417, fp32=60),
    _spec("H200",       90, 132,  60, 4.800,  1980, 1830, fp16=989, bf16=989, tf32=494, fp32=67),
    _spec("B200",      100, 148, 126, 8.000,  1965, 1850, fp16=2250, bf16=2250, tf32=1125, fp32=75),
    _spec("RTX 5090",  120, 170,  96, 1.792,  3090, 2407, fp16=419, bf16=210, tf32=104, fp32=104.8),
)}
# fmt: on

# Dense operations of one SM's tensor cores in a clock. No model of the architecture is faster, whatever its name.
FP16_FLOPS_PER_SM_AND_CLOCK = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU called ``name``, or whose name's words are among those of ``name`` (``NVIDIA H200`` -> H200).

    Raises:
        InputError: no GPU of the table fits.
    """
    words = name_words(name)
    fitting = [spec for spec in SPECS.values() if name_words(spec.name) <= words]
    if not fitting:
        raise InputError(f"gpu must be one of {', '.join(SPECS)}, got {name!r}")
    return max(fitting, key=lambda spec: len(name_words(spec.name)))  # "H100 NVL" before "H100"


def name_words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name, in lower case: ``NVIDIA A100-SXM4-80GB`` has four."""
    return frozenset(re.split(r"[\s-]+", name.casefold())) - {""}
