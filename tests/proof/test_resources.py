"""Tests of memory against the baselines, and of the kernels that arms launched."""

from __future__ import annotations

from flashmoe_science.proof.evidence import Launch
from flashmoe_science.proof.resources import launch_groups, memory_rows

from .builders import build_record
from .test_report import with_arm


def test_memory_is_the_subjects_bytes_over_each_baselines():
    record = build_record(speedups=[2.0], baselines={"sdpa": 1.0, "fa3": 1.0})
    record = with_arm(record, 0, "flash_attention", peak_bytes=512)
    record = with_arm(record, 0, "sdpa", peak_bytes=2048)
    record = with_arm(record, 0, "fa3", peak_bytes=0)
    (row,) = memory_rows(record)
    assert (row.share("sdpa"), row.share("fa3")) == (0.25, None)


def test_a_kernel_stands_once_with_the_grids_of_its_cases():
    record = build_record(speedups=[2.0, 2.0, 2.0])
    kernel = record.cases[0].arms[0].launches[0]
    record = with_arm(record, 1, "flash_attention", launches=[kernel.model_copy(update={"grid": (7, 1, 1)})])
    record = with_arm(record, 2, "flash_attention", launches=[kernel.model_copy(update={"registers": 255})])
    ours = [group for group in launch_groups(record) if group.arm.name == "flash_attention"]
    assert [group.grids for group in ours] == [{"case0": (16, 1, 1), "case1": (7, 1, 1)}, {"case2": (16, 1, 1)}]
    assert [group.arm.role for group in launch_groups(record)] == ["subject", "subject", "baseline"]


def test_two_launches_of_one_call_stay_two():
    record = build_record(speedups=[2.0])
    kernel = Launch(name="k", grid=(1, 1, 1), block=(32, 1, 1), registers=8, shared_memory_bytes=0)
    record = with_arm(record, 0, "flash_attention", launches=[kernel, kernel])
    assert [g.launch.name for g in launch_groups(record) if g.arm.role == "subject"] == ["k", "k"]
