"""The example that trains on packed documents: a few steps of a tiny model, on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_packed")


def test_both_attentions_see_the_same_documents(example, tmp_path, capsys):
    example.main(["--tiny", "--device", "cpu", "--steps", "8", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "packed.json").read_text())
    ours, sdpa = (found["runs"][name] for name in ("ours", "sdpa"))
    assert len(ours["losses"]) == 8
    assert ours["losses"] == pytest.approx(sdpa["losses"], abs=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    assert min(ours["tokens_per_second"], sdpa["tokens_per_second"]) > 0
    assert found["settings"]["tokens"] == 300
    assert "tokens a second" in capsys.readouterr().out


def test_documents_fill_a_batch_and_positions_start_anew(example):
    documents = [torch.arange(20), torch.arange(100, 400), torch.arange(1000, 1007)]
    (tokens, following, positions), lengths = example.pack_batch(documents, torch.Generator(), 500, 64)
    assert sum(lengths) == 500
    assert max(lengths) <= 64
    assert torch.equal(following, tokens + 1)
    assert positions[0].tolist() == [position for length in lengths for position in range(length)]
    assert example.documents_of([2, 3], "cpu").tolist() == [0, 0, 1, 1, 1]


def test_flash_attention_4_is_asked_for_packed_sequences(example, monkeypatch):
    seen = {}

    def attend(q, _k, _v, **options):
        seen.update(options)
        return q, None

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=attend))
    attention = example.ATTENTION["fa4"]()
    attention.set_lengths([3, 2], "cpu")
    q = torch.randn(1, 2, 5, 16)
    assert torch.equal(attention(q, q, q), q)
    assert seen["cu_seqlens_k"].tolist() == [0, 3, 5]
    assert (seen["max_seqlen_q"], seen["causal"]) == (3, True)
