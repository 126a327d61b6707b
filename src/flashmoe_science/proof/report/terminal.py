"""Records, verdicts and comparisons for the terminal. It computes nothing: numbers come from elsewhere.

Everything is ASCII, but for the lines of a table, and says the same without colour.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..compare.compare import CaseComparison, Comparison, Effect
from ..compare.history import History
from ..judge.judge import Verdict, VerdictStatus, holds
from ..judge.limits import not_seen
from ..judge.rows import (
    ArmRow,
    accuracy_rows,
    arm_rows,
    by_role,
    commit_words,
    default_kind,
    format_bytes,
    format_rate,
    format_ratio,
    format_seconds,
    is_lowest,
    kinds_measured,
    lowest_case,
    memory_rows,
    unmeasured,
)
from ..judge.run_verdicts import EXPECTATION, last_word
from ..records.evidence import Arm, CaseRecord, Gate, GateStatus, Record, Rounds, TimeKind
from ..records.store import RunSummary
from ..text import counted, cut_name

if TYPE_CHECKING:
    from ..judge.consistency import Check as ConsistencyCheck
    from ..measure.doctor import Check

_GATE_STYLE = {
    GateStatus.PASSED: "green",
    GateStatus.FAILED: "bold red",
    GateStatus.NOT_POSSIBLE: "yellow",
    GateStatus.NOT_REACHED: "dim",
}
_VERDICT_STYLE = {
    VerdictStatus.DEMONSTRATED: "bold green",
    VerdictStatus.STALE: "bold yellow",
    VerdictStatus.REFUTED: "bold red",
    VerdictStatus.INCONCLUSIVE: "bold yellow",
    VerdictStatus.ASSERTED: "bold yellow",
    VerdictStatus.INVALID: "bold magenta",
}
_EFFECT_STYLE = {
    Effect.FASTER: "bold green",
    Effect.SLOWER: "bold red",
    Effect.SAME: "green",
    Effect.UNDECIDED: "bold yellow",
}
_DETAILS_OF_A_FAILURE = 8
_LISTED = 3  # cases of a comparison by name; more are counted
_UNDER_STATUS = 9  # columns


def new_grid(*widths: int, right: Iterable[int] = ()) -> Table:
    """Return a table without lines: columns of at least these widths, the last one wraps."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for number, width in enumerate(widths):
        grid.add_column(min_width=width, no_wrap=True, justify="right" if number in right else "left")
    grid.add_column(overflow="fold")
    return grid


def gate_lines(gate: Gate, *, verbose: bool = False, said: Container[str] = ()) -> RenderableType:
    """Return the outcome of one gate, its hint, and its facts after a failure or with ``verbose``.

    Hints in ``said`` are left out: the reader has them.
    """
    grid = new_grid(7, 17, 8, right=[2])
    style = _GATE_STYLE[gate.status]
    seconds = "" if gate.status is GateStatus.NOT_REACHED else f"{gate.seconds:.1f} s"
    grid.add_row(Text(gate.name, "bold"), Text(gate.status.value, style), Text(seconds, "dim"), gate.summary)
    failed = gate.status is GateStatus.FAILED
    details = [line for line in gate.details if line not in gate.summary]  # mostly its first failure
    shown = details if verbose else details[:_DETAILS_OF_A_FAILURE] if failed else []
    below: list[RenderableType] = [Text(line, "" if failed else "dim") for line in shown]
    if failed and len(details) > len(shown):
        below.append(Text(f"... and {counted(len(details) - len(shown), 'more line')} in the record", "dim"))
    if gate.hint and gate.hint not in said:
        below.append(Text.assemble(("hint", "cyan"), f": {gate.hint}"))
    return Group(grid, Padding(Group(*below), (0, 0, 0, _UNDER_STATUS))) if below else grid


def record_checks(path: str, checks: Iterable[ConsistencyCheck]) -> RenderableType:
    """Return every check of a record: its name, how it ended, and why."""
    grid = new_grid(16, 13)
    style = {"passed": "green", "contradiction": "bold red", "not checked": "yellow"}
    for check in checks:
        grid.add_row(check.name, Text(check.result, style[check.result]), check.detail)
    return Group(Text(path, "bold"), Padding(grid, (0, 0, 0, 2)))


