"""What a run costs: before it runs, what was spent, and what a gate that failed early saved. Pure functions.

A run costs the time for which it holds a GPU. How that grows with the cases, arms, processes and rounds is a rough
model; where runs of the same subject, suite and GPU are known, the model only scales what they took.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .evidence import GATE_NAMES, GateName, GateStatus, Record
from .ledger import GPU_GATES, Entry, dollars, paid_gates
from .words import counted

# Seconds. They come within twice of what the runs in evidence/ took on an H200, as a test sees to: a worker's start;
# what records launches; for each kind of problem and arm, in every process, what is loaded or compiled; for each case,
# or case and arm, what warms up and runs; for each TFLOP above one a case, what the answer in fp64 and the eager one
# take, and the calls of a round. Some baselines take a tenth of what a kind costs here, one that compiles for seconds
# several times it.
_START = 3.0
_RECORDER = 5.0
_KIND_OF_ARM = 0.4
_KIND_OF_ARM_LAUNCHED = 0.42
_LAUNCH_OF_ARM = 0.046
_CORRECT_START = 4.0
_CORRECT_OF_CASE = 0.28
_CORRECT_OF_TFLOP = 0.25
_SETTING_UP_ARM = 0.1
_ROUND_OF_ARM = 0.022
_ANSWERS_OF_TFLOP = 0.15
_ROUND_OF_TFLOP = 0.005
_QUICK_ROUNDS = 5

HISTORY = 10  # runs at most: the code changes, and old ones say little


@dataclass(frozen=True)
class RunSize:
    """What decides how long a run holds a GPU."""

    cases: int  # that the subject serves, and that are not finished already
    arms: int  # subject, baselines and control
    rounds: int  # in each process
    workers: int  # processes of gate bench
    cells: int  # one case in one of them
    gates: tuple[GateName, ...] = GPU_GATES  # that will run
    kinds: int = 1  # of problems: those of one kind differ in nothing but their lengths
    tflop: float = 0.0  # of one call of each case, together


@dataclass(frozen=True)
class PastRun:
    """A run that tells how long the next one takes."""

    size: RunSize
    gpu_seconds: Mapping[GateName, float]  # of the gates that passed


@dataclass(frozen=True)
class Estimate:
    """How long a run is going to hold a GPU."""

    gpu_seconds: Mapping[str, float]  # by gate, or by what else holds a GPU
    source: str  # what it rests on
    runs: int = 0  # earlier ones that it rests on; 0: on the rough model alone
    off_by: float | None = None  # the median factor, at least 1, by which such estimates missed the earlier runs

    @property
    def total(self) -> float:
        """Seconds of all gates."""
        return sum(self.gpu_seconds.values())


@dataclass
class Sum:
    """Rows of the ledger together."""

    gpu_seconds: float = 0.0
    dollars: float = 0.0
    unpriced_seconds: float = 0.0  # of GPUs without a rate: they are not among the dollars


@dataclass(frozen=True)
class Saving:
    """What a run did not spend, because it failed early."""

    run: str
    gate: GateName  # that failed
    gpu: str
    gpu_seconds: float  # estimated, of the gates after it
    source: str


@dataclass(frozen=True)
class Budget:
    """What a run may spend. The gates of ``estimate`` are those that cost something."""

    dollars: float
    dollars_per_hour: float
    estimate: Estimate = field(repr=False)

    @property
    def seconds(self) -> float:
        """Return for how long a GPU can be held."""
        return self.dollars / self.dollars_per_hour * 3600 if self.dollars_per_hour else math.inf

    def refusal(self, gate: str, spent_seconds: float) -> str:
        """Return why ``gate`` may not begin after so many seconds, or an empty text."""
        needed = self.estimate.gpu_seconds.get(gate, 0.0)
        spent, then = (dollars(s, self.dollars_per_hour) for s in (spent_seconds, spent_seconds + needed))
        if needed == 0.0 or then <= self.dollars:
            return ""
        return (
            f"the budget of {format_dollars(self.dollars)} would be passed: {format_dollars(spent)} are spent, "
            f"and {gate} takes about {format_dollars(then - spent)}"
        )

    def seconds_left(self, spent_seconds: float) -> float:
        """Return for how long the rest of the budget pays."""
        return max(0.0, self.seconds - spent_seconds)


def size_of(record: Record, kinds: int = 1) -> RunSize:
    """Return the size of the whole run that ``record`` is of, however far it came, with its ``kinds_of``."""
    served = [c for c in record.cases if all(arm.role != "subject" or arm.status != "refused" for arm in c.arms)]
    settings = record.settings
    modes = len({kind == "kernel" for kind in settings.times})  # kernel time has processes of its own
    workers = settings.processes * modes
    arms = 1 + len(record.baselines) + bool(record.baselines)
    tflop = sum(case.work.flops for case in served) / 1e12
    return RunSize(len(served), arms, settings.rounds, workers, len(served) * workers, kinds=kinds, tflop=tflop)


def past_run(record: Record, kinds: int = 1) -> PastRun | None:
    """Return what ``record`` tells of the next run, or None: it held no GPU, or only went on with another run."""
    if record.environment.gpu is None or record.resumed:
        return None
    passed = {g.name: g.gpu_seconds for g in record.gates if g.status is GateStatus.PASSED and g.gpu_seconds > 0}
    return PastRun(_with_more_processes(size_of(record, kinds), record), passed) if passed else None


def _with_more_processes(size: RunSize, record: Record) -> RunSize:
    """Return the size with the processes that ``--width`` added, of which nobody knew before."""
    cells = [
        ("kernel" in rounds.seconds, process)
        for case in record.cases
        for rounds in case.rounds
        for process in set(rounds.process)
        if process >= record.settings.processes
    ]
    return replace(size, workers=size.workers + len(set(cells)), cells=size.cells + len(cells))


def model_seconds(gate: GateName, size: RunSize) -> float:
    """Return how long ``gate`` holds a GPU by the rough model."""
    if size.cases == 0 or gate not in size.gates:
        return 0.0
    if gate == "quick":  # subject, first baseline, control
        size = replace(size, arms=min(size.arms, 3))
    if gate == "launch":  # no control
        size = replace(size, arms=max(1, size.arms - 1))
    kinds = min(size.kinds, size.cases) * size.arms
    process = _START + kinds * _KIND_OF_ARM
    beyond = max(0.0, size.tflop - size.cases)  # one TFLOP a case is in the figures of a case
    answers = beyond * _ANSWERS_OF_TFLOP
    if gate == "launch":
        launches = kinds * _KIND_OF_ARM_LAUNCHED + size.cases * size.arms * _LAUNCH_OF_ARM
        return _START + _RECORDER + launches
    if gate == "correct":
        return _CORRECT_START + size.cases * _CORRECT_OF_CASE + beyond * _CORRECT_OF_TFLOP
    round_of_cell = _ROUND_OF_ARM + beyond / size.cases * _ROUND_OF_TFLOP
    if gate == "quick":
        return process + answers + size.cases * size.arms * (_SETTING_UP_ARM + _QUICK_ROUNDS * round_of_cell)
    cell = answers / size.cases + size.arms * (_SETTING_UP_ARM + size.rounds * round_of_cell)
    return size.workers * process + size.cells * cell


def estimate(size: RunSize, history: Sequence[PastRun]) -> Estimate:
    """Return how long a run will hold a GPU.

    Args:
        size: Of the run.
        history: Runs of the same subject, suite and GPU, the oldest first.
    """
    history = history[-HISTORY:]
    seconds = _predict(size, history)
    if not history:
        return Estimate(seconds, "a rough model: no run of this subject and suite on this GPU is known")
    unseen = [gate for gate in seconds if not any(gate in past.gpu_seconds for past in history)]
    source = f"{counted(len(history), 'run')} of this subject and suite on this GPU"
    source += f" (of {', '.join(unseen)} no time is known: the rough model)" if unseen else ""
    misses = [_missed_by(past, history[:number]) for number, past in enumerate(history) if number]
    return Estimate(seconds, source, len(history), statistics.median(misses) if misses else None)


def together(first: Estimate, second: Estimate) -> Estimate:
    """Return the estimate of two runs, one after the other."""
    gates = {**first.gpu_seconds, **second.gpu_seconds}
    seconds = {gate: first.gpu_seconds.get(gate, 0.0) + second.gpu_seconds.get(gate, 0.0) for gate in gates}
    return replace(second, gpu_seconds=seconds)


def _predict(size: RunSize, history: Sequence[PastRun]) -> dict[str, float]:
    """Return the model's seconds of each gate, times the median of what the gate took over what the model says."""
    ratios = {gate: [r for past in history if (r := _ratio(gate, past)) is not None] for gate in GPU_GATES}
    seen = [ratio for of_gate in ratios.values() for ratio in of_gate]
    typical = statistics.median(seen) if seen else 1.0
    return {
        gate: seconds * (statistics.median(ratios[gate]) if ratios[gate] else typical)
        for gate in GPU_GATES
        if (seconds := model_seconds(gate, size)) > 0
    }


