"""Traces: attribution of kernels to calls, and promises against what ran."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure import launches
from flashmoe_science.proof.records.evidence import Launch

BASE_US = 4361547064297.138  # what Kineto's timestamps look like: microseconds with three decimals


def annotation(index, start, duration, category="user_annotation"):
    name = f"flashmoe_call:{index}"
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": BASE_US + start, "dur": duration}


def launch(correlation, start, name="cudaLaunchKernel", category="cuda_runtime", tid=1):
    args = {"cbid": 211, "correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "tid": tid, "ts": BASE_US + start, "dur": 3.0, "args": args}


def kernel(correlation, start, duration, name="attend", stream=7, **changes):
    args = {
        "External id": 3,
        "queued": 0,
        "device": 0,
        "context": 1,
        "stream": stream,
        "correlation": correlation,
        "registers per thread": 128,
        "shared memory": 49152,
        "blocks per SM": 0.5,
        "grid": [66, 1, 1],
        "block": [384, 1, 1],
        "est. achieved occupancy %": 18,
        **changes,
    }
    start_us = BASE_US + start
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start_us,
        "dur": duration,
        "args": args,
    }


def memory(kind, correlation, start, duration):
    args = {"device": 0, "stream": 7, "correlation": correlation, "bytes": 4096}
    return {
        "ph": "X",
        "cat": f"gpu_{kind}",
        "name": f"{kind} (Device)",
        "ts": BASE_US + start,
        "dur": duration,
        "args": args,
    }


def parse(events, labels=("a",)):
    noise = [
        {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": BASE_US},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": BASE_US, "dur": 1, "args": {"External id": 3}},
    ]
    document = json.loads(json.dumps({"schemaVersion": 1, "traceEvents": noise + events}))
    return launches.parse_trace(document, labels)


def promise(pattern="attend*", grid=None, block=None, shared=None):
    return SimpleNamespace(pattern=pattern, grid=grid, block=block, shared_memory_bytes=shared)


def ran(name="attend", grid=(66, 1, 1), block=(384, 1, 1), shared=49152, count=1):
    return Launch(name=name, grid=grid, block=block, registers=128, shared_memory_bytes=shared, count=count)


def test_a_kernel_belongs_to_the_call_that_launched_it_not_to_the_time_at_which_it_ran():
    trace = parse(
        [
            annotation(0, 0, 10),
            launch(1, 5),
            annotation(1, 20, 10),
            launch(2, 25),
            kernel(1, 22, 4, name="late"),  # of call 0, runs while call 1 is made
            kernel(2, 40, 4, name="own"),
        ],
        labels=("a", "b"),
    )
    assert [[event.name for event in call.events] for call in trace] == [["late"], ["own"]]
    assert [call.label for call in trace] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("cudaLaunchKernel", "cuda_runtime"),
        ("cudaLaunchKernelExC", "cuda_runtime"),
        ("cuLaunchKernel", "cuda_driver"),
        ("cuLaunchKernelEx", "cuda_driver"),
        ("cudaGraphLaunch", "cuda_runtime"),
    ],
)
def test_every_way_to_launch_is_understood(name, category):
    trace = parse([annotation(0, 0, 10), launch(1, 5, name, category), kernel(1, 100, 4)])
    assert [event.name for event in trace[0].kernels] == ["attend"]


def test_a_graph_replay_has_one_launch_and_many_kernels():
    events = [annotation(0, 0, 50), launch(9, 5, "cudaGraphLaunch")]
    trace = parse([*events, *(kernel(9, 10 + 5 * i, 4, name=f"k{i}") for i in range(3))])
    assert [launch.name for launch in trace[0].launches()] == ["k0", "k1", "k2"]


def test_a_launch_from_another_thread_counts():
    trace = parse([annotation(0, 0, 10), launch(1, 5, tid=99), kernel(1, 6, 2)])
    assert len(trace[0].kernels) == 1


def test_a_driver_call_nested_in_a_runtime_call_is_one_launch_at_the_outer_time():
    events = [annotation(0, 0, 5.5), launch(1, 5), launch(1, 6, "cuLaunchKernel", "cuda_driver"), kernel(1, 8, 2)]
    assert len(parse(events)[0].kernels) == 1


def test_a_kernel_without_a_launch_event_is_placed_by_when_it_ran():
    trace = parse([annotation(0, 0, 10), annotation(1, 20, 10), kernel(5, 23, 2), kernel(6, 14, 2)], labels=("a", "b"))
    assert [len(call.kernels) for call in trace] == [0, 1]


def test_copies_and_fills_are_recorded_apart_and_count_as_device_time():
    events = [annotation(0, 0, 10), launch(1, 1), launch(2, 2, "cudaMemsetAsync"), launch(3, 3, "cudaMemcpyAsync")]
    trace = parse([*events, memory("memset", 2, 20, 1), memory("memcpy", 3, 21, 2), kernel(1, 23, 4)])
    call = trace[0]
    assert [launch.name for launch in call.launches()] == ["attend"]
    assert call.copies == ("memset (Device)", "memcpy (Device)")
    assert call.device_seconds() == pytest.approx(7e-6)


def test_launch_configuration_is_read_and_equal_launches_are_counted():
    events = [annotation(0, 0, 30), *(launch(i, i) for i in range(1, 4))]
    events += [kernel(1, 40, 4), kernel(2, 50, 4, name="merge", block=[128, 1, 1]), kernel(3, 60, 4)]
    assert parse(events)[0].launches() == [ran(count=2), ran("merge", block=(128, 1, 1))]


def test_a_missing_annotation_is_an_error():
    with pytest.raises(ProofError, match=r"must hold 2 annotated calls, got 1 \(first missing: 1\)"):
        parse([annotation(0, 0, 10)], labels=("a", "b"))


def test_a_kernel_without_its_configuration_is_an_error():
    with pytest.raises(ProofError, match="kernel attend must have stream, grid"):
        parse([annotation(0, 0, 10), launch(1, 5), kernel(1, 6, 2, grid=None)])


def test_nanoseconds_survive_timestamps_of_half_a_century():
    events = [annotation(0, 0, 10), launch(1, 1), launch(2, 2), kernel(1, 3, 2.016), kernel(2, 5.016, 1.001, stream=9)]
    assert parse(events)[0].device_seconds() == pytest.approx(3.017e-6, rel=1e-9)


def test_device_time_is_the_union_over_streams():
    assert launches.union_ns([]) == 0
    assert launches.union_ns([(0, 10), (5, 15)]) == 15  # overlap counts once
    assert launches.union_ns([(20, 30), (0, 10)]) == 20  # the gap does not count
    assert launches.union_ns([(0, 100), (10, 20)]) == 100
    assert launches.union_ns([(0, 10), (10, 20)]) == 20


def test_promises_kept_are_no_problem():
    promises = [promise(grid=(66, 1, 1), block=(384, 1, 1), shared=49152), promise("merge*")]
    assert launches.launches_match(promises, [ran(), ran("merge_partials")]) == []
    assert launches.launches_match([], [ran()]) == []
    assert launches.launches_match([promise(grid=[66, 1, 1], block=[384, 1, 1])], [ran()]) == []  # as JSON has it


@pytest.mark.parametrize(
    ("promised", "problem"),
    [
        (promise(block=(128, 1, 1)), "kernel attend ran with block (384, 1, 1), promised (128, 1, 1)"),
        (promise(grid=(1, 1, 1)), "kernel attend ran with grid (66, 1, 1), promised (1, 1, 1)"),
        (promise(shared=0), "kernel attend ran with shared memory 49152, promised 0"),
        (
            promise(grid=(2, 1, 1), block=(32, 1, 1)),
            "kernel attend ran with grid (66, 1, 1), promised (2, 1, 1); block (384, 1, 1), promised (32, 1, 1)",
        ),
    ],
)
def test_a_broken_promise_says_what_came_and_what_was_promised(promised, problem):
    assert launches.launches_match([promised], [ran()]) == [problem]


def test_a_promised_kernel_that_did_not_run_and_one_that_was_not_promised():
    assert launches.launches_match([promise("attend")], [ran("flash_fwd")]) == [
        "promised kernel attend did not run; what ran: flash_fwd",
        "kernel flash_fwd ran and was not promised",
    ]
    assert launches.launches_match([promise("attend")], []) == [
        "promised kernel attend did not run; what ran: no kernel"
    ]


def test_one_pattern_may_promise_several_shapes_but_no_other():
    promises = [promise(grid=(66, 1, 1)), promise(grid=(8, 1, 1))]
    assert launches.launches_match(promises, [ran(), ran(grid=(8, 1, 1))]) == []
    assert launches.launches_match(promises, [ran(), ran(grid=(8, 1, 1)), ran(grid=(4, 1, 1))]) == [
        "kernel attend ran with grid (4, 1, 1), promised (66, 1, 1)"
    ]


def test_a_baseline_must_run_a_kernel_of_its_own():
    assert launches.baseline_problems(["*cudnn*", "*flash*"], [ran("void pytorch_flash::flash_fwd_kernel")]) == []
    assert launches.baseline_problems([], [ran("anything")]) == []
    (problem,) = launches.baseline_problems(["*cudnn*"], [ran("void pytorch_flash::flash_fwd_kernel")])
    assert "none of its kernels (*cudnn*) ran; what ran: void pytorch_flash::flash_fwd_kernel" in problem


def test_captures_of_one_call_agree_or_it_is_a_problem():
    one = launches.CallTrace("a", (launches.DeviceEvent("kernel", "attend", 0, 5, 7),))
    none = launches.CallTrace("a", ())
    assert launches.capture_problems([one, one]) == []
    (problem,) = launches.capture_problems([one, none])
    assert "kernels in each: 1, 0" in problem


def test_another_binary_of_the_same_kernel_in_the_graph_is_a_problem():
    """Specialisations of a Triton kernel have one name."""
    called = ran().model_copy(update={"registers": 128, "shared_memory_bytes": 4096})
    for change in ({"registers": 64}, {"shared_memory_bytes": 0}):
        captured = called.model_copy(update=change)
        (problem,) = launches.graph_problems([called], [captured])
        assert problem.startswith("kernel attend is another binary in the CUDA graph of its call: ")
        assert problem.endswith(", and 128 registers and 4096 bytes of shared memory in the call")
        assert f"{captured.registers} registers and {captured.shared_memory_bytes} bytes" in problem
    assert launches.graph_problems([called, ran()], [ran(), called]) == []


def test_two_calls_with_other_binaries_of_one_kernel_are_a_problem():
    one, other = (
        launches.CallTrace("a", (launches.DeviceEvent("kernel", "attend", 0, 5, 7, registers=registers),))
        for registers in (32, 64)
    )
    assert launches.capture_problems([one, one]) == []
    (problem,) = launches.capture_problems([one, other])
    assert problem.startswith("the same call launched another binary of kernel attend: 64 registers and 0 bytes")
    assert problem.endswith(", after 32 registers and 0 bytes of shared memory")


def test_a_kernel_absent_from_the_graph_is_a_problem():
    assert launches.graph_problems([ran(), ran("merge")], [ran("merge"), ran()]) == []
    assert launches.graph_problems([ran()], []) == ["kernel attend is absent from the CUDA graph of its call"]
    assert launches.graph_problems([ran()], [ran(), ran("fill")]) == [
        "kernel fill runs in the CUDA graph of the call only"
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("memcpy32_post", "memcpy"),
        ("memcpy128", "memcpy"),
        ("memset32_aligned1D", "memset"),
        ("memcpy_of_mine", "kernel"),
        ("my_memcpy32", "kernel"),
    ],
)
def test_what_the_driver_copies_with_in_a_graph_is_no_kernel_of_the_call(name, kind):
    trace = parse([annotation(0, 0, 10), launch(1, 2, "cudaGraphLaunch"), kernel(1, 20, 5, name=name)])
    (event,) = trace[0].events
    assert (event.name, event.kind) == (name, kind)
    assert len(trace[0].kernels) == (kind == "kernel")


@pytest.mark.parametrize("name", ["memcpy32_post", "memset1_x"])
@pytest.mark.parametrize("launched", [[], [launch(1, 2)], [launch(1, 2, "cuLaunchKernelEx", "cuda_driver")]])
def test_outside_of_a_graph_a_kernel_is_a_kernel_whatever_its_name(name, launched):
    trace = parse([annotation(0, 0, 30), *launched, kernel(1, 20, 5, name=name)])
    assert [event.kind for event in trace[0].events] == ["kernel"]
