"""Tests of the verb sign, and of the options --store and --since."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import datetime, timezone

import pytest

from flashmoe_science.cli.names import moment_named
from flashmoe_science.errors import InputError
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from .conftest import RUN_ID


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


# the option --store and --since


def test_a_file_is_shown_whatever_the_store_is(run, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", "postgresql://host/db")
    assert run("show", f"evidence/{RUN_ID}.json.gz")[0] == 0
    assert run("show", RUN_ID)[0] == 2
    assert "the store must be a folder, got the URL" in run("runs", "--store", "postgresql://ada:abcdef@host/db")[2]


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
