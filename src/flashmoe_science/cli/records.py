"""The verbs that fill and empty the store: import, export. What takes long to import waits until one runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from ..errors import EvidenceError, InputError
from .exit_codes import HOLDS, USAGE
from .options import Json, StoreName

if TYPE_CHECKING:
    from ..proof.records.store import Archive, Store

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Carried:
    """The outcome for one file."""

    path: Path
    id: str  # of its run; "" where it was not carried
    status: Literal["new", "replaced", "same", "left out", "failed"]
    reason: str = ""
    hint: str = ""


@app.command(name="import", short_help="Take records into the store.")
def import_(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Records, or folders of them.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace complete runs that the store has with another content.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Take records into the store, and book what their gates took of a GPU.

    \b
    Examples:
      flashmoe import evidence/
      flashmoe import run.json.gz --store ~/runs

    \b
    Exit codes:
      0  all are in the store    2  one cannot be read, or is there with another content; the others are in
    """
    from ..proof.records.store import Store
    from .terminal import Terminal, short_path

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


@app.command(short_help="Write runs to files.")
def export(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Argument(metavar="RUN...", help="Ids of runs, or the beginnings of some.", show_default=False),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go; made where it is missing.")
    ] = Path("evidence"),
    everything: Annotated[bool, typer.Option("--all", help="Every run of the store.")] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Write runs of the store, or of evidence/, to FOLDER: each as ID.json.gz.

    \b
    Examples:
      flashmoe export 20261120 -o evidence/
      flashmoe export --all -o backup/

    \b
    Exit codes:
      0  written    2  there is no such run, or a file of its name with another content
    """
    from ..proof.records.store import Archive, Store, find_repository
    from ..proof.text import counted
    from .terminal import Terminal, short_path

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
    from ..proof.records.evidence import documents_in
    from ..proof.records.store import record_files

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
                yield Carried(file, "", "failed", str(error).removesuffix(f"\nhint: {error.hint}"), error.hint)


def _import(store: Store, path: Path, *, replace: bool) -> Carried:
    from ..proof.records.evidence import read_record

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
    from ..proof.records.evidence import read_record, record_path, write_record

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
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs in evidence/, or files.")],
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="A private SSH key, or a public one whose agent runs.")
    ] = Path("~/.ssh/id_ed25519"),
    as_json: Json = False,
) -> None:
    """Sign records, each in a file <id>.dsse beside it: an in-toto statement of its hash, by ssh-keygen.

    `flashmoe verify` says who signed, by the file evidence/allowed_signers (see man ssh-keygen). A record that
    changes after it was signed shows nothing.

    \b
    Examples:
      flashmoe sign 20261120
      flashmoe sign evidence/*.json.gz --key ~/.ssh/release

    \b
    Exit codes:
      0  all are signed    2  one cannot be read, or the key does not sign
    """
    from ..proof.records.signing import sign as sign_record
    from ..proof.records.store import Archive, Store, find_repository
    from .terminal import Terminal, short_path

    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(), find_repository())
    signed = [short_path(sign_record(archive.file(run), key.expanduser())) for run in runs]
    terminal.show(*signed)
    terminal.document({"signed": signed, "exit_code": HOLDS})


def _count(carried: Sequence[Carried], statuses: Sequence[str]) -> str:
    from ..proof.text import counted

    counts = Counter(str(one.status) for one in carried)
    parts = [f"{counts[status]} {status}" for status in statuses if counts[status]]
    total = counted(sum(counts[status] for status in statuses), "run")
    return f"{total}: {', '.join(parts)}" if parts else total


def _as_plain(one: Carried) -> dict[str, Any]:
    from .terminal import short_path

    return {**vars(one), "path": short_path(one.path)}
