"""The content of a page about runs, as words and tables: the same for HTML and Markdown. It computes nothing."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ..compare.side_by_side import SideBySide, side_by_side
from ..judge.judge import Control, Verdict, check_control, exit_code
from ..judge.rows import (
    AccuracyRow,
    Unmeasured,
    accuracy_rows,
    by_role,
    commit_words,
    default_kind,
    format_bytes,
    format_ratio,
    format_seconds,
    kinds_measured,
    lowest_case,
    unmeasured,
    write_csv,
)
from ..judge.run_verdicts import last_word
from ..records.evidence import Arm, Environment, Gate, Launch, Record, TimeKind
from ..text import counted
from .page_plots import Figure, Table, roofline_figure, sweep_figures, timed_arms, work_figure
from .page_sensors import sensor_figure
from .page_speed import Speeds, find_speeds
from .terminal import conditions, count_line, figure, what_is_in_cache

_IN_ALL = {0: "demonstrated", 1: "refuted"}  # exit code -> how several verdicts look together
_FEW = 2  # cases that are named where a kernel ran; of more, the number is given


@dataclass(frozen=True)
class Judged:
    """A run with the verdicts on it."""

    record: Record
    verdicts: Sequence[Verdict]


@dataclass(frozen=True)
class Said:
    """A verdict, or how far the chain came: a word, a sentence, the number that it turns on, why."""

    word: str
    sentence: str
    figure: str = ""
    reason: str = ""
    notes: Sequence[str] = ()  # what nobody should read the word without
    kind: str = ""  # how it looks where it has no word of its own


@dataclass(frozen=True)
class Kernel:
    """One kernel of one arm: a row for each of its configurations, with the cases, launches, grid, block and sizes."""

    arm: str
    name: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class RunPart:
    """One run on the page."""

    record: Record
    anchor: str
    title: str
    facts: str  # suite, baselines, time: one line
    headline: Said
    verdicts: Sequence[Said]
    gates: Sequence[Gate]
    speeds: Sequence[Speeds]  # the kind of time that the plots show first
    control: Control | None
    control_table: Table | None
    legends: Sequence[str]
    unmeasured: Sequence[Unmeasured]
    growth: Sequence[Figure]
    roofline: Figure | None
    no_roofline: str
    launches: Sequence[Kernel]
    all_launches: Table | None
    sensors: Figure | None
    memory: Table | None
    accuracy: Sequence[AccuracyRow]
    environment: Sequence[tuple[str, str]]
    csv: str
    kind: str  # of the plots; "" where nothing was timed
    arms: Sequence[tuple[int, str]]  # slot and name of those that the plots show

    @property
    def headline_notes(self) -> list[str]:
        """What nobody should read the headline without, each note once and without its particulars."""
        return list(dict.fromkeys(note.partition(": ")[0] for verdict in self.verdicts for note in verdict.notes))

    @property
    def accuracy_notes(self) -> bool:
        """Whether any case has a note."""
        return any(row.note for row in self.accuracy)

    @property
    def accuracy_count(self) -> str:
        """In how many cases the subject is shown to be right, and, apart from them, what stood in for it."""
        right = sum(row.correct == "yes" for row in self.accuracy)
        said = f"{counted(right, 'case')} correct, of {len(self.accuracy)}"
        stood_in = [row.correct != "no" for row in self.accuracy if row.stood_in]
        if not stood_in:
            return said
        shown = said if right else "none shown of the GPU's kernel"
        return f"{shown}; its stand-in right in {sum(stood_in)} of {len(stood_in)}"

    @property
    def record_json(self) -> str:
        """The record, as ``flashmoe show`` reads it."""
        return self.record.model_dump_json() + "\n"

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Identifier and heading of each section that there is."""
        there = {
            "verdicts": ("Verdicts", self.verdicts),
            "gates": ("Gates", True),
            "speed": ("Speed", self.speeds),
            "growth": ("Time against size", self.growth),
            "roofline": ("Roofline", self.speeds or self.roofline),
            "launches": ("Kernels launched", self.launches),
            "sensors": ("Clocks, power, temperature", self.sensors),
            "memory": ("Memory", self.memory),
            "accuracy": ("Accuracy", self.accuracy),
            "environment": ("Environment", True),
            "raw": ("Raw numbers", True),
        }
        return [(name, text) for name, (text, present) in there.items() if present]


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    runs: Sequence[RunPart]
    index: Table | None  # where there are several runs
    beside: Sequence[tuple[str, Table]]  # what several runs share, each with its heading


