"""All rivals of our experts by name; the first is the default."""

from __future__ import annotations

from . import rivals
from .scattermoe_rival import ScatterMoe
from .sonicmoe_rival import SonicMoe
from .triton_kernels_rival import TritonKernels
from .vllm_rival import Vllm

_LIBRARIES: tuple[rivals.MoeRival, ...] = (ScatterMoe(), SonicMoe(), TritonKernels(), Vllm())
RIVALS: dict[str, rivals.MoeRival] = {**rivals.RIVALS, **{rival.name: rival for rival in _LIBRARIES}}
