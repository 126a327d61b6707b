"""Tests of the verb lint: its lines, its exit codes, and the Markdown of this repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmoe_science.proof.lint import Backing, lint_file, markdown_files

ROOT = Path(__file__).resolve().parents[2]

PAGE = """# A page

It is 2x faster. <!-- claim: seed-graph -->
It is 9x faster.
It was 9x slower. <!-- no claim: history -->
"""


def test_each_assertion_has_a_line_and_the_exit_code_says_whether_one_is_asserted(run, repository):
    (repository / "docs").mkdir()
    (repository / "docs" / "a.md").write_text(PAGE)
    code, out, err = run("lint", "docs")
    assert code == 1
    assert out.splitlines() == [
        "docs/a.md:3: backed    2x faster | It is 2x faster. | claim seed-graph, demonstrated",
        "docs/a.md:4: asserted  9x faster | It is 9x faster. | it names no claim",
        "docs/a.md:5: waived    9x slower | It was 9x slower. | history",
        "3 assertions in 1 file: 1 backed, 1 waived, 1 asserted",
    ]
    assert err.startswith("hint: name a claim that shows it (<!-- claim: ID -->)")
    document = json.loads(run("lint", "docs", "--json")[1])
    assert document["exit_code"] == 1
    assert [(f["file"], f["line"], f["status"]) for f in document["findings"]][1] == ("docs/a.md", 4, "asserted")


def test_a_clean_page_returns_0(run, repository):
    (repository / "a.md").write_text("The kernel is fast.\n")
    assert run("lint", "a.md") == (0, "0 assertions in 1 file\n", "")


@pytest.mark.parametrize("args", [["nothing.md"], []])
def test_wrong_usage(run, args):
    assert run("lint", *args)[0] == 2


def test_the_pages_of_this_repository_assert_nothing_that_no_claim_backs():
    files = markdown_files(
        [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "docs", "changelog.d")]
    )
    backing = Backing(ROOT)
    found = [finding for path in files for finding in lint_file(path, backing) if finding.status == "asserted"]
    assert found == []
