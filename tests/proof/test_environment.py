"""Environments and checks: with a GPU that is made up, and on the machine at hand."""

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

from flashmoe_science.proof import environment as module, nvml
from flashmoe_science.proof.environment import Check, doctor, environment, may_read_counters
from flashmoe_science.proof.evidence import Environment, TreeState
from flashmoe_science.proof.subject import Subject

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


def checks(monkeypatch, *names):
    monkeypatch.setattr(module, "_CHECKS", {name: module._CHECKS[name] for name in names})
    return {check.name: check for check in doctor()}


def test_an_environment_goes_through_json(monkeypatch):
    monkeypatch.setattr(module, "tree_commit", lambda: ("abc123", False))  # the tree may change while this runs
    found = environment()
    assert Environment.model_validate_json(found.model_dump_json()) == found
    assert Environment.model_validate(module.describe({}, lambda event: None)) == found
    assert found.versions["torch"] == torch.__version__


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


@pytest.mark.parametrize(
    ("parameters", "is_root", "may"),
    [
        ("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n", False, False),
        ("RmProfilingAdminOnly: 1\n", True, True),
        ("RmProfilingAdminOnly: 0\n", False, True),
        ("ResmanDebugLevel: 1\n", True, None),
        (None, True, None),
    ],
)
def test_who_may_read_counters(parameters, is_root, may):
    assert may_read_counters(parameters, is_root=is_root) is may


def test_the_doctor_always_answers_and_every_trouble_has_a_hint():
    found = doctor()
    assert {"python", "torch", "triton", "driver", "GPU", "nvcc", "commit"} <= {check.name for check in found}
    assert [check.name for check in found if check.ok is False and not check.hint] == []


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch):
    def breaks():
        raise OSError("device gone")

    monkeypatch.setattr(module, "_CHECKS", {"first": breaks, "python": module._check_python})
    first, second = doctor()
    assert (first.name, first.ok) == ("first", False)
    assert "OSError: device gone" in first.text
    assert second.ok is True


def test_no_driver_is_no_trouble(monkeypatch):
    use_nvml(monkeypatch, driver=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = checks(monkeypatch, "driver", "GPU")
    assert (found["driver"].ok, found["GPU"].ok) == (None, None)
    assert "without one everything but timing works" in found["driver"].hint


def test_a_gpu_that_this_torch_cannot_use_is_trouble(monkeypatch):
    use_nvml(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = checks(monkeypatch, "GPU")["GPU"]
    assert found.ok is False
    assert "this torch is built without CUDA" in found.text


@pytest.mark.usefixtures("gpu")
def test_a_healthy_gpu(monkeypatch):
    use_nvml(monkeypatch, CurrentClocksEventReasons=0)
    found = checks(monkeypatch, "driver", "GPU")
    assert found["driver"] == Check("driver", ok=True, text="580.159.04, serves CUDA up to 13.2")
    assert found["GPU"].text == "NVIDIA H200, sm_90, 132 SMs, 141 GiB, L2 60 MiB"
    assert found["clocks"] == Check("clocks", ok=True, text="SM 1965 MHz now, 1980 at most, 350 W of 700, 41 C")


@pytest.mark.usefixtures("gpu")
def test_a_throttled_idle_card_is_trouble(monkeypatch):
    found = checks(monkeypatch, "GPU")["clocks"]
    assert found.ok is False
    assert found.text.endswith("throttled: sw_power_cap")


@pytest.mark.usefixtures("gpu")
def test_a_driver_older_than_torch_is_trouble(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    found = checks(monkeypatch, "driver")["driver"]
    assert found.ok is False
    assert found.hint == "update the driver, or install a torch that is built for CUDA 13"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_older_than_the_kernels_is_trouble(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**{**vars(PROPERTIES), "major": 7, "minor": 5})
    )
    found = checks(monkeypatch, "GPU")["GPU"]
    assert (found.ok, found.hint) == (False, "the kernels need sm_80 or newer")
