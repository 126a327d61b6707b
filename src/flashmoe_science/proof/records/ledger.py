"""The ledger of a store: what runs took of a GPU, and costs entered by hand, a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from ...errors import EvidenceError
from .evidence import GATE_NAMES, GateName, Record
from .files import append_shared, read_shared

GPU_GATES: tuple[GateName, ...] = ("launch", "correct", "quick", "bench")


@dataclass(frozen=True)
class Entry:
    """One row of the ledger: what a gate took of a GPU, or what was entered by hand."""

    at: str  # ISO 8601 in UTC
    run: str  # "" for what was entered by hand
    gate: str
    subject: str
    suite: str
    gpu: str
    gpu_seconds: float
    dollars_per_hour: float | None = None  # what it was booked at; None: the rates of whoever asks hold
    dollars: float | None = None  # what was entered by hand
    note: str = ""


class Ledger:
    """A file that only grows: of several lines about one gate of one run, the last one holds.

    Processes that share a store book one after another.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[Entry]:
        """Return the rows, the oldest first. Raises ``EvidenceError`` where a line is none."""
        try:
            return self._parsed(read_shared(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EvidenceError(f"{self._path}: cannot be read: {error}") from error

    def _parsed(self, raw: bytes) -> list[Entry]:
        rows: dict[tuple[str, ...], Entry] = {}
        for number, line in enumerate(raw.splitlines(), 1):
            try:
                entry = Entry(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise EvidenceError(f"{self._path}:{number}: is no row of a ledger: {error}") from error
            rows[(entry.run, entry.gate) if entry.run else (str(number),)] = entry
        held = [entry for entry in rows.values() if entry.gpu_seconds or entry.dollars is not None]
        return sorted(held, key=lambda entry: (entry.at, entry.run, entry.gate))

    def add(self, entries: Sequence[Entry]) -> None:
        """Append rows. One that is booked without a rate keeps the rate of the row that it replaces."""

        def more(raw: bytes) -> bytes:
            known = {(entry.run, entry.gate): entry for entry in self._parsed(raw) if entry.run}
            new = []
            for entry in entries:
                before = known.get((entry.run, entry.gate))
                rate = entry.dollars_per_hour
                if before is not None and rate is None:
                    rate = before.dollars_per_hour
                priced = replace(entry, dollars_per_hour=rate)
                if priced != before:
                    new.append(json.dumps(asdict(priced)) + "\n")
            return "".join(new).encode()

        append_shared(self._path, more)

    def book_gates(self, record: Record, dollars_per_hour: float | None) -> None:
        """Book the gates of a run. A gate that an earlier booking had, and the run has no more, is taken back."""
        entries = entries_of(record, dollars_per_hour)
        kept = {entry.gate for entry in entries}
        gone = [
            replace(entry, gpu_seconds=0.0)
            for entry in self.entries()
            if entry.run == record.id and entry.gate in GATE_NAMES and entry.gate not in kept
        ]
        self.add([*entries, *gone])


def entries_of(record: Record, dollars_per_hour: float | None = None) -> list[Entry]:
    """Return a row for every gate of a run that held a GPU."""
    at = as_text(record.created_at)
    return [Entry(at, record.id, gate, *record.kind, s, dollars_per_hour) for gate, s in paid_gates(record).items()]


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
