"""Expert parallel layers give what one process gives, gradients too; errors name the rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .ranks import run_ranks

_MODULE = "tests.distributed.expert_parallel_cases"


def check_cases(found: list[dict[str, dict[str, float]]], most: float) -> None:
    for rank, cases in enumerate(found):
        assert len(cases) > 10
        for case, errors in cases.items():
            assert max(errors.values()) < most, f"rank {rank}, {case}: {errors}"


def test_two_ranks_give_what_one_process_gives_and_errors_name_the_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_MODULE, "with_errors", 2, tmp_path)
    check_cases([first["cases"], second["cases"]], 1e-5)
    errors = first["errors"]
    assert errors == second["errors"]
    expected = {
        "tokens": "all ranks must make the same call",
        "rows": "rank 1: topk_weights and topk_ids must have a row for each token of x",
        "kind": "rank 1: topk_ids must be a torch.Tensor, got list",
        "activation": "activation must be",
        "experts": "the number of experts must be a multiple of the 2 ranks, got 3",
        "mesh": "mesh must have one dimension, got 2",
    }
    for name, text in expected.items():
        assert text in errors[name], name
    assert errors["after all"] == 0


@pytest.mark.exhaustive
def test_four_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    check_cases(run_ranks(_MODULE, "all_cases", 4, tmp_path), 1e-5)


@pytest.mark.gpu
def test_experts_give_what_one_gpu_gives(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_cases(run_ranks(_MODULE, "gpu_cases", 2, tmp_path, backend="cuda:nccl", timeout=400), 0.02)
