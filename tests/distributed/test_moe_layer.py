"""A layer over a mesh computes, learns, saves and loads as on one process."""

from __future__ import annotations

from pathlib import Path

from .ranks import run_ranks


def test_a_layer_over_a_mesh_learns_as_one_process_does_under_fsdp2_too(tmp_path: Path) -> None:
    of_ranks = run_ranks("tests.distributed.moe_layer_cases", "all_cases", 4, tmp_path)
    router, *others = (found.pop("router") for found in of_ranks)
    assert any(router)
    assert all(other == router for other in others)
    drawn = [found.pop("drawn under FSDP2") for found in of_ranks]
    assert all(each["router"] == drawn[0]["router"] for each in drawn)
    assert drawn[0]["replica"] == drawn[1]["replica"] != drawn[2]["replica"]  # dp 0, twice, and dp 1
    assert len(set(drawn[0]["experts"])) == 8
    for rank, found in enumerate(of_ranks):
        for name, error in found.pop("unlike").items():
            assert error.startswith(("all ranks must make the same call, but rank 0 has a layer of", "rank 1: ")), name
        assert "autocast None" in (error := found.pop("autocast"))
        assert "autocast torch.bfloat16" in error
        assert found.pop("message") == "rank 0: experts must be a multiple of the 2 ranks of ep_mesh, got 7"
        assert found.pop("compiled")
        shared = {"same": True, "other capacity": False, "kept": True, "kept by some ranks": False}
        assert found.pop("shared") == shared
        assert len(found) == 6
        for case, errors in found.items():
            assert max(errors.values()) < 1e-5, f"rank {rank}, {case}: {errors}"
            assert len(errors) > 10
