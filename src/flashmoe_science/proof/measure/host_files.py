"""The functions of this package that a call runs on the host, found by running one, and hashes by which they compare.

A hash leaves out imports, docstrings, comments and the file's name: a file that moves is the same. What a file does
outside its functions is one more hash, and so is which names these files import from one another, so that a call
cannot go to another file unseen. A function that did not run does not count: a check that only a first call makes, for
one. Older records have one hash for a whole file.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ...gpu.identity import digest, normalised
from ..subject.subject import PACKAGE_FOLDER

IMPORTS = "imports"  # the entry of that hash, among those of files
_INSIDE = "::"  # between a file and a function of it
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Names = Collection[str] | None  # functions of a file; None: the file as a whole


def files_called(call: Callable[[], Any]) -> dict[str, str]:
    """Make a call, and return the hashes of what ran of this package, and of ``IMPORTS``.

    They are named ``"FILE"``, for what is outside its functions, and ``"FILE::FUNCTION"``. Code of other threads does
    not count. Make a call before it: the first also plans and compiles.
    """
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    ran: dict[Path, set[str]] = {}
    for code in seen:
        if (path := Path(code.co_filename)).is_relative_to(PACKAGE_FOLDER):
            ran.setdefault(path, set()).update(_read(path).functions_at(code.co_firstlineno))
    files = {path.relative_to(PACKAGE_FOLDER).as_posix(): (path, sorted(names)) for path, names in sorted(ran.items())}
    found = {
        place + part: found for place, (path, names) in files.items() for part, found in _hashes(path, names).items()
    }
    return {**found, IMPORTS: _imports_among(dict(files.values()))}


def changed_files(recorded: Mapping[str, str]) -> list[str]:
    """Return what differs now from what ``files_called`` returned: files, as they were called, or ``IMPORTS``."""
    parts: dict[str, dict[str, str]] = {}
    for entry, found in recorded.items():
        place, inside, name = entry.partition(_INSIDE)
        parts.setdefault(place, {})[inside + name] = found
    parts.pop(IMPORTS, None)
    has_functions = any(_INSIDE in entry for entry in recorded)
    files: dict[Path, _Names] = {}
    changed = []
    for place, hashes in parts.items():
        names = [part.removeprefix(_INSIDE) for part in hashes if part] if has_functions else None
        there = PACKAGE_FOLDER / place
        candidates = [there] if there.is_file() else PACKAGE_FOLDER.rglob("*.py")  # all of them take seconds
        if file := next((each for each in candidates if _hashes(each, names) == hashes), None):
            files[file] = names
        else:
            changed.append(place)
    if not changed and recorded.get(IMPORTS) != _imports_among(files):
        return [IMPORTS]
    return sorted(changed)


def _hashes(path: Path, names: _Names) -> dict[str, str]:
    """Return the hash of a file, or of what is outside its functions and of those that are named and still there."""
    file = _read(path)
    if names is None:
        return {"": file.whole}
    return {"": file.outside, **{_INSIDE + name: file.functions[name] for name in names if name in file.functions}}


def _imports_among(files: Mapping[Path, _Names]) -> str:
    """Return the hash of the names that these files, or these functions of them, import from one another."""
    found = []
    for path, names in files.items():
        file = _read(path)
        own = file.whole if names is None else digest(_hashes(path, names))
        used = None if names is None else file.used_outside.union(*(file.used[name] for name in names))
        found += [[own, name] for name, origin in file.imports if origin in files and (used is None or name in used)]
    return digest(sorted(found))


@dataclass(frozen=True)
class _File:
    """What a file of Python does, without its imports from other files: hashes, and which names are used."""

    whole: str
    outside: str  # outside its functions; of methods their names, as one may stand for another
    used_outside: frozenset[str]
    functions: Mapping[str, str]  # by qualified name
    used: Mapping[str, frozenset[str]]  # likewise
    lines: tuple[tuple[int, int, str], ...]  # of each definition: the first, the last, and its qualified name
    imports: frozenset[tuple[str, Path]]  # names from this package, each with the file it is from

    def functions_at(self, line: int) -> list[str]:
        """Return the function in which a line is, if it is in one."""
        return [name for first, last, name in self.lines if first <= line <= last]


@functools.lru_cache(maxsize=1024)
def _read(path: Path) -> _File:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = _Imports(path)
    tree = imports.visit(tree)
    whole = digest(normalised(tree))
    definitions = list(_definitions(tree))
    functions: dict[str, list[Any]] = {}
    used: dict[str, frozenset[str]] = {}
    lines = []
    for name, node in definitions:
        functions.setdefault(name, []).append(normalised(node))
        used[name] = used.get(name, frozenset()) | _names_in(node)
        lines.append((min(part.lineno for part in (node, *node.decorator_list)), node.end_lineno or node.lineno, name))
    outside = _WithoutFunctions().visit(tree)
    return _File(
        whole,
        digest(normalised(outside)),
        _names_in(outside),
        {name: digest(found) for name, found in functions.items()},
        used,
        tuple(lines),
        frozenset(imports.names),
    )


def _definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield functions and methods with their qualified names; what is defined in a function is part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield within + child.name, child
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, f"{within}{child.name}." if isinstance(child, ast.ClassDef) else within)


def _names_in(node: ast.AST) -> frozenset[str]:
    return frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))


class _WithoutFunctions(ast.NodeTransformer):
    """Takes functions out of a tree, and puts the names of methods in their places."""

    def visit_FunctionDef(self, _: ast.FunctionDef) -> None:
        """Leave it out."""

    def visit_AsyncFunctionDef(self, _: ast.AsyncFunctionDef) -> None:
        """Leave it out."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Keep which methods it has: one of them may stand for another class's."""
        methods = sorted(each.name for each in node.body if isinstance(each, _Function))
        self.generic_visit(node)
        node.body.append(ast.Expr(ast.Tuple([ast.Constant(name) for name in methods])))  # a string were a docstring
        return node


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
