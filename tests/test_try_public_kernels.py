"""The public kernels on trial: small files, and wheels that are known by their hash."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.subject.loading import load_subject
from flashmoe_science.proof.subject.suites import load_suite

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("try_public_kernels", ROOT / "tools" / "try_public_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_kernel_needs_twenty_lines_at_most(tool, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folders = {path.parent.name for path in tool.FOLDER.glob("*/kernel.toml")}
    assert folders == {trial.folder for trial in tool.TRIALS.values()}
    for trial in tool.TRIALS.values():
        assert len((tool.FOLDER / trial.folder / "kernel.toml").read_text().splitlines()) <= 20
        assert load_subject(str(tool.FOLDER / trial.folder)).name == trial.folder
        assert trial.suite.is_file()


def test_a_wheel_that_is_another_file_is_refused(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "trials")
    for name, (version, _) in tool.WHEELS.items():
        with zipfile.ZipFile(tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr("code.py", "")
    with pytest.raises(SystemExit, match="is not the file that was tried"):
        tool.fetch(tmp_path, tool.WHEELS)
    assert not list(tmp_path.rglob("code.py"))


def test_only_what_is_asked_for_is_looked_for(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "trials")
    tool.fetch(tmp_path / "nothing", ())
    assert not list((tmp_path / "trials" / "fetched").iterdir())
    known = {*tool.WHEELS, tool.TUTORIAL[0]}
    assert {source for trial in tool.TRIALS.values() for source in trial.sources} == known


def test_a_tutorial_that_is_another_file_is_refused(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "trials")
    monkeypatch.setattr(tool, "WHEELS", {})
    (tmp_path / tool.TUTORIAL[0]).write_text("")
    with pytest.raises(SystemExit, match=r"06-fused-attention.py is not the file that was tried"):
        tool.fetch(tmp_path, [tool.TUTORIAL[0]])
    assert not list((tmp_path / "trials" / "fetched").iterdir())


def test_the_records_on_a_gpu_have_the_verdicts_that_are_known(tool):
    found = {}
    for path in (ROOT / "evidence" / "public-kernels").glob("*.json.gz"):
        record = read_record(path)
        gates = {gate.name: gate.status.value for gate in record.gates}
        assert record.environment.gpu is not None
        assert (gates["import"], gates["launch"]) == ("passed", "passed")
        found[record.subject.name, record.suite] = gates["correct"]
    known = {(trial.folder, load_suite(str(trial.suite)).name): trial.on_gpu for trial in tool.TRIALS.values()}
    assert found == known
