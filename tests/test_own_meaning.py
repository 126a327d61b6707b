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


class Scaled(torch.Tensor):
    """A tensor of other elements and a factor, as quantised ones are."""

    parts: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.parts = inner
        return made

    def __tensor_flatten__(self):
        return ["parts"], None

    @staticmethod
    def __tensor_unflatten__(inner, _meta, _size, _stride):
        return Scaled(inner["parts"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        def plain(x):
            return 2 * x.parts if isinstance(x, Scaled) else x

        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].parts)
        return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))


def test_a_cache_whose_class_has_the_memory_is_read_and_not_appended_to():
    q, k, v = batch(1)
    k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    expected = flash_attention_with_kv_cache(q, 2 * k, 2 * v)
    torch.testing.assert_close(flash_attention_with_kv_cache(q, Scaled(k), Scaled(v)), expected)
    new = torch.randn(2, 2, 1, 8)
    with pytest.raises(UnsupportedError, match="k_cache is a Scaled, which has no memory of its own to append to"):
        flash_attention_with_kv_cache(q, Scaled(k), Scaled(v), new, new, cache_seqlens=3)


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_tensors_of_a_mesh_are_refused_by_name(mesh):
    """Before, torch raised errors of its own, or said which operator lacks a strategy."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    from .test_traced_calls import CALLS

    for call, make, _ in CALLS.values():
        tensors = make("cpu")
        for place in range(len(tensors)):
            spread = distribute_tensor(tensors[place], mesh, [Replicate()])
            with pytest.raises(UnsupportedError, match=r"is a DTensor, and nothing says how a call is split"):
                call(*tensors[:place], spread, *tensors[place + 1 :])
