"""Tests of the page as HTML: nothing runs, nothing is fetched, and it can be read by eye, by ear and without colour."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from html.parser import HTMLParser

import pytest

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.records.evidence import Record
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.page import Judged, build_page

from .builders import build_record
from .claim_builders import SENTENCE, build_claim
from .page_checks import HOSTILE, hostile_record

VOID = {"meta", "link", "br"}


class Document(HTMLParser):
    """The elements of a page, in order, with the open ones around each."""

    def __init__(self, text):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, (tag, self._open, self.getpos())

    def handle_data(self, data):
        if "style" not in self._open:
            self.words.append(data)

    def tags(self, *names):
        return [(tag, attrs) for tag, attrs, _ in self.elements if tag in names]


def render(*records, verdicts=()):
    return render_html(build_page([Judged(record, list(verdicts)) for record in records]))


@pytest.fixture(scope="module")
def record():
    return build_record(speedups=[2.3, 3.0, 0.5])


@pytest.fixture(scope="module")
def text(record):
    return render(record, verdicts=[judge(build_claim(), record)])


@pytest.fixture(scope="module")
def page(text):
    return Document(text)


def test_the_same_record_gives_the_same_bytes(record, text):
    again = Record.model_validate_json(record.model_dump_json())
    assert render(again, verdicts=[judge(build_claim(), again)]) == text


def test_nothing_runs_and_nothing_is_fetched(page):
    assert not page.tags("script", "iframe", "object", "embed", "form", "img", "base")
    for tag, attrs in page.tags(*{tag for tag, *_ in page.elements}):
        assert not [name for name in attrs if name.startswith("on") or name in ("style", "src", "srcset")], (tag, attrs)
        assert attrs.get("href", "#").startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in "".join(page.words)


def test_the_policy_admits_the_pages_own_style_and_nothing_else(text):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        *(
            "default-src 'none'",
            f"style-src 'sha256-{digest}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ),
    ]
    assert "url(" not in style
    assert "@import" not in style


def test_what_a_record_says_stays_text():
    record = hostile_record()
    text = render(
        record, hostile_record(day=1), verdicts=[judge(build_claim(sentence=HOSTILE, subject=HOSTILE), record)]
    )
    page = Document(text)
    assert not page.tags("script", "img", "b")
    assert "onerror" not in {name for _, attrs, _ in page.elements for name in attrs}
    said = "".join(page.words)
    assert said.count(HOSTILE) > 20
    for attributes in (attrs for _, attrs, _ in page.elements):
        assert not [name for name in attributes if name not in KNOWN_ATTRIBUTES], attributes


KNOWN_ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href", "id", "class", "role", "scope", "tabindex"),
    *("aria-label", "aria-hidden", "open", "download"),
    *("viewbox", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r"),
}


def test_the_verdict_comes_before_everything_else(page):
    said = " ".join("".join(page.words).split())
    assert said.index(f"refuted {SENTENCE}") < said.index("Gates")
    places = [said.index(word) for word in ("Verdicts", "Gates", "Speed", "Roofline", "Environment", "Raw numbers")]
    assert places == sorted(places)


def test_drawings_are_hidden_from_who_hears_the_page(page):
    assert all(attrs.get("aria-hidden") == "true" for _, attrs in page.tags("svg"))


def test_the_record_and_the_table_can_be_downloaded_from_the_page_itself(page, record):
    links = {attrs["download"]: attrs["href"] for _, attrs in page.tags("a") if "download" in attrs}
    assert set(links) == {f"{record.id}.csv", f"{record.id}.json"}
    content = {name: base64.b64decode(href.partition(",")[2]).decode() for name, href in links.items()}
    assert Record.model_validate_json(content[f"{record.id}.json"]) == record
    rows = list(csv.DictReader(io.StringIO(content[f"{record.id}.csv"])))
    assert len(rows) == 3 * 3 * 3
    assert content[f"{record.id}.csv"] in "".join(page.words)
