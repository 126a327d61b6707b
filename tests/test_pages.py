"""What pages tell a reader to do can be done: examples run on a CPU, and nothing is installed from an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.judge.verify import read_records
from flashmoe_science.proof.subject.suites import list_suites

ROOT = Path(__file__).resolve().parent.parent
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The package is on no index. Options and the quotation marks of an extra may stand before its name.
FROM_INDEX = re.compile(r"""pip install\s+(?:-\S+\s+)*\\?["']?flashmoe[-_]science""")
WRITTEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md", "Makefile", "action.yml")),
    *(
        path
        for folder in ("docs", "src", "tools", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".md", ".py", ".toml") and path != Path(__file__)
    ),
]


def examples(page: str) -> list[str]:
    """Return the blocks of Python of a page, in their order."""
    return PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))


def test_the_example_of_the_readme_runs_on_a_cpu_as_it_says(capsys):
    example = examples("README.md")[0]
    for printed, here in (('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"'), ("4096", "512")):
        assert example.count(printed) == 1
        example = example.replace(printed, here)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["out"].shape == (1, 16, 512, 128)
    assert "reference" in capsys.readouterr().out


def test_every_import_of_the_readme_works():
    imports = re.findall(r"`(from flashmoe_science\S* import \w+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(imports) == 4
    for line in imports:
        exec(line, {})


def test_the_readme_names_the_suites_without_a_run_and_those_with_claims_about_other_gpus():
    """Claims and records change, and these two sentences are written by hand."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`([\w-]+)`", page.partition("have no recorded run")[2].partition("<!-- slower")[0]))
    without = set(list_suites()) - {record.suite for record in read_records(ROOT).values()}
    assert said == without, "README.md lists the suites without a recorded run: change that line with the records"
    (line,) = re.findall(r"^- Claims are about an H200, or two of them\. (.*)$", page, re.MULTILINE)
    others = {claim.suite for claim in load_claims(ROOT / "claims") if tuple(claim.gpu) != ("H200",)}
    assert set(re.findall(r"`([\w-]+)`", line)) == others


def test_nothing_is_installed_from_an_index():
    assert len(WRITTEN) > 100
    found = {path.relative_to(ROOT).as_posix(): FROM_INDEX.findall(path.read_text("utf-8")) for path in WRITTEN}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("$ pip install flashmoe-science", True),
        ("$ pip install --upgrade flashmoe_science", True),
        ('$ pip install "flashmoe-science[proof]"', True),
        ("$ pip install -e '.[proof]'", False),
        ("pip install . in the clone of flashmoe-science", False),
    ],
)
def test_an_installation_from_an_index_is_seen(text, wrong):
    assert bool(FROM_INDEX.search(text)) == wrong
