"""Tests of the page as Markdown: the same words and tables, and what a record says stays text."""

from __future__ import annotations

import re

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.markdown import escape, render_markdown
from flashmoe_science.proof.report.page import Judged, build_page

from .builders import build_record
from .claim_builders import SENTENCE, build_claim
from .page_checks import HOSTILE, hostile_record


def render(*records, verdicts=()):
    return render_markdown(build_page([Judged(record, list(verdicts)) for record in records]))


def tables(text):
    """Return every table as rows of cells; a bar with a backslash before it is part of a cell."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()] for table in found]


def test_it_says_verdict_gates_speed_and_environment_in_this_order():
    record = build_record(speedups=[2.3])
    text = render(record, verdicts=[judge(build_claim(), record)])
    assert text.startswith("# flash_attention on NVIDIA H200\n")
    assert f"\n**demonstrated: {SENTENCE}**\n" in text
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [head.partition(":")[0] for head in heads] == [
        *("Verdicts", "Gates", "Speed", "Roofline", "Kernels launched"),
        *("Clocks, power, temperature", "Memory", "Accuracy", "Environment"),
    ]
    assert re.search(r"^\| case0 \| sdpa \| [\d.]+ us \| [\d.]+ us \| 2\.3\dx \\\[.*\] \|$", text, re.MULTILINE)


def test_what_a_record_says_stays_text():
    text = render(hostile_record(), hostile_record(day=1))
    assert re.findall(r"(?<!\\)<", text) == []
    assert re.findall(r"(?<!\\)\[x\]", text) == []
    assert text.count(escape(HOSTILE)) > 20


def test_what_stood_in_for_the_kernel_is_counted_apart():
    record = build_record(gpu=None)
    stood_in = [case.model_copy(update={"correct": None, "stand_in": "plain torch"}) for case in record.cases[:1]]
    wrong = stood_in[0].model_copy(update={"correct": False})
    right = record.cases[0].model_copy(update={"correct": True})
    for cases, said in (
        (stood_in, "None shown of the GPU's kernel; its stand-in right in 1 of 1."),
        ([*stood_in, wrong], "None shown of the GPU's kernel; its stand-in right in 1 of 2."),
        ([*stood_in, right], "1 case correct, of 2; its stand-in right in 1 of 1."),
        ([right], "1 case correct, of 1."),
    ):
        page = build_page([Judged(record.model_copy(update={"cases": cases}), [])])
        assert f"## Accuracy\n\n{said}\n" in render_markdown(page)
        assert said.replace("'", "&#39;") in render_html(page)
