"""``prove --host``: run the chain on borrowed machines, keep their records, and print their conclusions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..errors import EvidenceError, InputError, MachineLostError
from ..proof.cost.cost import Bill, Budget, Meter, RunSize, format_dollars, format_duration, load_rates, spent_seconds
from ..proof.gates import ProveRequest
from ..proof.judge.rows import csv_text
from ..proof.judge.run_verdicts import conclude, run_exit_code
from ..proof.records.evidence import Record
from ..proof.records.ledger import Entry, dollars
from ..proof.records.store import Archive, Store
from ..proof.remote import Host, HostResult, find_tree, prove_on
from ..proof.report.junit import junit_xml, write_junit
from ..proof.report.terminal import host_table
from ..proof.text import counted
from .exit_codes import INCONCLUSIVE, USAGE
from .run_shared import Keeper, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, short_path, write_file

_WORST_FIRST = (3, 1, 2, 4)  # exit codes, where hosts differ


def prove_on_hosts(
    request: ProveRequest,
    names: Sequence[str],
    terminal: Terminal,
    store: Store,
    *,
    python: str,
    budget: float | None,
    csv: Path | None,
    junit: Path | None,
    conclude_one: Callable[[Record, Path, Bill | None], int],
) -> int:
    """Run the chain on all machines, keep every record as it grows, and return the exit code.

    The budget is of all machines together. ``conclude_one`` prints the conclusion of a single machine's run.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"host must be given once, got {', '.join(twice)} twice: two runs share no GPU")
    hosts = [Host(name, python) for name in names]
    tree = find_tree(Path.cwd())
    archive = Archive(store, request.repository)
    share = None if budget is None else budget / len(hosts)  # they run at the same time
    meters = {name: make_meter(terminal, archive, share, host=name) for name in names}
    keepers = {name: make_keeper(terminal, store, request.repository) for name in names}
    progress = {
        name: ChainProgress(terminal, host=name if len(hosts) > 1 else "", on_start=keeper.begin_gate)
        for name, keeper in keepers.items()
    }
    terminal.log.print(f"sending {counted(len(tree.files), 'file')} to {', '.join(names)}", style="dim")

    def begin(name: str, record: Record, size: RunSize) -> Budget | None:
        meters[name].start(record, size)
        return meters[name].budget

    began = time.monotonic()
    try:
        results = prove_on(
            hosts,
            tree.request(request, Path.cwd()),
            tree,
            progress=progress,
            save=lambda name, record: keepers[name].save(record),
            begin=begin,
        )
    except KeyboardInterrupt:
        _close(progress)
        for keeper in keepers.values():
            if keeper.record is not None and keeper.path is not None:
                _book_set_up(request, keeper.record, time.monotonic() - began, terminal, store)
                terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)
        raise
    finally:
        _close(progress)
    for result in results:
        _settle(result, request, terminal, store)
    if csv is not None:
        write_file(csv, csv_text(result.record for result in results if result.record is not None))
    if junit is not None:
        _write_junit(results, junit, request.repository)
    if len(hosts) > 1:
        return _conclude_all(results, keepers, meters, terminal, request.repository)
    (result,), (name,) = results, names
    if result.error is not None:
        raise result.error
    assert result.record is not None
    path = keepers[name].path
    assert path is not None
    return conclude_one(result.record, path, meters[name].bill(result.record))


def _close(progress: Mapping[str, ChainProgress]) -> None:
    for each in progress.values():
        each.close()


def _settle(result: HostResult, request: ProveRequest, terminal: Terminal, store: Store) -> None:
    """Book and print for how long a machine was held."""
    if result.record is not None or result.reached:
        _book_set_up(request, result.record, result.seconds, terminal, store)


def _book_set_up(
    request: ProveRequest, record: Record | None, held_seconds: float, terminal: Terminal, store: Store
) -> None:
    """Book the time in which a machine was held and no gate had its GPU: wheels, environment, build."""
    gpu = record.environment.gpu_name if record is not None else ""
    seconds = held_seconds - (spent_seconds(record) if record is not None else 0.0)
    if seconds <= 0 or (record is not None and not gpu):
        return
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    run = record.id if record is not None else f"set-up-{secrets.token_hex(8)}"
    rate = load_rates(request.repository).dollars_per_hour(gpu) if gpu else None
    try:
        store.book(Entry(now, run, "set-up", request.subject.name, request.suite.name, gpu, seconds, rate))
    except EvidenceError as error:
        terminal.warn_of(error)
    price = f"{format_dollars(dollars(seconds, rate))} ({format_duration(seconds)})" if rate is not None else ""
    terminal.say(f"set-up: {price or format_duration(seconds)} more, in which no gate had the GPU")


def _write_junit(results: Sequence[HostResult], path: Path, repository: Path | None) -> None:
    records = [result.record for result in results if result.record is not None]
    verdicts = [verdict for record in records for verdict in conclude(record, repository)]
    errors = {result.host.name: str(result.error) for result in results if result.error is not None}
    write_junit(path, junit_xml(verdicts, records, errors=errors))


def _conclude_all(
    results: Sequence[HostResult],
    keepers: Mapping[str, Keeper],
    meters: Mapping[str, Meter],
    terminal: Terminal,
    repository: Path | None,
) -> int:
    """Print one table, then for each machine its verdict and its record."""
    runs = {result.host.name: result.record for result in results if result.record is not None}
    if runs:
        terminal.show("", host_table(runs))
    documents, codes = [], []
    for result in results:
        name, path, record = result.host.name, keepers[result.host.name].path, result.record
        verdicts = conclude(record, repository) if record is not None else []
        code = USAGE if record is None else run_exit_code(record, verdicts)
        if result.error is not None:
            terminal.warn_of(result.error)
            code = INCONCLUSIVE if isinstance(result.error, MachineLostError) else USAGE
        bill = meters[name].bill(record) if record is not None else None
        if record is not None and path is not None:
            terminal.show("", f"{name}:")
            terminal.show_conclusion(record, verdicts)
            terminal.show(*([bill.receipt()] if bill else []), f"record: {short_path(path)}")
        codes.append(code)
        documents.append(
            {
                "host": name,
                "record": as_plain(record) if record else None,
                "path": short_path(path) if path else None,
                "verdicts": [as_plain(verdict) for verdict in verdicts],
                "cost": bill and bill.as_plain(),
                "error": str(result.error) if result.error else None,
                "exit_code": code,
            }
        )
    code = next((worst for worst in _WORST_FIRST if worst in codes), 0)
    terminal.document({"runs": documents, "exit_code": code})
    return code
