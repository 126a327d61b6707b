"""The content of a page about runs, as words and tables: the same for HTML and Markdown. It computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timezone
from statistics import median

from markupsafe import Markup

from ..compare.side_by_side import SideBySide, side_by_side
from ..judge.judge import Verdict, check_control, exit_code
from ..judge.roofline import roofline_of
from ..judge.rows import (
    accuracy_rows,
    arm_rows,
    by_role,
    commit_words,
    csv_text,
    default_kind,
    format_bytes,
    format_rate,
    format_ratio,
    format_seconds,
    kinds_measured,
    lowest_case,
    unmeasured,
)
from ..judge.run_verdicts import EXPECTATION, last_word
from ..records.evidence import Record, Rounds, TimeKind
from ..text import as_sentence, counted, cut_name
from .bars import draw_bar, draw_ruler, find_ruler
from .terminal import conditions, count_line, figure, what_is_in_cache

_SENSORS = {"sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
_IN_ALL = {0: "demonstrated", 1: "refuted"}  # exit code -> how several verdicts look together
_FEW = 2  # cases that are named where a kernel ran; of more, the number is given
_LEGEND = "speedup: the baseline's time / the subject's, with its 95 % interval"
_SHARE = (
    "Share of the roofline: the time that the datasheet's rates would take at the boost clock, divided by that taken. "
    "Work and bytes are the fewest that a call needs; a case whose inputs stay in L2 may take more than all of it."
)


@dataclass(frozen=True)
class Table:
    """A table of words and numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # the first columns, which hold words; the others hold numbers
    fold: str = ""  # what unfolds it; empty: it is open
    ruler: Markup | None = None  # of the bars; None: it has none
    bars: Sequence[Markup] = ()  # a drawing for each row
    kind: str = "table"


@dataclass(frozen=True)
class Judged:
    """A run with the verdicts on it."""

    record: Record
    verdicts: Sequence[Verdict]


@dataclass(frozen=True)
class Note:
    """A paragraph. ``word`` comes first and says how it looks, e.g. a verdict, with its sentence and its number."""

    text: str
    word: str = ""
    sentence: str = ""
    figure: str = ""
    kind: str = "note"


@dataclass(frozen=True)
class Lines:
    """Further lines of one gate, folded unless it failed. Markdown leaves them out."""

    title: str
    lines: Sequence[str]
    is_open: bool
    kind: str = "lines"


@dataclass(frozen=True)
class Facts:
    """Names and their values."""

    facts: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    id: str
    title: str
    blocks: Sequence[Note | Lines | Facts | Table]


@dataclass(frozen=True)
class RunPart:
    """One run on the page."""

    record: Record
    anchor: str
    title: str
    facts: str  # suite, baselines, time: one line
    headline: Note
    notes: Sequence[str]  # what nobody should read the headline without, each once and without its particulars
    sections: Sequence[Section]

    @property
    def csv(self) -> str:
        """The rows, as ``flashmoe show --csv`` writes them."""
        return csv_text([self.record])

    @property
    def record_json(self) -> str:
        """The record, as ``flashmoe show`` reads it."""
        return self.record.model_dump_json() + "\n"


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    runs: Sequence[RunPart]
    index: Table | None  # where there are several runs
    beside: Sequence[tuple[str, Table]]  # what several runs share, each with its heading

    @property
    def nothing_beside(self) -> str:
        """Say why several runs share nothing."""
        if not any(kinds_measured(run.record) for run in self.runs):
            return "None of these runs was timed, so there are no times to compare."
        return "These runs share no problem that both timed against the same baseline."


