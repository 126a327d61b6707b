"""How times are taken, as one hash of the source that takes them: another method may give other times of the same code.

What is written into records, and what reads them, is not in it: a record holds the settings of its run, and verdicts
are made anew from its samples.
"""

from __future__ import annotations

import functools
import hashlib
import json

from ..gpu.dependencies import UntraceableError, trace

_PACKAGE = __package__.rpartition(".")[0]
_ROOTS = tuple(
    f"{_PACKAGE}.{root}"
    for root in (
        "gpu.device:gpu_of", "proof.gpu_tasks:open_gpu", "proof.rounds:measure_case",
        "proof.gates.speed:_all_steps", "proof.gates.speed:pool_rounds",  # how many processes, and what of each
    )
)  # fmt: skip
_NOT_FOLLOWED = frozenset(
    f"{_PACKAGE}.{module}"
    for module in (
        "errors", "gpu.specs",
        *(f"proof.{room}" for room in ("evidence", "isolation", "nvml", "operator", "subject", "worker")),
        *(f"proof.{room}" for room in ("gates.run", "judge", "statistics", "words")),
    )
)  # fmt: skip

# Of the records that do not say theirs: the one with which the last of them was made.
UNRECORDED = "6311de3476d61a6f78eaf0edc5d860b84bbb7cad997aae08c1dd4a5b3f7de834"


@functools.cache
def method_code() -> str:
    """Return the SHA-256 of the source, comments and format aside; an empty text where it cannot be followed."""
    try:
        found = trace(_ROOTS, _NOT_FOLLOWED)
    except UntraceableError:
        return ""
    return hashlib.sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()
