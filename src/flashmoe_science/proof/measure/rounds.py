"""The rounds of one case in one process: prepare the arms, sample each in every round, check the answers again."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...errors import ProofError
from ..records import evidence
from ..records.evidence import Rounds, Settings, TimeKind
from ..spent import spending
from ..subject.operator import Inputs, Operator
from ..worker import agree, meet, ranks_here
from . import arms as arms_module, schedule
from .allowed_error import Whole
from .arms import Arm, Loaded
from .correctness import require_random
from .fresh_values import FreshValues
from .measure import Timer
from .nvml import Reading
from .samplers import ClockSampler, Kept, KernelSampler, Writer, WrongAnswerError
from .shared_state import SharedState

ROUNDS_PER_SESSION = 10  # a profiler's buffers are finite

_PARTS = 4  # answers to values of which few are new
_NO_SUBJECT = "the subject cannot be measured in this case"


@dataclass
class Samples:
    """What the rounds of one case in one process gave, as columns."""

    order: list[list[str]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    seconds: dict[TimeKind, dict[str, list[float]]] = field(default_factory=dict)

    def drop(self, arm: str, kind: TimeKind | None = None) -> None:
        """Forget an arm's samples, of one kind or of all."""
        for name, columns in self.seconds.items():
            if kind in (None, name):
                columns.pop(arm, None)

    def as_rounds(self, process: int) -> Rounds | None:
        """Return the record, or None when no arm has samples."""
        seconds = {kind: columns for kind, columns in self.seconds.items() if columns}
        if not seconds:
            return None
        return Rounds(
            process=[process] * len(self.order),
            order=self.order,
            sm_clock_mhz=[reading.sm_clock_mhz for reading in self.readings],
            power_w=[reading.power_w for reading in self.readings],
            temperature_c=[reading.temperature_c for reading in self.readings],
            throttle=[reading.throttle for reading in self.readings],
            seconds=seconds,
        )


@dataclass(frozen=True)
class Plan:
    """How the cases of one process are measured."""

    settings: Settings
    times: Sequence[TimeKind]
    process: int
    control: bool = True  # whether the first baseline runs twice
    thorough: bool = True  # whether the subject must show order with the calling stream, and answers to few new values
    changes: Callable[[], str] | None = None  # of a ``Guard`` made after the subject was imported
    # Names of cases whose exact answers take long. One is worked out after the rounds, if this process is drawn.
    slow: frozenset[str] = frozenset()
    is_drawn: Callable[[str], bool] = lambda _case: True  # asked after the rounds of a case
    # By case, graph times of another process, whose graphs have as many calls.
    beside: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # Asked when a case and a round begin; None: they follow from ``settings``.
    new_seed: Callable[[], int] | None = None
    orders_seed: Callable[[str], str] | None = None  # of a case, by its name; None: it follows from ``settings``

    def __post_init__(self) -> None:
        """Refuse to profile and to time by other means in one process. Raises ``ProofError``."""
        if not self.times or ("kernel" in self.times and len(self.times) > 1):
            raise ProofError(
                f"times must be kernel alone, or graph and wall, got {list(self.times)}",
                hint="a process has one CUPTI client, and a profiler changes what the other clocks read",
            )


@dataclass(frozen=True)
class Case:
    """One case, as measuring needs it."""

    name: str
    operator: Operator
    problem: Any


