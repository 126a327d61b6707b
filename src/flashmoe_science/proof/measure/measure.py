"""Take times: the only file of the harness that reads a clock of what is measured.

Three kinds, never mixed: ``kernel`` (device time of a call's work, from the profiler), ``graph`` (replays of a CUDA
graph, a call) and ``wall`` (eager calls, host clock). What an arm costs besides its own work is the same for every arm:
a loop over closures that were made before.

Answers are compared in every sample, after the set of inputs got other values: of wall time the last call's, of graph
time a replay's, of kernel time those of one call, drawn at random where each call is timed alone. The other calls of a
sample are not compared, and nothing here stops a subject that looks at the harness in its own process.

``CudaTimer`` holds the calls into ``torch.cuda``; the samplers decide what to do with any ``Timer``.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch
from typing_extensions import override  # a dependency of torch

from ..records.evidence import Settings, TimeKind
from ..subject.outputs import Answer, Call, poison
from . import arms as arms_module, launches, nvml, schedule
from .arms import Arm, Device
from .correctness import poison_free_memory
from .launches import CallTrace, Recording
from .nvml import Reading

_cuda: Any = torch.cuda  # typed in part, and differently from release to release
_now = time.perf_counter  # taken before a subject is imported, which could put another in its place; never set back

TRIAL_CALLS = 20  # in the graph that tells how long a call takes: one call would mostly show what a replay costs
WARM_CALLS = 3  # eager calls right before a block of wall calls: they refill the allocator's cache
SLEEP_CYCLES = 40_000_000  # 20 ms at 2 GHz: far longer than the host needs to enqueue a call
SETTLE_S = (1.0, 3.0)  # clocks get at least so much work before the first sample, and at most


class Graph(Protocol):
    """A captured graph of several calls."""

    outputs: list[Answer | None]  # the last answer to each set of inputs; None where no call used the set

    def replay_seconds(self, replays: int) -> list[float]:
        """Return the device time of each of ``replays`` replays, after one that is not timed."""

    def replay_once(self) -> None:
        """Replay, and wait for the end."""

    def poison_outputs(self) -> None:
        """Fill the outputs with NaN."""

    def release(self) -> None:
        """Free the graph and its memory."""


class Timer(Device, Protocol):
    """A GPU and the clocks around it."""

    l2_bytes: int

    def capture(self, calls: Sequence[Call], count: int) -> Graph:
        """Capture ``count`` calls, rotating over ``calls``. Raises what the capture raises."""

    def wall_seconds(self, sequence: Sequence[Callable[[], object]]) -> float:
        """Return the host's time for all calls of ``sequence``, until the GPU has finished them."""

    def flush_cache(self) -> None:
        """Overwrite L2: write twice its size."""

    def recording(self) -> AbstractContextManager[Recording]:
        """Profile a block."""

    def read_sensors(self) -> Reading:
        """Return clock, power, temperature and throttle reasons now."""

    def empty_cache(self) -> None:
        """Give free memory back."""


