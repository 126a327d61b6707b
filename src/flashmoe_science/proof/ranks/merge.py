"""One result of the results of all ranks: the slowest time, the worst accuracy, the launches of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.evidence import Accuracy

Results = Sequence[dict[str, Any]]  # by rank

_WORST_CHECK = ("failed", "not possible here", "passed")


def merge_checks(results: Results) -> dict[str, Any]:
    """Return the result of ``check_correct`` of one case: it passed where it did on all ranks."""
    status = min((result["status"] for result in results), key=_WORST_CHECK.index)
    merged = dict(next(result for result in results if result["status"] == status))
    merged["accuracy"] = _worst_accuracy([result for result in results if result["status"] == status])
    merged["reason"] = _reasons(results)
    return merged


def merge_captures(results: Results) -> dict[str, Any]:
    """Return the captures of one case: those of rank 0, the launches of the others, and the problems of all."""
    arms = []
    for each in zip(*(result["arms"] for result in results), strict=True):
        problems = [f"rank {rank}: {problem}" for rank, arm in enumerate(each) for problem in arm["problems"]]
        arms.append({**each[0], "problems": problems, "rank_launches": [arm["launches"] for arm in each[1:]]})
    return {**results[0], "arms": arms}


def merge_measured(results: Results) -> dict[str, Any]:
    """Return the rounds of one case. A time is that of the slowest rank; what each rank saw is kept beside it."""
    arms = []
    for each in zip(*(result["arms"] for result in results), strict=True):
        peaks = [arm["peak_bytes"] for arm in each if arm["peak_bytes"] is not None]
        arms.append({**each[0], "accuracy": _worst_accuracy(each), "peak_bytes": max(peaks, default=None)})
    return {**results[0], "arms": arms, "rounds": _merge_rounds([result["rounds"] for result in results])}


def _merge_rounds(rounds: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    by_rank = [each for each in rounds if each is not None]
    if not by_rank:  # an arm that has no time on one rank has none on any
        return None
    seen = ("sm_clock_mhz", "power_w", "temperature_c", "throttle", "seconds")
    return {**by_rank[0], **merge_seen(by_rank), "ranks": [{name: each[name] for name in seen} for each in by_rank]}


def merge_seen(by_rank: Results) -> dict[str, Any]:
    """Return the columns of the slowest times and the worst sensors of those of all ranks, see ``RankRounds``."""

    def worst(name: str, choose: Any) -> list[Any]:
        columns = zip(*(each[name] for each in by_rank), strict=True)
        return [choose([value for value in row if value is not None], default=None) for row in columns]

    throttle = [
        None if None in row else ",".join(sorted({reason for text in row for reason in text.split(",") if reason}))
        for row in zip(*(each["throttle"] for each in by_rank), strict=True)
    ]
    seconds = {
        kind: {
            arm: [max(row) for row in zip(*(each["seconds"][kind][arm] for each in by_rank), strict=True)]
            for arm in columns
        }
        for kind, columns in by_rank[0]["seconds"].items()
    }
    return {
        "sm_clock_mhz": worst("sm_clock_mhz", min),
        "power_w": worst("power_w", max),
        "temperature_c": worst("temperature_c", max),
        "throttle": throttle,
        "seconds": seconds,
    }


def _worst_accuracy(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    known = [result["accuracy"] for result in results if result["accuracy"] is not None]
    if not known:
        return None
    worst: dict[str, Any] = max(known, key=lambda accuracy: Accuracy.model_validate(accuracy).share)
    deterministic = None if worst["deterministic"] is None else all(each["deterministic"] for each in known)
    return {**worst, "deterministic": deterministic}


def _reasons(results: Results) -> str:
    """Return why ranks did not pass: one text where they say the same."""
    reasons = [result["reason"] for result in results]
    if len(set(reasons)) == 1:
        return str(reasons[0])
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
