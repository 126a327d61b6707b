"""``prove --host``: run the chain on borrowed machines, keep what comes from them, and say what it showed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..errors import InputError, MachineLostError
from ..proof.conclude import conclude, run_exit_code
from ..proof.cost import Budget, RunSize, spent_seconds
from ..proof.cost_report import bill_as_plain, receipt
from ..proof.evidence import Gate, Record
from ..proof.gates import Progress, ProveRequest
from ..proof.host_table import host_table
from ..proof.junit import write_junit
from ..proof.remote import Host, HostResult, find_tree, prove_on
from ..proof.report import gate_lines
from ..proof.words import counted
from . import INCONCLUSIVE, USAGE
from .terminal import ChainProgress, Terminal, as_plain, short_path, write_csv_file

if TYPE_CHECKING:
    from ..proof.cost import Bill
    from .run_shared import Keeper

_SECONDS_BETWEEN_LINES = 10.0
_WORST_FIRST = (3, 1, 2, 4)  # exit codes, where hosts differ


@dataclass
class Borrowed:
    """What the command line asks of borrowed machines."""

    hosts: Sequence[str]
    python: str = ""


class HostLines:
    """The progress of one of several machines: every line says which one it is about."""

    def __init__(self, terminal: Terminal, host: str) -> None:
        self._terminal = terminal
        self._host = host
        self._gate = ""
        self._hints: set[str] = set()
        self._last_line = time.monotonic()

    def start(self, gate: str) -> None:
        """A gate begins."""
        self._gate = gate

    def advance(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps of the gate are finished; ``label`` is the one under way."""
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.note(f"{self._gate}: {done}/{total} {label}".rstrip())

    def note(self, line: str) -> None:
        """Something worth a line of log happened."""
        self._terminal.log.print(f"{self._host}: {line}", style="dim", soft_wrap=True)

    def finish(self, gate: Gate) -> None:
        """A gate ended: its line is data, and stays."""
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(f"{self._host}:", gate_lines(gate, said=self._hints))
        self._terminal.say(line)
        self._hints.add(gate.hint)


def hosts_of(borrowed: Borrowed) -> list[Host]:
    """Return the machines. Raises ``InputError``."""
    twice = sorted({name for name in borrowed.hosts if list(borrowed.hosts).count(name) > 1})
    if twice:
        raise InputError(f"host must be given once, got {', '.join(twice)} twice: two runs share no GPU")
    return [Host(name, borrowed.python) for name in borrowed.hosts]


def run_on_hosts(
    request: ProveRequest,
    borrowed: Borrowed,
    terminal: Terminal,
    *,
    keeper_of: Callable[[str], Keeper],
    begin: Callable[[str, Record, RunSize], Budget | None],
    bill_of: Callable[[str, Record], Bill | None],
    book_set_up: Callable[[Record | None, float], None],
    conclude_one: Callable[[Record, Path], int],
    csv: Path | None,
    junit: Path | None,
) -> int:
    """Run the chain on all machines, keep every record as it grows, and return the exit code.

    Args:
        request: What to prove.
        borrowed: Where.
        terminal: To print to.
        keeper_of: Makes what keeps the record of the machine of this name.
        begin: Takes note of the run that begins on the machine of this name; returns what holds it to a budget.
        bill_of: Says what the run on the machine of this name has cost.
        book_set_up: Books for how many seconds a machine was held while no gate had its GPU.
        conclude_one: Prints what the run of a single machine showed, and returns the exit code.
        csv: A file for the rows of all records.
        junit: A file for the gates and claims of all records, and for what went wrong.
    """
    hosts = hosts_of(borrowed)
    tree = find_tree(Path.cwd())
    keepers = {host.name: keeper_of(host.name) for host in hosts}
    single = ChainProgress(terminal) if len(hosts) == 1 else None
    progress: dict[str, Progress] = {host.name: single or HostLines(terminal, host.name) for host in hosts}
    terminal.log.print(f"sending {counted(len(tree.files), 'file')} to {', '.join(borrowed.hosts)}", style="dim")
    kept: dict[str, Record] = {}

    def save(name: str, record: Record) -> None:
        kept[name] = record
        keepers[name].save(record)

    began = time.monotonic()
    try:
        results = prove_on(
            hosts,
            tree.request(request, Path.cwd()),
            tree,
            progress=progress,
            save=save,
            begin=begin,
        )
    except KeyboardInterrupt:
        if single is not None:
            single.close()
        for record in kept.values():  # of a machine that no record came from it is not known what it is
            book_set_up(record, time.monotonic() - began - spent_seconds(record))
        _say_where(keepers, terminal)
        raise
    finally:
        if single is not None:
            single.close()
    for result in results:
        _settle(result, terminal, book_set_up)
    if csv is not None:
        write_csv_file([result.record for result in results if result.record is not None], csv)
    if junit is not None:
        _write_junit(results, junit, request.repository)
    if single is not None:
        return _conclude_one(results[0], keepers[hosts[0].name], conclude_one)
    return _conclude_all(results, keepers, terminal, bill_of, request.repository)