def head_lines(record: Record) -> RenderableType:
    """Return what was on trial, where and how."""
    subject, here = record.subject, record.environment
    against = f", against {', '.join(record.baselines)}" if record.baselines else ""
    driver = [f"driver {here.driver}"] if here.driver else []
    versions = [f"{name} {version}" for name, version in here.versions.items() if name in ("torch", "triton")]
    machine = [here.place or "no GPU", *driver, here.platform, f"Python {here.python}", *versions]
    lines: list[tuple[str, str | Text]] = [
        ("run", Text(record.id, "bold")),
        ("command", record.command),
        ("subject", f"{subject.name} ({subject.operator}), {subject.entry_point}"),
        ("suite", f"{record.suite}{against}"),
        ("machine", ", ".join(machine)),
        ("commit", commit_words(record, letters=12)),
        *(("note", f"goes on with {resumed.run}") for resumed in record.resumed),
    ]
    if not record.complete:
        lines.append(("note", Text(f"incomplete: {record.incomplete_reason}", "yellow")))
    grid = new_grid(8)
    for label, said in lines:
        grid.add_row(Text(label, "dim"), said)
    return grid


def case_table(record: Record, kind: TimeKind | None = None) -> RenderableType:
    """Return a row for every case and arm: times, and speedups in ``kind`` of time; without times, the errors."""
    kind = kind or default_kind(record)
    return _accuracy_table(record) if kind is None else _speed_table(record, kind)


