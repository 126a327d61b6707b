"""The ledger of runs begun: a line of JSON for each run that was about to take its first sample, kept or not.

Each line holds the hash of the line before it, so a line that is changed or taken out breaks the chain. Lines at the
end can be taken out unseen, unless a record of one of these runs is kept: a record names its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import EvidenceError
from .evidence import Begun, Record, TimeKind
from .files import append_shared, read_shared
from .ledger import as_text

FIRST = "0" * 64  # what the first line has in place of a hash


@dataclass(frozen=True)
class BegunRun:
    """One line: what a run was about to measure."""

    previous: str  # SHA-256 of the line before
    at: str  # ISO 8601 in UTC
    run: str
    subject: str
    suite: str
    gpu: str
    seed: int | None
    cases: Sequence[str]
    baselines: Sequence[str]
    times: Sequence[TimeKind]
    processes: int
    rounds: int
    expected: float | None  # speedup over the first baseline
    factors: Sequence[float]  # of the claims that are about such a run
    resumes: str = ""  # the run that it goes on with, which counts already

    def is_like(self, record: Record) -> bool:
        """Return whether it is of the kind of ``record``: its subject, suite and GPU."""
        return (self.subject, self.suite, self.gpu) == record.kind

    def difference(self, record: Record) -> str:
        """Return what ``record`` has otherwise than was entered before its first sample, or an empty text."""
        before = asdict(self)
        now = asdict(_entry(record, self.factors, self.previous))
        name = next((name for name in before if before[name] != now[name]), "")
        return f"{name}: {before[name]} before its first sample, and {now[name]} now" if name else ""


def count_alike(lines: Sequence[tuple[str, BegunRun]], record: Record) -> int:
    """Return how many runs of the kind of ``record`` were begun; one that goes on with another is not counted again."""
    return sum(run.is_like(record) and not run.resumes for _, run in lines)


class BegunLedger:
    """A file of such lines that only grows.

    Args:
        path: The file. Reading never creates it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[tuple[str, BegunRun]]:
        """Return the hash and the content of each line, the oldest first.

        Raises ``EvidenceError``: a line is none, or the chain is broken: the line is named.
        """
        try:
            return self._parsed(read_shared(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EvidenceError(f"{self._path}: cannot be read: {error.strerror}") from error

    def _parsed(self, raw: bytes) -> list[tuple[str, BegunRun]]:
        found: list[tuple[str, BegunRun]] = []
        previous = FIRST
        for number, line in enumerate(raw.splitlines(), 1):
            try:
                run = BegunRun(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise EvidenceError(f"{self._path}:{number}: is no run that began: {error}") from error
            if run.previous != previous:
                what = "does not follow the line before it: a line was changed or taken out"
                raise EvidenceError(f"{self._path}:{number}: {what}", hint="how many runs were begun is not known")
            previous = hashlib.sha256(line).hexdigest()
            found.append((previous, run))
        return found

    def begin(self, record: Record, factors: Sequence[float]) -> Begun:
        """Enter the run of ``record``, which takes its first sample next, and return what its record says of it."""
        begun: list[Begun] = []

        def more(raw: bytes) -> bytes:
            lines = self._parsed(raw)
            line = json.dumps(asdict(_entry(record, factors, lines[-1][0] if lines else FIRST))).encode()
            digest = hashlib.sha256(line).hexdigest()
            count = count_alike(lines, record) + (0 if record.resumed else 1)
            begun.append(Begun(ledger=lines[0][0] if lines else digest, line=digest, count=count))
            return line + b"\n"

        append_shared(self._path, more)
        return begun[0]


def _entry(record: Record, factors: Sequence[float], previous: str) -> BegunRun:
    settings = record.settings
    return BegunRun(
        previous=previous,
        at=as_text(record.created_at),
        run=record.id,
        subject=record.subject.name,
        suite=record.suite,
        gpu=record.environment.gpu_name,
        seed=settings.seed,
        cases=[case.name for case in record.cases],
        baselines=record.baselines,
        times=settings.times,
        processes=settings.processes,
        rounds=settings.rounds,
        expected=record.subject.expected_speedup,
        factors=list(factors),
        resumes=record.resumed[0].run if record.resumed else "",
    )
