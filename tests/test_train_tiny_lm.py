"""The example that trains a small language model: a few steps of a tiny one, on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
import torch

from flashmoe_science import MoeLayer, flash_attention
from flashmoe_science.proof.measure import environment

PATH = Path(__file__).parents[1] / "examples" / "train_tiny_lm.py"
TINY = ["--tiny", "--device", "cpu", "--steps", "4", "--length", "32"]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_lm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curves_agree_and_the_model_learns(example, tmp_path, capsys):
    example.main([*TINY, "--steps", "48", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "losses.json").read_text())
    ours, sdpa = (found["runs"][name] for name in ("ours", "sdpa"))
    assert len(ours["losses"]) == len(sdpa["losses"]) == 48
    assert ours["losses"] == pytest.approx(sdpa["losses"], abs=1e-4)
    assert ours["unseen"] == pytest.approx(sdpa["unseen"], abs=1e-4)
    assert min(ours["tokens_per_second"], sdpa["tokens_per_second"]) > 0
    # Means, as one batch of 64 bytes, wherever in the repository's text it lies, may be harder than another.
    assert fmean(ours["losses"][-12:]) < fmean(ours["losses"][:12]) - 0.2
    assert "largest difference between the curves: 0.0000" in capsys.readouterr().out


def test_experts_learn_as_they_do_in_a_loop(example, tmp_path):
    example.main([*TINY, "--steps", "48", "--experts", "4", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "losses.json").read_text())
    ours, loop = (found["runs"][name]["losses"] for name in ("ours", "sdpa"))
    assert found["experts"] == 4
    assert ours == pytest.approx(loop, abs=1e-4)
    assert fmean(ours[-12:]) < fmean(ours[:12]) - 0.2


def test_what_a_run_was_made_with_is_written_down(example, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMOE_COMMIT", "0123abc-clean")
    before = datetime.now(timezone.utc).replace(microsecond=0)
    example.main([*TINY, "--seed", "3", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "losses.json").read_text())
    assert before <= datetime.fromisoformat(found["date"]) <= datetime.now(timezone.utc)
    assert (found["seed"], found["first"], found["lr"], found["steps"]) == (3, "ours", 1e-3, 4)
    where = found["environment"]
    harness = environment.environment().model_dump(mode="json")
    # Training may set variables that it takes for settings.
    assert {**where, "settings": None} == {**harness, "settings": None}
    assert (where["commit"], where["dirty"]) == ("0123abc", False)
    assert where["versions"]["torch"] == torch.__version__
    assert {"gpu", "driver", "cuda"} <= where.keys()


def test_without_the_harness_it_says_so_and_has_no_environment(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flashmoe_science.proof.measure.environment", None)
    assert example.describe() is None
    said = "flashmoe_science.proof.measure.environment is not installed, so losses.json has no environment"
    assert said in capsys.readouterr().out


def test_either_goes_first_and_neither_changes(example, tmp_path, capsys):
    """The order of two runs is in the file, and changes no loss; another seed does."""
    found = {}
    for seed, first in (("0", "ours"), ("0", "sdpa"), ("1", "sdpa")):
        capsys.readouterr()
        example.main([*TINY, "--seed", seed, "--first", first, "--out", str(tmp_path)])
        steps = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": step 0" in line]
        assert steps[0] == first
        assert sorted(steps) == ["ours", "sdpa"]
        found[seed, first] = json.loads((tmp_path / "losses.json").read_text())
        assert found[seed, first]["first"] == first
        assert list(found[seed, first]["runs"]) == ["ours", "sdpa"]
    losses = {key: [run["losses"] for run in document["runs"].values()] for key, document in found.items()}
    torch.testing.assert_close(losses["0", "ours"], losses["0", "sdpa"], rtol=0, atol=1e-6)
    assert abs(losses["0", "ours"][0][0] - losses["1", "sdpa"][0][0]) > 1e-3


def test_wrong_experts_show(example, monkeypatch):
    monkeypatch.setitem(example.EXPERTS, "ours", functools.partial(MoeLayer, scale=2.0))
    args = example.parse([*TINY, "--experts", "4"])
    runs = {name: example.train(name, args) for name in example.ATTENTION}
    assert example.compare(runs) > 1e-3


def test_a_wrong_attention_shows(example, monkeypatch):
    monkeypatch.setitem(example.ATTENTION, "ours", flash_attention)  # not causal: it sees what it has to say
    args = example.parse(TINY)
    runs = {name: example.train(name, args) for name in example.ATTENTION}
    assert example.compare(runs) > 1e-3


def test_a_whole_model_is_not_begun_without_a_gpu(example, capsys, monkeypatch):
    monkeypatch.setattr(example.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.parse(["--experts", "8"])
    assert "torch finds no GPU: --tiny takes seconds on a CPU" in capsys.readouterr().err
    assert example.parse(["--tiny"]).device == example.parse(["--device", "cpu"]).device == "cpu"


def test_fewer_experts_than_a_token_goes_to_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.parse([*TINY, "--experts", "1"])
    assert "--experts must be 0, or at least the 2 that a token goes to, got 1" in capsys.readouterr().err


def test_the_plot_can_be_drawn_elsewhere(example, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs the extra examples")
    run = {"losses": [5.0, 4.0, 3.5], "unseen": 3.6, "tokens_per_second": 12.0}
    path = tmp_path / "losses.json"
    path.write_text(json.dumps({"runs": {"ours": run, "sdpa": run}}))
    example.main(["--plot", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["tiny-lm", "tiny-lm-experts"])
def test_files_of_earlier_runs_are_still_drawn(example, name, tmp_path):
    """They say no more of their environment than the GPU and the version of torch."""
    pytest.importorskip("matplotlib", reason="the plot needs the extra examples")
    path = tmp_path / "losses.json"
    path.write_bytes((PATH.parents[1] / "lab" / "tiny_lm" / f"{name}.json").read_bytes())
    example.main(["--plot", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
