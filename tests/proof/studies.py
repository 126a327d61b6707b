"""Studies in tests: a request, times that are made up trial by trial, and the whole path on a simulated GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashmoe_science.proof.arms import Loaded
from flashmoe_science.proof.evidence import Settings
from flashmoe_science.proof.operator import Operator
from flashmoe_science.proof.schedule import derived_seed
from flashmoe_science.proof.study.run import StudyRequest, run_study
from flashmoe_science.proof.study.tasks import measure_here
from flashmoe_science.proof.study.trials import Series, Study
from flashmoe_science.proof.subject import Subject
from flashmoe_science.proof.suites import SuiteCase
from flashmoe_science.proof.worker import TaskResult

from .builders import H200
from .chain import environment_with
from .simulated import Doubling, Gpu, SimulatedTimer, implementation

SUBJECT = Subject("ours", "tests.proof.doubling", "m:f", Path(__file__).parent, ("doubling.py",), deterministic=True)

CASE = SuiteCase("n64", 64, "made for a test")

CALL_S = 50e-6
CYCLE_S = 0.5e-9

Factor = Callable[[str, int, str], float]  # trial, process, arm -> by what an arm is slower than it is


def none(trial: str, process: int, arm: str) -> float:
    """Return the factor of arms that are as fast as they are."""
    return 1.0


class MadeUp:
    """A run of tasks whose times are drawn: noise of ``spread``, and what ``factor`` puts on top."""

    def __init__(self, factor: Factor = none, *, spread: float = 0.003, crash_at: int | None = None) -> None:
        self.factor, self.spread, self.crash_at = factor, spread, crash_at
        self.payloads: list[dict[str, Any]] = []

    def __call__(self, task: str, payload: dict[str, Any], *, timeout_s: float, on_event: Any) -> TaskResult:
        self.payloads.append(payload)
        rounds, process = payload["settings"]["rounds"], payload["process"]
        for index, trial in enumerate(payload["trials"]):
            if process == self.crash_at and index == 2:
                return TaskResult(ok=False, data=None, reason="killed by SIGKILL", seconds=4.0, output_tail="")
            rng = np.random.default_rng(derived_seed(trial["name"], process))
            on_event({"event": "case", "case": self._case(trial, process, rounds, rng)})
        return TaskResult(ok=True, data={}, reason="", seconds=10.0, output_tail="")

    def _case(self, trial: dict[str, Any], process: int, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
        seconds = {}
        for arm, cycles in zip(("a", "b", "a#2"), (*trial["cycles"], trial["cycles"][0]), strict=True):
            noise = np.exp(rng.normal(0.0, self.spread / 2**0.5, rounds))
            planted = CALL_S + cycles * CYCLE_S
            seconds[arm] = (planted * self.factor(trial["name"], process, arm) * noise).tolist()
        none_known = [None] * rounds
        roles = {"a": "baseline", "b": "subject", "a#2": "control"}
        return {
            "name": trial["name"],
            "input_sets": 4,
            "input_set_bytes": 4096,
            "arms": [{"name": arm, "role": role, "status": "measured", "reason": ""} for arm, role in roles.items()],
            "rounds": {
                "process": [process] * rounds,
                "order": [list(seconds)] * rounds,
                "sm_clock_mhz": none_known,
                "power_w": none_known,
                "temperature_c": none_known,
                "throttle": none_known,
                "seconds": {"graph": seconds},
            },
        }


class Unsteady(Gpu):
    """A simulated GPU whose kernels take a little more or less time at every launch."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self._draw, self._spread = random.Random(1), spread

    def run(self, seconds: float, name: str) -> None:
        super().run(seconds * (1 + self._draw.gauss(0, self._spread)), name)


class OnSimulatedGpu:
    """A run of tasks that measures as the real one does, on a simulated GPU whose kernels vary a little."""

    def __init__(self, *, spread: float = 0.003, entry: Callable[[Gpu], Any] | None = None) -> None:
        self.gpu = Unsteady(spread)
        self._entry = (entry or (lambda gpu: implementation(gpu, seconds=CALL_S)))(self.gpu)

    def __call__(self, task: str, payload: dict[str, Any], *, timeout_s: float, on_event: Any) -> TaskResult:
        loaded = Loaded("ours", "subject", self._entry, "loaded", deterministic=True)
        timer = SimulatedTimer(self.gpu)

        def spin(cycles: int) -> None:
            self.gpu.launch(lambda: None, seconds=cycles * CYCLE_S, name="spin")

        measure_here(payload, cast("Operator", Doubling()), loaded, timer, spin, on_event)
        return TaskResult(ok=True, data={}, reason="", seconds=10.0, output_tail="")


def series(same: int, three: int = 0, one: int = 0) -> list[Series]:
    """Return the kinds of trials, with so many of each."""
    found = [(0.0, same, 0.05), (0.03, three, 0.95), (0.01, one, 0.5)]
    return [Series(planted=p, wanted=wanted, required=required) for p, wanted, required in found if wanted]


def request(wanted: list[Series], **changes: Any) -> StudyRequest:
    """Return a request for a study of few trials."""
    settings = Settings(times=["graph"], graph_calls=2, graph_replays=1, seed=7)
    found = {"series": wanted, "settings": settings, "batches": 2, "command": "flashmoe study", **changes}
    return StudyRequest(SUBJECT, "made-up", CASE, **found)


def study_of(run: Any, wanted: list[Series], **changes: Any) -> tuple[Study, list[Study]]:
    """Run a study; return it, and what was saved on the way."""
    saved: list[Study] = []
    asked = request(wanted, **changes)
    found = run_study(asked, environment_with(H200), say=lambda _: None, save=saved.append, run=run)
    return found, saved
