"""A page about runs as Markdown.

What comes from a record is escaped, so that it stays text in a viewer that knows Markdown and HTML.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..text import as_sentence, foreign
from .page import Facts, Lines, Note, Page, RunPart, Table


def render_markdown(page: Page) -> str:
    """Return the page as Markdown."""
    if page.index is None:
        return "\n".join([f"# {escape(page.runs[0].title)}", "", *_run(page.runs[0], 2)]).rstrip("\n") + "\n"
    lines = [f"# {escape(page.title)}", "", *_table(page.index), "", "## Side by side", ""]
    for title, table in page.beside:
        lines += [escape(as_sentence(title)) + " " + escape(table.caption), "", *_table(table), ""]
    if not page.beside:
        lines += [page.nothing_beside, ""]
    for number, run in enumerate(page.runs, 1):
        lines += [f"## {number}: {escape(run.title)}", "", *_run(run, 3)]
    return "\n".join(lines).rstrip("\n") + "\n"


def escape(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, on one line."""
    return foreign(text, "markdown")


def _run(run: RunPart, level: int) -> list[str]:
    headline = ": ".join(escape(part) for part in (run.headline.word, run.headline.sentence) if part)
    lines = [f"{escape(run.facts)}. Run {_code(run.record.id)}.", "", f"**{headline}**", ""]
    lines += [line for note in run.notes for line in (escape(as_sentence(note)), "")]
    if not run.record.complete:
        lines += [f"This run is incomplete: {escape(run.record.incomplete_reason or 'no reason recorded')}", ""]
    for section in run.sections:
        lines += [f"{'#' * level} {section.title}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""] if not isinstance(block, Lines) else []
    return lines


def _block(block: Note | Lines | Facts | Table) -> list[str]:
    if isinstance(block, Note):
        word = f"**{escape(block.word)}**: " if block.word else ""
        parts = (block.sentence, as_sentence(block.figure), block.text)
        return [word + " ".join(escape(part) for part in parts if part)]
    if isinstance(block, Facts):
        return [f"- {escape(name)}: {escape(value)}" for name, value in block.facts]
    assert isinstance(block, Table)
    return [*([escape(as_sentence(block.caption)), ""] if block.caption else []), *_table(block)]


def _table(table: Table) -> list[str]:
    rule = ["---" if number < table.words else "---:" for number in range(len(table.columns))]
    return [_row(map(escape, table.columns)), _row(rule), *(_row(map(escape, row)) for row in table.rows)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    """Return text in a code span, or, where it holds a backtick, escaped."""
    return escape(text) if "`" in text or "\n" in text or text != foreign(text) else f"`{text}`"
