"""The example that counts tokens a second of a transformers model: a tiny one, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashmoe_science import flash_attention, flash_attention_with_kv_cache

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

PATH = Path(__file__).parents[1] / "examples" / "tokens_per_second.py"
TINY = ["--tiny", "--device", "cpu", "--new", "3", "--rounds", "1"]
NAMES = ["moe_science", "sdpa"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tokens_per_second", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        SystemExit, match=r'error: transformers is not installed\nhint: pip install "transformers>=5.23"'
    ):
        runpy.run_path(str(PATH))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_table_with_its_environment(example, cache, tmp_path, capsys):
    example.main([*TINY, "--cache", cache, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "tokens_per_second.json").read_text())
    assert list(found["rows"]) == list(found["runs"]) == NAMES
    assert set(found["missing"]) == set(example.FLASH_ATTN)
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert found["settings"]["dtype"] == "float32"
    assert found["settings"]["cache"] == cache
    assert 0 < found["check"]["errors"]["moe_science"] <= found["check"]["allowed"]
    assert all(len(run["first_s"]) == len(run["last_s"]) == 1 for run in found["runs"].values())
    assert [[len(text) for text in run["tokens"]] for run in found["runs"].values()] == [[3, 3], [3, 3]]
    assert found["rows"]["moe_science"]["same_tokens"] == 1
    table = (tmp_path / "tokens_per_second.md").read_text()
    assert table in capsys.readouterr().out
    assert "| flash_attention_2 | needs a GPU |" in table
    assert f"{cache} cache, batch 2, prompts of 24 tokens, 3 new ones" in table


@pytest.mark.parametrize("wrong", [{"softmax_scale": 0.3}, {"causal": False}], ids=str)
def test_a_wrong_attention_is_not_timed(example, wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "flashmoe_science.integrations.transformers.flash_attention",
        lambda *tensors, **options: flash_attention(*tensors, **{**options, **wrong}),
    )
    with pytest.raises(example.WrongLogitsError, match=r"logits of moe_science must be within .*, got"):
        example.main([*TINY, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_step_is_not_timed(example, monkeypatch, tmp_path):
    """The kernel that decodes is another one, and is checked too."""
    monkeypatch.setattr(
        "flashmoe_science.integrations.transformers.flash_attention_with_kv_cache",
        lambda *tensors, **options: flash_attention_with_kv_cache(*tensors, **{**options, "window": (3, 0)}),
    )
    with pytest.raises(example.WrongLogitsError, match=r"logits of moe_science must be within .*, got"):
        example.main([*TINY, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_nan_is_not_timed(example, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "flashmoe_science.integrations.transformers.flash_attention",
        lambda *tensors, **options: flash_attention(*tensors, **options) * torch.nan,
    )
    with pytest.raises(example.WrongLogitsError, match="got nan"):
        example.main([*TINY, "--out", str(tmp_path)])


def test_why_flash_attn_is_missing_is_said(example, monkeypatch):
    """It may be missing, or there and not fit the model; what fits is among the names."""

    def refuse(name: str) -> None:
        if name == "flash_attention_3":
            raise ValueError("this model\ndoes not | support it")

    modules = {"flash_attn_interface", "flash_attn.cute"}
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *of: None if name in modules else real(name, *of))
    model = SimpleNamespace(device=torch.device("cuda"), set_attn_implementation=refuse)
    names, missing = example.attentions(model)
    assert names == [*NAMES, "flash_attention_4"]
    assert missing["flash_attention_2"] == "cannot be used: No module named 'flash_attn'"
    assert missing["flash_attention_3"] == "cannot be used: this model does not / support it"


def test_rates_are_medians_over_rounds(example):
    args = example.parse([*TINY, "--batch", "2", "--prompt", "10", "--new", "5", "--rounds", "3"])
    sdpa = {"first_s": [1.0, 2.0, 4.0], "last_s": [3.0, 6.0, 3.0], "tokens": [[1, 2], [3, 4]]}
    runs = {"moe_science": {**sdpa, "tokens": [[1, 2], [3, 5]]}, "sdpa": sdpa}
    row = example.summarize(args, runs)["moe_science"]
    assert row == {
        "prompt_tokens_per_second": 10.0,  # 20 tokens in 2 s
        "decode_tokens_per_second": 3.0,  # 8 tokens in 2 s, in 4 s; the third round is no time
        "lowest": 2.0,
        "highest": 4.0,
        "tokens_per_second": 10 / 3,
        "same_tokens": 0.75,
    }


def test_impossible_sizes_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--tiny", "--new", "1"])
    assert "--prompt and --new at least 2" in capsys.readouterr().err


def test_a_whole_model_is_not_begun_without_a_gpu(example, capsys, monkeypatch):
    monkeypatch.setattr(example.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.parse([])
    assert "torch finds no GPU: --tiny takes seconds on a CPU" in capsys.readouterr().err
    assert example.parse(["--tiny"]).device == example.parse(["--device", "cpu"]).device == "cpu"
