"""Take times: the only file of the harness that reads a clock of what is measured.

Three kinds, never mixed: ``kernel`` (device time of a call's work, from the profiler), ``graph`` (replays of a CUDA
graph, a call) and ``wall`` (eager calls, host clock). What an arm costs besides its own work is the same for every arm:
a loop over closures that were made before.

Every call that is timed reads new values (``fresh_values.py``), and answers of every sample are compared with what is
right for them: of wall time the last call's, of graph time those of the last timed replay, of kernel time those of one
call, drawn at random where each call is timed alone. The other calls of a sample are not compared.

``CudaTimer`` holds the calls into ``torch.cuda``; ``samplers.py`` decides what to do with any ``Timer``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from typing_extensions import override  # a dependency of torch

from ...errors import ProofError
from ..subject.outputs import Answer, Call, poison
from ..worker import line_up
from . import launches, nvml, schedule
from .cache import CacheFlush
from .correctness import poison_free_memory
from .launches import Recording
from .nvml import Reading

_cuda: Any = torch.cuda  # typed in part, and differently from release to release
_now = time.perf_counter  # taken before a subject is imported, which could put another in its place; never set back

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


class Timer:
    """The clocks and sensors around calls: of a CPU, which shows that calls over ranks work, and no speed.

    ``CudaTimer`` is that of a GPU.
    """

    name = "cpu"  # of the device, as torch has it
    l2_bytes = 0  # nothing is flushed, so few sets of inputs do
    memory_bytes = 0  # of a CPU it is not asked

    def settle(self) -> None:
        """Keep the device busy until its clock stays where it is. Who else uses a CPU is not known."""

    def synchronize(self) -> None:
        """Wait for all work on all streams; raises when the context is lost."""

    def empty_cache(self) -> None:
        """Give free memory back."""

    def flush_cache(self) -> None:
        """Empty L2, of lines that were asked to stay, too."""

    def sleep(self) -> None:
        """Make the current stream wait for longer than the host needs to enqueue a call."""

    def streams(self) -> Sequence[AbstractContextManager[Any]]:
        """Return contexts, each of which makes one stream current: the default one and, on a GPU, another."""
        return [contextlib.nullcontext()]

    def poison(self, *nbytes: int) -> None:
        """Fill the free memory that the next outputs will get with NaN; each takes one of ``nbytes``."""
        poison_free_memory(self.name, *nbytes)

    def peak_bytes(self, call: Call) -> int:
        """Return how much memory one call allocates at its peak; a CPU does not count it."""
        call()
        return 0

    def read_sensors(self) -> Reading:
        """Return clock, power, temperature and throttle reasons now."""
        return Reading()

    def wall_seconds(self, sequence: Sequence[Callable[[], object]]) -> float:
        """Return the host's time for all calls of ``sequence``, until the device has finished them."""
        return _seconds_of(sequence, self.synchronize)

    def capture(self, calls: Sequence[Call], count: int) -> Graph:  # noqa: ARG002 - as that of a GPU
        """Capture ``count`` calls, rotating over ``calls``. Raises what the capture raises."""
        raise ProofError("a CPU has no graphs")

    def recording(self) -> AbstractContextManager[Recording]:
        """Profile a block."""
        raise ProofError("a CPU launches no kernels that could be recorded")


class CudaTimer(Timer):
    """The current CUDA device."""

    name = "cuda"

    def __init__(self, line_up_devices: Callable[[], None] = lambda: None) -> None:
        """``line_up_devices`` enqueues what ends at the same moment on the GPUs of all ranks."""
        properties = _cuda.get_device_properties(_cuda.current_device())
        self._line_up_devices = line_up_devices
        self.l2_bytes = int(properties.L2_cache_size)
        self.memory_bytes = int(properties.total_memory)
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
    def peak_bytes(self, call: Call) -> int:
        _cuda.synchronize()
        _cuda.reset_peak_memory_stats()
        before = _cuda.memory_allocated()
        answer = call()
        _cuda.synchronize()
        peak = _cuda.max_memory_allocated()
        del answer
        return int(peak - before)

    @override
    def settle(self) -> None:
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
