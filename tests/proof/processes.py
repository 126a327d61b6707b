"""Whether a process that a test has started is still there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether ``condition`` came to hold within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def wait_until_dead(pid: int, seconds: float = 30.0) -> bool:
    """Return whether a process came to its end within so many seconds."""
    return wait_for(lambda: not is_alive(pid), seconds)
