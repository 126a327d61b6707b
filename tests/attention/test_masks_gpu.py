"""Block masks on a real GPU: against fp64, against FlexAttention, in graphs and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashmoe_science import BlockMask, explain, explain_gradients, flash_attention
from flashmoe_science.operators.attention import OPERATOR

from .cases import HEAD_DIMS
from .checks import bits_of, poison_allocator, synchronisation_is_an_error
from .mask_cases import CASES, HOPPER_CASES, MaskCase, check_mask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_problems(case, dtype):
    check_mask(case if case.dtype == "fp32" else dataclasses.replace(case, dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype):
    check_mask(MaskCase(2, 4, 2, 300, 413, head_dim, head_dim, dtype, "random", "head-dims", masks=(1, 2)), "cuda")


@pytest.mark.parametrize("kind", ["documents", "prefix", "blocks-causal", "torch"])
def test_long_problems(kind):
    """Many row tiles, and so the largest tile of the table."""
    case = MaskCase(2, 16, 4, 2000, 2000, 128, 128, "bf16", kind, "long", masks=(2, 1))
    check_mask(case, "cuda")


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hoppers_kernel(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for sm_90")
    poison_allocator(1 << 24)
    check_mask(case, "cuda", kernel="forward_masked_gluon_sm90")


def test_the_kernels_of_masks_serve_it():
    q, k, v = torch.randn(3, 1, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    mask = BlockMask.documents(torch.arange(300, device="cuda") // 100)
    assert explain(q, k, v, mask=mask).kernel == "forward_masked_triton"
    assert explain_gradients(q, k, v, mask=mask).kernel == "backward_masked_triton"


def documents_of_flex(batch: int, seqlen: int) -> tuple[torch.Tensor, Any]:
    ids = (torch.arange(seqlen, device="cuda") // 333).expand(batch, -1).contiguous()

    def shown(b: Any, _h: Any, row: Any, key: Any) -> Any:
        return (ids[b, row] == ids[b, key]) & (key <= row)

    return ids, create_block_mask(shown, batch, None, seqlen, seqlen, device="cuda")


@pytest.mark.parametrize("heads_kv", [2, 8])
def test_flex_attention_agrees(heads_kv):
    """The same mask object, compiled FlexAttention: output, LSE and gradients, each as near to fp64 as the other."""
    ids, mask = documents_of_flex(2, 1000)
    q = torch.randn(2, 8, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, heads_kv, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    theirs, their_lse = compiled(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    for given in (mask, BlockMask.documents(ids)):
        o, lse = flash_attention(q, k, v, mask=given, return_lse=True)
        torch.testing.assert_close(lse, their_lse, rtol=1e-3, atol=1e-3)
        do = torch.randn_like(o)
        ours = (o, *torch.autograd.grad(o, (q, k, v), do))
        flex = (theirs, *torch.autograd.grad(theirs, (q, k, v), do, retain_graph=True))
        exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expanded = [x.repeat_interleave(8 // x.shape[1], 1) for x in exact_inputs]
        dense = BlockMask.from_torch(mask).to_dense()
        exact_q, exact_k, exact_v = expanded
        exact_o = torch.nn.functional.scaled_dot_product_attention(exact_q, exact_k, exact_v, attn_mask=dense)
        exact = (exact_o, *torch.autograd.grad(exact_o, exact_inputs, do.double()))
        for one, other, true in zip(ours, flex, exact, strict=True):
            error = (one.double() - true).abs().max().item()
            assert error <= OPERATOR.error_budget(true, other), "further from fp64 than twice FlexAttention"


def test_calls_wait_for_nothing_and_graphs_hold_them():
    """A graph replays with other values in the same mask: lists are read by the kernels alone."""
    q = torch.randn(2, 4, 500, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(2, 2, 500, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "kv")
    mask = BlockMask.documents(torch.arange(500, device="cuda") // 128)

    def step() -> tuple[torch.Tensor, ...]:
        o = flash_attention(q, k, v, mask=mask)
        return o, *torch.autograd.grad(o, (q, k, v), o.detach())

    stream = torch.cuda.Stream()  # what warms a graph up runs beside the default stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.detach() for x in step()]
        with synchronisation_is_an_error():
            step()
            BlockMask.blocks(torch.zeros(1, 1, 4, 1, dtype=torch.int32, device="cuda"), 128, 500, 500)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))


def test_repeats_have_equal_bits():
    _, mask = documents_of_flex(2, 1500)
    q, k, v = (torch.randn(2, 8, 1500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")

    def step() -> tuple[torch.Tensor, ...]:
        o = flash_attention(q, k, v, mask=mask)
        return o, *torch.autograd.grad(o, (q, k, v), o.detach())

    first = step()
    for _ in range(100):
        for one, other in zip(step(), first, strict=True):
            assert torch.equal(bits_of(one), bits_of(other))


def test_compiled_with_inductor():
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv")
    mask = BlockMask.prefix(torch.tensor([70], device="cuda"), 300)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention(2 * q, k, v, mask=mask)

    compiled: Any = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    found, expected = (torch.autograd.grad(one(q, k, v).sum(), (q, k, v)) for one in (compiled, call))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
