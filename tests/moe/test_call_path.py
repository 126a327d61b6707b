"""The way of the tokens through a call of the experts, and of their gradients, as on an H200 up to the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import fused_moe
from flashmoe_science.moe.backward import autograd as gradients
from flashmoe_science.moe.backward.api import fused_moe_backward
from tests.call_path import CallPath, call_path

MOST_STAYS = 20  # of a first call
MOST_CALLS = 60  # Python functions of the package that a later call runs
HIDDEN, INTER, EXPERTS, TOP_K = 256, 512, 8, 2


def make(tokens: int) -> dict[str, Any]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    return {
        "x": empty(tokens, HIDDEN), "w_gate_up": empty(EXPERTS, 2 * INTER, HIDDEN),
        "w_down": empty(EXPERTS, HIDDEN, INTER), "topk_weights": empty(tokens, TOP_K, dtype=torch.float32),
        "topk_ids": empty(tokens, TOP_K, dtype=torch.int32),
    }  # fmt: skip


def check(call: Callable[[], Any], x: torch.Tensor) -> CallPath:
    """Make a call twice, and return the way of ``x`` through the first."""
    first = call_path(call, x)
    again = call_path(call, x)
    assert first.stays <= MOST_STAYS, first.files
    assert again.stays <= first.stays
    assert again.calls <= MOST_CALLS
    return first


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("tokens", [1, 64, 4096], ids=["gemv", "few", "hopper"])
def test_a_call_goes_top_to_bottom(tokens):
    tensors = make(tokens)
    path = check(lambda: fused_moe(**tensors), tensors["x"])
    assert path.entries("moe/calls.py") == 1, path.files
    assert path.entries("moe/api.py") <= 4, path.files


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gradients_go_top_to_bottom(monkeypatch):
    monkeypatch.setattr(gradients, "_is_reference", lambda _device, _kernel: False)
    tensors, do, product = make(512), torch.empty(512, HIDDEN).bfloat16(), torch.empty(1024, 2 * INTER).bfloat16()
    check(lambda: fused_moe_backward(do, product, **tensors), tensors["x"])
    tensors["x"].requires_grad_()
    outs: list[torch.Tensor] = []
    for path in (
        call_path(lambda: outs.append(fused_moe(**tensors)), tensors["x"]),
        call_path(lambda: outs[0].backward(do), tensors["x"]),
    ):
        assert path.stays <= MOST_STAYS, path.files
