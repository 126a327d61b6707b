"""What messages send their readers to: pages that are there, in a clone and in an installed wheel."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashmoe_science import errors
from flashmoe_science.proof.subject.suites import load_suite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?! of flashmoe_science)")  # a written file names the package beside it


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every string of a module that is no docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def test_no_text_names_a_page_but_by_where_it_is():
    found = [
        f"{path.relative_to(ROOT)}:{text.lineno}"
        for path in SOURCES
        for text in texts(ast.parse(path.read_text()))
        if NAMED.search(str(text.value))
    ]
    assert not found, "write page('reference/suites') of errors.py: an installed wheel has no docs/ beside it"


def test_each_page_that_is_named_is_there_and_goes_into_the_wheel():
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "id", "") == "page"]
    assert len(named) >= 10
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in named:
        page = ROOT / "docs" / f"{name}.md"
        assert page.is_file(), name
        folder = page.parent.relative_to(ROOT).as_posix()
        assert build["force-include"][folder] == f"flashmoe_science/{folder}"


def test_an_installed_wheel_names_the_file(tmp_path, monkeypatch):
    assert errors.page("reference/suites") == "docs/reference/suites.md"
    monkeypatch.setattr(errors, "_INSTALLED_PAGES", tmp_path)
    page = tmp_path / "reference" / "suites.md"
    page.parent.mkdir()
    page.touch()
    with pytest.raises(errors.SuiteError) as caught:
        load_suite("nothing of this name")
    assert str(page) in caught.value.hint
