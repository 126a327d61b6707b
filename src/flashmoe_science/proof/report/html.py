"""A page about runs as one HTML file: no script, nothing fetched, the same bytes for the same records and claims.

A record is somebody else's data. Everything from it is escaped, and the page's policy lets a browser load nothing and
run nothing, were something to slip through.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ... import __version__
from ..text import as_sentence, counted, foreign
from .page import Page
from .page_speed import SpeedRow
from .terminal import shortened_kernel


def render_html(page: Page) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        finalize=lambda value: foreign(value, "html") if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "counted": counted,
        "css": _class_name,
        "data_url": _data_url,
        "filename": _file_name,
        "groupby_case": _by_case,
        "sentence": as_sentence,
        "shortened": shortened_kernel,
    }
    style = environment.loader.get_source(environment, "report.css")[0] if environment.loader else ""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(style),  # noqa: S704 - our own file, and it may hold quotes
        style_hash=f"sha256-{digest}",
        version=__version__,
    )


def _class_name(word: str) -> str:
    """Return a status as the name of a class: ``not possible here`` -> ``not-possible-here``."""
    return re.sub(r"[^a-z0-9]+", "-", word.lower())


def _data_url(content: str, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content.encode()).decode()}"


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "run"


def _by_case(rows: Iterable[SpeedRow]) -> list[tuple[str, list[SpeedRow]]]:
    return [(case, list(group)) for case, group in itertools.groupby(rows, key=lambda row: row.case)]
