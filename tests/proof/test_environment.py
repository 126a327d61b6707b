"""Environments: with a GPU that is made up, and on the machine at hand."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.proof.measure import environment as module, nvml
from flashmoe_science.proof.measure.environment import environment
from flashmoe_science.proof.records.evidence import TreeState
from flashmoe_science.proof.subject.subject import Subject

from .test_nvml import FakeNvml

OPEN_SENSORS = nvml.open_sensors  # before a test replaces it

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=60 << 20,
    total_memory=141 << 30,
    uuid="aaaa",
)


@pytest.fixture
def gpu(monkeypatch):
    """Make torch and NVML see an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: PROPERTIES)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    use_nvml(monkeypatch)


def use_nvml(monkeypatch, **answers):
    library = FakeNvml(**answers)
    monkeypatch.setattr(nvml, "open_sensors", lambda uuid=None: OPEN_SENSORS(uuid, library=library))


def test_an_environment_names_no_host_no_user_and_no_path(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path.home() / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8c5a1d2e-0000-1111-2222-333344445555")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = environment()
    text = found.model_dump_json()
    assert found.settings["TRITON_CACHE_DIR"] == "(a path)"
    assert found.settings["CUDA_VISIBLE_DEVICES"] == "(a GPU UUID)"
    assert found.settings["TRITON_INTERPRET"] == "1"
    assert "secret" not in text
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    for name in (socket.gethostname(), getpass.getuser()):
        assert f'"{name}"' not in text


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_described_and_its_card_is_told_apart_without_being_named():
    found = environment().gpu
    assert found is not None
    assert (found.name, found.arch, found.sms, found.l2_bytes) == ("NVIDIA H200", 90, 132, 60 << 20)
    assert (found.max_sm_clock_mhz, found.power_limit_w) == (1980, 700.0)
    assert len(found.uuid_hash) == 12
    assert "aaaa" not in found.uuid_hash
    assert environment().driver == "580.159.04"
    assert environment().versions["cudnn"] == "91900"


def test_the_commit_is_that_of_the_package_and_never_of_a_repository_around_it(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHMOE_COMMIT", raising=False)
    package = tmp_path / "venv" / "flashmoe_science"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(module, "PACKAGE_FOLDER", package)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert module.tree_commit() == (None, None)  # no repository

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "other work")
    assert module.tree_commit() == (None, None)  # a repository that does not hold the package

    git("add", ".")
    git("commit", "-m", "package")
    commit, dirty = module.tree_commit()
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "notes").write_text("not the package")
    assert module.tree_commit() == (commit, False)
    (package / "new.py").write_text("")
    assert module.tree_commit() == (commit, True)


def test_the_commit_of_a_kernel_of_someone_else_is_that_of_the_repository_around_its_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHMOE_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "kernel.toml").write_text("")
    (folder / "mine.py").write_text("")
    theirs = Subject("mine", "attention", "mine:attend", folder, ("kernel.toml", "mine.py"))
    nowhere = TreeState(commit=None, dirty=None)

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    assert module.subject_tree(theirs) == nowhere  # no repository
    git("init")
    git("commit", "--allow-empty", "-m", "other work")
    assert module.subject_tree(theirs) == nowhere  # one that does not hold them
    git("add", "kernels/kernel.toml")
    git("commit", "-m", "a part")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert module.subject_tree(theirs) == TreeState(commit=head, dirty=True)
    git("add", ".")
    git("commit", "-m", "all")
    head = git("rev-parse", "HEAD").stdout.strip()
    (folder / "evidence").mkdir()
    (folder / "evidence" / "record.json").write_text("")
    monkeypatch.setenv("FLASHMOE_COMMIT", "a" * 40)  # where there is git, git tells
    assert module.subject_tree(theirs) == TreeState(commit=head, dirty=False)
    (folder / "mine.py").write_text("changed")
    assert module.subject_tree(theirs) == TreeState(commit=head, dirty=True)
    assert module.subject_tree(replace(theirs, builtin=True)) is None
    shutil.rmtree(tmp_path / ".git")
    assert module.subject_tree(theirs) == TreeState(commit="a" * 40, dirty=None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc123", ("abc123", None)),
        ("abc123-dirty", ("abc123", True)),
        ("abc-clean", ("abc", False)),
        (" abc ", ("abc", None)),
    ],
)
def test_a_copy_without_git_says_its_commit(monkeypatch, given, expected):
    monkeypatch.setenv("FLASHMOE_COMMIT", given)
    assert module.tree_commit() == expected