def build_page(judged: Sequence[Judged], kind: TimeKind | None = None) -> Page:
    """Return the page about one run or several; plots show times of ``kind``, by default graph time."""
    runs = [_run_part(each, kind, f"run{number}") for number, each in enumerate(judged, 1)]
    records = [each.record for each in judged]
    if len(runs) == 1:
        return Page(f"{runs[0].title}, suite {records[0].suite}", runs, None, [])
    numbers = {record.id: number for number, record in enumerate(records, 1)}
    beside = [_beside_table(found, numbers) for found in side_by_side(records)]
    return Page(f"{counted(len(runs), 'run')} side by side", runs, _index(runs), beside)


def _run_part(judged: Judged, kind: TimeKind | None, anchor: str) -> RunPart:
    record = judged.record
    kinds = kinds_measured(record)
    shown = kind if kind in kinds else default_kind(record)
    ordered = sorted(kinds, key=lambda each: each != shown)
    arms = timed_arms(record, shown) if shown else None
    growth = [] if arms is None else sweep_figures(record, arms, anchor)
    rest = work_figure(record, arms, anchor) if arms else None
    speeds = [find_speeds(record, each, _claimed(judged.verdicts, each)) for each in ordered]
    control = check_control(record, shown) if shown else None
    legends = [*what_is_in_cache(record), *conditions(record)] if shown else []
    gpu = record.environment.gpu
    return RunPart(
        record=record,
        anchor=anchor,
        title=f"{record.subject.name} on {gpu.name if gpu else 'a machine with no GPU'}",
        facts=_facts(record),
        headline=_headline(judged),
        verdicts=[_said(verdict) for verdict in _weighed(judged)],
        gates=record.gates,
        speeds=[each for each in speeds if each.rows],
        control=control if control and control.ratios else None,
        control_table=_control_table(control) if control and control.ratios else None,
        legends=legends,
        unmeasured=unmeasured(record),
        growth=[*growth, *([rest] if rest else [])],
        roofline=roofline_figure(record, arms, anchor) if arms else None,
        no_roofline=f"The rates of {gpu.name} are not known here." if gpu and shown else "Nothing was timed.",
        launches=_kernels(record),
        all_launches=_all_launches(record),
        sensors=sensor_figure(record, anchor),
        memory=_memory_table(record),
        accuracy=accuracy_rows(record),
        environment=_environment(record),
        csv=_csv(record),
        kind=shown or "",
        arms=arms.slots if arms else [],
    )


# Verdicts


def _weighed(judged: Judged) -> list[Verdict]:
    """Return the verdicts; none where a gate failed: the headline is then the last gate."""
    return [verdict for verdict in judged.verdicts if verdict.gate_failed is None]


def _headline(judged: Judged) -> Said:
    verdicts = _weighed(judged)
    if not verdicts:
        return Said(*last_word(judged.record))
    if len(verdicts) == 1:
        return Said(verdicts[0].status.value, verdicts[0].claim.sentence)
    return Said("", count_line(verdicts), kind=_IN_ALL.get(exit_code(verdicts, strict=True), "open"))


def _said(verdict: Verdict) -> Said:
    number = figure(verdict) if lowest_case(verdict) else ""
    if verdict.geometric_mean and verdict.claim.scope == "each case":
        number += f"; geometric mean {format_ratio(verdict.geometric_mean)}"
    return Said(verdict.status.value, verdict.claim.sentence, number, verdict.reason, verdict.notes)


def _claimed(verdicts: Sequence[Verdict], kind: TimeKind) -> list[float]:
    about = [verdict.claim for verdict in verdicts if verdict.claim.id != "expectation"]
    return [claim.factor for claim in about if claim.metric == kind and claim.scope == "each case"]


def _facts(record: Record) -> str:
    against = f" against {', '.join(record.baselines)}" if record.baselines else ""
    return f"Suite {record.suite}{against}, {_date(record.created_at)}"


def _date(created: datetime) -> str:
    return f"{created.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


# Tables


def _control_table(control: Control) -> Table:
    rows = [(name, format_ratio(ratio)) for name, ratio in control.ratios.items()]
    return Table(
        "the second copy's time divided by the first's; the intervals hold together at 95 %", ("case", "ratio"), rows
    )


KERNEL_COLUMNS = ("in", "launches", "grid", "block", "registers", "shared memory")


@dataclass
class LaunchGroup:
    """One kernel of one arm, launched with the same block and resources in one or more cases."""

    arm: Arm
    launch: Launch  # the first of them
    grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # case -> grid


def launch_groups(record: Record) -> list[LaunchGroup]:
    """Return the kernels that the subject and the baselines launched, the subject's first, each with its cases."""
    groups: dict[tuple[object, ...], LaunchGroup] = {}
    arms = [(case, place, arm) for case in record.cases for place, arm in enumerate(by_role(case.arms))]
    for case, _, arm in sorted(arms, key=lambda item: item[1]):  # stable: an arm's cases stay in their order
        for number, launch in enumerate(arm.launches if arm.role != "control" else ()):
            what = (launch.name, launch.block, launch.registers, launch.shared_memory_bytes, launch.count)
            group = groups.setdefault((arm.name, number, *what), LaunchGroup(arm, launch))
            group.grids[case.name] = launch.grid
    return list(groups.values())


