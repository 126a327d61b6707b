"""Code written for flash-attn's cache: its layouts, names and defaults."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, flash_attention, flash_attention_with_kv_cache
from flashmoe_science.integrations.flash_attn import flash_attn_with_kvcache

from .layouts import LAYOUTS, laid_out


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


def _call(**changes: Any) -> dict[str, Any]:
    """Return arguments of a step that appends a key to each of two sequences, with changes."""
    step = {"q": torch.randn(2, 1, 4, 8), "k": torch.randn(2, 1, 2, 8), "v": torch.randn(2, 1, 2, 8)}
    caches = {"k_cache": torch.randn(2, 9, 2, 8), "v_cache": torch.randn(2, 9, 2, 8)}
    return {**step, **caches, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32), **changes}


def _refused(message: str, **changes: Any) -> None:
    """What is refused writes nothing."""
    given = _call(**changes)
    caches = [given[name] for name in ("k_cache", "v_cache") if isinstance(given[name], torch.Tensor)]
    before = [cache.clone() for cache in caches]
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        flash_attn_with_kvcache(**given)
    assert all(cache.is_meta or torch.equal(cache, copy) for cache, copy in zip(caches, before, strict=True))


def test_the_call_that_is_refused_below_is_served_without_the_change():
    assert flash_attn_with_kvcache(**_call()).shape == (2, 1, 4, 8)


@pytest.mark.parametrize("value", ["x", [1], np.ones(2), torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["causal", "rotary_interleaved", "return_softmax_lse"])
def test_flags_are_true_or_false(name, value):
    _refused(f"{name} must be True or False, got {value!r}", **{name: value})


_WINDOW = "window_size must be two integers (left, right), negative for no bound, got "
_NO_TENSOR = "must be a torch.Tensor, got "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 3}, f"{_WINDOW}3"),
        ({"window_size": (2.0, 1)}, f"{_WINDOW}(2.0, 1)"),
        ({"softcap": np.ones(2)}, "softcap must be a number, 0 for none, got ndarray"),
        ({"softmax_scale": [1]}, "softmax_scale must be a number or None, got list"),
        ({"num_splits": [1]}, "num_splits must be an integer from 0 to 2**31 - 1, got [1]"),
        ({"num_splits": 10**5000}, "num_splits must be an integer from 0 to 2**31 - 1, got int too long to be printed"),
        ({"q": None}, f"q {_NO_TENSOR}NoneType"),
        ({"v_cache": [1]}, f"v_cache {_NO_TENSOR}list"),
        ({"k": 1}, f"k {_NO_TENSOR}int"),
        ({"rotary_cos": [1]}, "rotary_cos must be a torch.Tensor or None, got list"),
        ({"cache_batch_idx": [0, 1]}, f"cache_batch_idx {_NO_TENSOR}list"),
        ({"cache_leftpad": 1}, f"cache_leftpad {_NO_TENSOR}int"),
        ({"block_table": [0]}, f"block_table {_NO_TENSOR}list"),
        ({"cache_seqlens": "x"}, "cache_seqlens must be a torch.Tensor, an integer or None, got 'x'"),
        ({"cache_seqlens": True}, "cache_seqlens must be a torch.Tensor, an integer or None, got True"),
        ({"cache_seqlens": -1}, "cache_seqlens must be an integer from 0 to 2**31 - 1, got -1"),
        ({"cache_seqlens": 9}, "cache_seqlens must be from 0 to 8 (9 positions less 1 new ones), got 9"),
        ({"cache_seqlens": torch.zeros(3).int()}, "cache_seqlens must have shape [B] = [2], got [3]"),
        ({"q": torch.zeros(3)}, "q must have 4 dimensions [B, Sq, H, D], got shape [3]"),
        ({"k_cache": torch.zeros(1)}, "k_cache must have 4 dimensions [B or pages, positions, HK, D], got shape [1]"),
        ({"k": torch.zeros(2, 1, 3, 8)}, "k must have shape [B, Sn, HK, D] = [2, 1, 2, 8], got [2, 1, 3, 8]"),
        ({"v": torch.zeros(2, 3, 2, 8)}, "v must have shape [B, Sn, HK, DV] = [2, 1, 2, 8], got [2, 3, 2, 8]"),
        ({"k": torch.zeros(2, 1, 2, 8).half()}, "k must have the dtype of q, torch.float32, got torch.float16"),
        ({"v_cache": torch.zeros(2, 9, 2, 8, device="meta")}, "v_cache must be on the device of q, cpu, got meta"),
        (
            {"v_cache": torch.zeros(2, 8, 2, 8)},
            "v_cache must have shape [B or pages, positions, HK, DV] = [2, 9, 2, 8], got [2, 8, 2, 8]",
        ),
        ({"q": torch.zeros(2, 1, 3, 8)}, "k_cache must have a number of heads that divides those of q, 3, got 2"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must have shape [H] = [4] or [B, H] = [2, 4], got [3]"),
        ({"cache_leftpad": torch.zeros(2)}, "cache_leftpad must be int32, got torch.float32"),
        ({"cache_leftpad": torch.zeros(3).int()}, "cache_leftpad must have shape [B] = [2], got [3]"),
        ({"block_table": torch.zeros(3, 1).int()}, "block_table must have shape [B, P] = [2, P], got [3, 1]"),
        ({"block_table": torch.full((2, 1), 5).int()}, "block_table[0, 0] must be from 0 to 1, got 5"),
        (
            {"block_table": torch.zeros(2, 1).int(), "cache_batch_idx": torch.zeros(2).int()},
            "cache_batch_idx must be None with a block_table, got one: the table names the pages",
        ),
    ],
)
def test_arguments_have_the_names_and_axes_of_flash_attn(changes, message):
    _refused(message, **changes)


def test_columns_of_caches_that_are_not_contiguous_are_refused_by_the_strides_that_they_have():
    tensor = _call()["k_cache"].mT.contiguous().mT
    message = f"k_cache must be contiguous along its last axis, got strides {list(tensor.stride())}"
    with pytest.raises(InputError, match=f"^{re.escape(message)}\nhint: "):
        flash_attn_with_kvcache(**_call(k_cache=tensor))


@pytest.mark.parametrize("name", ["q", "k", "v", "block_table", "cache_batch_idx"])
def test_other_columns_are_copied_where_they_are_not_contiguous(name):
    given = _call()
    if name == "block_table":
        given[name] = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    elif name == "cache_batch_idx":
        given[name] = torch.tensor([1, 0], dtype=torch.int32)
    apart = torch.stack([given[name], given[name]], -1)[..., 0]
    assert apart.stride(-1) == 2
    changed = {**given, name: apart, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
    assert torch.equal(flash_attn_with_kvcache(**changed), flash_attn_with_kvcache(**given))
    assert torch.equal(changed["k_cache"], given["k_cache"])


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache"])
def test_gradients_are_refused_where_they_are_asked_for(name, with_lse):
    """A forward over a cache with weights that are trained elsewhere is served, and appends."""
    given = _call()
    changed = {**given, name: given[name].clone().requires_grad_(), "v_cache": given["v_cache"].clone()}
    found = flash_attn_with_kvcache(**changed, return_softmax_lse=with_lse)
    o = found[0] if with_lse else found
    assert torch.equal(o.detach(), flash_attn_with_kvcache(**given))
    assert torch.equal(changed["v_cache"], given["v_cache"])
    with pytest.raises(UnsupportedError, match=f"^there is no backward with a cache, and .* required of {name}\n"):
        o.sum().backward()


def test_options_may_be_scalars_of_any_library():
    given = _call(cache_seqlens=3)
    expected = flash_attn_with_kvcache(**given, softmax_scale=0.5, causal=True, window_size=(2, -1), num_splits=2)
    scalars: dict[str, Any] = {
        "softmax_scale": np.float32(0.5), "causal": 1, "window_size": torch.tensor([2, -5]), "softcap": None,
        "num_splits": np.int64(2), "rotary_interleaved": torch.tensor(1), "return_softmax_lse": None,
    }  # fmt: skip
    found = flash_attn_with_kvcache(**given, **scalars)
    assert torch.equal(found, expected)


def test_padding_that_is_checked_on_request_has_the_name_of_flash_attn(monkeypatch):
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    padding = torch.tensor([0, 7], dtype=torch.int32)
    _refused("cache_leftpad[1] must be from 0 to the length 5 (4 keys and 1 new), got 7", cache_leftpad=padding)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "alibi_slopes",
    ],
)  # fmt: skip
def test_tensors_are_dense(name, kind):
    tensor, words = laid_out(kind)
    with pytest.raises(InputError, match=f"^{name} must be dense, got {words}$"):
        flash_attn_with_kvcache(**_call(**{name: tensor}))
