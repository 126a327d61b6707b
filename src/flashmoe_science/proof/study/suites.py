"""How often comparisons of whole suites are wrong, by the runs that there are: nothing is measured for it.

Every run times a second copy of its first baseline in each of its cases: a comparison of a kernel with itself over a
whole suite. What is called faster or slower there is called so wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...errors import TooFewRoundsError
from ..compare import TOLERANCE, Effect, effect_of
from ..evidence import CaseRecord, Model, Record, TimeKind
from ..judge import paired_log_ratios
from ..rows import kinds_measured
from ..simultaneous import comparison_intervals
from ..statistics import Interval, proportion_interval

REQUIRED = 0.05  # the largest share of comparisons in which any case may be called wrongly

_FEWEST_CASES = 2  # one alone is what a study compares


class SuiteTrial(Model):
    """The first baseline of one run against its second copy, in all cases and one kind of time."""

    run: str
    gpu: str
    metric: TimeKind
    cases: int
    processes: int  # of the case that has the fewest
    wrong: list[str]  # cases in which one of two equal arms is called faster, with a tolerance of 0
    same: int  # cases that are shown to be the same with the tolerance of compare


class SuiteTally(Model):
    """What such comparisons show together."""

    trials: list[SuiteTrial]
    runs: int  # that they are of
    counted: int  # comparisons with a wrong verdict in any of their cases
    share: Interval | None  # of those, with the interval of Clopper and Pearson; None: there are none
    same: int  # comparisons all of whose cases are shown to be the same
    required: float = REQUIRED

    @property
    def holds(self) -> bool | None:
        """Return whether verdicts are wrong as rarely as required; None: there are too few comparisons to say."""
        if self.share is None or self.share.low <= self.required < self.share.high:
            return None
        return self.share.high <= self.required


def tally_of(records: Iterable[Record]) -> SuiteTally:
    """Return what the controls of ``records`` show of comparisons over their suites."""
    trials = [trial for record in records for trial in suite_trials(record)]
    wrong = sum(bool(trial.wrong) for trial in trials)
    return SuiteTally(
        trials=trials,
        runs=len({trial.run for trial in trials}),
        counted=wrong,
        share=proportion_interval(wrong, len(trials)) if trials else None,
        same=sum(trial.same == trial.cases for trial in trials),
    )


def suite_trials(record: Record) -> list[SuiteTrial]:
    """Return the comparisons of the first baseline with its copy, one for each kind of time that was taken."""
    gpu = record.environment.gpu
    if gpu is None or not record.baselines:
        return []
    found = (_trial(record, gpu.name, kind) for kind in kinds_measured(record))
    return [trial for trial in found if trial is not None]


def _trial(record: Record, gpu: str, kind: TimeKind) -> SuiteTrial | None:
    """Return one such comparison, or None where too little was measured for any interval."""
    found = {case.name: groups for case in record.cases if len(groups := _groups(record, case, kind)) > 1}
    if len(found) < _FEWEST_CASES:
        return None
    try:
        # As in compare: what stands under one label was measured in the same processes.
        labels = [tuple(sorted(groups)) for groups in found.values()]
        values = [[groups[process] for process in sorted(groups)] for groups in found.values()]
        intervals = comparison_intervals(values, labels)
    except TooFewRoundsError:
        return None
    return SuiteTrial(
        run=record.id,
        gpu=gpu,
        metric=kind,
        cases=len(found),
        processes=min(map(len, found.values())),
        wrong=[name for name, one in zip(found, intervals, strict=True) if not one.contains(0.0)],
        same=sum(effect_of(one, TOLERANCE) is Effect.SAME for one in intervals),
    )


def _groups(record: Record, case: CaseRecord, kind: TimeKind) -> Mapping[tuple[int, int], Sequence[float]]:
    """Return the log-ratios of the copy to the first baseline, by process; none where one of them was not measured."""
    copy = next((arm.name for arm in case.arms if arm.role == "control" and arm.status == "measured"), "")
    return paired_log_ratios(case, kind, copy, record.baselines[0])
