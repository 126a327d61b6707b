"""A hook of mkdocs: adds the pages of speeds, made from claims/ and evidence/, to the site. They are no files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from flashmoe_science.proof.report.readme import Judged, case_section, claim_section, judge_repository

ROOT = Path(__file__).resolve().parents[1]
# Wide tables: no empty sidebar at their right, and long names wrap.
_WIDE = """---
hide: [toc]
---

<style>.md-typeset td, .md-typeset td code { overflow-wrap: anywhere; }</style>

"""
CLAIMS = """# Speeds

Every claim with its verdict, its deciding case (the one whose interval ends lowest) and its geometric mean. [Claimed
cases](speeds-cases.md) has the times behind them. `flashmoe show` and the id of a run print all that was measured. A
speedup is the baseline's time divided by ours, with its 95 % interval.

"""
CASES = """# Claimed cases

A table for each run and baseline, with a row for each case that a claim is about. Times are medians of all rounds. A
speedup compares times of the same rounds, so it is not the quotient of two medians. [How speed is
measured](explanation/measuring.md) says what the three times are.

A case is named by its sizes: `b` batch, `h` query heads (and, behind `_`, K/V heads), `s` positions, `d` head size; `t`
tokens, `e` experts, `k` experts per token, `h` hidden and `i` inner size, `zipf` for skewed routing.
"""


def render(made: Judged) -> dict[str, str]:
    """Return the pages by their names in docs/. Records are not on the site, so links to them become text."""
    pages = {"speeds.md": CLAIMS + claim_section(*made), "speeds-cases.md": CASES + case_section(*made)}
    pages = {name: _WIDE + text for name, text in pages.items()}
    return {name: re.sub(r"\[([^\]]+)\]\(evidence/[^)]*\)", r"`\1`", text) for name, text in pages.items()}


@functools.cache
def _pages() -> dict[str, str]:
    return render(judge_repository(ROOT))


def on_files(files: Any, config: Any) -> Any:  # mkdocs calls it by this name, with these arguments
    """Add the pages to those of the site."""
    from mkdocs.structure.files import File

    for name, text in _pages().items():
        files.append(File.generated(config, name, content=text))
    return files
