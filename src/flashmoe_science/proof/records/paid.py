"""How long the gates of runs held a GPU, by their records."""

from __future__ import annotations

from datetime import datetime, timezone

from .evidence import GateName, Record

GPU_GATES: tuple[GateName, ...] = ("launch", "correct", "quick", "bench")


def paid_gates(record: Record) -> dict[GateName, float]:
    """Return for how long each gate held a GPU, if it did. A comparison has the gates of both revisions."""
    seconds: dict[GateName, float] = {}
    for gate in [*record.gates, *(record.compared.a.gates if record.compared else [])]:
        if gate.gpu_seconds > 0:
            seconds[gate.name] = seconds.get(gate.name, 0.0) + gate.gpu_seconds
    return seconds


def as_text(moment: datetime) -> str:
    """Return a moment as listings and ledgers have it: ISO 8601 in UTC, whose order is that of time."""
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc).isoformat(timespec="seconds")
