"""Tests of the verbs that fill and empty the store, and of the option that names it."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import datetime, timezone

import pytest

from flashmoe_science.cli.names import moment_named
from flashmoe_science.errors import InputError
from flashmoe_science.proof.records.documents import read_record, record_text, write_record
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from .conftest import RUN_ID


@pytest.fixture
def files(tmp_path):
    """Make a folder with two records, of which one is not compressed, and a document that is none."""
    folder = tmp_path / "elsewhere"
    write_record(build_record(day=1), folder / "1.json")
    write_record(build_record(day=2), folder / "2.json.gz")
    (folder / "gpu-tests.json").write_text('{"passed": 3}')
    return folder


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_sign_signs_records_and_verify_says_who(run, repository, tmp_path):
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (repository / "evidence" / "allowed_signers").write_text(f"me@example.org {(tmp_path / 'key.pub').read_text()}")
    assert run("sign", RUN_ID, "--key", str(key))[:2] == (0, f"evidence/{RUN_ID}.dsse\n")
    assert "signed by me@example.org" in run("verify", "--why")[1]
    (repository / "evidence" / f"{RUN_ID}.dsse").write_text("{}")
    code, out, _ = run("verify")
    assert (code, out.startswith("invalid ")) == (4, True)
    assert "check signature: " in out
    assert run("sign", RUN_ID, "--key", str(tmp_path / "none"))[0] == 2


def test_what_is_imported_can_be_exported(run, files):
    code, out, err = run("import", str(files))
    assert (code, out.endswith("runs: 2 runs: 2 new\n")) == (0, True)
    assert "gpu-tests.json: left out: no record of a run" in err
    assert [r.id for r in Store().runs()] == [build_record(day=day).id for day in (2, 1)]
    assert run("export", "--all", "-o", "out")[:2] == (0, "out: 2 runs: 2 new\n")
    for day in (1, 2):
        record = build_record(day=day)
        assert read_record(files.parent / "repository" / "out" / f"{record.id}.json.gz") == record
    assert run("export", "20260102", "-o", "out")[:2] == (0, "out: 1 run: 1 same\n")
    document = json.loads(run("import", str(files), "--json")[1])
    assert [file["status"] for file in document["files"]] == ["same", "same", "left out"]


def test_a_file_that_cannot_be_read_does_not_stop_the_others(run, files):
    (files / "0.json").write_text('{"gates": [')
    code, out, err = run("import", str(files))
    assert (code, out.endswith("3 runs: 2 new, 1 failed\n")) == (2, True)
    assert "0.json: is no record of a run" in err


def test_a_complete_run_is_only_replaced_when_that_is_asked_for(run, files):
    run("import", str(files))
    changed = build_record(day=1).model_copy(update={"command": "flashmoe prove --seed 1"})
    write_record(changed, files / "1.json")
    code, _, err = run("import", str(files / "1.json"))
    assert code == 2
    assert "with another content, and complete\nhint: records are not edited" in err
    assert Store().load(changed.id) == build_record(day=1)
    assert run("import", str(files / "1.json"), "--replace")[1].endswith("1 run: 1 replaced\n")
    assert Store().load(changed.id) == changed


def test_an_incomplete_run_grows(run, files):
    Store().save(build_record(day=1, complete=False))
    assert run("import", str(files / "1.json"))[1].endswith("1 run: 1 replaced\n")
    assert Store().load("20260102").complete


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["import", "nothing.json"], "nothing.json: cannot be read"),
        (["import", "claims"], "claims: holds no *.json"),
        (["export", "2027"], "there is no run '2027'"),
        (["export"], "expected the ids of runs, or --all, got neither\nhint: flashmoe runs"),
        (["export", "2026", "--all"], "expected ids of runs or --all, got 1 id and --all"),
        (["export", RUN_ID, "-o", "README.md"], "cannot be written"),
        (["runs", "--store", "postgresql://ada:abcdef@host/db"], "the store must be a folder, got the URL"),
    ],
)
def test_wrong_usage(run, args, error):
    code, _, err = run(*args)
    assert code == 2
    assert error in err


@pytest.mark.parametrize("content", ["mine", None])
def test_a_file_with_another_content_is_not_overwritten(run, repository, content):
    path = repository / "out" / f"{RUN_ID}.json.gz"
    write_record(build_record(day=1), path)
    if content:
        path.write_text(content)
    before = path.read_bytes()
    code, _, err = run("export", RUN_ID, "-o", "out")
    assert (code, "exists with another content" in err) == (2, True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("id_", ["../escaped", "/escaped", "a/b", "..", ".hidden", "a\\b", "a\n", ""])
def test_a_record_whose_id_names_another_place_is_refused_and_written_nowhere(run, repository, tmp_path, id_):
    record = json.loads(record_text(build_record()))
    (tmp_path / "a.json").write_text(json.dumps({**record, "id": id_}))
    (repository / "out").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for args in (["export", str(tmp_path / "a.json"), "-o", "out/in"], ["import", str(tmp_path / "a.json")]):
        code, _, err = run(*args)
        assert (code, "a.json: key id" in err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


# the option --store and --since


def test_a_file_is_shown_whatever_the_store_is(run, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", "postgresql://host/db")
    assert run("show", f"evidence/{RUN_ID}.json.gz")[0] == 0
    assert run("show", RUN_ID)[0] == 2


def test_runs_since_a_date_in_both_places(run):
    for day in (0, 40):
        Store().save(build_record(day=day, subject="mine"))
    listed = json.loads(run("runs", "--since", "2026-02-01", "--json")[1])["runs"]
    assert [one["id"] for one in listed] == [build_record(day=40, subject="mine").id]
    assert len(json.loads(run("runs", "--since", "2026-01-01", "--json")[1])["runs"]) == 3
    assert run("runs", "--since", "2027-01-01") == (0, "", "no such run\n")
    code, _, err = run("runs", "--since", "yesterday")
    assert (code, "since must be a date or how long ago, got 'yesterday'" in err) == (2, True)


NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-02", datetime(2026, 1, 2, tzinfo=timezone.utc)),
        ("2026-01-02T03:04", datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)),
        ("2026-01-02T03:04:00Z", datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)),
        ("2026-01-02T03:04:00+02:00", datetime(2026, 1, 2, 1, 4, tzinfo=timezone.utc)),
        ("7d", datetime(2026, 1, 24, 12, tzinfo=timezone.utc)),
        ("2w", datetime(2026, 1, 17, 12, tzinfo=timezone.utc)),
        ("12h", datetime(2026, 1, 31, tzinfo=timezone.utc)),
    ],
)
def test_dates_and_how_long_ago(text, moment):
    assert moment_named(text, now=NOW) == moment


@pytest.mark.parametrize("text", ["", "7", "7y", "-7d", "2026-13-01", "99999999999d"])
def test_other_words_are_no_date(text):
    with pytest.raises(InputError, match="since must be a date or how long ago"):
        moment_named(text, now=NOW)
