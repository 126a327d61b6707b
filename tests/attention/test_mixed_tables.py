"""Kernels of mixed batches compile for their architectures without spills, and multiply on the matrix units."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.mixed.plan import mixed_plan, most_splits
from flashmoe_science.attention.mixed.prepare import prepare_mixed
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import MixedConfig
from flashmoe_science.gpu.compile import read_resources
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but

pytestmark = pytest.mark.triton

GPUS = {80: "A100", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "features": {"window": (1000, -1), "softcap": 30.0, "sinks": "bf16", "return_lse": True},
    "invariant": {"batch_invariant": True},
    "splits": {"num_splits": 4, "seqused": "qk"},
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A call whose kernels are compiled."""

    arch: int
    columns: int
    page_size: int
    features: str

    def __str__(self) -> str:
        return f"sm_{self.arch}-d{self.columns}-page{self.page_size}-{self.features}"

    def problem(self, group: int = 4) -> AttentionProblem:
        heads_kv, dim, page = 2, self.columns, self.page_size
        row, features = heads_kv * dim, FEATURES[self.features]
        sizes: dict[str, Any] = {"seqused": "k", **features}
        return AttentionProblem(
            batch=9, heads=group * heads_kv, heads_kv=heads_kv, seqlen_q=512, seqlen_k=8192, head_dim=dim,
            head_dim_v=dim, dtype="bf16", causal=True, packed=True, page_size=page, table_stride=512,
            q_strides=(0, dim, group * row, 1), k_strides=(page * row, dim, row, 1),
            v_strides=(page * row, dim, row, 1), **sizes,
        )  # fmt: skip


def test_the_most_shares_of_few_rows_and_of_many_are_those_of_their_tiles():
    problem = Compiled(90, 64, 16, "plain").problem()
    config = mixed_plan(problem, SPECS["H200"], "").config
    assert isinstance(config, MixedConfig)
    assert (config.few.block_n, config.many.block_n) == (64, 128)
    assert most_splits(problem, config) == (8192 // 64 // 2, 8192 // 128 // 8)  # of 2 and of 8 steps at least


PORTABLE = [
    Compiled(arch, columns, 16, features)
    for arch in GPUS
    for columns in (64, 128, 256)
    for features in ("plain", "features")
]
PORTABLE += [Compiled(90, 128, 64, features) for features in ("invariant", "splits")]


@pytest.mark.parametrize("case", all_but(PORTABLE, "sm_80-d128-page16-plain", "sm_90-d64-page16-features"), ids=str)
def test_portable_kernels_compile(case):
    gpu = SPECS[GPUS[case.arch]]
    names = set()
    for kernel in prepare_mixed(mixed_plan(case.problem(), gpu, "a test asked"), gpu.sms, 700):
        found = read_resources(kernel.source, gpu.arch)
        assert found.spill_bytes == 0, kernel.source.name
        names.add(kernel.source.name)
        if kernel.source.name == "_mixed_kernel":
            assert any("MMA" in name for name in found.instructions)
    assert {"_plan_work_kernel", "_mixed_kernel", "_merge_mixed_kernel"} == names
