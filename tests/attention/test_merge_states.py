"""Partial results over disjoint keys, merged: the contract, gradients, and the kernel in the interpreter."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
    merge_attention_states,
)
from flashmoe_science.attention.decode.merge import _launch, merge_kernel, run_merge

from .merge_cases import MERGE_CASES, make_parts
from .merge_checks import assert_merged, merged_exactly


@pytest.mark.parametrize("case", MERGE_CASES, ids=str)
def test_cpu_tensors(case):
    outs, lses = make_parts(case)
    o, lse = merge_attention_states(outs, lses)
    assert_merged(case, o, lse, outs, lses)
    assert o.is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.triton
def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "tests.attention.interpreted_merge"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.stdout.strip() == "right", child.stderr


@pytest.mark.triton
@pytest.mark.parametrize(("columns", "arch"), [(64, 80), (128, 100), (576, 90)])
def test_the_kernel_compiles(columns, arch):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.gpu.compile import read_resources

    layout = ((9 * columns, 3 * columns, columns, 1), (9, 3, 1))
    kernel = merge_kernel((2, 3, 3, columns), (layout,) * 3, ("bf16", "bf16", "bf16"), True)
    found = read_resources(kernel.source, arch)
    assert found.spill_bytes == 0
    assert found.shared_memory_bytes <= 4096


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_the_keys_are_merged_into_attention_over_all(packed):
    """The last part is causal, and the first, of keys behind all queries, is not; sinks are in one of them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, n, 16, generator=generator) for heads, n in ((4, 5), (2, 23), (2, 23)))
    sinks = torch.randn(4, generator=generator)
    expected, expected_lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    cuts = ((0, 7), (7, 7), (7, 18), (18, 23))
    outs, lses = [], []
    for first, end in cuts:
        own: dict[str, Any] = {"causal": end == 23, "sinks": sinks if first == 0 and end else None}
        part = q, k[:, :, first:end], v[:, :, first:end]
        if packed:
            flat_q, flat_k, flat_v = (x[0].transpose(0, 1) for x in part)
            ends_q, ends_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, end - first))
            o, lse = flash_attention_varlen(
                flat_q, flat_k, flat_v, ends_q, ends_k, 5, end - first, **own, return_lse=True
            )
        else:
            o, lse = flash_attention(*part, **own, return_lse=True)
        outs.append(o)
        lses.append(lse)
    o, lse = merge_attention_states(outs, lses)
    if packed:
        o, lse = o.transpose(0, 1)[None], lse[None]
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_shared_prefix_is_read_once():
    """As the page about caches has it: 6 sequences on one prefix, of which each has keys of its own behind it."""
    generator = torch.Generator().manual_seed(2)
    pages, table = 40, torch.randperm(40, generator=generator)[:30].view(6, 5).int()
    k_cache, v_cache = torch.randn(2, pages, 4, 2, 16, generator=generator).unbind()
    q = torch.randn(6, 4, 1, 16, generator=generator)
    prefix = torch.tensor([[35, 36, 37]]).int()
    lengths = torch.tensor([0, 3, 4, 11, 20, 1], dtype=torch.int32)
    whole = torch.cat([prefix.expand(6, -1), table], 1)
    expected, expected_lse = flash_attention_with_kv_cache(
        q, k_cache, v_cache, cache_seqlens=lengths + 12, page_table=whole, return_lse=True
    )
    shared = flash_attention_with_kv_cache(
        q.transpose(0, 2), k_cache, v_cache, cache_seqlens=12, page_table=prefix, return_lse=True
    )
    own = flash_attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, return_lse=True)
    o, lse = merge_attention_states((shared[0].transpose(0, 2), own[0]), (shared[1].transpose(0, 2), own[1]))
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_tensor_of_parts_is_taken_like_a_list():
    outs, lses = make_parts(MERGE_CASES[2])
    expected = merge_attention_states(outs, lses)
    found = merge_attention_states(torch.stack(outs), torch.stack(lses))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("unseen", [0.0, 0.5])
