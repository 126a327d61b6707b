"""Tables of speeds in Markdown, made from verdicts and the records behind them, and nothing else.

A page names with two marks, each a line of its own, where a section goes::

    <!-- summary:begin -->    a row for every run and kind of time that claims are about
    <!-- summary:end -->
    <!-- slower:begin -->     a row for every suite in which a baseline is faster somewhere
    <!-- slower:end -->
    <!-- verdicts:begin -->   a row for every claim
    <!-- verdicts:end -->
    <!-- cases:begin -->      a table of cases for each record and baseline, each below a heading
    <!-- cases:end -->
    <!-- rules:begin -->     by which rules the claims are judged, and which could be made today
    <!-- rules:end -->

"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast, get_args
from urllib.parse import quote

from markdown_it import MarkdownIt

from ...errors import ProofError
from ..judge.claims import Metric
from ..judge.judge import Verdict, VerdictStatus, deciding_baseline
from ..judge.rows import METRICS, arm_rows, format_bytes, format_ratio, format_seconds, lowest_case
from ..judge.statistics import Interval
from ..judge.verify import read_records, verify_claims
from ..records import files
from ..records.evidence import Arm, CaseRecord, Record, rates_of
from ..records.store import find_repository
from ..text import foreign
from .prose import SectionKind, markdown_in

BEGIN, END = "<!-- verdicts:begin -->", "<!-- verdicts:end -->"

_HINT = (
    "a rendered table goes between two marks: of runs (summary), of slower cases (slower), of claims (verdicts), "
    "of cases (cases), or of rules (rules)"
)
# The interval of a mean also counts the choice of cases, so it says nothing about fewer cases than these.
_FEWEST_OF_MEAN = 6
_NO_CLAIMS = "No claim has been made yet.\n"
_HOW = "Medians of one call; speedups with 95 % intervals"
_UNESCAPED_BAR = re.compile(r"(?<!\\)\|")
_MARK = re.compile(rf"[ \t]*<!-- ({'|'.join(get_args(SectionKind))}):(begin|end) -->[ \t]*")


class Judged(NamedTuple):
    """A repository's verdicts on all its claims, and its records by path from its root."""

    verdicts: Sequence[Verdict]
    records: Mapping[str, Record]


@dataclass(frozen=True)
class Section:
    """A rendered part of a page: the lines of its two marks, from 1."""

    kind: SectionKind
    first: int
    last: int

    @property
    def body(self) -> slice:
        """Where the lines between the marks are in a list of the page's lines."""
        return slice(self.first, self.last - 1)


def judge_repository(repository: Path) -> Judged:
    """Return what sections of pages of ``repository`` are made from. It takes seconds."""
    return Judged(verify_claims(repository), read_records(repository))


def repository_of(page: Path) -> Path:
    """Return the repository whose claims a page shows: the nearest folder upwards, as every verb has it.

    Where there is none, the page's own folder: no claim has been made there.
    """
    folder = page.resolve().parent
    return find_repository(folder) or folder


def default_pages(repository: Path) -> list[Path]:
    """Return README.md of ``repository``, whatever is in it, and every page below ``docs/`` that has a mark."""
    below = markdown_in(repository / "docs")
    # What is not UTF-8 and has no mark is no page of ours.
    return [repository / "README.md", *(page for page in below if any(_marks(read_page(page, errors="replace"))))]


def read_page(path: Path, errors: str = "strict") -> str:
    """Return the text of a page; ``errors`` is what becomes of bytes that are not UTF-8. Raises ``ProofError``."""
    try:
        return files.read_page(path, errors)
    except OSError as error:
        raise ProofError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProofError(f"{path}: cannot be read: {error}") from error


