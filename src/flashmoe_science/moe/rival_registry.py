"""All rivals of our experts by name; the first is the default."""

from __future__ import annotations

from . import rivals
from .scattermoe_rival import ScatterMoe
from .triton_kernels_rival import TritonKernels

_LIBRARIES: tuple[rivals.MoeRival, ...] = (ScatterMoe(), TritonKernels())
RIVALS: dict[str, rivals.MoeRival] = {**rivals.RIVALS, **{rival.name: rival for rival in _LIBRARIES}}
