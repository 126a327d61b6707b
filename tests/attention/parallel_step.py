"""Child process: one rank's step of training under DDP or FSDP2; answers ``right`` if its gradients are those of all.

``python -m tests.attention.parallel_step HOW MODEL DEVICE RANK RANKS STORE``, where MODEL is a name of ``MODELS`` and
STORE a file that the ranks meet at.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashmoe_science import explain_gradients, flash_attention
from flashmoe_science.operators.attention import OPERATOR

HEADS, HEADS_KV = 4, 2


@dataclass(frozen=True)
class Model:
    """What the layers are made of."""

    dim: int
    length: int
    dtype: torch.dtype
    has_sinks: bool
    on_hopper: str  # the kernel that makes the gradients of attention on a Hopper GPU


MODELS = {
    "fp32": Model(16, 40, torch.float32, has_sinks=True, on_hopper="backward_triton"),
    "bf16-64": Model(64, 300, torch.bfloat16, has_sinks=False, on_hopper="backward_gluon_sm90"),
    "bf16-128": Model(128, 300, torch.bfloat16, has_sinks=False, on_hopper="backward_gluon_sm90"),
}


class Layer(nn.Module):
    """Attention with grouped heads, and sinks that are learned; ``kernel`` makes its gradients."""

    def __init__(self, made_of: Model) -> None:
        super().__init__()
        self.made_of, width = made_of, HEADS * made_of.dim
        self.qkv = nn.Linear(width, (HEADS + 2 * HEADS_KV) * made_of.dim)
        self.out = nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if made_of.has_sinks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.made_of.dim)).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1)
        self.kernel = explain_gradients(q, k, v, causal=True, sinks=self.sinks).kernel
        o = flash_attention(q, k, v, causal=True, sinks=self.sinks)
        found: torch.Tensor = self.out(o.transpose(1, 2).flatten(2))
        return x + found


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Differentiate a mean over sequences, which is the mean of the ranks' own means."""
    model(x).float().square().mean().backward()


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient with all of its shards."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(how: str, name: str, device: str, rank: int, ranks: int) -> None:
    """Compare the gradients of this rank's share of the sequences, as they come out of ``how``, with those of all.

    In 16 bits what one process makes is no measure to the last bit: both are held to fp32, by the rule for kernels.
    """
    torch.manual_seed(0)
    made_of = MODELS[name]
    exact = nn.Sequential(Layer(made_of), Layer(made_of)).to(device, made_of.dtype).float()
    model = copy.deepcopy(exact).to(made_of.dtype)
    x = torch.randn(2 * ranks, made_of.length, HEADS * made_of.dim).to(device, made_of.dtype)
    alone = copy.deepcopy(model)
    step(alone, x)
    step(exact, x.float())
    spread: Any
    if how == "ddp":
        spread = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        spread = fully_shard(model)
    step(spread, x[2 * rank : 2 * rank + 2])
    if device == "cpu":
        assert {layer.kernel for layer in model} == {"reference"}
    elif torch.cuda.get_device_capability() == (9, 0):
        assert {layer.kernel for layer in model} == {made_of.on_hopper}
    for mine, one, best in zip(spread.parameters(), alone.parameters(), exact.parameters(), strict=True):
        assert isinstance(mine, DTensor) == (how == "fsdp2")
        found = whole(mine.grad)
        assert found.dtype == made_of.dtype
        assert one.grad is not None
        assert best.grad is not None
        if made_of.dtype == torch.float32:
            torch.testing.assert_close(found, one.grad)
            continue
        budget = OPERATOR.error_budget(best.grad.double(), one.grad)
        # Each rank rounds its own gradients, by half of eps at the most, and their mean is rounded again.
        budget += torch.finfo(found.dtype).eps * best.grad.abs().max().item()
        error = (found.double() - best.grad).abs().max().item()
        assert error <= budget, f"error {error:.2e} of a gradient {tuple(found.shape)} is above {budget:.2e}"


def main() -> None:
    """Meet the other ranks and check."""
    how, name, device, rank, ranks, store = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    try:
        check(how, name, device, int(rank), int(ranks))
    finally:
        dist.destroy_process_group()
    print("right", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's threads may abort a process that shuts down under them: see tests/distributed/ranks.py
