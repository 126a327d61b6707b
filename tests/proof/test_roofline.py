"""No time below the hardware's limits is believed, and no possible time is called impossible."""

from __future__ import annotations

import numpy as np
import pytest

from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.proof.judge.roofline import fewest_seconds, has_limits, known_spec, roofline_of
from flashmoe_science.proof.records.evidence import Gpu, Work

from .builders import H200, build_case

H200_SPEC = find_gpu("H200")


def _case(*, flops=0.0, size=0.0, peak="fp16", sets=1, set_bytes=0):
    case = build_case("case", np.random.default_rng(0))
    work = Work(flops=flops, bytes=size, tokens=1, peak=peak)
    return case.model_copy(update={"work": work, "input_sets": sets, "input_set_bytes": set_bytes})


def test_operations_take_their_time_at_the_highest_clock():
    flops = H200_SPEC.peak_tflops["fp16"] * 1e12  # of one second at the boost clock
    expected = H200_SPEC.boost_sm_clock_mhz / H200_SPEC.max_sm_clock_mhz
    assert fewest_seconds(_case(flops=flops), "graph", H200, "cold") == pytest.approx(expected)
    faster = H200.model_copy(update={"max_sm_clock_mhz": 2 * H200_SPEC.max_sm_clock_mhz})
    assert fewest_seconds(_case(flops=flops), "graph", faster, "cold") == pytest.approx(expected / 2)


def _bound(case, kind="kernel", cache="cold"):
    found = fewest_seconds(case, kind, H200, cache)
    assert found is not None
    return found


def test_a_slower_peak_allows_more_time_and_an_unknown_one_counts_as_the_highest():
    fp32, fp16, unknown = (_bound(_case(flops=1e15, peak=peak)) for peak in ("fp32", "fp16", ""))
    assert fp32 == pytest.approx(fp16 * H200_SPEC.peak_tflops["fp16"] / H200_SPEC.peak_tflops["fp32"])
    assert unknown == pytest.approx(fp16)


def test_with_a_flushed_cache_every_input_byte_comes_from_memory():
    case = _case(size=40e6, sets=10, set_bytes=30_000_000)  # 30 MB in, 10 MB out
    assert fewest_seconds(case, "kernel", H200, "cold") == pytest.approx(30e6 / H200_SPEC.bandwidth_bytes_per_s)


def test_rotating_inputs_may_stay_in_l2_as_far_as_they_fit():
    inputs = H200.l2_bytes // 50
    twice = _case(size=2e6, sets=100, set_bytes=inputs)
    for kind, cache in (("graph", "cold"), ("wall", "cold"), ("kernel", "rotating")):
        assert _bound(twice, kind, cache) == pytest.approx(inputs / 2 / H200_SPEC.bandwidth_bytes_per_s)
    assert fewest_seconds(_case(size=1e6, sets=4, set_bytes=1_000_000), "graph", H200, "cold") == 0


def _card(name, arch, sms, clock=1755):
    return Gpu(name=name, arch=arch, sms=sms, l2_bytes=1, memory_bytes=1, max_sm_clock_mhz=clock)


@pytest.mark.parametrize(
    ("name", "arch", "sms", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, 108, "A100"),
        ("NVIDIA A100-PCIE-40GB", 80, 108, "A100"),
        ("NVIDIA H100 PCIe", 90, 114, "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090 D", 89, 114, None),  # no RTX 4090
        ("NVIDIA L40S", 89, 142, None),
    ],
)
def test_a_card_is_known_by_its_name_and_its_number_of_sms(name, arch, sms, model):
    spec = known_spec(_card(name, arch, sms))
    assert (spec and spec.name) == model


def test_a_card_that_is_not_in_the_table_is_bound_by_its_sms_and_clock_alone():
    card = _card("NVIDIA L40S", 89, 142, clock=2520)
    seconds = fewest_seconds(_case(flops=366e12, size=1e12), "graph", card, "cold")
    assert has_limits(card)
    assert seconds == pytest.approx(1.0, rel=0.01)  # 362 TFLOPS in its datasheet; of its memory nothing is known
    assert fewest_seconds(_case(flops=366e12, peak="fp8"), "graph", card, "cold") is None


@pytest.mark.parametrize(("arch", "clock"), [(90, None), (103, 1755), (75, 1755)])
def test_a_card_of_which_nothing_is_known_has_no_bound(arch, clock):
    card = _card("NVIDIA Unknown", arch, 132, clock)
    assert known_spec(card) is None
    assert not has_limits(card)
    assert fewest_seconds(_case(flops=1e15), "graph", card, "cold") is None


def test_the_roofline_of_the_datasheet():
    work = Work(flops=989e12, bytes=4.8e12, tokens=1, peak="bf16")
    line = roofline_of(work, H200)
    assert line is not None
    assert line.seconds(work) == pytest.approx(1.0)
    assert line.knee == pytest.approx(989 / 4.8)
    assert line.flops_at(line.knee / 2) == pytest.approx(989e12 / 2)
    assert line.flops_at(line.knee * 2) == pytest.approx(989e12)


def test_a_model_that_is_not_in_the_table_has_no_roofline():
    assert roofline_of(Work(flops=1.0, bytes=1.0, tokens=1), H200.model_copy(update={"name": "NVIDIA X1"})) is None