def measure_case(
    case: Case, loaded: Sequence[Loaded], plan: Plan, timer: Timer, *, on_round: Callable[[int, int], None]
) -> dict[str, Any]:
    """Prepare every arm, take the rounds, and check the answers again.

    ``loaded`` has the subject first, then the baselines, or baselines alone; ``on_round`` gets the rounds done and
    their number.

    Returns:
        ``name``, ``input_sets``, ``input_set_bytes``, ``arms`` (``evidence.Arm``) and ``rounds`` (``evidence.Rounds``,
        or None when nothing was timed), as plain JSON values.

    Raises:
        ProofError: the GPU context is lost, or the profiler failed.
    """
    # The arms of the case before hold inputs and outputs in cycles. None are collected while a case is timed, so what
    # is not collected here stays on the GPU, and the largest case of a suite runs out of memory after the others.
    gc.collect()
    timer.empty_cache()
    samples = Samples()
    seeds = _Seeds(case, plan)
    input_sets: list[dict[str, torch.Tensor]] = []
    reason = ""
    try:
        input_sets, write_seconds = _make_input_sets(case, seeds, timer)
        is_slow = case.name in plan.slow
        expected, slow = ({}, math.inf) if is_slow else _find_expected(case, seeds, input_sets, timer)
    except Exception as error:  # noqa: BLE001 - one case of many fails, with its reason
        reason = f"the case cannot be set up: {arms_module.survive(error, 'of none', timer)}"
    if reason := agree(reason, "set up"):
        arms = [Arm(each, each.name, each.role, "failed", reason) for each in loaded]
    else:
        sampled = slow > schedule.LONGEST_TRUTH_S
        values = FreshValues(case.operator, case.problem, input_sets, timer.name, sampled=sampled)
        values.begin_round(seeds.next())
        arms = _prepare(case, loaded, plan, timer, input_sets, expected, values, seeds)
        if _has_times(arms):
            changes = plan.changes or SharedState().changes
            in_cache = _nbytes(input_sets[0]) * len(input_sets) < 2 * timer.l2_bytes
            writer = Writer(values, timer, in_cache=in_cache, seconds_per_set=write_seconds)
            samples = _take_rounds(
                arms,
                writer,
                seeds,
                plan,
                timer,
                on_round,
                slow=slow / values.parts,
                beside=plan.beside.get(case.name, ()),
            )
            _check_shared(arms, samples, changes)
            compare = not is_slow or (plan.thorough and plan.is_drawn(case.name))
            _check_again(arms, samples, values, seeds, timer, compare=compare)
            if is_slow and compare and arms[0].ready and not _is_right(arms[0], writer.kept, values, timer):
                samples.drop(arms[0].name)
    rounds = samples.as_rounds(plan.process) if _has_times(arms) else None
    return {
        "name": case.name,
        "input_sets": max(1, len(input_sets)),
        "input_set_bytes": _nbytes(input_sets[0]) if input_sets else 0,
        "arms": [_arm_record(arm, timed=rounds is not None).model_dump(mode="json") for arm in arms],
        "rounds": rounds.model_dump(mode="json") if rounds else None,
    }


def _has_times(arms: Sequence[Arm]) -> bool:
    """Return whether a case is timed: where the subject is, or without it any baseline."""
    return arms[0].ready if arms[0].role == "subject" else any(arm.ready for arm in arms)


class _Seeds:
    """The seeds of one case: of its orders, and of its values, one after another."""

    def __init__(self, case: Case, plan: Plan) -> None:
        settings = plan.settings
        following = random.Random(f"{settings.seed}/{case.name}/{plan.process}/{'+'.join(plan.times)}/values")
        self.next: Callable[[], int] = plan.new_seed or (lambda: following.getrandbits(31))
        known = schedule.rounds_seed(settings.seed, case.name, plan.process, plan.times, method=settings.method)
        self.orders: Callable[[], str] = lambda: plan.orders_seed(case.name) if plan.orders_seed else known


