"""How many blocks of a kernel one SM holds at a time, and which of its resources sets that number.

The model of NVIDIA's occupancy calculator: registers are given out by warps in units of 256 for each of the four parts
of an SM, shared memory in units of 128 bytes, of which the driver keeps 1 KiB of every block for itself.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the occupancy calculator of
Nsight Compute (allocation units, the same from sm_80 to sm_120).
"""

from __future__ import annotations

from dataclasses import dataclass

from .specs import GpuSpec

WARP = 32
SCHEDULERS = 4  # of an SM: each issues one instruction a clock, of a warp of its own
_REGISTER_UNIT = 256  # registers of a warp
_SHARED_UNIT = 128  # bytes
_SHARED_RESERVED = 1024  # bytes of every block


@dataclass(frozen=True)
class Occupancy:
    """What one SM holds of a kernel at a time."""

    blocks: int  # 0: not even one fits
    warps: int
    most_warps: int  # that an SM of this GPU holds
    limits: dict[str, int]  # resource -> the blocks that it alone would allow

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more than ``blocks``."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(gpu: GpuSpec, *, threads: int, registers: int, shared_memory_bytes: int) -> Occupancy:
    """Return how many blocks are resident on one SM of ``gpu``.

    Args:
        gpu: the model.
        threads: a block.
        registers: a thread; 0 where they are not known, then they set no limit.
        shared_memory_bytes: a block, static and dynamic, as the kernel asked for it.
    """
    warps = max(1, _up(threads, WARP) // WARP)
    limits = {"threads": gpu.threads_per_sm // (warps * WARP), "blocks": gpu.blocks_per_sm}
    if registers > 0:
        in_part = gpu.registers_per_sm // SCHEDULERS // _up(registers * WARP, _REGISTER_UNIT)
        limits["registers"] = in_part * SCHEDULERS // warps
    limits["shared memory"] = gpu.shared_memory_per_sm_bytes // _up(
        shared_memory_bytes + _SHARED_RESERVED, _SHARED_UNIT
    )
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, gpu.threads_per_sm // WARP, limits)


def _up(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit
