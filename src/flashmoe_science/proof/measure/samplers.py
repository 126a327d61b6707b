"""Samples of each kind of time: what is timed, on which values, and whether its answers were right."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..records.evidence import Settings, TimeKind
from ..subject.outputs import Answer, Call, copied
from ..worker import agree, meet, ranks_here
from . import arms as arms_module, schedule
from .arms import Arm
from .fresh_values import FreshValues
from .launches import CallTrace, Recording
from .measure import Graph, Timer

TRIAL_CALLS = 20  # in the graph that tells how long a call takes: one call would mostly show what a replay costs
WARM_CALLS = 3  # eager calls right before a block of wall calls: they refill the allocator's cache


class ClockSampler:
    """Samples of graph and wall time."""

    def __init__(
        self, settings: Settings, times: Sequence[TimeKind], timer: Timer, writer: Writer, beside: Sequence[float] = ()
    ) -> None:
        """``beside``: graph times of arms of another process, whose graphs have as many calls."""
        self._beside = beside
        self._settings = settings
        self._times = times
        self._timer = timer
        self._writer = writer
        self._graph_calls = 0
        self._replays: dict[str, int] = {}
        self._wall_calls: dict[str, tuple[int, int]] = {}  # in a block, and blocks

    def prepare(self, arms: Sequence[Arm]) -> None:
        """Find out how long a call takes, and from that how many calls make a sample. Arms that cannot lose a kind."""
        graph_seconds: dict[str, float] = {}
        for arm in arms:
            eager, fault = _estimate(arm, self._timer)
            if fault:
                arm.lose(self._times, fault)
                continue
            most = min(self._settings.wall_calls, len(arm.calls))
            longest = schedule.LONGEST_BLOCK_OVER_RANKS_S if ranks_here() > 1 else schedule.LONGEST_SAMPLE_S
            # What comes before and after a block is nothing to a long call.
            least = 1 if eager > schedule.LONGEST_BLOCK_OVER_RANKS_S else min(schedule.MIN_WALL_CALLS, most)
            calls = schedule.block_call_count(eager, most, at_least=least, longest_s=longest)
            blocks = schedule.wall_block_count(
                calls, self._settings.wall_calls, eager, seconds_per_set=self._writer.seconds_per_set
            )
            self._wall_calls[arm.name] = calls, blocks
            if "graph" in self._times:
                self._try_capture(arm, eager, graph_seconds)
        if graph_seconds:
            sets = len(next(arm for arm in arms if arm.name in graph_seconds).calls)
            self._graph_calls = schedule.graph_call_count(
                [*graph_seconds.values(), *self._beside],
                sets,
                graph_seconds=self._settings.graph_seconds,
                graph_calls=self._settings.graph_calls,
            )
        for name, seconds in graph_seconds.items():
            self._replays[name] = schedule.replay_count(seconds * self._graph_calls, self._settings.graph_replays)

    def _try_capture(self, arm: Arm, eager_seconds: float, graph_seconds: dict[str, float]) -> None:
        wanted = max(len(arm.calls), TRIAL_CALLS)
        count = schedule.block_call_count(eager_seconds, wanted, at_least=1)
        graph: Graph | None = None
        seconds, fault = 0.0, ""
        with arm.loaded.context():
            try:
                graph = self._timer.capture(arm.calls, count)
            except Exception as error:  # noqa: BLE001 - what an arm raises is a result
                fault = arms_module.survive(error, arm.name, self._timer)
            if not (fault := agree(fault, f"{arm.name} captured")) and graph is not None:
                try:
                    seconds = graph.replay_seconds(1, lambda: None)[0] / count
                except Exception as error:  # noqa: BLE001 - what an arm raises is a result
                    fault = arms_module.survive(error, arm.name, self._timer)
                fault = agree(fault, f"{arm.name} replayed")
            if graph is not None:
                graph.release()
        if fault:
            arm.lose(["graph"], f"it cannot be captured: {fault}")
        else:
            graph_seconds[arm.name] = max(meet(seconds, f"{arm.name} replays"))

    def session(self) -> AbstractContextManager[object]:
        """Return the context around several rounds."""
        return contextlib.nullcontext()

    def sample(self, kind: TimeKind, arm: Arm, round_number: int) -> float | None:
        """Return one sample in seconds a call, or None when it comes later. Raises what the arm raises."""
        del round_number
        return self._graph_sample(arm) if kind == "graph" else self._wall_sample(arm)

    def late_samples(self, arm: Arm, round_numbers: Sequence[int]) -> list[float]:
        """Return the samples that ``sample`` did not."""
        del arm, round_numbers
        return []

    def _wall_sample(self, arm: Arm) -> float:
        """Time blocks, and see that the last answer is right. No other is kept: a block's memory stays as it is."""
        count, blocks = self._wall_calls[arm.name]
        self._writer.begin("wall", range(count))
        answers: list[Answer] = []
        place = self._writer.values.draw(range(count))
        order = [(place + 1 + index) % count for index in range(count)]  # the one that is compared comes last
        last = arm.calls[place]
        block = [*(arm.calls[index] for index in order[:-1]), lambda: answers.append(last())]
        for call in [arm.calls[index] for index in order[: WARM_CALLS if count > schedule.MIN_WALL_CALLS else 1]]:
            call()
        seconds = 0.0
        for _ in range(blocks):
            answers.clear()
            self._writer.write(order)
            seconds += self._timer.wall_seconds(block)
        if wrong := self._writer.wrong(arm, {place: answers[0]}, place):
            raise WrongAnswerError(f"the last answer of a timed block is wrong: {wrong}")
        return seconds / (blocks * count)

    def _graph_sample(self, arm: Arm) -> float:
        """Capture anew, time the replays, and see that the answers of the last one are right."""
        places = range(self._graph_calls)
        self._writer.begin("graph", places)
        graph = self._timer.capture(arm.calls, self._graph_calls)
        try:
            graph.poison_outputs()
            replays = graph.replay_seconds(self._replays[arm.name], lambda: self._writer.write(places))
            outputs = {place: output for place in places if (output := graph.outputs[place]) is not None}
            wrong = self._writer.wrong(arm, outputs, self._writer.values.draw(places))
        finally:
            graph.release()
        if wrong:
            raise WrongAnswerError(f"a replay of its graph is wrong: {wrong}")
        return statistics.median(replays) / self._graph_calls


