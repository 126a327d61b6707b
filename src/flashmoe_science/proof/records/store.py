"""Where runs are kept and found again: the store, a folder of record files, and the evidence folder of a repository."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from ...errors import EvidenceError
from ..text import did_you_mean
from .begun import BegunLedger, BegunRun
from .documents import (
    TEXT_BYTES,
    documents_in,
    is_document,
    name_of,
    open_document,
    read_record,
    read_text,
    record_path,
    write_record,
)
from .evidence import SCHEMA_VERSION, Begun, GateName, GateStatus, Record
from .files import load_json, user_folder
from .ledger import Entry, append_entry, as_text, paid_gates, read_entries

_BEGIN_BYTES = 1000
_ID_AT_THE_BEGIN = re.compile(rb'\s*\{\s*"schema_version":\s*\d+,\s*"id":\s*"([A-Za-z0-9_.@-]+)"')
_HINT = "set FLASHMOE_STORE, or --store, to a folder that you may write"


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
    gpu_seconds: Mapping[GateName, float] = field(default_factory=dict)  # for how long each gate held a GPU
    origin: str = "store"  # or the file, relative to the repository


def summarize(record: Record) -> RunSummary:
    """Return what a listing says of ``record``."""
    return _summary(record, len(record.cases), sum(bool(case.rounds) for case in record.cases))


def read_summary(path: Path) -> RunSummary:
    """Return what a listing says of the record in a file, without a look at its samples.

    Raises ``EvidenceError``: the file is no record.
    """
    try:
        document = load_json(read_text(path))
        cases = document.pop("cases", [])
        document.pop("launches", None)
        measured = sum(bool(case.get("rounds")) for case in cases)
        header = Record.model_validate(document)
        if header.schema_version > SCHEMA_VERSION:
            raise ValueError(header.schema_version)
        return _summary(header, len(cases), measured)
    except (ValueError, AttributeError, TypeError):
        return summarize(read_record(path))  # says what is wrong, and where


def _summary(record: Record, cases: int, measured: int) -> RunSummary:
    return RunSummary(
        id=record.id,
        created_at=as_text(record.created_at),
        subject=record.subject.name,
        operator=record.subject.operator,
        suite=record.suite,
        gpu=record.environment.gpu_name,
        commit=record.tree.commit or "",
        complete=record.complete,
        result=_result(record),
        cases=cases,
        measured=measured,
        gpu_seconds=paid_gates(record),
    )


def _result(record: Record) -> str:
    if failed := record.failed_gate:
        return f"{failed.name} failed"
    passed = sum(gate.status is GateStatus.PASSED for gate in record.gates)
    return f"{passed} of {len(record.gates)} gates passed"


def default_folder() -> Path:
    """Return the store that ``FLASHMOE_STORE`` names, or the one of this user."""
    if named := os.environ.get("FLASHMOE_STORE", ""):
        return _folder_named(named)
    return user_folder("XDG_DATA_HOME", ".local/share") / "flashmoe" / "runs"


def _folder_named(named: str) -> Path:
    if "://" in named:  # the rest of a URL may be a password
        scheme = named.partition("://")[0]
        raise EvidenceError(f"the store must be a folder, got the URL {scheme}://...", hint=_HINT)
    return Path(named).expanduser()


OnTwins = Callable[[str, Sequence[Path]], None]


def raise_twins(run_id: str, paths: Sequence[Path]) -> None:
    """Raise ``EvidenceError``: different files have one id."""
    named = " and ".join(map(str, paths))
    hint = "a record is never edited: see with git which one is right, and take the other out"
    raise EvidenceError(f"{named}: different records have one id, {run_id}", hint=hint)


class Store:
    """A folder of records, each in ``<id>.json.gz``.

    Costs that no record knows are in ``ledger.jsonl``, all runs begun in ``begun.jsonl``.

    Reading never creates anything: a folder that does not exist has no runs.

    Args:
        folder: The folder. Default: ``default_folder()``.

    Raises:
        EvidenceError: it is named by a URL.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = _folder_named(str(folder)) if folder else default_folder()
        self._ledger = self.folder / "ledger.jsonl"
        self._begun = BegunLedger(self.folder / "begun.jsonl")

    def __str__(self) -> str:
        return str(self.folder)

    def save(self, record: Record) -> None:
        """Keep ``record``. One with the same id is replaced: a run grows."""
        with _errors_explained(self.folder):
            write_record(record, self.files().get(record.id) or record_path(self.folder, record.id))

    def files(self, *, on_twins: OnTwins = raise_twins) -> dict[str, Path]:
        """Return the files of the runs by id. Raises ``EvidenceError`` where the store is no folder."""
        if self.folder.exists() and not self.folder.is_dir():
            raise EvidenceError(f"the store must be a folder, got the file {self.folder}", hint=_HINT)
        return record_files(self.folder, on_twins=on_twins)

    def ids(self, prefix: str = "") -> list[str]:
        """Return the ids that start with ``prefix``, newest first."""
        return sorted((run_id for run_id in self.files() if run_id.startswith(prefix)), reverse=True)

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the file ``key``.

        Raises ``EvidenceError`` when there is none, or more than one.
        """
        return Archive(self, repository=None).load(key)

    def runs(self) -> list[RunSummary]:
        """Return all runs, newest first."""
        return Archive(self, repository=None).runs()

    def costs(
        self, *, since: datetime | None = None, on_trouble: Callable[[EvidenceError], None] | None = None
    ) -> list[Entry]:
        """Return what the gates of the runs took of a GPU, and the rows of the ledger.

        A file that cannot be read goes to ``on_trouble``, or is raised.
        """
        gates = [
            Entry(run.created_at, run.id, gate, run.subject, run.suite, run.gpu, seconds)
            for run in Archive(self, repository=None).runs(on_trouble=on_trouble)
            for gate, seconds in run.gpu_seconds.items()
        ]
        entries = [*gates, *read_entries(self._ledger)]
        return [entry for entry in entries if since is None or entry.at >= as_text(since)]

    def begin(self, record: Record, factors: Sequence[float] = ()) -> Begun:
        """Enter a run that takes its first sample next into the ledger of runs begun.

        Args:
            record: The run.
            factors: Of the claims that are about such a run.

        Raises:
            EvidenceError: the ledger cannot be written, or its chain is broken.
        """
        with _errors_explained(self.folder):
            return self._begun.begin(record, factors)

    def begun(self) -> list[tuple[str, BegunRun]]:
        """Return the hash and the content of each line of that ledger. Raises ``EvidenceError`` for a broken chain."""
        return self._begun.lines()

    def book(self, entry: Entry) -> None:
        """Enter a cost that no record knows into the ledger."""
        with _errors_explained(self.folder):
            append_entry(self._ledger, entry)

    def add_cost(self, amount: float, *, note: str, gpu: str = "", at: datetime | None = None) -> Entry:
        """Enter a cost by hand, in dollars."""
        moment = as_text(at or datetime.now(timezone.utc))
        entry = Entry(moment, "", "", "", "", gpu, gpu_seconds=0.0, dollars=amount, note=note)
        self.book(entry)
        return entry


@contextmanager
def _errors_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvidenceError(f"run store {folder}: {error.strerror}", hint=_HINT) from error


def find_repository(start: Path | None = None) -> Path | None:
    """Return the nearest folder, from ``start`` (default: the current one) upwards, that holds claims or evidence."""
    start = (start or Path.cwd()).resolve()
    return next((f for f in (start, *start.parents) if (f / "claims").is_dir() or (f / "evidence").is_dir()), None)


def evidence_files(repository: Path, *, on_twins: OnTwins = raise_twins) -> dict[str, Path]:
    """Return the records in the evidence folder of ``repository`` by id, as ``record_files`` does."""
    return record_files(repository / "evidence", on_twins=on_twins)


def record_files(folder: Path, *, on_twins: OnTwins = raise_twins) -> dict[str, Path]:
    """Return the records in ``folder`` by id. Other JSON documents there are left out.

    Different files with one id are none of them: ``on_twins`` gets them. Default: ``EvidenceError``.
    """
    found: dict[str, list[Path]] = {}
    for path in documents_in(folder):
        if (run_id := _run_id(path)) is not None:
            found.setdefault(run_id, []).append(path)
    for run_id, paths in list(found.items()):
        if len(paths) > 1 and not _are_equal(paths):
            del found[run_id]
            on_twins(run_id, paths)
    return {run_id: paths[-1] for run_id, paths in found.items()}


def _are_equal(paths: Sequence[Path]) -> bool:
    try:
        return len({read_text(path) for path in paths}) == 1
    except EvidenceError:
        return False


def with_id(run_id: str, record: Record, path: Path) -> Record:
    """Return ``record``, in the file of run ``run_id``. Raises ``EvidenceError`` where it is of another one."""
    if record.id != run_id:
        raise EvidenceError(f"{path}: key id: expected one id, got {run_id} and {record.id}")
    return record


def _run_id(path: Path) -> str | None:
    """Return the id of the run in a file, or None where it holds another document.

    A record begins with its schema and its id, so its samples need not be read.
    """
    try:
        if not path.is_file():
            return name_of(path)
        with path.open("rb") as plain, open_document(plain) as file:
            begin = file.read(_BEGIN_BYTES)
            if found := _ID_AT_THE_BEGIN.match(begin):
                return found[1].decode()
            document = load_json(begin + file.read(TEXT_BYTES))
    except (OSError, EOFError, zlib.error, ValueError):
        return name_of(path)  # reading it as a record says what is wrong
    # The GPU tests leave documents of their own, which have no gates.
    has_gates = isinstance(document, dict) and "gates" in document
    return str(document.get("id", name_of(path))) if has_gates else None


def telling(on_trouble: Callable[[EvidenceError], None]) -> OnTwins:
    """Return what gives the error of ``raise_twins`` to ``on_trouble``."""

    def tell(run_id: str, paths: Sequence[Path]) -> None:
        try:
            raise_twins(run_id, paths)
        except EvidenceError as error:
            on_trouble(error)

    return tell


def is_path(key: str) -> bool:
    """Return whether ``key`` names a run by its file."""
    return os.sep in key or is_document(key) or Path(key).is_file()


class Archive:
    """All runs that can be seen from here: those of a store, and those in the evidence folder of a repository."""

    def __init__(self, store: Store, repository: Path | None) -> None:
        self.store = store
        self.repository = repository

    def _files(self, on_twins: OnTwins) -> dict[str, Path]:
        """Return the files by id. One of evidence/ is what others see: the store's can only be older or equal."""
        in_repository = evidence_files(self.repository, on_twins=on_twins) if self.repository else {}
        return self.store.files(on_twins=on_twins) | in_repository

    def _files_of(self, key: str) -> dict[str, Path]:
        """Return the files by id. Raises ``EvidenceError`` where different ones have an id that ``key`` begins."""
        twins: dict[str, Sequence[Path]] = {}
        files = self._files(twins.__setitem__)
        for run_id, paths in twins.items():
            if run_id.startswith(key):
                raise_twins(run_id, paths)
        return files

    def has(self, key: str) -> bool:
        """Return whether the id of a run is ``key`` or starts with it, or ``key`` is a file."""
        return Path(key).is_file() if is_path(key) else any(run_id.startswith(key) for run_id in self._files_of(key))

    def load(self, key: str) -> Record:
        """Return the run whose id is ``key`` or starts with it, or the one in the file ``key``."""
        return read_record(self.file(key))

    def file(self, key: str) -> Path:
        """Return the file of that run. Raises ``EvidenceError`` where there is none, or more than one."""
        if is_path(key):
            return Path(key)
        files = self._files_of(key)
        found = [key] if key in files else sorted((run_id for run_id in files if run_id.startswith(key)), reverse=True)
        if len(found) > 1:
            shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
            raise EvidenceError(f"{key!r} begins {len(found)} ids: {shown}", hint="give more of the id")
        if not found:
            hint = did_you_mean(key, files, "flashmoe runs lists them all", cutoff=0.4)
            raise EvidenceError(f"there is no run {key!r}", hint=hint)
        return files[found[0]]

    def runs(
        self,
        *,
        subject: str = "",
        suite: str = "",
        gpu: str = "",
        since: datetime | None = None,
        on_trouble: Callable[[EvidenceError], None] | None = None,
    ) -> list[RunSummary]:
        """Return the runs, newest first: ``gpu`` matches a part of the name, the others the whole of it.

        A file that cannot be read goes to ``on_trouble``, or is raised.
        """
        found = []
        for path in self._files(telling(on_trouble) if on_trouble else raise_twins).values():
            try:
                run = read_summary(path)
            except EvidenceError as error:
                if on_trouble is None:
                    raise
                on_trouble(error)
                continue
            wanted = subject in ("", run.subject) and suite in ("", run.suite) and gpu.lower() in run.gpu.lower()
            if wanted and (since is None or run.created_at >= as_text(since)):
                stored = path.parent == self.store.folder
                found.append(run if stored else replace(run, origin=f"evidence/{path.name}"))
        return sorted(found, key=lambda run: (run.created_at, run.id), reverse=True)
