"""The files that a call runs are found by running it, and compare by what they do."""

from __future__ import annotations

import sys

import pytest

from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.measure import host_files
from flashmoe_science.proof.measure.host_files import IMPORTS, changed_files, files_called
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

TEXT = 'import math\n\n\ndef f(x):\n    """D."""\n    return math.sqrt(x)\n'


def forget():
    host_files._read.cache_clear()


@pytest.fixture
def hash_of(tmp_path):
    def hash_of(text, name="a"):
        forget()
        (tmp_path / f"{name}.py").write_text(text)
        return host_files._read(tmp_path / f"{name}.py").whole

    return hash_of


def test_the_functions_of_a_call_are_found_and_no_others():
    found = files_called(lambda: [find_gpu("H200"), sorted("cab")])
    path = find_gpu.__code__.co_filename.removeprefix(f"{PACKAGE_FOLDER}/")
    assert {path, f"{path}::find_gpu", IMPORTS} <= set(found)
    assert all(entry.partition("::")[0] in (path, IMPORTS) for entry in found)
    assert changed_files(found) == []


def test_a_call_that_raises_leaves_no_profile_behind():
    with pytest.raises(ZeroDivisionError):
        files_called(lambda: 1 // 0)
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    "text",
    [
        f"# A comment.\n\n{TEXT}",
        TEXT.replace('"""D."""', '"""Another."""'),
        TEXT.replace("import math", "from typing import TYPE_CHECKING\nimport math\nif TYPE_CHECKING:\n    import os"),
        TEXT.replace("math.sqrt(x)", "(math.sqrt( x ))"),
    ],
    ids=["comment", "docstring", "imports", "format"],
)
def test_what_does_nothing_does_not_count(hash_of, text):
    assert hash_of(text, name="moved") == hash_of(TEXT)


def test_what_a_file_does_counts(hash_of):
    assert hash_of(TEXT.replace("sqrt", "cbrt")) != hash_of(TEXT)


API = "from .calls import run\n\n\ndef call():\n    return run()\n"
CALLS = "def run():\n    return 1\n"
SLOW = f"import time\n\n\n{CALLS}"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose ``api.call`` runs ``calls.run``; what is returned writes files, None removes one."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(host_files, "PACKAGE_FOLDER", folder)

    def write(**files):
        forget()
        for name, text in files.items():
            file = folder / f"{name}.py"
            file.unlink() if text is None else file.write_text(text)

    write(api=API, calls=CALLS, other="def helper():\n    return 2\n")
    return write


@pytest.fixture(params=["files", "functions"])
def recorded(request, package, tmp_path):
    """What a record has of a call: functions, or the whole files of older records."""
    ran = {"api.py": ["call"], "calls.py": ["run"]}
    return record_of(tmp_path / "package", ran if request.param == "functions" else dict.fromkeys(ran))


def record_of(folder, ran):
    files = {folder / name: functions for name, functions in ran.items()}
    hashes = {
        path.name + part: found
        for path, functions in files.items()
        for part, found in host_files._hashes(path, functions).items()
    }
    return {**hashes, IMPORTS: host_files._imports_among(files)}


def test_a_file_that_moves_is_found_and_another_that_did_not_run_does_not_count(package, recorded):
    package(calls=None, renamed=CALLS, api=API.replace("calls", "renamed"), other="def helper():\n    return 3\n")
    assert changed_files(recorded) == []


def test_a_file_that_changes_is_named_though_a_copy_of_it_is_elsewhere(package, recorded):
    package(calls=CALLS.replace("1", "2"), old_calls=CALLS)
    assert changed_files(recorded) == ["calls.py"]


def test_a_call_that_goes_to_another_file_is_seen(package, recorded):
    package(slow_calls=SLOW, api=API.replace("calls", "slow_calls"))
    assert changed_files(recorded) == [IMPORTS]


def test_a_file_that_is_gone_is_named(package, recorded):
    package(calls=None, slow_calls=CALLS.replace("1", "2"), api=API.replace("calls", "slow_calls"))
    assert changed_files(recorded) == ["calls.py"]


def test_names_for_type_checkers_do_not_count(package, recorded):
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .other import helper\n"
    package(api=checked + API)
    assert changed_files(recorded) == []


METHODS = (
    "LIMIT = 1\n\n\nclass Call:\n    def run(self):\n        return LIMIT\n\n    def check(self):\n        return 1\n"
)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("        return 1\n", "        return 2\n", []),
        ("return LIMIT", "return LIMIT + 1", ["calls.py"]),
        ("LIMIT = 1", "LIMIT = 2", ["calls.py"]),
        ("LIMIT = 1", "LIMIT = 1\n\n\ndef check():\n    return 1", []),
        ("LIMIT = 1", "from .other import helper\n\nLIMIT = 1", []),
        ("def check(self)", "def __getattribute__(self, name)", ["calls.py"]),
        ("class Call:", "class Call(dict):", ["calls.py"]),
    ],
    ids=["not run", "run", "constant", "new function", "import", "new method", "base"],
)
def test_only_functions_that_ran_and_what_is_outside_of_functions_count(package, tmp_path, old, new, changed):
    package(calls=METHODS)
    recorded = record_of(tmp_path / "package", {"api.py": ["call"], "calls.py": ["Call.run"]})
    assert changed_files(recorded) == []
    package(calls=METHODS.replace(old, new))
    assert changed_files(recorded) == changed


def test_the_code_within_a_function_is_the_functions(package, tmp_path):
    nested = "def run():\n    def inner():\n        return 1\n\n    return max(inner() for _ in range(2))\n"
    package(calls=nested)
    recorded = record_of(tmp_path / "package", {"calls.py": ["run"]})
    read = host_files._read(tmp_path / "package" / "calls.py")
    assert {name for line in range(1, 6) for name in read.functions_at(line)} == {"run"}
    package(calls=nested.replace("return 1", "return 2"))
    assert changed_files(recorded) == ["calls.py"]


def test_a_function_that_is_gone_is_named_by_its_file(package, tmp_path):
    recorded = record_of(tmp_path / "package", {"api.py": ["call"], "calls.py": ["run"]})
    package(calls="def walk():\n    return 1\n")
    assert changed_files(recorded) == ["calls.py"]


def test_a_record_without_the_hash_of_imports_is_changed(package, recorded):
    assert changed_files({entry: found for entry, found in recorded.items() if entry != IMPORTS}) == [IMPORTS]
