"""What runs took of a GPU by their records, and the ledger: costs that no record knows, a line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from ...errors import EvidenceError
from .evidence import GATE_NAMES, GateName, Record
from .files import append_shared, read_shared

GPU_GATES: tuple[GateName, ...] = ("launch", "correct", "quick", "bench")


@dataclass(frozen=True)
class Entry:
    """One cost: what a gate or a borrowed machine took of a GPU, or what was entered by hand."""

    at: str  # ISO 8601 in UTC
    run: str  # "" for what was entered by hand
    gate: str
    subject: str
    suite: str
    gpu: str
    gpu_seconds: float
    dollars_per_hour: float | None = None  # None: the rates of whoever asks hold
    dollars: float | None = None  # what was entered by hand
    note: str = ""


def read_entries(path: Path) -> list[Entry]:
    """Return the rows of a ledger, the oldest first. Raises ``EvidenceError`` where a line is none."""
    try:
        lines = read_shared(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(Entry(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise EvidenceError(f"{path}:{number}: is no row of a ledger: {error}") from error
    # Earlier versions entered the gates of runs too, which the records have.
    return sorted((row for row in rows if row.gate not in GATE_NAMES), key=lambda row: row.at)


def append_entry(path: Path, entry: Entry) -> None:
    """Append a row to a ledger. Processes that share a store take turns."""
    append_shared(path, lambda _: (json.dumps(asdict(entry)) + "\n").encode())


def paid_gates(record: Record) -> dict[GateName, float]:
    """Return for how long each gate held a GPU, if it did. A comparison has the gates of both revisions."""
    seconds: dict[GateName, float] = {}
    for gate in [*record.gates, *(record.compared.a.gates if record.compared else [])]:
        if gate.gpu_seconds > 0:
            seconds[gate.name] = seconds.get(gate.name, 0.0) + gate.gpu_seconds
    return seconds


def dollars(gpu_seconds: float, dollars_per_hour: float) -> float:
    """Return the price of so much time."""
    return gpu_seconds / 3600 * dollars_per_hour


def as_text(moment: datetime) -> str:
    """Return a moment as listings and ledgers have it: ISO 8601 in UTC, whose order is that of time."""
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc).isoformat(timespec="seconds")
