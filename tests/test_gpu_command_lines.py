"""Every command line that a GPU test runs is one that the command takes: those tests run nowhere but on a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flashmoe_science.cli.app import app

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*_gpu.py"))
COMMAND: Any = typer.main.get_command(app)
USAGE_ERROR: Any = typer.BadParameter.__base__  # UsageError has no public name in typer


def words_of(node: ast.expr, known: dict[str, list[str]]) -> list[str]:
    """Return the words of a list in a source file. What only running it would tell is the word ``X``."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
        return known.get(node.value.id, [])
    if isinstance(node, ast.Starred):
        return words_of(node.value, known)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [word for each in node.elts for word in words_of(each, known)]
    return ["X"]


def names_in(function: ast.AST) -> dict[str, list[str]]:
    """Return what the names of a function are bound to, where that is a list of words."""
    return {
        target.id: words_of(node.value, {})
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Tuple))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def is_words(call: ast.Call) -> bool:
    """Return whether a call hands words on to a helper that makes a command line of them, as ``compare("a")``."""
    return bool(call.args) and all(
        isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and isinstance(a.value, str)) for a in call.args
    )


def command_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield every command line of a test file, with its line: of ``cli.main([...])`` and ``-m flashmoe_science``."""
    tree = ast.parse(path.read_text())
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        known = names_in(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.List):
                continue
            words = words_of(node.args[0], known)
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "cli.main":
                yield node.lineno, words
            elif words[1:3] == ["-m", "flashmoe_science"]:
                yield node.lineno, words[3:]


def options_handed_on(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the options that tests hand to a helper, which adds the verb, with their line."""
    tree = ast.parse(path.read_text())
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        known = names_in(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Tuple) and any(word.startswith("--") for word in words_of(node, known)):
                yield node.lineno, [word for word in words_of(node, known) if word.startswith("--")]
            elif isinstance(node, ast.Call) and is_words(node):
                words = [word for a in node.args for word in words_of(a, known)]
                yield node.lineno, [word for word in words if word.startswith("--")]


def parse(words: list[str]) -> None:
    """Parse a command line as the command does, and run nothing. Raises typer's usage error."""
    verb = COMMAND.get_command(None, words[0])
    with verb.make_context(words[0], words[1:]):
        pass


# A helper within a fixture is found in both.
FOUND = [(path, line, words) for path in FILES for line, words in dict(command_lines(path)).items()]


@pytest.mark.parametrize(("path", "line", "words"), FOUND, ids=[f"{path.stem}-{line}" for path, line, _ in FOUND])
def test_a_command_line_of_a_gpu_test_parses(path, line, words):
    parse(words)


def test_every_option_that_a_helper_of_a_gpu_test_gets_is_one_of_its_verbs():
    for path in FILES:
        verbs = {words[0] for _, words in command_lines(path)}
        known = {name for verb in verbs for param in COMMAND.get_command(None, verb).params for name in param.opts}
        for line, options in options_handed_on(path):
            assert not verbs or set(options) <= known, f"{path.name}:{line}: {set(options) - known}"


def test_the_command_lines_are_found():
    found = {(path.name, words[0]) for path, _, words in FOUND}
    assert found >= {
        ("test_compare_gpu.py", "compare"),
        ("test_resume_gpu.py", "prove"),
    }


def test_an_option_that_is_gone_is_found():
    with pytest.raises(USAGE_ERROR, match="--sbject"):
        parse(["compare", "once", "twice", "--sbject", "X"])
    with pytest.raises(USAGE_ERROR, match="integer"):
        parse(["compare", "once", "twice", "--rounds", "many"])