class CudaTimer(Timer):
    """The current CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        properties = _cuda.get_device_properties(_cuda.current_device())
        self.l2_bytes = int(properties.L2_cache_size)
        self.sensors = nvml.open_sensors(str(properties.uuid) if hasattr(properties, "uuid") else None)
        self._flush = torch.full((2 * self.l2_bytes,), 1, dtype=torch.uint8, device="cuda")
        self._capture_stream = _cuda.Stream()
        self._side_stream = _cuda.Stream()

    @override
    def synchronize(self) -> None:
        _cuda.synchronize()

    @override
    def empty_cache(self) -> None:
        _cuda.empty_cache()

    @override
    def read_sensors(self) -> Reading:
        return self.sensors.read()

    @override
    def recording(self) -> AbstractContextManager[Recording]:
        return launches.recording()

    @override
    def flush_cache(self) -> None:
        self._flush.fill_(2)

    @override
    def sleep(self) -> None:
        _cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - torch has no public way to keep a stream busy

    @override
    def streams(self) -> Sequence[AbstractContextManager[Any]]:
        return [_cuda.stream(stream) for stream in (_cuda.default_stream(), self._side_stream)]

    @override
    def poison(self, *nbytes: int) -> None:
        poison_free_memory(self.name, *nbytes)

    @override
    def peak_bytes(self, call: Call) -> int:
        _cuda.synchronize()
        _cuda.reset_peak_memory_stats()
        before = _cuda.memory_allocated()
        answer = call()
        _cuda.synchronize()
        peak = _cuda.max_memory_allocated()
        del answer
        return int(peak - before)

    def settle(self) -> None:
        """Keep the GPU busy until its SM clock stays where it is."""
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
        product = torch.mm(matrix, matrix)
        clocks: list[int | None] = []
        begin = _now()
        while True:
            for _ in range(40):
                torch.mm(matrix, matrix, out=product)
            _cuda.synchronize()
            clocks.append(self.read_sensors().sm_clock_mhz)
            busy = _now() - begin
            if busy >= SETTLE_S[1] or (busy >= SETTLE_S[0] and schedule.clocks_settled(clocks)):
                return

    @override
    def wall_seconds(self, sequence: Sequence[Callable[[], object]]) -> float:
        _cuda.synchronize()
        begin = _now()
        for call in sequence:
            call()
        _cuda.synchronize()
        return _now() - begin

    @override
    def capture(self, calls: Sequence[Call], count: int) -> CudaGraph:
        return CudaGraph(calls, count, self._capture_stream)


class CudaGraph(Graph):
    """One capture, with a memory pool of its own. Each set of inputs keeps the output of its last call."""

    def __init__(self, calls: Sequence[Call], count: int, stream: torch.cuda.Stream) -> None:
        self.outputs: list[Answer | None] = [None] * len(calls)
        self._graph = _cuda.CUDAGraph()
        pool = _cuda.graph_pool_handle()
        before = _cuda.current_stream()
        try:
            # Another thread of this process (a watchdog, a compiler) may call CUDA meanwhile: that is no error.
            with _cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                for index in range(count):
                    place = index % len(calls)
                    self.outputs[place] = calls[place]()
        except BaseException:
            self.outputs.clear()
            _clean_up_after_failed_capture(before, pool)
            raise

    @override
    def replay_seconds(self, replays: int) -> list[float]:
        events = [_cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        # While the replay that is not timed runs, the host gets ahead: no launch falls between two events.
        self._graph.replay()
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        _cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(events)]

    @override
    def replay_once(self) -> None:
        self._graph.replay()
        _cuda.synchronize()

    @override
    def poison_outputs(self) -> None:
        for output in self.outputs:
            if output is not None:
                poison(output)

    @override
    def release(self) -> None:
        self.outputs.clear()
        self._graph.reset()


def _clean_up_after_failed_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what an invalidated capture leaves behind, where ``capture_end`` raised before it could."""
    _cuda.set_stream(stream)
    device = _cuda.current_device()
    with contextlib.suppress(RuntimeError):  # raised when capture_end got as far as this itself
        torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - as torch's own graph trees do
    # The default generator may still believe that it is being captured, and would refuse to draw the next inputs.
    generator = _cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


