"""Tests of the verb study, and of what show and verify say of studies."""

from __future__ import annotations

import functools
import json

import pytest

from flashmoe_science.proof.evidence import name_of, write_record
from flashmoe_science.proof.store import Store
from flashmoe_science.proof.study.run import run_study

from ..proof.builders import H200, build_record
from ..proof.chain import environment_with
from ..proof.studies import MadeUp

TOML = """
[subject]
name = "ours"
operator = "tests.proof.doubling"
entry_point = "ours:f"
sources = ["ours.py"]
"""

SUITE = """
name = "doubled"
operator = "tests.proof.doubling"
description = "One vector."
[[cases]]
length = 64
origin = "made for a test"
"""


@pytest.fixture
def study(run, repository, monkeypatch):
    """Run ``flashmoe study`` of a made-up kernel on a made-up GPU."""
    (repository / "kernel.toml").write_text(TOML)
    (repository / "ours.py").write_text("f = None\n")
    (repository / "suite.toml").write_text(SUITE)
    monkeypatch.setattr("flashmoe_science.cli.studying.describe_apart", lambda: environment_with(H200))

    def study(*args, times=None):
        with_times = functools.partial(run_study, run=times or MadeUp())
        monkeypatch.setattr("flashmoe_science.cli.studying.run_study", with_times)
        return run("study", "kernel.toml", "--suite", "suite.toml", "--batches", "1", "--seed", "7", *args)

    return study


def files(repository):
    return sorted((repository / "evidence" / "studies").glob("*.json.gz"))


def test_a_study_says_what_it_shows_and_is_kept(study, run, repository):
    code, out, err = study("--same", "20", "--planted", "4")
    assert code == 0
    assert "process 2: 31 of 31 trials finished, 40 s of the GPU" in err  # with the calibration's
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert any(row.startswith("3% +3.") and row.endswith("100.0% 47.8% to 100.0% at least 95% holds") for row in rows)
    (path,) = files(repository)
    assert rows[-1] == f"study: evidence/studies/{path.name}"
    assert "3 processes x 10 rounds of graph time a trial, in 1 batch; 40 s of the GPU" in out
    shown = run("show", f"evidence/studies/{path.name}", "--verbose")
    assert shown[0] == 0
    assert "A trial is one comparison of a kernel with itself" in shown[1]
    assert len([line for line in shown[1].splitlines() if line.startswith("0-")]) == 31
    code, out, _ = run("verify")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("holds  NVIDIA H200: ")]
    document = json.loads(run("verify", "--json")[1])
    assert [(each["holds"], each["trials"]) for each in document["studies"]] == [(True, [])]


def test_a_study_that_shows_too_little_is_1_and_verify_then_4(study, run):
    late = MadeUp(lambda _trial, process, arm: 1.05 if arm == "b" and process >= 0 else 1.0)
    code, out, _ = study("--same", "10", "--planted", "0", times=late)
    assert code == 1
    assert "does not hold  NVIDIA H200: " in out
    assert run("verify")[0] == 4


def test_a_study_that_is_cut_short_is_4_and_goes_on(study, repository):
    code, _, err = study("--same", "10", "--planted", "0", "--seconds", "15")
    assert code == 4
    (path,) = files(repository)
    assert f"hint: flashmoe study --resume {name_of(path)}" in err
    code, out, _ = study("--resume", name_of(path)[:20])
    assert code == 0, out
    assert files(repository) == [path]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--case", "n65"], "case must be one of n64, got 'n65'"),
        (["--same", "0", "--planted", "0"], "a study needs comparisons"),
        (["--resume", "2030"], "'2030' is no study here"),
    ],
)
def test_wrong_usage_is_2(study, args, error):
    code, _, err = study(*args)
    assert code == 2
    assert error in err


def test_the_runs_that_are_there_show_how_often_comparisons_over_a_suite_are_wrong(run, repository):
    for seed in range(1, 30):
        record = build_record(speedups=[2.0] * 3, seed=seed, spread=0.003)
        write_record(record, repository / "evidence" / f"{record.id}.json.gz")
    code, out, _ = run("study", "--runs")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "20260101T000000Z-seed-flash_attention-000007 NVIDIA H200 graph 3 3 0 3" in rows
    code_of_json, document, _ = run("study", "--runs", "--json")
    shown = json.loads(document)["suites"]
    assert (len(shown["trials"]), shown["runs"]) == (90, 30)
    assert code == code_of_json == {True: 0, None: 4}[shown["holds"]]
    word = "holds" if shown["holds"] else "too few"
    assert rows[-1].startswith(f"{word} 30 runs: {shown['counted']} of 90 comparisons of a baseline with itself")


def test_without_runs_nothing_is_shown(run, repository):
    for path in (repository / "evidence").glob("*.json.gz"):
        path.unlink()
    code, out, _ = run("study", "--runs")
    assert code == 4
    assert out.splitlines()[-1] == "no run has a control in two cases or more, with enough rounds"


def test_runs_takes_no_option_that_it_would_not_look_at(run):
    code, _, err = run("study", "--runs", "--same", "4", "--seed", "1")
    assert code == 2
    assert "error: --runs does not go with same, seed" in err


def test_one_document_under_json(study):
    code, out, _ = study("--same", "8", "--planted", "0", "--json")
    document = json.loads(out)
    assert document["exit_code"] == code == 0
    assert document["study"]["tallies"][0]["sound"] >= 8


def test_a_study_says_what_it_costs_and_is_booked_as_it_grows(study):
    code, out, _ = study("--same", "8", "--planted", "0")
    lines = out.splitlines()
    assert lines[1].startswith("cost: about $")
    assert lines[1].endswith("an hour), by a rough model")
    assert lines[-2].startswith("cost: $")
    assert "(30 s of NVIDIA H200); estimated $" in lines[-2]  # three processes
    (row,) = Store().ledger()
    assert (code, row.gate, row.gpu_seconds) == (0, "study", 30.0)
    out = study("--same", "8", "--planted", "0")[1]
    assert "(30 s of NVIDIA H200 at $" in out.splitlines()[1]  # what the first took
    assert "by 1 earlier study of this case on this GPU" in out.splitlines()[1]
    assert sum(row.gpu_seconds for row in Store().ledger()) == 60.0


def test_a_study_begins_no_process_that_would_pass_its_budget(study, repository):
    (repository / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = 3600\n")  # a dollar a second
    code, out, _ = study("--same", "8", "--planted", "0", "--budget", "1")
    assert code == 4
    assert Store().ledger() == []
    assert "a further process would pass its 1 s of a GPU, of which 1 s are left" in " ".join(out.split())
    (path,) = files(repository)
    path.unlink()
    code, out, _ = study("--same", "8", "--planted", "0", "--budget", "25")
    assert code == 4
    assert [row.gpu_seconds for row in Store().ledger()] == [20.0]
    (path,) = files(repository)
    code, out, _ = study("--resume", name_of(path), "--budget", "30")
    assert code == 0
    assert "cost: $10.00 (10 s of NVIDIA H200)" in out
    assert [row.gpu_seconds for row in Store().ledger()] == [30.0]
