"""The files of this package that a call runs on the host, found by running one, and hashes by which they compare.

A hash leaves out imports, docstrings, comments and the file's name: a file that moves is the same.
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
    """Return the hash of what a file of Python does."""
    return digest(normalised(_WithoutImports().visit(ast.parse(path.read_text(encoding="utf-8")))))


def hashes_at(paths: Iterable[str]) -> dict[str, str]:
    """Return the hashes of those of these files that are there, by their paths in this package."""
    files = {path: PACKAGE_FOLDER / path for path in paths}
    return {path: file_hash(file) for path, file in files.items() if file.is_file()}


def hashes_now() -> frozenset[str]:
    """Return the hashes of all files of this package."""
    return frozenset(file_hash(path) for path in PACKAGE_FOLDER.rglob("*.py"))


class _WithoutImports(ast.NodeTransformer):
    def visit_Import(self, _: ast.Import) -> None:
        """Leave it out."""

    def visit_ImportFrom(self, _: ast.ImportFrom) -> None:
        """Leave it out."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Leave out a branch of imports alone, as under ``TYPE_CHECKING``."""
        self.generic_visit(node)
        return node if node.body or node.orelse else None
