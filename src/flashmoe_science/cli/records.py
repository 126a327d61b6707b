"""The verbs that fill and empty the store and sign records: import, export, sign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import EvidenceError, InputError
from ..proof.records.documents import documents_in, read_record, record_path, write_record
from ..proof.records.signing import sign as sign_record
from ..proof.records.store import Archive, Store, find_repository, record_files
from ..proof.text import counted
from .exit_codes import HOLDS, USAGE
from .options import Json, StoreName, argument, flag, option
from .terminal import Terminal, short_path


@dataclass(frozen=True)
class Carried:
    """The outcome for one file."""

    path: Path
    id: str  # of its run; "" where it was not carried
    status: Literal["new", "replaced", "same", "left out", "failed"]
    reason: str = ""
    hint: str = ""


def import_(
    paths: Annotated[list[Path], argument("FILE|FOLDER...", "Records, or folders of them.")],
    replace: Annotated[
        bool, flag("--replace", "Replace complete runs that the store has with another content.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Take records into the store.

    \b
    Examples:
      flashmoe import evidence/
      flashmoe import run.json.gz --store ~/runs
    """
    terminal = Terminal(as_json=as_json)
    target = Store(store)
    carried: list[Carried] = []
    for one in _import_all(target, paths, replace=replace):
        carried.append(one)
        if one.status == "failed":
            terminal.warn_of(EvidenceError(one.reason, hint=one.hint))
        elif one.status == "left out":
            terminal.log.print(f"{short_path(one.path)}: left out: {one.reason}", style="dim", soft_wrap=True)
    terminal.show(f"{target}: {_count(carried, ('new', 'replaced', 'same', 'failed'))}")
    code = USAGE if any(one.status == "failed" for one in carried) else HOLDS
    terminal.document({"store": str(target), "files": [_as_plain(one) for one in carried], "exit_code": code})
    raise typer.Exit(code)


def export(
    runs: Annotated[
        list[str] | None, argument("RUN...", "Ids of runs, or the beginnings of some.", show_default=False)
    ] = None,
    folder: Annotated[Path, option("--output -o", "FOLDER", "Where the files go; made where it is missing.")] = Path(
        "evidence"
    ),
    everything: Annotated[bool, flag("--all", "Every run of the store.")] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Write runs of the store, or of evidence/, to FOLDER: each as ID.json.gz.

    \b
    Examples:
      flashmoe export 20261120 -o evidence/
      flashmoe export --all -o backup/
    """
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    if runs and everything:
        raise InputError(f"expected ids of runs or --all, got {counted(len(runs), 'id')} and --all", hint="give one")
    if not runs and not everything:
        raise InputError("expected the ids of runs, or --all, got neither", hint="flashmoe runs lists them")
    keys = archive.store.ids() if everything else runs or []
    carried = [_export(archive, key, folder) for key in keys]
    terminal.show(f"{short_path(folder)}: {_count(carried, ('new', 'same'))}")
    terminal.document({"folder": short_path(folder), "files": [_as_plain(one) for one in carried]})


def _import_all(store: Store, paths: Sequence[Path], *, replace: bool) -> Iterator[Carried]:
    """Save the records in files and folders. One that fails does not stop the others."""
    for path in paths:
        documents = documents_in(path) if path.is_dir() else [path]
        if not documents:
            raise EvidenceError(f"{path}: holds no *.json or *.json.gz", hint="name the folder that holds records")
        records = set(record_files(path).values()) if path.is_dir() else {path}
        for file in documents:
            if file not in records:
                yield Carried(file, "", "left out", "no record of a run")
                continue
            try:
                yield _import(store, file, replace=replace)
            except EvidenceError as error:
                yield Carried(file, "", "failed", error.message, error.hint)


def _import(store: Store, path: Path, *, replace: bool) -> Carried:

    record = read_record(path)
    known = store.load(record.id) if record.id in store.ids(record.id) else None
    if known == record:
        return Carried(path, record.id, "same")
    if known is not None and known.complete and not replace:  # one that is incomplete grows
        raise EvidenceError(
            f"{path}: run {record.id} is in {store} with another content, and complete",
            hint="records are not edited: see which one is right; --replace takes the file's",
        )
    store.save(record)
    return Carried(path, record.id, "replaced" if known else "new")


def _export(archive: Archive, key: str, folder: Path) -> Carried:

    record = archive.load(key)
    path = record_path(folder, record.id)
    if path.exists():
        try:
            same = read_record(path) == record
        except EvidenceError:
            same = False  # it is no record: then it is somebody's
        if not same:
            raise EvidenceError(f"{path}: exists with another content", hint="export to another folder")
        return Carried(path, record.id, "same")
    try:
        write_record(record, path)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be written: {error.strerror}") from error
    return Carried(path, record.id, "new")


def sign(
    runs: Annotated[list[str], argument("RUN...", "Ids of runs in evidence/, or files.")],
    key: Annotated[Path, option("--key", "FILE", "A private SSH key, or a public one whose agent runs.")] = Path(
        "~/.ssh/id_ed25519"
    ),
    as_json: Json = False,
) -> None:
    """Sign records, each in a file <id>.dsse beside it: an in-toto statement of its hash, by ssh-keygen.

    `flashmoe verify` says who signed, by the file evidence/allowed_signers (see man ssh-keygen). A record that
    changes after it was signed shows nothing.

    \b
    Examples:
      flashmoe sign 20261120
      flashmoe sign evidence/*.json.gz --key ~/.ssh/release
    """
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(), find_repository())
    signed = [short_path(sign_record(archive.file(run), key.expanduser())) for run in runs]
    terminal.show(*signed)
    terminal.document({"signed": signed, "exit_code": HOLDS})


def _count(carried: Sequence[Carried], statuses: Sequence[str]) -> str:

    counts = Counter(str(one.status) for one in carried)
    parts = [f"{counts[status]} {status}" for status in statuses if counts[status]]
    total = counted(sum(counts[status] for status in statuses), "run")
    return f"{total}: {', '.join(parts)}" if parts else total


def _as_plain(one: Carried) -> dict[str, Any]:

    return {**vars(one), "path": short_path(one.path)}
