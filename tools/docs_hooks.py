"""Hooks of MkDocs: fill the page ``speeds.md`` with the tables that ``claims/`` and ``evidence/`` give.

The repository holds the page without its tables, so a new run changes no generated text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmoe_science.proof.readme import judge_repository, speeds_page

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with its tables. Takes seconds for that one page."""
    if Path(page.file.src_uri).name != "speeds.md":
        return markdown
    return f"{markdown.rstrip()}\n\n{speeds_page(*judge_repository(ROOT))}"
