"""A study of a few trials on a real GPU: its calibration, what is planted, and what it writes."""

from __future__ import annotations

import json

import pytest

from flashmoe_science import cli


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.unpoisoned
def test_planted_work_is_what_was_planted(tmp_path, monkeypatch, capsys):
    (tmp_path / "evidence").mkdir()
    monkeypatch.chdir(tmp_path)
    code = cli.main(["study", "--same", "4", "--planted", "2", "--batches", "1", "--json"])
    out, err = capsys.readouterr()
    assert out.startswith("{"), (code, out, err)
    document = json.loads(out)
    assert "study" in document, (document, err)
    study = document["study"]
    assert study["complete"], (study["incomplete_reason"], err)
    assert code in (0, 1)  # so few trials decide nothing
    same, three, one = study["tallies"]
    assert abs(same["slowdown"]) < 0.005, study["tallies"]
    assert three["slowdown"] == pytest.approx(0.03, abs=0.005), study["tallies"]
    assert one["slowdown"] == pytest.approx(0.01, abs=0.004), study["tallies"]
    assert three["counted"] == three["sound"], three
    assert 0.3e-9 < (study["calibration"]["seconds_with"] - study["calibration"]["seconds"]) / 40_000 < 2e-9
    assert cli.main(["show", next(str(path) for path in (tmp_path / "evidence" / "studies").iterdir())]) == 0
