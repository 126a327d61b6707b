"""Every hypothesis against kernels whose truth is known: confirmed, ruled out, and not to be told."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.diagnose.observations import (
    CONFLICTS,
    ISSUE,
    LANES,
    WARPS,
    WAVEFRONTS,
    Sensors,
    Status,
    Times,
)

from .made_up import PLAIN, TENSOR, finding, full_gpu, kernel, observe, scaled, serial_story

CONFIRMED, RULED_OUT, CANNOT_TELL = Status.CONFIRMED, Status.RULED_OUT, Status.CANNOT_TELL

DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR_ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"


def counted(blocks=132 * 16, **counters):
    """Return a kernel whose counters were read."""
    names = {"issue": ISSUE, "lanes": LANES, "warps": WARPS, "dram": DRAM, "tensor": TENSOR_ACTIVE}
    changes = {name: counters.pop(name) for name in ("block", "registers", "shared_memory_bytes") if name in counters}
    return kernel(blocks, counters={names.get(name, name): value for name, value in counters.items()}, **changes)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        (
            {"broken_promises": ["kernel old ran with block (128, 1, 1), promised (384, 1, 1)"], "promised": True},
            CONFIRMED,
            "promised (384, 1, 1)",
        ),
        ({"promised": True}, RULED_OUT, "those promised"),
        ({}, CANNOT_TELL, "nothing is promised"),
        ({"broken_promises": None, "missing": {"launches": "no GPU here"}}, CANNOT_TELL, "no GPU here"),
    ],
)
def test_another_kernel_than_promised(changes, status, said):
    found = finding(observe(**changes), "another kernel than promised")
    assert (found.status, said in found.explanation) == (status, True)


@pytest.mark.parametrize(
    ("device", "wall", "status", "share"),
    [
        (5e-6, 20e-6, CONFIRMED, 0.75),
        (18.5e-6, 20e-6, RULED_OUT, None),
        (16e-6, 20e-6, CANNOT_TELL, None),  # a fifth is about as much as wall time varies
        (None, None, CANNOT_TELL, None),
    ],
)
def test_launch_bound(device, wall, status, share):
    found = finding(observe(device=device, wall=wall), "launch-bound")
    assert found.status is status
    assert found.share == pytest.approx(share)
    if status is CONFIRMED:
        assert found.part == "host"
        assert found.most == pytest.approx(4.0)


def test_a_gpu_that_the_profiler_found_at_a_higher_clock_makes_no_host_slow():
    """A long call under a power limit: the kernels of a few calls alone take a fifth less than those of full blocks."""
    found = finding(observe(times=Times(kernel=0.8e-3, graph=0.995e-3, wall=1e-3)), "launch-bound")
    assert found.status is RULED_OUT


def copies(*gains, blocks=8, base=500e-6):
    """Return runs in which 2, 4, ... times the batch does ``gain`` times as much in the same time."""
    factors = [2 ** (n + 1) for n in range(len(gains))]
    return [scaled("batch", f, base * f / gain, f * blocks) for f, gain in zip(factors, gains, strict=True)]


@pytest.mark.parametrize(
    ("blocks", "runs", "more", "status"),
    [
        (8, copies(2.0, 4.0, 8.0, 16.0), {}, CONFIRMED),
        (132, [], {}, RULED_OUT),
        (4096, [], {}, RULED_OUT),
        (8, copies(1.0, 1.02), {}, RULED_OUT),  # copies cost their full time: it waits for something else
        (8, [], {"missing": {"scaled": "operator rows offers no longer problems"}}, CANNOT_TELL),
        (8, [scaled("batch", 2, None, None, "2 times the batch: out of memory")], {}, CANNOT_TELL),
    ],
)
def test_grid_too_small(blocks, runs, more, status):
    found = finding(observe(kernels=[kernel(blocks)], runs=runs, **more), "grid too small")
    assert found.status is status
    if status is CANNOT_TELL:
        assert "offers no longer problems" in found.explanation or "out of memory" in found.explanation


def test_a_kernel_at_full_bandwidth_is_not_told_that_its_grid_is_too_small():
    """64 blocks that stream what the memory can give: half the SMs are idle, and more blocks would not be faster."""
    nbytes = 0.92 * 4.8e12 * 500e-6
    observations = observe(kernels=[kernel(64)], nbytes=nbytes, dram_bytes=nbytes, runs=copies(1.05, 1.08, blocks=64))
    assert finding(observations, "grid too small").status is RULED_OUT
    assert "full bandwidth" in finding(observations, "grid too small").explanation
    bound = finding(observations, "bound by memory bandwidth")
    assert bound.status is CONFIRMED
    assert bound.share == pytest.approx(0.92 / 1.01, rel=1e-3)
    for other in ("serial loop", "wave tail", "threads idle", "no tensor-core instructions"):
        assert finding(observations, other).status is not CONFIRMED


def test_a_kernel_of_several_is_weighted_by_its_time():
    """The merge with 4 blocks takes a twentieth of the time: its idle SMs are not worth a word."""
    kernels = [kernel(1320, seconds=475e-6), kernel(4, name="merge", seconds=25e-6)]
    assert finding(observe(kernels=kernels), "grid too small").status is RULED_OUT
    kernels = [kernel(1320, seconds=100e-6), kernel(4, name="merge", seconds=400e-6)]
    assert finding(observe(kernels=kernels, runs=copies(2.0, 3.8, blocks=4)), "grid too small").status is CONFIRMED


def tail(gain2, gain4, blocks=264 + 10, each=2):
    """Return a kernel whose last round is nearly empty: an SM holds two blocks, 264 run at a time."""
    shared = {1: 200, 2: 100}[each] * 1024
    return observe(
        kernels=[kernel(blocks, shared_memory_bytes=shared)], runs=copies(gain2, gain4, blocks=blocks, base=500e-6)
    )


@pytest.mark.parametrize(
    ("observations", "status"),
    [
        (tail(1.30, 1.53), CONFIRMED),  # 4 times the blocks are 4.15 rounds in place of 4 times 1.04: 1.66 predicted
        (tail(1.0, 1.02), RULED_OUT),
        (tail(1.0, 1.2), CANNOT_TELL),
        (observe(kernels=[kernel(264, shared_memory_bytes=100 * 1024)]), RULED_OUT),  # whole rounds
        (observe(kernels=[kernel(264 + 10, shared_memory_bytes=100 * 1024)]), CANNOT_TELL),  # nothing else was timed
        (observe(kernels=[kernel(8)]), RULED_OUT),  # that is another hypothesis
    ],
)
def test_wave_tail(observations, status):
    assert finding(observations, "wave tail").status is status


def test_no_remedy_gives_more_than_the_rates_of_the_gpu_allow():
    """Eight blocks at half of the memory's bandwidth: spread over all SMs they would be twice as fast, not 16 times."""
    observations = observe(kernels=[kernel(8)], dram_bytes=0.5 * 4.8e12 * 500e-6, runs=copies(1.5, 1.9))
    found = finding(observations, "grid too small")
    assert found.status is CONFIRMED
    assert found.most == pytest.approx(505 / (5 + 250))