def find_sections(path: Path, text: str) -> list[Section]:
    """Return the sections of the page at ``path``, whose text is ``text``, in their order; there is at least one.

    Raises ``ProofError``: there are no marks, or they are not in pairs.
    """
    found: list[Section] = []
    opened: tuple[int, SectionKind] | None = None
    for line, kind, place in _marks(text):
        if place == "begin" and opened is None:
            opened = line, kind
        elif place == "end" and opened is not None and opened[1] == kind:
            found.append(Section(kind, opened[0], line))
            opened = None
        else:
            expected = f"the line <!-- {opened[1]}:end -->" if opened else f"<!-- {kind}:begin --> before it"
            raise ProofError(f"{path}:{line}: expected {expected}, got <!-- {kind}:{place} -->", hint=_HINT)
    if opened is not None:
        raise ProofError(f"{path}:{opened[0]}: expected the line <!-- {opened[1]}:end --> too", hint=_HINT)
    if not found:
        raise ProofError(f"{path}: expected marks such as <!-- summary:begin -->, got none", hint=_HINT)
    return found


def _marks(text: str) -> Iterator[tuple[int, SectionKind, str]]:
    """Yield the line, from 1, the kind and the place (begin or end) of every mark.

    One that stands in a block of code is shown to the reader and marks nothing.
    """
    if not _MARK.search(text):
        return  # most pages have none, and need not be parsed
    lines = text.split("\n")
    for token in MarkdownIt("commonmark").parse(text):
        for at in range(*token.map) if token.type == "html_block" and token.map else ():
            if mark := _MARK.fullmatch(lines[at]):
                yield at + 1, cast("SectionKind", mark[1]), mark[2]


def render_readme(path: Path, judged: Callable[[Path], Judged] = judge_repository) -> str:
    """Return the text of the page at ``path`` with its sections as they should be now.

    ``judged`` returns the verdicts and records of a repository; pages may share them. Raises ``ProofError`` where the
    file cannot be read, or has no pairs of marks.
    """
    text = read_page(path)
    sections = find_sections(path, text)
    lines = text.split("\n")
    repository = repository_of(path)
    made = judged(repository)
    way = Path(os.path.relpath(repository, path.resolve().parent)).as_posix()
    up = "" if way == "." else f"{way}/"  # what a link needs before a path from the repository's root
    for section in reversed(sections):
        lines[section.body] = _SECTIONS[section.kind](*made, up).split("\n")[:-1]
    return "\n".join(lines)


def claim_section(verdicts: Sequence[Verdict], _: Mapping[str, Record], up: str | None = "") -> str:
    """Return the verdicts as a table.

    Args:
        verdicts: on all claims of the repository.
        _: the records by path from the repository's root, as ``Verdict.evidence`` names them.
        up: the way from the page's folder to that root, with a slash behind it. None: runs are named without a link.
    """
    if not verdicts:
        return _NO_CLAIMS
    header = ("id", "claim", "verdict", "deciding case", "geometric mean", "evidence")
    lines = [row(*header), row(*["---"] * len(header))]
    lines += [_claim_row(verdict, up) for verdict in verdicts]
    return "\n".join(lines) + "\n"


def rule_section(verdicts: Sequence[Verdict], _: Mapping[str, Record], __: str | None = "") -> str:
    """Return how many claims are judged by which rules, and whether they could be made from their records today."""
    if not verdicts:
        return _NO_CLAIMS
    counts = Counter((verdict.rule or "no record", verdict.refused_today) for verdict in verdicts)
    lines = [row("claims", "judged by", "as a new claim today"), row("---:", "---", "---")]
    for (rule, refused), count in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
        lines.append(row(str(count), rule, f"refused: {refused}" if refused else "accepted"))
    return "\n".join(lines) + "\n"


# Baselines that do other work: those of records that do not say it.
_OTHER_WORK = frozenset({"copy", "matrix-product", "replicated-experts", "without-features"})


