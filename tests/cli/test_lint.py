"""Tests of the verb lint: its lines, its hint and its exit codes."""

from __future__ import annotations

import json

import pytest

PAGE = """# A page

It is 2x faster. <!-- claim: seed-graph -->
It is 9x faster.
It was 9x slower. <!-- no claim: history -->
"""


def test_each_figure_without_a_claim_has_a_line(run, repository):
    (repository / "docs").mkdir()
    (repository / "docs" / "a.md").write_text(PAGE)
    code, out, err = run("lint", "docs")
    assert code == 1
    assert out.splitlines() == [
        "docs/a.md:4: '9x faster': it names no claim",
        "3 figures in 1 file: 1 backed, 1 waived, 1 asserted",
    ]
    assert err.startswith("hint: name a claim in the sentence or row")
    document = json.loads(run("lint", "docs", "--json")[1])
    assert document["exit_code"] == 1
    assert [(f["file"], f["line"], f["status"]) for f in document["findings"]][1] == ("docs/a.md", 4, "asserted")


@pytest.mark.parametrize("args", [["nothing.md"], []])
def test_wrong_usage(run, args):
    assert run("lint", *args)[0] == 2
