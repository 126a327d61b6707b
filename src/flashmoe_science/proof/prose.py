"""Markdown as sentences: where each stands, what of it is prose, and which claims it names.

Code is printed output and not prose: blocks are left out, code in a line is blanked. So is what stands in quotation
marks, which are somebody's words, and HTML comments, of which two are read::

    <!-- claim: ID -->           after a sentence: it rests on this claim. On a line of its own: so does the next block
    <!-- no claim: REASON -->    the same, of what asserts nothing, though it reads as if it did
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

_COMMENT = re.compile(r"<!--\s*(no claim|claim)\s*:\s*(.*?)\s*-->", re.DOTALL)
_ANY_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_LINK = re.compile(r"claims/[^#]*\.toml#(?P<id>.+)$")
_QUOTED = re.compile(r"\"[^\"]{1,300}\"|“[^”]{1,300}”")
_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_SUFFIXES = (".md", ".markdown")
# A sentence ends at a stop before a blank and anything but a small letter, and not after these.
_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)(?<!\bapprox)[.!?][\"”)\]*_]*\s+(?=[^a-z\s])")


@dataclass(frozen=True)
class Marks:
    """What a sentence says of its own backing."""

    claims: tuple[str, ...] = ()  # ids that it names in comments and links
    code: tuple[str, ...] = ()  # its code that could be an id
    waiver: str = ""  # why it asserts nothing

    def __add__(self, other: Marks) -> Marks:
        return Marks(self.claims + other.claims, self.code + other.code, self.waiver or other.waiver)


@dataclass(frozen=True)
class Sentence:
    """A sentence, a heading, or a row of a table."""

    line: int  # on which it begins, from 1
    text: str  # as a reader sees it
    prose: str  # the same length, with blanks for what is no prose
    marks: Marks
    context: str = ""  # the header of the table that it is a row of

    def line_of(self, offset: int) -> int:
        """Return the line on which the letter at ``offset`` stands."""
        return self.line + self.text.count("\n", 0, offset)


@dataclass
class _Text:
    """Text that grows piece by piece, with its prose, and marks where they stand."""

    text: str = ""
    prose: str = ""
    marks: list[tuple[int, Marks]] = field(default_factory=list)

    def add(self, text: str, *, prose: bool = True, marks: Marks | None = None) -> None:
        if marks is not None:
            self.marks.append((len(self.text), marks))
        self.text += text
        self.prose += text if prose else _blank(text)

    def in_range(self, start: int, end: int) -> Marks:
        return sum((marks for place, marks in self.marks if start <= place <= end), Marks())


def markdown_in(folder: Path) -> list[Path]:
    """Return the Markdown files below a folder, if there is one; what is hidden in it is left out."""
    inside = (below for below in sorted(folder.rglob("*")) if below.suffix in _SUFFIXES and below.is_file())
    return [below for below in inside if not any(part.startswith(".") for part in below.relative_to(folder).parts)]


def read_sentences(markdown: str) -> list[Sentence]:
    """Return the sentences of a Markdown text, in their order."""
    found: list[Sentence] = []
    pending, scope, depth = Marks(), Marks(), -1  # marks of the next block; those that hold now, and how deep
    header = ""
    row: list[Token] | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "html_block":
            comments = _read_comments(token.content)
            pending += comments
            found += _sentences(_html(token), token, scope)
            continue
        if token.nesting == 1 and depth < 0 and pending != Marks():
            scope, pending, depth = pending, Marks(), token.level
        if token.type == "tr_open":
            row = []
        elif token.type == "inline" and row is not None:
            row.append(token)
        elif token.type == "inline":
            found += _sentences(_inline(token), token, scope)
        elif token.type == "tr_close" and row:
            made = _row(row, scope, header)
            header = header or made.prose
            found.append(made)
            row = None
        elif token.type == "table_close":
            header = ""
        if token.nesting == -1 and token.level == depth:
            scope, depth = Marks(), -1
    return found


def _sentences(text: _Text, token: Token, scope: Marks) -> Iterator[Sentence]:
    """Yield the sentences of one block; a comment behind a full stop belongs to the sentence before it."""
    prose = _QUOTED.sub(lambda quoted: _blank(quoted[0]), text.prose)
    ends = [match.end() for match in _END.finditer(prose)]
    first = token.map[0] + 1 if token.map else 1
    for start, end in zip([0, *ends], [*ends, len(prose)], strict=True):
        skipped = len(text.text[start:end]) - len(text.text[start:end].lstrip())
        line = first + text.text.count("\n", 0, start + skipped)
        own = text.in_range(start, end - 1 if end < len(prose) else end)
        if prose[start:end].strip():
            yield Sentence(line, text.text[start + skipped : end], prose[start + skipped : end], own + scope)


def _row(cells: Sequence[Token], scope: Marks, header: str) -> Sentence:
    """Return a row of a table as one sentence: its cells belong together."""
    text = _Text()
    for cell in cells:
        text.add(" | " if text.text else "")
        inner = _inline(cell)
        text.marks += [(len(text.text) + place, marks) for place, marks in inner.marks]
        text.text += inner.text
        text.prose += inner.prose
    (whole,) = [*_whole(text, cells[0], scope)]
    return replace(whole, context=header)


def _whole(text: _Text, token: Token, scope: Marks) -> Iterator[Sentence]:
    prose = _QUOTED.sub(lambda quoted: _blank(quoted[0]), text.prose)
    line = token.map[0] + 1 if token.map else 1
    yield Sentence(line, text.text, prose, text.in_range(0, len(text.text)) + scope)


def _inline(token: Token) -> _Text:
    """Return what stands in one paragraph, heading or cell."""
    text = _Text()
    for child in token.children or []:
        if child.type in ("softbreak", "hardbreak"):
            text.add("\n")
        elif child.type == "code_inline":
            code = (child.content,) if _ID.fullmatch(child.content) else ()
            text.add(child.content, prose=False, marks=Marks(code=code))
        elif child.type == "html_inline":
            text.add(_blank(child.content), marks=_read_comments(child.content))
        elif child.type == "link_open":
            link = _LINK.search(str(child.attrs.get("href", "")))
            text.add("", marks=Marks(claims=(link["id"],)) if link else None)
        elif child.type == "image":
            text.add(child.content)
        else:
            text.add(child.content)
    return text


def _html(token: Token) -> _Text:
    """Return the text of an HTML block."""
    text = _Text()
    without = _ANY_COMMENT.sub(lambda comment: _blank(comment[0]), token.content)
    text.add(_TAG.sub(lambda tag: _blank(tag[0]), without))
    return text


def _read_comments(html: str) -> Marks:
    marks = Marks()
    for what, said in _COMMENT.findall(html):
        if what == "claim":
            marks += Marks(claims=tuple(name.strip() for name in said.split(",") if name.strip()))
        else:
            marks += Marks(waiver=" ".join(said.split()))
    return marks


def _blank(text: str) -> str:
    """Return a text of the same length and lines without a word in it."""
    return re.sub(r"[^\n]", " ", text)
