"""DTensors, sharded in any way, give what whole tensors give, gradients too; calls without a sharding refuse them."""

from __future__ import annotations

from pathlib import Path

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
