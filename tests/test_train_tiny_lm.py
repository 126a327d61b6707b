"""The example that trains a small language model: a few steps of a tiny one, on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from flashmoe_science import MoeLayer, flash_attention

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
