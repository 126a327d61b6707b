"""Texts of claims, records and TOML files do nothing in a terminal, in continuous integration, and on pages."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt

from flashmoe_science import cli
from flashmoe_science.cli.terminal import ChainProgress, Terminal
from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.judge.rows import csv_text
from flashmoe_science.proof.records.evidence import Gate, GateStatus
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.junit import junit_xml
from flashmoe_science.proof.report.markdown import render_markdown
from flashmoe_science.proof.report.page import Judged, build_page
from flashmoe_science.proof.text import foreign

from .builders import build_record
from .claim_builders import build_claim
from .processes import python_path

NASTY = [
    "::error file=x::y",
    " \u00a0\u3000\t::stop-commands::z",
    "line\n::add-mask::a",
    "a\r\n  ::set-output::b",
    "##[error]c",
    "###[group]d",
    "x ##vso[task.complete]e",
    "##teamcity[f]",
    "\x1b[2J\x1b]8;;http://evil.example\x07link",
    "\x9b31m",
    "\u202egnp.exe",
    "a\u200bb\ufeff",
    "\u180f\U0001bca0",
    "\u200b::error::g",
    "=HYPERLINK(1)",
    "  +1",
    "-2+3",
    "@SUM(1)",
    "\uff1d1",
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "![x](http://evil.example/x.png)",
    "http://evil.example/y",
    "www.evil.example",
    "| a | b |",
    "`x` <!-- summary:end -->",
    "1. a",
    "- b",
    "\ud800",
    "\x00\x01",
    "&lt;b&gt;",
]
COMMAND = re.compile(r"^\W*::|##\w*\[", re.MULTILINE)


def is_unseen(letter):
    return letter == "\u180f" or (
        letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    )  # a variation selector is a mark


def mixed(number):
    rng = random.Random(number)
    parts = [*NASTY, "\n", "::", ":", "#", "[", "\x1b", "a", " "]
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))


TEXTS = [*NASTY, *(mixed(number) for number in range(60))]


@pytest.mark.parametrize("place", ["terminal", "xml", "html", "csv", "markdown"])
def test_no_text_is_a_command_and_all_is_seen(place):
    for text in (*TEXTS, *(mixed(number) for number in range(60, 2000))):
        found = foreign(text, place)
        assert not re.search(r"^\s*::|##\w*\[", found, re.MULTILINE), (text, found)
        assert not any(map(is_unseen, found)), (text, found)
        again = foreign(found) if place == "terminal" else ""
        assert place != "terminal" or again == found, "what was made harmless stays as it is"


def test_what_is_harmless_stays_as_it_is():
    for text in ("a::b", "std::vector<float>", "ä ≤ 3 µs", "tab\tand\nline", "x # [y]", "f_x * 2"):
        assert foreign(text) == text


def record_with(text):
    record = build_record(speedups=[2.5])
    gate = Gate(name="correct", status=GateStatus.FAILED, summary=text, hint=text, details=[text])
    case = record.cases[0]
    arms = [arm.model_copy(update={"reason": text, "version": text}) for arm in case.arms]
    case = case.model_copy(update={"origin": text, "arms": arms})
    environment = record.environment.model_copy(update={"cpu": text, "driver": text})
    changes = {"command": text, "gates": [gate], "cases": [case], "environment": environment}
    return record.model_copy(update={**changes, "incomplete_reason": text, "complete": False})


def verdict_with(text):
    claim = build_claim().model_copy(update={"sentence": f"x {text}"})
    return judge(claim, None).model_copy(update={"reason": text, "notes": [text]})


@pytest.mark.parametrize("colour", ["", "1"])
def test_a_terminal_shows_texts_and_obeys_none(capsys, monkeypatch, colour):
    monkeypatch.setenv("FORCE_COLOR" if colour else "NO_COLOR", "1")
    for text in TEXTS:
        terminal = Terminal()
        terminal.say(text)
        terminal.warn(text, text)
        terminal.show_conclusion(record_with(text), [])
        terminal.show_verdicts([verdict_with(text)], why=True)
        said = re.sub(r"\x1b\[[0-9;]*m", "", "".join(capsys.readouterr()))
        assert not re.search(r"^\s*::|##\w*\[", said, re.MULTILINE), (text, said)
        assert not any(map(is_unseen, said)), (text, said)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", ["[link=http://evil.example]x[/link]", "[/]", "[bold]x", "a[b]c"])
def test_progress_shows_markup_and_obeys_none(monkeypatch, text):
    """Labels are names of cases, and what a borrowed machine says."""
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    progress = ChainProgress(terminal := Terminal())
    progress.start(text)
    progress.advance(1, 2, text)
    progress.close()
    with terminal.doing() as say:
        say(text)
    assert screen.getvalue().count(text) >= 3
    assert "\x1b]8" not in screen.getvalue()


def test_errors_and_json_obey_none(capsys):
    for text in TEXTS:
        cli._report(["--json"], "X", text, text, 2)
        out, err = capsys.readouterr()
        assert json.loads(out)["error"]["message"] == text
        assert not COMMAND.search(out)
        assert not re.search(r"^\s*::|##\w*\[", err, re.MULTILINE)
        assert not any(map(is_unseen, err))


def test_junit_is_xml_whatever_it_holds():
    for text in TEXTS:
        found = junit_xml([verdict_with(text)], [record_with(text)], errors={text: text})
        ET.fromstring(found)
        assert not re.search(r"^\s*::|##\w*\[", found, re.MULTILINE)


def test_no_cell_of_csv_is_a_formula():
    for text in TEXTS:
        for row in csv.DictReader(io.StringIO(csv_text([record_with(text)]))):
            for column in ("origin", "reason", "version"):
                assert not row[column].lstrip(" \t\n'\"").startswith(("=", "+", "@")) or row[column].startswith("'")


def test_pages_hold_texts_only():
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    for text in (text for text in NASTY if text != "\ud800"):  # no record can hold it
        page = build_page([Judged(record_with(text), [verdict_with(text)])], None)
        html, markdown = render_html(page), render_markdown(page)
        assert "<script" not in html
        assert not any(map(is_unseen, html + markdown))
        rendered = parser.render(markdown)
        assert not re.search(r"<(a|img|script)\b|<!--", rendered), (text, rendered)
        assert not re.search(r"https?://evil|www\.evil", markdown)


def test_a_claim_file_that_is_wrong_is_reported_without_its_commands(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "a.toml").write_text('[[claim]]\n"\\n::error::x\\u001b[31m" = 1\n')
    argv = [sys.executable, "-m", "flashmoe_science", "verify"]
    here = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 2
    assert "a.toml" in done.stderr
    assert not re.search(r"^\s*::", done.stdout + done.stderr, re.MULTILINE)
    assert "\x1b" not in done.stderr
