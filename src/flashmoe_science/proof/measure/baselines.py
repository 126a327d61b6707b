"""Which baselines of an operator can be called on this machine. Each is tried in a worker: an import may crash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..subject.loading import load_operator
from ..subject.operator import Operator
from ..worker import Emit, run_task

_TASK = f"{__name__}:probe"
_NO_GPU = "it is installed; it needs an NVIDIA GPU that torch can use"
_TIMEOUT_S = 120.0  # for one baseline: some compile while they are imported


@dataclass(frozen=True)
class BaselineStatus:
    """Whether one baseline runs here, and if not, why."""

    name: str
    available: bool
    reason: str  # why not; "" when available
    version: str  # "" when it is not installed

    @property
    def installed(self) -> bool:
        """Whether it can be imported: with a GPU it would run here."""
        return self.available or self.reason == _NO_GPU


def available_baselines(operator: Operator) -> list[BaselineStatus]:
    """Try every baseline of ``operator``, and say of each whether it runs here. A crash counts against one alone."""
    waiting = list(operator.baselines())
    found: dict[str, BaselineStatus] = {}

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "baseline":
            found[event["name"]] = BaselineStatus(event["name"], event["available"], event["reason"], event["version"])

    while waiting:
        result = run_task(_TASK, {"operator": operator.name, "names": waiting}, timeout_s=_TIMEOUT_S, on_event=on_event)
        waiting = [name for name in waiting if name not in found]
        if waiting:  # the process ended at the first that is left: blame that one, and try the rest anew
            culprit = waiting.pop(0)
            found[culprit] = BaselineStatus(culprit, available=False, reason=result.reason, version="")
    return [found[name] for name in operator.baselines()]


def probe(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Import some baselines of an operator, in a worker.

    Args:
        payload: ``operator``, ``names``.
        emit: gets ``{"event": "baseline", "name", "available", "reason", "version"}`` for each.

    Returns:
        Nothing: an empty dict.
    """
    import torch

    from .arms import load_baseline

    known = load_operator(payload["operator"]).baselines()
    for name in payload["names"]:
        loaded = load_baseline(known[name])
        installed = loaded.status == "loaded"
        # PyTorch lets its CUDA kernels be named where it has none: what is imported is not what runs.
        available = installed and torch.cuda.is_available()
        emit(
            {
                "event": "baseline",
                "name": name,
                "available": available,
                "reason": _NO_GPU if installed and not available else loaded.reason,
                "version": loaded.version if installed else "",
            }
        )
    return {}
