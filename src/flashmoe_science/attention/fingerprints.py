"""What decides, in one hash, what a GPU runs for a call of ours or of a rival: see ``gpu/fingerprint.py``.

The host's part is the source of what lies between a call and its launches. What only describes the call, plans it or
prepares its kernels is left out: the outcome of that, kernels, constants, grids and scalars, is in the hash itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..gpu.dependencies import UntraceableError
from ..gpu.specs import GpuSpec

if TYPE_CHECKING:
    from ..gpu.fingerprint import Launch

_PACKAGE = __package__.rpartition(".")[0]
_NOT_FOLLOWED = frozenset(
    f"{_PACKAGE}{module}"
    for module in (
        "", ".errors", ".gpu.device", ".gpu.specs", ".gpu.machine_code",
        *(f".attention.{room}" for room in ("inputs", "plan", "prepare", "problem", "reference")),
        *(f".attention.{room}" for room in ("cache_contract", "cache_problem", "cache_reference")),
        *(f".attention.{room}" for room in ("decode_plan", "decode_prepare", "packed")),
        ".attention.gradients",  # of calls that record nothing it decides nothing
    )
)  # fmt: skip
# Nor do rivals call ours.
_NOT_FOLLOWED_OF_RIVALS = _NOT_FOLLOWED | {f"{_PACKAGE}.attention.api", f"{_PACKAGE}.attention.cache_api"}
_IN_PROSE = ("also_called",)  # what decides nothing of a rival


def can_be_told() -> bool:
    """Return whether kernels can be read at all: Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def subject_code(arch: int, launches: Iterable[Launch], host: tuple[str, ...]) -> str | None:
    """Return the hash of a call of ours; None where something cannot be followed.

    Args:
        arch: 90 for sm_90.
        launches: of the plan for the problem as the call describes it.
        host: the functions from which the host's part is followed, ``module:name``.
    """
    from ..gpu.fingerprint import fingerprint, host_code

    try:
        return fingerprint(arch, launches, {"host": host_code(host, _NOT_FOLLOWED)})
    except UntraceableError:
        return None


def rival_code(rival: Any, problem: Mapping[str, Any], gpu: GpuSpec, host: tuple[str, ...]) -> str | None:
    """Return the hash of how a rival is called; None where something cannot be followed.

    What the rival's package runs is not in it: a record names its version and the kernels that ran.

    Args:
        rival: the rival.
        problem: what it reads of the problem, as plain values.
        gpu: where it runs.
        host: what makes its inputs, and binds them.
    """
    from ..gpu.fingerprint import digest, host_code

    kind = type(rival)
    roots = (f"{kind.__module__}:{kind.__qualname__}", *host)
    fields = {
        name: value if value is None or isinstance(value, (str, int, float, tuple)) else str(value)
        for name, value in vars(rival).items()
        if name not in _IN_PROSE
    }
    try:
        host_part = host_code(roots, _NOT_FOLLOWED_OF_RIVALS)
        return digest({"arch": gpu.arch, "rival": fields, "problem": dict(problem), "host": host_part})
    except UntraceableError:
        return None
