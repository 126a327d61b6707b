"""What decides, in one hash, what a GPU runs for a call of ours or of a rival: see ``gpu/fingerprint.py``.

The host's part is the source of what lies between a call and its launches. What only describes the call, plans it or
prepares its kernels is left out: the outcome of that, kernels, constants, grids and scalars, is in the hash itself.
So the call is described by the very functions that describe it on a GPU, and there is no hash where these could come
to another outcome there, or where importing the package changes more than its own names: see ``gpu/untold.py``.

Every operator of attention has its fingerprints from the two functions here, so all are under the same rules.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..gpu.dependencies import UntraceableError
from ..gpu.device import gpu_of
from ..gpu.specs import GpuSpec
from ..gpu.untold import acts_at_import, asks_the_machine, looks_up
from .inputs import gpu_of as asked_gpu

if TYPE_CHECKING:
    from ..gpu.fingerprint import Launch

_PACKAGE = __package__.rpartition(".")[0]
NOT_FOLLOWED = frozenset(
    f"{_PACKAGE}{module}"
    for module in (
        "", ".errors", ".gpu.device", ".gpu.specs", ".gpu.machine_code",
        *(f".attention.{room}" for room in ("inputs", "plan", "prepare", "problem", "reference")),
        *(f".attention.{room}" for room in ("cache_contract", "cache_problem", "cache_reference")),
        *(f".attention.{room}" for room in ("decode_plan", "decode_prepare", "packed")),
        *(f".attention.{room}" for room in ("features_plan", "features_prepare")),
        ".attention.gradients",  # of calls that record nothing it decides nothing
    )
)  # fmt: skip
# Of these the following run at each call, and not only where a call of its kind is prepared: wall time has them in it.
RUN_AT_EACH_CALL = frozenset(("__init__.py", "attention/gradients.py", "attention/inputs.py", "gpu/device.py"))
RUN_AT_EACH_CALL_WITH_FEATURES = RUN_AT_EACH_CALL | {"attention/problem.py"}  # the checks of features
# Of gradients what makes them decides, and what describes, plans and prepares them does not. Not so backward_sm90: it
# prepares, and says besides which tensors a kernel is given.
NOT_FOLLOWED_OF_STEPS = (NOT_FOLLOWED - {f"{_PACKAGE}.attention.gradients"}) | {
    f"{_PACKAGE}.attention.{room}"
    for room in ("backward_hopper_plan", "backward_plan", "backward_prepare", "backward_problem")
}
# Gradients alone are given what the reference makes of the inputs.
NOT_FOLLOWED_OF_GRADIENTS = NOT_FOLLOWED_OF_STEPS - {f"{_PACKAGE}.attention.reference"}
# Nor do rivals call ours.
_NOT_FOLLOWED_OF_RIVALS = NOT_FOLLOWED | {f"{_PACKAGE}.attention.api", f"{_PACKAGE}.attention.cache_api"}
_IN_PROSE = ("also_called",)  # what decides nothing of a rival
_OF_KERNELS = frozenset(
    f"{_PACKAGE}.attention.{module}"
    for module in (
        "append_triton", "decode_triton", "forward_gluon_sm90", "forward_short_gluon", "forward_triton", "merge_triton",
        "forward_features_gluon_sm90", "sequences_triton",
        "backward_gluon_sm90", "backward_passes_triton", "backward_q_triton", "backward_triton",
        "backward_wide_gluon_sm90",
    )
)  # fmt: skip
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
    not_followed: frozenset[str] = NOT_FOLLOWED,
    told: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the hash of a call of ours; None where something cannot be followed.

    Args:
        operator: that makes the inputs and binds the call.
        entry: what is called, ``module:name``.
        arch: 90 for sm_90.
        launches: of the plan for the problem as the call describes it.
        planned: the functions whose outcome ``launches`` are.
        not_followed: modules of the host that only describe, plan and prepare such a call.
        told: what the inputs hold of the problem that ``launches`` do not show, as plain values.
    """
    from ..gpu.fingerprint import fingerprint, host_code

    makers = tuple(f"{each.__module__}:{each.__name__}" for each in planned)
    try:
        host = entry, *_inputs_of(operator)
        if asked_gpu is not gpu_of or acts_at_import(_PACKAGE):
            return None
        if asks_the_machine(makers, _ASKING, _OF_KERNELS) or looks_up(host, not_followed):
            return None
        launches = tuple(launches)
        kernels = {launch.source.function.fn for launch in launches}
        if any(looks_up((f"{kernel.__module__}:{kernel.__name__}",)) for kernel in kernels):
            return None
        return fingerprint(arch, launches, {"host": host_code(host, not_followed), **(told or {})})
    except UntraceableError:
        return None


def rival_code(operator: Any, rival: Any, problem: Mapping[str, Any], gpu: GpuSpec) -> str | None:
    """Return the hash of how a rival is called; None where something cannot be followed.

    What the rival's package runs is not in it: a record names its version and the kernels that ran.

    Args:
        operator: that makes the inputs and binds the call.
        rival: the rival.
        problem: what it reads of the problem, as plain values.
        gpu: where it runs.
    """
    from ..gpu.fingerprint import digest, host_code

    kind = type(rival)
    fields = {
        name: value if value is None or isinstance(value, (str, int, float, tuple)) else str(value)
        for name, value in vars(rival).items()
        if name not in _IN_PROSE
    }
    try:
        roots = (f"{kind.__module__}:{kind.__qualname__}", *_inputs_of(operator))
        if looks_up(roots, _NOT_FOLLOWED_OF_RIVALS):
            return None
        host_part = host_code(roots, _NOT_FOLLOWED_OF_RIVALS)
        return digest({"arch": gpu.arch, "rival": fields, "problem": dict(problem), "host": host_part})
    except UntraceableError:
        return None
