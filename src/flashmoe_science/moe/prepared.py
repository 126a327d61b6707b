"""Where a kernel's pointer leads: to a tensor by its name, or to an offset in bytes from its start."""

from __future__ import annotations


def within(tensor: str, offset_bytes: int) -> str:
    """Return the place so many bytes behind the begin of a tensor."""
    return f"{tensor}+{offset_bytes}" if offset_bytes else tensor


def place_of(within: str) -> tuple[str, int]:
    """Return a tensor's name and the bytes behind its begin."""
    name, _, offset = within.partition("+")
    return name, int(offset or 0)
