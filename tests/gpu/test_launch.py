"""The check that a compiled kernel takes its arguments as ``prepare_launch`` passes them."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl

from flashmoe_science import CompileError
from flashmoe_science.attention.forward.prepare import prepare_kernels
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig, Plan
from flashmoe_science.gpu import launch
from flashmoe_science.gpu.compile import KernelSource, compile_kernel, parameter_names
from flashmoe_science.gpu.launch import MAX_POINTERS, count_parameters
from flashmoe_science.gpu.planning import PlannedLaunch

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


EVERYTHING: dict[str, Any] = {"window": (300, 100), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32"}
FEATURED: dict[str, dict[str, Any]] = {
    "dense": {"causal": False, **EVERYTHING, "bias": "fp16"},
    "packed": {"causal": False, **EVERYTHING, "packed": True, "seqused": "qk"},
    "a window": {"causal": True, "window": (300, -1)},
    "dropout": {"causal": True, "dropout_p": 0.1},
    "packed with dropout": {"causal": False, **EVERYTHING, "packed": True, "seqused": "k", "dropout_p": 0.9},
}


@pytest.mark.parametrize("name", FEATURED)
def test_attention_with_features_passes_its_pointers_first(name):
    """In the order of ``extras``, and scalars of the kinds that it says."""
    problem = AttentionProblem(2, 4, 2, 700, 4096, 64, 64, "fp16", return_lse=True, **FEATURED[name])
    launches = (PlannedLaunch("_forward_kernel", (1, 1, 1), (128, 1, 1)),)
    (prepared,) = prepare_kernels(
        Plan(problem, "H200", 90, "forward_triton", ForwardConfig(16, 64, 4, 2), launches, "")
    )
    kinds = [kind for _, kind in prepared.source.signature]
    names = [argument for argument, kind in prepared.source.signature if kind.startswith("*")]
    pointers = [name.rpartition(".")[2].removesuffix("_ptr") for name in names]
    assert pointers == ["q", "k", "v", "o", "lse", *problem.extras]
    assert len(prepared.scalars) == len(kinds) - len(pointers)
    names = [argument for argument, _ in prepared.source.signature[len(pointers) :]]
    scalars = dict(zip(names, prepared.scalars, strict=True))
    assert [scalars.get(f"window.{side}", -1) for side in ("left", "right")] == [*problem.window]
    order = [name for name in parameter_names(prepared.source.function) if name in dict(prepared.source.signature)]
    assert order == [argument for argument, _ in prepared.source.signature], "the kernel takes them in this order"
    count_parameters(prepared.source, compile_kernel(prepared.source, 90).asm["ptx"])


SCALARS: tuple[Any, ...] = (ctypes.c_int32, ctypes.c_float)


@pytest.mark.parametrize("pointers", [3, 6, 7, 12])
def test_a_launch_writes_every_pointer_and_scalar(pointers, monkeypatch):
    """What the driver finds in the parameter block, with a driver that only looks there."""
    seen = []

    def look(config_at: int, function: int, parameters_at: int, _extra: object) -> int:
        places = (ctypes.c_void_p * (pointers + 2)).from_address(parameters_at)
        addresses = [ctypes.c_uint64.from_address(place).value for place in places[:pointers]]
        rows, factor = (kind.from_address(place).value for kind, place in zip(SCALARS, places[pointers:], strict=True))
        seen.append((function, addresses, rows, factor, launch._LaunchConfig.from_address(config_at).stream))
        return 0

    monkeypatch.setattr(launch, "_load_function", lambda *_: (77, 0, 128))
    monkeypatch.setattr(launch, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=look))
    signature = [*((f"p{i}_ptr", "*fp16") for i in range(pointers)), ("rows", "i32"), ("factor", "fp32")]
    source = KernelSource(_scale_kernel, tuple(signature), (), frozenset(), num_warps=4)
    call = launch.prepare_launch(source, 90, 0, (1, 1, 1), (5, 0.5))
    for first in (1000, 2**40):
        call(9, *range(first, first + max(pointers, 4)))
    assert seen == [(77, [*range(first, first + pointers)], 5, 0.5, 9) for first in (1000, 2**40)]