LONGER = [scaled("keys", 2, 990e-6, 8), scaled("keys", 4, 1970e-6, 8)]
FLAT = [scaled("keys", 2, 510e-6, 8), scaled("keys", 4, 530e-6, 8)]


@pytest.mark.parametrize(
    ("blocks", "runs", "status"),
    [
        (8, [*LONGER, *copies(2.0, 4.0)], CONFIRMED),
        (8, [*FLAT, *copies(2.0, 4.0)], RULED_OUT),  # no loop over keys: something else takes long
        (132 * 16, full_gpu(), RULED_OUT),  # in proportion to the keys, but so it is to the batch
        (8, LONGER, CANNOT_TELL),  # whether the GPU is full was not tried
        (8, copies(2.0, 4.0), CANNOT_TELL),
        (8, [*LONGER, *copies(1.2, 1.5)], CANNOT_TELL),
        (8, [scaled("keys", 2, 510e-6, 512), *copies(2.0, 4.0)], CANNOT_TELL),  # another grid: the loop was split
    ],
)
def test_serial_loop(blocks, runs, status):
    assert finding(observe(kernels=[kernel(blocks)], runs=runs), "serial loop").status is status


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (kernel(264, block=(40, 1, 1)), CONFIRMED),  # 24 of 64 lanes have no thread
        (kernel(132, block=(64, 1, 1)), CONFIRMED),  # two of four schedulers have no warp
        (kernel(132 * 16), RULED_OUT),
        (kernel(132), CANNOT_TELL),
        (counted(132, issue=75.0, lanes=31.5), RULED_OUT),
        (counted(132, issue=12.0, lanes=31.5), CONFIRMED),
        (counted(132, issue=45.0, lanes=31.5), CANNOT_TELL),
        (counted(132 * 16, issue=75.0, lanes=8.0), CONFIRMED),  # most threads of a warp do nothing
        (kernel(8, grid=None), CANNOT_TELL),
    ],
)
def test_threads_idle(one, status):
    assert finding(observe(kernels=[one]), "threads idle").status is status


