"""The fingerprint of a call of ours, or of a rival: what every operator that has fingerprints makes them with.

The host's part is the source of what lies between a call and its launches, but for modules that only describe the
call, plan it or prepare its kernels: their outcome is in the hash itself. So the call is described by the very
functions that describe it on a GPU, and there is no hash where these could come to another outcome there, or where
importing the package changes more than its own names: see ``untold.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .dependencies import UntraceableError
from .specs import GpuSpec
from .untold import acts_at_import, asks_the_machine, looks_up

if TYPE_CHECKING:
    from .fingerprint import Launch

_PACKAGE = __package__.rpartition(".")[0]
_IN_PROSE = ("also_called",)  # what decides nothing of a rival
_ASKING = frozenset(f"{_PACKAGE}.gpu.{module}" for module in ("counters", "device", "launch"))  # the machine


def can_be_told() -> bool:
    """Return whether kernels can be read at all: Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _inputs_of(operator: Any) -> tuple[str, ...]:
    """Return the functions that make an operator's inputs and bind them, ``module:Class.name``.

    Raises:
        UntraceableError: the operator holds something, so its class does not say what it does.
    """
    if vars(operator):
        raise UntraceableError(f"{operator.name} has {', '.join(vars(operator))} of its own")
    here = f"{type(operator).__module__}:{type(operator).__qualname__}"
    return f"{here}.make_inputs", f"{here}.bind"


def subject_code(
    operator: Any,
    entry: str,
    arch: int,
    launches: Iterable[Launch],
    planned: Iterable[Callable[..., Any]],
    *,
    not_followed: frozenset[str],
    of_kernels: frozenset[str],
    told: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the hash of a call of ours; None where something cannot be followed.

    Args:
        operator: that makes the inputs and binds the call.
        entry: what is called, ``module:name``.
        arch: 90 for sm_90.
        launches: of the plan for the problem as the call describes it.
        planned: the functions whose outcome ``launches`` are, and ``told`` where planning decides it.
        not_followed: modules of the host that only describe, plan and prepare such a call.
        of_kernels: modules of kernels: planning, which imports them, runs nothing of them.
        told: what decides besides and ``launches`` do not show, as plain values.
    """
    from .fingerprint import fingerprint, host_code

    makers = tuple(f"{each.__module__}:{each.__name__}" for each in planned)
    try:
        host = entry, *_inputs_of(operator)
        if acts_at_import(_PACKAGE):
            return None
        if asks_the_machine(makers, _ASKING, of_kernels) or looks_up(host, not_followed):
            return None
        launches = tuple(launches)
        kernels = {launch.source.function.fn for launch in launches}
        if any(looks_up((f"{kernel.__module__}:{kernel.__name__}",)) for kernel in kernels):
            return None
        return fingerprint(arch, launches, {"host": host_code(host, not_followed), **(told or {})})
    except UntraceableError:
        return None


def rival_code(
    operator: Any, rival: Any, problem: Mapping[str, Any], gpu: GpuSpec, *, not_followed: frozenset[str]
) -> str | None:
    """Return the hash of how a rival is called; None where something cannot be followed.

    What the rival's package runs is not in it: a record names its version and the kernels that ran.

    Args:
        operator: that makes the inputs and binds the call.
        rival: the rival.
        problem: what it reads of the problem, as plain values.
        gpu: where it runs.
        not_followed: modules that only describe a problem, or that are ours and no rival calls.
    """
    from .fingerprint import digest, host_code

    try:
        fields, held = _fields_of(rival)
        roots = (*held, *_inputs_of(operator))
        if looks_up(roots, not_followed):
            return None
        host_part = host_code(roots, not_followed)
        return digest({"arch": gpu.arch, "rival": fields, "problem": dict(problem), "host": host_part})
    except UntraceableError:
        return None


def _fields_of(holder: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a rival holds, as plain values, and the code of it and of what it holds, ``module:name``."""
    kind = type(holder)
    fields: dict[str, Any] = {}
    roots = [f"{kind.__module__}:{kind.__qualname__}"]
    for name, value in vars(holder).items():
        if name in _IN_PROSE:
            continue
        if value is None or isinstance(value, (str, int, float, tuple)):
            fields[name] = value
        elif isinstance(value, FunctionType):
            fields[name] = f"{value.__module__}:{value.__qualname__}"
            roots.append(fields[name])
        elif type(value).__module__.startswith(f"{_PACKAGE}."):  # another rival
            fields[name], more = _fields_of(value)
            roots += more
        else:
            fields[name] = str(value)
    return fields, tuple(roots)
