"""Gate launch: what ran is compared with what was promised. The captures in here are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashmoe_science.proof.gates import chain, run
from flashmoe_science.proof.gates.launch import _sum_up, case_problems
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.subject.custom_operator import CustomOperator
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import framework_kernels
from flashmoe_science.proof.worker import run_task as real_run_task

from .chain import (
    GPU,
    HONEST,
    SHORT,
    FakeGpu,
    captured,
    environment_with,
    gate_of,
    launch,
    request_of,
    run_chain,
    statuses,
    until,
)

PROMISE = {"pattern": "attend*", "grid": None, "block": [384, 1, 1], "shared_memory_bytes": None}


FRAMEWORK = framework_kernels(load_operator("attention"))


def problems(launches, *, promises=(), subject=HONEST, needs_graph=True, framework=FRAMEWORK, **changes):
    arm = captured("fake_attention", "subject", launches, promises=list(promises), **changes)
    return case_problems(subject, {"name": "case", "arms": [arm]}, framework=framework, needs_graph=needs_graph)


def test_nothing_promised_is_no_problem_when_something_ran():
    assert problems([launch()]) == []


def test_call_that_no_graph_can_hold():
    refused = {"graph_launches": None, "graph_reason": "operation not permitted when stream is capturing"}
    assert problems([launch()], **refused) == [
        "a CUDA graph cannot capture the call: operation not permitted when stream is capturing"
    ]
    assert problems([launch()], needs_graph=False, **refused) == []
    assert problems([launch()], graph_unseen=True, **refused) == []


@pytest.mark.parametrize(
    "name",
    [
        "void pytorch_flash::flash_fwd_kernel<...>",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
        "sm80_xmma_fprop_softmax_f16",
    ],
)
def test_fall_through_to_the_framework(name):
    assert problems([launch(name)]) == [f"kernel {name} ran: the call fell through to the framework"]
    own = {**PROMISE, "pattern": name, "block": None}
    assert problems([launch(name)], promises=[own]) == []
    for pattern in ("*", "?*", "[!_]*", f"{name[:2]}*"):
        bare = {**PROMISE, "pattern": pattern, "block": None}
        assert problems([launch(name)], promises=[bare]) == [
            f"kernel {name} ran: the call fell through to the framework"
        ]


def test_an_operator_that_knows_none_of_the_framework_has_no_fall_through():
    assert framework_kernels(load_operator("tests.proof.doubling")) == CustomOperator().framework_kernels() == ()
    assert problems([launch("void flash_fwd_kernel")], framework=()) == []


def test_forbidden_kernel_is_a_problem_even_when_promised():
    subject = replace(HONEST, forbidden_kernels=("*gemm*",))
    promise = {**PROMISE, "pattern": "*gemm*", "block": None}
    assert problems([launch("a_gemm_b")], promises=[promise], subject=subject) == [
        "kernel a_gemm_b ran, and *gemm* is forbidden"
    ]


def test_what_only_the_capture_can_see_is_passed_on():
    assert problems([launch()], problems=["the same call launched different kernels"]) == [
        "the same call launched different kernels"
    ]


def test_baseline_that_is_not_what_it_says():
    arms = [
        captured("fake_attention", "subject", [launch()]),
        captured("fa2", "baseline", [launch("aten_softmax")], patterns=["*flash_fwd*"]),
        captured("fa3", "baseline", [], patterns=["*sm90*"], status="unavailable", reason="not installed"),
        captured("sdpa", "baseline", [launch("anything")]),
    ]
    assert case_problems(HONEST, {"name": "case", "arms": arms}, framework=FRAMEWORK, needs_graph=True) == [
        "baseline fa2 is not what it says: none of its kernels (*flash_fwd*) ran; what ran: aten_softmax"
    ]


# In the chain.


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()

    def run_task(task, payload, **kwargs):
        imports = task.endswith(":import_subject")
        return real_run_task(task, payload, **kwargs) if imports else fake.run(task, payload, **kwargs)

    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(GPU))
    monkeypatch.setattr(run, "run_task", run_task)
    return fake


def test_long_names_are_cut_in_the_summary():
    launches = [{"name": f"void at::native::elementwise_kernel<128, 4, {'x' * 200}>(int)"}, {"name": "attend_kernel"}]
    summary = _sum_up([{"arms": [{"role": "subject", "launches": launches}]}])
    cut = f"at::native::elementwise_kernel<128, 4, {'x' * 18}..."
    assert summary == f"nothing was promised, so only this is shown: {cut}, attend_kernel ran"


def test_launches_go_into_the_record(gpu):
    record = run_chain(request_of(until="launch"))
    assert gate_of(record, "launch").status.value == "passed"
    assert gate_of(record, "launch").summary == "nothing was promised, so only this is shown: attend_kernel ran"
    assert gate_of(record, "launch").gpu_seconds == 2.0
    subject, baseline = record.cases[0].arms
    assert (subject.launches[0].name, subject.launches[0].block, subject.version) == ("attend_kernel", (128, 1, 1), "1")
    assert baseline.launches[0].name == "fmha"
    name, payload = gpu.calls[0]
    assert name == "capture_launches"
    assert payload["baselines"] == ["sdpa"]
    assert payload["cases"][0]["problem"] == {
        "batch": 1,
        "heads": 3,
        "seqlen_q": 65,
        "head_dim": 64,
        "dtype": "fp16",
        "causal": False,
    }


def test_broken_promise_stops_the_chain_before_anything_long(gpu):
    gpu.capture = lambda payload: [captured("fake_attention", "subject", [launch()], promises=[PROMISE])]
    record = run_chain(request_of(HONEST, SHORT, replace(SHORT, seqlen_q=66)))
    assert statuses(record) == until("launch")
    assert gate_of(record, "launch").summary == (
        "b1_h3_s65_d64_fp16: kernel attend_kernel ran with block (128, 1, 1), promised (384, 1, 1) (and 1 more)"
    )
    assert record.cases[0].arms[0].launches[0].name == "attend_kernel"
    assert record.cases[0].arms[0].reason == "gate launch failed"
    assert [name for name, _ in gpu.calls] == ["capture_launches"]


def test_baseline_that_cannot_run_is_reported_and_stops_nothing(gpu):
    absent = captured("absent", "baseline", [], status="unavailable", reason="no module named absent")
    gpu.capture = lambda payload: [captured("fake_attention", "subject", [launch()]), absent]
    record = run_chain(request_of(until="launch", baselines=["absent"]))
    assert gate_of(record, "launch").status.value == "passed"
    assert gate_of(record, "launch").details == ["baseline absent unavailable: no module named absent (1 of 1 case)"]
    arm = record.cases[0].arms[1]
    assert (arm.status, arm.reason) == ("unavailable", "no module named absent")


def test_hang_while_capturing_names_its_case_and_the_key_of_its_limit(gpu, monkeypatch):
    def hang(payload, on_event):
        on_event({"event": "start", "name": payload["cases"][1]["name"]})
        reason, tail = "no answer within 120 s", 'File "attend.py", line 3 in attend\n'
        return TaskResult(ok=False, data=None, reason=reason, seconds=120.0, output_tail=tail, timed_out=True)

    monkeypatch.setattr(gpu, "_capture_launches", hang)
    record = run_chain(request_of(HONEST, SHORT, replace(SHORT, seqlen_q=66)))
    gate = gate_of(record, "launch")
    assert statuses(record) == until("launch")
    assert gate.summary == f"case {record.cases[1].name}: no answer within 120 s"
    assert gate.hint.endswith("; [limits] launch_s, or --time-limit, allows more")
    assert gate.details == ['File "attend.py", line 3 in attend']


def test_a_seed_gives_gate_correct_its_inputs_and_no_seed_gives_it_others(gpu):
    for seed in (7, 7, 8, None, None):
        run_chain(request_of(until="correct", settings=Settings(seed=seed)))
    first, again, *others = [payload["seed"] for name, payload in gpu.calls if name == "check_correct"]
    assert first == again != 7  # nor are they those of gate bench
    assert len({first, *others}) == 4


def test_identities_and_files_are_in_the_record_and_measuring_leaves_them(gpu):
    found = {"identities": ["a" * 32], "host_files": {"errors.py": "b" * 32}}
    gpu.capture = lambda payload: [
        captured(gpu.subject, "subject", [launch()], **found),
        captured("sdpa", "baseline", [launch("fmha")]),
    ]
    record = run_chain(request_of())
    subject, *others = record.cases[0].arms
    assert subject.status == "measured"
    assert (subject.identities, subject.host_files) == (found["identities"], found["host_files"])
    assert not any(arm.identities or arm.host_files for arm in others)