@pytest.mark.parametrize(
    ("kernels", "more", "status"),
    [
        ([kernel(2112, code=PLAIN)], {}, CONFIRMED),
        ([kernel(2112, code=TENSOR)], {}, RULED_OUT),
        ([kernel(2112, code=PLAIN), kernel(8, name="two", code=TENSOR)], {}, RULED_OUT),
        ([kernel(2112, code=None, code_missing="made at run time")], {}, CANNOT_TELL),
        ([kernel(2112, code=PLAIN), kernel(8, name="two", code=None, code_missing="?")], {}, CANNOT_TELL),
        ([kernel(2112, code=PLAIN)], {"dram_bytes": 0.9 * 4.8e12 * 500e-6}, RULED_OUT),  # it waits for the memory
        ([kernel(2112, code=PLAIN)], {"device": None}, CONFIRMED),  # a fact of the code, without times
        ([kernel(2112, code=PLAIN)], {"flops": 0.0}, CONFIRMED),  # a copy: there is nothing to win
    ],
)
def test_no_tensor_cores(kernels, more, status):
    assert finding(observe(kernels=kernels, **more), "no tensor-core instructions").status is status


SPILLS = PLAIN.model_copy(update={"local": 40, "local_in_loops": 36, "local_bytes": 256})
SPILLS_ONCE = SPILLS.model_copy(update={"local_in_loops": 0})


@pytest.mark.parametrize(
    ("code", "status"), [(SPILLS, CONFIRMED), (SPILLS_ONCE, RULED_OUT), (PLAIN, RULED_OUT), (None, CANNOT_TELL)]
)
def test_spills_and_local_memory(code, status):
    assert finding(observe(kernels=[kernel(2112, code=code)]), "spills and local memory").status is status


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (counted(2112, shared_memory_bytes=110 * 1024, issue=15.0, warps=12.0), CONFIRMED),
        (counted(2112, shared_memory_bytes=110 * 1024, issue=80.0, warps=12.0), RULED_OUT),
        (kernel(2112, shared_memory_bytes=110 * 1024), CANNOT_TELL),
        (kernel(2112, registers=32, shared_memory_bytes=0), RULED_OUT),  # threads are the limit: a full SM
        (kernel(264, shared_memory_bytes=110 * 1024), RULED_OUT),  # all blocks fit at once
        (kernel(2112, shared_memory_bytes=228 * 1024), CONFIRMED),  # not even one fits
        (kernel(2112, shared_memory_bytes=None), CANNOT_TELL),
    ],
)
def test_occupancy_capped(one, status):
    assert finding(observe(kernels=[one]), "occupancy capped").status is status


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (counted(**{CONFLICTS: 4e6, WAVEFRONTS: 8e6}), CONFIRMED),
        (counted(**{CONFLICTS: 1e5, WAVEFRONTS: 8e6}), RULED_OUT),
        (kernel(2112), CANNOT_TELL),
        (kernel(2112, shared_memory_bytes=0), RULED_OUT),
    ],
)
def test_bank_conflicts(one, status):
    assert finding(observe(kernels=[one]), "bank conflicts").status is status


