"""What the verbs that run a chain share: what keeps a record, the meter, and the command line as a record has it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import EvidenceError, InputError
from ..proof.cost.cost import Meter, PastRun, load_rates, past_runs
from ..proof.judge.claims import load_claims
from ..proof.records.documents import record_path, write_record
from ..proof.records.evidence import Begun, Record
from ..proof.records.store import Archive, Store, evidence_files
from .terminal import Terminal, short_path

_SAMPLING = ("quick", "bench")  # the gates that take samples


class Keeper:
    """Writes the record of a run, as far as it has got, to the evidence folder and to the store."""

    def __init__(self, folder: Path, terminal: Terminal, store: Store) -> None:
        self._folder = folder
        self._terminal = terminal
        self._store: Store | None = store
        self.path: Path | None = None
        self.record: Record | None = None  # as it was last given
        self.factors: Callable[[Record], Sequence[float]] = lambda _: ()  # of the claims about such a run
        self._begun: Begun | None = None

    def save(self, record: Record) -> None:
        """Replace what was kept of this run before, and of no other. A store that fails costs a warning.

        Raises ``EvidenceError``: another run has this id, as one from a borrowed machine may, or the file cannot be
        written.
        """
        path = record_path(self._folder, record.id)
        if self.path is None:
            self._refuse_taken(record.id, path)
        self.record = record = record.model_copy(update={"begun": self._begun})
        try:
            write_record(record, path)
        except OSError as error:
            hint = "run it in a folder that you may write, on a disk with room"
            raise EvidenceError(f"{path}: cannot be written: {error.strerror}", hint=hint) from error
        self.path = path
        try:
            if self._store is not None:
                self._store.save(record)
        except EvidenceError as error:
            self._store = None  # say it once
            self._terminal.warn_of(error)

    def begin_gate(self, gate: str) -> None:
        """Enter the run into the ledger of runs begun before its first sample. A ledger that fails costs a warning."""
        record, store = self.record, self._store
        takes_samples = gate in _SAMPLING and record is not None and record.environment.gpu is not None
        if record is None or store is None or self._begun is not None or not takes_samples:
            return
        try:
            self._begun = store.begin(record, self.factors(record))
        except EvidenceError as error:
            self._terminal.warn_of(error)

    @property
    def place(self) -> str:
        """Where the run is kept."""
        return "nowhere yet" if self.path is None else short_path(self.path)

    def _refuse_taken(self, run_id: str, path: Path) -> None:
        """Raise ``EvidenceError`` where there is a run of this id. A file counts by what is in it, not by its name."""
        there = path if path.exists() else evidence_files(self._folder.parent, on_twins=lambda *_: None).get(run_id)
        if there is not None or self._in_store(run_id):
            hint = f"what is there stays as it is: {there or self._store}"
            raise EvidenceError(f"there is a run {run_id} already, and no other one replaces it", hint=hint)

    def _in_store(self, run_id: str) -> bool:
        """Return whether the store has a run of this id. One that cannot be read is warned of."""
        try:
            return self._store is not None and run_id in self._store.ids(run_id)
        except EvidenceError as error:
            self._store = None  # say it once
            self._terminal.warn_of(error)
            return False


def make_keeper(terminal: Terminal, store: Store, repository: Path | None) -> Keeper:
    """Return what keeps one run."""
    keeper = Keeper((repository or Path.cwd()) / "evidence", terminal, store)

    def factors(record: Record) -> list[float]:
        gpu = record.environment.gpu
        claims = load_claims(repository / "claims", on_trouble=terminal.warn_of) if repository else []
        about = [c for c in claims if (c.subject, c.suite) == (record.subject.name, record.suite)]
        return sorted({c.factor for c in about if gpu is not None and c.fits_gpu(gpu.name)})

    keeper.factors = factors
    return keeper


def make_meter(terminal: Terminal, archive: Archive, budget: float | None = None, *, host: str = "") -> Meter:
    """Return the meter of a run, on ``host`` where it is borrowed.

    A store that cannot be read costs the estimate its history, not the run.
    """
    where = f"{host}: " if host else ""

    def history(record: Record) -> list[PastRun]:
        try:
            return past_runs(archive, record)
        except EvidenceError as error:
            terminal.warn_of(error)
            return []

    rates = load_rates(archive.repository)
    return Meter(rates, history, budget=budget, announce=lambda bill: terminal.say(where + bill.announcement()))


def check_budget(dollars: float | None) -> float | None:
    """Return the budget. Raises ``InputError`` where it is no number."""
    if dollars is not None and not math.isfinite(dollars):
        raise InputError(f"budget must be a number of dollars, got {dollars}")
    return dollars


def as_typed(args: Sequence[str]) -> str:
    """Return the command line for a record: without folders, stores and machines."""
    return shlex.join(["flashmoe", *map(_without_folders, without_places(args))])


def without_places(args: Sequence[str]) -> list[str]:
    """Return the arguments without the store and the machines: they decide no result."""
    kept, skip = [], False
    for arg in args:
        named = arg.partition("=")[0] in ("--store", "--host", "--python")
        if not skip and not named:
            kept.append(arg)
        skip = named and not skip and "=" not in arg
    return kept


def _without_folders(argument: str) -> str:
    """Return an argument without this machine's folders: a record is read elsewhere. A relative path stays."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        value = path.relative_to(Path.cwd()).as_posix()
    elif path.is_absolute():
        value = path.name
    return f"{option}{equals}{value}"
