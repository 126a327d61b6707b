"""Figures of speed or memory in Markdown that name no claim.

A *figure* is a multiple, a percentage, a rate, a time or a comparison in words, as ``_RULES`` and ``_COLUMN`` have
them: patterns over words that stand near each other, with no grammar of English. It is looked for in each sentence,
heading, list item and row of a table, in inline code and alt texts too. Blocks of code are printed
output, which other tests compare; blocks between the marks that ``flashmoe readme`` renders are its own.

A figure is *backed* where its sentence (or row) holds the id of a claim in ``claims/*.toml``: as
text, in inline code, in a link, or in a comment ``<!-- claim: ID -->``. It is *waived* by a comment with a reason,
``<!-- no claim: REASON -->``. A comment on a line of its own counts for the whole block below it. All else is
*asserted*. Whether a claim holds is the business of ``flashmoe verify``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Literal, get_args

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ...errors import InputError
from ..judge.claims import Claim
from ..records.files import read_page

Status = Literal["backed", "waived", "asserted"]
SectionKind = Literal[
    "summary", "slower", "verdicts", "cases", "rules"
]  # what `flashmoe readme` renders between two marks

_NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?"
_COUNT = rf"(?:{_NUMBER}|\b(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty|hundred))"
_X = rf"{_NUMBER}\s*[x×](?![\w×]|\s*\d|\s+(?:(?:the|its|as|of\s+the)\s+)?(?:errors?|sizes?|many|GPUs?)\b)"  # no shape
_TIMES = rf"(?:{_X}|{_COUNT}[\s-]*(?:times|fold)\b|\bfactor\s+of\s+{_COUNT})"
_PERCENT = rf"{_NUMBER}\s*(?:%|percent\b|per\s+cent\b)(?!\s*(?:confidence|intervals?|CI)\b)"
_PART = (
    r"\b(?:twice|doubl(?:e|es|ed|ing)|tripl(?:e|es|ed|ing)|half|halv(?:e|es|ed|ing)|thirds?|quarters?"
    r"|orders?\s+of\s+magnitude)\b"
)
_SPEED = (
    r"\b(?:fast(?:er)?|quicker|slow(?:er)?|longer|as\s+long|speeds?(?![\s-]of[\s-]light)|speed-?ups?|throughput|latency"
    r"|performance|bandwidth|[MH]FU|tokens\s*(?:/|per\s)|run[\s-]?time|outperform\w*|beats?"
    r"|(?<!shared\s)memory|VRAM)\b"
)
_OF_TIME = (
    r"\s+(?:(?:of|the|less|lower|more|its|our|as\s+much|wall|kernel|graph|run|peak|\w+['’]s)\s+){1,4}"
    r"(?:time|rate|speed|throughput)\b"
)
_NEAR, _CLOSE = r"[^,:;|()]{0,40}?", r"[^,:;|()]{0,20}?"  # in the same clause: six words away, or three
# The name of an implementation, a few words on: a capital letter, a digit or an underscore.
_NAME = r"\s+(?:[a-z'’-]+\s+){0,3}?(?:(?-i:\w*[A-Z_]\w|fa\d|sdpa|torch|triton|eager|ours\b))"


def _either(one: str, other: str, between: str = _NEAR) -> str:
    """Return a pattern for two things near each other, in either order."""
    return f"(?:{one}{between}{other}|{other}{between}{one})"


_RULES = re.compile(
    "|".join(
        [
            _either(f"(?:{_TIMES}|(?<!\\bat\\s){_PERCENT})", _SPEED),
            rf"(?:{_TIMES}|{_PERCENT}|{_PART}|(?<![\w.])\d?\.\d+){_OF_TIME}",
            rf"\btime\b{_CLOSE}\bby\s+(?:about\s+)?{_PERCENT}",
            rf"\bspeed-?ups?\s*(?:of|is|was|[:=])\s*{_NUMBER}",
            _X,  # "1.8x" alone
            _either(_PART, _SPEED, _CLOSE),
            # Rates, and times that kernels have.
            rf"{_NUMBER}\s*[kKM]?\s*(?:[TPG]FLOPs?(?:/s)?\b|[TG]i?B/s|(?:tok(?:ens)?|samples|steps)\s*(?:/|per|a)\s*s)",
            _either(r"\b[MH]FU\b", _NUMBER),
            rf"{_NUMBER}\s*(?:[uµμ]s|ns|microseconds?)\b",
            rf"\b(?:takes?|took|needs?|needed|latency|runs?\s+in|ran\s+in)\b{_CLOSE}{_NUMBER}\s*(?:ms|milliseconds?)\b",
            rf"{_NUMBER}\s*(?:ms|milliseconds?)\s+(?:a|per)\s+(?:call|step|token|layer)\b",
            # Bytes that are saved.
            rf"{_NUMBER}\s*[KMGT]i?B\s+(?:less|fewer|saved)\b|\bsav(?:es?|ed|ing)\s+{_NUMBER}\s*[KMGT]i?B\b",
            # Comparisons in words.
            rf"\b(?:as\s+(?:fast|quick)\s+as|(?:faster|slower|quicker)\s+than|less\s+(?:peak\s+)?memory\s+than){_NAME}\w*",
            rf"\b(?:outperform|outpac|outrun|surpass|beat)(?:s|es|ed|ing|en)?{_NAME}\w*",
            r"\bthe\s+fastest\s+(?!of\b|baselines?\b|one\b|cases?\b|in\b|that\b|is\b|arms?\b|runs?\b|rivals?\b)\w+",
        ]
    ),
    re.IGNORECASE,
)
# A column of a table with such a header holds figures, and a cell of it with such a number is one.
_COLUMN = re.compile(
    r"speed-?ups?|faster|slower|times\s+(?:as\s+)?fast|throughput|latency|tokens\s*/|FLOPs?|[TG]B/s|\b[MH]FU\b"
    r"|\b(?:ns|us|µs|μs|ms)\b|\b(?:wall|kernel|graph)\s+time\b|peak\s+memory|less\s+memory",
    re.IGNORECASE,
)
_CELL = re.compile(rf"^[\s*_`~≈<>≤≥]*{_NUMBER}")

_COMMENT = re.compile(r"<!--\s*(no claim|claim)\s*:\s*(.*?)\s*-->", re.DOTALL)
_ANY_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"</?[a-zA-Z][^>]*>")
_ALT = re.compile(r"(?:alt|title|aria-label)\s*=\s*(\"[^\"]*\"|'[^']*')", re.IGNORECASE)
_LINK = re.compile(r"\]\([^)\s]*\)|https?://\S+")
_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*[a-z0-9]")
_MEMORY = re.compile(r"\b(?:memory|VRAM)\b(?!\s+bandwidth)", re.IGNORECASE)
_SELECTION = re.compile(r"\b(\d+ of \d+) cases\b")
# A sentence ends at a stop before a blank and anything but a small letter; a comment behind the stop belongs to it.
_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.!?][\"”)\]*_`]*(?:\s*<!--.*?-->)*\s+(?=[^a-z\s<])", re.DOTALL)
_MARK = re.compile(rf"[ \t]*<!-- ({'|'.join(get_args(SectionKind))}):(begin|end) -->[ \t]*")
_SUFFIXES = (".md", ".markdown")


@dataclass(frozen=True)
class Finding:
    """One figure, and what it rests on."""

    file: Path
    line: int
    status: Status
    words: str  # that state it, e.g. "1.7x faster"
    reason: str  # the claims that back it, why it is waived, or what is missing


@dataclass(frozen=True)
class _Unit:
    """A sentence, or a row of a table."""

    line: int
    raw: str  # as it is written
    cells: tuple[str, ...] = ()  # of a row
    header: tuple[str, ...] = ()  # of its table
    above: str = ""  # comments on the lines before the block

    @property
    def comments(self) -> Mapping[str, str]:
        """What its comments say, by their first word."""
        found = _COMMENT.findall(f"{self.above}\n{self.raw}")
        return {kind: ", ".join(said for of, said in found if of == kind and said) for kind, _ in found}


def markdown_in(folder: Path) -> list[Path]:
    """Return the Markdown files below a folder, if there is one; what is hidden in it is left out."""
    inside = (below for below in sorted(folder.rglob("*")) if below.suffix in _SUFFIXES and below.is_file())
    return [below for below in inside if not any(part.startswith(".") for part in below.relative_to(folder).parts)]


def markdown_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files named, and those in the folders named; what is hidden is left out.

    Raises ``InputError``: a path does not exist, or a folder holds no Markdown.
    """
    found: dict[Path, None] = {}
    for path in paths:
        files = markdown_in(path) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path}: there is no Markdown file in this folder")
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        found |= dict.fromkeys(files)
    return list(found)


