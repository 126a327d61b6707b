"""docs/reference/features.md says which models are served, by the plans and by transformers' configurations."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashmoe_science import flash_attention, flash_attention_with_kv_cache

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "features.md"
ASKED = ("Qwen3.5", "Gemma-4", "DeepSeek-V3.2", "DeepSeek-V4", "GLM-5", "Kimi-K2", "gpt-oss", "MiniMax-M3")


@pytest.fixture
def table(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("model_table")


def test_the_page_has_the_table_of_the_plans(table):
    """Run ``tools/model_table.py docs/reference/features.md`` where it does not."""
    page = PAGE.read_text(encoding="utf-8")
    assert table.update(page) == page


def test_the_numbers_are_those_of_transformers(table):
    """Run ``tools/model_table.py --configurations`` where they are not."""
    transformers = pytest.importorskip("transformers")
    held = json.loads(table.CONFIGURATIONS.read_text(encoding="utf-8"))
    if transformers.__version__ != held["transformers"]:
        pytest.skip(f"the numbers are those of transformers {held['transformers']}")
    assert table.configurations() == held


def test_every_layer_with_a_softmax_is_served(table):
    held = json.loads(table.CONFIGURATIONS.read_text(encoding="utf-8"))
    assert set(ASKED) <= set(held["models"])
    for model, fields in held["models"].items():
        layers = list(table.layers_of(fields))
        assert layers, model
        assert len({layer.kind for layer in layers}) == len(layers)
        for layer in layers:
            refused = "–" in layer.prompt + layer.gradients + layer.decoding
            assert refused == (layer.kind == "linear"), (model, layer)


def test_a_refusal_is_a_dash(table):
    wide = {"heads": 4, "heads_kv": 4, "head_dim": 513, "head_dim_v": 513}
    assert table._prompt(**wide, causal=True) == "–"
    assert table._decoding(**wide) == "–"


def test_chosen_blocks_are_read_as_pages():
    """What the page says of MiniMax-M3: each group of heads decodes over a page table of its own blocks."""
    block, count, groups, heads, blocks = 8, 3, 2, 4, 6
    generator = torch.Generator().manual_seed(0)
    length = blocks * block - 3  # the block of the query is not full, and comes last
    q = torch.randn(1, heads, 1, 16, generator=generator)
    k, v = torch.randn(2, 1, groups, blocks * block, 16, generator=generator).unbind()
    chosen = torch.tensor([[0, 3, 5], [1, 2, 5]], dtype=torch.int32)
    keeps = torch.zeros(groups, blocks, dtype=torch.bool)
    for group in range(groups):
        keeps[group, chosen[group].long()] = True
    bias = torch.zeros(1, heads, 1, length).masked_fill(
        ~keeps.repeat_interleave(block, 1)[:, :length].repeat_interleave(heads // groups, 0)[None, :, None], -torch.inf
    )
    expected = flash_attention(q, k[:, :, :length], v[:, :, :length], bias=bias)
    # Pages of each K/V head after one another: [groups * blocks, block, 1, D].
    pages = [x[0].reshape(groups * blocks, block, 1, 16) for x in (k, v)]
    found = flash_attention_with_kv_cache(
        q.view(groups, heads // groups, 1, 16), *pages,
        page_table=chosen + blocks * torch.arange(groups, dtype=torch.int32)[:, None],
        cache_seqlens=torch.full((groups,), count * block - 3, dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(found.view_as(expected), expected)
