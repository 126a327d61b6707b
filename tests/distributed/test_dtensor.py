"""DTensors, sharded in any way, give what whole tensors give, gradients too; calls without a sharding refuse them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flashmoe_science.attention import dtensor

from .ranks import run_ranks


def test_dtensors_give_what_whole_tensors_give_or_are_refused(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks("tests.distributed.dtensor_cases", "everything", 2, tmp_path)):
        assert len(found["cases"]) == 33
        for case, errors in found["cases"].items():
            assert max(errors.values()) < 1e-5, f"rank {rank}, {case}: {errors}"
        assert {name: text.split("\n")[0] for name, text in found["refusals"].items()} == {
            "experts": "x is a DTensor, and nothing says how a call is split over its mesh",
            "cache": "q is a DTensor, and nothing says how a call is split over its mesh",
            "pages": "q is a DTensor, and nothing says how a call is split over its mesh",
        }


@pytest.mark.parametrize(
    ("sizes", "heads_kv", "by_heads"),
    [((2,), 6, True), ((4,), 6, False), ((2, 3), 6, True), ((2, 2), 6, False), ((2, 2), 2, True), ((2, 2), 8, True)],
)
def test_each_rank_has_whole_groups_over_any_dimensions_of_a_mesh(
    sizes: tuple[int, ...], heads_kv: int, by_heads: bool
) -> None:
    mesh = SimpleNamespace(ndim=len(sizes), size=lambda dim: sizes[dim])
    given = {"q": SimpleNamespace(mesh=mesh), "k": SimpleNamespace(shape=(1, heads_kv, 8, 8))}
    assert ("heads" in dtensor._axes(given)) is by_heads
