"""Several runs beside one another, as far as their records allow: the same problem, the same kind of time.

Nothing is computed from two runs together: a ratio belongs to the run in which both arms took turns. Absolute times
stand beside one another with the cards they were taken on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..judge.rows import KINDS, ArmRow, arm_rows, kinds_measured
from ..records.evidence import CaseRecord, Record, TimeKind


@dataclass(frozen=True)
class SharedCase:
    """One problem that at least two runs measured: for each run its case and the row of the baseline."""

    name: str
    seconds: Sequence[float | None]  # of the subject, by run
    rows: Sequence[ArmRow | None]  # of the baseline, by run: the speedup


@dataclass(frozen=True)
class SideBySide:
    """What some runs have in common."""

    kind: TimeKind
    baseline: str
    records: Sequence[Record]
    cases: Sequence[SharedCase]

    @property
    def differing(self) -> list[str]:
        """Return what differs between the runs that an absolute time depends on."""
        what = {
            "GPU": [r.environment.gpu_name for r in self.records],
            "card": [r.environment.gpu.uuid_hash if r.environment.gpu else "" for r in self.records],
            "driver": [r.environment.driver or "" for r in self.records],
            **{name: [r.environment.versions.get(name, "") for r in self.records] for name in ("torch", "triton")},
            "protocol": [r.settings.model_dump_json(exclude={"seed", "times"}) for r in self.records],
        }
        return [name for name, values in what.items() if len(set(values)) > 1]


def side_by_side(records: Sequence[Record]) -> list[SideBySide]:
    """Return, for every kind of time and baseline that at least two runs share, the problems that they share."""
    found = []
    for kind in KINDS:
        timed = [record for record in records if kind in kinds_measured(record)]
        for baseline in dict.fromkeys(name for record in timed for name in record.baselines):
            sharing = [record for record in timed if baseline in record.baselines]
            cases = _shared_cases(sharing, kind, baseline) if len(sharing) > 1 else []
            if cases:
                found.append(SideBySide(kind, baseline, sharing, cases))
    return found


def _shared_cases(records: Sequence[Record], kind: TimeKind, baseline: str) -> list[SharedCase]:
    by_problem = [{_key(row.case): row for row in arm_rows(r, kind) if row.arm.name == baseline} for r in records]
    shared = []
    for key in dict.fromkeys(key for rows in by_problem for key, row in rows.items() if row.ratio):
        rows = [found.get(key) for found in by_problem]
        if sum(row is not None and row.ratio is not None for row in rows) > 1:
            name = next(row.case.name for row in rows if row)
            seconds = [_subject_seconds(row.case, kind) if row else None for row in rows]
            shared.append(SharedCase(name, seconds, rows))
    return shared


def _key(case: CaseRecord) -> str:
    problem: Mapping[str, object] = case.problem
    return repr(sorted(problem.items()))


def _subject_seconds(case: CaseRecord, kind: TimeKind) -> float | None:
    rates = next((arm.rates.get(kind) for arm in case.arms if arm.role == "subject"), None)
    return rates.seconds if rates else None
