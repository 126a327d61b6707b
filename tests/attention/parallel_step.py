"""Child process: one rank's step of training under DDP or FSDP2; answers ``right`` if its gradients are those of all.

``python -m tests.attention.parallel_step HOW DEVICE RANK RANKS STORE``, where STORE is a file that the ranks meet at.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashmoe_science import flash_attention

HEADS, HEADS_KV, DIM, LENGTH = 4, 2, 16, 40
WIDTH = HEADS * DIM


class Layer(nn.Module):
    """Attention with grouped heads and sinks that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1)
        o = flash_attention(q, k, v, causal=True, sinks=self.sinks)
        found: torch.Tensor = self.out(o.transpose(1, 2).flatten(2))
        return x + found


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Differentiate a mean over sequences, which is the mean of the ranks' own means."""
    model(x).square().mean().backward()


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient with all of its shards."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(how: str, device: str, rank: int, ranks: int) -> None:
    """Compare the gradients of this rank's share of the sequences, as they come out of ``how``, with those of all."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).to(device)
    x = torch.randn(2 * ranks, LENGTH, WIDTH, device=device)
    alone = copy.deepcopy(model)
    step(alone, x)
    spread: Any
    if how == "ddp":
        spread = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        spread = fully_shard(model)
    step(spread, x[2 * rank : 2 * rank + 2])
    for mine, expected in zip(spread.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor) == (how == "fsdp2")
        torch.testing.assert_close(whole(mine.grad), expected.grad)


def main() -> None:
    """Meet the other ranks and check."""
    how, device, rank, ranks, store = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    try:
        check(how, device, int(rank), int(ranks))
    finally:
        dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
