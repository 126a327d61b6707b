"""A rank that is killed ends the others, with its number and a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_science.distributed import faults
from flashmoe_science.errors import RankLostError

from ..exhaustive import all_but
from .fault_cases import KILLED
from .ranks import run_ranks

_TIMEOUT = 60  # seconds, of the process group


@pytest.mark.parametrize("function", all_but(["in_forward", "in_backward", "in_experts"], "in_backward"))
def test_a_killed_rank_ends_the_others_and_is_named(function: str, tmp_path: Path) -> None:
    found = run_ranks("tests.distributed.fault_cases", function, 4, tmp_path, killed=KILLED)
    alive = [rank for rank in range(4) if rank != KILLED]
    assert len(found) == 3
    for rank, each in zip(alive, found, strict=True):
        expected = rf"all-to-all failed on rank {rank}: no answer within 10 s from rank {KILLED}\. torch said: .+"
        assert re.match(expected, each["message"]), each["message"]
        assert each["seconds"] < _TIMEOUT
        assert not each["gradient"]


@pytest.mark.gpu
def test_gpus_wait_for_a_rank_as_long_as_their_group(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = run_ranks("tests.distributed.fault_cases", "in_symmetric_memory", 2, tmp_path, backend="cuda:nccl")
    assert found[0]["message"].startswith("CUDA error"), found
    assert 5 <= found[0]["seconds"] < 30, found


class _Group:
    group_name = "0"


def _answer(store: Any, ranks: set[int]) -> None:
    for rank in ranks:
        store.add(f"flashmoe_science/faults/0/{rank}", 1)


@pytest.mark.parametrize(
    ("answers", "text"),
    [({1, 3}, "from rank 2"), ({3}, "from rank 1, 2"), ({1, 2, 3}, "all ranks are")],
)
def test_the_ranks_that_are_silent_are_named_at_every_fault(monkeypatch: Any, answers: set[int], text: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined] # is public at run time
    monkeypatch.setattr(faults, "SECONDS_TO_ANSWER", 0.0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 1, 2, 3])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    _answer(store, {1, 2, 3})
    with pytest.raises(RankLostError, match="all ranks are"), faults.collective(_Group(), "all-gather"):  # type: ignore[arg-type] # has what is read
        raise dist.DistBackendError("NCCL error")
    _answer(store, answers)
    with pytest.raises(RankLostError, match=text), faults.collective(_Group(), "all-gather"):  # type: ignore[arg-type] # has what is read
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, NotImplementedError, RankLostError])
def test_errors_that_are_not_of_the_group_stay_what_they_are(error: type[RuntimeError]) -> None:
    with pytest.raises(error, match="no memory"), faults.collective(_Group(), "all-gather"):  # type: ignore[arg-type] # is not read
        raise error("no memory")
