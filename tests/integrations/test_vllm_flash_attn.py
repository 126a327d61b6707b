"""Code written for vLLM's flash-attention, and for FlashAttention-3: names, defaults, and what they return."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)
from flashmoe_science.attention import reference
from flashmoe_science.integrations import flash_attn_3, vllm_flash_attn
from flashmoe_science.integrations.vllm_flash_attn import flash_attn_varlen_func

FP8 = torch.float8_e4m3fn
_OPTIONS = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False"
)
# (module, function): names, order and defaults.
SIGNATURES: dict[tuple[Any, str], str] = {
    # vllm_flash_attn/flash_attn_interface.py of vllm-project/flash-attention at 617264c1c795.
    (vllm_flash_attn, "flash_attn_varlen_func"): (
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
        "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, "
        "s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None"
    ),
    # hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 0251105a2fb1.
    (flash_attn_3, "flash_attn_func"): f"q, k, v, {_OPTIONS}",
    (flash_attn_3, "flash_attn_varlen_func"): (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, {_OPTIONS}"
    ),
    (flash_attn_3, "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    (flash_attn_3, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda part: getattr(part, "__name__", part))
def test_signatures(module, name):
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    found = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
    assert found == SIGNATURES[module, name]
    assert name in module.__all__


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mixed(**changes: Any) -> dict[str, Any]:
    """Return a call of vLLM's: a prompt, a single token, a sequence without queries, a chunk."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 40, 8, 2, 16, generator=generator).unbind()
    table = torch.randperm(40, generator=generator)[:20].view(4, 5).int()
    table[2] = -1
    call = {
        "q": torch.randn(12, 4, 16, generator=generator), "k": k, "v": v, "max_seqlen_q": 7,
        "cu_seqlens_q": ints(0, 4, 5, 5, 12), "max_seqlen_k": 30, "seqused_k": ints(4, 21, 0, 30),
        "block_table": table, "causal": True,
    }  # fmt: skip
    return {**call, **changes}


def expected_of(call: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = call["seqused_k"]
    return reference.attention_varlen(
        call["q"], call["k"], call["v"], cu_seqlens_q=call["cu_seqlens_q"],
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), page_table=call["block_table"],
        causal=call["causal"], **options,
    )  # fmt: skip


def test_a_step_of_vllm():
    call = mixed(
        softmax_scale=0.3, window_size=[9, -1], softcap=2.0, s_aux=torch.randn(4), fa_version=3, num_splits=0,
        scheduler_metadata=ints(1, 2), q_descale=torch.ones(4, 2), k_descale=torch.ones(4, 2),
        v_descale=torch.ones(4, 2),
    )  # fmt: skip
    out = torch.full((12, 4, 16), torch.nan)
    given = {name: value for name, value in call.items() if name != "out"}
    found, lse = flash_attn_varlen_func(**given, out=out, return_softmax_lse=True)
    expected, expected_lse = expected_of(call, softmax_scale=0.3, window=(9, -1), softcap=2.0, sinks=call["s_aux"])
    assert found is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_one_split_over_pages_is_batch_invariant(monkeypatch):
    """By ``num_splits=1`` vLLM asks for the same bits in every batch; a larger number is the room that it has."""
    calls: list[dict[str, Any]] = []

    def attend(*given: Any, **options: Any) -> Any:
        calls.append(options)
        return flash_attention_varlen(*given, **options)

    monkeypatch.setattr(vllm_flash_attn, "flash_attention_varlen", attend)
    monkeypatch.setattr(flash_attn_3, "flash_attention_varlen", attend)
    call = mixed()
    call |= {name: call[name].bfloat16() for name in ("q", "k", "v")}
    expected = flash_attn_varlen_func(**call)
    numbers: tuple[Any, ...] = (1, torch.tensor(1), 32)
    for splits in numbers:
        assert torch.equal(flash_attn_varlen_func(**call, num_splits=splits), expected)
    packed = {"cu_seqlens_q": call["cu_seqlens_q"], "max_seqlen_q": 7, "causal": True}
    given = {"cache_seqlens": call["seqused_k"], "page_table": call["block_table"], **packed}
    for splits in (0, 1, 3):
        found = flash_attn_3.flash_attn_with_kvcache(call["q"], call["k"], call["v"], **given, num_splits=splits)
        assert torch.equal(found, expected)
    asked = [(options.get("num_splits", 0), options.get("batch_invariant", False)) for options in calls]
    assert asked == [(0, False), (1, True), (1, True), (0, False), (0, False), (1, True), (3, True)]