class KernelSampler:
    """Samples of kernel time: the profiler's, so they come when its recording has ended."""

    def __init__(self, settings: Settings, timer: Timer, writer: Writer) -> None:
        self._cold = settings.cache == "cold"
        self._timer = timer
        self._writer = writer
        self._calls: dict[str, int] = {}
        self._recording: Recording | None = None

    def prepare(self, arms: Sequence[Arm]) -> None:
        """Find out how long a call takes, and from that how many calls make a sample."""
        for arm in arms:
            seconds, fault = _estimate(arm, self._timer)
            if fault:
                arm.lose(["kernel"], fault)
                continue
            wanted = schedule.KERNEL_CALLS if self._cold else len(arm.calls)
            self._calls[arm.name] = schedule.block_call_count(seconds, wanted, at_least=1)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Profile several rounds."""
        with self._timer.recording() as self._recording:
            yield

    def sample(self, kind: TimeKind, arm: Arm, round_number: int) -> float | None:
        """Make the calls of one sample, and see that the answer of one is right: work may be skipped when profiled."""
        assert kind == "kernel"
        assert self._recording is not None
        label = f"{round_number}/{arm.name}"
        count = self._calls[arm.name]
        self._writer.begin(kind, range(min(count, len(arm.calls))))
        if self._cold:
            compared = self._writer.values.draw(range(count))
            for index in range(count):
                place = index % len(arm.calls)
                self._writer.values.write([place])
                self._timer.flush_cache()
                self._timer.synchronize()  # host and GPU clocks differ by microseconds: keep the flush well before
                with self._recording.call(label):
                    answer = arm.calls[place]()
                    self._timer.synchronize()
                if index == compared:
                    self._require_right(arm, place, answer)
                del answer  # the next call gets its memory, as it would anywhere
        else:
            self._writer.write(range(count))
            self._timer.synchronize()
            with self._recording.call(label):
                for call in arm.calls[: count - 1]:
                    call()
                answer = arm.calls[count - 1]()
                self._timer.synchronize()
            self._require_right(arm, count - 1, answer)
        return None

    def _require_right(self, arm: Arm, place: int, answer: Answer) -> None:
        if wrong := self._writer.wrong(arm, {place: answer}, place):
            raise WrongAnswerError(f"an answer of a timed sample is wrong: {wrong}")

    def late_samples(self, arm: Arm, round_numbers: Sequence[int]) -> list[float]:
        """Return one sample for each round: the median over its calls, or their mean where they ran back to back."""
        assert self._recording is not None
        rounds = [self._recording.calls(f"{number}/{arm.name}") for number in round_numbers]
        problem = lost_kernels([trace for traces in rounds for trace in traces])
        if problem:
            raise WrongAnswerError(problem)
        for launch in (launch for traces in rounds for trace in traces for launch in trace.launches()):
            arm.timed.setdefault((launch.name, launch.registers, launch.shared_memory_bytes), launch)
        calls = 1 if self._cold else self._calls[arm.name]
        return [statistics.median(trace.device_seconds() for trace in traces) / calls for traces in rounds]


class Kept(NamedTuple):
    """An answer that was timed."""

    place: int
    seed: int  # of its values
    answer: Answer


class Writer:
    """Gives calls new values before they are timed, and looks at their answers after that."""

    def __init__(self, values: FreshValues, timer: Timer, *, in_cache: bool, seconds_per_set: float) -> None:
        self.values = values
        self.seconds_per_set = seconds_per_set  # to write new values to one
        self.compare = True  # whether answers of this round are compared with what is right, beside their repeats
        self.keep = False  # whether answers of the subject in this round are kept, to be compared after all rounds
        self.kept: dict[str, Kept] = {}  # by kind of time
        self._kind = ""
        self._timer = timer
        self._in_cache = in_cache  # whether all sets of inputs fit into the cache: then they stay there

    def begin(self, kind: TimeKind, places: Sequence[int]) -> None:
        """Begin a sample: what is called before the clock runs does not read what the arm before has read last."""
        self._kind = kind
        self.values.begin_sample(kind)
        self.values.write(places)

    def write(self, places: Sequence[int]) -> None:
        """Write new values to ``places``. What was written last does not stay in the cache: no call finds its own."""
        self.values.write(places)
        if not self._in_cache:
            self._timer.flush_cache()

    def wrong(self, arm: Arm, answers: Mapping[int, Answer], compared: int) -> str:
        """Return how answers, by place, are wrong, or an empty text; that at ``compared`` must be right."""
        if self.keep and arm.role == "subject" and compared in answers:
            self.kept[self._kind] = Kept(compared, self.values.seed_at(compared), copied(answers[compared]))
        wrong = [
            arms_module.wrong_late(arm, answers[at], at, self.values, compare=self.compare and at == compared)
            for at in sorted(answers, key=lambda place: place != compared)
        ]
        return next(filter(None, wrong), "")


class WrongAnswerError(Exception):
    """What was timed did not do its work. Caught by the rounds, never seen outside."""


def rotate(calls: Sequence[Call], count: int) -> list[Call]:
    """Return ``count`` calls that go round ``calls``."""
    return [calls[index % len(calls)] for index in range(count)]


def estimate_seconds(arm: Arm, timer: Timer) -> float:
    """Return roughly how long an eager call takes: a first, warm one, then three more where they are fast."""
    seconds = max(meet(timer.wall_seconds(arm.calls[:1]), "one call"))
    return seconds if seconds > schedule.LONGEST_SAMPLE_S else timer.wall_seconds(rotate(arm.calls, 3)) / 3


def _estimate(arm: Arm, timer: Timer) -> tuple[float, str]:
    """Return ``estimate_seconds``, the same on all ranks, or why there is none."""
    seconds, fault = 0.0, ""
    try:
        with arm.loaded.context():
            seconds = estimate_seconds(arm, timer)
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        fault = arms_module.survive(error, arm.name, timer)
    fault = agree(fault, f"{arm.name} estimated")
    return max(meet(seconds, f"{arm.name} takes")), fault


def lost_kernels(traces: Sequence[CallTrace]) -> str:
    """Return why the traces of one arm's calls cannot be trusted, or an empty string."""
    counts = {len(trace.events) for trace in traces}
    if 0 in counts:
        return "the profiler saw a call without any work on the GPU"
    if len(counts) > 1:
        return f"its calls gave the GPU {min(counts)} to {max(counts)} pieces of work: records lost, or dispatch varies"
    return ""
