"""The calls into torch.cuda: their order, their arguments and their cleaning up, with a stand-in for torch.cuda."""

from __future__ import annotations

import contextlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.proof.measure import measure, nvml
from flashmoe_science.proof.measure.nvml import NoSensors, Reading


class FakeCuda:
    """Stands in for ``torch.cuda``; writes down what is asked of it."""

    def __init__(self):
        self.log: list[str] = []
        self.clock_ms = 0.0
        self.stream_now = "default"
        self.capture_end_raises = False
        self.generator = SimpleNamespace(clone_state=lambda: "copy", graphsafe_set_state=self._set_state)
        self.default_generators = [self.generator]
        self.peak = 0

    def _set_state(self, state):
        self.log.append(f"generator <- {state}")

    def current_device(self):
        return 0

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=1 << 10, total_memory=1 << 30, uuid="aaaa")

    def Stream(self):  # noqa: N802 - torch's name
        return "side"

    def default_stream(self):
        return "default"

    def current_stream(self):
        return self.stream_now

    def set_stream(self, stream):
        self.stream_now = stream

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream}")
        yield

    def synchronize(self):
        self.log.append("synchronize")

    def empty_cache(self):
        self.log.append("empty_cache")

    def reset_peak_memory_stats(self):
        self.peak = 0

    def memory_allocated(self):
        return 100

    def max_memory_allocated(self):
        return 100 + self.peak

    def _sleep(self, cycles):
        self.log.append(f"sleep {cycles}")

    def graph_pool_handle(self):
        return (0, 1)

    def CUDAGraph(self):  # noqa: N802
        return FakeGraph(self)

    def Event(self, *, enable_timing):  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.log.append(f"capture pool={pool} stream={stream} {capture_error_mode}")
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        except RuntimeError:
            if self.capture_end_raises:  # as torch does: the stream is not restored
                raise RuntimeError("operation failed due to a previous error during capture") from None
            self.stream_now = before
            raise
        self.stream_now = before


class FakeGraph:
    def __init__(self, cuda):
        self._cuda = cuda

    def replay(self):
        self._cuda.log.append("replay")
        self._cuda.clock_ms += 2.0

    def reset(self):
        self._cuda.log.append("reset")


class FakeEvent:
    def __init__(self, cuda):
        self._cuda = cuda
        self.at_ms = math.nan

    def record(self):
        self._cuda.log.append("event")
        self.at_ms = self._cuda.clock_ms

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(measure, "_cuda", fake)
    monkeypatch.setattr(measure, "CacheFlush", lambda l2_bytes: None)
    monkeypatch.setattr(nvml, "open_sensors", lambda uuid: NoSensors(f"asked for {uuid}"))
    for name in ("full", "randn"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: real(*a, **{**k, "device": "cpu"}))
    return fake


@pytest.fixture
def timer(cuda):
    timer = measure.CudaTimer()
    cuda.log.clear()
    return timer


def test_wall_time_waits_before_and_after_and_does_nothing_else(timer, cuda):
    calls = [lambda: cuda.log.append("a"), lambda: cuda.log.append("b")]
    assert timer.wall_seconds([*calls, calls[0]]) > 0
    assert cuda.log == ["synchronize", "a", "b", "a", "synchronize"]


def test_a_graph_is_captured_on_a_side_stream_into_a_pool_of_its_own(timer, cuda):
    answers = iter([torch.tensor([float(i)]) for i in range(5)])
    graph = timer.capture([lambda: next(answers), lambda: next(answers), lambda: next(answers)], 5)
    assert cuda.log == ["capture pool=(0, 1) stream=side thread_local"]
    assert [output.item() for output in graph.outputs] == [3.0, 4.0, 2.0]  # the last answer to each set
    graph.poison_outputs()
    assert all(output.isnan().all() for output in graph.outputs)
    graph.release()
    assert graph.outputs == []
    assert cuda.log[-1] == "reset"


def test_replays_follow_one_another_between_events_after_one_that_is_not_timed(timer, cuda):
    graph = timer.capture([lambda: torch.ones(1)], 1)
    cuda.log.clear()
    replays = graph.replay_seconds(3, lambda: cuda.log.append("prepare"))
    assert replays == pytest.approx([2e-3] * 3)
    assert cuda.log == [
        "prepare",
        "replay",
        *(["prepare", "sleep 400000", "event", "replay", "event"] * 3),
        "synchronize",
    ]


@pytest.mark.parametrize("capture_end_raises", [False, True])
def test_a_failed_capture_restores_the_stream_the_pool_and_the_generator(timer, cuda, monkeypatch, capture_end_raises):
    ended = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False)
    cuda.capture_end_raises = capture_end_raises

    def syncs():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"during capture|is capturing"):
        timer.capture([syncs], 1)
    assert cuda.stream_now == "default"
    assert ended == [(0, (0, 1))]
    assert "generator <- copy" in cuda.log


@pytest.mark.parametrize(
    ("clocks", "seconds"),
    [([1980], measure.SETTLE_S[0]), ([1200, 1980], measure.SETTLE_S[1]), ([None], measure.SETTLE_S[1])],
)
def test_clocks_settle_in_bounded_time(timer, monkeypatch, clocks, seconds):
    readings = itertools.cycle(clocks)
    ticks = itertools.count(step=0.125)  # at each look at the clock so much time has passed
    looks = []

    def look():
        looks.append(next(ticks))
        return looks[-1]

    monkeypatch.setattr(measure, "_now", look)
    monkeypatch.setattr(timer, "read_sensors", lambda: Reading(sm_clock_mhz=next(readings)))
    product = torch.ones(1)
    monkeypatch.setattr(torch, "mm", lambda *args, out=None: product)
    timer.settle()
    assert looks[-1] - looks[0] == seconds
