"""Which kernels really ran, with grid, block, registers and shared memory: read from a trace of PyTorch's profiler.

Kineto records what the driver ran, whoever launched it: PyTorch, Triton, a CUDA extension through the runtime, ctypes
through ``cuLaunchKernelEx``, or the replay of a CUDA graph. A kernel belongs to the call in whose time range its launch
lies, found by correlation id, on whatever thread. A process has one CUPTI client, so nothing is timed by other means in
a process that records.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ...errors import ProofError
from ..records.evidence import Launch
from ..subject.operator import LaunchPromise

_PREFIX = "flashmoe_call:"

_KINDS: dict[str, Literal["kernel", "memcpy", "memset"]] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
}

# The driver's own kernels, which do the copies and fills of a CUDA graph: the same call outside of a graph shows as one
# copy (pytorch issue 191284). Whoever launches a kernel of such a name outside of a graph launched a kernel.
_DRIVER_COPY = re.compile(r"(memcpy|memset)\d+(_\w+)?")
_GRAPH_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch")

_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class DeviceEvent:
    """One thing that a GPU did. Grid, block, registers and shared memory are those of a kernel."""

    kind: Literal["kernel", "memcpy", "memset"]
    name: str
    start_ns: int
    end_ns: int
    stream: int
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    registers: int = 0
    shared_memory_bytes: int = 0


@dataclass(frozen=True)
class CallTrace:
    """What the GPU did for one annotated call, in the order in which it began."""

    label: str
    events: tuple[DeviceEvent, ...]

    @property
    def kernels(self) -> tuple[DeviceEvent, ...]:
        """The kernels alone."""
        return tuple(event for event in self.events if event.kind == "kernel")

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the copies and fills that the driver did without a kernel."""
        return tuple(event.name for event in self.events if event.kind != "kernel")

    def launches(self) -> list[Launch]:
        """Return the kernels as records, equal ones counted, in the order of their first run."""
        counts: dict[tuple[Any, ...], int] = {}
        for event in self.kernels:
            key = (event.name, event.grid, event.block, event.registers, event.shared_memory_bytes)
            counts[key] = counts.get(key, 0) + 1
        return [
            Launch(name=name, grid=grid, block=block, registers=registers, shared_memory_bytes=shared, count=count)
            for (name, grid, block, registers, shared), count in counts.items()
        ]

    def seconds_of(self, launch: Launch) -> float:
        """Return the sum of the times of the kernels of ``launch``."""
        same = launch.name, launch.grid, launch.block
        return sum(e.end_ns - e.start_ns for e in self.kernels if (e.name, e.grid, e.block) == same) / 1e9

    def device_seconds(self) -> float:
        """Return how long the GPU was busy with this call: the union of its events over all streams, gaps left out."""
        return union_ns((event.start_ns, event.end_ns) for event in self.events) / 1e9


@dataclass
class Recording:
    """Annotates calls while the profiler runs; ``traces`` are there once it has stopped."""

    labels: list[str] = field(default_factory=list)
    traces: list[CallTrace] | None = None

    def call(self, label: str) -> AbstractContextManager[Any]:
        """Return the context in which one call, and the synchronisation after it, has to take place."""
        from torch.profiler import record_function

        self.labels.append(label)
        return record_function(f"{_PREFIX}{len(self.labels) - 1}")

    def calls(self, label: str) -> list[CallTrace]:
        """Return the finished traces of the calls annotated with ``label``."""
        assert self.traces is not None, "the recording has not ended"
        return [call for call in self.traces if call.label == label]


