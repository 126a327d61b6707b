"""What decides, in one hash, what a GPU runs for a call of attention, ours or a rival's: see ``gpu/call_code.py``.

Every operator of attention has its fingerprints from the two functions here, so all are under the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..gpu import call_code
from ..gpu.device import gpu_of
from ..gpu.specs import GpuSpec
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
        *(f".attention.{room}" for room in ("decode_config", "decode_hopper_plan", "decode_plan", "decode_prepare")),
        ".attention.packed",
        *(f".attention.{room}" for room in ("features_plan", "features_prepare")),
        ".attention.gradients",  # of calls that record nothing it decides nothing
    )
)  # fmt: skip
# Of these the following run at each call, and not only where a call of its kind is prepared: wall time has them in it.
RUN_AT_EACH_CALL = frozenset((
    "__init__.py", "attention/gradients.py", "attention/inputs.py", "attention/refusals.py", "gpu/device.py",
    "gpu/refusals.py",
))  # fmt: skip
RUN_AT_EACH_CALL_WITH_FEATURES = RUN_AT_EACH_CALL | {"attention/problem.py"}  # the checks of features
# Of gradients what makes them decides, and what describes, plans and prepares them does not.
NOT_FOLLOWED_OF_STEPS = (NOT_FOLLOWED - {f"{_PACKAGE}.attention.gradients"}) | {
    f"{_PACKAGE}.attention.backward_{room}" for room in ("hopper_plan", "inputs", "plan", "prepare", "problem", "sm90")
}
# Gradients alone are given what the reference makes of the inputs.
NOT_FOLLOWED_OF_GRADIENTS = NOT_FOLLOWED_OF_STEPS - {f"{_PACKAGE}.attention.reference"}
# Nor do rivals call ours.
_NOT_FOLLOWED_OF_RIVALS = NOT_FOLLOWED | {f"{_PACKAGE}.attention.api", f"{_PACKAGE}.attention.cache_api"}
_OF_KERNELS = frozenset(
    f"{_PACKAGE}.attention.{module}"
    for module in (
        "append_triton", "decode_gluon_sm90", "decode_triton", "forward_gluon_sm90", "forward_short_gluon",
        "forward_triton", "merge_triton", "forward_features_gluon_sm90", "sequences_triton",
        "backward_192_gluon_sm90", "backward_gluon_sm90", "backward_passes_triton", "backward_q_triton",
        "backward_triton", "backward_wide_gluon_sm90",
    )
)  # fmt: skip


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
    """Return the hash of a call of ours, as ``call_code`` does; None where something cannot be followed."""
    if asked_gpu is not gpu_of:
        return None
    return call_code.subject_code(
        operator, entry, arch, launches, planned, not_followed=not_followed, of_kernels=_OF_KERNELS, told=told
    )


def rival_code(operator: Any, rival: Any, problem: Mapping[str, Any], gpu: GpuSpec) -> str | None:
    """Return the hash of how a rival is called, as ``call_code`` does; None where something cannot be followed."""
    return call_code.rival_code(operator, rival, problem, gpu, not_followed=_NOT_FOLLOWED_OF_RIVALS)