def moved(read, written, device=500e-6, nbytes=1e8):
    one = counted(**{"dram__bytes_read.sum": read, "dram__bytes_write.sum": written})
    return observe(kernels=[one], device=device, nbytes=nbytes)


@pytest.mark.parametrize(
    ("observations", "status"),
    [
        (moved(1.2e9, 5e7), CONFIRMED),
        (moved(9e7, 1e7), RULED_OUT),
        (moved(3e6, 1e6, nbytes=1e6), RULED_OUT),  # four times the fewest, and no time to speak of
        (observe(nbytes=1e8), CANNOT_TELL),
        (observe(nbytes=1.7e9), RULED_OUT),  # in 500 us an H200 moves 2.4 GB: no more than 1.4 times as many
        (observe(device=None), CANNOT_TELL),
    ],
)
def test_more_bytes_than_needed(observations, status):
    assert finding(observations, "more bytes moved than needed").status is status


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"dram_bytes": 0.7 * 4.8e12 * 500e-6}, CONFIRMED),
        ({"kernels": [counted(dram=85.0)]}, CONFIRMED),
        ({"kernels": [counted(dram=20.0)]}, RULED_OUT),
        ({"dram_bytes": 1e8, "runs": copies(2.0, 4.0)}, RULED_OUT),  # four times the bytes in the same time
        ({"dram_bytes": 1e8}, CANNOT_TELL),
        ({"dram_bytes": 1e8, "runs": full_gpu()}, CANNOT_TELL),
    ],
)
def test_bound_by_bandwidth(changes, status):
    assert finding(observe(**changes), "bound by memory bandwidth").status is status


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"flops": 0.75 * 1.07e15 * 500e-6}, CONFIRMED),
        ({"flops": 0.3 * 1.07e15 * 500e-6, "kernels": [counted(tensor=88.0)]}, CONFIRMED),  # padding, or masked tiles
        ({"kernels": [counted(tensor=10.0)]}, RULED_OUT),
        ({"runs": copies(2.0, 4.0)}, RULED_OUT),
        ({"runs": full_gpu()}, CANNOT_TELL),
        ({"device": None}, CANNOT_TELL),
    ],
)
def test_bound_by_arithmetic(changes, status):
    assert finding(observe(**changes), "bound by arithmetic").status is status


def sensors(clock, throttle=""):
    return Sensors(sm_clock_mhz=[clock] * 5, throttle=[throttle] * 5, max_sm_clock_mhz=1980)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"sensors": sensors(1200, "sw_power_cap,hw_thermal")}, CONFIRMED),
        ({"sensors": sensors(1980)}, RULED_OUT),
        ({"sensors": sensors(1965, "sw_power_cap")}, RULED_OUT),  # a reason, but next to no clock is lost
        ({"sensors": sensors(1200)}, CANNOT_TELL),
        ({"sensors": Sensors(), "missing": {"sensors": "nvidia-ml-py is not installed"}}, CANNOT_TELL),
        ({"sensors": sensors(1200, "sw_power_cap"), "dram_bytes": 0.8 * 4.8e12 * 500e-6}, RULED_OUT),
    ],
)
def test_throttled_clocks(changes, status):
    found = finding(observe(**changes), "throttled clocks")
    assert found.status is status
    if status is CONFIRMED:
        assert "hw_thermal, sw_power_cap" in found.explanation
        assert found.most == pytest.approx(505 / (5 + 500 * 1200 / 1980))


def test_the_story_is_a_serial_loop_and_a_small_grid():
    observations = serial_story()
    grid, loop = finding(observations, "grid too small"), finding(observations, "serial loop")
    assert (grid.status, loop.status) == (CONFIRMED, CONFIRMED)
    assert grid.share == pytest.approx(0.93, abs=0.01)
    assert 14 < (grid.most or 0) < 16.5
    others = ("launch-bound", "wave tail", "threads idle", "bound by memory bandwidth", "bound by arithmetic")
    assert [finding(observations, other).status for other in others] == [RULED_OUT] * 5
