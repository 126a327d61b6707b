"""Tensors whose class says what they mean are understood, or refused by name; nothing is written before a refusal."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashmoe_science import (
    InputError,
    MoeLayer,
    UnsupportedError,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)
from flashmoe_science.integrations.flash_attn import flash_attn_func
from flashmoe_science.integrations.sdpa import scaled_dot_product_attention
from flashmoe_science.integrations.transformers import attend as attend_of_transformers


def batch(rows: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, rows, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)


OWN = r"must be a torch\.Tensor whose class has no __torch_function__ of its own, got CausalBias"


def test_a_bias_that_is_more_than_its_elements_is_refused():
    """Its memory was never written: what it means is in its class."""
    q, k, v = batch()
    bias = causal_upper_left(5, 7)
    for call in (flash_attention, explain):
        with pytest.raises(InputError, match=f"bias {OWN}"):
            call(q, k, v, bias=bias)
    starts = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(InputError, match=f"bias {OWN}"):
        flash_attention_varlen(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), starts[0], starts[1], 5, 7, bias=bias
        )
    with pytest.raises(InputError, match=f"bias {OWN}"):
        flash_attention_with_kv_cache(q, k.transpose(1, 2), v.transpose(1, 2), bias=bias)
    with pytest.raises(InputError, match=f"attention_mask {OWN}"):
        attend_of_transformers(torch.nn.Module(), q, k, v, bias)


def test_a_view_does_not_lose_the_class():
    q, k, v = (x.transpose(1, 2) for x in batch())
    with pytest.raises(InputError, match=f"q {OWN}"):
        flash_attn_func(causal_upper_left(5, 7), k, v)
    with pytest.raises(InputError, match=f"key {OWN}"):
        scaled_dot_product_attention(q, causal_upper_left(5, 7), v)
    with pytest.raises(InputError, match=f"x {OWN}"):
        MoeLayer(7, 4, 2, 1)(causal_upper_left(5, 7))


@pytest.mark.parametrize("rows", [5, 7, 9])
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_sdpa_understands_causal_biases(kind, rows):
    q, k, v = batch(rows)
    mask = kind(rows, 7)
    seen = mask._materialize()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).nan_to_num(0.0)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask, enable_gqa=True), expected)
    with pytest.raises(InputError, match="attn_mask must be None with is_causal, got both"):
        scaled_dot_product_attention(q, k, v, mask, is_causal=True, enable_gqa=True)
    with pytest.raises(InputError, match=rf"attn_mask must be of {rows} queries and 7 keys, got \[3, 7\]"):
        scaled_dot_product_attention(q, k, v, kind(3, 7), enable_gqa=True)


def test_more_sequences_than_a_grid_has_are_refused_where_they_are_appended_alone():
    """There are no queries, and so no launch but one."""
    from flashmoe_science.attention.decode.contract import cache_problem_of
    from flashmoe_science.attention.decode.plan import plan_with_kv_cache
    from flashmoe_science.gpu.specs import SPECS

    def plan(batch: int) -> object:
        cache, new = torch.empty(batch, 2, 1, 8).half(), torch.empty(batch, 1, 1, 8).half()
        lengths = torch.zeros(batch, dtype=torch.int32)
        given = {
            "q": torch.empty(batch, 1, 0, 8).half(), "k_cache": cache, "v_cache": cache.clone(), "k": new, "v": new,
            "cache_seqlens": lengths,
        }  # fmt: skip
        return plan_with_kv_cache(cache_problem_of(given), SPECS["H200"], "auto")

    plan(65535)
    with pytest.raises(UnsupportedError, match="too large for _append_kernel"):
        plan(65536)
