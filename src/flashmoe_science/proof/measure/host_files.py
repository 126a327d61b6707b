"""The files of this package that a call runs on the host, found by running one, and hashes by which they compare.

A hash leaves out imports, docstrings, comments and the file's name: a file that moves is the same. Which names these
files import from one another is one more hash, so that a call cannot go to another file unseen.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from ...gpu.identity import digest, normalised
from ..subject.subject import PACKAGE_FOLDER

IMPORTS = "imports"  # the entry of that hash, among those of files


def files_called(call: Callable[[], Any]) -> dict[str, str]:
    """Make a call, and return the files of this package whose functions ran, each with its hash; and ``IMPORTS``.

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
    files = {path.relative_to(PACKAGE_FOLDER).as_posix(): file_hash(path) for path in paths}
    return {**files, IMPORTS: _imports_among(paths)}


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """Return what differs now from what ``files_called`` returned: files, as they were called, or ``IMPORTS``."""
    files = {path: PACKAGE_FOLDER / path for path in recorded if path != IMPORTS}
    if moved := [path for path, file in files.items() if not file.is_file()]:
        everywhere = {file_hash(file): file for file in PACKAGE_FOLDER.rglob("*.py")}  # takes seconds
        files |= {path: everywhere[recorded[path]] for path in moved if recorded[path] in everywhere}
    changed = [path for path, file in files.items() if not file.is_file() or file_hash(file) != recorded[path]]
    if not changed and recorded.get(IMPORTS) != _imports_among(files.values()):
        return [IMPORTS]
    return sorted(changed)


@functools.lru_cache(maxsize=1024)
def file_hash(path: Path) -> str:
    """Return the hash of what a file of Python does, without its imports."""
    return _read(path)[0]


def _imports_among(files: Collection[Path]) -> str:
    """Return the hash of the names that these files import from one another."""
    own = set(files)
    return digest(sorted([file_hash(file), name] for file in own for name, origin in _read(file)[1] if origin in own))


@functools.lru_cache(maxsize=1024)
def _read(path: Path) -> tuple[str, frozenset[tuple[str, Path]]]:
    """Return the hash of a file, and the names that it imports from this package, each with the file it is from."""
    found = _Imports(path)
    return digest(normalised(found.visit(ast.parse(path.read_text(encoding="utf-8"))))), frozenset(found.names)


class _Imports(ast.NodeTransformer):
    """Takes imports out of a tree, and notes the names that come from this package."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names: set[tuple[str, Path]] = set()

    def visit_Import(self, _: ast.Import) -> None:
        """Leave it out."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave it out."""
        if node.level:
            folder = self._path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for each in node.names:  # a module, or a name of a module
                origins = (folder / f"{each.name}.py", folder.with_suffix(".py"), folder / "__init__.py")
                origin = next((file for file in origins if file.is_file()), folder)
                self.names.add((each.asname or each.name, origin))

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Leave out what is for type checkers alone."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        self.generic_visit(node)
        return node if node.body or node.orelse else None
