"""Where runs are kept and found again: a database (SQLite by default), and the evidence folder of a repository.

The document is the record itself, as JSON; the columns beside it only serve to list and filter.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ..errors import EvidenceError
from .cost import Entry, paid_gates
from .database import LEDGER, RUNS, Database
from .evidence import (
    GATE_NAMES,
    GateStatus,
    Record,
    documents_in,
    is_document,
    name_of,
    open_document,
    parse_record,
    read_record,
    read_text,
    record_text,
)

_BEGIN_BYTES = 1000
_ID_AT_THE_BEGIN = re.compile(rb'\s*\{\s*"schema_version":\s*\d+,\s*"id":\s*"([A-Za-z0-9_.@-]+)"')

_LISTED = [column for column in RUNS.columns if column.name != "document"]


@dataclass(frozen=True)
class RunSummary:
    """One line of a listing."""

    id: str
    created_at: str  # ISO 8601 in UTC
    subject: str
    operator: str
    suite: str
    gpu: str  # "" for none
    commit: str
    complete: bool
    result: str  # e.g. "7 of 7 gates passed", "launch failed"
    cases: int
    measured: int  # cases with times
    origin: str = "store"  # or the file, relative to the repository


def summarize(record: Record, *, origin: str = "store") -> RunSummary:
    """Return what a listing says of ``record``."""
    return RunSummary(
        id=record.id,
        created_at=_as_text(record.created_at),
        subject=record.subject.name,
        operator=record.subject.operator,
        suite=record.suite,
        gpu=record.environment.gpu.name if record.environment.gpu else "",
        commit=record.tree.commit or "",
        complete=record.complete,
        result=_result(record),
        cases=len(record.cases),
        measured=sum(bool(case.rounds) for case in record.cases),
        origin=origin,
    )


def _result(record: Record) -> str:
    failed = next((gate.name for gate in record.gates if gate.status is GateStatus.FAILED), None)
    if failed is not None:
        return f"{failed} failed"
    passed = sum(gate.status is GateStatus.PASSED for gate in record.gates)
    return f"{passed} of {len(record.gates)} gates passed"


def _as_text(moment: datetime) -> str:
    """Return a moment as the store keeps it. One without a zone is UTC."""
    moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc).isoformat(timespec="seconds")


def as_url(named: str) -> str:
    """Return the URL of a store that is named by one, or by the path of an SQLite file."""
    return named if "://" in named else f"sqlite:///{Path(named).expanduser()}"


def default_url() -> str:
    """Return the store named by ``FLASHMOE_STORE`` (a path or a URL), or the one of this user."""
    named = os.environ.get("FLASHMOE_STORE", "")
    if named:
        return as_url(named)
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification: a relative path is invalid and has to be ignored.
    folder = Path(data_home) if Path(data_home).is_absolute() else Path.home() / ".local" / "share"
    return f"sqlite:///{folder / 'flashmoe' / 'runs.sqlite'}"


class Store:
    """A database of runs.

    Args:
        url: The path of an SQLite file, or the URL of an SQLite or PostgreSQL database. Default: ``default_url()``.

    Reading never creates or upgrades anything: a database that does not exist has no runs.
    """

    def __init__(self, url: str | None = None) -> None:
        self._database = Database(as_url(url) if url else default_url())

    def __str__(self) -> str:
        return str(self._database)  # without a password

    def save(self, record: Record, *, text: str | None = None, dollars_per_hour: float | None = None) -> None:
        """Keep ``record`` and book what its gates took of a GPU. One with the same id is replaced: a run grows.

        Args:
            record: The run.
            text: Of its file, which ``text()`` gives back. Default: what ``write_record`` writes.
            dollars_per_hour: What its GPU costs. Default: what was booked of this run before, if anything.
        """
        summary = summarize(record)
        row = {column.name: getattr(summary, column.name) for column in _LISTED}
        entries = _entries(record, summary, dollars_per_hour)
        with self._database.writing() as connection:
            self._database.insert(connection, RUNS, {**row, "document": text or record_text(record)})
            ids = [entry["id"] for entry in entries]
            of_gates = sa.and_(LEDGER.c.run == record.id, LEDGER.c.gate.in_(GATE_NAMES))  # what a run grows by
            connection.execute(sa.delete(LEDGER).where(of_gates, LEDGER.c.id.not_in(ids)))
            for entry in entries:
                self._database.insert(connection, LEDGER, entry, keep=["dollars_per_hour"])

    def ids(self, prefix: str = "") -> list[str]:
        """Return the ids that start with ``prefix``, newest first."""
        query = sa.select(RUNS.c.id).where(RUNS.c.id.startswith(prefix, autoescape=True))
        with self._database.reading() as connection:
            if connection is None:
                return []
            return list(connection.scalars(query.order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc())))

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the JSON file ``key``.

        Raises ``EvidenceError`` when there is none, or more than one.
        """
        return Archive(self, repository=None).load(key)

    def document(self, run_id: str) -> Record:
        """Return the run with exactly this id."""
        return parse_record(self._document(run_id), f"run {run_id} in {self}")

    def text(self, run_id: str) -> str:
        """Return the text of the file that the run with exactly this id has, byte for byte."""
        document = self._document(run_id)
        # A store of the first schema holds records without line breaks, which a file has.
        return document if document.endswith("\n") else record_text(self.document(run_id))

    def _document(self, run_id: str) -> str:
        with self._database.reading() as connection:
            query = sa.select(RUNS.c.document).where(RUNS.c.id == run_id)
            document = connection.scalar(query) if connection is not None else None
        if document is None:
            raise EvidenceError(f"there is no run {run_id!r} in {self}")
        return str(document)

    def runs(
        self,
        *,
        subject: str = "",
        suite: str = "",
        gpu: str = "",
        since: datetime | None = None,
        limit: int | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first. ``gpu`` matches a part of the name, the others the whole of it."""
        query = sa.select(*_LISTED).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()).limit(limit)
        for column, value in ((RUNS.c.subject, subject), (RUNS.c.suite, suite)):
            query = query.where(column == value) if value else query
        if gpu:
            query = query.where(RUNS.c.gpu.icontains(gpu, autoescape=True))
        if since:
            query = query.where(RUNS.c.created_at >= _as_text(since))
        with self._database.reading() as connection:
            return [RunSummary(**row) for row in connection.execute(query).mappings()] if connection is not None else []

    def ledger(self, *, since: datetime | None = None) -> list[Entry]:
        """Return the rows of the ledger, the oldest first. A store from before there was one is upgraded."""
        with self._database.reading() as connection:
            outdated = connection is not None and not sa.inspect(connection).has_table(LEDGER.name)
        if outdated:
            with self._database.writing():
                pass  # an upgrade books the runs that are there
        query = sa.select(*(column for column in LEDGER.c if column.name != "id")).order_by(LEDGER.c.at, LEDGER.c.id)
        if since:
            query = query.where(LEDGER.c.at >= _as_text(since))
        with self._database.reading() as connection:
            return [Entry(**row) for row in connection.execute(query).mappings()] if connection is not None else []

    def book(self, entry: Entry) -> None:
        """Book what held a GPU and is no gate of a run, e.g. a study. One of the same run and kind is replaced."""
        with self._database.writing() as connection:
            row = {"id": f"{entry.run}/{entry.gate}", **vars(entry)}
            self._database.insert(connection, LEDGER, row, keep=["dollars_per_hour"])

    def add_cost(self, amount: float, *, note: str, gpu: str = "", at: datetime | None = None) -> Entry:
        """Enter a cost by hand, in dollars."""
        moment = _as_text(at or datetime.now(timezone.utc))
        entry = Entry(moment, "", "", "", "", gpu, gpu_seconds=0.0, dollars=amount, note=note)
        with self._database.writing() as connection:
            self._database.insert(connection, LEDGER, {"id": f"by hand/{secrets.token_hex(8)}", **vars(entry)})
        return entry


def entries_of(record: Record) -> list[Entry]:
    """Return what a run would be booked with, at no rate."""
    rows = _entries(record, summarize(record), None)
    return [Entry(**{key: value for key, value in row.items() if key != "id"}) for row in rows]


def _entries(record: Record, summary: RunSummary, dollars_per_hour: float | None) -> list[dict[str, Any]]:
    """Return a row of the ledger for every gate that held a GPU."""
    about = {name: getattr(summary, name) for name in ("subject", "suite", "gpu")}
    about |= {"run": record.id, "at": summary.created_at, "dollars_per_hour": dollars_per_hour, "note": ""}
    return [
        {**about, "id": f"{record.id}/{name}", "gate": gate.name, "gpu_seconds": gate.gpu_seconds}
        for name, gate in paid_gates(record)
    ]


def find_repository(start: Path | None = None) -> Path | None:
    """Return the nearest folder, from ``start`` (default: the current one) upwards, that holds claims or evidence."""
    start = (start or Path.cwd()).resolve()
    return next((f for f in (start, *start.parents) if (f / "claims").is_dir() or (f / "evidence").is_dir()), None)


def evidence_files(repository: Path) -> dict[str, Path]:
    """Return the records in the evidence folder of ``repository`` by id. Other JSON documents there are left out."""
    return record_files(repository / "evidence")


def record_files(folder: Path) -> dict[str, Path]:
    """Return the records in ``folder`` by id. Other JSON documents there are left out."""
    found = {}
    for path in documents_in(folder):
        if (run_id := _run_id(path)) is not None:
            found[run_id] = path
    return found


def _run_id(path: Path) -> str | None:
    """Return the id of the run in a file, or None where it holds another document.

    A record begins with its schema and its id, so its samples need not be read.
    """
    try:
        with path.open("rb") as plain, open_document(plain) as file:
            begin = file.read(_BEGIN_BYTES)
            if found := _ID_AT_THE_BEGIN.match(begin):
                return found[1].decode()
            document = json.loads(begin + file.read())
    except (OSError, EOFError, zlib.error, ValueError):
        return name_of(path)  # reading it as a record says what is wrong
    return str(document.get("id", name_of(path))) if _has_gates(document) else None


def is_record(text: str) -> bool:
    """Return whether ``text`` is meant as a record of a run. What is no JSON at all may be one that broke."""
    try:
        return _has_gates(json.loads(text))
    except ValueError:
        return True


def _has_gates(document: object) -> bool:
    """Return whether a JSON document is of a run: the GPU tests leave documents of their own, which have no gates."""
    return isinstance(document, dict) and "gates" in document


def is_path(key: str) -> bool:
    """Return whether ``key`` names a run by its file."""
    return os.sep in key or is_document(key)


class Archive:
    """All runs that can be seen from here: those of a store, and those in the evidence folder of a repository."""

    def __init__(self, store: Store, repository: Path | None) -> None:
        self.store = store
        self.repository = repository

    def _files(self, prefix: str = "") -> dict[str, Path]:
        files = evidence_files(self.repository) if self.repository else {}
        return {run_id: path for run_id, path in files.items() if run_id.startswith(prefix)}

    def has(self, key: str) -> bool:
        """Return whether the id of a run is ``key`` or starts with it, or ``key`` is a file."""
        return Path(key).is_file() if is_path(key) else bool(self._files(key) or self.store.ids(key))

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the JSON file ``key``."""
        if is_path(key):
            return read_record(Path(key))
        path, run_id = self._find(key)
        return read_record(path) if path else self.store.document(run_id)

    def text(self, key: str) -> str:
        """Return the text of that run's file."""
        if is_path(key):
            return read_text(Path(key))
        path, run_id = self._find(key)
        return read_text(path) if path else self.store.text(run_id)

    def _find(self, key: str) -> tuple[Path | None, str]:
        """Return the file, where there is one, and the id of the run whose id is ``key`` or starts with it."""
        files, stored = self._files(key), self.store.ids(key)
        found = [key] if key in files or key in stored else sorted({*files, *stored}, reverse=True)
        if len(found) > 1:
            shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise EvidenceError(f"{key!r} begins {len(found)} ids: {shown}", hint="give more of the id")
        if not found:
            raise EvidenceError(f"there is no run {key!r}", hint=self._nearest(key))
        # The file is what others see; the store's copy of the same run can only be older or equal.
        return files.get(found[0]), found[0]

    def _nearest(self, key: str) -> str:
        near = difflib.get_close_matches(key, [*self._files(), *self.store.ids()], n=1, cutoff=0.4)
        return f"did you mean {near[0]}?" if near else "flashmoe runs lists them all"

    def only_in_files(self, *, on_trouble: Callable[[EvidenceError], None]) -> list[Record]:
        """Return the runs of the evidence folder that the store does not have, the oldest first."""
        stored = set(self.store.ids())
        found = []
        for run_id, path in self._files().items():
            if run_id not in stored:
                try:
                    found.append(read_record(path))
                except EvidenceError as error:
                    on_trouble(error)
        return sorted(found, key=lambda record: (record.created_at, record.id))

    def runs(
        self,
        *,
        subject: str = "",
        suite: str = "",
        gpu: str = "",
        since: datetime | None = None,
        on_trouble: Callable[[EvidenceError], None] | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first. A file that cannot be read goes to ``on_trouble``, or is raised."""
        found = {run.id: run for run in self.store.runs(subject=subject, suite=suite, gpu=gpu, since=since)}
        for path in self._files().values():
            try:
                run = summarize(read_record(path), origin=f"evidence/{path.name}")
            except EvidenceError as error:
                if on_trouble is None:
                    raise
                on_trouble(error)
                continue
            wanted = subject in ("", run.subject) and suite in ("", run.suite) and gpu.lower() in run.gpu.lower()
            if wanted and (since is None or run.created_at >= _as_text(since)):
                found[run.id] = run
        return sorted(found.values(), key=lambda run: (run.created_at, run.id), reverse=True)


def as_json(runs: Iterable[RunSummary]) -> list[dict[str, Any]]:
    """Return a listing as plain JSON values."""
    return [dict(vars(run)) for run in runs]
