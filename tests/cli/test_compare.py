"""Tests of the verb compare: what A and B may be, and what comes back. How it measures is in tests/proof."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.records.store import Store

from ..proof.repositories import git


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["20260101", "main"], "'20260101' is no revision of", "git log lists the revisions; `flashmoe report"),
        (["main", "nonsense"], "'nonsense' is no revision of", "git log lists the revisions"),
        (["main", "main", "--suite", "sede"], "suite must be one of", "did you mean seed?"),
        (["main", "main", "--gpu", "H20"], "gpu must be one of", "no other is known"),
        (["main", "main"], "revision main: it has no src/flashmoe_science", "name a kernel.toml with --subject"),
        (["main", "main", "--subject", "flash_atention"], "no file or folder", "did you mean flash_attention"),
        (["main", "main", "--tolerance", "2"], "tolerance must be", ""),
    ],
)
def test_wrong_usage_is_an_error_a_hint_and_2(run, repository, args, error, hint):
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "README.md")
    git(repository, "commit", "--quiet", "--message", "first")
    code, out, err = run("compare", *args)
    assert (code, out) == (2, "")
    assert error in err
    assert f"hint: {hint}" in err if hint else True
    assert "Traceback" not in err
    assert len(git(repository, "worktree", "list").splitlines()) == 1


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
