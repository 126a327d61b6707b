"""Git is asked about the folder that is meant, and what it complains about is one line."""

from __future__ import annotations

import os

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.records.git import git

from .repositories import commit


@pytest.fixture
def repository(tmp_path):
    commit(tmp_path / "repository", {"kernel.py": "\n"}, tag="first")
    return tmp_path / "repository"


def test_names_that_are_no_text_come_back_as_the_system_has_them(repository):
    name = os.fsdecode(b"caf\xe9 .py ")
    (repository / name).write_text("")
    listed = git(repository, "ls-files", "-z", "--others").split("\0")
    assert name in listed


def test_what_points_git_elsewhere_is_not_followed_and_settings_are(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    for name, value in (("COUNT", "1"), ("KEY_0", "some.setting"), ("VALUE_0", "kept")):  # as containers trust folders
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert git(repository, "ls-files") == "kernels/kernel.py"
    assert git(repository, "config", "some.setting") == "kept"


def test_git_complains_in_one_line_without_the_advice_after_it(repository, tmp_path):
    with pytest.raises(ProofError, match=r"^git rev-parse: not a git repository \(or any of the parent directories\)"):
        git(tmp_path, "rev-parse", "HEAD")
    with pytest.raises(ProofError, match=r"^git rev-parse: ambiguous argument 'nothing'.*working tree\.$"):
        git(repository, "rev-parse", "nothing")
    with pytest.raises(ProofError, match=r"^git config: it exited with status 1$"):
        git(repository, "config", "no.such.setting")


def test_a_machine_without_git_says_so(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProofError, match="git cannot be run: No such file or directory"):
        git(repository, "status")
