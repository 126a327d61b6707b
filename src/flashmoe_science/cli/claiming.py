"""The verb ``claim``: write claims from a run, and say what they are worth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import ClaimError
from ..proof.claims import add_claims, load_claims
from ..proof.evidence import Record, record_path, write_record
from ..proof.judge import Verdict, VerdictStatus, exit_code
from ..proof.new_claim import Wish, make_claims
from ..proof.report import count_line
from ..proof.store import Archive, Store, find_repository
from ..proof.verify import read_records, suite_now, verify_claim
from .terminal import Terminal, as_plain, short_path

_LITTLE = 1e-9  # a factor that every speedup is above


def run_claim_new(
    key: str, wish: Wish, *, file: Path | None, asserted: bool, store: str | None = None, as_json: bool
) -> int:
    """Write claims from a run and return what ``verify`` would say of them alone."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository() or Path.cwd()
    record = Archive(Store(store), repository).load(key)
    claims = make_claims(record, wish)
    path = _place(file, repository, record)
    records = read_records(repository)
    kept = next((where for where, other in records.items() if other.id == record.id), None)
    records[kept or record_path(Path("evidence"), record.id).as_posix()] = record
    taken = {claim.id for claim in load_claims(repository / "claims")}
    if known := [claim.id for claim in claims if claim.id in taken]:
        raise ClaimError(f"there is a claim {known[0]!r} in claims/ already", hint="--id names another")
    verdicts = [verify_claim(claim, records, repository) for claim in claims]
    code = exit_code(verdicts, strict=True)
    written = asserted or code == 0
    hints = list(dict.fromkeys(filter(None, (_way_out(verdict, record, records, repository) for verdict in verdicts))))
    if written:
        if kept is None:  # a claim is judged by the records of the repository, and this one was in the store alone
            write_record(record, record_path(repository / "evidence", record.id))
        add_claims(path, claims)
    terminal.show_verdicts(verdicts, why=True)
    terminal.show(*_judged_by_another(verdicts, record))
    terminal.show("", *_outcome(verdicts, path, written=written))
    if not written:
        hint = "; ".join([*hints, "--asserted writes it all the same"])
        terminal.log.print(f"hint: {hint}", soft_wrap=True)
    plain = [as_plain(verdict) for verdict in verdicts]
    terminal.document({"path": short_path(path), "written": written, "verdicts": plain, "exit_code": code})
    return code


def _place(file: Path | None, repository: Path, record: Record) -> Path:
    """Return the claim file: the one that was named, in claims/ where it is a bare name, or one for the subject."""
    folder = repository / "claims"
    if file is None:
        return folder / (re.sub(r"[^a-z0-9_.-]+", "-", record.subject.name.lower()) + ".toml")
    path = file.with_suffix(".toml") if file.suffix != ".toml" else file
    path = folder / path if path.parent == Path() else Path.cwd() / path
    if path.parent.resolve() != folder.resolve():
        raise ClaimError(f"file must be in {short_path(folder)}, got {file}", hint="flashmoe verify reads no other")
    return path


def _outcome(verdicts: list[Verdict], path: Path, *, written: bool) -> list[str]:
    where = short_path(path)
    ids = ", ".join(verdict.claim.id for verdict in verdicts)
    return [f"{where}: {ids} written" if written else f"nothing was written to {where}", count_line(verdicts)]


def _judged_by_another(verdicts: list[Verdict], record: Record) -> list[str]:
    """Return which runs decide instead of the one that was named: of several that fit, a claim goes by the newest."""
    others = dict.fromkeys(verdict.record for verdict in verdicts if verdict.record not in (None, record.id))
    said = "a claim goes by the newest complete run that fits it, unless it pins others (key evidence)"
    return [f"judged by run {other}, and not by {record.id}: {said}" for other in others]


def _way_out(verdict: Verdict, record: Record, records: Mapping[str, Record], repository: Path) -> str:
    """Return what would get a claim demonstrated; empty: the reason of its verdict says all that is known."""
    if verdict.status is VerdictStatus.DEMONSTRATED:
        return ""
    if verdict.status is VerdictStatus.STALE:
        return "a new run shows it of the sources as they are"
    if verdict.gate_failed is not None:
        return f"a run that passes gate {verdict.gate_failed} is needed"
    suite = suite_now(record, repository)
    if suite.doubt:
        return suite.mend or "its reason says what is wrong with the suite"
    less = {"factor": _LITTLE, "sentence": ""}  # no sentence says more than that
    easier = verify_claim(verdict.claim.model_copy(update=less), records, repository)
    if easier.status is VerdictStatus.DEMONSTRATED:
        return "a lower --factor, or more rounds, may show it"
    return "more rounds may show it" if verdict.rounds_needed else ""
