"""Tests of the verb report: which runs, which files, and what it says."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from .conftest import RUN_ID


def test_without_a_run_it_is_the_newest_of_the_repository(run, repository):
    newer = build_record(speedups=[2.3, 3.0], suite="made_up", day=3)
    write_record(newer, repository / "evidence" / f"{newer.id}.json.gz")
    Store().save(build_record(day=9))
    code, out, err = run("report")
    assert (code, out) == (0, "report.html\n")
    assert err == f"{newer.id}: 1 claim: 1 demonstrated\n"
    assert newer.id in (repository / "report.html").read_text()


def test_outside_of_a_repository_it_is_the_newest_of_the_store(run, monkeypatch, tmp_path):
    Store().save(build_record(day=9))
    monkeypatch.chdir(tmp_path)
    assert run("report")[0] == 0
    assert build_record(day=9).id in (tmp_path / "report.html").read_text()


def test_where_there_is_no_run_it_says_what_makes_one(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("report")
    assert code == 2
    assert err.startswith("error: there is no run in the store, ")
    assert "flashmoe prove" in err
    (tmp_path / "evidence").mkdir()
    assert run("report")[2].startswith("error: there is no run in evidence/ of this repository\n")


def test_a_file_that_is_no_record_is_named_and_the_others_count(run, repository):
    (repository / "evidence" / "broken.json").write_text("{")
    code, _, err = run("report")
    assert code == 0
    assert err.startswith("warning: ")
    assert "broken.json" in err


def test_the_ending_of_a_file_says_what_it_becomes(run, repository):
    assert run("report", "20260101", "-o", "a.html", "-o", "a.md", "-o", "a.csv")[:2] == (0, "a.html\na.md\na.csv\n")
    assert (repository / "a.html").read_text().startswith("<!doctype html>")
    assert (repository / "a.md").read_text().startswith("# flash_attention on NVIDIA H200\n")
    assert (repository / "a.csv").read_text().startswith("run,created_at,gpu,")


@pytest.mark.parametrize("name", ["report", "report.pdf", "report.html.gz"])
def test_another_ending_is_refused_before_anything_is_written(run, repository, name):
    code, _, err = run("report", "-o", "good.html", "-o", name)
    assert (code, err.splitlines()[0]) == (2, f"error: output must end in .html, .md, .csv, got '{name}'")
    assert not (repository / "good.html").exists()


def test_several_runs_stand_on_one_page_and_one_named_twice_stands_once(run, repository):
    other = build_record(day=1)
    Store().save(other)
    code, out, _ = run("report", RUN_ID, other.id, f"evidence/{RUN_ID}.json.gz", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["runs"] == [RUN_ID, other.id]
    assert document["files"] == ["report.html"]
    assert [verdict["status"] for verdict in document["verdicts"]] == ["demonstrated", "demonstrated"]
    assert "<h1>2 runs side by side</h1>" in (repository / "report.html").read_text()


def test_a_time_that_was_not_taken_is_refused(run, repository):
    record = build_record(times=("wall",), day=2)
    Store().save(record)
    code, _, err = run("report", record.id, "--time", "graph")
    assert (code, err) == (2, "error: time must be one of wall in these runs, got graph\n")
    assert run("report", record.id, "--time", "wall")[0] == 0
    assert "wall time, medians of one call" in (repository / "report.html").read_text()
