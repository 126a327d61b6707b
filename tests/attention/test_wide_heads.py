"""Head sizes from 257 to 512: the portable kernels serve them, in the interpreter, on every architecture, on a GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import flash_attention, flash_attention_varlen, flash_attention_with_kv_cache
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.attention import OPERATOR
from flashmoe_science.operators.attention_scale import step_scale

from .checks import poison_allocator

GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
WIDE = "forward_wide_gluon_sm90"
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


@pytest.mark.parametrize("packed", [False, True])
def test_values_in_the_memory_of_the_keys(packed):
    """DeepSeek-V4's prompts: keys that are the values, or whose first columns are; gradients add up."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(shape, generator=generator) for shape in ((1, 4, 9, 512), (1, 1, 9, 512)))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not packed:
            return flash_attention(q, k, v, causal=True, window=(3, -1))
        q_, k_, v_ = (x[0].transpose(0, 1) for x in (q, k, v))
        return flash_attention_varlen(q_, k_, v_, starts, starts, 5, 5, causal=True, window=(3, -1))

    for columns in (512, 400):
        one = kv.clone().requires_grad_()
        k, v = kv.clone().requires_grad_(), kv[..., :columns].clone().requires_grad_()
        found, expected = attend(one, one[..., :columns]), attend(k, v)
        assert torch.equal(found, expected)
        do = torch.randn(found.shape, generator=generator)
        (both,) = torch.autograd.grad(found, one, do)
        parts = torch.autograd.grad(expected, (k, v), do)
        torch.testing.assert_close(both, parts[0] + F.pad(parts[1], (0, 512 - columns)))


@pytest.mark.parametrize("gpu", GPUS.values())
@pytest.mark.parametrize("head_dim", [257, 512])
def test_the_portable_kernels_are_chosen(gpu, head_dim):
    """But on Hopper where heads are multiples of 8 and calls are without features."""
    for name, options in FEATURES.items():
        for dtype in ("bf16", "fp32"):
            problem = AttentionProblem(2, 8, 2, 4096, 4096, head_dim, head_dim, dtype, return_lse=True, **options)
            hopper = gpu == "H200" and (name, dtype, head_dim) == ("plain", "bf16", 512)
            assert plan_attention(problem, SPECS[gpu]).kernel == (WIDE if hopper else "forward_triton")
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
        with_bias = arch == 90 and features == "bias" and kernel.source.name == "_backward_kv_kernel"
        allowed = 96 if spills else 64 if with_bias else 32  # tiles that spill there were faster than others
        assert dtype == "fp32" or code.count(("LDL", "STL"), in_loops=True) <= allowed, kernel.source.name


WIDE_CASES = [
    AttentionProblem(1, 16, 2, 16384, 16384, 512, 512, "bf16", causal=True, return_lse=True),
    AttentionProblem(2, 8, 8, 300, 500, 264, 400, "fp16"),
    AttentionProblem(2, 6, 2, 500, 300, 512, 320, "bf16", causal=True),
]


