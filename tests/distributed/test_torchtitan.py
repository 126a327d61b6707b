"""torchtitan splits heads over ranks around our attention."""

from __future__ import annotations

from pathlib import Path

from ..required import import_needed
from .ranks import run_ranks


def test_a_model_with_split_heads_is_equal_to_sdpa_on_one_process(tmp_path: Path) -> None:
    import_needed("torchtitan", "torchtitan", "needs torchtitan: pip install torchtitan")
    for rank, errors in enumerate(run_ranks("tests.distributed.torchtitan_cases", "split_heads", 2, tmp_path)):
        assert len(errors) == 18
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"
