"""fp8 caches: what quantisation alone makes of the result, refusals by name, and compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_with_kv_cache, flash_attention_with_kv_cache
from flashmoe_science.attention import reference
from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.specs import SPECS

from .cache_cases import CACHE_CASES, make_tensors

FP8 = torch.float8_e4m3fn


def generate(fp8: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append 50 tokens one by one and return the last output, the exact one, and that of the stored values."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, heads_kv, keys, dim = 2, 8, 2, 50, 64
    q = torch.randn(batch, heads, 1, dim, generator=generator).to(device, dtype)
    k, v = (torch.randn(batch, heads_kv, keys, dim, generator=generator).to(device, dtype) for _ in "kv")
    k[:, 1] *= 8  # heads of different sizes
    caches = [torch.zeros(batch, 64, heads_kv, dim, dtype=FP8, device=device) for _ in "kv"]
    shape = {"all": (), "head": (heads_kv,), "token": (batch, 64, heads_kv)}[fp8]
    scales = [torch.zeros(shape, device=device) for _ in "kv"]
    for scale, new in zip(scales, (k, v), strict=True):
        if fp8 != "token":
            scale.copy_((new.abs().amax((0, 2, 3)) if fp8 == "head" else new.abs().max()).float() / 448)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    o = q
    for n in range(keys):
        new_k, new_v = k[:, :, n : n + 1], v[:, :, n : n + 1]
        o = flash_attention_with_kv_cache(
            q, caches[0], caches[1], new_k, new_v, cache_seqlens=lengths, k_scale=scales[0], v_scale=scales[1]
        )
        lengths += 1
    stored = [
        (cache.double() * (scale.double()[..., None] if scale.dim() else scale.double()))[:, :keys].transpose(1, 2)
        for cache, scale in zip(caches, scales, strict=True)
    ]
    exact, _ = reference.attention(q, k, v, dtype=torch.float64)
    of_stored, _ = reference.attention(q.double(), *stored, dtype=torch.float64)
    return o, exact, of_stored


def check_error_is_that_of_quantisation(fp8: str, device: str, dtype: torch.dtype) -> None:
    o, exact, of_stored = generate(fp8, device, dtype)
    quantisation = (of_stored - exact).norm() / exact.norm()
    assert 0.005 < quantisation < 0.1, "e4m3 has 3 bits behind the leading one"
    assert (o.double() - of_stored).norm() / exact.norm() < 0.2 * quantisation
    assert (o.double() - exact).norm() / exact.norm() < 1.05 * quantisation


@pytest.mark.parametrize("fp8", ["all", "head", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_quantisation(dtype, fp8):
    check_error_is_that_of_quantisation(fp8, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["all", "head", "token"])
def test_the_error_is_that_of_quantisation_on_a_gpu(fp8):
    check_error_is_that_of_quantisation(fp8, "cuda", torch.bfloat16)


def test_large_keys_saturate_and_nan_stays():
    caches = [torch.zeros(1, 4, 1, 8, dtype=FP8) for _ in "kv"]
    k, v = torch.full((1, 1, 1, 8), -1e4), torch.zeros(1, 1, 1, 8)
    v[..., 0], v[..., 1] = torch.nan, torch.inf
    q, lengths = torch.ones(1, 1, 1, 8), torch.zeros(1, dtype=torch.int32)
    flash_attention_with_kv_cache(q, caches[0], caches[1], k, v, cache_seqlens=lengths)
    assert caches[0].float()[0, 0].eq(-448).all()
    assert caches[1].float()[0, 0, 0, 0].isnan()
    assert caches[1].float()[0, 0, 0, 1] == 448


def call(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.randn(2, 4, 1, 8), "k_cache": torch.zeros(3, 4, 2, 8, dtype=FP8),
        "v_cache": torch.zeros(3, 4, 2, 8, dtype=FP8), "k": torch.randn(2, 2, 1, 8), "v": torch.randn(2, 2, 1, 8),
        "cache_seqlens": torch.zeros(2, dtype=torch.int32), "k_scale": torch.ones(3, 4, 2), "v_scale": torch.ones(2),
        "page_table": torch.tensor([[0], [2]], dtype=torch.int32),
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_cache": torch.zeros(3, 4, 2, 8)}, "v_cache must have the dtype of k_cache, torch.float8_e4m3fn"),
        ({"k_cache": torch.zeros(3, 4, 2, 8, dtype=torch.float8_e5m2)}, "k_cache must be the dtype of q"),
        ({"q": torch.zeros(2, 4, 1, 8).to(FP8)}, "q must be float16, bfloat16 or float32, got torch.float8_e4m3fn"),
        ({"k": torch.zeros(2, 2, 1, 8).to(FP8)}, "k must be the dtype of q, torch.float32, got torch.float8_e4m3fn"),
        ({"k_scale": torch.ones(3)}, r"k_scale must have shape \[\], \[HK\] = \[2\] or .* = \[3, 4, 2\], got \[3\]"),
        ({"v_scale": torch.ones(2).half()}, "v_scale must be float32, got torch.float16"),
        ({"v_scale": 0.5}, "v_scale must be a torch.Tensor or None|v_scale must be a torch.Tensor"),
        ({"k_scale": torch.ones(3, 4, 1).expand(3, 4, 2)}, "k_scale must have memory for every key"),
        (
            {"k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 8)},
            "k_scale must be None unless caches are torch.float8_e4m3fn, got one with torch.float32",
        ),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_refused_by_name(changes, message):
    flash_attention_with_kv_cache(**call())
    with pytest.raises(InputError, match=message):
        flash_attention_with_kv_cache(**call(**changes))
    with pytest.raises(InputError, match=message):
        explain_with_kv_cache(**call(**changes))


def test_scales_that_are_written_do_not_share_memory():
    scales = torch.ones(3, 4, 2, 2)
    flash_attention_with_kv_cache(**call(k_scale=scales[..., 0], v_scale=scales[..., 1]))
    with pytest.raises(InputError, match="v_scale must have memory of its own"):
        flash_attention_with_kv_cache(**call(k_scale=scales[..., 0], v_scale=scales[..., 0]))


def test_expanded_scales_are_compiled_too():
    given = call(k_scale=torch.tensor([2.0]).expand(2))
    expected = flash_attention_with_kv_cache(**given)
    compiled = torch.compile(flash_attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), expected)


@pytest.mark.parametrize("scale", [torch.tensor([2.0]).expand(2), torch.full((3, 2), 2.0)[1], torch.tensor(2.0)])
def test_scales_that_are_not_written_are_compiled_as_they_are(scale):
    """A row of an expanded tensor is contiguous, and a view all the same."""
    given = call(k_scale=scale, v_scale=torch.ones(1, 2).expand(2, 2)[0])
    expected = flash_attention_with_kv_cache(**given)
    before = scale._version
    compiled = torch.compile(flash_attention_with_kv_cache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), expected)
    assert scale._version == before


@pytest.mark.parametrize("key", [1e-43, 1e-38, math.nan])
def test_tiny_keys_have_a_scale(key):
    """1/448 of the largest may be 0: 0 / 0 would be NaN."""
    caches, scales = [torch.zeros(1, 4, 1, 8, dtype=FP8) for _ in "kv"], [torch.zeros(1, 4, 1) for _ in "kv"]
    k = torch.zeros(1, 1, 1, 8)
    k[..., 0] = key
    lengths = torch.zeros(1, dtype=torch.int32)
    o = flash_attention_with_kv_cache(
        torch.ones(1, 1, 1, 8), caches[0], caches[1], k, k, cache_seqlens=lengths, k_scale=scales[0], v_scale=scales[1]
    )
    if not math.isnan(key):
        assert scales[0][0, 0, 0] >= 2**-126
        torch.testing.assert_close(o, k, rtol=0.1, atol=1e-38)
    else:
        assert scales[0][0, 0, 0].isnan()


def test_values_that_are_columns_of_the_keys_have_their_scale():
    cache = torch.zeros(2, 4, 1, 8, dtype=FP8)
    q = torch.ones(2, 4, 1, 8)
    flash_attention_with_kv_cache(q, cache, cache[..., :4], k_scale=torch.ones(2, 4, 1))
    with pytest.raises(InputError, match="v_scale must be None where values are columns of the keys"):
        flash_attention_with_kv_cache(q, cache, cache[..., :4], v_scale=torch.ones(()))


def test_plans():
    problem = CacheProblem(4, 32, 8, 1, 8192, 128, 128, "bf16", page_size=16, is_fp8=True)
    assert plan_with_kv_cache(problem, SPECS["H200"]).kernel == "decode_triton"
    with pytest.raises(UnsupportedError, match="fp8 caches need sm_89 or newer, got sm_80"):
        plan_with_kv_cache(problem, SPECS["A100"])
    mla = CacheProblem(64, 16, 1, 1, 8192, 576, 512, "bf16", page_size=64, shared_kv=True, is_fp8=True)
    assert plan_with_kv_cache(mla, SPECS["H200"]).launches[0].pattern == "_few_rows_fp8_sm90_kernel"
    for change, reason in (
        ({"page_size": 16}, "pages of 16"),
        ({"heads": 64}, "no fp8 caches with more than 32 rows"),
        ({"k_strides": (64 * 584, 584, 584, 1)}, "multiples of 16 bytes"),
    ):
        plan = plan_with_kv_cache(dataclasses.replace(mla, **change), SPECS["H200"])
        assert plan.kernel == "decode_triton"
        assert reason in plan.reason
    assert mla.kv_bytes == dataclasses.replace(mla, is_fp8=False).kv_bytes / 2


@pytest.mark.triton
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("gpu", "arch"), [("L4", 89), ("H200", 90), ("B200", 100)])
def test_kernels_compile(gpu, arch, by_token):
    """Scales of heads over pages of 16, and a scale of each key: 128 columns, and MLA's."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
    from flashmoe_science.gpu.compile import read_resources

    strides = (32, 8, 1) if by_token else (0, 0, 1)
    scales = {"k_scale_strides": strides, "k_by_token": by_token}
    problems = [
        CacheProblem(
            4, 32, 8, 1, 8192, 128, 128, "bf16", page_size=16, is_fp8=True, seqlen_new=1, v_scale_strides=strides,
            v_by_token=by_token, **scales,
        ),
        CacheProblem(64, 16, 1, 1, 8192, 576, 512, "bf16", page_size=64, shared_kv=True, is_fp8=True, **scales),
    ]  # fmt: skip
    by = [(problems[0], "auto"), *((problems[1], kernel) for kernel in ("auto", "decode_triton") if arch == 90)]
    for problem, name in by:
        for kernel in prepare_cache_kernels(plan_with_kv_cache(problem, SPECS[gpu], name)):
            found = read_resources(kernel.source, arch)
            most = 16 if kernel.source.name == "_decode_kernel" and problem.shared_kv and by_token else 0
            assert found.spill_bytes <= most, (kernel.source.name, problem.describe(), found.registers)
            assert found.shared_memory_bytes <= SPECS[gpu].shared_memory_per_block_bytes


@pytest.mark.triton
@pytest.mark.parametrize("case", [case for case in CACHE_CASES if case.fp8], ids=str)
def test_what_the_interpreter_runs_compiles_with_pointers_of_the_caches(case):
    """The interpreter takes the dtypes of tensors, and products of any width."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
    from flashmoe_science.gpu.compile import compile_kernel

    case = dataclasses.replace(case, dtype="bf16")
    problem = cache_problem_of(make_tensors(case), **case.options)
    for kernel in prepare_cache_kernels(plan_with_kv_cache(problem, SPECS["H200"])):
        compile_kernel(kernel.source, 90)
        if kernel.source.name == "_append_kernel":
            kinds = dict(kernel.source.signature)
            assert {kinds[name] for name in kinds if name in ("k_ptr", "v_ptr")} == {"*fp8e4nv"}
