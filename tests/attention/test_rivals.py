"""A rival is known by kernels that no other rival runs."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from flashmoe_science.attention.rivals import RIVALS

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
}


@pytest.mark.parametrize("name", [name for name, rival in RIVALS.items() if rival.kernels])
def test_a_rival_is_known_by_its_own_kernels_only(name):
    for owner, kernels in NAMES.items():
        for kernel in kernels:
            fits = any(fnmatchcase(kernel, pattern) for pattern in RIVALS[name].kernels)
            assert fits == (owner == name), kernel