def slower_section(verdicts: Sequence[Verdict], records: Mapping[str, Record], _: str | None = "") -> str:
    """Return a table of the suites in which a baseline is faster than the subject in some case, by kernel time.

    The newest run of each suite behind a claim counts, with all its cases and baselines. A case is slower where its 95
    % interval against one baseline lies below 1, and open where it only reaches below 1. Arms that do other work, such
    as a copy, are no baselines here. The arguments are those of ``claim_section``.
    """
    header = ("suite", "cases", "slower", "inconclusive", "slowest case", "speedup there", "baseline", "run")
    lines = [row(*header), row("---", *["---:"] * 3, *["---"] * 4)]
    newest: dict[tuple[str, str, str], Record] = {}  # for each suite, subject and GPU, in order of claims
    for verdict in (part for whole in verdicts for part in _parts(whole)):
        if verdict.evidence and verdict.claim.metric == "kernel":
            record = records[verdict.evidence]
            key = record.suite, record.subject.name, _card(record)
            newest[key] = max(newest.get(key, record), record, key=lambda each: each.created_at)
    for record in newest.values():
        found: dict[str, dict[str, Interval]] = {}
        for one in arm_rows(record, "kernel"):
            if (
                one.arm.role == "baseline"
                and one.ratio
                and one.ratio.interval
                and not does_other_work(record, one.arm.name)
            ):
                found.setdefault(one.case.name, {})[one.arm.name] = one.ratio.interval
        deciding = {name: deciding_baseline(intervals, 1.0) for name, intervals in found.items()}
        ratios = {name: found[name][baseline] for name, baseline in deciding.items()}
        slower = [name for name, ratio in ratios.items() if ratio.high < 1]
        if slower:
            slowest = min(slower, key=lambda name: ratios[name].estimate)
            counts = (len(record.cases), len(slower), sum(ratio.low < 1 <= ratio.high for ratio in ratios.values()))
            where = (_code(slowest), format_ratio(ratios[slowest]), foreign(deciding[slowest], "markdown"))
            link = _run_link(record.id, "", None)
            lines.append(row(foreign(record.suite, "markdown"), *map(str, counts), *where, link))
    return "\n".join(lines) + "\n" if len(lines) > 2 else "No case is slower than a baseline.\n"


def summary_section(verdicts: Sequence[Verdict], records: Mapping[str, Record], up: str | None = "") -> str:
    """Return a table with a row for every run and kind of time that claims are about.

    Speed-of-light baselines, such as a copy, have rows of their own. A row has the figures of the claim with the most
    baselines and cases; ties go to the lowest mean. It counts the verdicts on all claims about that run. Claims without
    a measurement are named below the table. The arguments are those of ``claim_section``.
    """
    if not verdicts:
        return _NO_CLAIMS
    figures = ("metric", "cases", "slower, open, faster", "lowest", "geometric mean")
    header = ("suite", "what", "beside", *figures, "claims", "run")
    lines = [row(*header), row(*["---"] * len(header))]
    for group in _groups(verdicts, records, lambda verdict: _speed_of_light(verdict, records)):
        for metric, about in group.verdicts.items():
            lines.append(_summary_row(group, metric, max(about, key=_width), about, up))
    lacking = [f"`{verdict.claim.id}`" for verdict in verdicts if not any(map(_measured_cases, _parts(verdict)))]
    if lacking:
        lines += ["", f"Nothing was measured of {', '.join(lacking)}."]
    return "\n".join(lines) + "\n"


def _summary_row(group: _Group, metric: Metric, widest: Verdict, about: Sequence[Verdict], up: str | None) -> str:
    intervals = [case.interval for case in widest.cases if case.interval]
    measured, held = len(intervals), len(group.record.cases)
    slower, faster = sum(one.high < 1 for one in intervals), sum(one.low >= 1 for one in intervals)
    counts = Counter(verdict.status for verdict in about)
    return row(
        foreign(group.record.suite, "markdown"),
        foreign(group.record.subject.name, "markdown"),
        foreign(", ".join(widest.claim.baseline), "markdown"),
        metric,
        str(held) if measured == held else f"{measured} of {held}",
        "; ".join(filter(None, [f"{slower}, {measured - slower - faster}, {faster}", widest.others])),
        format_ratio(min(intervals, key=lambda one: one.estimate)),
        _mean(widest),
        ", ".join(f"{counts[status]} {status.value}" for status in VerdictStatus if counts[status]),
        _run_link(group.record.id, group.path, up),
    )


