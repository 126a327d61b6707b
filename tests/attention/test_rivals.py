"""A rival is known by kernels that no other rival runs."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from flashmoe_science.attention.rivals import RIVALS

FA2 = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>, false, true>(flash::Flash_fwd_params)"
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>>"
FA4 = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor0000o11101213"


@pytest.mark.parametrize(("name", "own", "others"), [("fa3", FA3, [FA2, FA4]), ("fa4", FA4, [FA2, FA3])])
def test_a_flash_attention_is_not_taken_for_another(name, own, others):
    patterns = RIVALS[name].kernels
    assert any(fnmatchcase(own, pattern) for pattern in patterns)
    assert not any(fnmatchcase(other, pattern) for other in others for pattern in patterns)
