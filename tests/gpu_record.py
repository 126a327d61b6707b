"""The record that ``make test-gpu`` leaves: where it ran, and what passed, failed and was skipped."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

SCHEMA_VERSION = 1
OUTCOMES = ("passed", "failed", "skipped")


class GpuRecord:
    """A pytest plugin that notes the outcome of every test and writes them all when the session ends."""

    def __init__(self, folder: Path, environment: Callable[[], dict[str, Any]]) -> None:
        self.folder = folder
        self.environment = environment
        self.outcomes: dict[str, str] = {}  # test -> outcome; a failing teardown overrules a passed call
        self.reasons: dict[str, str] = {}
        self.path: Path | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.outcomes:  # a typing error on the command line is no evidence
            return
        document = summarize(self.outcomes, self.reasons, self.environment(), int(exitstatus))
        self.path = write(document, self.folder)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.path is not None:
            terminalreporter.write_line(f"record: {self.path}")


def summarize(
    outcomes: Mapping[str, str], reasons: Mapping[str, str], environment: Mapping[str, Any], exit_code: int
) -> dict[str, Any]:
    """Return the record as plain JSON values."""
    tests = {name: sorted(test for test, outcome in outcomes.items() if outcome == name) for name in OUTCOMES}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "gpu-tests",
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": exit_code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        "environment": dict(environment),
        "counts": {name: len(tests[name]) for name in OUTCOMES},
        "passed": tests["passed"],
        "failed": tests["failed"],
        "skipped": {test: reasons.get(test, "") for test in tests["skipped"]},
    }


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Write the record to a new file, whole or not at all, and return its path."""
    gpu = document["environment"].get("gpu") or {}
    name = re.sub(r"[^a-z0-9]+", "-", gpu.get("name", "no-gpu").lower()).strip("-")
    path = folder / f"{document['created_at'][:19].replace('-', '').replace(':', '')}Z-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".gpu-tests-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)
    return path