def new_table(*columns: str, left: int = 1, rule: bool = True) -> Table:
    """Return an empty table whose first ``left`` columns hold text, the others numbers."""
    # Two blanks between columns: the widest table, with all three times, fits 100 columns.
    style, blanks = (box.SIMPLE_HEAD, 1) if rule else (None, 2)  # a rule is a blank wide where it crosses
    table = Table(box=style, show_edge=False, pad_edge=False, padding=(0, blanks, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        text = number < left
        table.add_column(column, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def _speed_table(record: Record, kind: TimeKind) -> RenderableType:
    kinds = kinds_measured(record)
    rows = [(row.case, _speed_cells(row, kinds)) for row in arm_rows(record, kind)]
    columns = (*kinds, f"speedup, {kind}", "TFLOP/s", "TB/s")
    legend = "speedup: an arm's time / the subject's (a control's / its original's), with its 95 % interval"
    medians = "times are medians; a speedup is of rounds, in which both ran, so the quotient of two medians may differ"
    others = [f"speedups of {each} time: flashmoe show RUN --time {each}" for each in kinds if each != kind]
    lines = [legend, medians, *others, *what_is_in_cache(record), *conditions(record)]
    return Group(_by_case(columns, rows), Text("\n".join(lines), "dim"))


def memory_table(record: Record) -> RenderableType:
    """Return what one call of every arm allocates, case by case, and how that compares with the subject's."""
    rows: list[tuple[CaseRecord, Sequence[RenderableType]]] = []
    for row in memory_rows(record):
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        rows.append((row.case, [_arm_name(row.arm), f"{(row.arm.peak_bytes or 0) / 2**20:,.3f} MiB", ratio]))
    legend = "peak memory: what one call allocates, beyond its inputs; a control's is compared with its original's"
    return Group(_by_case(("peak memory", "times the subject's"), rows), Text(legend, "dim"))


def _by_case(columns: Sequence[str], rows: Iterable[tuple[CaseRecord, Sequence[RenderableType]]]) -> Table:
    """Return rows of arms below the names of their cases."""
    table, shown = new_table("case and arm", *columns), None
    for case, cells in rows:
        if case is not shown:
            table.add_row(Text(case.name, "bold"))
            shown = case
        table.add_row(*cells)
    return table


def _arm_name(arm: Arm) -> Text:
    style = {"subject": "cyan", "control": "dim"}.get(arm.role, "")
    return Text(f"  {arm.name}{' (control)' if arm.role == 'control' else ''}", style)


def what_is_in_cache(record: Record) -> list[str]:
    """Return why kernel time may lie above graph time, where both were taken."""
    kinds = kinds_measured(record)
    if "kernel" not in kinds or len(kinds) == 1 or record.settings.cache != "cold":
        return []
    others = " and ".join(kind for kind in kinds if kind != "kernel")
    return [
        f"kernel: L2 was flushed before each call; {others}: call after call over rotating inputs, which L2 may hold"
    ]


def _speed_cells(row: ArmRow, kinds: Sequence[TimeKind]) -> list[RenderableType]:
    arm = row.arm
    name = _arm_name(arm)
    if arm.status != "measured":
        return [name, *[""] * len(kinds), Text(arm.status, "yellow"), "", ""]
    times = [format_seconds(arm.rates[k].seconds) if k in arm.rates else "" for k in kinds]
    speed = [format_rate(row.rates.tflops), format_rate(row.rates.tbytes_per_second)] if row.rates else ["", ""]
    return [name, *times, Text(format_ratio(row.ratio), _ratio_style(row)), *speed]


def _ratio_style(row: ArmRow) -> str:
    found = row.ratio.interval if row.ratio else None
    if found is None or row.arm.role != "baseline":
        return "dim" if row.arm.role == "control" else ""
    return "green" if found.low > 1 else "red" if found.high < 1 else "yellow"


def conditions(record: Record) -> list[str]:
    """Return under which conditions the card worked, as far as they were recorded, and what times cannot show."""
    rounds = [rounds for case in record.cases for rounds in case.rounds]
    lines = []
    clocks = [clock for r in rounds for clock in r.sm_clock_mhz if clock is not None]
    if clocks:
        lines.append(f"SM clock {min(clocks)} to {max(clocks)} MHz")
    throttled = [reason for r in rounds for reason in r.throttle if reason]
    if throttled:
        total = sum(len(r.throttle) for r in rounds)
        reasons = ", ".join(sorted(set(throttled)))
        lines.append(f"throttled in {len(throttled)} of {total} rounds: {reasons}")
    shares = [skew / slowest for r in rounds for skew, slowest in _skews(r, record.subject.name)]
    if shares:
        what = "a time is that of the slowest rank; the fastest took"
        lines.append(f"{what} {median(shares):.1%} less of it, at most {max(shares):.1%}")
    return [*lines, *filter(None, [not_seen(record)])]


def _skews(rounds: Rounds, arm: str) -> Iterator[tuple[float, float]]:
    """Yield how much longer the slowest rank took than the fastest, and its seconds."""
    for kind, columns in rounds.seconds.items():
        if arm in columns:
            yield from zip(rounds.skew(kind, arm), columns[arm], strict=False)


def _accuracy_table(record: Record) -> RenderableType:
    rows = accuracy_rows(record)
    notes = [row.note for row in rows]
    if all(row.correct == "not shown" and not row.stood_in for row in rows) and len(set(notes)) == 1:
        return f"none of {counted(len(rows), 'case')} was checked{f': {notes[0]}' if notes[0] else ''}"
    table = new_table("case", "correct", "max error", "allowed")
    table.add_column("note", overflow="fold")
    style = {"yes": "green", "no": "bold red", "not shown": "yellow", "of a stand-in": "yellow"}
    for row, before in zip(rows, ["", *notes], strict=False):
        note = "the same" if row.note and row.note == before else row.note
        table.add_row(row.case, Text(row.correct, style[row.correct]), row.error, row.allowed, note)
    return table


def unmeasured_lines(record: Record) -> RenderableType | None:
    """Return why arms have no times, each reason once with the cases that it is about; None when all have."""
    found = unmeasured(record)
    if not found:
        return None
    grid = new_grid()
    for each in found:
        grid.add_row(Text.assemble((f"{each.arm} {each.status}", "yellow"), f": {each.reason} ({each.where})"))
    return grid


def launch_table(record: Record) -> RenderableType:
    """Return the kernels that every arm really launched, case by case."""
    table = new_table("case and arm", "kernel", "grid", "block", "registers", "shared", left=2)
    for case in record.cases:
        launched = [arm for arm in by_role(case.arms) if arm.launches and arm.role != "control"]
        if launched:
            table.add_row(Text(case.name, "bold"))
        for arm in launched:
            for rank, launches in enumerate([arm.launches, *arm.rank_launches]):
                shown = f"  {arm.name}, rank {rank}" if arm.rank_launches else f"  {arm.name}"
                for number, launch in enumerate(launches):
                    times = f"{launch.count} x " if launch.count != 1 else ""
                    name = f"{times}{cut_name(launch.name)}"
                    grid, block = (",".join(map(str, size)) for size in (launch.grid, launch.block))
                    memory = format_bytes(launch.shared_memory_bytes)
                    table.add_row("" if number else shown, name, grid, block, str(launch.registers), memory)
    return table


def figure(verdict: Verdict) -> str:
    """Return the number that the verdict turns on, e.g. ``lowest of 13 cases 2.31x [2.28, 2.35]``.

    The case that decides has the interval that ends lowest. It is called the lowest only where its speedup is.
    """
    lowest = lowest_case(verdict)
    if verdict.claim.scope == "geometric mean" and verdict.geometric_mean:
        return f"geometric mean of {counted(len(verdict.cases), 'case')} {format_ratio(verdict.geometric_mean)}"
    if lowest is None:
        return "no figure"
    word = "lowest" if is_lowest(verdict, lowest) else "lowest interval"
    return f"{word} of {counted(len(verdict.cases), 'case')} {format_ratio(lowest.interval)}"


def rule_lines(verdicts: Sequence[Verdict]) -> RenderableType:
    """Return for each claim by which rules it was judged, and why it could not be made from its record today."""
    grid = new_grid(max((len(verdict.claim.id) for verdict in verdicts), default=0))
    for verdict in verdicts:
        today = f"refused: {verdict.refused_today}" if verdict.refused_today else "accepted"
        grid.add_row(Text(verdict.claim.id), Text(f"{verdict.rule or 'no record'}; as a new claim today {today}"))
    return grid


def verdict_lines(verdict: Verdict, *, one_line: bool = False, why: bool = False) -> RenderableType:
    """Return the verdict, sentence, figure and evidence of a claim.

    A claim that does not hold says why; ``why`` adds the reason to every claim.
    """
    status = Text(verdict.status.value, _VERDICT_STYLE[verdict.status])
    named = "" if verdict.claim.id == EXPECTATION else f" ({verdict.claim.id})"
    parts = [Text.assemble(verdict.claim.sentence, (named, "dim"))]
    for part in verdict.by_gpu or [verdict]:
        if part.record is not None:
            where = f"{part.claim.gpu[0]} {part.status.value}, " if verdict.by_gpu else ""
            parts.append(Text(f"{where}{figure(part)}; {part.record}", "dim"))
    if why or not holds(verdict):
        parts.append(Text(verdict.reason))
        if verdict.signature:
            parts.append(Text(verdict.signature, "dim"))
        if verdict.limits:
            parts.append(Text(f"not seen: {'; '.join(verdict.limits)}", "dim"))
    elif verdict.notes:
        parts.append(Text("; ".join(verdict.notes)))
    grid = new_grid(12)
    grid.add_row(status, Text(" | " if one_line else "\n").join(parts))
    return grid


def last_lines(record: Record) -> RenderableType:
    """Return how far the chain came, for a run that no claim is judged by. The gates above say why."""
    word, sentence = _last_word(record)
    grid = new_grid(12)
    grid.add_row(word, sentence.partition("; ")[0] if record.failed_gate else sentence)
    return grid


def _last_word(record: Record) -> tuple[Text, str]:
    word, sentence = last_word(record)
    return Text(word, "bold red" if word == "gate failed" else "bold yellow"), sentence


def outcome_table(outcomes: Sequence[tuple[Record, Sequence[Verdict]]]) -> RenderableType:
    """Return a line for each of several runs: the subject, the gate that stopped it or the verdict, and why."""
    grid = new_grid(max((len(record.subject.name) for record, _ in outcomes), default=0), 12)
    for record, verdicts in outcomes:
        rows = [
            (Text(verdict.status.value, _VERDICT_STYLE[verdict.status]), f"{verdict.claim.sentence}: {figure(verdict)}")
            for verdict in verdicts
            if verdict.gate_failed is None
        ]
        for number, row in enumerate(rows or [_last_word(record)]):
            grid.add_row(Text("" if number else record.subject.name, "bold"), *row)
    return grid


def host_table(runs: Mapping[str, Record]) -> RenderableType:
    """Return a row for every case and a column for every machine: its time, and its speedup over the first baseline.

    Args:
        runs: The records by the machine's name. All are of one request.
    """
    columns = {name: _host_cells(record) for name, record in runs.items()}
    cases = list(dict.fromkeys(case for cells in columns.values() for case in cells))
    heads = ["case"]
    for name, record in runs.items():
        kind, gpu = default_kind(record), record.environment.gpu
        over = f", {kind}, speedup over {record.baselines[0]}" if kind and record.baselines else ""
        heads.append(f"{name}: {gpu.name if gpu else 'no GPU'}{over}")
    return plain_table(heads, [[case, *(cells.get(case, "") for cells in columns.values())] for case in cases])


def _host_cells(record: Record) -> dict[str, str]:
    kind = default_kind(record)
    cells = {case.name: {True: "correct", False: "wrong", None: "not shown"}[case.correct] for case in record.cases}
    for row in arm_rows(record, kind) if kind else ():
        if row.arm.role == "subject":
            cells[row.case.name] = f"{format_seconds(row.rates.seconds)}, no speedup" if row.rates else row.arm.status
        elif row.arm.name in record.baselines[:1] and row.ratio and cells[row.case.name].endswith("no speedup"):
            cells[row.case.name] = cells[row.case.name].replace("no speedup", format_ratio(row.ratio))
    return cells


def count_line(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims have which verdict, e.g. ``3 claims: 2 demonstrated, 1 refuted``."""
    counts = {status: sum(verdict.status is status for verdict in verdicts) for status in VerdictStatus}
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return counted(len(verdicts), "claim") + (f": {said}" if said else "")


def run_table(runs: Sequence[RunSummary]) -> RenderableType:
    """Return one row for every run."""
    table = new_table("run", "GPU", "result", "measured", "kept in", left=3)
    for run in runs:
        gpu = run.gpu.removeprefix("NVIDIA ") or "none"
        style = "red" if run.result.endswith("failed") else ""
        result = Text(run.result + ("" if run.complete else ", incomplete"), style)
        table.add_row(run.id, gpu, result, f"{run.measured} of {run.cases}", run.origin.partition("/")[0])
    return table


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Return a table of words, without a rule: in a pipe it would be as long as the longest sentence."""
    table = new_table(*columns, left=len(columns), rule=False)
    for row in rows:
        table.add_row(*row)
    return table


def check_lines(check: Check, width: int) -> RenderableType:
    """Return the line of a check, with its name in ``width`` columns, and its hint below."""
    grid = new_grid(width, 7)
    words = {True: Text("ok", "green"), False: Text("trouble", "bold red"), None: Text("none", "yellow")}
    grid.add_row(Text(check.name, "bold"), words[check.ok], check.text)
    if check.hint:
        grid.add_row("", "", Text.assemble(("hint", "cyan"), f": {check.hint}"))
    return grid


def plan_lines(text: str) -> list[RenderableType]:
    """Return the lines of a plan; wrapped text stays to the right of the first word."""
    title, *lines = text.splitlines()
    return [title, *map(_plan_line, lines)]


def _plan_line(line: str) -> RenderableType:
    word, _, rest = line.strip().partition(" ")
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=9, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(f"  {word}", rest.strip())
    return grid


def compile_line(
    *, kernel: str, registers: int, spill_bytes: int, shared_memory_bytes: int, seconds: float
) -> RenderableType:
    """Return what compiling one kernel showed, in the style of a plan's own lines."""
    spills = f"{format_bytes(spill_bytes)} spilled" if spill_bytes else "no spills"
    shared = f"{format_bytes(shared_memory_bytes)} of shared memory"
    return _plan_line(f"compile {kernel}: {registers} registers a thread, {spills}, {shared}; took {seconds:.1f} s")


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
        parts += [_comparison_table(comparison), Text(_legend(comparison), "dim"), ""]
    verdict = new_grid(9)
    word = "gate failed" if comparison.gate_failed else comparison.effect.value
    verdict.add_row(Text(word, _EFFECT_STYLE[comparison.effect]), comparison.reason)
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
        shift = format_ratio(change.interval) if change.interval else f"{change.shift:.3f}x"
        where = f"{change.before} -> {change.after}: {shift}, chance {change.chance:.2g}"
        grid.add_row(Text(change.label, "bold yellow"), Text(f"{where}\n{change.reason}"))
    for note in history.notes:
        grid.add_row(Text("note", "dim"), Text(note, "dim"))
    return Group(head, "", runs, "", grid, Text(history.verdict, "bold"))


def _comparison_table(comparison: Comparison) -> RenderableType:
    table = new_table("case", "time", "A", "B", "A / B", "B is", left=2)
    for case in comparison.cases:
        table.add_row(
            case.name,
            case.metric,
            *(map(format_seconds, case.seconds) if case.seconds else ("", "")),
            format_ratio(case.ratio),
            Text(case.effect.value, _EFFECT_STYLE[case.effect]),
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


def _legend(comparison: Comparison) -> str:
    low, high = 1 / (1 + comparison.tolerance), 1 + comparison.tolerance
    return (
        f"A / B: {comparison.quantity}; intervals hold together at 95 %\n"
        f"same: all of the interval within {low:.4g} to {high:.4g} (--tolerance {comparison.tolerance:.3g})"
    )