def test_bits_that_no_kernel_promises_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="num_splits and batch_invariant need mixed_triton: it serves fp16"):
        flash_attn_varlen_func(**mixed(num_splits=1))
    q, starts = torch.randn(8, 4, 16), ints(0, 3, 8)  # without pages keys are never split
    flash_attn_varlen_func(q, q, q, 5, starts, 5, starts, num_splits=1)


def test_out_may_be_a_view_or_the_queries():
    call = mixed()
    expected, _ = expected_of(call)
    wide = torch.full((12, 4, 32), torch.nan)
    assert flash_attn_varlen_func(**call, out=wide[..., 16:]).data_ptr() == wide[..., 16:].data_ptr()
    torch.testing.assert_close(wide[..., 16:], expected)
    assert wide[..., :16].isnan().all()
    flash_attn_varlen_func(**call, out=call["q"])
    torch.testing.assert_close(call["q"], expected)


def test_an_expanded_out_is_refused_by_name():
    q, k, starts = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(InputError, match=r"out must have memory for every element, got strides \(0, 0, 0\)"):
        flash_attn_varlen_func(q, k, k, 3, starts, 3, starts, out=torch.zeros(1, 1, 1).expand(3, 2, 8))


def test_out_with_gradients_is_refused_by_name():
    q, starts = torch.randn(8, 4, 16, requires_grad=True), ints(0, 3, 8)
    with pytest.raises(UnsupportedError, match="out has no gradients, and they are required of an input"):
        flash_attn_varlen_func(q, q, q, 5, starts, 5, starts, out=torch.empty(8, 4, 16))
    with torch.no_grad():
        flash_attn_varlen_func(q, q, q, 5, starts, 5, starts, out=torch.empty(8, 4, 16), num_splits=4, fa_version=3)