@contextmanager
def recording() -> Iterator[Recording]:
    """Profile the block, and parse the trace when it ends."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    session = Recording()
    # CPU activity carries the annotations, CUDA activity the launches and what they ran. Without acc_events PyTorch
    # builds no tree of its events, which takes longer than most calls that are measured; PyTorch 2.10 and 2.11 warn
    # that a new cycle drops events, but there is one cycle.
    warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.ones(1, device="cuda").add_(1)  # the first launch under CUPTI is slow and sometimes lost: it is ours
        torch.cuda.synchronize()
        yield session
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="flashmoe-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
    session.traces = parse_trace(json.loads(text, strict=False), session.labels)


def parse_trace(trace: Mapping[str, Any], labels: Sequence[str]) -> list[CallTrace]:
    """Attribute the device events of a Chrome trace to the annotated calls that launched them.

    Events of no annotated call, e.g. of the harness itself, are left out. Raises ``ProofError`` where an annotation is
    missing, or a kernel lacks its launch configuration.
    """
    # Most events of eager PyTorch are its operators, which tell nothing here.
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "cpu_op"]
    ranges = _annotations(events, len(labels))
    launched_ns = _launch_times(events)
    replays = {
        _correlation(event)
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES and str(event.get("name", "")).startswith(_GRAPH_LAUNCH)
    }
    inside: list[list[DeviceEvent]] = [[] for _ in labels]
    starts = [start for start, _ in ranges]
    for event in events:
        kind = _KINDS.get(str(event.get("cat", "")).lower())
        if kind is None:
            continue
        if _correlation(event) in replays and (driver_copy := _DRIVER_COPY.fullmatch(event["name"])):
            kind = "memcpy" if driver_copy[1] == "memcpy" else "memset"
        device_event = _device_event(event, kind)
        # Some Kineto versions do not show every way to launch. Calls are synchronised inside their range, so the time
        # at which such a kernel ran tells its call as well.
        middle_ns = (device_event.start_ns + device_event.end_ns) // 2
        when_ns = launched_ns.get(_correlation(event), middle_ns)
        place = bisect_right(starts, when_ns) - 1
        if place >= 0 and when_ns <= ranges[place][1]:
            inside[place].append(device_event)
    return [
        CallTrace(label, tuple(sorted(found, key=lambda event: event.start_ns)))
        for label, found in zip(labels, inside, strict=True)
    ]


def _annotations(events: Iterable[Mapping[str, Any]], count: int) -> list[tuple[int, int]]:
    """Return start and end of annotation 0, 1, ... on the host's clock."""
    found: dict[int, tuple[int, int]] = {}
    for event in events:
        name = str(event.get("name", ""))
        # The profiler repeats annotations on the GPU's timeline, as gpu_user_annotation.
        if name.startswith(_PREFIX) and not str(event.get("cat", "")).startswith("gpu_"):
            found[int(name.removeprefix(_PREFIX))] = _range_ns(event)
    missing = [index for index in range(count) if index not in found]
    if missing:
        raise ProofError(
            f"the profiler's trace must hold {count} annotated calls, got {len(found)} (first missing: {missing[0]})",
            hint="another profiler may be attached to this process: run without it",
        )
    return [found[index] for index in range(count)]


