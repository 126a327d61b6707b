"""What the verbs print to: data on stdout, log on stderr, and the progress of a long run.

Everything works without colour and without a terminal. Colour follows ``NO_COLOR`` and ``FORCE_COLOR``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from ..errors import EvidenceError, FlashmoeError, InputError
from ..proof.judge.judge import Verdict, VerdictStatus
from ..proof.records.evidence import Gate, Record
from ..proof.report.terminal import gate_lines, last_lines, verdict_lines
from ..proof.text import defused, foreign

_UNLIMITED = 10_000  # columns, where there is no terminal: a line stays one line, so that grep finds all of it
_SECONDS_BETWEEN_LINES = 10.0  # of progress, where there is no terminal
_SECONDS_OF_SILENCE = 1.0  # of a short step, where there is no terminal
_SECONDS_OF_PACE = 600.0  # the time left follows the pace of so many seconds: one case can take minutes
_THEME = Theme({"bar.complete": "cyan", "bar.finished": "cyan", "bar.pulse": "cyan", "progress.remaining": "dim"})


class _Console(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Show what nobody sees, whoever wrote it: the only escape sequences are those of styles."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(foreign(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Go on without output when the reader has gone: the exit code still counts."""
        self.quiet = True
        _silence(self.file)


class _Defused:
    """A stream of whole lines, none of which is a command to continuous integration."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(defused(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _silence(file: IO[str]) -> None:
    """Send what is still written to ``file`` nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _write(file: IO[str], text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:  # e.g. `flashmoe verify | head`: what the verb returns still counts
        _silence(file)


def _console(file: IO[str]) -> Console:
    width = None if file.isatty() or "COLUMNS" in os.environ else _UNLIMITED
    return _Console(
        file=cast("IO[str]", _Defused(file)), width=width, highlight=False, emoji=False, markup=False, theme=_THEME
    )


class Terminal:
    """The two streams of one verb.

    Args:
        as_json: stdout gets one JSON document and nothing else.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.log = _console(sys.stderr)
        self.out = self.log if as_json else _console(sys.stdout)

    def say(self, *things: RenderableType) -> None:
        """Print what happens on the way: on stdout, or, where that is for the JSON document, on stderr."""
        for thing in things:
            if self.out.is_terminal:
                self.out.print(thing)
                continue
            # rich fills the cells of a table with blanks up to its right edge.
            with self.out.capture() as captured:
                self.out.print(thing)
            lines = [line.rstrip() for line in captured.get().splitlines()]
            _write(self.out.file, "\n".join([*lines, ""]))

    def show(self, *things: RenderableType) -> None:
        """Print data for a reader. Under --json it is left out: the document says the same."""
        if not self.as_json:
            self.say(*things)

    @contextmanager
    def doing(self) -> Iterator[Callable[[str], None]]:
        """Show the step under way; elsewhere than on a terminal a line, once it takes a second, and now and then."""
        if not self.log.is_terminal:
            due = time.monotonic() + _SECONDS_OF_SILENCE

            def say(text: str) -> None:
                nonlocal due
                if time.monotonic() >= due:
                    due = time.monotonic() + _SECONDS_BETWEEN_LINES
                    self.log.print(text, style="dim", soft_wrap=True)

            yield say
            return
        with self.log.status("") as status:
            yield lambda text: status.update(Text(text))  # rich would obey the markup of a text

    def show_verdicts(self, verdicts: Sequence[Verdict], *, why: bool = False) -> None:
        """Print a line, or on a terminal a paragraph, for every verdict; in a pipe each line says everything."""
        for verdict in verdicts:
            self.show(verdict_lines(verdict, why=why, one_line=not self.out.is_terminal))

    def explain_stale(self, verdicts: Sequence[Verdict], repository: Path) -> None:
        """Say what a stale claim means, where there is one."""
        if not any(verdict.status is VerdictStatus.STALE for verdict in verdicts):
            return
        from ..proof.judge.staleness import ANOTHER_COPY, OWN_COPY, is_of_another_copy

        hint = "a stale claim holds for the commit that it names; a new run on its GPU shows it anew"
        if is_of_another_copy(repository):
            hint = f"{ANOTHER_COPY}, so what it runs on a GPU was not compared: {OWN_COPY}"
        self.log.print(f"hint: {hint}", soft_wrap=True)

    def show_conclusion(self, record: Record, verdicts: Sequence[Verdict]) -> None:
        """Print the verdict and its reason: on the claims, or how far the chain came."""
        judged = [verdict for verdict in verdicts if verdict.gate_failed is None]
        if judged:
            self.show_verdicts(judged, why=True)
        else:
            self.show(last_lines(record))

    def document(self, document: dict[str, Any]) -> None:
        """Print the one JSON document, where it was asked for."""
        if not self.as_json:
            return
        _write(sys.stdout, json.dumps(document, indent=2, allow_nan=False).replace("##", "#\\u0023") + "\n")

    def warn(self, message: str, hint: str = "") -> None:
        """Say on stderr what is wrong without ending the verb."""
        self.log.print(f"warning: {message}", style="yellow", soft_wrap=True)
        if hint:
            self.log.print(f"hint: {hint}", soft_wrap=True)

    def warn_of(self, error: FlashmoeError) -> None:
        """Say an error on stderr without ending the verb."""
        self.warn(error.message, error.hint)


def as_plain(model: BaseModel) -> dict[str, Any]:
    """Return a record or a verdict as plain JSON values, infinite errors included."""
    plain: dict[str, Any] = json.loads(model.model_dump_json())
    return plain


def check_writable(path: Path | None, *, makes_folder: bool = False) -> None:
    """Refuse a file that cannot be written, before a run is paid for whose results are to be in it.

    Raises ``InputError``.
    """
    if path is None:
        return
    folders = path.absolute().parents
    there = path if path.exists() else next(f for f in folders if f.exists() or not makes_folder)
    if path.is_dir() or not there.exists() or (there != path and not there.is_dir()) or not os.access(there, os.W_OK):
        what = f"{path} is a folder" if path.is_dir() else f"{there} is no folder that you may write"
        raise InputError(f"{path}: cannot be written: {what}")


def write_file(path: Path, text: str) -> None:
    """Write ``text`` as it is, line ends included. Raises ``EvidenceError``."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be written: {error.strerror}") from error


