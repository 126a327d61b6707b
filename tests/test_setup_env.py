"""Setting up the environment: the right torch for the machine, nothing twice, and nothing half done."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Machine:
    """Stands in for subprocess.run: notes what would be installed, and fails what ``broken`` names."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.broken: tuple[str, ...] = ()
        self.has_torch = False

    def run(self, command, **_):
        line = " ".join(command)
        if "find_spec('torch')" in line:
            return subprocess.CompletedProcess(command, 0 if self.has_torch else 1)
        self.commands.append(line)
        if "-m venv" in line:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return subprocess.CompletedProcess(command, int(any(word in line for word in self.broken)))

    def installed(self, word: str) -> bool:
        return any(word in line for line in self.commands)


@pytest.fixture
def setup(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("one")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: False)
    monkeypatch.delenv("FLASHMOE_TORCH", raising=False)
    return module


@pytest.fixture
def machine(setup, monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(setup.subprocess, "run", machine.run)
    return machine


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((3, 9, 18), "Python 3.9.18 is too old, expected 3.10 to 3.13"),
        ((3, 10, 0), ""),
        ((3, 13, 9), ""),
        ((3, 14, 0), "Python 3.14.0 is too new, expected 3.10 to 3.13"),
    ],
)
def test_a_python_that_is_not_admitted_is_refused_at_once(setup, machine, tmp_path, monkeypatch, version, said) -> None:
    monkeypatch.setattr(setup, "ROOT", ROOT)
    monkeypatch.setattr(setup.sys, "version_info", version)
    monkeypatch.setattr(setup.sys, "argv", ["setup_env.py", "--folder", str(tmp_path / "env"), "proof"])
    monkeypatch.setattr(setup, "set_up", lambda folder, extras: machine.commands.append(folder.name))
    if said:
        with pytest.raises(SystemExit, match=f"setup: {said}\nhint: .*make PYTHON="):
            setup.main()
    else:
        setup.main()
    assert machine.commands == ([] if said else ["env"])


def test_the_folder_is_told_as_it_is_called_from_here(setup, machine, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    setup.set_up(tmp_path / "env", {"proof"})
    said = capfd.readouterr().err
    assert "creating env" in said
    assert str(tmp_path) not in said


def test_without_a_driver_the_cpu_build_comes_first(setup, machine, tmp_path) -> None:
    setup.set_up(tmp_path / "env", {"proof"})
    torch, package = [line for line in machine.commands if " install " in line]
    assert setup.CPU_TORCH in torch
    assert f"--editable {tmp_path}[proof]" in package


def test_uv_is_asked_where_pip_knows_no_cpu_build(setup, machine, tmp_path) -> None:
    machine.broken = (setup.CPU_TORCH,)
    setup.set_up(tmp_path / "env", {"proof"})
    assert machine.installed("uv pip install")
    assert machine.installed("--torch-backend=cpu")


def test_the_cuda_build_is_never_a_fallback(setup, machine, tmp_path) -> None:
    machine.broken = (setup.CPU_TORCH, "uv")
    with pytest.raises(SystemExit, match=r"hint: .*FLASHMOE_TORCH"):
        setup.set_up(tmp_path / "env", {"proof"})
    assert not machine.installed("--editable")


def test_with_a_driver_the_ordinary_torch_comes_with_the_package(setup, machine, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(setup, "has_nvidia_driver", lambda: True)
    setup.set_up(tmp_path / "env", {"proof"})
    assert len([line for line in machine.commands if " install " in line]) == 1


def test_the_user_can_name_a_torch(setup, machine, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHMOE_TORCH", "torch==2.11.0")
    setup.set_up(tmp_path / "env", {"proof"})
    assert machine.installed("install torch==2.11.0")
    assert not machine.installed(setup.CPU_TORCH)


def test_a_torch_that_is_there_stays(setup, machine, tmp_path) -> None:
    machine.has_torch = True
    setup.set_up(tmp_path / "env", {"proof"})
    assert not machine.installed(setup.CPU_TORCH)


def test_a_second_run_does_nothing(setup, machine, tmp_path) -> None:
    setup.set_up(tmp_path / "env", {"proof", "dev"})
    machine.commands.clear()
    setup.set_up(tmp_path / "env", {"dev"})
    assert machine.commands == []


def test_a_changed_pyproject_installs_again_in_the_same_environment(setup, machine, tmp_path) -> None:
    setup.set_up(tmp_path / "env", {"dev"})
    machine.commands.clear()
    (tmp_path / "pyproject.toml").write_text("two")
    setup.set_up(tmp_path / "env", {"proof"})
    assert machine.installed(f"--editable {tmp_path}[dev,proof]")
    assert not machine.installed("-m venv")


def test_a_new_driver_builds_the_environment_anew(setup, machine, tmp_path, monkeypatch) -> None:
    setup.set_up(tmp_path / "env", {"proof"})
    machine.commands.clear()
    monkeypatch.setattr(setup, "has_nvidia_driver", lambda: True)
    setup.set_up(tmp_path / "env", {"proof"})
    assert machine.installed("-m venv --clear")


def test_a_failed_installation_is_tried_again(setup, machine, tmp_path) -> None:
    setup.set_up(tmp_path / "env", {"proof"})
    machine.broken = ("--editable",)
    (tmp_path / "pyproject.toml").write_text("two")
    with pytest.raises(SystemExit, match="hint: "):
        setup.set_up(tmp_path / "env", {"proof"})
    assert not (tmp_path / "env" / setup.STAMP).exists()
    machine.broken = ()
    machine.commands.clear()
    setup.set_up(tmp_path / "env", {"proof"})
    assert machine.installed("--editable")


def test_an_interrupt_is_one_line_and_status_130(tmp_path, monkeypatch, capfd) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--folder", str(tmp_path / "venv"), "proof"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "setup_env.py"), run_name="__main__")
    assert ended.value.code == 130
    assert capfd.readouterr().err.splitlines()[-1] == "setup: interrupted; the same command goes on"