def test_gradients_are_those_of_one_softmax_over_the_parts(unseen):
    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(2, 3, 4, 8, generator=generator, dtype=torch.float32).requires_grad_() for _ in range(3)]
    lses = [torch.randn(2, 3, 4, generator=generator) for _ in range(3)]
    for lse in lses[1:]:
        lse[torch.rand(2, 3, 4, generator=generator) < unseen] = -torch.inf
    leaves = [*outs, *(lse.requires_grad_() for lse in lses)]
    do, dlse = torch.randn(2, 3, 4, 8, generator=generator), torch.randn(2, 3, 4, generator=generator)
    o, lse = merge_attention_states(outs, lses)
    found = torch.autograd.grad((o, lse), leaves, (do, dlse))
    expected = torch.autograd.grad(merged_exactly(outs, lses), leaves, (do.double(), dlse.double()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_compiled_call_gives_the_same():
    outs, lses = make_parts(MERGE_CASES[3])
    compiled = torch.compile(merge_attention_states, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(outs, lses), merge_attention_states(outs, lses), strict=True):
        torch.testing.assert_close(found, expected)


def test_one_part_without_keys_gives_0():
    o, lse = torch.full((1, 1, 2, 8), torch.nan), torch.tensor([[[-torch.inf, -torch.inf]]])
    for found in (merge_attention_states([o], [lse]), run_merge([o], [lse])):
        assert not found[0].any()
        assert torch.equal(found[1], lse)


HALF = torch.ones(2, 3, 5, 8, dtype=torch.float16)
LSE = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], r"outs must be 1 or more tensors in a list, a tuple or a tensor, got \[\]"),
        (3, [LSE], "outs must be 1 or more tensors in a list, a tuple or a tensor, got 3"),
        (torch.ones(()), [LSE], r"outs must have a first axis of parts, got shape \[\]"),
        ([HALF, HALF], [LSE], "lses must have an LSE for each of 2 outputs, got 1"),
        ([HALF, None], [LSE, LSE], r"outs\[1\] must be a torch.Tensor, got NoneType"),
        ([HALF[0, 0]], [LSE], r"outs\[0\] must have axes \[B, H, S, D\] or \[T, H, D\], got shape \[5, 8\]"),
        ([HALF.double()], [LSE], r"outs\[0\] must be float16, bfloat16 or float32, got torch.float64"),
        ([HALF, HALF.float()], [LSE, LSE], r"outs\[1\] must have shape and dtype of outs\[0\]"),
        ([HALF, HALF[:1]], [LSE, LSE], r"outs\[1\] must have shape and dtype of outs\[0\]"),
        ([HALF[..., ::2]], [LSE], r"outs\[0\] must be contiguous along its last axis"),
        ([HALF], [LSE.half()], r"lses\[0\] must be float32, got torch.float16"),
        ([HALF], [LSE.mT], r"lses\[0\] must have shape \[B, H, S\] = \[2, 3, 5\], got \[2, 5, 3\]"),
        ([HALF[0]], [LSE[0]], r"lses\[0\] must have shape \[H, T\] = \[5, 3\]|\[3, 5\]"),
        ([HALF, HALF.to("meta")], [LSE, LSE], r"outs\[1\] must be on the device of outs\[0\], cpu, got meta"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_refused_by_name(outs, lses, message):
    with pytest.raises(InputError, match=message):
        merge_attention_states(outs, lses)


def test_sizes_that_no_program_holds_are_refused():
    layout = ((0, 0, 8, 1), (0, 0, 1))
    with pytest.raises(UnsupportedError, match="no kernel merges 2147483648 rows"):
        merge_kernel((1, 1, 2**31, 8), (layout,) * 3, ("fp16",) * 3, True)
    wide = torch.zeros(1, 1, 1, 1040)
    with pytest.raises(UnsupportedError, match="no kernel merges outputs of D 1040"):
        _launch((wide, wide, wide), (torch.zeros(1, 1, 1),) * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("case", MERGE_CASES, ids=str)
def test_on_a_gpu(case, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    outs, lses = make_parts(case, "cuda")
    o, lse = merge_attention_states(outs, lses)
    assert_merged(case, o, lse, outs, lses)
    again, lse_again = merge_attention_states(outs, lses)
    assert torch.equal(again, o)
    assert torch.equal(lse_again, lse)