def _mean(verdict: Verdict) -> str:
    """Return the mean as text, or nothing where it is of few cases and no claim is about it."""
    is_claimed = verdict.claim.scope == "geometric mean"
    return format_ratio(verdict.geometric_mean) if is_claimed or _measured_cases(verdict) >= _FEWEST_OF_MEAN else ""


def _speed_of_light(verdict: Verdict, records: Mapping[str, Record]) -> tuple[str, ...]:
    """Return the baselines of a claim that do other work, such as a copy."""
    record = records[verdict.evidence or ""]
    return tuple(name for name in verdict.claim.baseline if does_other_work(record, name))


def does_other_work(record: Record, name: str) -> bool:
    """Return whether a baseline does other work than the subject, so that its answer is compared with nothing."""
    said = {arm.speed_of_light for case in record.cases for arm in case.arms if arm.name == name} - {None}
    return True in said if said else name in _OTHER_WORK


def _width(verdict: Verdict) -> tuple[int, int, float]:
    mean = verdict.geometric_mean.estimate if verdict.geometric_mean else math.inf
    return len(verdict.claim.baseline), _measured_cases(verdict), -mean


def _measured_cases(verdict: Verdict) -> int:
    return sum(case.interval is not None for case in verdict.cases)


def case_section(verdicts: Sequence[Verdict], records: Mapping[str, Record], up: str | None = "") -> str:
    """Return the speeds behind the verdicts: for each record and baseline a heading, its claims, and a table.

    The arguments are those of ``claim_section``.
    """
    if not verdicts:
        return _NO_CLAIMS
    lines: list[str] = []
    level = "###" if up is None else "##"  # a page of the site has a heading above
    for group in _groups(verdicts, records):
        judged = {one.claim.id: _status(one) for of_kind in group.verdicts.values() for one in of_kind}
        claims = "Claims: " + ", ".join(f"`{name}` {status}" for name, status in judged.items()) + "."
        link = _run_link(group.record.id, group.path, up, whole=True)
        run = f"Run {link} on {foreign(_where(group.record), 'markdown')}. {_HOW}."
        lines += ["", f"{level} {foreign(_heading(group), 'markdown')}", "", run, claims, "", *_case_table(group)]
    return "\n".join([*lines, "", ""]) if lines else "No case of a claim has been measured yet.\n"


class _Group(NamedTuple):
    """Verdicts about one record and its baselines, by the kind of time."""

    path: str
    record: Record
    baseline: tuple[str, ...]
    verdicts: Mapping[Metric, Sequence[Verdict]]

    @property
    def best(self) -> str:
        """What decides among several baselines."""
        return "best" if "memory" in self.verdicts else "fastest"


def _parts(verdict: Verdict) -> Sequence[Verdict]:
    return verdict.by_gpu or [verdict]


def _groups(
    verdicts: Sequence[Verdict],
    records: Mapping[str, Record],
    key_of: Callable[[Verdict], tuple[str, ...]] = lambda verdict: verdict.claim.baseline,
) -> list[_Group]:
    """Return verdicts by the record behind them and a second key: by default their baselines."""
    groups: dict[tuple[str, tuple[str, ...]], dict[Metric, list[Verdict]]] = {}
    for verdict in (part for whole in verdicts for part in _parts(whole)):
        if verdict.evidence and _measured_cases(verdict):
            by_kind = groups.setdefault((verdict.evidence, key_of(verdict)), {})
            by_kind.setdefault(verdict.claim.metric, []).append(verdict)
    return [
        _Group(path, records[path], baseline, {kind: by_kind[kind] for kind in METRICS if kind in by_kind})
        for (path, baseline), by_kind in groups.items()
    ]


def _claim_row(verdict: Verdict, up: str | None) -> str:
    lowest = lowest_case(verdict)
    low = f"{format_ratio(lowest.interval)}, {lowest.name}" if lowest else ""
    links = [_run_link(part.record or "", part.evidence, up) for part in _parts(verdict) if part.evidence]
    about = (_sentence(verdict.claim.sentence), _status(verdict), foreign(low, "markdown"), _mean(verdict))
    return row(f"`{verdict.claim.id}`", *about, ", ".join(links) or "none")


