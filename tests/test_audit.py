"""What is said of packages: an advisory, none, or that nobody could be asked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "audit.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("audit", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = {"name": "numpy", "version": "2.3.5", "vulns": []}
BAD = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2019-217"}]}
SKIPPED = {"name": "torch", "skip_reason": "torch (2.13.0) was not found"}


@pytest.mark.parametrize(
    ("packages", "said", "is_wrong"),
    [
        ([GOOD], "packages without an advisory: 1", False),
        ([GOOD, SKIPPED], "packages without an advisory: 1; not looked up: torch", False),
        ([GOOD, BAD], "jinja2 2.10: PYSEC-2019-217", True),
        ([SKIPPED], "advisories were not reached: torch (2.13.0) was not found", False),
    ],
)
def test_what_the_advisories_say(packages, said, is_wrong):
    assert load().judge(json.dumps({"dependencies": packages}), "") == (said, is_wrong)


@pytest.mark.parametrize("document", ["", "[]", "{}"])
def test_a_database_out_of_reach_is_said(document):
    assert load().judge(document, "ERROR: no route") == ("advisories were not reached: ERROR: no route", False)