class ClockSampler:
    """Samples of graph and wall time.

    Between what could fill a cache (warm calls, a capture) and the answers that are compared, ``move_values`` gives a
    set of inputs other values.
    """

    def __init__(
        self, settings: Settings, times: Sequence[TimeKind], timer: Timer, move_values: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._times = times
        self._timer = timer
        self._move_values = move_values
        self._graph_calls = 0
        self._replays: dict[str, int] = {}
        self._wall_sequences: dict[str, list[Call]] = {}

    def prepare(self, arms: Sequence[Arm]) -> None:
        """Find out how long a call takes, and from that how many calls make a sample. Arms that cannot lose a kind."""
        graph_seconds: dict[str, float] = {}
        for arm in arms:
            try:
                with arm.loaded.context():
                    eager = estimate_seconds(arm, self._timer)
                    calls = schedule.block_call_count(
                        eager, self._settings.wall_calls, at_least=schedule.MIN_WALL_CALLS
                    )
                    self._wall_sequences[arm.name] = rotate(arm.calls, calls)
            except Exception as error:  # noqa: BLE001 - what an arm raises is a result
                arm.lose(self._times, arms_module.survive(error, arm.name, self._timer))
                continue
            if "graph" in self._times:
                self._try_capture(arm, eager, graph_seconds)
        if graph_seconds:
            sets = len(next(arm for arm in arms if arm.name in graph_seconds).calls)
            self._graph_calls = schedule.graph_call_count(
                list(graph_seconds.values()),
                sets,
                graph_seconds=self._settings.graph_seconds,
                graph_calls=self._settings.graph_calls,
            )
        for name, seconds in graph_seconds.items():
            self._replays[name] = schedule.replay_count(seconds * self._graph_calls, self._settings.graph_replays)

    def _try_capture(self, arm: Arm, eager_seconds: float, graph_seconds: dict[str, float]) -> None:
        wanted = max(len(arm.calls), TRIAL_CALLS)
        count = schedule.block_call_count(eager_seconds, wanted, at_least=1)
        try:
            with arm.loaded.context():
                graph = self._timer.capture(arm.calls, count)
                graph_seconds[arm.name] = graph.replay_seconds(1)[0] / count
                graph.release()
        except Exception as error:  # noqa: BLE001 - what an arm raises is a result
            reason = arms_module.survive(error, arm.name, self._timer)
            arm.lose(["graph"], f"it cannot be captured: {reason}")

    def session(self) -> AbstractContextManager[object]:
        """Return the context around several rounds."""
        return contextlib.nullcontext()

    def sample(self, kind: TimeKind, arm: Arm, round_number: int) -> float | None:
        """Return one sample in seconds a call, or None when it comes later. Raises what the arm raises."""
        return self._graph_sample(arm, round_number) if kind == "graph" else self._wall_sample(arm)

    def late_samples(self, arm: Arm, round_numbers: Sequence[int]) -> list[float]:
        """Return the samples that ``sample`` did not."""
        del arm, round_numbers
        return []

    def _wall_sample(self, arm: Arm) -> float:
        """Time a block, and see that its last answer is right. No other is kept: the block's memory stays as it is."""
        sequence = self._wall_sequences[arm.name]
        answers: list[Answer] = []
        last = sequence[-1]
        block = [*sequence[:-1], lambda: answers.append(last())]
        for call in sequence[: WARM_CALLS if len(sequence) > schedule.MIN_WALL_CALLS else 1]:
            call()
        place = (len(sequence) - 1) % len(arm.calls)
        self._move_values(place)
        seconds = self._timer.wall_seconds(block) / len(block)
        wrong = arms_module.mismatch(answers, [arm.expected[place]], arm.tolerance)
        if wrong:
            raise WrongAnswerError(f"the last answer of a timed block is wrong: {wrong}")
        return seconds

    def _graph_sample(self, arm: Arm, round_number: int) -> float:
        """Capture anew, time the replays, and see that a replay gives the right answers, to new values too."""
        graph = self._timer.capture(arm.calls, self._graph_calls)
        try:
            seconds = statistics.median(graph.replay_seconds(self._replays[arm.name])) / self._graph_calls
            # What was computed while capturing answers to the values of then.
            self._move_values(round_number % min(self._graph_calls, len(arm.calls)))
            wrong = wrong_replay(graph, arm)
        finally:
            graph.release()
        if wrong:
            raise WrongAnswerError(wrong)
        return seconds


class KernelSampler:
    """Samples of kernel time: the profiler's, so they come when its recording has ended."""

    def __init__(self, settings: Settings, timer: Timer, move_values: Callable[[int], None]) -> None:
        self._cold = settings.cache == "cold"
        self._timer = timer
        self._move_values = move_values
        self._draw = random.Random(f"{settings.seed}/compared")
        self._sequences: dict[str, list[Call]] = {}
        self._recording: Recording | None = None

    def prepare(self, arms: Sequence[Arm]) -> None:
        """Find out how long a call takes, and from that how many calls make a sample."""
        for arm in arms:
            try:
                with arm.loaded.context():
                    seconds = estimate_seconds(arm, self._timer)
            except Exception as error:  # noqa: BLE001 - what an arm raises is a result
                arm.lose(["kernel"], arms_module.survive(error, arm.name, self._timer))
                continue
            wanted = schedule.KERNEL_CALLS if self._cold else max(schedule.KERNEL_CALLS, len(arm.calls))
            self._sequences[arm.name] = rotate(arm.calls, schedule.block_call_count(seconds, wanted, at_least=1))

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
        sequence = self._sequences[arm.name]
        if self._cold:
            compared = self._draw.randrange(len(sequence))
            for index, call in enumerate(sequence):
                if index == compared:
                    self._move_values(index % len(arm.calls))
                self._timer.flush_cache()
                self._timer.synchronize()  # host and GPU clocks differ by microseconds: keep the flush well before
                with self._recording.call(label):
                    answer = call()
                    self._timer.synchronize()
                if index == compared:
                    _require_right(arm, index, answer)
                del answer  # the next call gets its memory, as it would anywhere
        else:
            last = len(sequence) - 1
            self._move_values(last % len(arm.calls))
            self._timer.synchronize()
            with self._recording.call(label):
                for call in sequence[:last]:
                    call()
                answer = sequence[last]()
                self._timer.synchronize()
            _require_right(arm, last, answer)
        return None

    def late_samples(self, arm: Arm, round_numbers: Sequence[int]) -> list[float]:
        """Return one sample for each round: the median over its calls, or their mean where they ran back to back."""
        assert self._recording is not None
        rounds = [self._recording.calls(f"{number}/{arm.name}") for number in round_numbers]
        problem = lost_kernels([trace for traces in rounds for trace in traces])
        if problem:
            raise WrongAnswerError(problem)
        calls = 1 if self._cold else len(self._sequences[arm.name])
        return [statistics.median(trace.device_seconds() for trace in traces) / calls for traces in rounds]


def _require_right(arm: Arm, index: int, answer: Answer) -> None:
    """Compare the answer of call ``index`` of a sample. Raises ``WrongAnswerError``."""
    wrong = arms_module.mismatch([answer], [arm.expected[index % len(arm.calls)]], arm.tolerance)
    if wrong:
        raise WrongAnswerError(f"an answer of a timed sample is wrong: {wrong}")


class WrongAnswerError(Exception):
    """What was timed did not do its work. Caught by the rounds, never seen outside."""


def rotate(calls: Sequence[Call], count: int) -> list[Call]:
    """Return ``count`` calls that go round ``calls``."""
    return [calls[index % len(calls)] for index in range(count)]


def estimate_seconds(arm: Arm, timer: Timer) -> float:
    """Return roughly how long an eager call takes: a first, warm one, then three more where they are fast."""
    seconds = timer.wall_seconds(arm.calls[:1])
    return seconds if seconds > schedule.LONGEST_SAMPLE_S else timer.wall_seconds(rotate(arm.calls, 3)) / 3


def wrong_replay(graph: Graph, arm: Arm) -> str:
    """Return how a replay's answers differ from the eager ones, or an empty string."""
    graph.poison_outputs()
    graph.replay_once()
    pairs = [(output, wanted) for output, wanted in zip(graph.outputs, arm.expected, strict=True) if output is not None]
    wrong = arms_module.mismatch([output for output, _ in pairs], [wanted for _, wanted in pairs], arm.tolerance)
    return f"a replay of its graph does not answer as the eager call does: {wrong}" if wrong else ""


def lost_kernels(traces: Sequence[CallTrace]) -> str:
    """Return why the traces of one arm's calls cannot be trusted, or an empty string."""
    counts = {len(trace.events) for trace in traces}
    if 0 in counts:
        return "the profiler saw a call without any work on the GPU"
    if len(counts) > 1:
        return f"its calls gave the GPU {min(counts)} to {max(counts)} pieces of work: records lost, or dispatch varies"
    return ""
