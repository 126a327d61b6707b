"""Head sizes from 257 to 512: the portable kernels serve them, in the interpreter, on every architecture, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import flash_attention, flash_attention_with_kv_cache
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.attention import OPERATOR

GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
TOO_SMALL = (86, 89, 120)  # for gradients of fp32
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "features": {"causal": True, "window": (300, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32"},
    "bias": {"bias": "fp32", "packed": True},
}  # fmt: skip


@pytest.mark.triton
def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "FLASHMOE_BACKWARD_KERNEL": "backward_triton",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "tests.attention.interpreted_wide_heads"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.stdout.strip() == "right", child.stderr


@pytest.mark.parametrize("gpu", GPUS.values())
@pytest.mark.parametrize("head_dim", [257, 512])
def test_the_portable_kernels_are_chosen(gpu, head_dim):
    for options in FEATURES.values():
        for dtype in ("bf16", "fp32"):
            problem = AttentionProblem(2, 8, 2, 4096, 4096, head_dim, head_dim, dtype, return_lse=True, **options)
            assert plan_attention(problem, SPECS[gpu]).kernel == "forward_triton"
            gradients = BackwardProblem(problem, wants_sinks=bool(problem.sinks))
            if dtype == "fp32" and SPECS[gpu].arch in TOO_SMALL:
                with pytest.raises(UnsupportedError, match=r"need 131072 bytes of shared .* has 101376"):
                    plan_backward(gradients, SPECS[gpu])
                continue
            plan = plan_backward(gradients, SPECS[gpu])
            assert plan.kernel == "backward_triton"
            assert [launch.pattern for launch in plan.launches].count("_backward_kv_kernel") == 2
    cache = CacheProblem(8, 16, 2, 1, 8192, head_dim, head_dim, "bf16")
    assert plan_with_kv_cache(cache, SPECS[gpu]).kernel == "decode_triton"


@pytest.mark.triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", GPUS)
def test_tiles_fit(arch, dtype, features):
    """Within shared memory, and with little local memory in loops of 16-bit elements."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
    from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
    from flashmoe_science.attention.forward.prepare import prepare_kernels
    from flashmoe_science.gpu.compile import compile_kernel, read_code
    from flashmoe_science.gpu.specs import shared_memory_limit

    gpu = SPECS[GPUS[arch]]
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 512, 512, dtype, return_lse=True, **FEATURES[features])
    kernels = [*prepare_kernels(plan_attention(problem, gpu))]
    if dtype == "bf16" or arch not in TOO_SMALL:
        kernels += prepare_backward_kernels(plan_backward(BackwardProblem(problem), gpu, "backward_triton"))
    if features == "plain":
        cache = CacheProblem(8, 16, 2, 1, 8192, 512, 512, dtype)
        kernels += prepare_cache_kernels(plan_with_kv_cache(cache, gpu))
    for kernel in kernels:
        compiled = compile_kernel(kernel.source, arch)
        assert compiled.metadata.shared <= shared_memory_limit(arch), kernel.source.name
        code = read_code(compiled, kernel.source.name, arch)
        spills = arch == 90 and features == "plain" and kernel.source.name in ("_forward_kernel", "_backward_kv_kernel")
        allowed = 96 if spills else 32  # tiles that spill there were faster than others
        assert dtype == "fp32" or code.count(("LDL", "STL"), in_loops=True) <= allowed, kernel.source.name


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (300, 264), (257, 512), (64, 400)])
def test_right_on_a_gpu(head_dim, head_dim_v, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, 4, 301, head_dim), (2, 2, 301, head_dim), (2, 2, 301, head_dim_v), (2, 4, 301, head_dim_v))
    q, k, v, do = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    found = {}
    for name, call, wide in (("ours", None, False), ("exact", attended, True), ("low", attended, False)):
        leaves = [x.double() if wide else x.clone() for x in (q, k, v)]
        leaves = [x.requires_grad_() for x in leaves]
        o = flash_attention(*leaves, causal=True) if call is None else call(*leaves)
        found[name] = (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))
    for ours, exact, low in zip(found["ours"], found["exact"], found["low"], strict=True):
        assert (ours.double() - exact).abs().max().item() <= OPERATOR.error_budget(exact, low)
    cache = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    o = flash_attention_with_kv_cache(q[:, :, -1:], *cache)
    exact, low = found["exact"][0][:, :, -1:], found["low"][0][:, :, -1:]
    assert (o.double() - exact).abs().max().item() <= OPERATOR.error_budget(exact, low)
