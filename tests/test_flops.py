"""torch's FLOP counter counts our operators as it counts its own attention, and its own products."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from flashmoe_science import flash_attention, flash_attention_varlen, flash_attention_with_kv_cache, fused_moe
from flashmoe_science.flops import _FORMULAS
from flashmoe_science.moe.backward.api import fused_moe_backward

from .test_traced_calls import CALLS

B, H, HK, QUERIES, KEYS, D, DV = 2, 4, 2, 5, 7, 16, 8


def counted(call: Any, *tensors: Tensor, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        out = call(*tensors)
    if backward:
        with FlopCounterMode(display=False) as counter:
            out.float().sum().backward()
    total: int = counter.get_total_flops()
    return total


def heads(*, grad: bool = False) -> list[Tensor]:
    shapes = (B, H, QUERIES, D), (B, HK, KEYS, D), (B, HK, KEYS, DV)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 0)}, {"return_lse": True}], ids=str)
def test_attention_counts_as_torchs_own(options):
    tensors = heads()
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), *tensors)
    assert counted(lambda *x: flash_attention(*x, **options), *tensors) == expected > 0


def test_gradients_count_as_those_of_torchs_kernels():
    q, k, v = heads(grad=True)
    expected = sdpa_backward_flop_count((B, H, QUERIES, DV), q.shape, (B, H, KEYS, D), (B, H, KEYS, DV))
    assert counted(flash_attention, q, k, v, backward=True) == expected > 0


@pytest.mark.parametrize("used", [None, (2, 3)])
def test_packed_sequences_count_by_their_lengths(used):
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    tensors = [torch.randn(9, heads, D, requires_grad=True) for heads in (H, HK, HK)]
    lengths = (4, 5) if used is None else used
    given: dict[str, Any] = {} if used is None else {"seqused_k": torch.tensor(used, dtype=torch.int32)}
    shapes = [((1, H, n, D), (1, H, m, D), (1, H, m, D)) for n, m in zip((4, 5), lengths, strict=True)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attention_varlen(q, k, v, starts, starts, 6, 6, causal=True, **given)

    assert counted(call, *tensors) == sum(sdpa_flop_count(*shape) for shape in shapes)
    expected = sum(sdpa_backward_flop_count(shape[0], *shape) for shape in shapes)
    assert counted(call, *tensors, backward=True) == expected


def test_lengths_without_values_are_the_longest():
    with FakeTensorMode():
        starts = torch.zeros(3, dtype=torch.int32)
        tensors = [torch.randn(9, H, D) for _ in "qkv"]
        found = counted(lambda q, k, v: flash_attention_varlen(q, k, v, starts, starts, 6, 6), *tensors)
    assert found == 2 * sdpa_flop_count(*[(1, H, 6, D)] * 3)


@pytest.mark.parametrize(("lengths", "new", "keys"), [(None, 0, 2 * 9), ((3, 5), 0, 8), ((3, 5), 2, 12)])
def test_a_cache_counts_the_keys_that_it_has(lengths, new, keys):
    q, cache = torch.randn(2, H, 1, D), torch.randn(2, 9, HK, D)
    given: dict[str, Any] = {} if lengths is None else {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    added = [torch.randn(2, HK, new, D)] * 2 if new else []
    found = counted(lambda q: flash_attention_with_kv_cache(q, cache, cache.clone(), *added, **given), q)
    assert found == sdpa_flop_count((1, H, 1, D), (1, H, keys, D), (1, H, keys, D))


def test_pages_count_by_their_lengths_or_all():
    q, cache = torch.randn(1, H, 1, D), torch.randn(4, 3, HK, D)
    given: dict[str, Any] = {"page_table": torch.tensor([[2, 0]], dtype=torch.int32)}
    for lengths, keys in ((None, 6), (torch.tensor([4], dtype=torch.int32), 4)):
        found = counted(
            lambda q, n=lengths: flash_attention_with_kv_cache(q, cache, cache, cache_seqlens=n, **given), q
        )
        assert found == sdpa_flop_count((1, H, 1, D), (1, H, keys, D), (1, H, keys, D))


def experts() -> dict[str, Any]:
    weights = {"w_gate_up": (3, 24, 8), "w_down": (3, 8, 12), "shared_gate_up": (2, 20, 8), "shared_down": (2, 8, 10)}
    made = {"x": torch.randn(6, 8), **{name: torch.randn(shape) for name, shape in weights.items()}}
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 3], [-1, 0]])  # two pairs are of no expert here
    return {**made, "topk_weights": torch.rand(6, 2), "topk_ids": ids}


def served_by_loops(x: Tensor, **given: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(3):
        token, place = (given["topk_ids"] == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ given["w_gate_up"][expert].T).chunk(2, -1)
        weights = given["topk_weights"][token, place, None]
        out = out.index_add(0, token, weights * ((F.silu(gate) * up) @ given["w_down"][expert].T))
    for w_up, w_down in zip(given["shared_gate_up"], given["shared_down"], strict=True):
        gate, up = (x @ w_up.T).chunk(2, -1)
        out = out + (F.silu(gate) * up) @ w_down.T
    return out


@pytest.mark.parametrize("trained", [("x",), ("w_down", "shared_down"), ("w_gate_up", "shared_gate_up"), None], ids=str)
def test_experts_count_as_their_products_in_torch(trained):
    given = experts()
    assert counted(lambda: fused_moe(**given)) == counted(lambda: served_by_loops(**given)) > 0
    for name in trained or ("x", "w_gate_up", "w_down", "shared_gate_up", "shared_down"):
        given[name].requires_grad_()
    assert counted(lambda: fused_moe(**given)) == counted(lambda: served_by_loops(**given))
    found = counted(lambda: fused_moe(**given), backward=True)
    assert found == counted(lambda: served_by_loops(**given), backward=True) > 0


def test_gradients_without_autograd_count_as_with_it():
    given = {name: tensor for name, tensor in experts().items() if not name.startswith("shared")}
    expected = 2 * counted(lambda: fused_moe(**given))
    product = torch.zeros(12, 24)
    assert counted(lambda: fused_moe_backward(torch.randn(6, 8), product, **given)) == expected


def test_every_operator_that_multiplies_has_a_formula():
    from flashmoe_science.moe.routing.api import route  # noqa: F401 - defines its operators

    names = [operator.name.partition("::") for operator in torch._C._jit_get_all_schemas()]
    ours = {name for library, _, name in names if library == "flashmoe_science"}
    assert ours - set(_FORMULAS) == {"moe_route", "moe_route_backward"}
    for name in ("plain", "packed", "paged", "cache", "append", "experts"):
        call, make, _ = CALLS[name]
        assert counted(lambda *x, call=call: call(*x), *make("cpu")) > 0


def test_a_rank_has_its_share_of_the_pairs():
    given = {"q": torch.zeros(1, 4, 8, 16), "k": torch.zeros(1, 2, 8, 16), "v": torch.zeros(1, 2, 8, 16), "ranks": 2}
    pairs = 4 * 16 * 16 // 2  # of four heads, 16 tokens and two ranks
    assert _FORMULAS["attention_over_ranks"]({**given, "plan": -1}) == 2 * pairs * 32
    assert _FORMULAS["attention_over_ranks_backward"]({**given, "plan": -1}) == 2 * pairs * 80
    documents = SimpleNamespace(starts=(0, 6, 16))
    with mock.patch("flashmoe_science.distributed.named.named", return_value=documents):
        assert _FORMULAS["attention_over_ranks"]({**given, "plan": 0}) == 2 * (4 * (36 + 100) // 2) * 32


COUNTER = "from torch.utils.flop_counter import FlopCounterMode\n"
ORDERS = {
    "the counter first": COUNTER + "from flashmoe_science import flash_attention",
    "the counter last": "from flashmoe_science import flash_attention\n" + COUNTER,
    "a module of ours alone": COUNTER + "from flashmoe_science.attention.api import flash_attention",
}
COUNT = """
import sys, torch
q = torch.zeros(1, 2, 3, 8)
with FlopCounterMode(display=False) as counter:
    flash_attention(q, q, q)
print(counter.get_total_flops())
"""


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_imports_does_not_matter(order):
    done = subprocess.run(
        [sys.executable, "-c", ORDERS[order] + COUNT], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert int(done.stdout) == 2 * 2 * 3 * 3 * 16
