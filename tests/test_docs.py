"""What docs/ shows is so: code runs, outputs are real, and the pages keep their size.

``DOCS_WRITE=1 pytest tests/test_docs.py`` writes outputs that differ into the pages, but for those with ``[...]``.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest
import torch
import typer

from flashmoe_science.cli.app import app

from .docs_blocks import ROOT, Page, commands_of, read_blocks, same_output

PAGES = sorted((ROOT / "docs").rglob("*.md"))
COMMAND: Any = typer.main.get_command(app)
NAMES = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for the files of a page, with a store and a configuration of its own, and a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "page").mkdir()
    return tmp_path / "page"


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_a_page_does_what_it_shows(path, folder, monkeypatch, capsys):
    text = path.read_text(encoding="utf-8")
    monkeypatch.chdir(folder if any(block.title for block in read_blocks(text)) else ROOT)
    wrong = []
    # With a GPU, gates and plans say more.
    for span, shown, printed in Page(path, folder, lambda: capsys.readouterr().out).check(
        runs_commands=not torch.cuda.is_available()
    ):
        if not same_output(shown, printed):
            wrong.append((span, shown, printed))
    if os.environ.get("DOCS_WRITE"):
        for (start, end), shown, printed in reversed(wrong):
            if "[...]" not in shown:
                text = text[:start] + printed + text[end:]
        path.write_text(text, encoding="utf-8")
        return
    assert [(shown, printed) for _, shown, printed in wrong] == []


def test_pages_keep_their_size():
    words = {name: len(path.read_text(encoding="utf-8").split()) for name, path in zip(NAMES, PAGES, strict=True)}
    assert sum(words.values()) <= 40_000
    assert {name: count for name, count in words.items() if count > 2_500} == {}


def test_every_page_is_in_the_navigation_and_every_verb_has_a_section():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in NAMES if f" {name}\n" not in navigation] == []
    sections = re.findall(r"^### ([a-z]+)", (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(sections) == set(COMMAND.list_commands(None))


GPU = "<!-- not run: needs a GPU -->\n\n"
PAGE = """
```python
print(6 * 7)
```

```text
42
```

<!-- not run: needs a GPU -->

```console
$ flashmoe prove --suite seed
passed
$ flashmoe verify
```
"""


def test_blocks_are_read():
    python, text, console = read_blocks(PAGE)
    assert (python.output, text.body, console.reason) == (text, "42\n", "needs a GPU")
    assert commands_of(console) == [("flashmoe prove --suite seed", "passed\n"), ("flashmoe verify", "")]


@pytest.mark.parametrize(
    ("shown", "same"),
    [("a 9.9 s\nb c\n", True), ("a 1 s\n[...]\n", True), ("[...]\nc\n", True), ("b c", False), ("a 1 s b", False)],
)
def test_outputs_are_compared(shown, same):
    assert same_output(shown, "a 1.2 s b\n c\n") == same


@pytest.mark.parametrize(
    "block",
    [
        "```python\nprint(43)\n```\n\n```text\n42\n```\n",
        "```console\n$ flashmoe suites\nnothing\n```\n",
    ],
)
def test_a_page_that_shows_something_else_is_found(block, folder, capsys):
    (folder / "page.md").write_text(block, encoding="utf-8")
    page = Page(folder / "page.md", folder, lambda: capsys.readouterr().out)
    assert [same_output(shown, printed) for _, shown, printed in page.check()] == [False]


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nprint(43)\n```\n", AssertionError),
        (
            "<!-- not run: GPU -->\n\n```python\nfrom flashmoe_science import route\nroute(x, topk=2)\n```\n",
            AssertionError,
        ),
        (f"{GPU}```python\nfrom flashmoe_science import routes\n```\n", AttributeError),
        (f"{GPU}```console\n$ flashmoe prove --siute seed\n```\n", Exception),
        (f"{GPU}```console\n$ python examples/none.py\n```\n", AssertionError),
    ],
)
def test_code_that_cannot_work_is_found(block, error, folder, capsys):
    (folder / "page.md").write_text(block, encoding="utf-8")
    with pytest.raises(error):
        list(Page(folder / "page.md", folder, lambda: capsys.readouterr().out).check())
