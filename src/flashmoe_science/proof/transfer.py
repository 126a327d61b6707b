"""Carry records into a store and out of it, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import EvidenceError
from .evidence import documents_in, parse_record, read_text, record_path, write_document
from .store import Archive, Store, is_record


@dataclass(frozen=True)
class Carried:
    """What came of one record. ``id`` is "" and ``reason`` says why, where it was not carried."""

    path: Path
    id: str
    status: Literal["new", "replaced", "same", "left out", "failed"]
    reason: str = ""
    hint: str = ""


def record_files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield every file to import, and whether it was named itself: a folder may hold other documents too.

    Raises:
        EvidenceError: there is no such file or folder, or a folder holds no JSON file.
    """
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        files = documents_in(path)
        if not files:
            raise EvidenceError(
                f"{path}: holds no *.json or *.json.gz", hint="name files, or the folder that they lie in"
            )
        yield from ((file, False) for file in files)


def import_records(store: Store, paths: Sequence[Path], *, replace: bool = False) -> Iterator[Carried]:
    """Save the records in ``paths``, files and folders. One that fails is yielded as such, and the others go on.

    Args:
        store: Where they go.
        paths: Files, or folders whose JSON documents are meant.
        replace: Whether a complete run that the store has with another content is replaced. One that is incomplete
            there always is: a run grows.
    """
    for path, named in list(record_files(paths)):
        try:
            yield _import(store, path, named=named, replace=replace)
        except EvidenceError as error:
            yield Carried(path, "", "failed", str(error).removesuffix(f"\nhint: {error.hint}"), error.hint)


def _import(store: Store, path: Path, *, named: bool, replace: bool) -> Carried:
    text = read_text(path)
    if not named and not is_record(text):
        return Carried(path, "", "left out", "no record of a run")
    record = parse_record(text, path)
    known = record.id in store.ids(record.id)
    if known and store.text(record.id) == text:
        return Carried(path, record.id, "same")
    if known and not replace and store.document(record.id).complete:
        raise EvidenceError(
            f"{path}: run {record.id} is in {store} with another content, and complete",
            hint="a record is not edited: see which is right, then --replace takes the file's",
        )
    store.save(record, text=text)
    return Carried(path, record.id, "replaced" if known else "new")


def export_records(archive: Archive, keys: Iterable[str], folder: Path) -> Iterator[Carried]:
    """Write the runs to ``folder``, each as ``<id>.json.gz``.

    Raises:
        EvidenceError: there is no such run, or a file of its name with another content.
    """
    for key in keys:
        text = archive.text(key)
        record = parse_record(text, key)
        path = record_path(folder, record.id)
        if path.exists():
            if read_text(path) != text:
                raise EvidenceError(f"{path}: exists with another content", hint="export to another folder")
            yield Carried(path, record.id, "same")
            continue
        try:
            write_document(path, text)
        except OSError as error:
            raise EvidenceError(f"{path}: cannot be written: {error.strerror}") from error
        yield Carried(path, record.id, "new")
