"""Sentences of Markdown that assert a speed or a saving of memory, each held against the claims that it names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..errors import InputError
from ..gpu.specs import SPECS, name_words
from .assertions import Assertion, find_assertions
from .evidence import Record
from .judge import Verdict, holds
from .prose import Sentence, read_sentences
from .readme import BEGIN, END, render_readme
from .subject import BUILTIN_OPERATORS

Status = Literal["backed", "waived", "asserted"]

_SHORTEST_SENTENCE = 20  # letters of a claim's sentence that is recognised where it is written out
_EXACT = 1e-9  # 2.1 is 2.1, however it was worked out

_SUFFIXES = (".md", ".markdown")


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
    def rivals(self) -> Mapping[str, Sequence[str]]:
        """What prose calls every baseline that is known here: its name -> names in words."""
        from .operator import load_operator
        from .verify import suite_now

        found: dict[str, Sequence[str]] = {}
        for operator in BUILTIN_OPERATORS:
            rivals = load_operator(operator).rivals()
            found |= {name: (name, *getattr(rival, "also_called", ())) for name, rival in rivals.items()}
        for record in self._judged[1].values():
            found |= suite_now(record, self.repository).rivals if self.repository else {}
        return found

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict on every claim, by its id."""
        return self._judged[0]

    def most(self, verdict: Verdict, kind: Literal["TFLOP/s", "TB/s"]) -> float:
        """Return the highest rate of any arm of the claim in the runs that demonstrate it."""
        paths = [part.evidence for part in verdict.by_gpu or [verdict] if part.evidence]
        claim, rates = verdict.claim, [0.0]
        for record in (self._judged[1][path] for path in paths):
            for arm in (arm for case in claim.cases_of(record) for arm in case.arms):
                found = arm.rates.get(claim.metric)
                if found is not None and arm.name in (claim.subject, *claim.baseline):
                    rates.append(found.tflops if kind == "TFLOP/s" else found.tbytes_per_second)
        return max(rates)


def markdown_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files named, and those in the folders named; what is hidden is left out.

    Raises:
        InputError: a path does not exist, or a folder holds no Markdown.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = (below for below in sorted(path.rglob("*")) if below.suffix in _SUFFIXES and below.is_file())
            files = [b for b in inside if not any(part.startswith(".") for part in b.relative_to(path).parts)]
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
    table = _rendered_table(path, text)
    findings = []
    for sentence in read_sentences(text):
        if table is not None and sentence.line in table:
            continue
        findings += [_judge(path, sentence, found, backing) for found in _assertions(sentence)]
    if table is not None:
        reason = "as `flashmoe readme` renders it from claims/ and evidence/, with every verdict"
        findings.append(Finding(path, table.start, "backed", "the table of speeds", "", reason))
    return sorted(findings, key=lambda finding: finding.line)


def _assertions(sentence: Sentence) -> Iterator[Assertion]:
    return iter(find_assertions(sentence.prose, sentence.context))


def _rendered_table(path: Path, text: str) -> range | None:
    """Return the lines of the table of speeds, if it is there and as it should be."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not (begin and end) or not (path.resolve().parent / "claims").is_dir() or render_readme(path) != text:
        return None
    first = before.count("\n") + 1
    return range(first, first + inside.count("\n") + 1)


def _judge(path: Path, sentence: Sentence, found: Assertion, backing: Backing) -> Finding:
    """Return what one assertion rests on."""

    def finding(status: Status, reason: str, claim: str = "") -> Finding:
        text = " ".join(sentence.text.split())
        return Finding(path, sentence.line_of(found.start), status, found.words, text, reason, claim)

    if sentence.marks.waiver:
        return finding("waived", sentence.marks.waiver)
    named = _named(sentence, backing)
    reasons = [
        _why_not(found, name, backing) or _elsewhere(sentence, name, backing) or _of_another(sentence, name, backing)
        for name in named
    ]
    for name, reason in zip(named, reasons, strict=True):
        if not reason:
            verdict = backing.verdicts[name]
            return finding("backed", f"claim {name}, {verdict.status.value}", name)
    return finding("asserted", "; ".join(reasons) or "it names no claim")


def _elsewhere(sentence: Sentence, name: str, backing: Backing) -> str:
    """Return which GPU a sentence names that the claim is not about; empty: none."""
    words = frozenset(re.findall(r"\w+", sentence.text.casefold()))
    claim = backing.verdicts[name].claim
    said = [gpu for gpu in SPECS if name_words(gpu) <= words]
    longest = [gpu for gpu in said if not any(name_words(gpu) < name_words(other) for other in said)]
    others = [gpu for gpu in longest if not claim.fits_gpu(gpu)]
    return f"claim {name} is about {', '.join(claim.gpu)}, and this about {', '.join(others)}" if others else ""


def _of_another(sentence: Sentence, name: str, backing: Backing) -> str:
    """Return which rival a sentence names that the claim is not against; empty: none."""
    text = _as_words(sentence.text)
    said = [rival for rival, names in backing.rivals.items() if any(_as_words(each) in text for each in names)]
    # "SDPA with its cuDNN backend" is about the latter.
    said = [rival for rival in said if not any(other.startswith(f"{rival}-") for other in said)]
    claim = backing.verdicts[name].claim
    others = [rival for rival in said if rival not in claim.baseline]
    return f"claim {name} is against {', '.join(claim.baseline)}, and this about {', '.join(others)}" if others else ""


def _as_words(text: str) -> str:
    """Return the words of a text between blanks, so that one is found as a whole."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.casefold()))} "


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


def _why_not(found: Assertion, name: str, backing: Backing) -> str:
    """Return why the claim of this name does not back an assertion; empty: it does."""
    verdict = backing.verdicts.get(name)
    if verdict is None:
        near = difflib.get_close_matches(name, backing.verdicts, n=1)
        return f"there is no claim {name!r} in claims/" + (f", did you mean {near[0]}?" if near else "")
    if not holds(verdict, strict=backing.strict):
        return f"claim {name} is {verdict.status.value}"
    if found.kind in ("TFLOP/s", "TB/s"):
        most = backing.most(verdict, found.kind)
        return (
            ""
            if found.figure <= most * (1 + _EXACT)
            else f"the runs of claim {name} show at most {most:.4g} {found.kind}"
        )
    if found.kind != "speedup":
        return f"claim {name} says how many times as fast at least, which is no {found.kind}"
    if found.figure > verdict.claim.factor * (1 + _EXACT):
        return f"claim {name} says {verdict.claim.factor:g}x, and this {found.figure:.4g}x"
    return ""
