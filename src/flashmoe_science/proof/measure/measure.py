"""Take times: the only file of the harness that reads a clock of what is measured.

Three kinds, never mixed: ``kernel`` (device time of a call's work, from the profiler), ``graph`` (replays of a CUDA
graph, a call) and ``wall`` (eager calls, host clock). What an arm costs besides its own work is the same for every arm:
a loop over closures that were made before.

Every call that is timed reads new values (``fresh_values.py``), and answers of every sample are compared with what is
right for them: of wall time the last call's, of graph time those of the last timed replay, of kernel time those of one
call, drawn at random where each call is timed alone. The other calls of a sample are not compared.

``CudaTimer`` holds the calls into ``torch.cuda``; the samplers decide what to do with any ``Timer``.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from typing_extensions import override  # a dependency of torch

from ...errors import ProofError
from ..records.evidence import Settings, TimeKind
from ..subject.outputs import Answer, Call, poison
from ..worker import agree, line_up, meet
from . import arms as arms_module, launches, nvml, schedule
from .arms import Arm, Device
from .cache import CacheFlush
from .correctness import poison_free_memory
from .fresh_values import FreshValues
from .launches import CallTrace, Recording
from .nvml import Reading

_cuda: Any = torch.cuda  # typed in part, and differently from release to release
_now = time.perf_counter  # taken before a subject is imported, which could put another in its place; never set back

TRIAL_CALLS = 20  # in the graph that tells how long a call takes: one call would mostly show what a replay costs
WARM_CALLS = 3  # eager calls right before a block of wall calls: they refill the allocator's cache
SLEEP_CYCLES = 40_000_000  # 20 ms at 2 GHz: far longer than the host needs to enqueue a call
LEAD_CYCLES = 400_000  # 0.2 ms at 2 GHz: longer than the host needs to enqueue a replay and two events
SETTLE_S = (1.0, 3.0)  # clocks get at least so much work before the first sample, and at most


class Graph(Protocol):
    """A captured graph of several calls."""

    outputs: list[Answer | None]  # the last answer to each set of inputs; None where no call used the set

    def replay_seconds(self, replays: int, prepare: Callable[[], None]) -> list[float]:
        """Return the device times of ``replays`` replays, after one that is not timed; ``prepare`` before each."""

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
        """Empty L2, of lines that were asked to stay, too."""

    def recording(self) -> AbstractContextManager[Recording]:
        """Profile a block."""

    def read_sensors(self) -> Reading:
        """Return clock, power, temperature and throttle reasons now."""

    def empty_cache(self) -> None:
        """Give free memory back."""


class CudaTimer(Timer):
    """The current CUDA device."""

    name = "cuda"

    def __init__(self, line_up_devices: Callable[[], None] = lambda: None) -> None:
        """``line_up_devices`` enqueues what ends at the same moment on the GPUs of all ranks."""
        properties = _cuda.get_device_properties(_cuda.current_device())
        self._line_up_devices = line_up_devices
        self.l2_bytes = int(properties.L2_cache_size)
        self.sensors = nvml.open_sensors(str(properties.uuid) if hasattr(properties, "uuid") else None)
        self._flush = CacheFlush(self.l2_bytes)
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
        self._flush.flush()

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
        return _seconds_of(sequence, _cuda.synchronize)

    @override
    def capture(self, calls: Sequence[Call], count: int) -> CudaGraph:
        return CudaGraph(calls, count, self._capture_stream, self._line_up_devices)


def _seconds_of(sequence: Sequence[Callable[[], object]], synchronize: Callable[[], object]) -> float:
    synchronize()
    line_up()
    begin = _now()
    for call in sequence:
        call()
    synchronize()
    return _now() - begin


class HostTimer(Timer):
    """A CPU, for calls over ranks where there is no GPU: it shows that a run works, and no speed."""

    name = "cpu"
    l2_bytes = 0  # nothing is flushed, so few sets of inputs do

    @override
    def synchronize(self) -> None:
        pass

    @override
    def empty_cache(self) -> None:
        pass

    @override
    def read_sensors(self) -> Reading:
        return Reading()

    @override
    def recording(self) -> AbstractContextManager[Recording]:
        raise ProofError("a CPU launches no kernels that could be recorded")

    @override
    def flush_cache(self) -> None:
        pass

    @override
    def sleep(self) -> None:
        pass

    @override
    def streams(self) -> Sequence[AbstractContextManager[Any]]:
        return [contextlib.nullcontext()]

    @override
    def poison(self, *nbytes: int) -> None:
        poison_free_memory(self.name, *nbytes)

    @override
    def peak_bytes(self, call: Call) -> int:
        call()
        return 0

    def settle(self) -> None:
        """Do nothing: who else uses the CPU is not known."""

    @override
    def wall_seconds(self, sequence: Sequence[Callable[[], object]]) -> float:
        return _seconds_of(sequence, self.synchronize)

    @override
    def capture(self, calls: Sequence[Call], count: int) -> Graph:
        raise ProofError("a CPU has no graphs")


class CudaGraph(Graph):
    """One capture, with a memory pool of its own. Each set of inputs keeps the output of its last call."""

    def __init__(
        self,
        calls: Sequence[Call],
        count: int,
        stream: torch.cuda.Stream,
        line_up_devices: Callable[[], None] = lambda: None,
    ) -> None:
        self.outputs: list[Answer | None] = [None] * len(calls)
        self._line_up_devices = line_up_devices
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
    def replay_seconds(self, replays: int, prepare: Callable[[], None]) -> list[float]:
        events = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(replays)]
        prepare()
        self._graph.replay()
        for begin, end in events:
            prepare()
            # While the stream waits, the host gets ahead: no launch falls between the two events.
            _cuda._sleep(LEAD_CYCLES)  # noqa: SLF001 - torch has no public way to keep a stream busy
            self._line_up_devices()
            begin.record()
            self._graph.replay()
            end.record()
        _cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in events]

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


def capture_call(call: Call) -> Graph:
    """Return a CUDA graph of one call, captured on a stream of its own as those that are timed. Raises what it raises.

    The call has to have been made before.
    """
    return CudaGraph([call], 1, _cuda.Stream())


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
    """Samples of graph and wall time."""

    def __init__(self, settings: Settings, times: Sequence[TimeKind], timer: Timer, writer: Writer) -> None:
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
            calls = schedule.block_call_count(eager, most, at_least=min(schedule.MIN_WALL_CALLS, most))
            blocks = schedule.wall_block_count(
                calls, self._settings.wall_calls, eager, seconds_per_set=self._writer.seconds_per_set
            )
            self._wall_calls[arm.name] = calls, blocks
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
        calls = 1 if self._cold else self._calls[arm.name]
        return [statistics.median(trace.device_seconds() for trace in traces) / calls for traces in rounds]


class Writer:
    """Gives calls new values before they are timed, and looks at their answers after that."""

    def __init__(self, values: FreshValues, timer: Timer, *, in_cache: bool, seconds_per_set: float) -> None:
        self.values = values
        self.seconds_per_set = seconds_per_set  # to write new values to one
        self.compare = True  # whether answers of this round are compared with what is right, beside their repeats
        self._timer = timer
        self._in_cache = in_cache  # whether all sets of inputs fit into the cache: then they stay there

    def begin(self, kind: TimeKind, places: Sequence[int]) -> None:
        """Begin a sample: what is called before the clock runs does not read what the arm before has read last."""
        self.values.begin_sample(kind)
        self.values.write(places)

    def write(self, places: Sequence[int]) -> None:
        """Write new values to ``places``. What was written last does not stay in the cache: no call finds its own."""
        self.values.write(places)
        if not self._in_cache:
            self._timer.flush_cache()

    def wrong(self, arm: Arm, answers: Mapping[int, Answer], compared: int) -> str:
        """Return how answers, by place, are wrong, or an empty text; that at ``compared`` must be right."""
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
