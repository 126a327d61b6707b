"""What only a GPU can show: launches nobody promised, work on another stream, impossible times, lost contexts."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from flashmoe_science.operators.attention import OPERATOR
from flashmoe_science.proof.records.evidence import Settings

from .chain import (
    attention,
    attention_request,
    gate_of,
    run_chain,
    statuses,
    story,
    until,
    write_subject,
)

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned, pytest.mark.usefixtures("own_path")]

SHORT = attention(1, 3, 65, 64)
MEDIUM = attention(2, 4, 512, 64)
LARGE = attention(1, 16, 4096, 64)  # 6.9e10 operations: 65 us at 1.07e15 a second

FEW = Settings(processes=1, rounds=4)
GRAPH = FEW.model_copy(update={"times": ["graph"]})


def prove(name, *cases, **changes):
    return run_chain(attention_request(name, *cases, **{"settings": FEW, **changes}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_from_graph", "in its CUDA graph: no kernel ran"),
        ("copied_by_graph", "in its CUDA graph: no kernel ran"),
        ("graph_without_work", "a replay of its CUDA graph does not answer as the eager call does"),
        ("falls_through", "promised kernel _plain_attend_kernel did not run"),
        ("falls_through_in_parts", "ran and was not promised"),
        ("fewer_threads", "block (128, 1, 1), promised (384, 1, 1)"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of what is absent from it
def test_caught_at_gate_launch(name, reason):
    record = prove(name, SHORT, MEDIUM)
    assert statuses(record) == until("launch"), story(record)
    assert reason in "\n".join(gate_of(record, "launch").details)


@pytest.mark.usefixtures("import_left_out")
def test_baseline_that_is_not_what_it_says_is_caught_at_gate_launch():
    record = prove("mislabelled_baseline", MEDIUM, baselines=["mislabelled"])
    assert statuses(record) == until("launch"), story(record)
    assert "baseline mislabelled is not what it says: none of its kernels" in gate_of(record, "launch").summary


@pytest.mark.parametrize(
    "name",
    [
        *("stale_output", "shared_output", "input_overwritten", "constant", "tile_missing_zeroed", "head_transposed"),
        "low_precision_accumulator",
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_caught_at_gate_correct(name):
    cases = [attention(1, 1, 32, 64, seqlen_k=4096)] if name.startswith("low") else [SHORT, MEDIUM]
    record = prove(name, *cases)
    assert statuses(record) == until("correct"), story(record)
    assert not any(case.rounds for case in record.cases)


@pytest.mark.usefixtures("import_left_out")  # and not in this process: its allocator has handed out much
def test_a_tile_that_is_never_written_is_caught_at_gate_correct():
    record = prove("tile_missing", SHORT, MEDIUM)
    assert statuses(record) == until("correct"), story(record)
    assert not any(case.rounds for case in record.cases)


@pytest.mark.usefixtures("import_left_out")
def test_a_kernel_that_does_not_end_is_ended_at_gate_launch():
    began = time.monotonic()
    record = prove("hangs", SHORT, MEDIUM)
    assert statuses(record) == until("launch"), story(record)
    gate = gate_of(record, "launch")
    assert gate.summary == f"case {SHORT.name}: no answer within 25 s"
    assert gate.hint.endswith("; [limits] launch_s, or --time-limit, allows more")
    assert gate.gpu_seconds < 120
    assert time.monotonic() - began < 300
    assert record.complete


@pytest.mark.usefixtures("import_left_out")
def test_a_kernel_that_writes_astray_fails_gate_launch_with_what_the_driver_says():
    record = prove("crashes", SHORT, MEDIUM)
    assert statuses(record) == until("launch"), story(record)
    gate = gate_of(record, "launch")
    assert "illegal memory access" in "\n".join([gate.summary, *gate.details])
    assert record.complete


def test_honest_subject_passes_every_gate_after_a_hang_and_a_crash():
    record = prove("honest_triton", SHORT, MEDIUM)
    assert set(statuses(record).values()) == {"passed"}, story(record)
    assert record.complete
    assert {launch.name for case in record.cases for launch in case.arms[0].launches} == {"_plain_attend_kernel"}
    assert set(record.cases[0].arms[0].rates) == {"kernel", "graph", "wall"}


def test_a_replaced_timer_is_caught_at_gate_import():
    record = prove("impossible_time", LARGE)
    assert statuses(record) == until("import"), story(record)
    assert "torch.cuda.Event.elapsed_time is another function" in gate_of(record, "import").summary


# Its stream races with the others: on a GPU that is shared with other tests, gate quick may catch it first.
@pytest.mark.timing
@pytest.mark.usefixtures("import_left_out")
def test_work_on_another_stream_is_caught_at_gate_bench():
    record = prove("other_stream", MEDIUM, settings=GRAPH)
    assert statuses(record) == until("bench"), story(record)
    assert "not ordered with the stream" in gate_of(record, "bench").summary


@pytest.mark.usefixtures("import_left_out")
def test_results_cached_late_are_caught_at_gate_bench():
    record = prove("cached_late", MEDIUM, settings=FEW.model_copy(update={"times": ["graph", "wall"], "rounds": 10}))
    assert statuses(record) == until("bench"), story(record)
    assert "answer" in gate_of(record, "bench").summary


@pytest.mark.usefixtures("in_this_process")
def test_results_kept_by_content_are_caught_at_gate_correct_where_stress_draws_share_values():
    record = prove("keyed_by_content", MEDIUM)
    assert statuses(record) == until("correct"), story(record)
    assert "stress draw" in gate_of(record, "correct").summary, story(record)


@pytest.mark.usefixtures("import_left_out")
def test_results_kept_by_content_are_caught_at_gate_bench_where_few_values_are_new():
    request = attention_request("keyed_by_content", MEDIUM, settings=GRAPH)
    subject = replace(request.subject, not_served=tuple(OPERATOR.stress_draws))
    record = run_chain(replace(request, subject=subject))
    assert statuses(record) == until("bench"), story(record)
    assert "where most values are those of the call before" in gate_of(record, "bench").summary, story(record)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("q[torch.full((1,), 10**6, device=q.device)]", "device-side assert"),
        ("torch.empty(1 << 50, dtype=torch.uint8, device=q.device)", "out of memory"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "killed by SIGKILL"),
    ],
)
@pytest.mark.usefixtures("import_left_out")
def test_subject_that_takes_its_process_or_gpu_down_fails_gate_launch(tmp_path, body, reason):
    code = f"import torch\ndef attend(q, k, v, *, causal, softmax_scale):\n    return {body}\n"
    subject = replace(write_subject(tmp_path, code), operator="attention")
    request = attention_request("honest_triton", SHORT, settings=FEW)
    record = run_chain(replace(request, subject=subject))
    assert statuses(record) == until("launch"), story(record)
    gate = gate_of(record, "launch")
    assert reason in "\n".join([gate.summary, *gate.details])
    assert record.complete
