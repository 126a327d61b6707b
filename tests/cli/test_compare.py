"""Tests of the verb compare: what A and B may be, and what comes back. How it measures is in tests/proof."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from ..proof.repositories import git
from .conftest import RUN_ID


@pytest.fixture
def other(repository):
    """Put a later run of the same into the store, and return its id."""
    record = build_record(speedups=[2.3, 3.4], suite="made_up", day=3, seed=1)
    Store().save(record)
    return record.id


def test_two_runs_are_found_by_id_and_by_file_and_compared(run, repository, other):
    code, out, err = run("compare", "20260101", other[:8], "--time", "graph")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"A        {RUN_ID}"
    assert [line.split()[-1] for line in lines if line.startswith("case")][1:] == ["same", "faster"]
    assert any(line.startswith("faster     1 faster, 1 same: faster case1 (graph) 1.") for line in lines)
    path = f"evidence/{RUN_ID}.json.gz"
    document = json.loads(run("compare", other, path, "--time", "graph", "--json")[1])
    assert document["exit_code"] == 1
    assert document["comparison"]["effect"] == "slower"
    assert document["comparison"]["paired"] is False
    assert [case["effect"] for case in document["comparison"]["cases"]] == ["same", "slower"]


def test_runs_that_differ_are_refused_unless_allowed(run, repository):
    record = build_record(speedups=[2.3, 3.0], suite="made_up", day=4, seed=1)
    environment = record.environment.model_copy(update={"driver": "590.00"})
    write_record(record.model_copy(update={"environment": environment}), repository / "evidence" / "other.json")
    code, out, err = run("compare", "20260101", "20260105")
    assert (code, out) == (2, "")
    assert "driver is 580.00 in A and 590.00 in B" in err
    assert "hint: where that is on purpose: --allow-different driver" in err
    allowed = run("compare", "20260101", "20260105", "--allow-different", "driver")[1]
    assert "note: different on purpose: driver is 580.00 in A and 590.00 in B" in allowed


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["20260101", "20260101"], "A and B are the same run", ""),
        (["20260101", "main"], "A and B must be two runs or two revisions", "the revisions that runs were made of"),
        (["main", "nonsense"], "'nonsense' is neither a run nor a revision", "flashmoe runs lists the runs"),
        (["main", "no/such.json"], "no/such.json: cannot be read", ""),
        (["main", "20260101x"], "'20260101x' is neither a run nor a revision", ""),
        (["20260101", "OTHER", "--subject", "x"], "--subject and --suite are for two revisions", ""),
        (["main", "main", "--allow-different", "gpu"], "--allow-different is for two runs", ""),
        (["main", "main", "--suite", "sede"], "suite must be one of", "did you mean seed?"),
        (["main", "main", "--gpu", "H20"], "gpu must be one of", "no other is known"),
        (["main", "main"], "revision main: it has no src/flashmoe_science", "name a kernel.toml with --subject"),
        (["main", "main", "--subject", "flash_atention"], "no file or folder", "did you mean flash_attention"),
        (["main", "main", "--tolerance", "2"], "tolerance must be", ""),
    ],
)
def test_wrong_usage_is_an_error_a_hint_and_2(run, repository, other, args, error, hint):
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "README.md")
    git(repository, "commit", "--quiet", "--message", "first")
    code, out, err = run("compare", *(other if arg == "OTHER" else arg for arg in args))
    assert (code, out) == (2, "")
    assert error in err
    assert f"hint: {hint}" in err if hint else True
    assert "Traceback" not in err
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_what_is_a_run_and_a_revision_is_refused(run, repository, other):
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "README.md")
    git(repository, "commit", "--quiet", "--message", "first")
    git(repository, "branch", "20260101")
    code, _, err = run("compare", "20260101", other)
    assert code == 2
    assert "'20260101' is a run and a revision" in err


def test_a_comparison_of_revisions_cannot_be_resumed_by_prove(run, repository):
    from ..proof.test_compare import compared

    record = compared(1.1)
    Store().save(record)
    code, _, err = run("prove", "--resume", record.id)
    assert code == 2
    assert "compares two revisions" in err


def test_show_ends_with_the_verdict_of_a_comparison(run, repository):
    from ..proof.test_compare import compared

    record = compared(1.1, 1.0)
    Store().save(record)
    code, out, _ = run("show", record.id)
    assert code == 0
    assert any(line.startswith("faster     1 faster, 1 same: faster case0 (graph) 1.") for line in out.splitlines())
    assert json.loads(run("show", record.id, "--json")[1])["comparison"]["effect"] == "faster"


# history


def test_history_looks_at_the_runs_of_the_store_and_of_the_repository(run, repository):
    for day in range(1, 10):
        speedups = [2.3, 3.0] if day < 5 else [2.5, 3.2]
        Store().save(build_record(speedups=speedups, suite="made_up", day=day, seed=day))
    code, out, err = run("history", "flash_attention", "--suite", "made_up")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "flash_attention over sdpa, suite made_up, graph time: geometric mean of 2 cases"
    assert (lines[4].split()[0], lines[4].split()[-1], lines[13].split()[-1]) == (RUN_ID, "1", "2")
    assert lines[-1] == "1 change of level in 10 runs"
    assert [line.split()[0] for line in lines if " -> " in line] == ["unexplained"]
    document = json.loads(run("history", "flash_attention", "--json", "--time", "wall", "--case", "case1")[1])
    assert document["exit_code"] == 0
    assert document["history"]["cases"] == ["case1"]
    assert document["history"]["metric"] == "wall"


def test_history_of_one_run_cannot_tell(run):
    code, out, _ = run("history", "flash_attention")
    assert code == 4
    assert out.splitlines()[-1].startswith("1 run cannot tell")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["nothing"], "there is no run of nothing\nhint: flashmoe runs lists"),
        (["flash_attention", "--gpu", "B200"], "there is no run of flash_attention on B200"),
        (
            ["flash_attention", "--suite", "x", "--since", "2099-01-01"],
            "there is no run of flash_attention of suite x since 2099-01-01",
        ),
        (["flash_attention", "--case", "case9"], "case must be one that all 1 runs have"),
    ],
)
def test_wrong_usage_of_history_is_an_error_and_2(run, args, error):
    code, out, err = run("history", *args)
    assert (code, out) == (2, "")
    assert error in err