def build_page(judged: Sequence[Judged], kind: TimeKind | None = None) -> Page:
    """Return the page about one run or several; times of ``kind`` come first, by default graph time."""
    runs = [_run_part(each, kind, f"run{number}") for number, each in enumerate(judged, 1)]
    records = [each.record for each in judged]
    if len(runs) == 1:
        return Page(f"{runs[0].title}, suite {records[0].suite}", runs, None, [])
    numbers = {record.id: number for number, record in enumerate(records, 1)}
    beside = [_beside_table(found, numbers) for found in side_by_side(records)]
    return Page(f"{counted(len(runs), 'run')} side by side", runs, _index(runs), beside)


def _run_part(judged: Judged, kind: TimeKind | None, anchor: str) -> RunPart:
    record = judged.record
    verdicts = [verdict for verdict in judged.verdicts if verdict.gate_failed is None]  # else the headline is the gate
    kinds = kinds_measured(record)
    shown = kind if kind in kinds else default_kind(record)
    speed = _speed(record, shown, judged.verdicts) if shown else []
    sections = [
        Section("verdicts", "Verdicts", [_verdict(verdict, alone=len(verdicts) == 1) for verdict in verdicts]),
        Section("gates", "Gates", _gates(record)),
        Section("speed", "Speed", speed),
        Section("roofline", "Roofline", _roofline(record, shown) if shown and speed else []),
        Section("launches", "Kernels launched", _launches(record)),
        Section("sensors", "Clocks, power, temperature", _sensors(record)),
        Section("memory", "Memory", _memory(record)),
        Section("accuracy", "Accuracy", _accuracy(record)),
        Section("environment", "Environment", [Facts(_environment(record))]),
    ]
    against = f" against {', '.join(record.baselines)}" if record.baselines else ""
    return RunPart(
        record=record,
        anchor=anchor,
        title=f"{record.subject.name} on {record.environment.place or 'a machine with no GPU'}",
        facts=f"Suite {record.suite}{against}, {record.created_at.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC",
        headline=_headline(record, verdicts),
        notes=list(dict.fromkeys(note.partition(": ")[0] for verdict in verdicts for note in verdict.notes)),
        sections=[section for section in sections if section.blocks],
    )


def _headline(record: Record, verdicts: Sequence[Verdict]) -> Note:
    if not verdicts:
        word, sentence = last_word(record)
        return Note("", word, sentence)
    if len(verdicts) == 1:
        return Note("", verdicts[0].status.value, verdicts[0].claim.sentence)
    return Note("", "", count_line(verdicts), kind=_IN_ALL.get(exit_code(verdicts, strict=True), "open"))


def _verdict(verdict: Verdict, *, alone: bool) -> Note:
    number = figure(verdict) if lowest_case(verdict) else ""
    if verdict.geometric_mean and verdict.claim.scope == "each case":
        number += f"; geometric mean {format_ratio(verdict.geometric_mean)}"
    sentence = "" if alone else verdict.claim.sentence  # the headline has it
    return Note(as_sentence(verdict.reason), verdict.status.value, sentence, number)


def _gates(record: Record) -> list[Table | Lines]:
    rows = []
    for gate in record.gates:
        took = "" if gate.status.value == "not reached" else f"{gate.seconds:.1f} s"
        hint = f". Hint: {gate.hint}".replace("`", "") if gate.hint else ""  # no cell of a page is code
        rows.append((gate.name, gate.status.value, f"{gate.summary}{hint}", took))
    details = [Lines(gate.name, gate.details, gate.status.value == "failed") for gate in record.gates if gate.details]
    return [Table("", ("gate", "result", "what it showed", "took"), rows, words=3), *details]


