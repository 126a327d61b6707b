"""A repository with one claim and one record, and a way to run command lines in it."""

from __future__ import annotations

import pytest

from flashmoe_science import cli
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.report.readme import BEGIN, END

from ..proof.builders import build_record
from ..proof.claim_builders import build_claim, claim_toml, suite_toml
from ..proof.conftest import forked_workers

__all__ = ["forked_workers"]

SENTENCE = build_claim(suite="made_up").sentence  # of the one claim
RUN_ID = "20260101T000000Z-made_up-flash_attention-000000"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository with one claim and one record the current folder, with a store beside it."""
    folder = tmp_path / "repository"
    (folder / "claims").mkdir(parents=True)
    (folder / "claims" / "seed.toml").write_text(claim_toml(suite="made_up"))
    (folder / "suites").mkdir()
    (folder / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), folder / "evidence" / f"{RUN_ID}.json.gz")
    (folder / "README.md").write_text(f"# Title\n{BEGIN}\n{END}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return folder


@pytest.fixture
def run(repository, capsys):
    """Run a command line in ``repository``; return its exit code, stdout and stderr."""

    def run(*args):
        code = cli.main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run
