"""Go on with an interrupted run: its finished cells are kept, and the missing ones are measured here.

A run fills a table of cells: a case, a worker process, and the kinds of time that share a process. A cell is taken in
one piece, so it is there or missing. Only a run that could have been the same one is gone on with: same subject and
sources, cases, baselines, settings and seed, on the same card with the same software.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import EvidenceError, TooFewRoundsError
from ..judge.judge import paired_log_ratios
from ..judge.statistics import clustered_interval
from ..records.evidence import CaseRecord, GateName, GateStatus, Record, Resumed, Rounds, TimeKind
from ..text import counted
from .run import CHANGED_SOURCES, Outcome, Run

_SHOWN_FIELDS = 4
_DIGEST_LETTERS = 12


def check_resumable(old: Record, new: Record) -> None:
    """Refuse to go on with ``old`` in a run that begins as ``new``, unless nothing that decides a time differs.

    Raises:
        EvidenceError: it is complete, or may not be pooled with what this run adds: says the field and both values.
    """
    anew = "`flashmoe prove` without --resume starts anew"
    if old.complete:
        raise EvidenceError(f"run {old.id} is complete: nothing is missing", hint=anew)
    if old.incomplete_reason.startswith(CHANGED_SOURCES):
        raise EvidenceError(f"run {old.id} cannot be resumed: its sources {old.incomplete_reason}", hint=anew)
    if old.environment.dirty or new.environment.dirty:
        where = "its tree" if old.environment.dirty else "the tree here"
        message = f"run {old.id} cannot be resumed: {where} had uncommitted changes, and nobody can compare those"
        raise EvidenceError(message, hint=f"commit before a run that is to be resumed; {anew}")
    before, now = _identity(old), _identity(new)
    differ = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differ:
        first = differ[0]
        values = f"{first} is {_said(before, first)} in it, and {_said(now, first)} here"
        message = f"run {old.id} cannot be resumed: {values}"
        if more := differ[1:]:
            names = ", ".join(more[:_SHOWN_FIELDS]) + (", ..." if len(more) > _SHOWN_FIELDS else "")
            message += f"; {names} {'differs' if len(more) == 1 else 'differ'} too"
        raise EvidenceError(message, hint=_hint(first, anew))


def _hint(field: str, anew: str) -> str:
    if field == "environment.gpu.uuid_hash":
        return f"it is another card of the same model, and times of two cards cannot be pooled; {anew}"
    return anew


def _identity(record: Record) -> dict[str, Any]:
    """Return everything that must not differ, by the name under which a difference is told."""
    subject, environment = record.subject, record.environment.model_dump(mode="json")
    gpu = environment.pop("gpu") or {"name": None}
    fields: dict[str, Any] = {f"subject.{name}": getattr(subject, name) for name in ("name", "operator", "entry_point")}
    fields |= {f"source {source.path}": source.sha256[:_DIGEST_LETTERS] for source in subject.sources}
    fields |= {"suite": record.suite}
    fields |= {f"case {case.name}": case.problem for case in record.cases}
    fields |= {"baselines": record.baselines, "expected speedup": subject.expected_speedup}
    fields |= _flat("settings", record.settings.model_dump(mode="json"))
    fields |= _flat("environment.gpu", gpu)
    fields |= _flat("environment", environment)
    return fields


def _flat(prefix: str, table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(f"{prefix}.{name}", value) if isinstance(value, Mapping) else {f"{prefix}.{name}": value}
    return flat


def _said(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return "absent" if value in (None, "") else str(value)


def adopt(run: Run, old: Record) -> None:
    """Take over into ``run`` what ``old`` has finished."""
    run.resumed = [Resumed(run=old.id, created_at=old.created_at), *old.resumed]
    run.kept_gates = {gate.name: gate for gate in old.gates if gate.status is GateStatus.PASSED}
    run.alone = list(old.alone)
    before = {case.name: case for case in old.cases}
    for name in run.served:
        case = before[name]
        if case.rounds or (not run.has_gpu and _is_checked(case)):
            _adopt_case(run, case)
            if is_finished(run, name):
                run.finished.add(name)


def _adopt_case(run: Run, case: CaseRecord) -> None:
    fresh = {arm.name: arm for arm in run.cases[case.name].arms}
    # An arm that was not reached says why it was not: here it may be.
    arms = [fresh.get(arm.name, arm) if arm.status == "not measured" and not arm.accuracy else arm for arm in case.arms]
    rounds = [_one_run_older(each) for each in case.rounds]
    run.cases[case.name] = CaseRecord(**{**dict(case), "arms": arms, "rounds": rounds})


def _one_run_older(rounds: Rounds) -> Rounds:
    sessions = rounds.session or [0] * len(rounds.process)
    return rounds.model_copy(update={"session": [session + 1 for session in sessions]})


def is_finished(run: Run, name: str) -> bool:
    """Return whether nothing of a case is missing that can be had on this machine."""
    case = run.cases[name]
    if not run.has_gpu:
        return _is_checked(case)
    n = run.settings.processes
    planned = [(process, mode) for mode in run.modes for process in range(n)]
    if not all(has_cell(case, *cell) for cell in planned):
        return False
    return all(has_cell(case, p, mode) for mode in run.modes if is_wide(run, name, mode) for p in range(n, 2 * n))


def is_wide(run: Run, name: str, mode: Sequence[TimeKind]) -> bool:
    """Return whether the planned processes leave a speedup with a wider interval than ``--width`` to either side."""
    case, width = run.cases[name], run.settings.width
    if width is None:
        return False
    baselines = [arm.name for arm in case.arms if arm.role == "baseline"]
    for kind, baseline in itertools.product(mode, baselines):
        found = paired_log_ratios(case, kind, baseline, run.subject.name)
        groups = [values for (_, process), values in found.items() if process < run.settings.processes]
        try:
            interval = clustered_interval(groups) if groups else None
        except TooFewRoundsError:
            return True
        if interval is not None and (interval.high - interval.low) / 2 > math.log1p(width):
            return True
    return False


def has_cell(case: CaseRecord, process: int, mode: Sequence[TimeKind]) -> bool:
    """Return whether the rounds of one process for the kinds of time ``mode`` are there."""
    return any(process in rounds.process and set(rounds.seconds) <= set(mode) for rounds in case.rounds)


def _is_checked(case: CaseRecord) -> bool:
    return case.correct is not False and any(arm.role == "subject" and arm.accuracy for arm in case.arms)


def kept_outcome(run: Run, name: GateName) -> Outcome | None:
    """Return the outcome of a gate in the earlier run, where a repetition would show nothing new.

    What proves this machine runs again: sources, the build command, import, and for the missing cases launch and
    correct. Quick was there to stop a hopeless run early: where it passed, the long part had begun.
    """
    old = run.kept_gates.get(name)
    nothing_missing = not run.todo and name in ("launch", "correct", "bench")
    if old is None or not (name == "quick" or nothing_missing):
        return None
    return Outcome(old.status, old.summary, old.hint, [*old.details, f"as run {run.resumed[0].run} showed it"])


def kept_note(run: Run) -> str:
    """Return how much was taken over, for the log. A measurement is one case in one process."""
    planned = set(range(run.settings.processes))
    cells = sum(len(planned & set(rounds.process)) for case in run.cases.values() for rounds in case.rounds)
    finished = f"{len(run.finished)} of {counted(len(run.served), 'case')} finished"
    kept = (
        f", {cells} of {len(run.served) * len(run.modes) * run.settings.processes} measurements" if run.has_gpu else ""
    )
    return f"going on with {run.resumed[0].run}: {finished}{kept}"
