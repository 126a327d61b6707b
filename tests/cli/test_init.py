"""Tests of the verb init: what it writes is a subject that can be proved at once, and it replaces nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flashmoe_science.cli.init import Kind, files_of
from flashmoe_science.proof.subject.loading import load_subject
from flashmoe_science.proof.subject.suites import load_suite, suite_beside


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_operator", raising=False)
    yield
    sys.modules.pop("my_operator", None)


@pytest.mark.parametrize("kind", [Kind.triton, Kind.cuda])  # the plain one is proved below
def test_what_is_written_loads_with_the_suite_beside_it(run, kind):
    code, out, err = run("init", "trial", "--kind", kind.value)
    assert (code, err) == (0, "hint: flashmoe prove trial\n")
    assert out.splitlines() == [f"trial/{name}" for name in files_of(kind)]
    subject = load_subject("trial")
    assert suite_beside(subject) == Path("trial/suite.toml").resolve()
    assert len(load_suite("trial/suite.toml").cases) == 3
    assert all(Path("trial", source).is_file() for source in subject.sources)
    assert sum(len(text.splitlines()) for text in files_of(kind).values()) < 110


def test_nothing_is_replaced(run):
    Path("trial").mkdir()
    Path("trial/suite.toml").write_text("mine")
    code, out, err = run("init", "trial", "--json")
    assert (code, json.loads(out)["exit_code"]) == (2, 2)
    assert "folder must hold none of the files, got trial/suite.toml" in err
    assert [path.name for path in Path("trial").iterdir()] == ["suite.toml"]


def test_the_one_in_triton_is_compiled_for_a_gpu_that_is_not_here(run):
    run("init", "trial")
    code, out, _ = run("prove", "trial", "--until", "build", "--gpu", "L4")
    assert code == 0
    assert "1 kernel compiled for 1 GPU" in out


def test_the_plain_one_is_right(run):
    run("init", "trial", "--kind", "plain")
    suite = Path("trial/suite.toml")
    suite.write_text(suite.read_text().replace("1048576", "7"))
    code, out, _ = run("prove", "trial", "--until", "correct")
    assert code == 0
    assert "on suite my-suite (3 cases), against torch" in out
    assert "correct  passed" in out