def _sentence(text: str) -> str:
    """Return the sentence of a claim: what it has between backticks, a pattern of cases, is code."""
    return "".join(
        _code(part) if number % 2 else foreign(part, "markdown") for number, part in enumerate(text.split("`"))
    )


def _status(verdict: Verdict) -> str:
    notes = "; ".join(foreign(note.partition(":")[0], "markdown") for note in verdict.notes)  # the reason has all of it
    return f"**{verdict.status.value}**" + (f" ({notes})" if notes else "")


def _case_table(group: _Group) -> list[str]:
    """Return a table with three columns for a kind of time. A case has a row if a claim is about it."""
    record = group.record
    subject = record.subject.name
    header, rule = ["case"], ["---"]
    for kind in group.verdicts:
        gain = "times less memory" if kind == "memory" else f"speedup, {kind}"
        label = group.baseline[0] if len(group.baseline) == 1 else f"{group.best} baseline"
        header += [foreign(f"{subject}, {kind}", "markdown"), foreign(f"{label}, {kind}", "markdown"), gain]
        rule += ["---:"] * 3
    lines = [row(*header), row(*rule)]
    left_out = 0
    for case in record.cases:
        arms = {arm.name: arm for arm in case.arms}
        found = {
            kind: next((c for verdict in of_kind for c in verdict.cases if c.name == case.name), None)
            for kind, of_kind in group.verdicts.items()
        }
        if not any(found.values()):
            left_out += 1
            continue
        cells = [foreign(case.name, "markdown")]
        for kind, judged in found.items():
            if judged is None or judged.interval is None:
                cells += ["", "", foreign(judged.reason, "markdown") if judged else ""]
                continue
            named = f" ({judged.baseline})" if len(group.baseline) > 1 else ""
            ours, theirs = (_measured(case, arms[name], kind) for name in (subject, judged.baseline))
            cells += [ours, theirs + foreign(named, "markdown"), format_ratio(judged.interval)]
        lines.append(row(*cells))
    if left_out:
        cases = f"{left_out} of {len(record.cases)} cases"
        lines += ["", f"{cases} are in the record, and no claim of this comparison is about them."]
    return lines


def _measured(case: CaseRecord, arm: Arm, metric: Metric) -> str:
    if metric == "memory":
        return format_bytes(arm.peak_bytes or 0)
    return format_seconds(rates_of(case, arm.name)[metric].seconds)  # a record need not have them worked out


def _heading(group: _Group) -> str:
    """Return a heading that no other table has, so that each can be linked."""
    record, names = group.record, group.baseline
    kinds = ", ".join(group.verdicts)
    baselines = f"the {group.best} of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"Suite {record.suite}: {record.subject.name} against {baselines} on {_card(record)}, {kinds}"


def _where(record: Record) -> str:
    environment = record.environment
    names = ("torch", "triton", "cudnn")
    versions = [f"{name} {environment.versions[name]}" for name in names if name in environment.versions]
    where = ", ".join([_card(record), *([f"driver {environment.driver}"] if environment.driver else []), *versions])
    return where + (f", commit {record.tree.commit[:12]}" if record.tree.commit else "")


def _card(record: Record) -> str:
    return record.environment.place or "no GPU"


def _run_link(run: str, path: str, up: str | None, *, whole: bool = False) -> str:
    """Return the moment of a run, or its whole id, with a link to its file where there is a way ``up`` to it."""
    text = run if whole else run.partition("-")[0]
    return _code(text) if up is None else f"[{foreign(text, 'markdown')}]({up}{quote(path)})"


def _code(text: str) -> str:
    """Return a foreign text in a code span, which it cannot end."""
    return f"`{foreign(text).replace('`', chr(39))}`"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(_UNESCAPED_BAR.sub(r"\|", cell).replace("\n", " ") for cell in cells) + " |"


_SECTIONS: dict[SectionKind, Callable[[Sequence[Verdict], Mapping[str, Record], str | None], str]] = {
    "summary": summary_section,
    "slower": slower_section,
    "verdicts": claim_section,
    "cases": case_section,
    "rules": rule_section,
}
