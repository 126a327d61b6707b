"""Tests of the verb claim: what it writes, what it refuses to write, and what it returns."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from ..proof.own_kernels import record_of, write_kernel
from .conftest import RUN_ID


@pytest.fixture(autouse=True)
def five_processes(repository):
    """Give the record so many processes as a new claim needs."""
    record = build_record(speedups=[2.3, 3.0], suite="made_up", processes=5)
    write_record(record, repository / "evidence" / f"{RUN_ID}.json.gz")


def claims_in(repository):
    return [claim.id for claim in load_claims(repository / "claims")]


def test_a_claim_is_written_and_what_verify_says_is_printed(run, repository):
    code, out, err = run("claim", "new", "20260101")
    assert (code, err) == (0, "")
    assert "judged by run" not in out
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
    Store().save(build_record(speedups=[1.5, 3.0], suite="made_up", day=3, processes=5))
    assert run("claim", "new", "20260104")[0] == 0  # kept in the store alone, so it is written to evidence/
    assert len(list((repository / "evidence").glob("20260104*.json.gz"))) == 1
    code, out, _ = run("claim", "new", "20260101", "--id", "older")
    assert (code, out.startswith("refuted ")) == (1, True)
    newer = build_record(speedups=[1.5, 3.0], suite="made_up", day=3, processes=5).id
    said = "a claim goes by the newest complete run that fits it, unless it pins others (key evidence)"
    assert f"judged by run {newer}, and not by {RUN_ID}: {said}" in out.splitlines()


def test_a_broken_ledger_of_runs_begun_makes_no_new_claim(run, repository):
    for seed in range(2):
        Store().begin(build_record(seed=seed))
    path = Store().folder / "begun.jsonl"
    path.write_text(path.read_text().splitlines()[1] + "\n")
    code, _, err = run("claim", "new", RUN_ID)
    assert (code, "a line was changed or taken out" in err) == (2, True)
    code, out, err = run("verify")
    assert (code, out.splitlines()[-1]) == (0, "1 claim: 1 demonstrated")
    assert err.startswith("warning: ")
    assert "a line was changed or taken out" in err


def test_a_new_claim_needs_five_processes(run, repository):
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), repository / "evidence" / f"{RUN_ID}.json.gz")
    code, out, err = run("claim", "new", RUN_ID, "--file", "few")
    assert (code, "nothing was written to claims/few.toml" in out) == (4, True)
    assert "a new claim needs 5 processes, as fewer miss slow modes, and the run has 3: prove --processes 5" in err
    assert "not seen: 3 processes miss a slow mode of one process in ten in 73% of runs" in out
    assert run("claim", "new", RUN_ID, "--file", "few", "--asserted")[0] == 4
    code, _, err = run("verify")
    assert code == 0  # a claim that was written before stands, and what it cannot show is said
    assert "not seen in 2 of 2 claims: 3 processes miss a slow mode" in err
    assert run("claim", "new", RUN_ID, "--memory", "--time", "graph", "--id", "more")[0] == 2
    assert run("claim", "new", RUN_ID, "--file", "bytes", "--memory", "--asserted")[0] == 0


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


def test_a_claim_about_a_kernel_with_its_own_suite_is_made_verified_and_reported(run, repository):
    folder = write_kernel(repository, "mine")
    record = record_of(repository, "mine")
    (folder / "suite.toml").rename(folder / "kept")
    code, out, err = run("claim", "new", record.id)
    assert (code, out.startswith("inconclusive ")) == (4, True)
    mend = "its file belongs beside the kernel.toml, or into suites/ as mine-suite.toml"
    assert err == f"hint: {mend}; --asserted writes it all the same\n"
    (folder / "kept").rename(folder / "suite.toml")
    code, out, err = run("claim", "new", record.id)
    assert (code, out.startswith("inconclusive ")) == (4, True)
    assert "`flashmoe verify --trust`" in err
    assert "is trusted" in run("verify", "--trust")[2]
    code, out, err = run("claim", "new", record.id)
    assert (code, err) == (0, "")
    assert out.startswith("demonstrated  On H200, mine is at least 2 times as fast as torch in a CUDA graph")
    assert run("verify")[1].splitlines()[-1] == "2 claims: 2 demonstrated"
    page = "mine is 2x faster than torch on an H200. <!-- claim: mine-mine-suite-graph-h200 -->\n"
    (repository / "page.md").write_text(page)
    assert run("lint", "page.md")[0] == 0
    assert run("report", record.id, "-o", "report.md")[0] == 0
    assert "demonstrated" in (repository / "report.md").read_text()
