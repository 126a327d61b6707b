"""What is sent to a borrowed machine, and how a request names its files there."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from flashmoe_science.errors import RemoteError
from flashmoe_science.proof.gates import ProveRequest
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.remote import find_tree, tree as module
from flashmoe_science.proof.subject.loading import load_subject
from flashmoe_science.proof.subject.suites import load_suite

from .test_interruption import SUBJECT, SUITE


def git(folder, *arguments):
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "a repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("*.so\nsecret\n")
    for name in ("tracked.py", "deleted.py", "changed.py", "new\nline.py"):
        (folder / name).write_text("committed")
    (folder / "link").symlink_to("tracked.py")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    (folder / "deleted.py").unlink()
    (folder / "changed.py").write_text("changed")
    (folder / "un tracked.py").write_text("new")
    (folder / "secret").write_text("key")
    (folder / "built.so").write_text("old build")
    return folder


def unpacked(tree):
    with tarfile.open(fileobj=io.BytesIO(tree.pack())) as tar:
        members = {member.name: member for member in tar.getmembers()}
        files = {name: tar.extractfile(member) for name, member in members.items() if member.isfile()}
        return members, {name: file.read().decode() for name, file in files.items() if file is not None}


def test_what_git_lists_is_sent_as_it_is_here_and_nothing_else(repository):
    members, content = unpacked(find_tree(repository))
    own = {name.removeprefix("tree/") for name in members if name.startswith("tree/")}
    assert own == {".gitignore", "tracked.py", "changed.py", "new\nline.py", "link", "un tracked.py"}
    assert content["tree/changed.py"] == "changed"
    assert members["tree/link"].linkname == "tracked.py"
    assert {(member.uname, member.uid) for member in members.values()} == {("", 0)}


def test_a_subfolder_stands_for_its_tree_and_submodules_come_too(repository, tmp_path):
    git(repository, "submodule", "add", "-q", str(repository), "inner")
    (repository / "inner" / "new.cu").write_text("")
    (repository / "deep").mkdir()
    tree = find_tree(repository / "deep")
    assert tree.root == repository
    assert {"inner/tracked.py", "inner/new.cu", "tracked.py"} <= set(tree.files)


def test_the_package_goes_along_where_the_tree_has_none_of_it(repository):
    tree = find_tree(repository)
    _, content = unpacked(tree)
    assert tree.package == "package"
    assert "package/flashmoe_science/proof/remote/agent.py" in content
    assert "package/flashmoe_science/suites/seed.toml" in content
    assert not [name for name in content if "__pycache__" in name]


def test_the_package_is_taken_from_the_tree_that_holds_it(repository, monkeypatch):
    package = repository / "src" / "flashmoe_science"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(module, "PACKAGE_FOLDER", package)
    tree = find_tree(repository)
    assert tree.package == "tree/src/flashmoe_science/.."
    assert not [name for name in unpacked(tree)[0] if name.startswith("package/")]
    (repository / ".gitignore").write_text("src\n")  # as an environment in the folder is
    git(repository, "rm", "-rq", "--cached", "--ignore-unmatch", "src")
    assert find_tree(repository).package == "package"


def test_outside_of_git_nobody_knows_what_to_send(tmp_path):
    with pytest.raises(RemoteError, match="must lie in a git working tree") as caught:
        find_tree(tmp_path)
    assert "`git init` is enough" in caught.value.hint


def prove_request(folder, suite="seed"):
    return ProveRequest(load_subject(str(folder)), load_suite(str(suite)), baselines=["sdpa"], settings=Settings())


@pytest.fixture
def kernel(repository):
    folder = repository / "my kernel"
    folder.mkdir()
    (folder / "kernel.toml").write_text(SUBJECT)
    (repository / "a suite.toml").write_text(SUITE)
    return folder


def test_a_request_names_its_files_in_the_tree(repository, kernel, monkeypatch):
    monkeypatch.setattr(module, "tree_commit", lambda: ("abc", False))
    request = find_tree(repository).request(prove_request(kernel, repository / "a suite.toml"), kernel)
    assert (request.subject, request.suite) == ("my kernel/kernel.toml", "a suite.toml")
    assert (request.folder, request.commit, request.repository) == ("my kernel", "abc-clean", None)


def test_our_own_subjects_and_suites_go_by_name(repository):
    request = find_tree(repository).request(prove_request("flash_attention"), repository)
    assert (request.subject, request.suite, request.folder) == ("flash_attention", "seed", ".")


@pytest.mark.parametrize("ignored", [True, False])
def test_a_file_that_is_not_sent_is_refused_here(repository, kernel, tmp_path, ignored):
    suite = tmp_path / "away.toml"
    if ignored:
        suite = repository / "secret.toml"
        (repository / ".gitignore").write_text("secret.toml\n")
    suite.write_text(SUITE)
    with pytest.raises(RemoteError, match=r"must lie in the git working tree|away\.toml") as caught:
        find_tree(repository).request(prove_request(kernel, suite), repository)
    assert caught.value.hint == "only what git lists is sent: put it there, and out of .gitignore"
    assert str(Path(suite)) in str(caught.value)
