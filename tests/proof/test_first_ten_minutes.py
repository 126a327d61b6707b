"""The kernel of docs/first-ten-minutes.md does on the chain what the page says: it passes, and broken it is caught."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe_science.proof.gates import ProveRequest, chain
from flashmoe_science.proof.gates.run import passed
from flashmoe_science.proof.loading import load_subject
from flashmoe_science.proof.suites import Suite

from .chain import attention, environment_with, gate_of, run_chain, statuses, until

PAGE = (Path(__file__).parents[2] / "docs" / "first-ten-minutes.md").read_text(encoding="utf-8")
KERNEL, GOOD_LINE, BAD_LINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOML, BAD_PROMISE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(None))
    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out: it takes seconds"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def prove(folder, kernel=KERNEL, toml=TOML, **changes):
    (folder / "my_attention.py").write_text(kernel)
    (folder / "kernel.toml").write_text(toml)
    subject = load_subject(str(folder / "kernel.toml"))
    suite = Suite("made-up", "attention", "Made for a test.", (attention(1, 1, 4, 4), attention(1, 1, 65, 64)), folder)
    return run_chain(replace(ProveRequest(subject, suite, baselines=["sdpa"], command="flashmoe prove"), **changes))


def words(text):
    """Return a text as one line: the page shows it as a terminal broke it."""
    return " ".join(text.split())


@pytest.mark.triton
def test_the_kernel_of_the_page_is_right(tmp_path):
    record = prove(tmp_path)
    assert statuses(record)["correct"] == "passed"
    assert [case.correct for case in record.cases] == [True, True]


@pytest.mark.triton
def test_the_line_that_the_page_breaks_is_caught_as_it_says(tmp_path):
    assert KERNEL.count(GOOD_LINE) == 1
    record = prove(tmp_path, kernel=KERNEL.replace(GOOD_LINE, BAD_LINE))
    assert statuses(record)["correct"] == "failed"
    reasons = [detail for detail in gate_of(record, "correct").details if detail.startswith("b1_h1_")]
    assert len(reasons) == 2
    assert [reason for reason in reasons if reason not in words(PAGE)] == []


def test_the_promise_that_the_page_breaks_is_caught_as_it_says(tmp_path):
    record = prove(tmp_path, toml=TOML + BAD_PROMISE, gpus=["L4"])
    assert statuses(record) == until("build")
    assert gate_of(record, "build").summary in words(PAGE)
