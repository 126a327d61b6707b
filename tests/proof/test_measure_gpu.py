"""What only a GPU can show: captures, streams, the profiler, and a planted slowdown that must be seen."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import triton
import triton.language as tl

from flashmoe_science.proof.judge import statistics
from flashmoe_science.proof.measure import gpu_tasks, launches, measure, rounds
from flashmoe_science.proof.records.evidence import Arm, Rounds, Settings
from flashmoe_science.proof.subject.operator import Operator
from flashmoe_science.proof.subject.subject import Subject

from .simulated import Doubling, loaded

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]

SPIN_CYCLES = 100_000  # 50 us at 2 GHz


def double(x):
    return x * 2


def spinning(cycles):
    """Return an entry point that keeps the GPU busy for so many cycles."""

    def entry(x):
        out = x * 2
        torch.cuda._sleep(cycles)
        return out

    return entry


def reads_on_the_host(x):
    out = x * 2
    return out + 0 if out.sum().item() == 0 else out


class Elsewhere:
    """Works on a stream that waits for nobody; only its output is ready in time."""

    def __init__(self):
        self._stream = torch.cuda.Stream()

    def __call__(self, x):
        with torch.cuda.stream(self._stream):
            out = x * 2
        torch.cuda.current_stream().wait_stream(self._stream)
        return out


@pytest.fixture(scope="module")
def timer():
    timer = measure.CudaTimer()
    timer.settle()
    return timer


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def bench(timer, subject, baselines, times, *, length=4096, **settings):
    arms = [loaded("ours", subject, role="subject"), *(loaded(name, entry) for name, entry in baselines.items())]
    plan = rounds.Plan(Settings(**{"rounds": 4, **settings}), times, 0)
    case = rounds.Case("case", cast("Operator", Doubling()), length)
    result = rounds.measure_case(case, arms, plan, timer, on_round=lambda *_: None)
    found = Rounds.model_validate(result["rounds"]) if result["rounds"] else None
    return {arm["name"]: Arm.model_validate(arm) for arm in result["arms"]}, found


@pytest.mark.parametrize("times", [["graph", "wall"], ["kernel"]])
def test_every_kind_of_time_is_taken(timer, times):
    arms, found = bench(timer, double, {"sdpa": double}, times)
    assert {arm.status for arm in arms.values()} == {"measured"}, arms
    assert arms["ours"].peak_bytes == 4096 * 4
    assert arms["ours"].accuracy.deterministic is True
    for kind in times:
        for seconds in found.seconds[kind].values():
            assert len(seconds) == 4
            assert all(0.5e-6 < value < 1e-3 for value in seconds), seconds


def test_a_capture_that_fails_takes_nothing_else_along(timer):
    arms, found = bench(timer, double, {"sdpa": double, "reads": reads_on_the_host}, ["graph", "wall"])
    assert (arms["ours"].status, arms["sdpa#2"].status) == ("measured", "measured")
    assert arms["reads"].reason.startswith("graph time: it cannot be captured")
    assert set(found.seconds["wall"]) == {"ours", "sdpa", "sdpa#2", "reads"}
    torch.randn(8, device="cuda")  # the default generator left the capture


def test_work_on_another_stream_is_found(timer):
    arms, found = bench(timer, Elsewhere(), {"sdpa": double}, ["wall"])
    assert "not ordered with the stream that it is called on" in arms["ours"].reason
    assert found is None


def test_an_arm_out_of_memory_fails_alone(timer):
    def greedy(x):
        return torch.empty(1 << 48, device="cuda")

    arms, _ = bench(timer, double, {"sdpa": double, "greedy": greedy}, ["wall"])
    assert arms["greedy"].reason.startswith("GPU out of memory")
    assert arms["sdpa"].status == "measured"


def test_fresh_memory_is_poisoned(timer):
    torch.ones(4096, device="cuda")
    timer.poison(4096 * 4)
    assert torch.empty(4096, device="cuda").isnan().all()


def test_launches_of_calls_and_of_graphs_are_seen(timer):
    subject = Subject("ours", "doubling", "m:f", Path(), ())
    case = rounds.Case("case", cast("Operator", Doubling()), 4096)
    arms = [loaded("ours", double, role="subject"), loaded("reads", reads_on_the_host)]
    ours, reads = gpu_tasks.capture_case(case, subject, arms, timer, seed=0)["arms"]
    assert (ours["status"], ours["problems"]) == ("captured", [])
    assert ours["graph_launches"] == ours["launches"]
    assert ours["launches"][0]["block"][0] > 0
    assert ours["launches"][0]["registers"] > 0
    assert reads["graph_launches"] is None
    assert reads["launches"]


@pytest.mark.timing
def test_device_time_is_that_of_the_work_and_not_of_waiting_for_it():
    x = torch.ones(4096, device="cuda")
    entry = spinning(1_000_000)
    entry(x)
    with launches.recording() as recording, recording.call("call"):
        entry(x)
        torch.cuda.synchronize()
    (call,) = recording.calls("call")
    assert 2 <= len(call.kernels) <= 3
    assert 300e-6 < call.device_seconds() < 5e-3


@triton.jit
def _double_kernel(x_ptr, o_ptr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Double a vector. Grid: (parts of it,)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + offsets, 2 * tl.load(x_ptr + offsets, eviction_policy=POLICY))


def doubling(policy):
    """Return an entry point whose loads ask L2 for ``policy``."""

    def entry(x):
        out = torch.empty_like(x)
        _double_kernel[(x.numel() // 2048,)](x, out, BLOCK=2048, POLICY=policy)
        return out

    return entry


@pytest.mark.timing
def test_lines_that_were_asked_to_stay_are_cold(timer):
    """4 MiB, read by a kernel that asks for evict-last: it took 4.9 us of a cold cache where the plain one took 6.4."""
    plain = {"plain": doubling("evict_first"), "default": doubling("")}
    arms, found = bench(timer, doubling("evict_last"), plain, ["kernel"], length=1 << 20, rounds=20)
    assert {arm.status for arm in arms.values()} == {"measured"}, arms
    seconds = {name: sorted(column)[10] for name, column in found.seconds["kernel"].items()}
    print(seconds)
    assert seconds["ours"] > 0.95 * seconds["default"], seconds


@pytest.mark.timing
def test_a_planted_slowdown_of_three_percent_is_seen_and_none_where_there_is_none(timer):
    slower = round(SPIN_CYCLES * 1.03)
    arms, found = bench(timer, spinning(slower), {"base": spinning(SPIN_CYCLES)}, ["graph", "wall"], rounds=20)
    assert {arm.status for arm in arms.values()} == {"measured"}, arms
    for kind, columns in found.seconds.items():
        planted = statistics.interval(statistics.log_ratios(columns["ours"], columns["base"]))
        control = statistics.interval(statistics.log_ratios(columns["base#2"], columns["base"]))
        assert planted.low > 0.01, (kind, planted)
        assert planted.high < 0.05, (kind, planted)
        assert abs(control.estimate) < 0.01, (kind, control)