def _kernels(record: Record) -> list[Kernel]:
    rows: dict[tuple[str, str], list[Sequence[str]]] = {}
    for group in launch_groups(record):
        launch = group.launch
        grids = list(dict.fromkeys(group.grids.values()))
        grid = _size(grids[0]) if len(grids) == 1 else f"{len(grids)} grids"
        named = ", ".join(group.grids) if len(group.grids) <= _FEW else counted(len(group.grids), "case")
        where = "every case" if len(group.grids) == len(record.cases) else named
        shared = format_bytes(launch.shared_memory_bytes)
        cells = (where, str(launch.count), grid, _size(launch.block), str(launch.registers), shared)
        rows.setdefault((group.arm.name, launch.name), []).append(cells)
    return [Kernel(arm, name, found) for (arm, name), found in rows.items()]


def _all_launches(record: Record) -> Table | None:
    rows = [
        (case, group.arm.name, group.launch.name, _size(grid), _size(group.launch.block))
        for group in launch_groups(record)
        for case, grid in group.grids.items()
    ]
    order = {case.name: place for place, case in enumerate(record.cases)}
    rows.sort(key=lambda row: order[row[0]])  # stable: arms stay in their order
    columns = ("case", "arm", "kernel", "grid", "block")
    return Table("every launch of one call", columns, rows, words=3) if rows else None


def _size(size: tuple[int, int, int]) -> str:
    return " x ".join(map(str, size))


def _memory_table(record: Record) -> Table | None:
    rows = []
    for case in record.cases:
        peaks = {arm.name: arm.peak_bytes for arm in case.arms if arm.peak_bytes is not None}
        ours = peaks.get(record.subject.name)
        cells = [case.name, _bytes(ours)]
        for theirs in map(peaks.get, record.baselines):
            cells += [_bytes(theirs), f"{ours / theirs:.2f}x" if ours is not None and theirs else ""]
        if any(cells[1:]):
            rows.append(cells)
    columns = ["case", record.subject.name]
    for name in record.baselines:
        columns += [name, f"/ {name}"]
    return Table("peak bytes of one call beyond what was held before it", columns, rows) if rows else None


def _bytes(count: int | None) -> str:
    return "" if count is None else format_bytes(count)


def _environment(record: Record) -> list[tuple[str, str]]:
    here: Environment = record.environment
    facts = [("run", record.id), ("command", record.command)]
    facts.append(("subject", f"{record.subject.name} ({record.subject.operator}), {record.subject.entry_point}"))
    if here.gpu:
        gpu = here.gpu
        clock = f", up to {gpu.max_sm_clock_mhz} MHz" if gpu.max_sm_clock_mhz else ""
        limit = f", power limit {gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
        memory = f"{format_bytes(gpu.memory_bytes)}, L2 {format_bytes(gpu.l2_bytes)}"
        facts.append(("GPU", f"{gpu.name}, sm_{gpu.arch}, {gpu.sms} SMs, {memory}{clock}{limit}"))
    else:
        facts.append(("GPU", "none"))
    facts += [(name, value) for name, value in (("driver", here.driver), ("CUDA", here.cuda)) if value]
    facts += [("Python", here.python), ("platform", ", ".join(filter(None, (here.platform, here.cpu))))]
    facts.append(("versions", ", ".join(f"{name} {version}" for name, version in here.versions.items())))
    facts.append(("commit", commit_words(record)))
    if here.settings:
        facts.append(("settings", ", ".join(f"{name}={value}" for name, value in here.settings.items())))
    protocol = record.settings
    rounds = f"{counted(protocol.processes, 'process')} of {counted(protocol.rounds, 'round')}"
    facts.append(
        ("protocol", f"{rounds}, {', '.join(protocol.times)} time, kernel time {protocol.cache}, seed {protocol.seed}")
    )
    sources = counted(len(record.subject.sources), "file")
    return [*facts, ("sources", f"{sources} hashed in the record")]


def _csv(record: Record) -> str:
    file = io.StringIO()
    write_csv([record], file)
    return file.getvalue()


# Several runs


def _index(runs: Sequence[RunPart]) -> Table:
    rows = []
    for number, part in enumerate(runs, 1):
        record, gpu = part.record, part.record.environment.gpu
        result = part.headline.word or part.headline.sentence
        commit = (record.tree.commit or "unknown")[:12]
        rows.append(
            (str(number), result, record.subject.name, record.suite, gpu.name if gpu else "none", commit, record.id)
        )
    columns = ("", "result", "subject", "suite", "GPU", "commit", "run")
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
