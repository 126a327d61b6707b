"""The functions of flash-attn: their signatures, and what they return."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention import reference
from flashmoe_science.integrations import flash_attn

_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {  # of flash-attn 2.8
    "flash_attn_func": f"q, k, v, {_OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_OPTIONS}",
}


def test_signatures_are_those_of_flash_attn():
    elsewhere = {"flash_attn_with_kvcache"}  # test_flash_attn_cache.py
    assert set(flash_attn.__all__) == set(SIGNATURES) | elsewhere
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        assert ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters) == expected


def test_code_that_asks_for_the_version_gets_that_of_the_signatures():
    assert flash_attn.__version__.startswith("2.8.")


@pytest.fixture
def qkv() -> torch.Tensor:
    return torch.randn(2, 9, 3, 4, 8)


def test_dense_functions_agree_with_the_reference(qkv):
    q, k, v = qkv.unbind(2)
    slopes = torch.rand(4)
    options: dict[str, Any] = {
        "causal": True,
        "window_size": (3, -1),
        "softcap": 2.0,
        "alibi_slopes": slopes,
        "softmax_scale": 0.3,
    }
    expected, lse = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        causal=True, window=(3, -1), softcap=2.0, alibi=slopes, softmax_scale=0.3,
    )  # fmt: skip
    results = [
        flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options),
        flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options),
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], return_attn_probs=True, **options),
    ]
    for o, found_lse, probabilities in results:
        torch.testing.assert_close(o, expected.transpose(1, 2))
        torch.testing.assert_close(found_lse, lse)
        assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
        assert o.is_contiguous()
    alone = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1), 2.0, slopes, True)
    assert torch.equal(alone, results[0][0])


def test_packed_functions_agree_with_the_reference(qkv):
    packed = qkv[0]
    q, k, v = packed.unbind(1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected, lse = reference.attention_varlen(q, k, v, ends, ends, causal=True)
    results = [
        flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True, return_attn_probs=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(packed, ends, 5, causal=True, return_attn_probs=True),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q, packed[:, 1:], ends, ends, 5, 5, causal=True, return_attn_probs=True
        ),
    ]
    for o, found_lse, probabilities in results:
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(found_lse, lse)
        assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True), results[0][0])


def test_dropout(qkv):
    """Every function drops what ``flash_attention`` drops after the same ``torch.manual_seed``, in training too."""
    qkv = qkv.requires_grad_()
    q, k, v = qkv.unbind(2)
    packed, ends = qkv.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32)
    flat_q, flat_k, flat_v = packed.unbind(1)
    torch.manual_seed(5)
    seed = torch.randint(2**62, (2,))
    expected, _ = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, dropout_p=0.4, dropout_seed=seed
    )
    expected = expected.transpose(1, 2)
    (gradient,) = torch.autograd.grad(expected.sum(), qkv)
    calls: dict[str, tuple[Any, ...]] = {
        "flash_attn_func": (q, k, v),
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_kvpacked_func": (q, qkv[:, :, 1:]),
        "flash_attn_varlen_func": (flat_q, flat_k, flat_v, ends, ends, 9, 9),
        "flash_attn_varlen_qkvpacked_func": (packed, ends, 9),
        "flash_attn_varlen_kvpacked_func": (flat_q, packed[:, 1:], ends, ends, 9, 9),
    }
    for name, given in calls.items():
        torch.manual_seed(5)
        o = getattr(flash_attn, name)(*given, dropout_p=0.4, causal=True)
        torch.testing.assert_close(o.view_as(expected), expected)
        torch.testing.assert_close(torch.autograd.grad(o.sum(), qkv)[0], gradient)
        assert not torch.allclose(o, getattr(flash_attn, name)(*given, dropout_p=0.4, causal=True)), "the next draw"


def test_packed_queries_attend_to_a_paged_cache():
    """As serving code calls it: prompts of some sequences, one token of others, and a padded table."""
    lengths_q, lengths_k = torch.tensor([4, 1, 0, 7]), torch.tensor([4, 21, 3, 30])
    starts_q, starts_k = (
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int() for lengths in (lengths_q, lengths_k)
    )
    k_cache, v_cache = torch.randn(2, 40, 8, 2, 16).unbind(0)
    table = torch.randperm(40)[:20].reshape(4, 5).int()
    q, k, v = torch.randn(12, 4, 16), torch.empty(58, 2, 16), torch.empty(58, 2, 16)
    for b, (start, length) in enumerate(zip(starts_k.tolist(), lengths_k.tolist(), strict=False)):
        for n in range(length):
            k[start + n], v[start + n] = (cache[table[b, n // 8], n % 8] for cache in (k_cache, v_cache))
        table[b, -(-length // 8) :] = -1
    slopes = torch.rand(4)
    lse: torch.Tensor
    o, lse, probs = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, starts_q, starts_k, 7, 30, 0.0, 0.3, True, (9, -1), 2.0, slopes,
        return_attn_probs=True, block_table=table,
    )  # fmt: skip
    expected, expected_lse = reference.attention_varlen(
        q, k, v, starts_q, starts_k, causal=True, window=(9, -1), softcap=2.0, alibi=slopes, softmax_scale=0.3
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert probs.numel() == 0


def test_what_is_not_served_raises_by_name(qkv):
    q, k, v = qkv.unbind(2)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs must be False with dropout_p of 0.1"):
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs must be False with dropout_p of 0.1"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, 0.1, return_attn_probs=True)
    with pytest.raises(InputError, match=r"dropout_p must be at least 0 and less than 1, got 1.0"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=1.0)
    table = torch.zeros(1, 9, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="dropout_p must be 0 with a page_table"):
        flash_attn.flash_attn_varlen_func(q[0], k, v, ends, ends, 9, 9, dropout_p=0.1, block_table=table)
    with pytest.raises(InputError, match=r"k must have 4 dimensions \[pages, page_size, HK, D\] with a page_table"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, block_table=table)
    with pytest.raises(InputError, match=r"qkv must have shape \[B, S, 3, H, D\], got \[2, 9, 2, 4, 8\]"):
        flash_attn.flash_attn_qkvpacked_func(qkv[:, :, :2])
    with pytest.raises(InputError, match=r"kv must have 4 dimensions \[T, 2, HK, D\], got shape \[2, 9, 3, 4, 8\]"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv, ends, ends, 9, 9)
    with pytest.raises(InputError, match=r"q must have 4 dimensions \[B, S, H, D\], got shape \[9, 4, 8\]"):
        flash_attn.flash_attn_func(q[0], k, v)
    with pytest.raises(InputError, match=r"k must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_func(q, None, v)  # type: ignore[arg-type]


def test_whole_graphs_compile(qkv):
    """Each function is one node of a graph, with its outputs as they are."""
    ends, lengths = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    caches = torch.randn(2, 2, 12, 4, 8)
    table = torch.tensor([[1], [0]], dtype=torch.int32)  # of pages of 9

    def run(qkv: torch.Tensor, caches: torch.Tensor) -> tuple[Any, ...]:
        q, k, v = qkv.unbind(2)
        step = (q[:, :1], caches[0], caches[1], k[:, :1], v[:, :1])
        return (
            flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
            flash_attn.flash_attn_qkvpacked_func(qkv, window_size=(3, 0)),
            flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], softcap=2.0),
            flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 5, 5, return_attn_probs=True),
            flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], ends, 5, causal=True),
            flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], ends, ends, 5, 5),
            flash_attn.flash_attn_varlen_func(q[0], k, v, ends, ends, 5, 5, causal=True, block_table=table),
            flash_attn.flash_attn_with_kvcache(*step, cache_seqlens=lengths, causal=True, return_softmax_lse=True),
            flash_attn.flash_attn_with_kvcache(*step, cache_seqlens=7),
        )

    expected_caches, found_caches = caches.clone(), caches.clone()
    expected = run(qkv, expected_caches)
    found = torch.compile(run, fullgraph=True, backend="eager")(qkv, found_caches)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found_caches, expected_caches)
