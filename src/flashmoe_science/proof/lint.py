"""Sentences of Markdown that assert a speed or a saving of memory, each held against the claims that it names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..errors import InputError, ProofError
from .assertions import Assertion, find_assertions
from .evidence import Record
from .judge import Verdict, holds
from .prose import Sentence, markdown_in, read_sentences
from .readme import Judged, Section, SectionKind, compare_sections, find_sections, repository_of, row
from .wording import Shown, figure_fault, joined, overstatement, own_rival_names, shown_by, word_faults
from .words import counted

Status = Literal["backed", "waived", "asserted"]

_AS_RENDERED: Mapping[SectionKind, str] = {
    "slower": "as `flashmoe readme` renders it from claims/ and evidence/, with every verdict",
    "summary": "as `flashmoe readme` renders it from claims/ and evidence/, with every verdict",
    "verdicts": "as `flashmoe readme` renders it from claims/ and evidence/, with every verdict",
    "cases": "as `flashmoe readme` renders them from claims/ and evidence/, with every verdict",
}
_SHORTEST_SENTENCE = 20  # letters of a claim's sentence that is recognised where it is written out


@dataclass(frozen=True)
class Finding:
    """One assertion, and what it rests on."""

    file: Path
    line: int
    status: Status
    words: str  # what asserts it, e.g. "1.7x faster"
    sentence: str
    reason: str
    claim: str = ""  # the id of the one that backs it


@dataclass(frozen=True)
class Backing:
    """What sentences can rest on: the verdicts of a repository, worked out when one is first asked for."""

    repository: Path | None
    strict: bool = False  # a stale claim backs nothing

    @cached_property
    def _judged(self) -> tuple[Mapping[str, Verdict], Mapping[str, Record]]:
        from .verify import read_records, verify_claims  # imports torch, which a page without a figure does without

        if self.repository is None:
            return {}, {}
        return {v.claim.id: v for v in verify_claims(self.repository)}, read_records(self.repository)

    @cached_property
    def _names(self) -> tuple[Mapping[str, Sequence[str]], Collection[str]]:
        from .verify import suite_now

        verdicts, records = self._judged
        suites = [suite_now(record, self.repository) for record in records.values()] if self.repository else []
        rivals = joined([own_rival_names(), *(suite.rivals for suite in suites)])
        subjects = {record.subject.name for record in records.values()}
        return rivals, subjects | {verdict.claim.subject for verdict in verdicts.values()}

    @property
    def judged(self) -> Judged:
        """What the tables of the repository's pages are rendered from."""
        verdicts, records = self._judged
        return Judged([*verdicts.values()], records)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict on every claim, by its id."""
        return self._judged[0]

    def shown(self, name: str) -> Shown:
        """Return the claim of this name, with the run that decides on it."""
        verdict = self.verdicts[name]
        return shown_by(verdict.claim, self._judged[1].get(verdict.evidence or ""), *self._names)


def markdown_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files named, and those in the folders named; what is hidden is left out.

    Raises:
        InputError: a path does not exist, or a folder holds no Markdown.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files = markdown_in(path)
            if not files:
                raise InputError(f"{path}: there is no Markdown file in this folder")
            found |= dict.fromkeys(files)
        elif path.is_file():
            found[path] = None
        else:
            raise InputError(f"{path}: there is no such file or folder")
    return list(found)


def lint_file(path: Path, backing: Backing) -> list[Finding]:
    """Return what one Markdown file asserts, in its order.

    Raises:
        InputError: the file cannot be read.
        ClaimError: a claim file of the repository is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error
    own = _own_backing(path, backing)
    sections = _rendered_sections(path, text, own)
    findings: list[Finding] = []
    within: dict[Section, list[Finding]] = {section: [] for section in sections}
    for sentence in read_sentences(text):
        section = next((each for each in sections if each.first <= sentence.line <= each.last), None)
        if section is None or sections[section]:
            found = [_judge(path, sentence, assertion, backing) for assertion in _assertions(sentence)]
            (findings if section is None else within[section]).extend(found)
    for section, differs in sections.items():
        if differs:
            findings += _not_as_rendered(path, text, section, differs, within[section])
            continue
        reason = _AS_RENDERED[section.kind]
        findings.append(Finding(path, section.first, "backed", section.title, "", reason))
        if section.kind != "cases":
            findings += _overstated(path, text, section, own)
    return sorted(findings, key=lambda finding: finding.line)


