"""Under ``context_parallel`` of torch.distributed our calls are refused, as they would attend within one shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from flashmoe_science import UnsupportedError, flash_attention, fused_moe
from flashmoe_science.integrations.transformers import attend as attend_of_transformers

from ..test_traced_calls import CALLS

ATTENTION = [name for name in CALLS if "expert" not in name and name != "route"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def parallel(mesh: Any) -> Any:
    buffer = torch.zeros(1, 2, 8, 4)
    return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2])


@pytest.mark.parametrize("name", ATTENTION)
def test_calls_are_refused_in_the_context_and_served_behind_it(name, mesh):
    call, make, _ = CALLS[name]
    tensors = make("cpu")
    call(*tensors)
    with parallel(mesh), pytest.raises(UnsupportedError, match="must not be called under context_parallel"):
        call(*tensors)
    call(*tensors)


def test_recorded_calls_compiled_calls_and_drop_ins_are_refused(mesh):
    q, k, v = CALLS["plain"][1]("cpu")
    compiled = torch.compile(functools.partial(flash_attention, causal=True), backend="eager", fullgraph=True)
    compiled(q, k, v)
    refused = pytest.raises(UnsupportedError, match="must not be called under context_parallel")
    with parallel(mesh):
        with refused:
            flash_attention(q.clone().requires_grad_(), k, v)
        with refused:
            compiled(q, k, v)
        with refused:
            attend_of_transformers(torch.nn.Module(), q, k, v, None)


def test_experts_are_served_in_the_context(mesh):
    call, make, _ = CALLS["experts"]
    assert call.__name__ == "routed"
    assert fused_moe is not None
    tensors = make("cpu")
    expected = call(*tensors)
    with parallel(mesh):
        assert torch.equal(call(*tensors), expected)


def test_another_replacement_of_the_function_is_none_of_our_business(monkeypatch):
    q, k, v = CALLS["plain"][1]("cpu")
    expected = flash_attention(q, k, v)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_: None)
    assert torch.equal(flash_attention(q, k, v), expected)
