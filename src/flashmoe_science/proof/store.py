"""Where runs are kept and found again: a database (SQLite by default), and the evidence folder of a repository.

The document is the record itself, as JSON; the columns beside it only serve to list and filter.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ..errors import EvidenceError
from .evidence import GateStatus, Record, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator

_METADATA = sa.MetaData()

_RUNS = sa.Table(
    "runs",
    _METADATA,
    sa.Column("id", sa.String(200), primary_key=True),
    sa.Column("created_at", sa.String(40), nullable=False, index=True),  # ISO 8601 in UTC, so that text sorts as time
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("operator", sa.String(200), nullable=False),
    sa.Column("suite", sa.String(200), nullable=False),
    sa.Column("gpu", sa.String(200), nullable=False),  # "" for none
    sa.Column("commit", sa.String(64), nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("result", sa.String(200), nullable=False),
    sa.Column("cases", sa.Integer, nullable=False),
    sa.Column("measured", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
_LISTED = [column for column in _RUNS.columns if column.name != "document"]
_STORE_HINT = "set FLASHMOE_STORE to a file that you may write, or to an SQLAlchemy URL"


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
    created = record.created_at if record.created_at.tzinfo else record.created_at.replace(tzinfo=timezone.utc)
    return RunSummary(
        id=record.id,
        created_at=created.astimezone(timezone.utc).isoformat(timespec="seconds"),
        subject=record.subject.name,
        operator=record.subject.operator,
        suite=record.suite,
        gpu=record.environment.gpu.name if record.environment.gpu else "",
        commit=record.environment.commit or "",
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


def default_url() -> str:
    """Return the database named by ``FLASHMOE_STORE`` (a path or an SQLAlchemy URL), or the one of this user."""
    named = os.environ.get("FLASHMOE_STORE", "")
    if "://" in named:
        return named
    if named:
        return f"sqlite:///{Path(named).expanduser()}"
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification: a relative path is invalid and has to be ignored.
    folder = Path(data_home) if Path(data_home).is_absolute() else Path.home() / ".local" / "share"
    return f"sqlite:///{folder / 'flashmoe' / 'runs.sqlite'}"


class Store:
    """A database of runs.

    Args:
        url: An SQLAlchemy URL. Default: ``default_url()``.

    Reading never creates anything: a database that does not exist has no runs.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = url or default_url()
        try:
            self._engine = sa.create_engine(self.url)
        except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
            raise EvidenceError(f"run store {self.url!r} cannot be used: {error}", hint=_STORE_HINT) from error

    def __str__(self) -> str:
        return self._file or self._engine.url.render_as_string()  # hides a password

    @property
    def _file(self) -> str:
        """The SQLite file, or "" for other databases and for SQLite in memory."""
        url = self._engine.url
        in_file = url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:"
        return str(url.database) if in_file else ""

    def _exists(self) -> bool:
        if self._file and not Path(self._file).exists():
            return False
        with self._errors_explained():
            return sa.inspect(self._engine).has_table(_RUNS.name)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, OSError) as error:
            cause = getattr(error, "orig", None) or error
            raise EvidenceError(f"run store {self}: {cause}", hint=_STORE_HINT) from error

    def save(self, record: Record) -> None:
        """Keep ``record``. A record with the same id is replaced: a run grows case by case."""
        with self._errors_explained():
            if self._file:
                Path(self._file).parent.mkdir(parents=True, exist_ok=True)
            _METADATA.create_all(self._engine)
            summary = summarize(record)
            columns = {column.name: getattr(summary, column.name) for column in _LISTED}
            with self._engine.begin() as connection:
                connection.execute(sa.delete(_RUNS).where(_RUNS.c.id == record.id))
                connection.execute(sa.insert(_RUNS).values(**columns, document=record.model_dump_json()))

    def ids(self, prefix: str = "") -> list[str]:
        """Return the ids that start with ``prefix``, newest first."""
        if not self._exists():
            return []
        query = sa.select(_RUNS.c.id).where(_RUNS.c.id.startswith(prefix, autoescape=True))
        with self._errors_explained(), self._engine.connect() as connection:
            return list(connection.scalars(query.order_by(_RUNS.c.created_at.desc(), _RUNS.c.id.desc())))

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the JSON file ``key``.

        Raises ``EvidenceError`` when there is none, or more than one.
        """
        return Archive(self, repository=None).load(key)

    def document(self, run_id: str) -> Record:
        """Return the run with exactly this id."""
        with self._errors_explained(), self._engine.connect() as connection:
            document = connection.scalar(sa.select(_RUNS.c.document).where(_RUNS.c.id == run_id))
        try:
            return Record.model_validate_json(document or "")
        except ValueError as error:
            raise EvidenceError(f"run {run_id} in {self} is not a record of this version: {error}") from error

    def runs(self, *, subject: str = "", suite: str = "", gpu: str = "", limit: int | None = None) -> list[RunSummary]:
        """Return the runs, newest first. ``gpu`` matches a part of the name, the others the whole of it."""
        if not self._exists():
            return []
        query = sa.select(*_LISTED).order_by(_RUNS.c.created_at.desc(), _RUNS.c.id.desc()).limit(limit)
        for column, value in ((_RUNS.c.subject, subject), (_RUNS.c.suite, suite)):
            query = query.where(column == value) if value else query
        if gpu:
            query = query.where(_RUNS.c.gpu.icontains(gpu, autoescape=True))
        with self._errors_explained(), self._engine.connect() as connection:
            return [RunSummary(**row) for row in connection.execute(query).mappings()]


def find_repository(start: Path | None = None) -> Path | None:
    """Return the nearest folder, from ``start`` (default: the current one) upwards, that holds claims or evidence."""
    start = (start or Path.cwd()).resolve()
    return next((f for f in (start, *start.parents) if (f / "claims").is_dir() or (f / "evidence").is_dir()), None)


def evidence_files(repository: Path) -> dict[str, Path]:
    """Return the records in the evidence folder of ``repository`` by id. Other JSON documents there are left out."""
    found = {}
    for path in sorted((repository / "evidence").glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found[path.stem] = path  # reading it as a record says what is wrong
            continue
        # The GPU tests leave documents of their own here: they have no gates.
        if isinstance(document, dict) and "gates" in document:
            found[str(document.get("id", path.stem))] = path
    return found


class Archive:
    """All runs that can be seen from here: those of a store, and those in the evidence folder of a repository."""

    def __init__(self, store: Store, repository: Path | None) -> None:
        self.store = store
        self.repository = repository

    def _files(self, prefix: str = "") -> dict[str, Path]:
        files = evidence_files(self.repository) if self.repository else {}
        return {run_id: path for run_id, path in files.items() if run_id.startswith(prefix)}

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the JSON file ``key``."""
        if os.sep in key or key.endswith(".json"):
            return read_record(Path(key))
        files, stored = self._files(key), self.store.ids(key)
        found = [key] if key in files or key in stored else sorted({*files, *stored}, reverse=True)
        if len(found) > 1:
            shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise EvidenceError(f"{key!r} begins {len(found)} ids: {shown}", hint="give more of the id")
        if not found:
            raise EvidenceError(f"there is no run {key!r}", hint=self._nearest(key))
        # The file is what others see; the store's copy of the same run can only be older or equal.
        return read_record(files[found[0]]) if found[0] in files else self.store.document(found[0])

    def _nearest(self, key: str) -> str:
        near = difflib.get_close_matches(key, [*self._files(), *self.store.ids()], n=1, cutoff=0.4)
        return f"did you mean {near[0]}?" if near else "flashmoe runs lists them all"

    def runs(
        self,
        *,
        subject: str = "",
        suite: str = "",
        gpu: str = "",
        on_trouble: Callable[[EvidenceError], None] | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first. A file that cannot be read goes to ``on_trouble``, or is raised."""
        found = {run.id: run for run in self.store.runs(subject=subject, suite=suite, gpu=gpu)}
        for path in self._files().values():
            try:
                run = summarize(read_record(path), origin=f"evidence/{path.name}")
            except EvidenceError as error:
                if on_trouble is None:
                    raise
                on_trouble(error)
                continue
            wanted = subject in ("", run.subject) and suite in ("", run.suite) and gpu.lower() in run.gpu.lower()
            if wanted:
                found[run.id] = run
        return sorted(found.values(), key=lambda run: (run.created_at, run.id), reverse=True)


def as_json(runs: Iterable[RunSummary]) -> list[dict[str, Any]]:
    """Return a listing as plain JSON values."""
    return [dict(vars(run)) for run in runs]
