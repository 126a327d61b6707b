"""Expert parallel layers give what one process gives, gradients too; errors name the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flashmoe_science.distributed import ExpertParallel

from .ranks import fake_ranks, run_ranks

_MODULE = "tests.distributed.expert_parallel_cases"


def check_capacities(found: list[dict[str, Any]], missing: int) -> None:
    for each in found:
        assert each["capacities"]["error"] < 1e-5
        assert (
            f"rank {len(found) - 1} had {missing} tokens more for the experts of one rank"
            in each["capacities"]["message"]
        )
        assert each["capacities"]["nan"] == [True] * 5  # the output, and gradients of x, w_gate_up, w_down, weights
        assert each["capacities"]["buffer"]
        assert each["capacities"]["again"]
        assert each["unusual rows"] == {"0": True, "4": True}


def check_cases(found: list[dict[str, dict[str, float]]], most: float) -> None:
    for rank, cases in enumerate(found):
        assert len(cases) > 10
        for case, errors in cases.items():
            assert max(errors.values()) < most, f"rank {rank}, {case}: {errors}"


def test_two_ranks_give_what_one_process_gives_and_errors_name_the_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_MODULE, "with_errors", 2, tmp_path)
    check_cases([first["cases"], second["cases"]], 1e-5)
    check_capacities([first, second], 4)
    for found in (first["without tokens"], second["without tokens"]):
        for strategy in ("gather", "once"):
            assert found[strategy] == [[[0, 16], [0, 16], [4, 24, 16], [4, 16, 12], [0, 1]], True], strategy
    errors = first["errors"]
    assert errors == second["errors"]
    expected = {
        "tokens": "all ranks must make the same call",
        "rows": "rank 1: topk_weights must have shape [T, K] = [4, 2], got [3, 2]",
        "kind": "rank 1: topk_ids must be a torch.Tensor, got list",
        "capacity of one rank": "rank 1 has strategy once, capacity 0.5, autocast None: x [4, 16]",
        "strategy of one rank": "rank 0 has strategy gather, capacity 1.0, autocast None: x [4, 16]",
        "activation": "activation must be",
        "experts": "the number of experts must be a multiple of the 2 ranks, got 3",
        "strategy": 'strategy must be "gather", "once" or "auto", got \'pairs\'',
        "capacity": "capacity must be above 0 and at most 1, got 0.0",
        "mesh": "mesh must have one dimension, got 2",
    }
    for name, text in expected.items():
        assert text in errors[name], name
    wrong = {
        "x": "x must be a torch.Tensor, got NoneType",
        "w_down": "w_down must be a torch.Tensor, got NoneType",
        "topk_ids": "topk_ids must be a torch.Tensor, got NoneType",
        "axes of x": "x must have 2 dimensions [T, HID], got shape [4, 4, 16]",
        "axes of topk_ids": "topk_ids must have 2 dimensions [T, K], got shape [4]",
        "columns": "x must have the HID of the weights, 16, got shape [T, HID] = [4, 8]",
        "bias": "bias_down must have shape [E, HID] = [4, 16], got [16]",
        "activation": "activation must be one of",
    }
    for name, text in wrong.items():
        assert errors["wrong on rank 0"][name].startswith(f"rank 0: {text}"), name
    assert errors["forward-mode tangent"].startswith("rank 0: x has a forward-mode tangent")
    assert "weights must be a tensor [E, ...], got [1, 2]" in errors["list"]
    assert errors["copied"]
    assert errors["made in inference mode"] == errors["one token of one rank"] == 0
    assert errors["after all"] == 0


@pytest.mark.exhaustive
def test_four_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    found = run_ranks(_MODULE, "with_capacities", 4, tmp_path)
    check_cases([each["cases"] for each in found], 1e-5)
    check_capacities(found, 4)


@pytest.mark.parametrize(
    ("ranks", "capacity", "strategy"), [(8, 0.5, "gather"), (16, 1.0, "gather"), (16, 0.5, "once")]
)
def test_tokens_go_once_where_many_ranks_have_less_room(ranks: int, capacity: float, strategy: str) -> None:
    with fake_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        assert ExpertParallel(mesh, capacity=capacity).strategy == strategy


@pytest.mark.gpu
def test_experts_give_what_one_gpu_gives(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_cases(run_ranks(_MODULE, "gpu_cases", 2, tmp_path, backend="cuda:nccl", timeout=400), 0.02)