def _speed(record: Record, shown: TimeKind, verdicts: Sequence[Verdict]) -> list[Note | Table]:
    """Return the speedups in every kind of time, that of the plots first, and what has to be known of them."""
    claims = [verdict.claim for verdict in verdicts if verdict.claim.id != EXPECTATION]
    tables = []
    for kind in sorted(kinds_measured(record), key=lambda each: each != shown):
        factors = {claim.factor for claim in claims if claim.metric == kind and claim.scope == "each case"}
        tables.append(_speed_table(record, kind, sorted(factors), fold="" if kind == shown else f"{kind} time"))
    tables = [table for table in tables if table.rows]
    if not tables:
        return []
    said = [as_sentence(_LEGEND), "Right of 1x the subject is faster."]
    said += map(as_sentence, [*what_is_in_cache(record), *conditions(record)])
    found: list[Note | Table] = [Note(" ".join(said))]
    found += [Note(f"{each.reason} ({each.where})", f"{each.arm} {each.status}") for each in unmeasured(record)]
    control = check_control(record, shown)
    ratios = [(name, format_ratio(ratio)) for name, ratio in control.ratios.items()]
    caption = "the second copy's time divided by the first's; the intervals hold together at 95 %"
    checked: list[Note | Table] = [
        Note(as_sentence(control.reason)),
        Table(caption, ("case", "ratio"), ratios, fold="control"),
    ]
    return [*found, *tables, *(checked if ratios else [])]


def _speed_table(record: Record, kind: TimeKind, factors: Sequence[float], *, fold: str) -> Table:
    """Return a row for every case and baseline, their intervals on one scale, with a line at every claimed factor."""
    every = arm_rows(record, kind)
    ours = {
        row.case.name: format_seconds(row.rates.seconds) for row in every if row.arm.role == "subject" and row.rates
    }
    rows = [row for row in every if row.arm.role == "baseline"]
    found = [row.ratio.interval if row.ratio else None for row in rows]
    ends = [end for each in found if each for end in (each.low, each.high) if math.isfinite(end) and end > 0]
    lines = [1.0, *(factor for factor in factors if factor != 1.0)]
    ruler = find_ruler(ends, lines) if ends else None
    cells, bars = [], []
    for row, each in zip(rows, found, strict=True):
        theirs = format_seconds(row.rates.seconds) if row.rates else ""
        said = format_ratio(row.ratio) or row.arm.status
        cells.append((row.case.name, row.arm.name, ours.get(row.case.name, ""), theirs, said))
        side = "open" if each is None else "faster" if each.low > 1 else "slower" if each.high < 1 else "even"
        if ruler:
            placed = (each.low, each.estimate, each.high) if each and 0 < each.low <= each.high else None
            bars.append(draw_bar(ruler, side, placed, lines))
    dashed = "".join(f"; dashed: {factor:g}x claimed" for factor in lines[1:])
    columns = ("case", "baseline", record.subject.name, "its time", "speedup")
    caption = f"{kind} time, medians of one call{dashed}"
    return Table(caption, columns, cells, words=2, fold=fold, ruler=draw_ruler(ruler) if ruler else None, bars=bars)


def _roofline(record: Record, kind: TimeKind) -> list[Note | Table]:
    """Return the rates of the subject and the baselines, and what of the datasheet's that is."""
    gpu, rows = record.environment.gpu, []
    for case in record.cases:
        limit = roofline_of(case.work, gpu) if gpu and case.work.flops > 0 and case.work.bytes > 0 else None
        for arm in by_role(case.arms):
            rates = arm.rates.get(kind)
            if limit is None or rates is None or arm.role == "control":
                continue
            intensity = case.work.flops / case.work.bytes
            share = f"{format_rate(limit.seconds(case.work) / rates.seconds * 100)} %"
            speed = (rates.tflops, limit.flops_at(intensity) / 1e12, rates.tbytes_per_second)
            rows.append((case.name, arm.name, *map(format_rate, (intensity, *speed)), share))
    if not rows:
        return [Note(f"The rates of {gpu.name} are not known here." if gpu else "Nothing was timed on a GPU.")]
    columns = ("case", "arm", "FLOP / byte", "TFLOP/s", "limit, TFLOP/s", "TB/s", "share of the roofline")
    return [Note(_SHARE), Table(f"medians in {kind} time", columns, rows, words=2)]


