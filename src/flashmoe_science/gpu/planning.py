"""Shared parts of all plans: promised launches, the resources of a call, and the architectures served."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass

from ..errors import UnsupportedError
from .machine_code import KernelCode
from .specs import OLDEST_TRITON

OLDEST_ARCH = 80  # asynchronous copies to shared memory, and bf16


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch that a plan promises.

    ``shared_memory_bytes`` is known once the kernel was compiled. Planning compiles nothing, so it is None in every
    plan that ``plan_attention`` and ``explain`` return.
    """

    pattern: str  # the kernel's name in a profiler
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int | None = None


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel of a plan with its machine code."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int
    code: KernelCode


@dataclass(frozen=True)
class Work:
    """Operations, bytes and tokens of one call."""

    flops: float
    bytes: float
    tokens: int


def refuse_architecture(arch: int) -> None:
    """Raise ``UnsupportedError`` where the Triton that is installed does not compile for ``sm_<arch>``."""
    if arch < OLDEST_ARCH:
        raise UnsupportedError(
            f"kernels need sm_{OLDEST_ARCH} or newer, this GPU is sm_{arch}", hint="A100, L4 and H100 are served"
        )
    if arch not in OLDEST_TRITON:
        served = ", ".join(f"sm_{known}" for known in OLDEST_TRITON)
        raise UnsupportedError(f"Triton compiles no kernel for sm_{arch}", hint=f"the architectures served: {served}")
    needed, installed = OLDEST_TRITON[arch], _installed_triton()
    if installed is not None and installed < needed:
        wanted = ".".join(map(str, needed))
        raise UnsupportedError(
            f"sm_{arch} needs Triton {wanted} or newer, got Triton {'.'.join(map(str, installed))}",
            hint=f"install triton>={wanted}, and a torch that goes with it",
        )


@functools.cache
def _installed_triton() -> tuple[int, ...] | None:
    """Return major and minor version without importing Triton; None where plans are made without it."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Axis:
    """One way to make a problem longer: see ``proof.operator.Axis``."""

    name: str
    kind: str
    meaning: str
