"""Ranks of which one is killed in the middle of a call, or of its gradients."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashmoe_science.distributed import ContextParallel, ExpertParallel, calls, expert_parallel
from flashmoe_science.distributed.transport import SymmetricMemory
from flashmoe_science.errors import RankLostError

KILLED = 2


def _die(*_arguments: Any, **_options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(rank: int, ranks: int, what: str, function: Any) -> dict[str, Any]:
    """Attend or run experts; rank ``KILLED`` dies where it would call ``what``, and the others say what they see."""
    begun = time.monotonic()
    if rank == KILLED:
        setattr(function, what, _die)
    cp = ContextParallel(init_device_mesh("cpu", (ranks,)), strategy="heads")
    q = torch.ones(1, ranks, 8, 16, requires_grad=True)
    message = "no error"
    try:
        cp.attention(q, q, q, causal=True).sum().backward()
    except RankLostError as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - begun, "gradient": q.grad is not None}


def in_forward(rank: int, ranks: int) -> dict[str, Any]:
    return _run(rank, ranks, "attend", calls)


def in_backward(rank: int, ranks: int) -> dict[str, Any]:
    return _run(rank, ranks, "gradients_of", calls)


def in_experts(rank: int, ranks: int) -> dict[str, Any]:
    begun = time.monotonic()
    if rank == KILLED:
        setattr(expert_parallel, "fused_moe", _die)  # noqa: B010 - it is no public name of that module
    ep = ExpertParallel(init_device_mesh("cpu", (ranks,)), strategy="once")
    x = torch.ones(4, 16, requires_grad=True)
    message = "no error"
    try:
        ids = torch.zeros(4, 1, dtype=torch.int32)
        ep.fused_moe(x, torch.ones(1, 24, 16), torch.ones(1, 16, 12), torch.ones(4, 1), ids).sum().backward()
    except RankLostError as error:
        message = str(error)
    return {"message": message, "seconds": time.monotonic() - begun, "gradient": x.grad is not None}


_outliving: list[Any] = []  # torch ends a process that frees symmetric memory after an error of its GPU


def in_symmetric_memory(rank: int, ranks: int) -> dict[str, Any]:
    """The last rank does not come to the second exchange of GPUs."""
    device = torch.device("cuda", rank)
    transport = SymmetricMemory(dist.new_group(timeout=timedelta(seconds=5)))
    _outliving.append(transport)
    x = torch.full((2, 3), float(rank), device=device)
    (found,) = transport.gather([x])
    assert found[:, 0].tolist() == [float(each) for each in range(ranks) for _ in range(2)]
    message, begun = "no error", time.monotonic()
    if rank != ranks - 1:
        try:
            transport.gather([x])
            torch.cuda.synchronize()
        except RuntimeError as error:
            message = str(error).splitlines()[0]
    dist.distributed_c10d._get_default_store().add("gave up", 1)
    while dist.distributed_c10d._get_default_store().add("gave up", 0) < ranks:
        time.sleep(0.1)
    return {"message": message, "seconds": time.monotonic() - begun}
