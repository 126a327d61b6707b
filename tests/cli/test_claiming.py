"""Tests of the verb claim: what it writes, what it refuses to write, and what it returns."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.claims import load_claims
from flashmoe_science.proof.store import Store

from ..proof.builders import build_record
from .conftest import RUN_ID


def claims_in(repository):
    return [claim.id for claim in load_claims(repository / "claims")]


def test_a_claim_is_written_and_what_verify_says_is_printed(run, repository):
    code, out, err = run("claim", "new", "20260101")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(
        "demonstrated  On H200, flash_attention is at least 2 times as fast as sdpa in a CUDA graph"
    )
    assert "claims/flash_attention.toml: flash_attention-made_up-graph-h200 written" in lines
    assert claims_in(repository) == ["flash_attention-made_up-graph-h200", "seed-graph"]
    assert run("verify")[1].splitlines()[-1] == "2 claims: 2 demonstrated"


def test_what_is_not_demonstrated_is_not_written_unless_asserted(run, repository):
    code, out, err = run("claim", "new", RUN_ID, "--factor", "2.9", "--file", "seed")
    assert (code, out.startswith("refuted ")) == (1, True)
    assert "nothing was written to claims/seed.toml" in out
    assert err == "hint: a lower --factor, or more rounds, may show it; --asserted writes it all the same\n"
    assert claims_in(repository) == ["seed-graph"]
    code, out, _ = run("claim", "new", RUN_ID, "--factor", "2.9", "--file", "seed", "--asserted", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["written"]) == (1, 1, True)
    assert document["path"] == "claims/seed.toml"
    assert claims_in(repository) == ["seed-graph", "flash_attention-made_up-graph-h200"]


def test_a_newer_run_decides_what_is_written(run, repository):
    Store().save(build_record(speedups=[1.5, 3.0], suite="made_up", day=3))
    assert run("claim", "new", "20260104")[0] == 0  # kept in the store alone, so it is written to evidence/
    assert len(list((repository / "evidence").glob("20260104*.json"))) == 1
    code, out, _ = run("claim", "new", "20260101", "--id", "older")
    assert (code, out.startswith("refuted ")) == (1, True)


def test_nothing_is_kept_of_a_run_whose_claim_was_not_written(run, repository):
    Store().save(build_record(speedups=[1.5, 3.0], suite="made_up", day=3))
    assert run("claim", "new", "20260104", "--factor", "9")[0] == 1
    assert len(list((repository / "evidence").iterdir())) == 1


def test_several_times_give_several_claims(run, repository):
    assert run("claim", "new", RUN_ID, "--time", "wall", "--time", "kernel", "--mean", "--factor", "0.5")[0] == 0
    assert len(claims_in(repository)) == 3


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["nothing"], "there is no run 'nothing'"),
        ([RUN_ID, "--id", "seed-graph"], "there is a claim 'seed-graph' in claims/ already"),
        ([RUN_ID, "--file", "../elsewhere.toml"], "file must be in claims, got ../elsewhere.toml"),
        ([RUN_ID, "--factor", "0"], "key factor: expected greater than 0"),
    ],
)
def test_wrong_usage_writes_nothing(run, repository, args, error):
    code, out, err = run("claim", "new", *args)
    assert (code, out) == (2, "")
    assert error in err
    assert claims_in(repository) == ["seed-graph"]


def test_without_new_the_command_says_what_is_missing(run):
    code, _, err = run("claim")
    assert (code, err.splitlines()[0]) == (2, "error: Missing command")