def _ratio(gate: GateName, past: PastRun) -> float | None:
    expected = model_seconds(gate, past.size)
    return past.gpu_seconds[gate] / expected if gate in past.gpu_seconds and expected > 0 else None


def _missed_by(past: PastRun, before: Sequence[PastRun]) -> float:
    """Return the factor by which the estimate from the runs before missed a run, over the gates that it passed."""
    predicted = _predict(past.size, before)
    took = sum(past.gpu_seconds.values())
    said = sum(predicted.get(gate, 0.0) for gate in past.gpu_seconds)
    return math.exp(abs(math.log(said / took))) if said > 0 else math.inf


def spent_seconds(record: Record) -> float:
    """Return how long a run held a GPU."""
    return sum(paid_gates(record).values())


def saving(record: Record, history: Sequence[PastRun], kinds: int) -> Saving | None:
    """Return what a run with so many ``kinds_of`` problems saved by failing: the estimated time of the gates after.

    None, where it failed at none, or at the last, or had no GPU.
    """
    failed = next((gate.name for gate in record.gates if gate.status is GateStatus.FAILED), None)
    gpu = record.environment.gpu
    if failed is None or gpu is None:
        return None
    later = GATE_NAMES[GATE_NAMES.index(failed) + 1 :]
    expected = estimate(size_of(record, kinds), history)
    seconds = sum(expected.gpu_seconds.get(gate, 0.0) for gate in later)
    return Saving(record.id, failed, gpu.name, seconds, expected.source) if seconds > 0 else None


