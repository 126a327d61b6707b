"""A comparison, and a history, for the terminal. It computes nothing: numbers come from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..compare.compare import CaseComparison, Comparison, Effect
from ..compare.history import History
from ..judge.rows import format_ratio, format_seconds
from ..text import counted
from .terminal import new_grid, new_table

_LISTED = 3  # cases by name; more are counted
_STYLE = {
    Effect.FASTER: "bold green",
    Effect.SLOWER: "bold red",
    Effect.SAME: "green",
    Effect.UNDECIDED: "bold yellow",
}


def comparison_lines(comparison: Comparison) -> RenderableType:
    """Return the revisions, a row for every case and kind of time, and the verdict over all."""
    head = new_grid(0)
    how = "rounds interleaved in one run" if comparison.paired else "two runs, not paired"
    how = f"; {how}" if comparison.cases else ""
    for label, text in (
        ("A", comparison.a),
        ("B", comparison.b),
        ("subject", f"{comparison.subject}, suite {comparison.suite}{how}"),
    ):
        head.add_row(Text(label, "dim"), text)
    parts: list[RenderableType] = [head, ""]
    if comparison.cases:
        parts += [_case_table(comparison), Text(_legend(comparison), "dim"), ""]
    verdict = new_grid(9)
    word = "gate failed" if comparison.gate_failed else comparison.effect.value
    verdict.add_row(Text(word, _STYLE[comparison.effect]), comparison.reason)
    for kind, mean in comparison.geometric_means.items():
        verdict.add_row("", Text(f"geometric mean, {kind}: {format_ratio(mean)}; it decides nothing", "dim"))
    for note in comparison.notes:
        verdict.add_row("", Text(f"note: {note}", "dim"))
    return Group(*parts, verdict)


def history_lines(history: History) -> RenderableType:
    """Return a row for every run, every change between two of them, and what all that shows."""
    over = history.cases[0] if len(history.cases) == 1 else f"geometric mean of {counted(len(history.cases), 'case')}"
    head = f"{history.subject} over {history.baseline}, suite {history.suite}, {history.metric} time: {over}"
    runs = new_table("run", "commit", "speedup", "level", left=2)
    for point in history.points:
        runs.add_row(point.run, point.commit[:12], f"{point.speedup:.3f}x", str(point.level + 1))
    grid = new_grid(9)
    for change in history.changes:
        new = change.chance is not None
        shift = format_ratio(change.interval) if change.interval else f"{change.shift:.3f}x"
        chance = f", chance {change.chance:.2g}" if change.chance is not None else ""
        where = f"{change.before} -> {change.after}: {shift}{chance}"
        grid.add_row(Text(change.label, "bold yellow" if new else "dim"), Text(f"{where}\n{change.reason}"))
    for note in history.notes:
        grid.add_row(Text("note", "dim"), Text(note, "dim"))
    return Group(head, "", runs, "", grid, Text(history.verdict, "bold"))


def _case_table(comparison: Comparison) -> RenderableType:
    table = new_table("case", "time", "A", "B", "A / B", "B is", left=2)
    for case in comparison.cases:
        table.add_row(
            case.name,
            case.metric,
            *_times(case),
            format_ratio(case.ratio),
            Text(case.effect.value, _STYLE[case.effect]),
        )
    reasons = _reasons(comparison.cases)
    return Group(table, *reasons) if reasons else table


def _reasons(cases: Sequence[CaseComparison]) -> list[RenderableType]:
    """Return why cases are undecided, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for case in cases:
        if case.reason:
            by_reason.setdefault(case.reason, []).append(f"{case.name}, {case.metric}")
    lines: list[RenderableType] = []
    for reason, names in by_reason.items():
        where = "; ".join(names) if len(names) <= _LISTED else f"{len(names)} of {len(cases)}"
        lines.append(Text.assemble(("undecided", "yellow"), f" ({where}): {reason}"))
    return lines


def _times(case: CaseComparison) -> tuple[str, str]:
    if case.seconds is None:
        return "", ""
    return format_seconds(case.seconds[0]), format_seconds(case.seconds[1])


def _legend(comparison: Comparison) -> str:
    low, high = 1 / (1 + comparison.tolerance), 1 + comparison.tolerance
    return (
        f"A / B: {comparison.quantity}; intervals hold together at 95 %\n"
        f"same: all of the interval within {low:.4g} to {high:.4g} (--tolerance {comparison.tolerance:.3g})"
    )
