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
            "no plan": "position_ids restart: packed documents need a plan",
            "lengths": "cu_seq_lens_q is not served where sequences are split over ranks",
        }
