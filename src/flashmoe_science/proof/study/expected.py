"""How long a study is going to hold a GPU: a rough model, scaled by the studies that are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..evidence import Environment
from ..words import counted
from .run import SPARE, StudyRequest
from .trials import Study, Trial, is_measured

# Seconds: of a process, and of an arm of a trial in it. On an H200, of a call of some 50 us, they come to what one
# study of 252 trials took within a tenth.
_START, _ARM, _ROUND_OF_ARM = 4.0, 0.03, 0.007
_ARMS = 3


@dataclass(frozen=True)
class Expected:
    """What a study is going to take."""

    seconds: float  # of a GPU
    of_process: float  # of one of its processes
    source: str  # what that rests on


def expected_cost(request: StudyRequest, environment: Environment, earlier: Sequence[Study]) -> Expected:
    """Return what a study is going to take; of one that is gone on with, what is missing.

    Args:
        request: The study.
        environment: Of the machine that it runs on.
        earlier: Studies; those of the same subject, case and GPU scale the model.
    """
    gpu = environment.gpu.name if environment.gpu else ""
    alike = [
        study
        for study in earlier
        if study.gpu_seconds > 0
        and (study.subject.name, study.case.name) == (request.subject.name, request.case.name)
        and study.environment.gpu is not None
        and study.environment.gpu.name == gpu
    ]
    ratios = [study.gpu_seconds / taken for study in alike if (taken := _model_of(study)) > 0]
    factor = statistics.median(ratios) if ratios else 1.0
    source = f"{counted(len(ratios), 'earlier study')} of this case on this GPU" if ratios else "a rough model"
    old = request.resume
    if old is not None:
        rounds, wanted = old.settings.rounds, sum(series.wanted for series in old.series)
        processes, batches = old.settings.processes, old.batches
    else:
        rounds, wanted = request.settings.rounds, sum(series.wanted for series in request.series)
        processes, batches = request.settings.processes, request.batches
    trials = math.ceil(wanted * (1 + SPARE) / batches)
    of_process = factor * _model(trials, rounds)
    whole = processes * batches * of_process
    return Expected(max(0.0, whole - (old.gpu_seconds if old else 0.0)), of_process, source)


def _model(trials: float, rounds: int) -> float:
    return _START + trials * _ARMS * (_ARM + rounds * _ROUND_OF_ARM)


def _model_of(study: Study) -> float:
    """Return what the model says of the processes that a study has had."""
    had = [trial for trial in study.trials if trial.rounds is not None or is_measured(study, trial)]
    cells = sum(_processes_of(trial) for trial in had)
    processes = len({(trial.batch, p) for trial in had if trial.rounds for p in trial.rounds.process})
    return processes * _model(cells / processes, study.settings.rounds) if processes else 0.0


def _processes_of(trial: Trial) -> int:
    return len(set(trial.rounds.process)) if trial.rounds else 0
