"""torchtitan's debug models: packed documents by our attention, beside torchtitan's own SDPA and masks."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask

from flashmoe_science.errors import InputError, MissingPackageError, UnsupportedError

from ..required import import_needed

MODULE = "flashmoe_science.integrations.torchtitan"
LENGTHS = {"packed": ((7, 1, 12), (3, 17)), "whole rows": ((20,), (20,))}
# Gradients of fp32 are sums of some hundred products in another order: 1e-6 of the largest, a tenth of this.
TOLERANCE = 1e-5


@pytest.fixture
def titan() -> Any:
    """Return torchtitan's module of attention."""
    reason = "needs torchtitan: pip install torchtitan"
    import_needed("torchtitan", "torchtitan", reason)
    return import_needed("torchtitan.models.common.attention", "torchtitan", reason)


def made(config: Any, *, by_us: bool = False) -> Any:
    """Return a model, or a part of one, with the same weights in every call."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    if by_us:
        assert apply_overrides(OverrideConfig(imports=[f"{MODULE}.varlen_attention"]), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def positions(lengths: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def compare_gradients(found: torch.Tensor, expected: torch.Tensor, ours: Any, theirs: Any) -> None:
    """Compare outputs, and gradients of all parameters, each beside its own largest element."""
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    weights = torch.randn(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, parameter), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (parameter.grad - other.grad).abs().max() <= TOLERANCE * other.grad.abs().max(), name


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_models_are_equal_to_sdpa_document_by_document(titan, name, kind):
    configs = getattr(importlib.import_module(f"torchtitan.models.{name}"), f"{name}_configs")
    config, other = (configs["debugmodel"](attn_backend="varlen") for _ in range(2))
    del config.layers[2:], other.layers[2:]
    for layer in other.layers:
        layer.attention.inner_attention = titan.ScaledDotProductAttention.Config()
    ours, theirs = made(config, by_us=True), made(other)
    assert type(ours.layers["0"].attention.inner_attention).__name__ == "PackedAttention"
    tokens, places = torch.randint(2048, (2, 20)), positions(LENGTHS[kind])
    found = ours(tokens, places, ours.get_attention_masks(places))
    parts = [
        theirs(part[None], torch.arange(len(part))[None])
        for row, lengths in zip(tokens, LENGTHS[kind], strict=True)
        for part in row.split(lengths)
    ]
    compare_gradients(found, torch.cat(parts, 1).view_as(found), ours, theirs)


def attend_densely(q, k, v, *, block_mask, scale, **others):
    """Return output and log-sum-exp by torchtitan's own rule; PyTorch's FlexAttention has no gradients on a CPU."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize("window", [None, 4])
def test_windows_and_sinks_of_gpt_oss_are_equal_to_those_of_a_dense_mask(titan, window, monkeypatch):
    gpt_oss = importlib.import_module("torchtitan.models.gpt_oss")
    rope = importlib.import_module("torchtitan.models.common.rope").CosSinRoPE.Config(dim=16, max_seq_len=64)
    sizes = {"dim": 64, "layer_id": 0, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "rope": rope}
    config, other = (
        gpt_oss._make_gptoss_attn_config(attn_backend=backend, sliding_window_size=window, **sizes)
        for backend in ("varlen", "flex")
    )
    monkeypatch.setattr(titan.FlexAttention, "_compiled_flex_attn", staticmethod(attend_densely))
    ours, theirs = made(config, by_us=True), made(other)
    ours.softmax_scale = theirs.softmax_scale = 0.7
    places = positions(LENGTHS["packed"])
    x = torch.randn(2, 20, 64)
    rules = [titan.get_causal_mask_mod(), titan.get_document_mask_mod(places)]
    rules += [] if window is None else [titan.get_sliding_window_mask_mod(window)]
    mask = create_block_mask(and_masks(*rules), 2, None, 20, 20, device="cpu")
    found = ours(x, titan.create_varlen_metadata_for_document(places), places)
    compare_gradients(found, theirs(x, mask, places), ours, theirs)


def test_layers_compile(titan):
    attention = importlib.import_module(MODULE).PackedAttention.Config(window_size=(3, 0)).build()
    q, k, v = torch.randn(2, 20, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    masks = titan.create_varlen_metadata_for_document(positions(LENGTHS["packed"]))
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, attention_masks=masks), attention(q, k, v, attention_masks=masks))


def test_norms_that_left_queries_in_fp32_do_not_widen_the_values(titan):
    attention = importlib.import_module(MODULE).PackedAttention.Config().build()
    q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 8)
    masks = titan.create_varlen_metadata_for_document(torch.arange(5)[None])
    found = attention(q, k, v.bfloat16(), attention_masks=masks)
    assert (found.dtype, found.shape) == (torch.float32, (1, 5, 4, 8))
    expected = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), attention_masks=masks)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)


def test_what_is_not_served_raises_by_name(titan):
    attention = importlib.import_module(MODULE).PackedAttention.Config().build()
    x = torch.randn(1, 5, 4, 16)
    masks = titan.create_varlen_metadata_for_document(torch.arange(5)[None])
    with pytest.raises(UnsupportedError, match="is_causal of torchtitan's attention is not served"):
        attention(x, x, x, attention_masks=masks, is_causal=False)
    with pytest.raises(InputError, match="attention_masks must be VarlenMetadata, got None"):
        attention(x, x, x, attention_masks=None)


def test_without_torchtitan_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan.config.override", None)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(MissingPackageError, match=r'hint: pip install "torchtitan>=0.3,<0.4"'):
        importlib.import_module(MODULE)
