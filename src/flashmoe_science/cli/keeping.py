"""The verbs import and export: records go into the store and come out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import EvidenceError, InputError
from ..proof.store import Archive, Store, find_repository
from ..proof.transfer import Carried, export_records, import_records
from ..proof.words import counted
from .terminal import Terminal, short_path

USAGE = 2


def run_import(paths: Sequence[Path], *, replace: bool, store: str | None, as_json: bool) -> int:
    """Take records into the store; say how many, and of each that failed why."""
    terminal = Terminal(as_json=as_json)
    target = Store(store)
    carried: list[Carried] = []
    for one in import_records(target, paths, replace=replace):
        carried.append(one)
        if one.status == "failed":
            terminal.warn_of(EvidenceError(one.reason, hint=one.hint))
        elif one.status == "left out":
            terminal.log.print(f"{short_path(one.path)}: left out: {one.reason}", style="dim", soft_wrap=True)
    failed = sum(one.status == "failed" for one in carried)
    terminal.show(f"{target}: {_count(carried, ('new', 'replaced', 'same', 'failed'))}")
    code = USAGE if failed else 0
    terminal.document({"store": str(target), "files": [_as_plain(one) for one in carried], "exit_code": code})
    return code


def run_export(keys: Sequence[str], *, folder: Path, everything: bool, store: str | None, as_json: bool) -> int:
    """Write runs to files; say how many."""
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    if keys and everything:
        raise InputError(
            f"expected the ids of runs or --all, got {counted(len(keys), 'id')} and --all", hint="give one"
        )
    if not keys and not everything:
        raise InputError("expected the ids of runs, or --all, got neither", hint="flashmoe runs lists them")
    carried = list(export_records(archive, archive.store.ids() if everything else keys, folder))
    terminal.show(f"{short_path(folder)}: {_count(carried, ('new', 'same'))}")
    terminal.document({"folder": short_path(folder), "files": [_as_plain(one) for one in carried]})
    return 0


def _count(carried: Sequence[Carried], statuses: Sequence[str]) -> str:
    counts = Counter(str(one.status) for one in carried)
    parts = [f"{counts[status]} {status}" for status in statuses if counts[status]]
    total = counted(sum(counts[status] for status in statuses), "run")
    return f"{total}: {', '.join(parts)}" if parts else total


def _as_plain(one: Carried) -> dict[str, Any]:
    return {**vars(one), "path": short_path(one.path)}
