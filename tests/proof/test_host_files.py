"""The files that a call runs are found by running it, and compare by what they do."""

from __future__ import annotations

import sys

import pytest

from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.measure import host_files
from flashmoe_science.proof.measure.host_files import IMPORTS, changed_files, file_hash, files_called
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

TEXT = 'import math\n\n\ndef f(x):\n    """D."""\n    return math.sqrt(x)\n'


def forget():
    host_files._read.cache_clear()
    file_hash.cache_clear()


@pytest.fixture
def hash_of(tmp_path):
    def hash_of(text, name="a"):
        forget()
        (tmp_path / f"{name}.py").write_text(text)
        return file_hash(tmp_path / f"{name}.py")

    return hash_of


def test_the_files_of_a_call_are_found_and_no_others():
    found = files_called(lambda: [find_gpu("H200"), sorted("cab")])
    path = find_gpu.__code__.co_filename.removeprefix(f"{PACKAGE_FOLDER}/")
    assert set(found) == {path, IMPORTS}
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


@pytest.fixture
def recorded(package, tmp_path):
    files = {name: tmp_path / "package" / name for name in ("api.py", "calls.py")}
    hashes = {name: file_hash(file) for name, file in files.items()}
    return {**hashes, IMPORTS: host_files._imports_among(files.values())}


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
