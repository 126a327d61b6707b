"""Answers are looked at again where the subject's code was never imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashmoe_science.proof.gates import chain
from flashmoe_science.proof.gates.run import passed
from flashmoe_science.proof.measure import recheck
from flashmoe_science.proof.measure.recheck import FirstAnswer, check_answers, write_answer

from .chain import (
    SHORT as SHORT_PROBLEM,
    attention,
    attention_request,
    gate_of,
    request_of,
    run_chain,
    write_subject,
)
from .fake_operator import OPERATOR, attend

SHORT = attention(1, 2, 33, 16)

# Its module changes how answers are judged, and lets the guard see what was there before.
BLIND = """
import sys
import torch

for name, module in list(sys.modules.items()):
    if name.endswith("proof.measure.shared_state"):
        for state in ("_code", "_kernels", "_functions", "_settings"):
            setattr(module, state, lambda found=getattr(module, state)(): found)

def right(answer, wanted):
    from flashmoe_science.proof.records.evidence import OutputAccuracy
    return OutputAccuracy(max_error=0.0, budget=1.0, low_precision_error=0.0), ""

for name, module in list(sys.modules.items()):
    if name.startswith("flashmoe_science.proof.measure") and hasattr(module, "judge"):
        module.judge = right

def attend(q, k, v, *, causal=False, softmax_scale=None):
    return torch.zeros_like(q)
"""


@pytest.fixture(autouse=True)
def no_import(monkeypatch, no_gpu):
    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out: it takes seconds"))


def test_an_entry_point_that_is_watched_says_of_itself_what_it_says():
    class Chunked:
        layout = "chunks"

        def __call__(self, x):
            return x

    assert FirstAnswer(Chunked()).layout == "chunks"
    assert not hasattr(FirstAnswer(attend), "layout")


def table_of(folder, answer, *, seed=5):
    write_answer(answer, folder / "case")
    problem = OPERATOR.as_table(SHORT_PROBLEM)
    return {"name": "case", "problem": problem, "file": str(folder / "case"), "made": {"seed": seed}}


def asked(folder, *tables):
    subject = write_subject(folder, "def attend(q, k, v, **_): return q\n")
    found = {**subject.to_json(), "operator": OPERATOR.name}
    return check_answers({"subject": found, "device": "cpu", "answers": list(tables)}, lambda _: None)


def test_a_right_answer_passes_and_another_does_not(tmp_path):
    with torch.no_grad():
        answer = attend(**OPERATOR.make_inputs(SHORT_PROBLEM, seed=5, device="cpu"))
    assert asked(tmp_path, table_of(tmp_path, answer)) == {"wrong": {}, "left_out": [], "beside": False}
    assert "error" in asked(tmp_path, table_of(tmp_path, torch.zeros_like(answer)))["wrong"]["case"]
    assert "bytes, expected" in asked(tmp_path, table_of(tmp_path, answer[..., :8]))["wrong"]["case"]
    assert "has 0 bytes, expected" in asked(tmp_path, table_of(tmp_path, answer[:0]))["wrong"]["case"]
    missing = {**table_of(tmp_path, answer), "file": str(tmp_path / "nothing")}
    assert asked(tmp_path, missing)["wrong"] == {"case": "no answer was handed over"}


def test_the_first_answer_is_copied_when_it_comes():
    given = torch.zeros(3)
    entry = FirstAnswer(lambda: given)
    assert entry() is given
    given.fill_(1)
    entry()
    assert isinstance(entry.answer, torch.Tensor)
    assert entry.answer.tolist() == [0, 0, 0]


def test_an_honest_run_says_where_its_answers_were_compared_again():
    record = run_chain(request_of(until="correct"))
    # The test's operator holds its own subject.
    assert (
        "1 answer compared again in a process beside it: its operator imports it" in gate_of(record, "correct").details
    )


@pytest.mark.triton
def test_honest_answers_of_a_kernel_are_right_without_it():
    record = run_chain(attention_request("honest_triton", SHORT, until="correct"))
    assert gate_of(record, "correct").status.value == "passed"
    assert "1 answer compared again in a process without the subject" in gate_of(record, "correct").details


def test_a_module_that_blinds_the_process_that_holds_it_is_caught(tmp_path: Path):
    from dataclasses import replace

    subject = replace(write_subject(tmp_path, BLIND), operator="attention")
    request = replace(attention_request("honest_torch", SHORT, until="correct"), subject=subject)
    record = run_chain(request)
    gate = gate_of(record, "correct")
    assert gate.status.value == "failed"
    assert f"{SHORT.name}: a process without the subject finds its answer wrong: error" in gate.summary, gate
    assert record.cases[0].correct is False


def test_an_answer_of_the_largest_size_is_written_and_a_larger_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(recheck, "LARGEST_BYTES", 40)
    for elements, written in ((10, 40), (11, 0)):
        write_answer(torch.zeros(elements), tmp_path / "answer")
        assert (tmp_path / "answer").stat().st_size == written


def test_what_is_right_is_not_worked_out_for_an_answer_that_was_left_out(tmp_path, monkeypatch):
    answer = attend(**OPERATOR.make_inputs(SHORT_PROBLEM, seed=5, device="cpu"))
    table = table_of(tmp_path, answer[:0])
    monkeypatch.setattr(recheck, "LARGEST_BYTES", answer.nbytes)
    assert "has 0 bytes, expected" in asked(tmp_path, table)["wrong"]["case"]
    monkeypatch.setattr(recheck, "LARGEST_BYTES", answer.nbytes - 1)
    monkeypatch.setattr(recheck, "Whole", None)
    assert asked(tmp_path, table) == {"wrong": {}, "left_out": ["case"], "beside": False}
