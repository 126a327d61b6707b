"""A model of transformers trains on sequences that are split over ranks as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ranks import run_ranks


def test_a_model_trains_on_split_sequences_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for rank, found in enumerate(run_ranks("tests.distributed.transformers_cases", "all_cases", 2, tmp_path)):
        assert len(found["cases"]) == 8
        for case, errors in found["cases"].items():
            assert max(errors.values()) < 1e-5, f"rank {rank}, {case}: {errors}"
        assert found["messages"] == {
            "padding": "a mask is not served where sequences are split over ranks",
            "no plan": "rank 0: position_ids must be those of rank 0, 3 at its token 3, got 0",
            "lengths": "cu_seq_lens_q is not served where sequences are split over ranks",
        }
        assert found["losses"]["split"] == pytest.approx(found["losses"]["whole"], rel=1e-5)
        # Both ranks raise, though rank 0 looks right by "heads".
        start = "position_ids must be those of rank"
        assert found["positions"] == {
            "heads, packed False": f"rank 1: {start} 1, 32 at its token 0, got 0",
            "heads, packed True": f"rank 0: {start} 0, 0 at its token 17, got 17",
            "heads, padding": "",
            "gather, packed False": f"rank 0: {start} 0, 48 at its token 16, got 16",
            "gather, packed True": f"rank 0: {start} 0, 0 at its token 4, got 4",
            "gather, padding": "",
        }
        assert found["comparisons"] == 1
