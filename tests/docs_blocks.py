"""Blocks of code on pages: read, run, and compared with the output that the page shows.

- A block of Python runs on the CPU; blocks of one page share their names. A block ``text`` behind it is its output.
- A block ``console`` runs its ``flashmoe`` commands in this process; the lines behind each are its output.
- A block with ``title="NAME"`` is a file. A block ``diff`` changes the page's files for the next console block.
- ``<!-- not run: REASON -->`` before a block: Python is compiled, its imports and keyword arguments are looked up;
  commands are parsed.
- A line ``[...]`` in an output stands for any lines.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
import typer

from flashmoe_science import cli
from flashmoe_science.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n\n?)?"
    r'```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_ELISION = "[...]"
# What differs from run to run, and from one version of a compiler to another.
_VARIES = [
    (re.compile(r"\d{8}T\d{6}Z(-[\w.-]+-[0-9a-f]{6})?"), "RUN"),
    (re.compile(r"\d+(\.\d+)? (s|min)\b"), "TIME"),
    (re.compile(r"\d+ registers|\d+ files hashed|at most \d+%|inputs was \d+|\d+ B spilled|no spills"), "FIGURE"),
]


@dataclass(frozen=True)
class Block:
    """One block of code of a page, with where its text is."""

    language: str
    body: str
    span: tuple[int, int]
    reason: str = ""
    title: str = ""
    output: Block | None = None


def read_blocks(page: str) -> list[Block]:
    """Return the blocks of a page in their order; what a block of Python prints is its ``output``."""
    found = list(_BLOCK.finditer(page))
    blocks = []
    for match, after in zip(found, [*found[1:], None], strict=False):
        is_followed = after and after["language"] == "text" and not page[match.end() : after.start()].strip()
        output = Block("text", after["body"], after.span("body")) if after and is_followed else None
        blocks.append(
            Block(
                match["language"], match["body"], match.span("body"), match["reason"] or "", match["title"] or "",
                output if match["language"] == "python" else None,
            )
        )  # fmt: skip
    return blocks


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Return each command of a console block with the output that the page shows behind it."""
    parts = re.split(r"^\$ ", block.body, flags=re.MULTILINE)[1:]
    return [(line, output) for line, _, output in (part.partition("\n") for part in parts)]


def same_output(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed, but for line breaks, times and the like."""
    place, text = 0, _steady(printed)
    pieces = [_steady(piece) for piece in shown.split(_ELISION)]
    for piece in pieces:
        at = text.find(piece, place)
        if at < 0 or (at > 0 and piece is pieces[0]):
            return False
        place = at + len(piece)
    return not pieces[-1] or text.endswith(pieces[-1])


def _steady(text: str) -> str:
    for pattern, word in _VARIES:
        text = pattern.sub(word, text)
    return " ".join(text.split())


def check_python(code: str) -> None:
    """Compile code that is not run; look up its imports, and the keyword arguments of what comes from this package."""
    ours: dict[str, Any] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            with suppress(ModuleNotFoundError):
                module = importlib.import_module(node.module)
                found = {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
                ours |= found if node.module.startswith("flashmoe_science") else {}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            parameters = inspect.signature(ours[node.func.id]).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                assert {word.arg for word in node.keywords if word.arg} <= set(parameters), node.func.id


def check_command(line: str) -> None:
    """Parse a command that is not run; only ours, and that scripts are there."""
    words = shlex.split(line, comments=True)
    if words[0] == "python" and not words[1].startswith("-"):
        assert (ROOT / words[1]).is_file(), line
    if words[0] != "flashmoe":
        return
    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("flashmoe", words[1:2]), words[1:]
    while rest and hasattr(command, "get_command") and (verb := command.get_command(context, rest[0])):
        command, rest = verb, rest[1:]
    command.make_context(words[1], rest, parent=context)


class Page:
    """A page whose blocks run in their order, in ``folder``."""

    def __init__(self, path: Path, folder: Path, printed: Callable[[], str]) -> None:
        self._text = path.read_text(encoding="utf-8")
        self._folder = folder
        self._printed = printed
        self._names: dict[str, Any] = {"__name__": path.stem}
        self._files = {block.title: block.body for block in read_blocks(self._text) if block.title}
        self._changed: dict[str, str] = {}

    def check(self, runs_commands: bool = True) -> Iterator[tuple[tuple[int, int], str, str]]:
        """Run or check every block; yield where an output is in the page, what is shown and what was printed."""
        for name, body in self._files.items():
            (self._folder / name).write_text(body, encoding="utf-8")
        for block in read_blocks(self._text):
            if block.language == "toml":
                tomlkit.parse(block.body)
            elif block.language == "diff":
                self._change(block.body)
            elif block.language == "python" and (block.reason or block.title):
                check_python(block.body)
            elif block.language == "python":
                yield from self._run_python(block)
            elif block.language == "console":
                for line, _ in commands_of(block):
                    check_command(line)
                if runs_commands and not block.reason:
                    yield from self._run_commands(block)

    def _run_python(self, block: Block) -> Iterator[tuple[tuple[int, int], str, str]]:
        exec(compile(block.body, "page", "exec", dont_inherit=True), self._names)
        printed = self._printed()
        if block.output:
            yield block.output.span, block.output.body, printed
        else:
            assert printed == "", f"a block prints what the page does not show: {printed}"

    def _run_commands(self, block: Block) -> Iterator[tuple[tuple[int, int], str, str]]:
        for name, body in self._changed.items():
            (self._folder / name).write_text(body, encoding="utf-8")
        for line, shown in commands_of(block):
            words = shlex.split(line)
            assert words[0] == "flashmoe", f"only flashmoe runs here: {line}"
            cli.main(words[1:])
            start = self._text.index(f"$ {line}\n", block.span[0]) + len(line) + 3
            yield (start, start + len(shown)), shown, self._printed()
        for name in self._changed:
            (self._folder / name).write_text(self._files[name], encoding="utf-8")
        self._changed = {}

    def _change(self, diff: str) -> None:
        lines = diff.splitlines()
        before = "\n".join(line[1:] for line in lines if line[:1] != "+")
        after = "\n".join(line[1:] for line in lines if line[:1] != "-")
        (name,) = (name for name, body in self._files.items() if before in body)
        self._changed[name] = self._files[name].replace(before, after)