def check_file(path: Path, claims: Mapping[str, Claim]) -> list[Finding]:
    """Return every figure of one Markdown file with what it rests on.

    Args:
        path: the file.
        claims: those of the repository, by id.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        text = read_page(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error
    findings = []
    for unit in _units(path, text):
        for words in _figures(unit):
            status, reason = _judge(unit, words, claims)
            findings.append(Finding(path, unit.line, status, words, reason))
    return findings


def find_figures(text: str) -> list[str]:
    """Return the words of one sentence that state a figure of speed or memory."""
    return _figures(_Unit(1, text))


def _figures(unit: _Unit) -> list[str]:
    found = [" ".join(match[0].split()) for match in _RULES.finditer(_visible(unit.raw))]
    for head, cell in zip(unit.header, unit.cells, strict=False):
        if _COLUMN.search(head) and _CELL.match(cell) and not _RULES.search(cell):  # else it was found already
            found.append(f"{head.strip()}: {cell.strip()}")
    return found


def _judge(unit: _Unit, words: str, claims: Mapping[str, Claim]) -> tuple[Status, str]:
    """Return what a figure rests on."""
    if waiver := unit.comments.get("no claim"):
        return "waived", waiver
    text = f"{unit.above}\n{unit.raw}"
    named = [claims[name] for name in dict.fromkeys(_ID.findall(text)) if name in claims]
    if not named:
        unknown = unit.comments.get("claim")
        return "asserted", f"there is no claim {unknown!r} in claims/" if unknown else "it names no claim"
    reasons = [_why_not(f"{' '.join(unit.header)} {unit.raw}", words, claim) for claim in named]
    if all(reasons):
        return "asserted", "; ".join(dict.fromkeys(reasons))
    return "backed", ", ".join(claim.id for claim, reason in zip(named, reasons, strict=True) if not reason)


def _why_not(text: str, words: str, claim: Claim) -> str:
    """Return why ``claim`` does not back a figure; empty: it does."""
    selection = _SELECTION.search(claim.sentence)
    if claim.cases and not (selection and re.search(rf"\b{selection[1]}\b", text)):
        return (
            f"claim {claim.id} is about {selection[0] if selection else 'some cases'}, and the sentence does not say so"
        )
    if claim.metric == "memory" and not _MEMORY.search(text):
        return f"claim {claim.id} is about memory"
    if claim.metric != "memory" and _MEMORY.search(words):
        return f"claim {claim.id} is about {claim.metric} time"
    multiples = [float(number.replace(",", "")) for number in re.findall(rf"({_NUMBER})\s*(?:[x×]|times\b)", words)]
    if max(multiples, default=0) > claim.factor * (1 + 1e-9):
        return f"claim {claim.id} is of {claim.factor:g}x"
    return ""


def _units(path: Path, markdown: str) -> Iterator[_Unit]:
    """Yield what a Markdown text is made of, in its order, without what is rendered."""
    above, rendered = "", ""  # comments for the next block; the kind of section that is open
    block: list[Token] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        block.append(token)
        if token.level or token.nesting > 0:
            continue
        ended, block = block, []
        text = token.content if token.type == "html_block" else ""
        if mark := _MARK.fullmatch(text.strip("\n")):
            rendered = mark[1] if mark[2] == "begin" else ""
        elif text and not _ANY_COMMENT.sub("", text).strip():
            above += text
        elif not rendered:
            yield from _block_units(ended, above)
            above = ""
    if rendered:
        raise InputError(f"{path}: expected the line <!-- {rendered}:end --> after <!-- {rendered}:begin -->, got none")


def _block_units(block: Sequence[Token], above: str) -> Iterator[_Unit]:
    """Yield the units of a paragraph, a list or a table; ``above`` has the comments before it."""
    header: tuple[str, ...] = ()
    row: list[str] | None = None
    line = 1
    for token in block:
        line = token.map[0] + 1 if token.map else line  # cells have none
        if token.type == "html_block":
            yield from _sentences(line, token.content, above)
        elif token.type in ("table_open", "tr_open"):
            header, row = ((), None) if token.type == "table_open" else (header, [])
        elif token.type == "inline" and row is not None:
            row.append(token.content)
        elif token.type == "inline":
            yield from _sentences(line, token.content, above)
        elif token.type == "tr_close" and row is not None:
            cells = tuple(map(_visible, row))
            yield _Unit(line, " | ".join(row), cells, header, above)
            header, row = header or cells, None


def _sentences(line: int, text: str, above: str) -> Iterator[_Unit]:
    start = 0
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        sentence = text[start:end].lstrip()
        if sentence:
            yield _Unit(line + text.count("\n", 0, end - len(sentence)), sentence, above=above)
        start = end


def _visible(raw: str) -> str:
    """Return a text as a reader sees it: without comments, tags and the targets of links, with alt texts."""
    text = _TAG.sub(lambda tag: f" {' '.join(_ALT.findall(tag[0]))} ", _ANY_COMMENT.sub(" ", raw))
    return re.sub(r"[`*]", "", unescape(_LINK.sub(" ", text)))
