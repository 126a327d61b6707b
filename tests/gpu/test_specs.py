"""Which GPU a name means, and what an architecture allows."""

from __future__ import annotations

import pytest

from flashmoe_science import InputError
from flashmoe_science.gpu.specs import (
    FP16_FLOPS_PER_SM_AND_CLOCK,
    OLDEST_TRITON,
    SPECS,
    find_gpu,
    shared_memory_limit,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("nvidia h200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),  # both "H100" and "H100 NVL" are in it
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        *((name, name) for name in SPECS),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_name(name, expected):
    assert find_gpu(name).name == expected


@pytest.mark.parametrize(
    "name", ["NVIDIA L40S", "NVIDIA L40", "NVIDIA A10", "NVIDIA GH200 480GB", "NVIDIA A100X", "RTX", "4090", "", " "]
)
def test_a_gpu_that_is_not_in_the_table_is_not_taken_for_another(name):
    with pytest.raises(InputError, match=r"gpu must be one of A100, A10G, L4, .*, got ") as caught:
        find_gpu(name)
    assert repr(name) in str(caught.value)


def test_shared_memory_of_a_block():
    """From the CUDA C++ Programming Guide: what a block may opt in to, 1 KiB below what the SM has."""
    limits = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
    assert {arch: shared_memory_limit(arch) // 1024 for arch in limits} == limits
    assert shared_memory_limit(103) == shared_memory_limit(100)
    for spec in SPECS.values():
        assert spec.shared_memory_per_block_bytes == shared_memory_limit(spec.arch)
        assert spec.shared_memory_per_block_bytes == spec.shared_memory_per_sm_bytes - 1024


def test_every_model_can_be_compiled_for():
    assert {spec.arch for spec in SPECS.values()} <= {
        arch for arch, oldest in OLDEST_TRITON.items() if oldest == (3, 6)
    }


def test_no_model_computes_more_in_a_clock_than_its_architecture():
    """A rate of another clock than the row's would refuse times that are possible, or let impossible ones pass."""
    for spec in SPECS.values():
        per_clock = spec.peak_tflops["fp16"] * 1e12 / (spec.sms * spec.boost_sm_clock_mhz * 1e6)
        most = FP16_FLOPS_PER_SM_AND_CLOCK[spec.arch]
        low = 0.49 if spec.name == "A10G" else 0.99  # the only model sold at half of what its SMs could do
        assert low * most <= per_clock <= 1.01 * most, (spec.name, per_clock)


def test_clocks_and_rates_are_of_the_order_that_hardware_has():
    """A slip of a factor of 1000 in a row of the table would make any time possible, or none."""
    for spec in SPECS.values():
        assert 0.1e12 < spec.bandwidth_bytes_per_s < 20e12, spec.name
        assert 1000 < spec.boost_sm_clock_mhz <= spec.max_sm_clock_mhz < 4000, spec.name
        assert set(spec.peak_tflops) == {"fp16", "bf16", "tf32", "fp32"}, spec.name
        # Two operations a lane and clock, 64 or 128 lanes an SM, at the boost clock of the datasheet.
        lanes = spec.peak_tflops["fp32"] * 1e12 / (2 * spec.sms * spec.boost_sm_clock_mhz * 1e6)
        assert 60 <= lanes <= 148, (spec.name, lanes)
