"""Words for readers that more than one file needs."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. ``1 case``, ``13 cases``, ``3 processes``, ``2 batches`` and ``2 studies``."""
    if count != 1 and noun.endswith("dy"):
        return f"{count} {noun[:-1]}ies"
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count} {noun}{ending}"


def as_sentence(text: str) -> str:
    """Return a text that begins with a capital letter and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
