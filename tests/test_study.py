"""The tool that studies comparisons counts right: on made-up times, on a simulated GPU, and on the kept study."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmoe_science.proof.compare.compare import Effect
from flashmoe_science.proof.measure.arms import Loaded
from flashmoe_science.proof.measure.schedule import derived_seed
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.subject.subject import Subject
from flashmoe_science.proof.subject.suites import SuiteCase

from .proof.builders import H200, build_record
from .proof.chain import environment_with
from .proof.simulated import Doubling, Gpu, SimulatedTimer, implementation

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("study", ROOT / "tools" / "study.py")
assert _SPEC is not None
assert _SPEC.loader is not None
study: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["study"] = study  # where pydantic looks for the names of annotations
_SPEC.loader.exec_module(study)

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

        study.measure_here(payload, Doubling(), loaded, timer, spin, on_event)
        return TaskResult(ok=True, data={}, reason="", seconds=10.0, output_tail="")


def study_of(run: Any, *, batches: int = 2, same: int = 0, three: int = 0, one: int = 0, **settings: Any) -> Any:
    """Run a study of few trials."""
    settings = {"processes": 3, "rounds": 10, "seed": 7, "batches": batches, **settings}
    new = study.new_study(SUBJECT, "made-up", CASE, environment_with(H200), **settings)
    few = new.settings.model_copy(update={"graph_calls": 2, "graph_replays": 1})
    wanted = {planted: count for planted, count in ((0.0, same), (0.03, three), (0.01, one)) if count}
    return study.Runner(SUBJECT, new.model_copy(update={"settings": few}), wanted, run=run).measure()


def number(trial: str) -> int:
    return int(trial.rpartition("-")[2])


def biased(*numbers: int, by: float = 1.03, arm: str = "b") -> Factor:
    """Make one arm slower in these trials of every batch, though nothing was planted."""
    return lambda trial, _, name: by if name == arm and trial != "calibration" and number(trial) in numbers else 1.0


def test_equal_kernels_and_planted_work_are_counted_apart():
    found = study_of(MadeUp(), same=40, three=10, one=10)
    same, one, three = study.tallies(found)
    assert (found.incomplete_reason, same.sound >= 40, same.counted <= 2) == ("", True, True)
    assert (three.counted, one.counted) == (three.sound, one.sound)
    assert three.slowdown == pytest.approx(0.03, abs=1e-3)
    assert one.slowdown == pytest.approx(0.01, abs=1e-3)
    assert study.report(found) == study.HOLDS


def test_wrong_verdicts_are_counted_in_both_directions():
    slower, faster = biased(0, 1), biased(2, by=0.97)
    found = study_of(MadeUp(lambda *at: slower(*at) * faster(*at), spread=1e-4), same=20)
    effects = {trial.name: study.judge(found, trial) for trial in found.trials}
    assert [effects[f"0-0-{n}"] for n in (0, 1, 2)] == [Effect.SLOWER, Effect.SLOWER, Effect.FASTER]
    assert study.tallies(found)[0].counted >= 6
    assert study.report(found) == study.FAILS


def test_trials_whose_control_fails_do_not_count():
    found = study_of(MadeUp(biased(*range(99), by=1.05, arm="a#2")), same=6)
    assert (study.tallies(found)[0].sound, study.tallies(found)[0].unsound) == (0, 8)
    assert found.incomplete_reason == "0 of 6 trials are sound at 0%"
    assert study.report(found) == study.INCONCLUSIVE


def test_a_crash_keeps_the_finished_trials():
    found = study_of(MadeUp(crash_at=4), same=12)
    assert found.incomplete_reason == "process 4: killed by SIGKILL"
    assert {trial.batch for trial in found.trials if study.judge(found, trial) is not None} == {0}


def test_an_offset_of_processes_that_is_larger_than_the_noise_makes_no_verdicts():
    """By rounds alone nearly every trial would be faster or slower; compare looks at the processes too."""

    def offset(trial: str, process: int, arm: str) -> float:
        return 1.0 + 0.01 * (derived_seed(trial, process, 7) % 3 - 1) if arm == "b" else 1.0

    found = study_of(MadeUp(offset, spread=1e-3), same=30)
    assert study.tallies(found)[0].counted <= 3


def test_nothing_spins_where_nothing_is_planted_and_both_do_elsewhere():
    run = MadeUp()
    study_of(run, same=2, three=2)
    cycles = {trial["name"]: trial["cycles"] for payload in run.payloads for trial in payload["trials"]}
    assert cycles["0-0-0"] == (0, 0)
    a, b = cycles["0-0.03-0"]
    assert (b - a) * CYCLE_S == pytest.approx(0.03 * (CALL_S + a * CYCLE_S), rel=0.02)


def test_the_whole_path_on_a_simulated_gpu():
    """The harness's own rounds, captures, checks of outputs, intervals and verdicts, on kernels that vary by 0.3 %."""
    found = study_of(OnSimulatedGpu(), batches=1, same=5, three=2)
    same, three = study.tallies(found)
    assert (found.incomplete_reason, same.counted <= 1, three.counted) == ("", True, three.sound)
    assert three.slowdown == pytest.approx(0.03, abs=4e-3)


def test_the_kept_study_shows_what_the_documentation_says():
    (path,) = (ROOT / "evidence" / "studies").iterdir()
    same, one, three = study.tallies(study.Study.model_validate_json(study.read_text(path)))
    counts = [(tally.counted, tally.sound) for tally in (same, one, three)]
    assert counts == [(2, 203), (20, 20), (21, 21)]


def test_one_wrong_case_makes_the_comparison_of_its_suite_wrong():
    record = build_record(speedups=(2.0,) * 13, times=("graph",), spread=0.003)
    table = record.model_dump(mode="json")
    column = table["cases"][7]["rounds"][0]["seconds"]["graph"]["sdpa#2"]
    column[:] = [seconds * 1.02 for seconds in column]
    records = [record, type(record).model_validate(table)]
    assert study.wrong_over_suites(records)[:2] == (1, 2)
