"""Code written for flash-attn's cache: its layouts, names and defaults."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashmoe_science import InputError, flash_attention, flash_attention_with_kv_cache
from flashmoe_science.integrations.flash_attn import flash_attn_with_kvcache


def test_the_signature_is_flash_attns():
    """flash-attn 2.8: names, order and defaults."""
    found = {
        name: parameter.default for name, parameter in inspect.signature(flash_attn_with_kvcache).parameters.items()
    }
    empty = inspect.Parameter.empty
    assert list(found.items()) == [
        ("q", empty), ("k_cache", empty), ("v_cache", empty), ("k", None), ("v", None), ("rotary_cos", None),
        ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None), ("cache_leftpad", None),
        ("block_table", None), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
        ("rotary_interleaved", True), ("alibi_slopes", None), ("num_splits", 0), ("return_softmax_lse", False),
    ]  # fmt: skip


def test_a_step_of_generation():
    """Prompt and token through the cache give what attention over all gives; the cache holds the keys."""
    batch, heads, heads_kv, length, dim = 2, 4, 2, 9, 16
    q = torch.randn(batch, length, heads, dim)
    k, v = (torch.randn(batch, length, heads_kv, dim) for _ in range(2))
    caches = [torch.full((batch, 20, heads_kv, dim), torch.nan) for _ in range(2)]
    lengths = torch.zeros(batch, dtype=torch.int32)
    prompt = slice(0, length - 1)
    first = flash_attn_with_kvcache(
        q[:, prompt], caches[0], caches[1], k[:, prompt], v[:, prompt], cache_seqlens=lengths, causal=True
    )
    lengths += length - 1
    last, lse = flash_attn_with_kvcache(
        q[:, -1:],
        caches[0],
        caches[1],
        k[:, -1:],
        v[:, -1:],
        cache_seqlens=lengths,
        causal=True,
        return_softmax_lse=True,
    )
    expected, expected_lse = flash_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, return_lse=True
    )
    torch.testing.assert_close(torch.cat([first, last], 1), expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse[..., -1:])
    assert torch.equal(caches[0][:, :length], k)


def test_every_argument_goes_where_it_belongs():
    batch, heads, heads_kv, dim = 2, 4, 2, 16
    q, k, v = (
        torch.randn(batch, 3, heads, dim),
        torch.randn(batch, 3, heads_kv, dim),
        torch.randn(batch, 3, heads_kv, dim),
    )
    angles = torch.randn(40, 4)
    table = torch.tensor([[3, 1, 0, 2], [7, 6, 4, 5]], dtype=torch.int32)
    caches = [torch.randn(8, 8, heads_kv, dim) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    lengths, padding = torch.tensor([10, 20], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    slopes = torch.rand(heads)
    o = flash_attn_with_kvcache(
        q, caches[0], caches[1], k, v, angles.cos(), angles.sin(), lengths, None, padding, table, 0.3, True,
        (6, 0), 5.0, False, slopes, 2,
    )  # fmt: skip
    expected = flash_attention_with_kv_cache(
        q.transpose(1, 2), copies[0], copies[1], k.transpose(1, 2), v.transpose(1, 2), rotary_cos=angles.cos(),
        rotary_sin=angles.sin(), cache_seqlens=lengths, leftpad_k=padding, page_table=table, softmax_scale=0.3,
        causal=True, window=(6, 0), softcap=5.0, rotary_interleaved=False, alibi=slopes, num_splits=2,
    )  # fmt: skip
    assert torch.equal(o, expected.transpose(1, 2))
    assert torch.equal(caches[0], copies[0])
    rows = torch.tensor([5, 2], dtype=torch.int32)
    o = flash_attn_with_kvcache(q, caches[0], caches[1], cache_seqlens=7, cache_batch_idx=rows)
    expected = flash_attention_with_kv_cache(
        q.transpose(1, 2), caches[0], caches[1], cache_seqlens=7, cache_batch_idx=rows
    )
    assert torch.equal(o, expected.transpose(1, 2))


def test_a_wrong_rank_is_refused():
    with pytest.raises(InputError, match=r"q must be a torch.Tensor \[B, S, H, D\], got torch.Size\(\[3\]\)"):
        flash_attn_with_kvcache(torch.zeros(3), torch.zeros(1), torch.zeros(1))
