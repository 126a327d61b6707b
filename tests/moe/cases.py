"""Calls of ``fused_moe`` that are small enough for Triton's interpreter, each for a reason."""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")


@dataclass(frozen=True)
class Case:
    """One call. ``ids``: "distinct" experts of a token, all "one", or some that name "none"."""

    why: str
    tokens: int = 9
    experts: int = 5
    top_k: int = 2
    hidden: int = 40
    inter: int = 24
    dtype: str = "fp32"
    kernel: str = "auto"
    activation: str = "swiglu"
    interleaved: bool = False
    bias: bool = False
    shared: int = 0
    shared_inter: int = 0
    weighted: bool = False  # shared experts have weights
    ids: str = "distinct"
    ids_dtype: str = "i32"
    weights_dtype: str = "fp32"
    strided: bool = False  # x and weights lie in memory in another order
    far: bool = False  # columns of x lie so far apart that 32 bits do not count the elements between them
    batch_invariant: bool = False
    gradients: bool = False  # they are what is checked
    permuted: bool = False  # tokens and experts in another order are
    overwritten: bool = False  # what is kept, by the last backward pass
    failing: bool = False  # the last backward pass, and then once more
    narrow: bool = False  # gradients in parts of few columns

    def __str__(self) -> str:
        return f"{self.why.replace(' ', '-')}-{self.kernel}-{self.dtype}"


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its columns so far apart, in memory that begins 2**31 elements before it.

    So what is read at an offset that lost its upper bits is a zero, and no crash. On a CPU the memory is a file with
    holes, on a GPU 12 GB for elements of two bytes.
    """
    stride = 2**32 // x.shape[1]
    elements = 2**31 + stride * x.shape[1]
    if x.is_cuda:
        return torch.zeros(elements, dtype=x.dtype, device=x.device).as_strided(x.shape, (1, stride), 2**31).copy_(x)
    with tempfile.TemporaryFile() as file:
        file.truncate(elements * x.element_size())
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=x.dtype)
    return memory.as_strided(x.shape, (1, stride), 2**31).copy_(x)


def make_tensors(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a call."""
    g, dtype = torch.Generator(device).manual_seed(seed), DTYPES[case.dtype]

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, device=device) * scale).to(dtype)

    columns = 2 if case.activation in GATED else 1
    t, e, h, i = case.tokens, case.experts, case.hidden, case.inter
    tensors: dict[str, Any] = {
        "x": draw(t, h),
        "w_gate_up": draw(e, columns * i, h, scale=h**-0.5),
        "w_down": draw(e, h, i, scale=i**-0.5),
        "topk_weights": torch.rand(t, case.top_k, generator=g, device=device).to(DTYPES[case.weights_dtype]),
    }
    if case.ids == "distinct":
        ids = torch.rand(t, e, generator=g, device=device).argsort(-1)[:, : case.top_k]
    elif case.ids == "one":
        ids = torch.full((t, case.top_k), e - 1, device=device)
    else:
        ids = torch.randint(-1, e + 2, (t, case.top_k), generator=g, device=device)
    tensors["topk_ids"] = ids.to(torch.int32 if case.ids_dtype == "i32" else torch.int64).contiguous()
    if case.bias:
        tensors["bias_gate_up"], tensors["bias_down"] = draw(e, columns * i), draw(e, h)
    if case.shared:
        s, si = case.shared, case.shared_inter
        tensors["shared_gate_up"] = draw(s, columns * si, h, scale=h**-0.5)
        tensors["shared_down"] = draw(s, h, si, scale=si**-0.5)
        if case.weighted:
            tensors["shared_weights"] = torch.rand(t, s, generator=g, device=device)
    if case.strided:
        tensors["x"] = torch.stack((tensors["x"], tensors["x"]), 1)[:, 1]
        for name in ("w_gate_up", "w_down"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    if case.far:
        tensors["x"] = far_apart(tensors["x"])
    return tensors


def options_of(case: Case) -> dict[str, Any]:
    """Return the options that change what the answer is."""
    return {"activation": case.activation, "interleaved": case.interleaved}


KERNELS = ("gemv_triton", "few_triton", "grouped_triton")
CASES = [
    *(Case("one token", 1, kernel=kernel) for kernel in KERNELS),
    *(Case("gpt-oss", 1 if kernel == "gemv_triton" else 7, 6, 4, 48, 40, "fp16", kernel, "swiglu_clamped", True, True)
      for kernel in KERNELS),
    *(Case("shared experts", 1 if kernel == "gemv_triton" else 5, 6, 3, kernel=kernel, shared=2, shared_inter=40,
           weighted=True) for kernel in KERNELS),
    *(Case("ids of no expert", 1 if kernel == "gemv_triton" else 20, 4, 3, kernel=kernel, ids="none", ids_dtype="i64",
           bias=True) for kernel in KERNELS),
    *(Case("prime sizes", 1 if kernel == "gemv_triton" else 11, 7, 3, 37, 23, kernel=kernel, strided=True)
      for kernel in KERNELS),
    Case("few tokens of more experts than pairs", 3, 16, 2, kernel="few_triton"),
    Case("few tokens of fewer experts than pairs", 20, 3, 2, kernel="few_triton"),
    Case("many rows of one expert", 20, 3, 2, kernel="few_triton", ids="one"),
    Case("more tokens than a tile has rows", 70, 4, 2, kernel="grouped_triton"),
    *(Case("columns far apart", 1, 3, 2, 40, 16, "fp16", kernel, far=True) for kernel in KERNELS),
    Case("one token, parts of experts", 1, 6, 5, 40, 70, kernel="gemv_triton", ids="none", bias=True),
    Case("all on one expert", 40, 5, 1, kernel="grouped_triton", ids="one", shared=1, shared_inter=16),
    Case("low-precision weights", 9, kernel="grouped_triton", weights_dtype="bf16", dtype="fp16"),
    Case("top_k above one step of the sum", 3, 20, 11, 16, 16, kernel="few_triton"),
    *(Case(f"activation {name}", 5, 4, 2, 24, 16, kernel="few_triton", activation=name, bias=True)
      for name in ("geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh")),
]  # fmt: skip
GRADIENT_CASES = [
    Case("grouped", 20, 3, 2, 40, 24, gradients=True),
    Case("grouped", 9, 3, 2, 40, 24, dtype="fp16", gradients=True),
    Case("clamps", 9, 3, 2, 24, 20, activation="swiglu_clamped", interleaved=True, bias=True, gradients=True),
    Case("odd sizes", 5, 4, 3, 37, 29, bias=True, gradients=True),
    Case("strange ids", 9, 3, 2, 24, 16, ids="none", ids_dtype="i64", bias=True, gradients=True),
    Case("shared", 7, 2, 1, 24, 16, shared=2, shared_inter=24, weighted=True, gradients=True),
    Case("one expert", 7, 3, 1, 24, 16, shared=1, shared_inter=16, ids="one", strided=True, gradients=True),
    Case("one token", 1, 5, 2, 24, 16, bias=True, gradients=True),
    Case("columns far apart", 5, 2, 1, 40, 16, dtype="fp16", far=True, gradients=True),
    Case("many column tiles", 2, 1, 1, 16, 1060, activation="relu2", gradients=True),
    *(Case(f"activation {name}", 5, 2, 1, 16, 16, activation=name, bias=True, gradients=True)
      for name in ("geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh")),
]  # fmt: skip
EMPTY_CASES = [Case("no tokens", 0, kernel=kernel) for kernel in ("few_triton", "grouped_triton")]
