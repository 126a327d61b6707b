"""Words for readers that more than one file needs, and the one way by which a foreign text gets to a reader."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

Place = Literal["terminal", "xml", "html", "csv", "markdown"]

# Letters that nobody sees and that change what is seen: escape sequences, directions, joiners, halves of letters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# How continuous integration is told to do something by what is printed; GitHub's runner reads it behind blanks too.
_COMMAND = re.compile(r"^((?:\x1b\[[0-9;]*m|\s)*):(?=:)|#(?=#\w*\[)", re.MULTILINE)
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# What Markdown and a viewer that makes links of bare addresses take for something else than text. An underscore in a
# word stays itself.
_MARKDOWN = re.compile(
    r"[\\`*\[<>|$]|~~|^[#+=~-]|^\d{1,9}(?=[.)](?:\s|$))|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)/(?=/)|(?<=www)\.|@",
    re.IGNORECASE,
)


def foreign(text: str, to: Place = "terminal") -> str:
    """Return a text that somebody else wrote as a reader may get it: it is seen as it is, and does nothing.

    Args:
        text: of a claim, a record, a TOML file, a program's output or another machine.
        to: where it goes. What XML and HTML escape themselves is left to them; a cell of CSV begins no formula;
            Markdown gets one line.
    """
    if to == "markdown":
        text = " ".join(text.split())
    text = defused(_UNSEEN.sub("\ufffd" if to == "xml" else _as_escape, text))  # XML has a letter for these
    if to == "csv":
        return f"'{text}" if text.lstrip(" \t\n'\"").startswith(_FORMULA) else text
    if to == "markdown":
        return _MARKDOWN.sub(_escaped, text).replace("&", "&amp;")
    return text


def defused(text: str) -> str:
    """Return a text in which no line is a command to continuous integration."""
    return _COMMAND.sub(lambda found: f"{found[1]}: " if found[1] is not None else "# ", text)


def _as_escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped(found: re.Match[str]) -> str:
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6) -> str:
    """Return a hint: which of the known names is nearest to one that is not known, or ``otherwise``."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. ``1 case``, ``13 cases``, ``3 processes``, ``2 batches`` and ``2 studies``."""
    if count != 1 and noun.endswith("dy"):
        return f"{count} {noun[:-1]}ies"
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count} {noun}{ending}"


def as_sentence(text: str) -> str:
    """Return a text that begins with a capital letter and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def short_name(name: str) -> str:
    """Return a kernel's name without return type and parameters: ``story::attend_kernel<__half>``."""
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0 and name[at] == "(":
            name = name[:at]
            break
        if depth == 0:
            break
    return name.removeprefix("void ")


def cut_name(name: str, most: int = 120) -> str:
    """Return a kernel's name without the end of its template arguments, where they are long."""
    return name if len(name) <= most else f"{name[: most - 3]}..."
