"""All claims of a repository, judged from the evidence that it carries: on any machine, with no GPU, in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .claims import Claim, find_evidence, load_claims, why_not
from .evidence import GateStatus, Record, read_record
from .judge import Verdict, VerdictStatus, judge
from .operator import load_operator
from .store import evidence_files
from .subject import PACKAGE_FOLDER, is_builtin
from .suites import list_suites, load_suite

# Of several records that a claim pins, the one that speaks most against it decides.
_AGAINST = (
    VerdictStatus.REFUTED,
    VerdictStatus.INVALID,
    VerdictStatus.INCONCLUSIVE,
    VerdictStatus.ASSERTED,
    VerdictStatus.DEMONSTRATED,
)


def verify_claims(repository: Path) -> list[Verdict]:
    """Return the verdict on every claim in ``claims/`` of ``repository``, by the records in its ``evidence/``.

    Raises:
        ClaimError: a claim file is wrong, or names a record that is not there.
        EvidenceError: a record cannot be read.
        SuiteError: a suite that a claim names is known here, but its file is wrong.
    """
    claims = load_claims(repository / "claims")
    records = read_records(repository) if claims else {}
    return [verify_claim(claim, records, repository) for claim in claims]


def verify_claim(claim: Claim, records: Mapping[str, Record], repository: Path) -> Verdict:
    """Return the verdict on one claim; ``records`` are those of ``read_records``."""
    found = find_evidence(claim, records)
    if not found:
        return judge(claim, None)
    verdicts = []
    for path, record in found.items():
        suite = suite_now(claim.suite, repository)
        doubts = _failed_since(claim, record, records)
        if suite is None:
            doubts.append(unknown_suite(claim.suite))
        notes = [*source_changes(record, repository), *_refuted_since(claim, found, records)]
        verdict = judge(claim, record, suite=suite, notes=notes, doubts=doubts)
        verdicts.append(verdict.model_copy(update={"evidence": path}))
    return min(verdicts, key=lambda verdict: _AGAINST.index(verdict.status))


def read_records(repository: Path) -> dict[str, Record]:
    """Return the records in ``evidence/`` of ``repository``, by their path from its root.

    Raises:
        EvidenceError: one cannot be read.
    """
    files = evidence_files(repository).values()
    return {path.relative_to(repository).as_posix(): read_record(path) for path in files}


def source_changes(record: Record, repository: Path) -> list[str]:
    """Return in at most one line which sources differ, in ``repository`` now, from those that ran."""
    subject, commit = record.subject, record.environment.commit
    folders = [repository / subject.folder] if subject.folder is not None else _package_folders(repository)
    now = {source.path: _digest(folders, source.path) for source in subject.sources}
    if not any(now.values()):
        where = "no longer" if subject.folder is not None else "not"
        return [f"its sources are {where} in this repository, so nobody compared them"] if now else []
    differ = [source.path for source in subject.sources if now[source.path] != source.sha256]
    if not differ:
        return []
    where = f"at commit {commit[:12]}; " if commit else ""  # what the verdict holds for
    return [f"{where}sources changed since the run: {len(differ)} of {len(now)}, {', '.join(differ)}"]


def _package_folders(repository: Path) -> list[Path]:
    """Return where the sources of a built-in subject may be: this repository's own package, or the installed one."""
    return [repository / "src" / PACKAGE_FOLDER.name, PACKAGE_FOLDER]


def _digest(folders: list[Path], path: str) -> str | None:
    """Return the SHA-256 of the first file of this path, or None where there is none."""
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else None


def _failed_since(claim: Claim, record: Record, records: Mapping[str, Record]) -> list[str]:
    """Return in at most one line that a newer run of the same subject, suite and GPU stopped at a gate."""
    newer = [
        other
        for other in records.values()
        if other.created_at > record.created_at and _same_subject(other, record) and other.suite == claim.suite
    ]
    for other in sorted(newer, key=lambda other: other.created_at, reverse=True):
        failed = next((gate for gate in other.gates if gate.status is GateStatus.FAILED), None)
        if failed and other.environment.gpu and claim.fits_gpu(other.environment.gpu.name):
            return [f"a newer run, {other.id}, failed gate {failed.name}"]
    return []


def _refuted_since(claim: Claim, pinned: Mapping[str, Record], records: Mapping[str, Record]) -> list[str]:
    """Return in at most one line which newer records refute a claim that pins older ones."""
    if not claim.evidence:
        return []
    newest = max(record.created_at for record in pinned.values())
    refuting = [
        other.id
        for path, other in records.items()
        if path not in pinned
        and other.created_at > newest
        and why_not(claim, other) is None
        and judge(claim, other).status is VerdictStatus.REFUTED
    ]
    return [f"newer runs that it does not pin refute it: {', '.join(refuting)}"] if refuting else []


def _same_subject(one: Record, other: Record) -> bool:
    """Return whether two records are of one subject: two files kernel.toml may use the same name."""
    if is_builtin(one.subject):  # whose folder differs between a repository and an installed package
        return one.subject.name == other.subject.name and is_builtin(other.subject)
    keys = [(record.subject.name, record.subject.entry_point, record.subject.folder) for record in (one, other)]
    return keys[0] == keys[1]


def suite_now(name: str, repository: Path) -> dict[str, dict[str, Any]] | None:
    """Return the cases of a suite as they are now: name -> problem; None where nothing of this name is known."""
    own = repository / "suites" / f"{name}.toml"
    if not own.is_file() and name not in list_suites():
        return None
    suite = load_suite(str(own) if own.is_file() else name)
    operator = load_operator(suite.operator)
    return {case.name: operator.as_table(case.problem) for case in suite.cases}


def unknown_suite(name: str) -> str:
    """Return what to say where ``suite_now`` finds no suite of this name."""
    return f"suite {name} is not known here, so nobody compared its cases with the record's"
