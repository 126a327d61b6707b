"""A page about runs as Markdown: tables replace the plots.

What comes from a record is escaped, so that it stays text in a viewer that knows Markdown and HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..text import as_sentence, foreign
from .page import KERNEL_COLUMNS, Kernel, Page, RunPart, Said
from .page_plots import Table
from .page_speed import Speeds
from .terminal import shortened_kernel


def render_markdown(page: Page) -> str:
    """Return the page as Markdown."""
    if page.index is None:
        return "\n".join([f"# {escape(page.runs[0].title)}", "", *_run(page.runs[0], 2)]) + "\n"
    lines = [f"# {escape(page.title)}", "", *_table(page.index), "", "## Side by side", ""]
    for title, table in page.beside:
        lines += [escape(as_sentence(title)) + " " + escape(table.caption), "", *_table(table), ""]
    if not page.beside:
        lines += ["These runs share no problem that both timed against the same baseline.", ""]
    for number, run in enumerate(page.runs, 1):
        lines += [f"## {number}: {escape(run.title)}", "", *_run(run, 3), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def escape(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, on one line."""
    return foreign(text, "markdown")


def _run(run: RunPart, level: int) -> list[str]:
    mark = "#" * level
    lines = [f"{escape(run.facts)}. Run {_code(run.record.id)}.", "", f"**{_verdict(run.headline)}**", ""]
    lines += [f"{escape(as_sentence(note))}" for note in run.headline_notes] + ([""] if run.headline_notes else [])
    if not run.record.complete:
        lines += [f"This run is incomplete: {escape(run.record.incomplete_reason or 'no reason recorded')}", ""]

    def section(title: str, body: Iterable[str]) -> None:
        found = list(body)
        if found:
            lines.extend([f"{mark} {title}", "", *found, ""])

    section("Verdicts", (f"- {_full_verdict(verdict)}" for verdict in run.verdicts))
    section("Gates", _gates(run))
    section("Speed", _speed(run))
    for figure in run.growth:
        section(f"Time against size: {escape(figure.title)}, {escape(figure.note)}", _table(figure.table))
    section("Roofline", [escape(run.roofline.note), "", *_table(run.roofline.table)] if run.roofline else [])
    section("Kernels launched", _kernels(run.launches))
    section("Clocks, power, temperature", _table(run.sensors.table) if run.sensors else [])
    section("Memory", [escape(as_sentence(run.memory.caption)), "", *_table(run.memory)] if run.memory else [])
    section("Accuracy", _accuracy(run))
    section("Environment", (f"- {escape(name)}: {escape(value)}" for name, value in run.environment))
    return lines[:-1]


def _verdict(said: Said) -> str:
    return ": ".join(escape(part) for part in (said.word, said.sentence) if part)


def _full_verdict(said: Said) -> str:
    parts = (said.sentence, as_sentence(said.figure), as_sentence(said.reason))
    return f"**{escape(said.word)}**: {' '.join(escape(part) for part in parts if part)}"


def _gates(run: RunPart) -> list[str]:
    rows = []
    for gate in run.gates:
        took = "" if gate.status.value == "not reached" else f"{gate.seconds:.1f} s"
        hint = f" hint: {gate.hint}" if gate.hint else ""
        rows.append((gate.name, gate.status.value, f"{gate.summary}{hint}", took))
    return _table(Table("", ("gate", "result", "what it showed", "took"), rows, words=3))


def _speed(run: RunPart) -> list[str]:
    lines = []
    for speeds in run.speeds:
        lines += [f"{speeds.kind.capitalize()} time, medians of one call:", ""]
        lines += [*_table(_speed_table(run, speeds)), ""]
    lines += [f"- {escape(text)}" for text in (*(speeds.legend for speeds in run.speeds[:1]), *run.legends)]
    lines += [f"- {escape(run.control.reason)}"] if run.control else []
    lines += [
        f"- {escape(each.arm)} {each.status}: {escape(each.reason)} ({escape(each.where)})" for each in run.unmeasured
    ]
    return lines


def _speed_table(run: RunPart, speeds: Speeds) -> Table:
    columns = ("case", "baseline", run.record.subject.name, "its time", "speedup")
    rows = [(row.case, row.baseline, row.ours, row.theirs, row.said) for row in speeds.rows]
    return Table("", columns, rows, words=2)


def _kernels(kernels: Sequence[Kernel]) -> list[str]:
    rows = [
        (kernel.arm, shortened_kernel(kernel.name), *cells[:1], *cells[1:])
        for kernel in kernels
        for cells in kernel.rows
    ]
    return _table(Table("", ("arm", "kernel", *KERNEL_COLUMNS), rows, words=3)) if rows else []


def _accuracy(run: RunPart) -> list[str]:
    if not run.accuracy:
        return []
    columns = ["case", "correct", "same bits", "max error", "allowed", "share"]
    columns += [f"{name}, share" for name in run.record.baselines]
    columns += ["note"] if run.accuracy_notes else []
    rows = [
        (
            r.case,
            r.correct,
            r.same_bits,
            r.error,
            r.allowed,
            r.said,
            *r.baselines,
            *([r.note] if run.accuracy_notes else []),
        )
        for r in run.accuracy
    ]
    return [escape(as_sentence(run.accuracy_count)), "", *_table(Table("", columns, rows, words=3))]


def _table(table: Table) -> list[str]:
    rule = ["---" if number < table.words else "---:" for number in range(len(table.columns))]
    return [_row(map(escape, table.columns)), _row(rule), *(_row(map(escape, row)) for row in table.rows)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    """Return text in a code span, or, where it holds a backtick, escaped."""
    return escape(text) if "`" in text or "\n" in text or text != foreign(text) else f"`{text}`"