def test_packed_keys_without_pages():
    q, k, v = torch.randn(9, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    starts_q, starts_k = ints(0, 4, 9), ints(0, 5, 11)
    slopes = torch.rand(4)
    found = flash_attn_varlen_func(q, k, v, 5, starts_q, 6, starts_k, causal=True, alibi_slopes=slopes)
    expected = flash_attention_varlen(q, k, v, starts_q, starts_k, 5, 6, causal=True, alibi=slopes)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_v": torch.ones(1)}, UnsupportedError, "q_v is not served, got a tensor"),
        ({"cp_world_size": 2}, UnsupportedError, "cp_world_size is not served, got 2"),
        ({"cp_rank": 1}, UnsupportedError, "cp_rank is not served, got 1"),
        ({"cp_tot_seqused_k": ints(1)}, UnsupportedError, "cp_tot_seqused_k is not served, got a tensor"),
        ({"return_attn_probs": True}, UnsupportedError, "return_attn_probs is not served, got True"),
        ({"num_splits": -1}, InputError, "num_splits must be an integer from 0 to"),
        ({"fa_version": 5}, InputError, "fa_version must be one of 2, 3, 4, got 5"),
        ({"k_descale": 2.0}, InputError, r"k_descale must be None or a float32 tensor \[B, HK\], got 2.0"),
        ({"v_descale": torch.ones(4)}, InputError, r"v_descale must be None or a .* got torch.float32 \[4\]"),
        ({"q_descale": torch.ones(4, 2).half()}, InputError, r"q_descale must be None or a .* got torch.float16"),
        ({"k": torch.ones(40, 8, 2, 16).to(FP8)}, UnsupportedError, "k in fp8 is not served, got torch.float8_e4m3fn"),
        ({"window_size": [1]}, InputError, "window_size must be two integers"),
        ({"cu_seqlens_k": ints(0, 4, 25, 25, 55)}, InputError, "seqused_k must be None with cu_seqlens_k, got both"),
        ({"seqused_k": None}, InputError, "seqused_k must be given with a block_table, got None"),
        ({"block_table": None}, UnsupportedError, "seqused_k needs a block_table, got None"),
        ({"block_table": None, "seqused_k": None}, InputError, "cu_seqlens_k or seqused_k must be given, got None"),
        ({"s_aux": torch.ones(3)}, InputError, r"s_aux must have shape \[H\] = \[4\], got \[3\]"),
        ({"block_table": torch.ones(3, 5).int()}, InputError, "block_table must have shape"),
        ({"out": torch.ones(12, 4, 8)}, InputError, r"out must have shape, dtype and device of the output"),
        ({"out": 3}, InputError, "out must be a torch.Tensor, got int"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(changes, error, message):
    flash_attn_varlen_func(**mixed())
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**mixed(**changes))


def test_dense_and_packed_functions_of_fa3():
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 8)
    expected, expected_lse = flash_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, window=(3, -1), softcap=2.0, return_lse=True
    )
    o, lse = flash_attn_3.flash_attn_func(
        q, k, v, causal=True, window_size=(3, -1), softcap=2.0, num_splits=3, pack_gqa=True, deterministic=True,
        q_descale=torch.ones(2, 2), return_attn_probs=True,
    )  # fmt: skip
    torch.testing.assert_close(o, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    starts_q, starts_k = ints(0, 5, 10), ints(0, 7, 14)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    packed = flash_attn_3.flash_attn_varlen_func(
        flat_q, flat_k, flat_v, starts_q, starts_k, 5, 7, seqused_k=ints(7, 7), causal=True, window_size=(3, -1),
        softcap=2.0,
    )  # fmt: skip
    torch.testing.assert_close(packed, o.flatten(0, 1))
    leaf = q.clone().requires_grad_()
    flash_attn_3.flash_attn_func(leaf, k, v).sum().backward()
    assert leaf.grad is not None


def cached(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, heads, 16, generator=generator) for heads in (4, 2, 2))
    caches = torch.randn(2, 10, 4, 2, 16, generator=generator)
    call = {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v, "cache_seqlens": ints(3, 9),
        "page_table": torch.randperm(10, generator=generator)[:8].view(2, 4).int(), "causal": True,
    }  # fmt: skip
    return {**call, **changes}


