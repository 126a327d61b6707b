"""All claims of a repository, judged from the evidence that it carries: on any machine, with no GPU, in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...errors import ClaimError, EvidenceError, ProofError
from ..records.begun import BegunRun
from ..records.documents import read_record
from ..records.evidence import Record
from ..records.store import evidence_files, raise_twins, with_id
from ..subject.loading import is_builtin, load_operator, python_folders
from ..subject.registry import is_user_defined
from ..subject.suites import list_suites, load_suite, operator_in, user_suite_file
from ..subject.trust import ASK, is_trusted
from ..subject.user_suite import is_loaded, read_user_suite
from .claims import Claim, find_evidence, load_claims, other_versions, sentence_fault, too_old, why_not
from .consistency import Check, Consistency, contradiction, signer_in, unique_notes
from .judge import Verdict, VerdictStatus, judge
from .limits import limits_of, refusal_today, rule_of
from .staleness import changes_since
from .unreadable import Unreadable, naming, unreadable_doubts

# With several pinned records or GPUs, the worst verdict decides.
AGAINST = (
    VerdictStatus.REFUTED,
    VerdictStatus.INVALID,
    VerdictStatus.INCONCLUSIVE,
    VerdictStatus.ASSERTED,
    VerdictStatus.STALE,
    VerdictStatus.DEMONSTRATED,
)


def verify_claims(
    repository: Path,
    *,
    now: datetime | None = None,
    on_trouble: Callable[[EvidenceError], None] | None = None,
    on_wrong_claims: Callable[[ClaimError], None] | None = None,
    say: Callable[[str], None] | None = None,
    checked: dict[str, list[Check]] | None = None,
    begun: Sequence[tuple[str, BegunRun]] = (),
) -> list[Verdict]:
    """Return the verdict on every claim in ``claims/`` of ``repository``, by the records in its ``evidence/``.

    Args:
        repository: the folder that holds both.
        now: the moment from which the age of evidence counts. Default: this one.
        on_trouble: gets what is wrong with a record that cannot be read, and the claims that may rest on it are not
            demonstrated. Default: it is raised.
        on_wrong_claims: gets what is wrong with a claim file. Default: it is raised.
        say: gets what is being done: all of it takes seconds.
        checked: gets the checks of every record, by path. Default: only records that a claim cites are checked.
        begun: the lines of the ledger of runs begun that is here.

    Raises:
        ClaimError: a claim file is wrong.
        EvidenceError: a record cannot be read.
    """
    claims = load_claims(repository / "claims", on_trouble=on_wrong_claims)
    unreadable: list[Unreadable] = []
    say = say or (lambda _: None)
    say("reading evidence/")
    records = read_records(repository, unreadable, on_trouble) if claims else {}
    consistency = Consistency(repository, records, begun)
    verdicts = []
    for number, claim in enumerate(claims, 1):
        say(f"judging claim {number} of {len(claims)}")
        verdicts.append(_verify_alone(claim, records, repository, now, unreadable, consistency))
    if checked is not None:
        for path, record in records.items():
            say(f"checking {path}")
            with naming(path):
                checked[path] = consistency.of(record)
    return verdicts


def _verify_alone(
    claim: Claim,
    records: Mapping[str, Record],
    repository: Path,
    now: datetime | None,
    unreadable: Sequence[Unreadable],
    consistency: Consistency,
) -> Verdict:
    """Return the verdict on one claim of several: what is wrong with it does not hide those on the others."""
    if pinned := next((one for one in unreadable if one.is_pinned_by(claim)), None):
        why = f"{pinned.path}, which it pins, cannot be read: {pinned.why}"
        return Verdict(claim=claim, status=VerdictStatus.INCONCLUSIVE, reason=why)
    try:
        return verify_claim(claim, records, repository, now=now, unreadable=unreadable, consistency=consistency)
    except ProofError as error:
        why = error.message.replace(f"{repository}/", "")
        return Verdict(claim=claim, status=VerdictStatus.INCONCLUSIVE, reason=why)


def verify_claim(
    claim: Claim,
    records: Mapping[str, Record],
    repository: Path,
    *,
    now: datetime | None = None,
    unreadable: Sequence[Unreadable] = (),
    consistency: Consistency | None = None,
) -> Verdict:
    """Return the verdict on one claim; ``records`` are those of ``read_records``. Each of several GPUs has its own."""
    now = now or datetime.now(timezone.utc)
    consistency = consistency or Consistency(repository, records)
    parts = [
        _verify_on(one, claim, _evidence_on(one, claim, records), records, repository, now, unreadable, consistency)
        for one in (claim.model_copy(update={"gpu": (gpu,)}) for gpu in claim.gpu)
    ]
    weakest = min(parts, key=_against)
    if len(parts) == 1:
        return weakest
    parts.sort(key=_against)
    named = [(part.claim.gpu[0], part) for part in parts]
    changes = {
        "claim": claim,
        "limits": [f"on {gpu}, {limit}" for gpu, part in named for limit in part.limits],
        "reason": "; ".join(f"{gpu}: {part.status.value}, {part.reason}" for gpu, part in named),
        "notes": [f"on {gpu}, {note}" for gpu, part in named for note in part.notes],
        "gate_failed": next((part.gate_failed for part in parts if part.gate_failed), None),
        "by_gpu": parts,
    }
    return weakest.model_copy(update=changes)


def _against(verdict: Verdict) -> int:
    return AGAINST.index(verdict.status)


def _evidence_on(one: Claim, claim: Claim, records: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records that decide ``claim`` on the GPU of ``one``, without those that it pins for another."""
    found = find_evidence(one, records)
    return {path: record for path, record in found.items() if _is_on(one, record) or not _is_on(claim, record)}


