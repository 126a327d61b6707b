"""The verdicts that pages show as printed output are those of today: on the claims of ``claims/``, and on runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomlkit

from flashmoe_science.proof.claims import load_claims
from flashmoe_science.proof.conclude import conclude
from flashmoe_science.proof.judge import VerdictStatus
from flashmoe_science.proof.report import count_line, figure
from flashmoe_science.proof.verify import read_records, verify_claims

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_STATUS = "|".join(status.value for status in VerdictStatus)
_VERDICT = re.compile(rf"^({_STATUS}) +(\S.*(?:\n {{14}}\S.*)*)", re.MULTILINE)
_COUNT = re.compile(r"^\d+ claims?: .*$", re.MULTILINE)
_OF_RUN = re.compile(rf"^(\d{{8}}T\d{{6}}Z-\S+): ({_COUNT.pattern[1:-1]})$", re.MULTILINE)
_HOLDS = {VerdictStatus.DEMONSTRATED.value, VerdictStatus.STALE.value}


@dataclass(frozen=True)
class Printed:
    """A verdict as a page shows it."""

    page: str
    status: str
    text: str  # sentence, figure and run, on one line


def printed_verdicts(markdown: str, page: str = "page") -> list[Printed]:
    blocks = (block for language, block in _BLOCK.findall(markdown) if language in ("", "console", "text"))
    return [
        Printed(page, status, " ".join(text.replace(" | ", " ").split()))
        for block in blocks
        for status, text in _VERDICT.findall(block)
    ]


def problems(printed: list[Printed], verdicts) -> list[str]:
    """Return which verdicts of a page are not those of ``verdicts``. A stale claim is one that was demonstrated."""
    found = []
    for one in printed:
        about = [v for v in verdicts if one.text.startswith(" ".join(v.claim.sentence.split()))]
        # Many runs set out to show the same: the text says which.
        verdict = next((v for v in about if v.record and v.record in one.text), next(iter(about), None))
        if verdict is None:
            found.append(f"{one.page}: claims/ has no such claim: {one.text}")
            continue
        rest = one.text[len(" ".join(verdict.claim.sentence.split())) :].strip()
        if one.status != verdict.status.value and not {one.status, verdict.status.value} <= _HOLDS:
            found.append(f"{one.page}: {verdict.claim.id} is {verdict.status.value}, not {one.status}")
        shown = f"{figure(verdict)}; {verdict.record}" if verdict.record else verdict.reason
        if not rest.startswith(shown):
            found.append(f"{one.page}: {verdict.claim.id} has {shown}, not {rest}")
    return found


def unstale(verdicts):
    """Return verdicts as they are while no source has changed."""
    held = {"status": VerdictStatus.DEMONSTRATED}
    return [one.model_copy(update=held) if one.status is VerdictStatus.STALE else one for one in verdicts]


def by_subject(verdicts):
    """Return the verdicts about each subject."""
    subjects = {one.claim.subject for one in verdicts}
    return [[one for one in verdicts if one.claim.subject == subject] for subject in subjects]


@pytest.fixture(scope="module")
def verdicts():
    """The verdicts of this repository, and of each example that has claims of its own."""
    examples = sorted(folder.parent for folder in (ROOT / "examples").glob("*/claims"))
    return [verify_claims(repository) for repository in (ROOT, *examples)]


@pytest.fixture(scope="module")
def expectations():
    """What ``prove`` says at the end of every run in ``evidence/`` that no claim is about."""
    return [verdict for record in read_records(ROOT).values() for verdict in conclude(record, None)]


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_the_verdicts_on_a_page_are_those_of_this_repository(path, verdicts, expectations):
    text = path.read_text(encoding="utf-8")
    known = [verdict for of_one in (*verdicts, expectations) for verdict in of_one]
    assert problems(printed_verdicts(text, path.name), known) == []


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_the_counts_on_a_page_are_those_of_this_repository(path, verdicts):
    counts = [line for _, block in _BLOCK.findall(path.read_text(encoding="utf-8")) for line in _COUNT.findall(block)]
    # A run ends with the claims about its subject.
    groups = [*verdicts, *(about for of_one in verdicts for about in by_subject(of_one))]
    assert set(counts) <= {line for group in groups for line in (count_line(group), count_line(unstale(group)))}


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_the_counts_of_a_run_are_those_of_the_claims_that_it_decides(path, verdicts):
    for run, count in _OF_RUN.findall(path.read_text(encoding="utf-8")):
        decided = [one for one in verdicts[0] if one.record == run]
        assert count in (count_line(decided), count_line(unstale(decided)))


@pytest.mark.parametrize("path", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_a_claim_file_on_a_page_is_as_in_claims(path):
    known = {claim.id: claim for claim in load_claims(ROOT / "claims")}
    for language, block in _BLOCK.findall(path.read_text(encoding="utf-8")):
        for table in tomlkit.parse(block).unwrap().get("claim", []) if language == "toml" else []:
            if table["id"] in known:
                assert type(known[table["id"]]).model_validate(table) == known[table["id"]]


def page_of(verdict, **changes):
    text = {"status": verdict.status.value, "sentence": verdict.claim.sentence, "run": verdict.record, **changes}
    shown = text.get("figure", figure(verdict))
    return (
        f"```console\n$ flashmoe verify\n{text['status']:<12}  {text['sentence']}\n{'':14}{shown}; {text['run']}\n```\n"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"status": "stale"}, ""),
        ({"sentence": "At least 0.98 times as fast."}, "claims/ has no such claim"),
        ({"status": "refuted"}, "is demonstrated, not refuted"),
        ({"figure": "lowest of 36 cases 1.9x [1.8, 2.0]"}, "not lowest of 36 cases 1.9x"),
        ({"run": "20260101T000000Z-seed-flash_attention-000000"}, "not lowest of"),
    ],
)
def test_a_page_that_differs_is_found(changes, problem, verdicts):
    good = next(v for v in verdicts[0] if v.claim.scope == "each case")
    good = good.model_copy(update={"status": VerdictStatus.DEMONSTRATED})
    found = problems(printed_verdicts(page_of(good, **changes)), [good])
    assert [problem in one for one in found] == ([True] if problem else [])
