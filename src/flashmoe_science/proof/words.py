"""Words for the terminal that more than one file needs."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. ``1 case``, ``13 cases`` and ``3 processes``."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"
