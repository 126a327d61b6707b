"""How many blocks an SM holds, against values of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest

from flashmoe_science.gpu.occupancy import occupancy
from flashmoe_science.gpu.specs import SPECS


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "by"),
    [
        ("H200", 128, 32, 0, 16, {"threads", "registers"}),
        ("H200", 128, 33, 0, 12, {"registers"}),  # 33 registers take as much as 40
        ("H200", 32, 16, 0, 32, {"blocks"}),
        ("H200", 384, 168, 134144, 1, {"registers", "shared memory"}),  # cuDNN's attention on Hopper
        ("H200", 256, 255, 0, 1, {"registers"}),
        ("H200", 128, 64, 113664, 2, {"shared memory"}),  # 112 KiB of 228, with 1 KiB for the driver
        ("H200", 128, 64, 115712, 2, {"shared memory"}),  # 113 + 1 KiB: two fit to the byte
        ("H200", 128, 64, 115713, 1, {"shared memory"}),
        ("L4", 1024, 32, 0, 1, {"threads"}),
        ("L4", 32, 16, 0, 24, {"blocks"}),
        ("A10G", 32, 16, 0, 16, {"blocks"}),
        ("A100", 48, 32, 0, 32, {"threads", "blocks", "registers"}),  # 48 threads are two warps
        ("L4", 128, 64, 102400, 0, {"shared memory"}),
    ],
)
def test_blocks_of_an_sm(gpu, threads, registers, shared, blocks, by):
    found = occupancy(SPECS[gpu], threads=threads, registers=registers, shared_memory_bytes=shared)
    assert (found.blocks, set(found.limited_by)) == (blocks, by)
    assert found.warps == blocks * -(-threads // 32)


def test_registers_that_are_not_known_set_no_limit():
    found = occupancy(SPECS["H200"], threads=256, registers=0, shared_memory_bytes=0)
    assert found.limits == {"threads": 8, "blocks": 32, "shared memory": 228}
    assert (found.blocks, found.warps, found.most_warps) == (8, 64, 64)
