"""Names on the command line: an unknown one is refused, and the nearest one suggested."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import InputError
from ..gpu.specs import SPECS, GpuSpec, find_gpu


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise ``InputError`` when ``name`` is not one of ``known``."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise InputError(f"{what} must be one of {', '.join(known)}, got {name!r}", hint=hint)


def gpu_named(name: str) -> GpuSpec:
    """Return what is known of the GPU called ``name``. Raises ``InputError``."""
    try:
        return find_gpu(name)
    except InputError:
        check_name("gpu", name, SPECS)
        raise
