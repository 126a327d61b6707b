"""What a caller has set for its own code changes no result: autocast, default dtype and device, modes of autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashmoe_science import flash_attention_with_kv_cache

from .test_traced_calls import CALLS, RECORDED, check_equal, loss_of


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Under each the dtype that autocast would change; without autocast, either.
DTYPES = {"autocast to bf16": torch.float16, "autocast to fp16": torch.bfloat16, "default dtype fp16": torch.bfloat16}
STATES: dict[str, Callable[[], Any]] = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype fp16": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
}


def in_one_dtype(tensors: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """In 16 bits: autocast casts what is of fp32. Bytes stay."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", CALLS)
def test_a_state_of_the_caller_changes_nothing(name, state):
    call, make, _ = CALLS[name]
    # The call of experts backward makes a product of fp16.
    dtype = torch.float16 if name == "experts backward" else DTYPES.get(state, torch.float16)
    tensors = in_one_dtype(make("cpu"), dtype)
    expected = call(*tensors)
    with STATES[state]():
        found = call(*tensors)
    check_equal(found, expected)


@pytest.mark.parametrize("state", [state for state in STATES if state not in ("no_grad", "inference mode")])
@pytest.mark.parametrize("name", RECORDED)
def test_a_state_of_the_caller_changes_no_gradient(name, state):
    call, make, _ = CALLS[name]
    dtype = DTYPES.get(state, torch.float16)
    tensors = [tensor.requires_grad_() for tensor in in_one_dtype(make("cpu"), dtype)]
    expected = torch.autograd.grad(loss_of(call, *tensors), tensors)
    with STATES[state]():
        found = torch.autograd.grad(loss_of(call, *tensors), tensors)
    check_equal(found, expected)


def test_caches_of_inference_mode_are_appended_to_outside_of_it():
    with torch.inference_mode():
        caches = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4)
    mixed = torch.zeros(1, 8, 2, 4), caches[1].clone()
    new = torch.ones(1, 2, 1, 4)
    for k_cache, v_cache in (caches, mixed):
        flash_attention_with_kv_cache(torch.ones(1, 2, 1, 4), k_cache, v_cache, new, new, cache_seqlens=3)
        assert k_cache.sum() == v_cache.sum() == new.sum()