def test_a_cache_of_fa3():
    angles = torch.randn(16, 4)
    call = cached(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
    copies = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    expected, expected_lse = flash_attention_with_kv_cache(
        call["q"].transpose(1, 2), copies["k_cache"], copies["v_cache"], call["k"].transpose(1, 2),
        call["v"].transpose(1, 2), cache_seqlens=call["cache_seqlens"], page_table=call["page_table"], causal=True,
        rotary_cos=call["rotary_cos"], rotary_sin=call["rotary_sin"], return_lse=True,
    )  # fmt: skip
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        **call, scheduler_metadata=ints(1), num_splits=2, pack_gqa=False, return_softmax_lse=True
    )
    torch.testing.assert_close(o, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    assert all(torch.equal(call[name], copy) for name, copy in copies.items())


def scaled(**changes: Any) -> dict[str, Any]:
    """Return a call over fp8 caches of two sequences; what is appended is divided by the scales."""
    call = cached(**changes)
    return call | {name: call[name].to(FP8) for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize("append", [True, False])
def test_fp8_caches_of_fa3_have_a_scale_for_each_head(append):
    k_scale, v_scale = torch.rand(2, 2).add(0.5).unbind()
    call = scaled() if append else scaled(k=None, v=None)
    copies = [call[name].clone() for name in ("k_cache", "v_cache")]
    new = [call[name].transpose(1, 2) for name in "kv"] if append else []
    expected = flash_attention_with_kv_cache(
        call["q"].transpose(1, 2), *copies, *new, cache_seqlens=call["cache_seqlens"], page_table=call["page_table"],
        causal=True, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    descales: dict[str, Any] = {"k_descale": k_scale.expand(2, 2), "v_descale": v_scale.expand(2, 2)}
    found = flash_attn_3.flash_attn_with_kvcache(**call, **descales)
    assert torch.equal(found, expected.transpose(1, 2))
    assert torch.equal(call["k_cache"].float(), copies[0].float())
    with pytest.raises(UnsupportedError, match="q_descale is not served, got a tensor"):
        flash_attn_3.flash_attn_with_kvcache(**call, q_descale=torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="k_descale of each sequence is served over contiguous caches alone"):
        flash_attn_3.flash_attn_with_kvcache(**call, k_descale=torch.ones(2, 2))
    with pytest.raises(InputError, match=r"v_descale must have shape \[B, HK\] = \[2, 2\], got \[2, 3\]"):
        flash_attn_3.flash_attn_with_kvcache(**call, v_descale=torch.ones(2, 3))
    packed = {"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1, "k": None, "v": None, "q": torch.ones(2, 4, 16)}
    with pytest.raises(UnsupportedError, match=r"k_cache in fp8 is not served, got .*\nhint: pass queries"):
        flash_attn_3.flash_attn_with_kvcache(**{**call, **packed})


def test_fp8_caches_of_fa3_have_a_scale_for_each_sequence():
    call = scaled(k=None, v=None, page_table=None, cache_seqlens=ints(3, 4))
    call |= {name: call[name][:2] for name in ("k_cache", "v_cache")}
    descales: dict[str, Any] = {"k_descale": torch.rand(2, 2) + 0.5, "v_descale": torch.rand(2, 2) + 0.5}
    found = flash_attn_3.flash_attn_with_kvcache(**call, **descales)
    exact = {
        name: call[name].float() * descales[f"{name[0]}_descale"][:, None, :, None] for name in ("k_cache", "v_cache")
    }
    torch.testing.assert_close(found, flash_attn_3.flash_attn_with_kvcache(**{**call, **exact}))


def test_packed_queries_over_a_cache_of_fa3():
    call = mixed()
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        call["q"], call["k"], call["v"], cache_seqlens=call["seqused_k"], page_table=call["block_table"],
        cu_seqlens_q=call["cu_seqlens_q"], max_seqlen_q=7, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    expected, expected_lse = expected_of(call)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


PACKED: dict[str, Any] = {
    "q": torch.ones(2, 4, 16), "cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1, "k": None, "v": None,
}  # fmt: skip


def test_packed_queries_that_are_changed_below_are_served():
    assert flash_attn_3.flash_attn_with_kvcache(**cached(**PACKED)).shape == (2, 4, 16)


def test_qv_of_mla():
    """Values that lie right before the keys, as vLLM splits the cache of MLA."""
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(6, 8, 1, 40, generator=generator)
    q, qv = torch.randn(2, 1, 4, 8, generator=generator), torch.randn(2, 1, 4, 32, generator=generator)
    given: dict[str, Any] = {
        "cache_seqlens": ints(5, 20),
        "page_table": torch.randperm(6, generator=generator).view(2, 3).int(),
    }
    found = flash_attn_3.flash_attn_with_kvcache(q, cache[..., 32:], cache[..., :32], qv=qv, **given)
    both = torch.cat([qv, q], -1).transpose(1, 2)
    expected = flash_attention_with_kv_cache(both, cache, cache[..., :32].clone(), **given)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    with pytest.raises(UnsupportedError, match="qv is served where k_cache and v_cache are columns of one tensor"):
        flash_attn_3.flash_attn_with_kvcache(q, cache[..., 32:].clone(), cache[..., :32], qv=qv, **given)
    with pytest.raises(InputError, match=r"qv must have shape .* = \[2, 1, 4, 32\], got \[2, 1, 4, 31\]"):
        flash_attn_3.flash_attn_with_kvcache(q, cache[..., 32:], cache[..., :32], qv=qv[..., 1:], **given)
    with pytest.raises(InputError, match=r"v_cache must be a torch.Tensor of 4 .*, got torch.float32 \[32\]"):
        flash_attn_3.flash_attn_with_kvcache(q, cache[..., 32:], cache[0, 0, 0, :32], qv=qv, **given)


def test_combine_of_fa3():
    parts, lses = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 4, 5).transpose(2, 3)
    out = torch.full((2, 5, 4, 16), torch.nan, dtype=torch.bfloat16)
    o, lse = flash_attn_3.flash_attn_combine(parts, lses, out, torch.bfloat16)
    weights = torch.softmax(lses, 0)
    assert o is out
    torch.testing.assert_close(o, (parts * weights[..., None]).sum(0).bfloat16())
    torch.testing.assert_close(lse, lses.logsumexp(0))
    with pytest.raises(InputError, match="lse_partial must be a float32 tensor of 4 dimensions"):
        flash_attn_3.flash_attn_combine(parts, lses[0])
    with pytest.raises(InputError, match=r"out_partial must be a float32 .*, got torch.float16 \[3, 2, 5, 4, 16\]"):
        flash_attn_3.flash_attn_combine(parts.half(), lses)
    wrong: tuple[Any, ...] = (torch.int32, "bf16")
    for bad in wrong:
        with pytest.raises(InputError, match="out_dtype must be None, float16, bfloat16 or float32"):
            flash_attn_3.flash_attn_combine(parts, lses, out_dtype=bad)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_chunk": 4}, UnsupportedError, "attention_chunk is not served, got 4"),
        ({"sm_margin": 8}, UnsupportedError, "sm_margin is not served, got 8"),
        ({"cu_seqlens_k_new": ints(0, 1)}, UnsupportedError, "cu_seqlens_k_new is not served, got a tensor"),
        ({"rotary_seqlens": ints(0, 1)}, UnsupportedError, "rotary_seqlens is not served, got a tensor"),
        ({"cu_seqlens_q": ints(0, 1, 2)}, UnsupportedError, "k is not served with cu_seqlens_q"),
        (
            {"cu_seqlens_q": ints(0, 1, 2), "k": None, "v": None, "page_table": None}, UnsupportedError,
            "cu_seqlens_q is served with a page_table only",
        ),
        ({**PACKED, "max_seqlen_q": None}, InputError, "max_seqlen_q must be a number with cu_seqlens_q, got None"),
        ({**PACKED, "cache_seqlens": 3}, InputError, "cache_seqlens must be a tensor with cu_seqlens_q, got 3"),
        ({**PACKED, "k_cache": None}, InputError, r"k_cache must be .* \[pages, page_size, HK, D\], got None"),
        ({**PACKED, "k_cache": torch.ones(9)}, InputError, r"k_cache must be .* got torch.float32 \[9\]"),
        ({**PACKED, "page_table": ints(1)[0]}, InputError, r"page_table must be .* \[B, P\], got torch.int32 \[\]"),
        ({"num_splits": -1}, InputError, "num_splits must be an integer"),
        ({"q": torch.ones(2, 2, 4, 16).to(FP8)}, UnsupportedError, "q in fp8 is not served, got torch.float8_e4m3fn"),
        ({"k_cache": torch.ones(4, 2, 16).to(FP8), "k_descale": torch.ones(2, 2)}, InputError, "k_cache must have"),
        ({"k_cache": torch.ones(10, 4, 2, 16).to(FP8)}, InputError, "v_cache must have the dtype of k_cache"),
        ({"k_descale": torch.ones(2)}, InputError, "k_descale must be None or a float32 tensor"),
        ({"q": torch.ones(2, 16)}, InputError, r"q must be .* \[B, S, H, D\], got torch.float32 \[2, 16\]"),
    ],
)  # fmt: skip
def test_what_a_cache_of_fa3_is_not_served_with(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attn_3.flash_attn_with_kvcache(**cached(**changes))


def test_what_fa3_is_not_served_with():
    q = torch.ones(1, 2, 2, 8)
    for options, name in (({"qv": q}, "qv"), ({"attention_chunk": 2}, "attention_chunk"), ({"sm_margin": 1}, "sm_")):
        with pytest.raises(UnsupportedError, match=name):
            flash_attn_3.flash_attn_func(q, q, q, **options)
        with pytest.raises(UnsupportedError, match=name):
            flash_attn_3.flash_attn_varlen_func(q[0], q[0], q[0], ints(0, 2), ints(0, 2), 2, 2, **options)
