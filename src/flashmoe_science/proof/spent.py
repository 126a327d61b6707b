"""Where the seconds of a worker process go: those of each part, without those of parts within it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

_seconds: dict[str, float] = {}
_within: list[float] = [0.0]  # seconds of finished parts inside of each part that is under way


@contextlib.contextmanager
def spending(part: str) -> Iterator[None]:
    """Count the seconds of the block, or of the function that this decorates, for ``part``."""
    begin = time.monotonic()
    _within.append(0.0)
    try:
        yield
    finally:
        whole = time.monotonic() - begin
        count(part, whole - _within.pop())
        _within[-1] += whole


def count(part: str, seconds: float) -> None:
    """Count seconds for ``part``."""
    _seconds[part] = _seconds.get(part, 0.0) + seconds


def spent() -> dict[str, float]:
    """Return the seconds of each part so far."""
    return dict(_seconds)


def sum_up(parts: Mapping[str, float], seconds: float) -> str:
    """Return in words where ``seconds`` went, the largest part first."""
    named = {**parts, "the rest": seconds - sum(parts.values())}
    shown = sorted(((name, value) for name, value in named.items() if value >= 0.05), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.1f} s" for name, value in shown)
