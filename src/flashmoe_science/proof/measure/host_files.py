"""The files of this package that a call runs on the host, found by running one, and hashes by which they compare.

A hash leaves out docstrings, comments, and names of files and modules: a file that moves is the same.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ...gpu.identity import digest, normalised
from ..subject.subject import PACKAGE_FOLDER


def files_called(call: Callable[[], Any]) -> dict[str, str]:
    """Make a call, and return the files of this package whose functions ran, each with its hash.

    Code of other threads does not count. Make a call before it: the first also plans and compiles.
    """
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    paths = sorted(path for path in map(Path, seen) if path.is_relative_to(PACKAGE_FOLDER))
    return {path.relative_to(PACKAGE_FOLDER).as_posix(): file_hash(path) for path in paths}


@functools.lru_cache(maxsize=1024)
def file_hash(path: Path) -> str:
    """Return the hash of what a file of Python does, with the definitions that it imports from this package."""
    imports = _Imports()
    rest = imports.visit(ast.parse(path.read_text(encoding="utf-8")))
    return digest([normalised(rest), {name: _definition(path, *place) for name, place in imports.found.items()}])


def hashes_at(paths: Iterable[str]) -> dict[str, str]:
    """Return the hashes of those of these files that are there, by their paths in this package."""
    files = {path: PACKAGE_FOLDER / path for path in paths}
    return {path: file_hash(file) for path, file in files.items() if file.is_file()}


def hashes_now() -> frozenset[str]:
    """Return the hashes of all files of this package."""
    return frozenset(file_hash(path) for path in PACKAGE_FOLDER.rglob("*.py"))


class _Imports(ast.NodeTransformer):
    """Takes imports out of a tree, and notes names that come from this package: level, module and name of each."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, str, str]] = {}

    def visit_Import(self, _: ast.Import) -> None:
        """Leave it out."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave it out."""
        if node.level:
            self.found |= {each.asname or each.name: (node.level, node.module or "", each.name) for each in node.names}

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Leave out what is for type checkers alone."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        self.generic_visit(node)
        return node if node.body or node.orelse else None


def _definition(path: Path, level: int, module: str, name: str) -> str:
    """Return the hash of the definition that ``path`` imports, or an empty text: a module, or imported there too."""
    folder = path.parents[level - 1].joinpath(*module.split(".")) if module else path.parents[level - 1]
    file = folder.with_suffix(".py") if folder.with_suffix(".py").is_file() else folder / "__init__.py"
    return _definitions(file).get(name, "") if file.is_file() else ""


@functools.lru_cache(maxsize=1024)
def _definitions(file: Path) -> dict[str, str]:
    """Return the hash of each function, class and variable of a module, by name."""
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = digest(normalised(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: digest(normalised(node)) for each in targets if isinstance(each, ast.Name)}
    return found