def _is_on(claim: Claim, record: Record) -> bool:
    gpu = record.environment.gpu
    return gpu is not None and claim.fits_gpu(gpu.name)


def _verify_on(
    claim: Claim,
    whole: Claim,
    found: Mapping[str, Record],
    records: Mapping[str, Record],
    repository: Path,
    now: datetime,
    unreadable: Sequence[Unreadable],
    consistency: Consistency,
) -> Verdict:
    """Return the verdict on a claim about one GPU, by that of the records ``found`` which speaks most against it.

    ``whole`` is the claim as it is written, about all its GPUs.
    """
    lost = unreadable_doubts(claim, unreadable)
    if not found:
        nothing = judge(claim, None)
        return nothing.model_copy(update={"reason": "; ".join([nothing.reason, *lost]), "notes": lost})
    verdicts = []
    for path, record in found.items():
        with naming(path):
            suite = suite_now(record, repository)
            doubts = [*lost, *doubts_about(whole, record, suite, now)]
            doubts += _failed_since(claim, record, records)
            sources = changes_since(claim, record, repository)
            checks = consistency.of(record)
            notes = [*sources.notes, *_refuted_since(claim, found, records), *unique_notes(checks)]
            verdict = judge(
                claim,
                record,
                suite=suite.problems,
                changed=sources.changed,
                notes=notes,
                doubts=doubts,
                contradiction=contradiction(checks),
            )
        about = {
            "evidence": path,
            "limits": limits_of(claim, record, records, consistency.begun),
            "signature": signer_in(checks),
            "rule": rule_of(claim, record),
            "refused_today": refusal_today(claim, record, verdict.status),
        }
        verdicts.append(verdict.model_copy(update=about))
    return min(verdicts, key=_against)


def doubts_about(claim: Claim, record: Record, suite: SuiteNow, now: datetime) -> list[str]:
    """Return what keeps ``record`` from demonstrating ``claim``: its sentence, its age, or a suite not read here."""
    return list(filter(None, (sentence_fault(claim, record), too_old(claim, record, now), suite.doubt)))


def read_records(
    repository: Path,
    unreadable: list[Unreadable] | None = None,
    on_trouble: Callable[[EvidenceError], None] | None = None,
) -> dict[str, Record]:
    """Return the records in ``evidence/`` of ``repository``, by their path from its root.

    What cannot be read goes to ``unreadable`` and ``on_trouble``. Default: it is raised as ``EvidenceError``.
    """
    records = {}

    def leave_out(run: str, files: Sequence[Path], error: EvidenceError) -> None:
        if unreadable is None or on_trouble is None:
            raise error
        unreadable.extend(Unreadable.of(file.relative_to(repository).as_posix(), run, file, error) for file in files)
        on_trouble(error)

    def leave_twins_out(run: str, files: Sequence[Path]) -> None:
        try:
            raise_twins(run, files)
        except EvidenceError as error:
            leave_out(run, files, error)

    for run, file in evidence_files(repository, on_twins=leave_twins_out).items():
        try:
            records[file.relative_to(repository).as_posix()] = with_id(run, read_record(file), file)
        except EvidenceError as error:
            leave_out(run, [file], error)
    return records


def _failed_since(claim: Claim, record: Record, records: Mapping[str, Record]) -> list[str]:
    """Return in at most one line that a newer run of the same subject, suite and GPU stopped at a gate."""
    newer = [
        other
        for other in records.values()
        if other.created_at > record.created_at
        and _same_subject(other, record)
        and other.suite == claim.suite
        and other_versions(claim, other) is None
    ]
    for other in sorted(newer, key=lambda other: other.created_at, reverse=True):
        if (failed := other.failed_gate) and other.environment.gpu and claim.fits_gpu(other.environment.gpu.name):
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


@dataclass(frozen=True)
class SuiteNow:
    """The suite of a record as it is in a repository now."""

    problems: Mapping[str, Mapping[str, Any]] | None = None  # of its cases by name; None: it cannot be read
    doubt: str = ""  # why not
    mend: str = ""  # what makes it known


def _problems(name_or_path: str) -> dict[str, Mapping[str, Any]]:
    suite = load_suite(name_or_path)
    as_table = load_operator(suite.operator).as_table
    return {case.name: as_table(case.problem) for case in suite.cases}


_packaged_problems = functools.lru_cache(_problems)  # many claims are about one suite


def suite_now(record: Record, repository: Path) -> SuiteNow:
    """Return the suite that ``record`` is of as it is now. One that cannot be read is a doubt, and not an error."""
    name = record.suite
    own = user_suite_file(record, repository)
    if own is None and name not in list_suites():
        doubt = f"suite {name} is not known here, so nobody compared its cases with the record's"
        return SuiteNow(doubt=doubt, mend=f"its file belongs beside the kernel.toml, or into suites/ as {name}.toml")
    try:
        if own is not None and is_user_defined(operator := operator_in(own)):
            folders = python_folders(record, repository)
            if not is_loaded(operator, own, folders) and not is_trusted(repository):
                doubt = f"suite {name} is of operator {operator}, the code of {own}, which may not run yet"
                return SuiteNow(doubt=f"{doubt}: {ASK}".replace(f"{repository}/", ""), mend=ASK)
            return SuiteNow(read_user_suite(own, operator, folders))
        return SuiteNow(_packaged_problems(name) if own is None else _problems(str(own)))
    except ProofError as error:
        why = error.message.replace(f"{repository}/", "")
        return SuiteNow(doubt=f"suite {name} cannot be read, so nobody compared its cases: {why}", mend=error.hint)
