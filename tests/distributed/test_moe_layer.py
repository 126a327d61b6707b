"""A layer over a mesh computes, learns, saves and loads as on one process."""

from __future__ import annotations

from pathlib import Path

from .ranks import run_ranks


def test_a_layer_over_a_mesh_learns_as_one_process_does_under_fsdp2_too(tmp_path: Path) -> None:
    of_ranks = run_ranks("tests.distributed.moe_layer_cases", "all_cases", 4, tmp_path)
    router, *others = (found.pop("router") for found in of_ranks)
    assert any(router)
    assert all(other == router for other in others)
    for rank, found in enumerate(of_ranks):
        assert found.pop("message") == "rank 0: experts must be a multiple of the 2 ranks of ep_mesh, got 7"
        assert found.pop("compiled")
        shared = {"same": True, "other capacity": False, "kept": True, "kept by some ranks": False}
        assert found.pop("shared") == shared
        assert len(found) == 6
        for case, errors in found.items():
            assert max(errors.values()) < 1e-5, f"rank {rank}, {case}: {errors}"
            assert len(errors) > 10
