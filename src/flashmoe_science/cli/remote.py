"""``prove --host``: run the chain on a borrowed machine, and keep its record as it grows."""

from __future__ import annotations

from pathlib import Path

from ..errors import FlashmoeError
from ..proof.cost.cost import Bill, Budget, Meter, RunSize
from ..proof.gates import ProveRequest
from ..proof.judge.run_verdicts import conclude
from ..proof.records.evidence import Record
from ..proof.records.store import Store
from ..proof.remote import Host, find_tree, prove_on
from ..proof.report.junit import junit_xml, write_junit
from ..proof.text import counted
from .run_shared import make_keeper
from .terminal import ChainProgress, Terminal


def prove_on_host(
    request: ProveRequest, host: Host, terminal: Terminal, store: Store, meter: Meter, *, junit: Path | None
) -> tuple[Record, Path, Bill | None]:
    """Run the chain there; return the record, where it is kept, and its bill. Raises what kept it from its end."""
    tree = find_tree(Path.cwd())
    keeper = make_keeper(terminal, store, request.repository)
    progress = ChainProgress(terminal, on_start=keeper.begin_gate)
    terminal.log.print(f"sending {counted(len(tree.files), 'file')} to {host.name}", style="dim")

    def begin(record: Record, size: RunSize) -> Budget | None:
        meter.start(record, size)
        return meter.budget

    try:
        remote = tree.request(request, Path.cwd())
        result = prove_on(host, remote, tree, progress=progress, save=keeper.save, begin=begin)
    except KeyboardInterrupt:
        progress.close()
        if keeper.path is not None:
            terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)
        raise
    finally:
        progress.close()
    if result.error is not None:
        if junit is not None:
            _write_junit(junit, result.record, result.error, host, request.repository)
        raise result.error
    assert keeper.record is not None
    assert keeper.path is not None
    return keeper.record, keeper.path, meter.bill(keeper.record)


def _write_junit(path: Path, record: Record | None, error: FlashmoeError, host: Host, repository: Path | None) -> None:
    records = [record] if record is not None else []
    verdicts = [verdict for each in records for verdict in conclude(each, repository)]
    write_junit(path, junit_xml(verdicts, records, errors={host.name: str(error)}))
