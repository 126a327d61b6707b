"""The verb ``report``: runs as a page, as Markdown or as CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, cast

from ..errors import EvidenceError, InputError
from ..proof.judge.judge import Verdict
from ..proof.judge.rows import csv_text, kinds_measured
from ..proof.judge.run_verdicts import last_word
from ..proof.records.documents import read_record
from ..proof.records.evidence import Record, TimeKind
from ..proof.records.store import Archive, Store, find_repository, is_path
from ..proof.report.html import render_html
from ..proof.report.markdown import render_markdown
from ..proof.report.page import Judged, Page, build_page
from ..proof.report.terminal import count_line
from .options import Json, Metric, StoreName, Trust, argument, option
from .show import conclude_now, trust_repository
from .terminal import Terminal, as_plain, short_path, write_file

_HINT = "flashmoe prove makes the first, flashmoe runs lists what there is"


def report(
    run: Annotated[
        list[str] | None,
        argument(
            "[RUN]...",
            "Ids of runs, beginnings of them, or JSON files. Default: the newest run of this repository.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        list[Path] | None, option("--output -o", "FILE", "Ends in .html, .md or .csv; repeat it. Default: report.html.")
    ] = None,
    metric: Annotated[
        Metric | None, option("--time", "KIND", "Show kernel, graph or wall time first. Default: graph.")
    ] = None,
    store: StoreName = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Make one self-contained page about a run, or several side by side: verdicts, gates, speed, roofline, raw numbers.

    The page is one file without scripts, and it fetches nothing. The suffix of FILE decides: HTML, Markdown or CSV.

    \b
    Examples:
      flashmoe report
      flashmoe report 20261120 -o report.html -o report.md
      flashmoe report evidence/*.json.gz -o all.html
    """
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    if trust and repository is not None:
        trust_repository(repository, terminal)
    kind = metric.value if metric else None
    writers = {path: _writer(path) for path in output or [Path("report.html")]}
    records = _load(run or [], store, repository, terminal)
    _check_kind(kind, records)
    judged = [Judged(record, conclude_now(record, repository)) for record in records]
    page = build_page(judged, cast("TimeKind | None", kind))
    for path, write in writers.items():
        write_file(path, write(page))
        terminal.show(short_path(path))
    verdicts = [verdict for each in judged for verdict in each.verdicts]
    for line in _summary(records, verdicts):
        terminal.log.print(line, style="dim")
    terminal.document(
        {
            "runs": [record.id for record in records],
            "files": [short_path(path) for path in writers],
            "verdicts": [as_plain(verdict) for verdict in verdicts],
        }
    )


def _summary(records: Sequence[Record], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the verdicts of the runs in one line, or how far each run came where it has none."""
    if verdicts:
        return [f"{', '.join(record.id for record in records)}: {count_line(verdicts)}"]
    return [f"{record.id}: {', '.join(last_word(record))}" for record in records]


def _load(keys: Sequence[str], store: str | None, repository: Path | None, terminal: Terminal) -> list[Record]:
    """Return the runs that were named, each once; where none was, the newest of the repository (or of the store)."""
    if not keys:
        here = repository if store is None else None
        archive = Archive(Store(store), here)
        kept = [run.id for run in archive.runs(on_trouble=terminal.warn_of) if here is None or run.origin != "store"]
        if not kept:
            where = "evidence/ of this repository" if here else f"the store, {archive.store}"
            raise EvidenceError(f"there is no run in {where}", hint=_HINT)
        return [archive.load(kept[0])]
    # A file needs no store, so that a wrong one does not hide it.
    loaded = [read_record(Path(k)) if is_path(k) else Archive(Store(store), repository).load(k) for k in keys]
    return list({record.id: record for record in loaded}.values())


def _check_kind(kind: str | None, records: Sequence[Record]) -> None:
    measured = sorted({each for record in records for each in kinds_measured(record)})
    if kind is not None and measured and kind not in measured:
        raise InputError(f"time must be one of {', '.join(measured)} in these runs, got {kind}")


def _writer(path: Path) -> Callable[[Page], str]:
    """Return the writer of a file of this name. Raises ``InputError`` where its suffix names no format."""
    writers = {
        ".html": render_html,
        ".md": render_markdown,
        ".csv": lambda page: csv_text(run.record for run in page.runs),
    }
    if path.suffix.lower() not in writers:
        raise InputError(
            f"output must end in {', '.join(writers)}, got {str(path)!r}", hint="e.g. -o report.html -o report.md"
        )
    return writers[path.suffix.lower()]
