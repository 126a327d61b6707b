"""A diagnosis for the terminal, causes first. It computes nothing but the text of numbers."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..judge.rows import format_bytes, format_seconds
from ..report.terminal import new_grid
from .observations import CaseDiagnosis, Diagnosis, Finding, Kernel, Observations, Status

_STYLE = {Status.CONFIRMED: "bold red", Status.RULED_OUT: "green", Status.CANNOT_TELL: "yellow"}
_ORDER = (Status.CONFIRMED, Status.CANNOT_TELL, Status.RULED_OUT)


def failed_lines(diagnosis: Diagnosis) -> RenderableType:
    """Return why nothing could be observed."""
    gate = diagnosis.failed
    assert gate is not None
    lines: list[RenderableType] = [Text.assemble(("gate failed   ", "bold red"), f"{gate.name}: {gate.summary}")]
    lines += [Text(f"  {line}") for line in gate.details]
    if gate.hint:
        lines.append(Text.assemble(("hint", "cyan"), f": {gate.hint}"))
    return Group(*lines)


def case_lines(case: CaseDiagnosis) -> RenderableType:
    """Return the diagnosis of one call: its causes, then every hypothesis."""
    seen = case.observations
    by_name = {finding.hypothesis: finding for finding in case.findings}
    lines: list[RenderableType] = [_headline(seen)]
    if "times" in seen.missing:
        lines.append(Text(f"not timed: {seen.missing['times']}", "yellow"))
    lines.append(Padding(_kernel_table(seen), (0, 0, 0, 2)))
    lines.append(Text(""))
    lines.append(_causes(case, by_name))
    lines += [Text(""), Text("Every hypothesis, with the numbers that decide:", "bold")]
    table = new_grid(11, 20)
    for status in _ORDER:
        for finding in case.findings:
            if finding.status is status:
                table.add_row(Text(status.value, _STYLE[status]), finding.hypothesis, finding.explanation)
    lines.append(Padding(table, (0, 0, 0, 2)))
    return Group(*lines)


def _headline(seen: Observations) -> Text:
    parts = [f" on {seen.chip.name}" if seen.chip else ""]
    times = seen.times
    if times.call is not None:
        parts.append(f": {format_seconds(times.call)} a call")
        if times.device is not None:
            parts.append(f", {format_seconds(times.device)} of it the GPU's")
        for baseline in seen.baselines:
            if baseline.times.call is not None:
                parts.append(f"; {baseline.name} {format_seconds(baseline.times.call)}")
                if baseline.times.device is not None:
                    parts.append(f", {format_seconds(baseline.times.device)}")
    return Text.assemble((seen.case, "bold"), "".join(parts))


def _kernel_table(seen: Observations) -> RenderableType:
    if not seen.kernels:
        return Text(f"no kernel is known: {seen.why_missing('launches')}", "yellow")
    return Group(*(Text(_kernel(kernel), "dim") for kernel in seen.kernels))


def _kernel(kernel: Kernel) -> str:
    parts = [] if kernel.grid is None else ["grid " + "x".join(map(str, kernel.grid))]
    parts += [] if kernel.threads is None else [f"{kernel.threads} threads"]
    parts += [] if not kernel.registers else [f"{kernel.registers} registers"]
    if kernel.shared_memory_bytes is not None:
        parts.append(f"{format_bytes(kernel.shared_memory_bytes)} shared memory")
    parts += [] if kernel.seconds is None else [format_seconds(kernel.seconds)]
    parts += [] if kernel.count == 1 else [f"launched {kernel.count} times"]
    return f"{kernel.name}: {', '.join(parts) or 'nothing is known of its launch'}"


def _causes(case: CaseDiagnosis, by_name: dict[str, Finding]) -> RenderableType:
    if not case.causes:
        open_ones = [finding for finding in case.findings if finding.status is Status.CANNOT_TELL]
        noun = "hypothesis" if len(open_ones) == 1 else "hypotheses"
        return Text(f"No cause is confirmed; {len(open_ones)} {noun} cannot be told here.", "bold yellow")
    lines: list[RenderableType] = [Text("Causes, by the part of a call that each is shown to explain:", "bold")]
    call = case.observations.times.call
    for number, name in enumerate(case.causes, start=1):
        finding = by_name[name]
        table = new_grid(3, right=(0,))
        share = "part not known" if finding.share is None else f"{finding.share:.0%}"
        if finding.share is not None and call is not None:
            share += f", {format_seconds(finding.share * call)}"
        table.add_row(f"{number}.", Text.assemble((name, "bold red"), f" ({share}): {finding.explanation}"))
        table.add_row("", Text.assemble(("try", "cyan"), f": {finding.advice}"))
        if finding.most is not None:
            table.add_row("", Text.assemble(("at most", "cyan"), f": {finding.most:.2f}x ({finding.bound})"))
        lines.append(table)
    if case.overlap:
        lines.append(Text(case.overlap))
    return Group(*lines)
