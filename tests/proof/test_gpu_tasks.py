"""Capturing launches, on a simulated GPU; and the tasks themselves where there is a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof import arms, gpu_tasks
from flashmoe_science.proof.evidence import Launch
from flashmoe_science.proof.operator import Operator
from flashmoe_science.proof.rounds import Case
from flashmoe_science.proof.subject import KernelPromise, Subject

from .simulated import Doubling, Gpu, SimulatedTimer, implementation, loaded, rival

SUBJECT = Subject("ours", "doubling", "m:f", Path(), (), kernels=(KernelPromise("attend*", (0, 0, 0)),))


def capture(gpu, *loaded_arms, operator=None):
    case = Case("n64", cast("Operator", operator or Doubling()), 64)
    result = gpu_tasks.capture_case(case, SUBJECT, loaded_arms, SimulatedTimer(gpu), seed=0)
    json.dumps(result)  # it goes through a pipe
    return {arm["name"]: arm for arm in result["arms"]}


def test_launches_of_a_call_and_of_its_graph_are_recorded():
    gpu = Gpu()
    subject = loaded("ours", implementation(gpu, name="attend_fwd"), role="subject")
    baseline = loaded("sdpa", implementation(gpu, name="flash_fwd"), rival=rival("sdpa", kernels=["*flash*"]))
    found = capture(gpu, subject, baseline)
    ours = found["ours"]
    assert (ours["status"], ours["role"], ours["version"], ours["problems"]) == ("captured", "subject", "1.0", [])
    assert [Launch.model_validate(launch).name for launch in ours["launches"]] == ["attend_fwd"]
    assert ours["graph_launches"] == ours["launches"]
    assert ours["promises"] == [{"pattern": "attend*", "grid": (0, 0, 0), "block": None, "shared_memory_bytes": None}]
    assert (found["sdpa"]["patterns"], found["sdpa"]["promises"]) == (["*flash*"], [])


def test_a_kernel_absent_from_the_graph_is_a_problem():
    gpu = Gpu()
    plain = implementation(gpu, name="attend")
    subject = loaded("ours", lambda x: 2 * x if gpu.capturing is not None else plain(x), role="subject")
    ours = capture(gpu, subject)["ours"]
    assert ours["graph_launches"] == []
    assert ours["problems"] == ["kernel attend is absent from the CUDA graph of its call"]


def test_a_replay_that_answers_but_was_not_seen_is_no_ones_fault(monkeypatch):
    gpu = Gpu()
    subject = loaded("ours", implementation(gpu), role="subject")
    monkeypatch.setattr("tests.proof.simulated.SimulatedGraph._replay", lambda self: [k[0]() for k in self.kernels])
    ours = capture(gpu, subject)["ours"]
    assert ours["graph_launches"] is None
    assert ours["graph_reason"] == "the profiler saw nothing of a replay that answered rightly"
    assert ours["problems"] == []


def test_a_call_that_no_graph_can_hold_says_why():
    gpu = Gpu()
    plain = implementation(gpu)

    def entry(x):
        if gpu.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(x)

    ours = capture(gpu, loaded("ours", entry, role="subject"))["ours"]
    assert ours["status"] == "captured"
    assert ours["graph_launches"] is None
    assert ours["graph_reason"].startswith("RuntimeError: operation not permitted when stream is capturing")


def test_calls_that_launch_different_kernels_are_a_problem():
    gpu = Gpu()
    calls = []

    def entry(x):
        calls.append(x)
        return implementation(gpu, name=f"kernel{len(calls) % 2}")(x)

    problems = capture(gpu, loaded("ours", entry, role="subject"))["ours"]["problems"]
    assert any("launched different kernels from time to time" in problem for problem in problems)


def test_arms_that_do_not_run_say_why_and_the_others_are_captured():
    gpu = Gpu()

    def greedy(x):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    found = capture(
        gpu,
        loaded("ours", implementation(gpu), role="subject"),
        arms.Loaded("fa3", "baseline", None, "unavailable", "no module named fa3"),
        loaded("flash", implementation(gpu), rival=rival("flash", refusal="head dimension above 256")),
        loaded("math", greedy),
    )
    assert [(arm["status"], arm["launches"] != []) for arm in found.values()] == [
        ("captured", True),
        ("unavailable", False),
        ("refused", False),
        ("failed", False),
    ]
    assert found["flash"]["reason"] == "head dimension above 256"
    assert found["math"]["reason"].startswith("GPU out of memory")


def test_a_case_that_cannot_be_set_up_fails_with_all_its_arms(monkeypatch):
    gpu, operator = Gpu(), Doubling()
    monkeypatch.setattr(operator, "make_inputs", lambda *args, **kwargs: torch.empty(-1))
    found = capture(gpu, loaded("ours", implementation(gpu), role="subject"), operator=operator)
    assert found["ours"]["status"] == "failed"
    assert found["ours"]["reason"].startswith("the case cannot be set up: RuntimeError")


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_the_tasks_say_so():
    payload = {
        "subject": SUBJECT.to_json(),
        "cases": [],
        "baselines": [],
        "settings": {},
        "process": 0,
        "times": ["wall"],
    }
    for task in (gpu_tasks.measure, gpu_tasks.capture_launches):
        with pytest.raises(ProofError, match="no NVIDIA GPU here that torch can use"):
            task(payload, lambda event: None)


def test_profiling_is_never_mixed_with_other_clocks():
    payload = {"settings": {}, "process": 0, "times": ["kernel", "graph"]}
    with pytest.raises(ProofError, match="times must be kernel alone, or graph and wall"):
        gpu_tasks.measure(payload, lambda event: None)