def _say_where(keepers: Mapping[str, Keeper], terminal: Terminal) -> None:
    for keeper in keepers.values():
        if keeper.path is not None:
            terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)


def _settle(result: HostResult, terminal: Terminal, book_set_up: Callable[[Record | None, float], None]) -> None:
    """Book what a machine was held for beside its gates, and say for how long it was held in all."""
    if result.record is not None or result.reached:
        spent = spent_seconds(result.record) if result.record is not None else 0.0
        book_set_up(result.record, result.seconds - spent)
    if result.record is not None:
        terminal.log.print(_held(result), style="dim", soft_wrap=True)


def _write_junit(results: Sequence[HostResult], path: Path, repository: Path | None) -> None:
    records = [result.record for result in results if result.record is not None]
    verdicts = [verdict for record in records for verdict in conclude(record, repository)]
    errors = {result.host.name: str(result.error) for result in results if result.error is not None}
    write_junit(path, verdicts, records, errors=errors)


def _held(result: HostResult) -> str:
    """Return for how long a machine was held, and its GPU."""
    assert result.record is not None
    gpu = result.record.environment.gpu
    held = f"held for {result.seconds / 60:.1f} min"
    if gpu is None:
        return f"{result.host.name}: no GPU, {held}"
    seconds = sum(gate.gpu_seconds for gate in result.record.gates)
    return f"{result.host.name}: {gpu.name}, {held}, {seconds / 60:.1f} min of them with the GPU at work"


def _conclude_one(result: HostResult, keeper: Keeper, conclude_one: Callable[[Record, Path], int]) -> int:
    if result.error is not None:
        raise result.error
    assert result.record is not None
    assert keeper.path is not None
    keeper.remind()
    return conclude_one(result.record, keeper.path)


def _conclude_all(
    results: Sequence[HostResult],
    keepers: Mapping[str, Keeper],
    terminal: Terminal,
    bill_of: Callable[[str, Record], Bill | None],
    repository: Path | None,
) -> int:
    """Print one table, then for each machine its verdict and its record."""
    runs = {result.host.name: result.record for result in results if result.record is not None}
    if runs:
        terminal.show("", host_table(runs))
    documents, codes = [], []
    for result in results:
        name, path = result.host.name, keepers[result.host.name].path
        verdicts = conclude(result.record, repository) if result.record is not None else []
        code = USAGE if result.record is None else run_exit_code(result.record, verdicts)
        if result.error is not None:
            terminal.warn_of(result.error)
            code = INCONCLUSIVE if isinstance(result.error, MachineLostError) else USAGE
        bill = bill_of(name, result.record) if result.record is not None else None
        if result.record is not None and path is not None:
            keepers[name].remind()
            terminal.show("", f"{name}:")
            terminal.show_conclusion(result.record, verdicts)
            terminal.show(*([receipt(bill)] if bill else []), f"record: {short_path(path)}")
        codes.append(code)
        documents.append(
            {
                "host": name,
                "record": as_plain(result.record) if result.record else None,
                "path": short_path(path) if path else None,
                "verdicts": [as_plain(verdict) for verdict in verdicts],
                "cost": bill_as_plain(bill),
                "error": str(result.error) if result.error else None,
                "exit_code": code,
            }
        )
    code = next((worst for worst in _WORST_FIRST if worst in codes), 0)
    terminal.document({"runs": documents, "exit_code": code})
    return code
