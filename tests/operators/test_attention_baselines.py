"""A baseline is known by kernels that no other baseline runs."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase

import pytest
import torch

from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.operators.attention import OPERATOR
from flashmoe_science.operators.baselines.attention import BASELINES, sequence_major

# The first of sdpa-cudnn and of sdpa-flash ran in a record of evidence/; the others are as users of each reported them.
# Template arguments are cut.
NAMES = {
    "sdpa-cudnn": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
    ),
    "sdpa-flash": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4>>(pytorch_flash::Params)",
        "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>(pytorch_flash::Params)",
    ),
    "sdpa-efficient": ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",),
    "flex": ("triton_tem_fused_flex_attention_0",),
    "fa2": (
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>, false, true>(flash::Flash_fwd_params)",
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(flash::Flash_fwd_params)",
    ),
    "fa3": ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop>>>",),
    "fa4": (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor0000o11101213",
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensor0000o11101213",
        # The form of an open change to its names.
        "flash_fwd_sm100_bf16_head_dim128_kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100",
    ),
    "flashinfer": (
        "void flashinfer::SinglePrefillWithKVCacheKernel<flashinfer::KernelTraits<>, flashinfer::Params>(Params)",
        "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<>, flashinfer::Traits<>>(Params)",
    ),
}


@pytest.mark.parametrize("name", [name for name, baseline in BASELINES.items() if baseline.kernels])
def test_a_baseline_is_known_by_its_own_kernels_only(name):
    for owner, kernels in NAMES.items():
        for kernel in kernels:
            fits = any(fnmatchcase(kernel, pattern) for pattern in BASELINES[name].kernels)
            assert fits == (owner == name), kernel


def problem(seqlen: int, *, causal: bool = False) -> AttentionProblem:
    return AttentionProblem(16384 // seqlen, 16, 16, seqlen, seqlen, 128, 128, "bf16", causal)


@pytest.mark.parametrize(("seqlen", "causal", "rows"), [(8192, False, 8192), (16384, True, 8192), (8192, True, 4096)])
def test_the_matrix_product_has_as_many_operations(seqlen, causal, rows):
    baseline, case = BASELINES["matrix-product"], problem(seqlen, causal=causal)
    assert baseline.refusal(case) is None
    entry, inputs = baseline.load(), {"q": torch.empty(1, dtype=torch.bfloat16, device="meta")}
    call, other = OPERATOR.bind(entry, case, inputs), OPERATOR.bind(entry, case, inputs)
    assert isinstance(call, functools.partial)
    assert isinstance(other, functools.partial)
    assert call.args[1] is other.args[1]  # the right side is 128 MiB
    left, right = call.args
    assert (left.shape, right.shape, left.dtype) == ((rows, 8192), (8192, 8192), torch.bfloat16)
    operations = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    assert operations == pytest.approx(OPERATOR.work(case).flops, rel=128 / rows)


def test_a_small_matrix_product_is_refused():
    assert BASELINES["matrix-product"].refusal(problem(4096)) is None
    assert BASELINES["matrix-product"].refusal(problem(4096, causal=True)) == (
        "it is asked for from 5.5e+11 operations on, this case has 2.7e+11"
    )


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_a_baseline_that_lays_its_inputs_out_keeps_its_own_copies(heads_kv):
    """Of one head both orders are the same memory: what is moved in the inputs would reach K and V, and not Q."""
    problem = AttentionProblem(2, 2, heads_kv, 3, 3, 8, 8, "fp16")
    inputs = OPERATOR.make_inputs(problem, seed=1, device="cpu")
    for mine, given in zip(sequence_major(inputs), inputs.values(), strict=True):
        assert mine.is_contiguous()
        assert torch.equal(mine.transpose(1, 2), given)
        assert mine.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