def short_path(path: Path) -> str:
    """Return ``path`` relative to the current folder where it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


class ChainProgress:
    """The progress of the seven gates: a bar with the time left on a terminal, a line now and then elsewhere.

    Fits the protocol ``Progress`` of ``proof/gates``.

    Args:
        terminal: To print to.
        clock: Returns seconds.
        host: The machine that every line names, where several run at the same time.
        on_start: Gets the name of each gate that begins.
    """

    def __init__(
        self,
        terminal: Terminal,
        *,
        clock: Callable[[], float] = time.monotonic,
        host: str = "",
        on_start: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._terminal = terminal
        self._on_start = on_start
        self._host = host
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._gate = ""
        self._total = 0
        self._hints: set[str] = set()
        self._started = self._last_line = 0.0

    def start(self, gate: str) -> None:
        """A gate begins."""
        self._on_start(gate)
        self._gate, self._total = gate, 0
        self._started = self._last_line = self._clock()
        if self._terminal.log.is_terminal and not self._host:
            self._bar = _bar(self._terminal.log)
            self._task = self._bar.add_task(gate, total=None, label="")
            self._bar.start()

    def advance(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps of the gate are finished; ``label`` is the one under way."""
        # A gate may learn of more work on the way; a total that shrank would make rich forget how fast the work goes.
        self._total = total = max(total, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, label=label)
            return
        now = self._clock()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._line(f"{done}/{total}{_time_left(done, total, now - self._started)} {label}".rstrip())

    def note(self, line: str) -> None:
        """Something worth a line of log happened."""
        self._line(line)

    def finish(self, gate: Gate) -> None:
        """A gate ended: its line is data, and stays."""
        self.close()
        lines = gate_lines(gate, said=self._hints)
        if self._host:
            table = Table.grid(padding=(0, 1, 0, 0))
            table.add_row(f"{self._host}:", lines)
            lines = table
        self._terminal.say(lines)
        self._hints.add(gate.hint)

    def close(self) -> None:
        """Take the bar away, whatever happened."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        words = ": ".join(word for word in (self._host, self._gate, text) if word)
        self._terminal.log.print(words, style="dim", soft_wrap=True)


def _bar(console: Console) -> Progress:
    label = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description:<8}", style="bold", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[label]}", style="dim", markup=False, table_column=label),
        console=console,
        speed_estimate_period=_SECONDS_OF_PACE,
        transient=True,
        expand=True,
    )


def _time_left(done: int, total: int, seconds: float) -> str:
    """Return the time left at the pace so far, e.g. `` (3 min left)``."""
    if not 0 < done < total:
        return ""
    left = seconds / done * (total - done)
    return f" ({left:.0f} s left)" if left < 100 else f" ({left / 60:.0f} min left)"
