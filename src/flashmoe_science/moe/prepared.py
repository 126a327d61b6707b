"""One kernel of a plan, ready to be compiled and launched."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.compile import KernelSource
from ..gpu.tensor_map import TensorMap


@dataclass(frozen=True)
class PreparedKernel:
    """What is compiled, its grid, the scalars after its pointers, where each pointer leads, and what TMA is told."""

    source: KernelSource
    grid: tuple[int, int, int]
    scalars: tuple[float, ...]
    tensors: tuple[str, ...]  # of each descriptor and pointer, in order: a name of ``calls.py``, or ``within`` it
    tensor_maps: tuple[TensorMap, ...] = ()


def within(tensor: str, offset_bytes: int) -> str:
    """Return the place so many bytes behind the begin of a tensor."""
    return f"{tensor}+{offset_bytes}" if offset_bytes else tensor


def place_of(within: str) -> tuple[str, int]:
    """Return a tensor's name and the bytes behind its begin."""
    name, _, offset = within.partition("+")
    return name, int(offset or 0)