def add_up(
    entries: Iterable[Entry], key: Callable[[Entry], str], rate: Callable[[str], float | None]
) -> dict[str, Sum]:
    """Return the sums of the ledger's rows by ``key``.

    Args:
        entries: The rows.
        key: Under which name a row is summed.
        rate: Dollars an hour of a GPU by its name, for rows that were booked without; None where it is not known.
    """
    sums: dict[str, Sum] = {}
    for entry in entries:
        total = sums.setdefault(key(entry), Sum())
        total.gpu_seconds += entry.gpu_seconds
        price = entry.dollars_per_hour if entry.dollars_per_hour is not None else rate(entry.gpu)
        if entry.dollars is not None:
            total.dollars += entry.dollars
        elif price is None:
            total.unpriced_seconds += entry.gpu_seconds
        else:
            total.dollars += dollars(entry.gpu_seconds, price)
    return sums


def format_dollars(amount: float) -> str:
    """Return an amount for a reader: cents, and below a dollar tenths of a cent."""
    sign, size = "-" if amount < 0 else "", abs(amount)
    return f"{sign}${size:,.2f}" if size == 0 or size >= 0.9995 else f"{sign}${size:.3f}"


def format_duration(seconds: float) -> str:
    """Return a time for a reader, e.g. ``8.4 s``, ``1 min 56 s`` and ``3 h 07 min``."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
