"""A page about runs as one file: HTML without a script and with nothing fetched, or Markdown.

A record is somebody else's data. Everything from it is escaped, and the page's policy lets a browser load nothing and
run nothing, were something to slip through.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ... import __version__
from ..text import as_sentence, foreign
from .page import Page


def _environment(escape: Callable[[str], str]) -> Environment:
    """Return templates whose texts go through ``escape``."""
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        finalize=lambda value: escape(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["sentence"] = as_sentence
    return environment


def render_html(page: Page) -> str:
    """Return the page as HTML."""
    environment = _environment(lambda text: foreign(text, "html"))
    environment.filters |= {
        "css": lambda word: re.sub(r"[^a-z0-9]+", "-", word.lower()),  # not possible here -> not-possible-here
        "data_url": lambda text, kind: f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}",
        "filename": lambda name: re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "run",
    }
    style = environment.loader.get_source(environment, "report.css")[0] if environment.loader else ""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(style),  # noqa: S704 - our own file, and it may hold quotes
        style_hash=f"sha256-{digest}",
        version=__version__,
    )


def render_markdown(page: Page) -> str:
    """Return the page as Markdown."""
    environment = _environment(escape)
    environment.filters |= {"code": _code, "row": _row}
    return environment.get_template("report.md.j2").render(page=page).rstrip("\n") + "\n"


def escape(text: str) -> Markup:
    """Return ``text`` so that Markdown shows it as it is, on one line, also where a viewer knows HTML."""
    return Markup(foreign(text, "markdown"))  # noqa: S704 - that is what escapes it


def _row(cells: Iterable[str]) -> Markup:
    return Markup(f"| {' | '.join(map(escape, cells))} |")  # noqa: S704 - of escaped cells


def _code(text: str) -> Markup:
    """Return text in a code span, or, where it holds a backtick, escaped."""
    as_it_is = "`" not in text and "\n" not in text and text == foreign(text)
    return Markup(f"`{text}`") if as_it_is else escape(text)  # noqa: S704 - a span shows everything