def _sensors(record: Record) -> list[Table]:
    """Return clock, power and temperature by worker process; nothing where nothing was read."""
    workers: dict[tuple[int, bool], list[Rounds]] = {}
    for rounds in (rounds for case in record.cases for rounds in case.rounds):
        for process in dict.fromkeys(rounds.process):
            mine = [at for at, owner in enumerate(rounds.process) if owner == process]
            columns = {name: [getattr(rounds, name)[at] for at in mine] for name in (*_SENSORS, "throttle")}
            workers.setdefault((process, "kernel" in rounds.seconds), []).append(rounds.model_copy(update=columns))
    rows = []
    for (process, _), own in sorted(workers.items(), key=lambda item: item[0]):
        read = [[v for rounds in own for v in getattr(rounds, name) if v is not None] for name in _SENSORS]
        reasons = [reason for rounds in own for reason in rounds.throttle if reason]
        times = ", ".join(dict.fromkeys(", ".join(rounds.seconds) for rounds in own))
        taken = str(sum(len(rounds.throttle) for rounds in own))
        rows.append((str(process), times, taken, *map(_range, read), str(len(reasons)), ", ".join(sorted({*reasons}))))
    if not any(any(row[3:6]) for row in rows):
        return []
    headings = ("process", "times", "rounds", *_SENSORS.values(), "throttled", "reasons")
    return [Table("lowest, median and highest", headings, rows, words=2)]


def _range(read: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in (min(read), median(read), max(read))) if read else ""


def _launches(record: Record) -> list[Table]:
    """Return a row for every kernel of an arm and each block and resources of it, the subject's first."""
    groups: dict[tuple[str, int, str, tuple[str, ...]], dict[str, str]] = {}  # -> case -> grid
    arms = [(case, place, arm) for case in record.cases for place, arm in enumerate(by_role(case.arms))]
    for case, _, arm in sorted(arms, key=lambda item: item[1]):  # stable: an arm's cases stay in their order
        for number, launch in enumerate(arm.launches if arm.role != "control" else ()):
            shared = format_bytes(launch.shared_memory_bytes)
            what = (str(launch.count), _size(launch.block), str(launch.registers), shared)
            groups.setdefault((arm.name, number, launch.name, what), {})[case.name] = _size(launch.grid)
    rows = []
    for (arm_name, _, kernel, (count, *rest)), of_case in groups.items():
        grids = list(dict.fromkeys(of_case.values()))
        named = ", ".join(of_case) if len(of_case) <= _FEW else counted(len(of_case), "case")
        where = "every case" if len(of_case) == len(record.cases) else named
        grid = grids[0] if len(grids) == 1 else f"{len(grids)} grids"
        rows.append((arm_name, cut_name(kernel), where, count, grid, *rest))
    columns = ("arm", "kernel", "in", "launches", "grid", "block", "registers", "shared memory")
    return [Table("registers are of a thread, shared memory of a block", columns, rows, words=3)] if rows else []


def _size(size: tuple[int, int, int]) -> str:
    return " x ".join(map(str, size))


def _memory(record: Record) -> list[Table]:
    rows = []
    for case in record.cases:
        peaks = {arm.name: arm.peak_bytes for arm in case.arms if arm.peak_bytes is not None}
        ours = peaks.get(record.subject.name)
        cells = [case.name, "" if ours is None else format_bytes(ours)]
        for theirs in map(peaks.get, record.baselines):
            cells += ["" if theirs is None else format_bytes(theirs)]
            cells += [f"{ours / theirs:.2f}x" if ours is not None and theirs else ""]
        if any(cells[1:]):
            rows.append(cells)
    columns = ["case", record.subject.name]
    for name in record.baselines:
        columns += [name, f"/ {name}"]
    return [Table("peak bytes of one call beyond what was held before it", columns, rows)] if rows else []


