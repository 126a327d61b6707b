"""The files that a call runs are found by running it, and compare by what they do."""

from __future__ import annotations

import sys

import pytest

from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.measure import host_files
from flashmoe_science.proof.measure.host_files import file_hash, files_called, hashes_now
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

TEXT = 'import math\n\n\ndef f(x):\n    """D."""\n    return math.sqrt(x)\n'


@pytest.fixture
def hash_of(tmp_path):
    def hash_of(text, name="a"):
        file_hash.cache_clear()
        (tmp_path / f"{name}.py").write_text(text)
        return file_hash(tmp_path / f"{name}.py")

    return hash_of


def test_the_files_of_a_call_are_found_and_no_others():
    found = files_called(lambda: [find_gpu("H200"), sorted("cab")])
    path = find_gpu.__code__.co_filename.removeprefix(f"{PACKAGE_FOLDER}/")
    assert set(found) == {path}
    assert found[path] in hashes_now()


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


@pytest.fixture
def package(tmp_path):
    """A package of which ``api`` imports ``run`` from ``calls``."""

    def write(**files):
        file_hash.cache_clear()
        host_files._definitions.cache_clear()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return file_hash(tmp_path / "api.py")

    write(calls="def run():\n    return 1\n", api="from .calls import run\n\n\ndef call():\n    return run()\n")
    return write


def test_an_imported_name_counts_by_its_definition(package):
    before = package()
    assert package(other="def helper():\n    return 2\n\n\ndef run():\n    return 1\n") == before
    api = "from .other import run\n\n\ndef call():\n    return run()\n"
    assert package(api=api) == before
    assert package(api=api, other="import time\n\n\ndef run():\n    time.sleep(1)\n    return 1\n") != before


def test_names_for_type_checkers_do_not_count(package):
    text = "from typing import TYPE_CHECKING\nfrom .calls import run\n{}\n\ndef call():\n    return run()\n"
    extra = "if TYPE_CHECKING:\n    from .calls import other"
    assert package(api=text.format(extra)) == package(api=text.format(""))
