"""Limits of a verdict: what the run behind it could not have seen, however its interval looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..records.begun import BegunRun, count_alike
from ..records.evidence import Record
from ..text import counted
from .claims import Claim
from .judge import VerdictStatus, paired_processes

PROCESSES_OF_A_CLAIM = 5  # of a new one; docs/explanation/statistics.md has what fewer miss
RARE = 0.1  # the share of processes in a rare slow mode, of which a verdict says how often it stays unseen

UNKNOWN_RUNS = "how many runs of its kind were begun is not known"


_Lines = Sequence[tuple[str, BegunRun]]


def limits_of(claim: Claim, record: Record, records: Mapping[str, Record], begun: _Lines = ()) -> list[str]:
    """Return what the verdict on ``claim`` by ``record`` cannot say, a sentence each.

    ``records`` are all that are kept, by path; ``begun`` are the lines of the ledger of runs begun that is here.
    """
    return [*_modes(claim, record), runs_begun(record, records, begun)]


def fewest_processes(claim: Claim, record: Record) -> int:
    """Return the fewest worker processes that measured a case of the claim; 0: none did, or it is of memory."""
    if claim.metric == "memory":
        return 0
    counts = [
        processes
        for case in claim.cases_of(record)
        for baseline in claim.baseline
        if (processes := paired_processes(case, claim.metric, baseline, claim.subject))
    ]
    return min(counts, default=0)


def rule_of(claim: Claim, record: Record) -> str:
    """Return by which rules ``record`` was made and judges ``claim``: processes, errors and values."""
    processes = fewest_processes(claim, record)
    accuracies = [arm.accuracy for case in record.cases for arm in case.arms if arm.role == "subject" and arm.accuracy]
    by_element = bool(accuracies) and all(accuracy.element_share is not None for accuracy in accuracies)
    return ", ".join(
        (
            counted(processes, "process") if processes else "bytes, counted once",
            "a bound for each error" if by_element else "one bound for all errors",
            "values that are new in each call" if record.settings.method > 1 else "values that repeat",
        )
    )


def refusal_today(claim: Claim, record: Record, status: VerdictStatus) -> str:
    """Return why ``claim new`` would not write this claim from this record today; empty where it would."""
    if status is not VerdictStatus.DEMONSTRATED:
        return f"it is {status.value}"
    few = 0 < fewest_processes(claim, record) < PROCESSES_OF_A_CLAIM
    return f"{PROCESSES_OF_A_CLAIM} processes are asked for" if few else ""


def not_seen(record: Record) -> str:
    """Return in one line what no interval of a run allows for; empty where nothing was timed."""
    processes = min((len(set(rounds.process)) for case in record.cases for rounds in case.rounds), default=0)
    if not processes:
        return ""
    return (
        f"not seen: a slow mode of one process in ten, in {_unseen(processes):.0%} of runs with "
        f"{counted(processes, 'process')}; what a subject changes and undoes within a call"
    )


def _unseen(processes: int) -> float:
    """Return how often so many processes have none in a rare mode."""
    return (1 - RARE) ** processes


def _modes(claim: Claim, record: Record) -> list[str]:
    processes = fewest_processes(claim, record)
    if not processes:
        return []
    missed = f"{_unseen(processes):.0%} of runs"
    return [f"{counted(processes, 'process')} miss a slow mode of one process in ten in {missed}"]


def runs_begun(record: Record, records: Mapping[str, Record], lines: _Lines = ()) -> str:
    """Return how many runs of the kind of ``record`` were begun in its store, and how many of them are kept here."""
    if record.begun is None:
        return UNKNOWN_RUNS
    alike = [other for other in records.values() if other.kind == record.kind]
    same_store = {
        other.id: other.begun.count for other in alike if other.begun and other.begun.ledger == record.begun.ledger
    }
    here = count_alike(lines, record) if lines and lines[0][0] == record.begun.ledger else 0
    begun = max([record.begun.count, here, *same_store.values()])
    kept = same_store.keys() | {record.id}
    others = len({other.id for other in alike} - kept)
    beside = f"; of how many runs {others} more {'is' if others == 1 else 'are'}, is not known" if others else ""
    return f"{counted(begun, 'run')} of its kind {'was' if begun == 1 else 'were'} begun, and {len(kept)} kept{beside}"
