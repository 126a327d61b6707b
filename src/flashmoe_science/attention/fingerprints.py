"""What decides, in one hash, what a GPU runs for a call of ours or of a rival: see ``gpu/fingerprint.py``.

The host's part is the source of what lies between a call and its launches. What only describes the call, plans it or
prepares its kernels is left out: the outcome of that, kernels, constants, grids and scalars, is in the hash itself.
So the call is described by the very functions that describe it on a GPU, and there is no hash where these could come
to another outcome there, or where importing the package changes more than its own names: see ``gpu/untold.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..gpu.dependencies import UntraceableError
from ..gpu.specs import GpuSpec
from ..gpu.untold import acts_at_import, asks_the_machine, looks_up

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
_OF_KERNELS = frozenset(
    f"{_PACKAGE}.attention.{module}"
    for module in (
        "append_triton", "decode_triton", "forward_gluon_sm90", "forward_short_gluon", "forward_triton", "merge_triton",
    )
)  # fmt: skip
_ASKING = frozenset(f"{_PACKAGE}.gpu.{module}" for module in ("counters", "device", "launch"))  # the machine


def can_be_told() -> bool:
    """Return whether kernels can be read at all: Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def inputs_of(operator: Any) -> tuple[str, ...]:
    """Return the functions that make an operator's inputs and bind them, ``module:Class.name``.

    Raises:
        UntraceableError: the operator holds something, so its class does not say what it does.
    """
    if vars(operator):
        raise UntraceableError(f"{operator.name} has {', '.join(vars(operator))} of its own")
    here = f"{type(operator).__module__}:{type(operator).__qualname__}"
    return f"{here}.make_inputs", f"{here}.bind"


def subject_code(arch: int, launches: Iterable[Launch], host: tuple[str, ...], planned: tuple[str, ...]) -> str | None:
    """Return the hash of a call of ours; None where something cannot be followed.

    Args:
        arch: 90 for sm_90.
        launches: of the plan for the problem as the call describes it.
        host: the functions from which the host's part is followed, ``module:name``.
        planned: those whose outcome ``launches`` are.
    """
    from ..gpu.fingerprint import fingerprint, host_code

    try:
        if acts_at_import(_PACKAGE) or asks_the_machine(planned, _ASKING, _OF_KERNELS) or looks_up(host, _NOT_FOLLOWED):
            return None
        launches = tuple(launches)
        kernels = {launch.source.function.fn for launch in launches}
        if any(looks_up((f"{kernel.__module__}:{kernel.__name__}",)) for kernel in kernels):
            return None
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
        if looks_up(roots, _NOT_FOLLOWED_OF_RIVALS):
            return None
        host_part = host_code(roots, _NOT_FOLLOWED_OF_RIVALS)
        return digest({"arch": gpu.arch, "rival": fields, "problem": dict(problem), "host": host_part})
    except UntraceableError:
        return None
