"""What became of the claims of an earlier commit: the page has what git tells."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.judge.judge import VerdictStatus

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("claims_since", ROOT / "tools" / "claims_since.py")
assert _SPEC is not None
assert _SPEC.loader is not None
claims_since = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(claims_since)


def history(text):
    """Return the cells of each row that no later change of the code alters."""
    return [re.split(r" *\| *", line)[1:6] for line in text.splitlines() if line.startswith("|")]


def test_the_page_has_what_git_tells_of_older_claims():
    found = claims_since._MARKS.search(claims_since.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    try:
        text = claims_since.table(found[2])
    except ProofError as error:
        pytest.skip(f"that commit is not here: {error}")
    assert history(found[0]) == history(text), "python tools/claims_since.py --write"


def verdict(factor, status, record):
    claim = SimpleNamespace(factor=factor)
    return SimpleNamespace(claim=claim, status=status, record=record, by_gpu=[])


def test_dropped_lowered_and_measured_anew_are_counted():
    then = [{"id": name, "factor": 2.0} for name in ("dropped", "lowered", "raised", "as it was")]
    now = {
        "lowered": verdict(1.5, VerdictStatus.DEMONSTRATED, "old"),
        "raised": verdict(2.5, VerdictStatus.DEMONSTRATED, "new"),
        "as it was": verdict(2.0, VerdictStatus.STALE, "old"),
    }
    assert claims_since._counts(then, now, {"old"}) == ["4", "1", "1", "1", "2", "1"]
