"""A simulated GPU on the CPU, with a clock that only kernels and calls advance, and a small operator to run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import torch

from flashmoe_science.proof.measure.arms import Loaded
from flashmoe_science.proof.measure.launches import CallTrace, DeviceEvent, Recording
from flashmoe_science.proof.measure.measure import Graph, Timer
from flashmoe_science.proof.measure.nvml import Reading
from flashmoe_science.proof.subject.custom_operator import CustomOperator, Work
from flashmoe_science.proof.subject.outputs import Answer, poison

HOST_SECONDS = 10e-6  # what a call costs the host


class Gpu:
    """Runs kernels at once, records them while capturing, and delays those of a stream that nobody waits for."""

    def __init__(self):
        self.now = 0.0
        self.capturing: list[tuple[Callable[[], None], float, str]] | None = None
        self.late: list[Callable[[], None]] = []
        self.listeners: list[list[DeviceEvent]] = []
        self.lost = False
        self.timing = False  # whether a clock runs, or the profiler listens to a call

    def launch(self, work, *, seconds=5e-6, name="kernel", stream="calling"):
        """Run ``work`` as a kernel of ``seconds``; one named ``memcpy`` is a copy."""
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.capturing is not None:
            if stream == "calling":
                self.capturing.append((work, seconds, name))
            return
        if stream == "calling":
            work()
        else:
            self.late.append(work)
        self.run(seconds, name)

    def run(self, seconds, name):
        start = round(self.now * 1e9)
        self.now += seconds
        for listener in self.listeners:
            listener.append(
                DeviceEvent("memcpy" if name == "memcpy" else "kernel", name, start, round(self.now * 1e9), 7)
            )

    def synchronize(self):
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        for work in self.late:
            work()
        self.late.clear()


class SimulatedGraph(Graph):
    def __init__(self, gpu, calls, count):
        self._gpu = gpu
        self.outputs: list[Answer | None] = [None] * len(calls)
        gpu.capturing = []
        try:
            for index in range(count):
                self.outputs[index % len(calls)] = calls[index % len(calls)]()
        finally:
            self.kernels, gpu.capturing = gpu.capturing, None

    def replay_seconds(self, replays, prepare):
        seconds = []
        for _ in range(replays + 1):
            prepare()
            self._gpu.timing = replays > 1  # else it is a trial
            seconds.append(self._replay())
            self._gpu.timing = False
        return seconds[1:]

    def replay_once(self):
        self._replay()

    def _replay(self):
        begin = self._gpu.now
        for work, seconds, name in self.kernels:
            work()
            self._gpu.run(seconds, name)
        return self._gpu.now - begin

    def poison_outputs(self):
        for output in self.outputs:
            if output is not None:
                poison(output)

    def release(self):
        self.outputs.clear()


class SimulatedRecording(Recording):
    def __init__(self, gpu):
        super().__init__()
        self._gpu = gpu
        self._found: list[CallTrace] = []

    @contextlib.contextmanager
    def call(self, label):
        events: list[DeviceEvent] = []
        self._gpu.listeners.append(events)
        self._gpu.timing = True
        try:
            yield
        finally:
            self._gpu.timing = False
            self._gpu.listeners.remove(events)
            self._found.append(CallTrace(label, tuple(events)))

    def stop(self):
        self.traces = self._found


class SimulatedTimer(Timer):
    """A timer of the simulated GPU."""

    def __init__(self, gpu, l2_bytes=1 << 10):
        self.gpu = gpu
        self.l2_bytes = l2_bytes
        self.flushes = 0
        self.recordings = 0
        self.captures: list[int] = []
        self.blocks: list[int] = []

    def synchronize(self):
        self.gpu.synchronize()

    def read_sensors(self):
        return Reading(sm_clock_mhz=1980, power_w=300.0, temperature_c=40, throttle="")

    @contextlib.contextmanager
    def recording(self):
        self.recordings += 1
        recording = SimulatedRecording(self.gpu)
        yield recording
        recording.stop()

    def flush_cache(self):
        self.flushes += 1
        self.gpu.run(50e-6, "fill")

    def streams(self):
        return [contextlib.nullcontext(), contextlib.nullcontext()]

    def poison(self, *nbytes):
        pass

    def peak_bytes(self, call):
        answer = call()
        return sum(part.nbytes for part in (answer if isinstance(answer, (tuple, list)) else [answer]))

    def wall_seconds(self, sequence):
        begin = self.gpu.now
        self.blocks.append(len(sequence))
        self.gpu.timing = len(sequence) > 1  # else something is found out, and nothing sampled
        for call in sequence:
            call()
            self.gpu.now += HOST_SECONDS
        self.gpu.synchronize()
        self.gpu.timing = False
        return self.gpu.now - begin

    def capture(self, calls, count):
        self.captures.append(count)
        return SimulatedGraph(self.gpu, calls, count)


class Doubling(CustomOperator):
    """The operator: twice a vector. A problem is its length."""

    name = "doubling"

    def __init__(self, baselines=()):
        self._baselines = {each.name: each for each in baselines}

    def parse_case(self, table):
        return table["length"]

    def as_table(self, problem):
        return {"length": problem}

    def describe(self, problem):
        return f"n{problem}"

    def work(self, problem):
        return Work(flops=float(problem), bytes=8.0 * problem, tokens=problem)

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(problem, generator=generator).to(device)}

    def refresh(self, problem, inputs, *, seed):
        inputs["x"].normal_(generator=torch.Generator(inputs["x"].device).manual_seed(seed))

    def exact(self, problem, inputs):
        return 2 * inputs["x"].double()

    def low_precision(self, problem, inputs):
        return (2 * inputs["x"].half()).float()

    def error_budget(self, exact, low_precision):
        return 2 * (exact - low_precision).abs().max().item()

    def baselines(self):
        return self._baselines


def implementation(gpu, *, seconds=5e-6, change=lambda out: out, **launch):
    """Return an entry point that doubles a vector in one kernel; ``change`` spoils the answer."""

    def entry(x):
        out = torch.empty(x.shape)
        gpu.launch(lambda: out.copy_(change(2 * x)), seconds=seconds, **launch)
        return out

    return entry


def loaded(name, entry, *, role="baseline", baseline=None, **changes):
    """Return what ``load_arms`` would."""
    return Loaded(name, role, entry, "loaded", version="1.0", baseline=baseline, **changes)


def make_baseline(name, entry=None, *, refusal=None, kernels=(), error=None):
    """Return a baseline for an operator's ``baselines``."""

    def load():
        if error is not None:
            raise error
        return entry

    return SimpleNamespace(
        name=name,
        kernels=kernels,
        load=load,
        version=lambda: "1.0",
        refusal=lambda problem: refusal,
        context=contextlib.nullcontext,
    )
