"""The files of records: gzipped JSON, written atomically, and read with an error that names file, key and fault.

Arms share most launches, so a document lists each launch once, under ``launches``, and an arm names its launches by
their index. Schema 1 repeated them in each arm; both are read, and so is a file without compression, ``<id>.json``.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import ValidationError

from ...errors import EvidenceError
from .evidence import SCHEMA_VERSION, Arm, CaseRecord, Rates, Record, TimeKind, rates_of
from .files import load_json, read_bounded, write_atomically

SUFFIX = ".json.gz"
NEWER = "a newer flashmoe made it: update this one (in its clone: git pull, then make prove)"

_GZIP_MAGIC = b"\x1f\x8b"
_SAME_RATE = 1e-9  # as a share: of two ways to work out the same median
_SHORTEST, _LONGEST = 1e-12, 1e9  # seconds: no clock gives others, and their ratios have no float
TEXT_BYTES = 256 << 20  # of a document; those of the largest suites have some ten million


def record_text(record: Record) -> str:
    """Return ``record`` as the text of its document: one line of JSON, with each launch once."""
    document = json.loads(record.model_dump_json())
    table: list[dict[str, Any]] = []
    index_of: dict[str, int] = {}

    def indices(launches: list[dict[str, Any]]) -> list[int]:
        for launch in launches:
            if (key := json.dumps(launch)) not in index_of:
                index_of[key] = len(table)
                table.append(launch)
        return [index_of[json.dumps(launch)] for launch in launches]

    for case in document["cases"]:
        for arm in case["arms"]:
            arm["launches"] = indices(arm["launches"])
            arm["rank_launches"] = [indices(launches) for launches in arm["rank_launches"]]
            _leave_out_if_empty(arm, "rank_launches")
        for rounds in case["rounds"]:
            _leave_out_if_empty(rounds, "ranks")
    _leave_out_if_empty(document["environment"], "ranks")
    _leave_out_if_empty(document, "alone")
    document["launches"] = table
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _leave_out_if_empty(table: dict[str, Any], key: str) -> None:
    """Keep a record as it was before there was anything to say under ``key``."""
    if not table[key]:
        del table[key]


def record_path(folder: Path, run_id: str) -> Path:
    """Return the file of a run in ``folder``."""
    return folder / f"{run_id}{SUFFIX}"


def is_document(path: str | Path) -> bool:
    """Return whether a path ends as records do: in ``.json.gz`` or ``.json``."""
    return str(path).endswith((SUFFIX, ".json"))


def name_of(path: Path) -> str:
    """Return the name of a document's file without its ending; of a record, that is its id."""
    return path.name.removesuffix(".gz").removesuffix(".json")


def documents_in(folder: Path) -> list[Path]:
    """Return the JSON documents in a folder by name, compressed or not."""
    return sorted(path for path in folder.glob("*.json*") if is_document(path))


def write_document(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, compressed where it ends in ``.gz``: a reader sees the old file or the new one.

    Equal texts give equal files.
    """
    write_atomically(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)


def write_record(record: Record, path: Path) -> None:
    """Write ``record`` to ``path`` so that a reader sees the old file or the new one, never half of one."""
    write_document(path, record_text(record))


def read_record(path: Path) -> Record:
    """Read one record. Raises ``EvidenceError`` with file, key and what was expected."""
    return parse_record(read_text(path), path)


def open_document(file: BinaryIO) -> BinaryIO:
    """Return what reads the text of an open file, which may be gzipped."""
    gzipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=file)) if gzipped else file


def read_text(path: Path) -> str:
    """Return the text of a file, decompressed where it is gzipped. Raises ``EvidenceError``."""
    try:
        return read_bounded(path, TEXT_BYTES, open_document).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise EvidenceError(f"{path}: cannot be read: {reason}") from error


def parse_record(text: str, where: object) -> Record:
    """Return the record in ``text``, and see that its rates follow from its samples.

    Raises ``EvidenceError`` with ``where``, key and what was expected.
    """
    try:
        record = Record.model_validate_json(text)
    except ValidationError as error:
        newer = _newer_schema(text)
        unknown = [found for found in error.errors() if found["type"] == "extra_forbidden"]
        first = (unknown or error.errors())[0]
        key = ".".join(str(part) for part in first["loc"]) or "(document)"
        said = first["msg"].removeprefix("Value error, ")
        place = "is no record of a run" if first["type"] == "json_invalid" else f"key {key}"
        why = newer or f"{place}: {'unknown key' if unknown else said}"
        raise EvidenceError(f"{where}: {why}", hint=NEWER if newer or unknown else "") from error
    if record.schema_version > SCHEMA_VERSION:  # a name that is known may mean something else there
        raise EvidenceError(f"{where}: {_newer_schema(text)}", hint=NEWER)
    for case in record.cases:
        _check_times(case, where)
        for arm in case.arms:
            _check_rates(case, arm, where)
    return record


def _newer_schema(text: str) -> str:
    """Return that a record says of itself that it is of a newer schema, or an empty text."""
    try:
        document = load_json(text)
    except ValueError:
        return ""
    version = document.get("schema_version") if isinstance(document, dict) else None
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    return f"it has schema {version}, and this flashmoe reads up to {SCHEMA_VERSION}" if newer else ""


def _check_times(case: CaseRecord, where: object) -> None:
    """Raise ``EvidenceError`` for a time that no clock gives. Of 0, infinity and the like the judge says so."""
    for rounds in case.rounds:
        for kind, columns in rounds.seconds.items():
            for arm, column in columns.items():
                for seconds in column:
                    if not _SHORTEST <= abs(seconds) <= _LONGEST and seconds and math.isfinite(seconds):
                        what = f"{where}: case {case.name}, arm {arm}, {kind} time"
                        raise EvidenceError(f"{what}: expected {_SHORTEST:g} to {_LONGEST:g} s, got {seconds:g}")


def _check_rates(case: CaseRecord, arm: Arm, where: object) -> None:
    """Raise ``EvidenceError`` where a rate that stands in a record is not the one that its samples show."""
    shown: Mapping[TimeKind, Rates] = rates_of(case, arm.name) if arm.rates else {}
    for kind, said in arm.rates.items():
        what = f"{where}: case {case.name}, arm {arm.name}, {kind} time"
        if kind not in shown:
            raise EvidenceError(f"{what}: it says {said.seconds:.4g} s, and has no samples of it")
        for name, value in said:
            follows = getattr(shown[kind], name)
            if not math.isclose(value, follows, rel_tol=_SAME_RATE):
                raise EvidenceError(f"{what}: it says {value:.6g} {name}, and its samples show {follows:.6g}")
