"""Graphs of calls with real tensors hold operators, not results: make_fx, jit.trace, modes and transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)


def batch() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attention(q, k, v)


def with_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attention(q, k, v, window=(3, 0))


def with_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_attention_with_kv_cache(q, k.transpose(1, 2), v.transpose(1, 2))


FUNCTIONS = {
    "attention_forward": plain, "attention_features": with_window, "attention_with_kv_cache": with_cache,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_of_make_fx_hold_the_operator(name):
    function = FUNCTIONS[name]
    function(*batch())  # the fast path has it
    graph = make_fx(function)(*batch())
    assert any(name in str(node.target) for node in graph.graph.nodes)
    other = batch()
    assert torch.equal(graph(*other), function(*other))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_of_jit_trace_hold_the_operator(name):
    function = FUNCTIONS[name]
    function(*batch())
    traced = torch.jit.trace(function, batch(), check_trace=False)
    assert f"flashmoe_science::{name}" in str(traced.graph)
    other = batch()
    assert torch.equal(traced(*other), function(*other))


class Seen(TorchDispatchMode):
    """Writes down which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_modes_see_the_operator(name):
    tensors = batch()
    expected = FUNCTIONS[name](*tensors)
    with Seen() as outer, Seen() as inner:
        found = FUNCTIONS[name](*tensors)
    assert torch.equal(found, expected)
    assert f"flashmoe_science.{name}.default" in inner.names
    assert f"flashmoe_science.{name}.default" in outer.names


def test_a_recorded_call_under_a_mode_has_gradients():
    q, k, v = batch()
    q.requires_grad_()
    (expected,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q)
    with Seen() as seen:
        (found,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q)
    assert torch.equal(found, expected)
    assert "flashmoe_science.attention_backward.default" in seen.names


def test_vmap_is_refused_by_name():
    q, k, v = batch()
    flash_attention(q, k, v)
    with pytest.raises(UnsupportedError, match=r"torch\.vmap and other transforms of torch\.func"):
        torch.vmap(lambda q: flash_attention(q, k, v))(torch.stack([q, q]))


def test_a_bias_that_is_more_than_its_elements_is_refused():
    """Its memory was never written: what it means is in its class."""
    q, k, v = batch()
    bias = causal_upper_left(5, 7)
    for call in (flash_attention, explain):
        with pytest.raises(InputError, match=r"bias must be a torch\.Tensor whose class has no __torch_function__"):
            call(q, k, v, bias=bias)
    with pytest.raises(InputError, match=r"bias must be a torch\.Tensor whose class has no __torch_function__"):
        flash_attention_varlen(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32), 5, 7, bias=bias,
        )  # fmt: skip
    with pytest.raises(InputError, match=r"bias must be a torch\.Tensor whose class has no __torch_function__"):
        flash_attention_with_kv_cache(q, k.transpose(1, 2), v.transpose(1, 2), bias=bias)
