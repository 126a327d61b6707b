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

# Methods that take the same times of the same code, oldest first, each with the reason why it takes those of the one
# before. Whoever edits what takes times writes the new hash here (a test asks for it): below the others with a reason,
# if no time, no order and no check of a call that is timed is another; else alone, and all claims are stale.
ALIKE: dict[str, str] = {
    UNRECORDED: "the first that is known",
    "035b452886401446a17c49dfad34e97bf52eb9937f9cc01cbe1b2f08a9fb5eba": (
        "an answer may be several tensors, each checked by itself; of one tensor all is as before"
    ),
    "cb7121b191addf8d35abe92b34af21fe581f15317a0ea5433a6ec5305307bb1f": (
        "who asks for the GPU of a tensor leaves its thread with a CUDA context, which a thread that times has anyway"
    ),
    "919ac0c13c4499f0111dc466f20a667a384a1247c84db8561fca11cab7e2a7eb": (
        "who names two outputs alike, or one by nothing, is refused before anything is timed; and that context is of"
        " the tensor's GPU, should there be several"
    ),
    "d5d4a40b17a86fa41d4b5aba153a8f35fafede29703c017eeb1bc8783fbfbb42": (
        "what the profiler recorded is read without the tree that PyTorch made of it between two recordings, while"
        " nothing is timed"
    ),
    "870f5bd0c9250874dbb29c3d24a6fc8f0e1e92db376abe1913caef781fdbaac1": (
        "a warning of PyTorch about what is recorded is not shown"
    ),
    "76bbb7038bea0a5a3ec9d58f3907e9518c498760d4a0e4ba611820bd6c29b768": (
        "of outputs so large that half of a GPU's free memory does not hold eight of each, fewer are poisoned before a"
        " call that is checked; no record before this had any"
    ),
    "fdde8b4a3604ad494b249c195e7078507f65329aaff157a766bafdfb6a665da7": (
        "the largest error of an answer is found part by part, the same number; and how many blocks of an output are"
        " poisoned goes by its own size"
    ),
}


@functools.cache
def method_code() -> str:
    """Return the SHA-256 of the source, comments and format aside; an empty text where it cannot be followed."""
    try:
        found = trace(_ROOTS, _NOT_FOLLOWED)
    except UntraceableError:
        return ""
    return hashlib.sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()


def takes_alike(recorded: str) -> bool:
    """Return whether a record's method, by its hash, takes the times that the one here takes."""
    before, now = recorded or UNRECORDED, method_code()
    return now != "" and (before == now or (before in ALIKE and now in ALIKE))
