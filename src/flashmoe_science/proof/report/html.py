"""A page about runs as one HTML file: no script, nothing fetched, the same bytes for the same records and claims.

A record is somebody else's data. Everything from it is escaped, and the page's policy lets a browser load nothing and
run nothing, were something to slip through.
"""

from __future__ import annotations

import base64
import hashlib
import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ... import __version__
from ..text import as_sentence, foreign
from .page import Page


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
        "css": lambda word: re.sub(r"[^a-z0-9]+", "-", word.lower()),  # not possible here -> not-possible-here
        "data_url": lambda text, kind: f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}",
        "filename": lambda name: re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "run",
        "sentence": as_sentence,
    }
    style = environment.loader.get_source(environment, "report.css")[0] if environment.loader else ""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(style),  # noqa: S704 - our own file, and it may hold quotes
        style_hash=f"sha256-{digest}",
        version=__version__,
    )
