"""Run one task by several ranks at the same time, each in a process of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..processes import TaskResult
from ..worker import Reply, TaskCall, run_tasks


def run_ranks(
    task: str,
    payload: dict[str, Any],
    ranks: int,
    *,
    timeout_s: float,
    replies: Sequence[Reply | None],
    limit_s: float | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> TaskResult:
    """Run ``task`` of ``tasks`` by all ranks, with the environment that ``torchrun`` makes, and wait for them.

    Rank 0 emits the events, and its result is that of the task. A rank that fails ends the others, and the reason names
    it: it died, raised, or was silent for ``timeout_s``. A collective that waits for half of that raises.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks), **(env or {})}
    calls = [
        TaskCall(
            f"{__package__}.tasks:{task}",
            {**payload, "patience_s": timeout_s / 2},
            timeout_s,
            limit_s,
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            replies[rank],
            rank,
            ranks,
        )
        for rank in range(ranks)
    ]
    results = run_tasks(calls, on_event=None if on_event is None else lambda _, event: on_event(event))
    if all(result.ok for result in results):
        return results[0]
    return _failed(results)


def _failed(results: Sequence[TaskResult]) -> TaskResult:
    """Return one result: how the first rank failed, and what the others did then."""
    by_cause = sorted(enumerate(results), key=lambda item: (item[1].ok, item[1].given_up))
    reasons = [f"rank {rank}: {result.reason}" for rank, result in by_cause if not result.ok]
    tails = [f"output of rank {rank}:\n{result.output_tail}" for rank, result in by_cause if result.output_tail]
    cause = by_cause[0][1]
    flags: dict[str, Any] = {"timed_out": cause.timed_out, "limit_reached": cause.limit_reached}
    return TaskResult(False, None, "; ".join(reasons), cause.seconds, "\n".join(tails), **flags)  # noqa: FBT003 - it is no flag


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