def _not_as_rendered(path: Path, text: str, section: Section, differs: int, found: list[Finding]) -> Iterator[Finding]:
    """Yield what is found between two marks, whose line ``differs`` is not as rendered: all that is asserted as one."""
    asserted = [each for each in found if each.status == "asserted"]
    yield from (each for each in found if each.status != "asserted")
    if asserted:
        line = text.split("\n")[differs - 1]
        figures = counted(len(asserted), "figure")
        reason = f"`flashmoe readme` renders this line otherwise now; {figures} between the marks name no claim"
        yield Finding(path, differs, "asserted", section.title, line, reason)


def _assertions(sentence: Sentence) -> Iterator[Assertion]:
    return iter(find_assertions(sentence.prose, sentence.context))


def _own_backing(path: Path, backing: Backing) -> Backing:
    """Return what is rendered on a page from: its own repository, which need not be the one that is linted from."""
    repository = repository_of(path)
    return backing if backing.repository == repository else Backing(repository, strict=backing.strict)


def _rendered_sections(path: Path, text: str, own: Backing) -> dict[Section, int]:
    """Return the sections that are there, each with the first line that is not as it should be, or 0.

    Where marks are not in pairs there are none, so that all that stands there is judged as any other sentence is.
    """
    if own.repository is None or not (own.repository / "claims").is_dir():
        return {}
    try:
        find_sections(path, text)
    except ProofError:  # most pages have no marks, and the rest `flashmoe readme` says
        return {}
    return compare_sections(path, text, own.repository, own.judged)


def _overstated(path: Path, text: str, section: Section, own: Backing) -> Iterator[Finding]:
    """Yield the claims of a table whose own sentences say more than their keys, whatever the verdict beside them."""
    if section.kind not in ("speeds", "verdicts"):  # else none of their sentences stands there
        return
    lines = text.split("\n")
    table = range(section.first, section.last + 1)
    for name, verdict in own.verdicts.items():
        said = overstatement(own.shown(name))
        cell = row(f"`{verdict.claim.id}`", verdict.claim.sentence)[:-2]
        if said:
            line = next((at for at in table if lines[at - 1].startswith(cell)), section.first)
            yield Finding(path, line, "asserted", verdict.claim.sentence, "", f"claim {name}: {said}")


def _judge(path: Path, sentence: Sentence, found: Assertion, backing: Backing) -> Finding:
    """Return what one assertion rests on."""

    def finding(status: Status, reason: str, claim: str = "") -> Finding:
        text = " ".join(sentence.text.split())
        return Finding(path, sentence.line_of(found.start), status, found.words, text, reason, claim)

    if sentence.marks.waiver:
        return finding("waived", sentence.marks.waiver)
    named = _named(sentence, backing)
    reasons = [_why_not(sentence, found, name, backing) for name in named]
    for name, reason in zip(named, reasons, strict=True):
        if not reason:
            verdict = backing.verdicts[name]
            return finding("backed", f"claim {name}, {verdict.status.value}", name)
    return finding("asserted", "; ".join(reasons) or "it names no claim")


def _named(sentence: Sentence, backing: Backing) -> list[str]:
    """Return the ids of the claims that a sentence names, or whose own sentence it is."""
    named = dict.fromkeys(sentence.marks.claims)
    if backing.repository is not None:
        text = " ".join(sentence.text.split()).casefold()
        for name, verdict in backing.verdicts.items():
            own = " ".join(verdict.claim.sentence.split()).casefold().rstrip(".")
            if name in sentence.marks.code or (len(own) >= _SHORTEST_SENTENCE and own in text):
                named[name] = None
    return list(named)


def _why_not(sentence: Sentence, found: Assertion, name: str, backing: Backing) -> str:
    """Return why the claim of this name does not back an assertion; empty: it does."""
    verdict = backing.verdicts.get(name)
    if verdict is None:
        near = difflib.get_close_matches(name, backing.verdicts, n=1)
        return f"there is no claim {name!r} in claims/" + (f", did you mean {near[0]}?" if near else "")
    if not holds(verdict, strict=backing.strict):
        return f"claim {name} is {verdict.status.value}"
    shown = backing.shown(name)
    text = " ".join(f"{sentence.text} {sentence.context}".split())
    figure = figure_fault(found, " ".join(sentence.text.split()), shown)
    faults = [figure] if figure else word_faults(text, shown)
    return f"claim {name}: {'; '.join(faults)}" if faults else ""