def _accuracy(record: Record) -> list[Note | Table]:
    found = accuracy_rows(record)
    if not found:
        return []
    right = sum(row.correct == "yes" for row in found)
    said = f"{counted(right, 'case')} correct, of {len(found)}"
    if stood_in := [row.correct != "no" for row in found if row.stood_in]:
        shown = said if right else "none shown of the GPU's kernel"
        said = f"{shown}; its stand-in right in {sum(stood_in)} of {len(stood_in)}"
    columns = ["case", "correct", "note", "same bits", "max error", "allowed", "share"]
    columns += [f"{name}, share" for name in record.baselines]
    rows = [
        [row.case, row.correct, row.note, row.same_bits, row.error, row.allowed, row.said, *row.baselines]
        for row in found
    ]
    filled = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    rows, columns = [[row[number] for number in filled] for row in rows], [columns[number] for number in filled]
    words = sum(name in ("case", "correct", "note", "same bits") for name in columns)
    table = Table("largest error against the exact answer, and the largest that is allowed", columns, rows, words)
    return [Note(as_sentence(said)), table]


def _environment(record: Record) -> list[tuple[str, str]]:
    here, gpu, protocol = record.environment, record.environment.gpu, record.settings
    card = "none"
    if gpu:
        clock = f", up to {gpu.max_sm_clock_mhz} MHz" if gpu.max_sm_clock_mhz else ""
        limit = f", power limit {gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
        memory = f"{format_bytes(gpu.memory_bytes)}, L2 {format_bytes(gpu.l2_bytes)}"
        card = f"{gpu.name}, sm_{gpu.arch}, {gpu.sms} SMs, {memory}{clock}{limit}"
    rounds = f"{counted(protocol.processes, 'process')} of {counted(protocol.rounds, 'round')}"
    facts = {
        "run": record.id,
        "command": record.command,
        "subject": f"{record.subject.name} ({record.subject.operator}), {record.subject.entry_point}",
        "GPU": card,
        "driver": here.driver or "",
        "CUDA": here.cuda or "",
        "Python": here.python,
        "platform": ", ".join(filter(None, (here.platform, here.cpu))),
        "versions": ", ".join(f"{name} {version}" for name, version in here.versions.items()),
        "commit": commit_words(record),
        "settings": ", ".join(f"{name}={value}" for name, value in here.settings.items()),
        "protocol": f"{rounds}, {', '.join(protocol.times)} time, kernel time {protocol.cache}, seed {protocol.seed}",
        "sources": f"{counted(len(record.subject.sources), 'file')} hashed in the record",
    }
    return [(name, value) for name, value in facts.items() if value]


def _index(runs: Sequence[RunPart]) -> Table:
    rows = []
    for number, part in enumerate(runs, 1):
        record = part.record
        result = part.headline.word or part.headline.sentence
        about = (result, record.subject.name, record.suite, record.environment.gpu_name or "none")
        rows.append((str(number), *about, (record.tree.commit or "none")[:12], record.id))
    columns = ("number", "result", "subject", "suite", "GPU", "commit", "run")
    return Table("the runs on this page", columns, rows, words=7)


def _beside_table(found: SideBySide, numbers: Mapping[str, int]) -> tuple[str, Table]:
    """Return a heading and a table: first the speedups of all runs, then the times."""
    runs = [numbers[record.id] for record in found.records]
    times = [f"{record.subject.name}, run {numbers[record.id]}" for record in found.records]
    rows = []
    for case in found.cases:
        speedups = [format_ratio(row.ratio) if row else "" for row in case.rows]
        seconds = [format_seconds(each) if each else "" for each in case.seconds]
        rows.append([case.name, *speedups, *seconds])
    note = "A speedup belongs to its run, in which both arms took turns."
    if found.differing:
        note += f" The times are not of like conditions: the runs differ in {', '.join(found.differing)}."
    columns = ["case", *(f"speedup, run {number}" for number in runs), *times]
    return f"{found.kind} time against {found.baseline}", Table(note, columns, rows)