def _launch_times(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return when each correlation id was launched: the outermost call, where a driver call nests in a runtime call."""
    times: dict[int, int] = {}
    for event in events:
        correlation = _correlation(event)
        if correlation and event.get("cat") in _LAUNCH_CATEGORIES:
            start = _range_ns(event)[0]
            times[correlation] = min(start, times.get(correlation, start))
    return times


def _correlation(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", 0))


def _range_ns(event: Mapping[str, Any]) -> tuple[int, int]:
    # Microseconds with three decimals since a recent base: whole nanoseconds, exact in a double.
    start = round(float(event["ts"]) * 1000)
    return start, start + round(float(event.get("dur", 0)) * 1000)


def _device_event(event: Mapping[str, Any], kind: Literal["kernel", "memcpy", "memset"]) -> DeviceEvent:
    start, end = _range_ns(event)
    args = event.get("args", {})
    if kind != "kernel":
        return DeviceEvent(kind, event["name"], start, end, int(args.get("stream", -1)))
    try:
        return DeviceEvent(
            kind,
            event["name"],
            start,
            end,
            stream=int(args["stream"]),
            grid=_dim3(args["grid"]),
            block=_dim3(args["block"]),
            registers=int(args["registers per thread"]),
            shared_memory_bytes=int(args["shared memory"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProofError(
            f"kernel {event['name']} must have stream, grid, block, registers and shared memory in the trace,"
            f" got {sorted(args)}"
        ) from error


def _dim3(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (int(value) for value in values)
    return x, y, z


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of ``intervals`` of (start, end)."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def match_names(full: str, shown: str) -> bool:
    """Return whether ``shown``, a profiler's name or a pattern of one, may be the kernel of the full name ``full``.

    Tools differ in blanks, in whether they show return types and parameters, and in ``<64>`` or ``<(int)64>``.
    """
    a, b = (_CAST.sub("", re.sub(r"\s+", "", name.removeprefix("void "))) for name in (full, shown))
    return a == b or fnmatchcase(a, b) or fnmatchcase(full, shown) or a.partition("(")[0] == b.partition("(")[0]


_CAST = re.compile(r"\([a-z]+\)(?=[-\d])")  # of a template's argument


def matching(patterns: Sequence[str], launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches whose kernel's name fits one of the ``fnmatch`` patterns."""
    return [launch for launch in launches if any(fnmatchcase(launch.name, pattern) for pattern in patterns)]


def launches_match(promises: Sequence[LaunchPromise], launches: Sequence[Launch]) -> list[str]:
    """Return the faults of ``launches``, one line each: broken promises, and kernels without a promise.

    A promise is kept by a launch whose name fits its pattern, and whose grid, block and shared memory are as promised.
    Where nothing is promised nothing is wrong.
    """
    if not promises:
        return []
    problems: dict[str, None] = {}  # a set that keeps the order
    ran = ", ".join(launch.name for launch in launches) or "no kernel"
    for promise in promises:
        named = matching([promise.pattern], launches)
        if not named:
            problems[f"promised kernel {promise.pattern} did not run; what ran: {ran}"] = None
        elif not any(_differences(promise, launch) == "" for launch in named):
            problems[f"kernel {named[0].name} ran with {_differences(promise, named[0])}"] = None
    for launch in launches:
        candidates = [promise for promise in promises if fnmatchcase(launch.name, promise.pattern)]
        if not candidates:
            problems[f"kernel {launch.name} ran and was not promised"] = None
        elif not any(_differences(promise, launch) == "" for promise in candidates):
            problems[f"kernel {launch.name} ran with {_differences(candidates[0], launch)}"] = None
    return list(problems)


def _differences(promise: LaunchPromise, launch: Launch) -> str:
    """Return how ``launch`` differs from ``promise``, or an empty string."""
    found = []
    sizes = (("grid", launch.grid, promise.grid), ("block", launch.block, promise.block))
    for name, got, expected in sizes:
        if expected is not None and got != tuple(expected):  # a promise that came through JSON has lists
            found.append(f"{name} {got}, promised {tuple(expected)}")
    if promise.shared_memory_bytes not in (None, launch.shared_memory_bytes):
        found.append(f"shared memory {launch.shared_memory_bytes}, promised {promise.shared_memory_bytes}")
    return "; ".join(found)


def baseline_problems(patterns: Sequence[str], launches: Sequence[Launch]) -> list[str]:
    """Return why a baseline is not what it says: none of its kernels ran. Nothing pinned, nothing wrong."""
    if not patterns or matching(patterns, launches):
        return []
    ran = ", ".join(launch.name for launch in launches) or "no kernel"
    return [f"none of its kernels ({', '.join(patterns)}) ran; what ran: {ran}"]


def capture_problems(calls: Sequence[CallTrace]) -> list[str]:
    """Return why several captures of one call are no one answer: kernels that some of them lack."""
    if len({_signature(call.launches()) for call in calls}) <= 1:
        pairs = (_other_binaries(one.launches(), other.launches()) for one, other in pairwise(calls))
        return [
            f"the same call launched another binary of kernel {name}: {second}, after {first}"
            for name, first, second in dict.fromkeys(itertools.chain.from_iterable(pairs))
        ]
    counts = ", ".join(str(len(call.kernels)) for call in calls)
    return [f"the same call launched different kernels from time to time (kernels in each: {counts})"]


def graph_problems(eager: Sequence[Launch], graph: Sequence[Launch]) -> list[str]:
    """Return which kernels of an eager call are absent from a replay of its CUDA graph, or the other way round."""
    absent = sorted({name for name, *_ in _signature(eager) - _signature(graph)})
    surplus = sorted({name for name, *_ in _signature(graph) - _signature(eager)})
    return [
        *(f"kernel {name} is absent from the CUDA graph of its call" for name in absent),
        *(f"kernel {name} runs in the CUDA graph of the call only" for name in surplus),
        *(
            f"kernel {name} is another binary in the CUDA graph of its call: {in_graph}, and {called} in the call"
            for name, called, in_graph in _other_binaries(eager, graph)
        ),
    ]


def timed_otherwise(launched: Sequence[Launch], timed: Sequence[Launch]) -> list[str]:
    """Return how the kernels of timed calls differ from those that gate launch saw; grids may follow the values."""
    unseen = sorted({launch.name for launch in timed} - {launch.name for launch in launched})
    return [
        *(f"kernel {name} was timed, and gate launch saw none" for name in unseen),
        *(
            f"kernel {name} was timed as another binary: {in_bench}, and {before} in gate launch"
            for name, before, in_bench in _other_binaries(launched, timed)
        ),
    ]


def _other_binaries(one: Sequence[Launch], other: Sequence[Launch]) -> list[tuple[str, str, str]]:
    """Return the kernels that need other registers or shared memory in ``other``: its name, and both."""
    first, second = _resources(one), _resources(other)
    return [(name, first[name], second[name]) for name in sorted(first.keys() & second) if first[name] != second[name]]


def _resources(launches: Sequence[Launch]) -> dict[str, str]:
    """Return what each kernel needs, in words; of several binaries of one name all."""
    found: dict[str, set[str]] = {}
    for launch in launches:
        words = f"{launch.registers} registers and {launch.shared_memory_bytes} bytes of shared memory"
        found.setdefault(launch.name, set()).add(words)
    return {name: " or ".join(sorted(words)) for name, words in found.items()}


def _signature(launches: Sequence[Launch]) -> frozenset[tuple[Any, ...]]:
    return frozenset((launch.name, launch.grid, launch.block, launch.count) for launch in launches)
