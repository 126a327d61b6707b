"""Capturing launches, on a simulated GPU; and the tasks themselves where there is a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.measure import arms, gpu_tasks
from flashmoe_science.proof.measure.rounds import Case
from flashmoe_science.proof.records.evidence import Launch
from flashmoe_science.proof.subject.operator import Operator
from flashmoe_science.proof.subject.subject import KernelPromise, Subject

from .simulated import Doubling, Gpu, SimulatedTimer, implementation, loaded, make_baseline

SUBJECT = Subject("ours", "doubling", "m:f", Path(), (), kernels=(KernelPromise("attend*", (0, 0, 0)),))

WRONG_REPLAY = "a replay of its CUDA graph does not answer as the eager call does: 1 of 1 answers differ"


def capture(gpu, *loaded_arms, operator=None):
    case = Case("n64", cast("Operator", operator or Doubling()), 64)
    result = gpu_tasks.capture_case(case, SUBJECT, loaded_arms, SimulatedTimer(gpu), seed=0)
    json.dumps(result)  # it goes through a pipe
    return {arm["name"]: arm for arm in result["arms"]}


def test_launches_of_a_call_and_of_its_graph_are_recorded():
    gpu = Gpu()
    subject = loaded("ours", implementation(gpu, name="attend_fwd"), role="subject")
    baseline = loaded(
        "sdpa", implementation(gpu, name="flash_fwd"), baseline=make_baseline("sdpa", kernels=["*flash*"])
    )
    found = capture(gpu, subject, baseline)
    ours = found["ours"]
    assert (ours["status"], ours["role"], ours["version"], ours["problems"]) == ("captured", "subject", "1.0", [])
    assert [Launch.model_validate(launch).name for launch in ours["launches"]] == ["attend_fwd"]
    assert ours["graph_launches"] == ours["launches"]
    assert ours["promises"] == [{"pattern": "attend*", "grid": (0, 0, 0), "block": None, "shared_memory_bytes": None}]
    assert (found["sdpa"]["patterns"], found["sdpa"]["promises"]) == (["*flash*"], [])


def test_identities_and_host_files_are_of_our_own_subject_and_the_gpu_that_is_here(monkeypatch):
    def found(subject):
        arms = [loaded("ours", implementation(gpu), role="subject"), loaded("sdpa", implementation(gpu))]
        case = Case("n64", cast("Operator", Promising()), 64)
        result = gpu_tasks.capture_case(case, subject, arms, SimulatedTimer(gpu), seed=0)
        return [(arm["identities"], arm["host_files"]) for arm in result["arms"]]

    def identities(_operator, _subject, _problem, spec):
        return [f"{spec.sms:032}"]

    monkeypatch.setattr(gpu_tasks, "identities_of", identities)
    monkeypatch.setattr(gpu_tasks, "files_called", lambda call: {"a.py": str(call() is not None)})
    nothing: tuple[list[str], dict[str, str]] = ([], {})
    gpu, own = Gpu(), replace(SUBJECT, builtin=True)
    assert found(own) == [nothing, nothing]  # there is none
    monkeypatch.setattr(gpu_tasks, "current_gpu", lambda: replace(SPECS["H200"], sms=5))
    assert found(own) == [(["0" * 31 + "5"], {"a.py": "True"}), nothing]
    assert found(SUBJECT) == [nothing, nothing]  # its name may be that of one of ours


class Promising(Doubling):
    """It promises nothing of one of our subjects."""

    def promised_launches(self, subject, problem):
        return ()


def test_a_kernel_absent_from_the_graph_is_a_problem():
    gpu = Gpu()
    plain = implementation(gpu, name="attend")
    subject = loaded("ours", lambda x: 2 * x if gpu.capturing is not None else plain(x), role="subject")
    ours = capture(gpu, subject)["ours"]
    assert ours["graph_launches"] == []
    wrong, absent = ours["problems"]
    assert wrong.startswith(WRONG_REPLAY)
    assert absent == "kernel attend is absent from the CUDA graph of its call"


def test_a_replay_that_answers_but_was_not_seen_is_no_ones_fault(monkeypatch):
    gpu = Gpu()
    subject = loaded("ours", implementation(gpu), role="subject")
    monkeypatch.setattr("tests.proof.simulated.SimulatedGraph._replay", lambda self: [k[0]() for k in self.kernels])
    ours = capture(gpu, subject)["ours"]
    assert ours["graph_launches"] is None
    assert ours["graph_reason"] == "the profiler saw nothing of a replay that answered rightly"
    assert ours["problems"] == []


def test_an_answer_computed_while_capturing_and_copied_by_the_graph_is_a_problem():
    gpu = Gpu()
    plain = implementation(gpu, name="attend")

    def entry(x):
        if gpu.capturing is None:
            return plain(x)
        out, cached = torch.empty(x.shape), 2 * x  # on a stream that is not captured
        gpu.launch(lambda: out.copy_(cached), name="memcpy")
        return out

    ours = capture(gpu, loaded("ours", entry, role="subject", deterministic=True))["ours"]
    assert (ours["graph_launches"], ours["graph_unseen"]) == ([], False)
    assert ours["problems"] == [
        f"{WRONG_REPLAY}, expected the same bits",
        "kernel attend is absent from the CUDA graph of its call",
    ]


def test_a_replay_of_copies_alone_was_seen_even_if_it_answers():
    gpu = Gpu()
    plain = implementation(gpu, name="attend")

    def entry(x):
        if gpu.capturing is None:
            return plain(x)
        out = torch.empty(x.shape)
        gpu.launch(lambda: out.copy_(2 * x), name="memcpy")
        return out

    ours = capture(gpu, loaded("ours", entry, role="subject"))["ours"]
    assert (ours["graph_launches"], ours["graph_unseen"]) == ([], False)
    assert ours["problems"] == ["kernel attend is absent from the CUDA graph of its call"]


def test_a_graph_whose_kernels_do_not_do_the_work_is_a_problem():
    gpu = Gpu()
    plain = implementation(gpu, name="attend")
    idle = implementation(gpu, name="attend", change=torch.zeros_like)
    subject = loaded("ours", lambda x: plain(x) if gpu.capturing is None else idle(x), role="subject")
    ours = capture(gpu, subject)["ours"]
    assert ours["graph_launches"] == ours["launches"]
    (problem,) = ours["problems"]
    assert problem.startswith(WRONG_REPLAY)


def test_wrong_answers_of_eager_calls_are_left_to_gate_correct():
    """An answer of the call before, an input that every call changes, memory that a call does not write."""
    gpu = Gpu()
    plain = implementation(gpu)
    earlier = []

    def stale(x):
        earlier.append(plain(x))
        return earlier[-2] if len(earlier) > 1 else earlier[-1]

    def change_input(x):
        out = plain(x)
        gpu.launch(lambda: x.mul_(0.5))
        return out

    half = implementation(gpu, change=lambda out: torch.where(torch.arange(64) < 32, out, torch.full((64,), torch.nan)))
    for entry in (stale, change_input, half):
        assert capture(gpu, loaded("ours", entry, role="subject", deterministic=True))["ours"]["problems"] == []


def test_an_empty_graph_of_a_call_that_answers_wrongly_is_a_problem():
    gpu = Gpu()
    wrong = implementation(gpu, name="attend", change=lambda out: out + 7)
    entry = lambda x: torch.zeros_like(x) if gpu.capturing is not None else wrong(x)  # noqa: E731
    for deterministic in (True, False):
        ours = capture(gpu, loaded("ours", entry, role="subject", deterministic=deterministic))["ours"]
        assert (ours["graph_launches"], ours["graph_unseen"]) == ([], False)
        assert ours["problems"] == ["kernel attend is absent from the CUDA graph of its call"]


def test_a_graph_may_vary_in_its_bits_where_they_are_not_promised():
    gpu = Gpu()
    jitter = iter(range(1_000_000))
    varying = implementation(gpu, change=lambda out: out + 1e-6 * next(jitter))
    assert capture(gpu, loaded("ours", varying, role="subject"))["ours"]["problems"] == []
    (problem,) = capture(gpu, loaded("ours", varying, role="subject", deterministic=True))["ours"]["problems"]
    assert problem.endswith("expected the same bits")


class Halves(Doubling):
    """It knows parts: the halves of a vector."""

    def __init__(self):
        super().__init__()
        self.asked: list[int] = []

    def exact(self, problem, inputs):
        self.asked.append(problem)
        return super().exact(problem, inputs)

    def sample(self, problem, inputs, *, seed):
        half = problem // 2
        return half, {"x": inputs["x"][seed % 2 * half :][:half]}, lambda out: out[seed % 2 * half :][:half], 2


def test_of_a_baseline_whose_bits_vary_a_part_is_compared_and_of_the_subject_all():
    gpu, operator = Gpu(), Halves()
    jitter = iter(range(1_000_000))
    varying = implementation(gpu, change=lambda out: out + 1e-6 * next(jitter))
    for role, asked in (("subject", 64), ("baseline", 32)):
        arms = [] if role == "subject" else [loaded("ours", implementation(gpu), role="subject")]
        found = capture(gpu, *arms, loaded("varies", varying, role=role), operator=operator)
        assert found["varies"]["problems"] == []
        assert operator.asked.pop() == asked
    kept = torch.zeros(64)

    def entry(x):
        out = torch.empty(x.shape)
        source = 2 * x if gpu.capturing is None else kept
        gpu.launch(lambda: out.copy_(source + 1e-6 * next(jitter)), name="varies")
        return out

    found = capture(gpu, loaded("ours", implementation(gpu), role="subject"), loaded("keeps", entry), operator=operator)
    (wrong,) = found["keeps"]["problems"]
    assert wrong.startswith(WRONG_REPLAY)


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
        loaded("flash", implementation(gpu), baseline=make_baseline("flash", refusal="head dimension above 256")),
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
