"""Worker tasks of one rank: those of ``measure`` for a call over ranks, in lockstep, with results that are merged.

All ranks run the same code with the same seeds. What one of them finds, all hear of (``worker.agree``), so that all
make the same calls. What takes a time takes it from a moment that all share (``worker.line_up``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..measure import gpu_tasks, tasks
from ..measure.measure import CudaTimer, Timer
from ..spent import spending
from ..subject.loading import operator_of
from ..subject.subject import Subject
from ..worker import Emit, meet, rank_here, ranks_here
from .merge import merge_captures, merge_checks, merge_measured


def check_correct(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Check the answers of every rank: ``measure.tasks.check_correct``."""
    _join(payload, payload["device"])
    return tasks.check_correct(payload, _in_step(payload, emit, merge_checks))


def capture_launches(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Record the launches of every rank: ``measure.gpu_tasks.capture_launches``."""
    opened = gpu_tasks.open_gpu(payload, _join(payload, "cuda"))
    return gpu_tasks.capture_launches(payload, _in_step(payload, emit, merge_captures), opened)


def measure(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Take the times of every rank: ``measure.gpu_tasks.measure``."""
    opened = gpu_tasks.open_gpu(payload, _join(payload, _device()))
    return gpu_tasks.measure(payload, _in_step(payload, emit, merge_measured), opened)


def measure_alone(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Take the times of every rank without the subject: ``measure.gpu_tasks.measure_alone``."""
    opened = gpu_tasks.open_gpu(payload, _join(payload, _device()), alone=True)
    return gpu_tasks.measure_alone(payload, _in_step(payload, emit, merge_measured), opened)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@spending("joining")
def _join(payload: dict[str, Any], device: str) -> Callable[[], Timer]:
    """Join the process group, before the subject is imported, and return what makes the timer."""
    patience = timedelta(seconds=payload["patience_s"])
    if device == "cpu":
        dist.init_process_group("gloo", timeout=patience)
        return Timer
    torch.cuda.set_device(rank_here())
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=patience, device_id=torch.device("cuda", rank_here()))
    group, token, all_reduce = dist.new_group(backend="nccl"), torch.zeros(1, device="cuda"), dist.all_reduce

    def line_up_devices() -> None:
        all_reduce(token, group=group)

    line_up_devices()  # the first makes the communicator
    return lambda: CudaTimer(line_up_devices)


def _in_step(payload: dict[str, Any], emit: Emit, merge: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]) -> Emit:
    """Return what hands on the events of rank 0: a case begins once all agree on it, and its results are merged."""
    operator = operator_of(Subject.from_json(payload["subject"]))
    problems = {case["name"]: case["problem"] for case in payload["cases"]}

    def emit_in_step(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            table = operator.as_table(operator.parse_case(problems[event["name"]]))
            meet(None, f"case {event['name']}, {json.dumps(table, sort_keys=True)} on {ranks_here()} ranks")
        elif event["event"] == "case":
            event = {**event, "case": merge(meet(event["case"], f"the end of case {event['case']['name']}"))}
        if rank_here() == 0:
            emit(event)

    return emit_in_step