@pytest.mark.triton
@pytest.mark.parametrize("problem", WIDE_CASES, ids=str)
def test_the_kernel_for_hopper_compiles(problem):
    """Within shared memory, with nothing in local memory in its loops, and with all products in flight."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.forward.prepare import prepare_kernels
    from flashmoe_science.gpu.compile import compile_kernel, read_code, read_resources
    from flashmoe_science.gpu.launch import count_parameters

    (kernel,) = prepare_kernels(plan_attention(problem, SPECS["H200"], WIDE))
    found = read_resources(kernel.source, 90)
    assert found.shared_memory_bytes <= SPECS["H200"].shared_memory_per_block_bytes
    assert found.spill_bytes <= 8
    # Both warpgroups compile three steps. A step has 32 products for its scores and 4 for its output.
    assert sum(count for name, count in found.instructions.items() if "GMMA" in name) == 2 * 3 * 36
    compiled = compile_kernel(kernel.source, 90)
    assert read_code(compiled, kernel.source.name, 90).count(("LDL", "STL"), in_loops=True) <= 8
    count_parameters(kernel.source, compiled.asm["ptx"])
    assert kernel.tensors == ("q", "k", "v", "o_ptr", "lse_ptr")


WIDE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"head_dim": 256}, "head dimensions of 257 to 512 that are multiples of 8"),
    "narrow values": ({"head_dim_v": 64}, "head dimensions of 257 to 512 that are multiples of 8"),
    "odd": ({"head_dim": 300}, "head dimensions of 257 to 512 that are multiples of 8"),
    "fp32": ({"dtype": "fp32"}, "fp16 and bf16 only"),
    "window": ({"window": (100, -1)}, "does not serve a sliding window"),
    "rows": ({"q_strides": (2**22, 2**20, 516, 1)}, "multiples of 16 bytes"),
}


@pytest.mark.parametrize("why", WIDE_REFUSED)
def test_what_the_kernel_for_hopper_refuses(why):
    changes, message = WIDE_REFUSED[why]
    problem = dataclasses.replace(WIDE_CASES[0], **changes)
    with pytest.raises(UnsupportedError, match=message):
        plan_attention(problem, SPECS["H200"], WIDE)
    with pytest.raises(UnsupportedError, match="it is for sm_90"):
        plan_attention(WIDE_CASES[0], SPECS["B200"], WIDE)


def test_few_rows_are_left_to_the_kernel_that_splits_keys():
    few, many = (dataclasses.replace(WIDE_CASES[0], seqlen_q=seqlen_q) for seqlen_q in (128, 256))
    plan = plan_attention(few, SPECS["H200"])
    assert plan.kernel == "forward_triton"
    assert f"{WIDE} too (its 32 programs do not fill 132 SMs" in plan.reason
    plan = plan_attention(many, SPECS["H200"])
    assert (plan.kernel, plan.launches[0].grid) == (WIDE, (64, 1, 1))
    plan = plan_attention(dataclasses.replace(many, batch=64, seqlen_q=64), SPECS["H200"])
    assert plan.kernel == "forward_triton"
    assert f"{WIDE} too (most of a row tile of 128 would be empty)" in plan.reason


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"),
    [(2, 2, 128, 64, 512, 512), (4, 1, 1000, 1000, 512, 512), (4, 2, 1, 300, 264, 512), (2, 1, 65, 1500, 512, 264),
     (6, 3, 129, 128, 400, 320), (3, 1, 700, 333, 512, 512), (1, 1, 2500, 2500, 512, 512)],
)  # fmt: skip
def test_the_kernel_for_hopper_is_right(heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, dtype):
    """Beside fp64, with what lies in memory poisoned; rows without keys are 0, their LSE -inf; the same bits again."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    sizes = {"batch": 2, "heads": heads, "heads_kv": heads_kv, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    table = {**sizes, "head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype, "causal": causal}
    case = OPERATOR.parse_case(table)
    tensors = OPERATOR.make_inputs(case, seed=seqlen_q, device="cuda")
    q, k, v = (tensors[name] for name in "qkv")
    poison_allocator(1 << 22)
    o, lse = flash_attention(q, k, v, causal=causal, return_lse=True, kernel=WIDE)
    exact, exact_lse = reference.attention(q, k, v, causal=causal, dtype=torch.float64)
    low = OPERATOR.low_precision(case, tensors)
    assert (o.double() - exact).abs().max().item() <= OPERATOR.error_budget(exact, low)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    seen = exact_lse > -torch.inf
    assert (lse.double() - exact_lse)[seen].abs().max().item() < 1e-3
    for _ in range(20):
        assert torch.equal(o, flash_attention(q, k, v, causal=causal, kernel=WIDE))


@pytest.mark.gpu
def test_the_kernel_for_hopper_meets_rising_scores():
    """Later tiles have larger scores than the first that is walked over, by far: the maximum has to be raised."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, 640, 512, generator=generator, device="cuda").bfloat16() for _ in range(3))
    k *= torch.linspace(6, 0.1, 640, device="cuda").bfloat16()[:, None]
    o = flash_attention(q, k, v, kernel=WIDE)
    exact, _ = reference.attention(q, k, v, dtype=torch.float64)
    assert (o.double() - exact).abs().max().item() <= 2e-2


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
    for name, call, is_wide in (("ours", None, False), ("exact", attended, True)):
        leaves = [x.double() if is_wide else x.clone() for x in (q, k, v)]
        leaves = [x.requires_grad_() for x in leaves]
        o = flash_attention(*leaves, causal=True) if call is None else call(*leaves)
        found[name] = (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))
    allowed = step_scale(q, k, v, do, causal=True, softmax_scale=None)
    for ours, exact, scale in zip(found["ours"], found["exact"], allowed, strict=True):
        assert ((ours.double() - exact).abs() <= scale.largest).all()
    cache = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    o = flash_attention_with_kv_cache(q[:, :, -1:], *cache)
    assert ((o.double() - found["exact"][0][:, :, -1:]).abs() <= allowed[0].largest[:, :, -1:]).all()
