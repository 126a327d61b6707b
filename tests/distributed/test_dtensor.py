"""DTensors, sharded in any way, give what whole tensors give, gradients too."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ranks import run_ranks


@pytest.mark.parametrize(("function", "cases"), [("all_cases", 31), ("without_lse", 2)])
def test_dtensors_give_what_whole_tensors_give(function: str, cases: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks("tests.distributed.dtensor_cases", function, 2, tmp_path)):
        assert len(found) == cases
        for case, errors in found.items():
            assert max(errors.values()) < 1e-5, f"rank {rank}, {case}: {errors}"


def test_calls_without_a_sharding_refuse_dtensors(tmp_path: Path) -> None:
    found = run_ranks("tests.distributed.dtensor_cases", "refusals", 2, tmp_path)[0]
    assert {name: text.split("\n")[0] for name, text in found.items()} == {
        "experts": "fused_moe does not take DTensors",
        "cache": "attention over a cache does not take DTensors",
        "pages": "attention over pages does not take DTensors",
    }
