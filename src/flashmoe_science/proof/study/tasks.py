"""What a study runs on a GPU: trials, one after another, in one process. The rounds are ``rounds.measure_case``'s."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..arms import Loaded
from ..evidence import Settings
from ..gpu_tasks import open_gpu
from ..measure import Timer
from ..operator import Operator
from ..rounds import Case, Plan, measure_case
from ..worker import Emit
from .trials import A, B

Spin = Callable[[int], object]  # keeps the current stream busy for so many clock cycles of the GPU
_Entry = Callable[..., torch.Tensor]


def measure_trials(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Measure the trials of one process.

    Args:
        payload: ``subject``; ``problem``, the operator's table; ``trials``, each with ``name`` and ``cycles``, of A and
            of B, 0 for no spin at all; ``settings``; ``process``.
        emit: gets ``{"event": "case", "case"}`` for every trial, with what ``rounds.measure_case`` returns.

    Returns:
        ``trials``, how many were finished.

    Raises:
        ProofError: no GPU, or the GPU context is lost.
    """
    operator, (loaded,), timer = open_gpu({**payload, "baselines": []})
    timer.settle()
    # Every case begins with a collection, which takes 0.2 s for what was imported: it is there to stay.
    gc.freeze()
    # torch has no public way to keep a GPU busy for a known number of cycles.
    spin: Spin = torch.cuda._sleep  # noqa: SLF001
    measure_here(payload, operator, loaded, timer, spin, emit)
    return {"trials": len(payload["trials"])}


def measure_here(
    payload: dict[str, Any], operator: Operator, loaded: Loaded, timer: Timer, spin: Spin, emit: Emit
) -> None:
    """Measure the trials on ``timer``. That the work is ordered with the caller's stream is for gate bench to show."""
    settings = Settings.model_validate(payload["settings"])
    plan = Plan(settings, ["graph"], payload["process"], check_stream=False)
    problem = operator.parse_case(payload["problem"])
    for trial in payload["trials"]:
        case = Case(trial["name"], operator, problem)
        result = measure_case(case, _arms(loaded, trial["cycles"], spin), plan, timer, on_round=lambda *_: None)
        emit({"event": "case", "case": result})


def _arms(loaded: Loaded, cycles: Sequence[int], spin: Spin) -> list[Loaded]:
    """Return B, the subject, and A, the baseline. With no cycles both are the very same function."""
    of_a, of_b = (replace(loaded, entry=_spinning(loaded.entry, count, spin)) for count in cycles)
    return [replace(of_b, name=B), replace(of_a, name=A, role="baseline")]


def _spinning(entry: _Entry | None, cycles: int, spin: Spin) -> _Entry | None:
    """Return ``entry`` followed by so many cycles of work on the stream that it was called on."""
    if entry is None or cycles == 0:
        return entry

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        answer = entry(*args, **kwargs)
        spin(cycles)
        return answer

    return call
