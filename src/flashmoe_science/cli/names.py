"""Names and dates on the command line: an unknown name is refused, and the nearest one suggested."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from ..errors import InputError
from ..gpu.specs import SPECS, GpuSpec, find_gpu
from ..proof.text import did_you_mean


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise ``InputError`` when ``name`` is not one of ``known``."""
    known = list(known)
    if name not in known:
        raise InputError(f"{what} must be one of {', '.join(known)}, got {name!r}", hint=did_you_mean(name, known))


def gpu_named(name: str) -> GpuSpec:
    """Return what is known of the GPU called ``name``. Raises ``InputError``."""
    try:
        return find_gpu(name)
    except InputError as error:
        # Spelling says nothing of another card: an L40S is no L4, and an H20 no H200.
        same = [known for known in SPECS if _letters(known) == _letters(name)]
        hint = f"did you mean {same[0]}?" if same else "no other is known: its limits and rates are in no table here"
        raise InputError(str(error), hint=hint) from error


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def moment_named(text: str, *, what: str = "since", now: datetime | None = None) -> datetime:
    """Return the moment that ``text`` names: a date, a date and time, or how long ago. Without a zone it is UTC.

    Raises ``InputError``.
    """
    now = now or datetime.now(timezone.utc)
    try:
        if ago := re.fullmatch(r"(\d+)([hdw])", text):
            unit = {"h": "hours", "d": "days", "w": "weeks"}[ago[2]]
            return now - timedelta(**{unit: int(ago[1])})
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 knows no Z
    except (ValueError, OverflowError) as error:
        hint = f"e.g. --{what} 2026-11-20, 2026-11-20T18:00, 7d, 12h or 2w"
        raise InputError(f"{what} must be a date or how long ago, got {text!r}", hint=hint) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