@spending("inputs")
def _make_input_sets(case: Case, seeds: _Seeds, timer: Timer) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return so many sets of fresh random inputs that they do not stay in L2, and the seconds to write one anew."""
    first_seed = seeds.next()

    def make(index: int) -> dict[str, torch.Tensor]:
        seed = schedule.derived_seed(first_seed, index)
        return case.operator.make_inputs(case.problem, seed=seed, device=timer.name)

    first = make(0)
    values = FreshValues(case.operator, case.problem, [make(1)], timer.name)
    values.write([0])  # what is compiled or loaded for it is not counted
    seconds = max(meet(timer.wall_seconds([lambda: values.write([0])]), "writing took"))
    least = schedule.MIN_INPUT_SETS
    if ranks_here() > 1:  # as many on each, though cards may differ by little
        least = min(meet(schedule.sets_over_ranks(_nbytes(first), timer.memory_bytes), "sets counted"))
    count = schedule.input_set_count(_nbytes(first), timer.l2_bytes, seconds, at_least=least)
    input_sets = [first, *(make(index) for index in range(1, count))]
    require_random(case.operator, *input_sets[:2])
    return input_sets, seconds


def _find_expected(
    case: Case, seeds: _Seeds, input_sets: Sequence[Inputs], timer: Timer
) -> tuple[dict[int, Whole], float]:
    """Return the exact answers to two sets drawn at random, or to one if it takes long, and the seconds of one."""
    places = random.Random(seeds.next()).sample(range(len(input_sets)), min(2, len(input_sets)))
    found: dict[int, Whole] = {}
    seconds = math.inf
    for place in places:

        def find(place: int = place) -> None:
            found[place] = Whole(case.operator, case.problem, input_sets[place])

        seconds = min(seconds, max(meet(timer.wall_seconds([find]), "the truth took")))  # the first loads libraries
        if seconds > schedule.SLOW_TRUTH_S:
            break
    return found, seconds


def _nbytes(inputs: Inputs) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())


@spending("first calls")
def _prepare(
    case: Case,
    loaded: Sequence[Loaded],
    plan: Plan,
    timer: Timer,
    input_sets: Sequence[Inputs],
    expected: dict[int, Whole],
    values: FreshValues,
    seeds: _Seeds,
) -> list[Arm]:
    """Return the arms, the subject first; where it fails the baselines are not even tried. ``expected`` is used up."""

    def prepare(each: Loaded) -> Arm:
        return arms_module.prepare_arm(each, case.operator, case.problem, input_sets, expected, timer)

    first = prepare(loaded[0])
    if first.ready and plan.thorough:
        wrong = arms_module.check_stream(first, case.operator, case.problem, input_sets[0], timer, seed=seeds.next())
        if wrong := agree(wrong, "streams"):
            first.fail(wrong)
    if not first.ready and first.role == "subject":
        return [first, *(Arm(each, each.name, each.role, "not measured", _NO_SUBJECT) for each in loaded[1:])]
    arms = [first, *(prepare(each) for each in loaded[1:])]
    copied = arms_module.control_of(arms) if plan.control else None
    if copied is not None:
        control = prepare(copied)  # its own closures, and later its own captures
        control.name, control.role = copied.name + arms_module.CONTROL_SUFFIX, "control"
        arms.append(control)
    compare = bool(expected)
    expected.clear()  # fp64 of large gradients, of which more are made from here on
    arms_module.find_followers(values, [arm for arm in arms if arm.ready], timer, compare=compare)
    times = 1 if values.slow else _PARTS
    if plan.thorough and compare:
        _answers_to_few(first, values, timer, times=times)
    return arms


def _answers_to_few(arm: Arm, values: FreshValues, timer: Timer, *, times: int) -> bool:
    """Return whether an arm answers to values of which few are new; else it fails."""
    if wrong := agree(arms_module.check_parts(arm, values, timer, times=times), "parts"):
        arm.fail(wrong)
    return not wrong


@spending("rounds")
def _take_rounds(
    arms: Sequence[Arm],
    writer: Writer,
    seeds: _Seeds,
    plan: Plan,
    timer: Timer,
    on_round: Callable[[int, int], None],
    *,
    slow: float,
    beside: Sequence[float],
) -> Samples:
    """Take all rounds of one case in this process.

    ``slow``: the seconds that an exact answer takes; infinite where it is not worked out before the rounds end.
    """
    ready = {arm.name: arm for arm in arms if arm.ready}
    settings = plan.settings
    samples = Samples(schedule.balanced_orders(list(ready), settings.rounds, seed=seeds.orders()))
    samples.seconds = {kind: {name: [] for name in ready} for kind in plan.times}
    keeps = plan.thorough and math.isinf(slow)  # the last of those kept is any of all rounds
    sampler: ClockSampler | KernelSampler
    if "kernel" in plan.times:
        sampler = KernelSampler(settings, timer, writer)
    else:
        sampler = ClockSampler(settings, plan.times, timer, writer, beside)
    gc.disable()  # a collection within one arm's block would count as that arm's time
    try:
        sampler.prepare(list(ready.values()))
        for first in range(0, settings.rounds, ROUNDS_PER_SESSION):
            numbers = range(first, min(first + ROUNDS_PER_SESSION, settings.rounds))
            with sampler.session():
                for number in numbers:
                    seed = seeds.next()
                    writer.values.begin_round(seed)
                    writer.keep = keeps and random.Random(f"{seed}/kept").random() * (number + 1) < 1
                    writer.compare = random.Random(f"{seed}/compared").random() * slow < schedule.LONGEST_TRUTH_S
                    for kind in plan.times:
                        for name in samples.order[number]:
                            _sample(sampler, kind, ready[name], number, samples, timer)
                    samples.readings.append(timer.read_sensors())
                    on_round(number + 1, settings.rounds)
            for arm in ready.values():
                _collect(sampler, arm, numbers, samples)
    finally:
        gc.enable()
    for arm in ready.values():
        for kind in arm.lost:
            samples.drop(arm.name, kind)
    return samples


def _sample(
    sampler: ClockSampler | KernelSampler, kind: TimeKind, arm: Arm, number: int, samples: Samples, timer: Timer
) -> None:
    """Take one sample; an arm that raises loses this kind of time, and the others go on."""
    if kind in arm.lost:
        return
    seconds, fault = None, ""
    try:
        with arm.loaded.context():
            seconds = sampler.sample(kind, arm, number)
    except WrongAnswerError as error:
        fault = str(error)
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        fault = f"round {number}: {arms_module.survive(error, arm.name, timer)}"
    if fault := agree(fault, f"{arm.name} in round {number}, {kind} time"):
        arm.lose([kind], fault)
    elif seconds is not None:
        samples.seconds[kind][arm.name].append(seconds)


def _collect(sampler: ClockSampler | KernelSampler, arm: Arm, numbers: Sequence[int], samples: Samples) -> None:
    """Fetch the samples that come only when a session has ended."""
    if "kernel" not in samples.seconds or "kernel" in arm.lost:
        return
    try:
        samples.seconds["kernel"][arm.name] += sampler.late_samples(arm, numbers)
    except WrongAnswerError as error:
        arm.lose(["kernel"], str(error))


def _is_right(subject: Arm, kept: Mapping[str, Kept], values: FreshValues, timer: Timer) -> bool:
    """Return whether answers that were timed are right, and one to values of which few are new; else the arm fails."""
    for kind, each in kept.items():
        values.write_seed(each.place, each.seed)
        wrong = arms_module.fault_of(each.answer, values.expected(each.place, subject.part))
        if wrong := agree(wrong, f"an answer in {kind} time"):
            subject.fail(f"an answer that was timed ({kind} time) is wrong: {wrong}")
            return False
    return _answers_to_few(subject, values, timer, times=1)


def _check_shared(arms: Sequence[Arm], samples: Samples, changes: Callable[[], str]) -> None:
    """Fail every arm where shared state of the process changed: all times may be affected."""
    if not (found := agree(changes(), "what arms share")):
        return
    for arm in arms:
        if arm.ready:
            arm.fail(f"what all arms share changed while they were timed: {found}")
            samples.drop(arm.name)


@spending("calls after")
def _check_again(
    arms: Sequence[Arm], samples: Samples, values: FreshValues, seeds: _Seeds, timer: Timer, *, compare: bool
) -> None:
    """Ask every arm once more, with new values; an arm that answers wrongly loses its times.

    ``compare``: whether answers are compared with what is right, beside their repeats.
    """
    sets = next((len(arm.calls) for arm in arms if arm.ready), 0)
    if not sets:
        return
    values.begin_round(seeds.next())
    values.begin_sample("after")
    values.write(range(sets))
    places = random.Random(seeds.next()).sample(range(sets), 1 if values.slow else min(2, sets))
    for arm in arms:
        if not arm.ready:
            continue
        wrong = arms_module.check_again(arm, values, places, timer, compare=compare)
        if wrong := agree(wrong, f"{arm.name} again"):
            arm.fail(wrong)
            samples.drop(arm.name)


def _arm_record(arm: Arm, *, timed: bool) -> evidence.Arm:
    """Return the record of one arm. One that lacks a kind of time is failed, and keeps its samples of the others."""
    status: Literal["measured", "failed", "refused", "unavailable", "not measured"]
    reason = arm.reason or "; ".join(f"{kind} time: {why}" for kind, why in arm.lost.items())
    if arm.status != "ready":
        status = arm.status
    elif arm.lost:
        status = "failed"
    elif timed:
        status = "measured"
    else:
        status, reason = "not measured", _NO_SUBJECT
    return evidence.Arm(
        name=arm.name,
        role=arm.role,
        status=status,
        reason=reason,
        version=arm.loaded.version,
        speed_of_light=arm.loaded.speed_of_light,
        launches=[*arm.timed.values()],
        accuracy=arm.accuracy,
        peak_bytes=arm.peak_bytes,
    )
