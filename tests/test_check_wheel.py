"""The check of the wheel finds files that are missing or do not belong, and wrong metadata."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INFO = "flashmoe_science-0.1.0.dist-info"
FIELDS = [
    "Name: flashmoe-science", "Version: 0.1.0", "License-Expression: Apache-2.0", "License-File: LICENSE",
    "Requires-Python: <3.14,>=3.10", "Description-Content-Type: text/markdown",
    *(f"Provides-Extra: {name}" for name in ("proof", "docs", "dev", "examples")),
]  # fmt: skip


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import check_wheel

    return check_wheel


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "src" / "flashmoe_science"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "py.typed").write_text("")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("")
    return folder


def wheel_of(folder: Path, *, leave_out: str = "", **more: str) -> Path:
    path = folder / "flashmoe_science-0.1.0-py3-none-any.whl"
    files = {
        "flashmoe_science/__init__.py": "",
        "flashmoe_science/py.typed": "",
        f"{INFO}/METADATA": "\n".join(line for line in FIELDS if not leave_out or leave_out not in line) + "\n\n",
        f"{INFO}/entry_points.txt": "[console_scripts]\nflashmoe = flashmoe_science.cli:main\n",
        f"{INFO}/licenses/LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | more).items():
            if not leave_out or leave_out not in name:
                archive.writestr(name, text)
    return path


def test_a_complete_wheel_has_no_problem(check, package, tmp_path):
    wheel = wheel_of(tmp_path)
    assert [*check.content_problems(wheel, package), *check.metadata_problems(wheel)] == []


@pytest.mark.parametrize(
    ("leave_out", "problem"),
    [
        ("py.typed", "lacks flashmoe_science/py.typed"),
        ("licenses", "lacks the licence file"),
        ("entry_points", "lacks the command flashmoe"),
        ("Provides-Extra: proof", "metadata lacks the extra proof"),
        ("License-Expression", "metadata License-Expression must be 'Apache-2.0', got None"),
    ],
)
def test_what_a_wheel_lacks_is_named(check, package, tmp_path, leave_out, problem):
    wheel = wheel_of(tmp_path, leave_out=leave_out)
    assert [*check.content_problems(wheel, package), *check.metadata_problems(wheel)] == [problem]


def test_a_file_too_many_and_a_large_wheel_are_named(check, package, tmp_path, monkeypatch):
    wheel = wheel_of(tmp_path, **{"tests/a.py": ""})
    monkeypatch.setattr(check, "LARGEST_BYTES", 10)
    stray, large = check.content_problems(wheel, package)
    assert stray == "holds tests/a.py, which is neither in src/ nor a page of docs/"
    assert large.startswith("is larger than")
