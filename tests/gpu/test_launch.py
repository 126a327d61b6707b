"""The check that a compiled kernel takes its arguments as ``prepare_launch`` passes them."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl

from flashmoe_science import CompileError
from flashmoe_science.attention.plan import ForwardConfig, Plan, PlannedLaunch
from flashmoe_science.attention.prepare import prepare_kernels
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.compile import KernelSource, compile_kernel
from flashmoe_science.gpu.launch import MAX_POINTERS, count_parameters

pytestmark = pytest.mark.triton


@triton.jit
def _scale_kernel(x_ptr, y_ptr, rows, stride, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs * stride, mask=offs < rows)
    tl.store(y_ptr + offs, x * factor, mask=offs < rows)


SOURCE = KernelSource(
    _scale_kernel,
    (("x_ptr", "*fp16"), ("y_ptr", "*fp32"), ("rows", "i32"), ("stride", "i64"), ("factor", "fp32")),
    (("BLOCK", 128),),
    frozenset({"x_ptr", "y_ptr"}),
    num_warps=4,
)


def test_the_installed_triton_passes_arguments_as_the_launch_path_does():
    """Pointers and scalars in the order of the signature, then two scratch pointers; constants are gone."""
    for arch in (80, 90, 120):
        count_parameters(SOURCE, compile_kernel(SOURCE, arch).asm["ptx"])


def change(position, kind):
    signature = list(SOURCE.signature)
    signature[position] = (signature[position][0], kind)
    return dataclasses.replace(SOURCE, signature=tuple(signature))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (change(2, "i64"), "[64, 64, 64, 64, 32, 64, 64]"),
        (change(3, "i32"), "[64, 64, 32, 32, 32, 64, 64]"),
        (dataclasses.replace(SOURCE, signature=SOURCE.signature[:-1]), "[64, 64, 32, 64, 64, 64]"),
        (dataclasses.replace(SOURCE, signature=(*SOURCE.signature, ("more", "i32"))), "32, 32, 64, 64]"),
    ],
    ids=["a wider scalar", "a narrower scalar", "one argument less", "one argument more"],
)
def test_another_layout_is_refused_before_it_is_launched(wrong, expected):
    ptx = compile_kernel(SOURCE, 90).asm["ptx"]
    with pytest.raises(CompileError, match="_scale_kernel: expected parameters of") as caught:
        count_parameters(wrong, ptx)
    assert expected in str(caught.value)
    assert "has [64, 64, 32, 64, 32, 64, 64]" in str(caught.value)
    assert "please report it" in caught.value.hint


def test_a_triton_with_one_scratch_pointer_or_three_is_refused():
    ptx = compile_kernel(SOURCE, 90).asm["ptx"]
    last = "_scale_kernel_param_6"
    assert ptx.count(f"{last}\n)") == 1
    start = ptx.rindex(",", 0, ptx.index(f"{last}\n)"))
    one_less = ptx[:start] + ptx[ptx.index(f"{last}\n)") + len(last) :]
    one_more = ptx.replace(f"{last}\n)", f"{last},\n\t.param .u64 more\n)")
    for changed in (one_less, one_more):
        with pytest.raises(CompileError, match="expected parameters"):
            count_parameters(SOURCE, changed)


PROBLEM = AttentionProblem(1, 2, 1, 70, 4096, 64, 64, "fp16", causal=True, return_lse=True)


@pytest.mark.parametrize(
    ("kernel", "config"),
    [("forward_triton", ForwardConfig(64, 64, 4, 2, num_splits=4)), ("forward_triton", ForwardConfig(16, 64, 4, 2))],
    ids=["split", "whole"],
)
def test_attention_passes_its_pointers_first_and_no_more_than_a_launch_takes(kernel, config):
    """``prepare_launch`` writes up to ``MAX_POINTERS`` addresses, and the scalars after them."""
    launches = (PlannedLaunch("_forward_kernel", (1, 1, 1), (128, 1, 1)),) * 2
    for prepared in prepare_kernels(Plan(PROBLEM, "H200", 90, kernel, config, launches, "test")):
        kinds = [kind for _, kind in prepared.source.signature]
        pointers = [kind.startswith("*") for kind in kinds]
        assert pointers == sorted(pointers, reverse=True)
        assert sum(pointers) <= MAX_POINTERS
        assert len(prepared.scalars) == len(kinds) - sum(pointers)
        count_parameters(prepared.source, compile_kernel(prepared.source, 90).asm["ptx"])
