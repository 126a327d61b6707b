"""Processes that a test starts: what they can import, and whether they are still there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def python_path(*first: Path) -> str:
    """Return a ``PYTHONPATH`` with these folders first, and everything after that this process imports from.

    Packages may lie in a folder that only ``PYTHONPATH`` names, and it may name folders relative to another one.
    """
    return os.pathsep.join([*map(str, first), *(entry for entry in sys.path if entry)])


def heed_signals() -> None:
    """Let a process that a test starts heed signals, which a shell ignores in what it runs in the background.

    For ``preexec_fn`` of ``subprocess``.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


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
