"""What the verbs that run a chain share: what keeps a record, the meter, and the command line as a record has it."""

from __future__ import annotations

import errno
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import EvidenceError, InputError
from ..proof.cost.cost import Bill, Budget, Estimate, Meter, PastRun, load_rates, past_runs, rate_for
from ..proof.cost.terminal import announcement
from ..proof.judge.claims import load_claims
from ..proof.records.evidence import Begun, Record, name_of, record_path, write_record
from ..proof.records.ledger import Entry
from ..proof.records.store import Archive, Store, evidence_files, find_repository
from .terminal import Terminal, short_path

_SAMPLING = ("quick", "bench")  # the gates that take samples


class Keeper:
    """Writes the record of a run, as far as it has got, to the evidence folder and to the store."""

    def __init__(self, folder: Path, terminal: Terminal, store: Store) -> None:
        self._folder = folder
        self._terminal = terminal
        self._store: Store | None = store
        self.dollars_per_hour: Callable[[Record], float | None] = lambda _: None  # what the store books it at
        self.path: Path | None = None
        self.record: Record | None = None  # as it was last given
        self.behind: EvidenceError | None = None  # why the file lacks what the store has
        self.factors: Callable[[Record], Sequence[float]] = lambda _: ()  # of the claims about such a run
        self._begun: Begun | None = None

    def save(self, record: Record) -> None:
        """Replace what was kept of this run before, and of no other.

        A store that fails costs a warning, and so does a file that cannot be written any more while the store can.

        Raises:
            EvidenceError: another run has this id, as one from a borrowed machine may, the file cannot be begun, or
                neither file nor store can be written.
        """
        path = record_path(self._folder, record.id)
        if self.path is None:
            self._refuse_taken(record.id, path)
        record = record.model_copy(update={"begun": self._begun})
        written = self._write(record, path)
        self.record = record
        try:
            if self._store is not None:
                self._store.save(record, dollars_per_hour=self.dollars_per_hour(record))
        except EvidenceError as error:
            self._store = None  # say it once
            self._terminal.warn_of(error)
        if written is not None and self._store is None:  # it is kept nowhere, and what follows costs the same
            raise written
        if written is not None and self.behind is None:
            hint = f"the store has the run, and `flashmoe export {record.id} -o evidence` writes it"
            self._terminal.warn(str(written).partition("\nhint: ")[0], f"{written.hint}; {hint}")
        self.behind = written
        if written is not None:
            path.unlink(missing_ok=True)  # a part of the run, which every reader would take for all of it

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
        """Where the run is kept: in its file, or only in the store."""
        if self.path is None:
            return "nowhere yet"
        return f"run {name_of(self.path)} of the store" if self.behind else short_path(self.path)

    def remind(self) -> None:
        """Say it again at the end, where it is read, that the file lacks what the store has."""
        if self.path is not None and self.behind is not None:
            self._terminal.warn(f"{short_path(self.path)} lacks this run, the store has it", self.behind.hint)

    def _write(self, record: Record, path: Path) -> EvidenceError | None:
        """Write the file; return why it cannot be written where the run has begun to be kept there."""
        try:
            write_record(record, path)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "make room on its disk" if full else "run it in a folder that you may write"
            found = EvidenceError(f"{path}: cannot be written: {error.strerror}", hint=hint)
            if self.path is None:  # nothing is spent yet
                raise found from error
            return found
        self.path = path
        return None

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


def make_keeper(terminal: Terminal, store: Store, repository: Path | None, meter: Meter) -> Keeper:
    """Return what keeps one run, and books it at the price of its GPU."""
    keeper = Keeper((repository or Path.cwd()) / "evidence", terminal, store)
    keeper.dollars_per_hour = meter.rate

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
    return Meter(rates, history, budget=budget, announce=lambda bill: terminal.say(where + announcement(bill)))


def check_budget(dollars: float | None) -> float | None:
    """Return the budget. Raises ``InputError`` where it is no number."""
    if dollars is not None and not math.isfinite(dollars):
        raise InputError(f"budget must be a number of dollars, got {dollars}")
    return dollars


@dataclass(frozen=True)
class Tab:
    """The bill of what holds a GPU and is no run of the chain: said before it begins, and booked."""

    terminal: Terminal
    store: Store
    bill: Bill
    entry: Entry  # without time
    budget: Budget | None

    def refusal(self) -> str:
        """Return why it may not begin, or an empty text."""
        return self.budget.refusal(self.entry.gate, 0.0) if self.budget is not None else ""

    def book(self, gpu_seconds: float) -> Bill:
        """Book what it has taken so far, and return the bill. A store that fails costs a warning, not the result."""
        try:
            if gpu_seconds > 0:
                self.store.book(replace(self.entry, gpu_seconds=gpu_seconds))
        except EvidenceError as error:
            self.terminal.warn_of(error)
        return replace(self.bill, spent_seconds=gpu_seconds)


def open_tab(
    terminal: Terminal, store: Store, about: Entry, seconds: float, source: str, *, budget: float | None
) -> Tab:
    """Say what something is going to cost, and return its tab.

    Args:
        terminal: To say it on.
        store: Where it is booked.
        about: What is booked: all but the time.
        seconds: That it is going to hold the GPU.
        source: What that rests on.
        budget: Dollars that it may cost.

    Raises:
        ProofError: it has a budget, and its GPU no rate.
    """
    rate = rate_for(load_rates(find_repository()), about.gpu, check_budget(budget))
    expected = Estimate({about.gate: seconds}, source)
    bill = Bill(about.gpu, rate, expected)
    terminal.say(announcement(bill))
    held = Budget(budget, rate, expected) if budget is not None and rate is not None else None
    return Tab(terminal, store, bill, replace(about, dollars_per_hour=rate), held)


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
