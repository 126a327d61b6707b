"""Calls of DTensors, sharded in every way, beside the same calls of whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flashmoe_science import (
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
    fused_moe,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "window and softcap": {"window": (5, 2), "softcap": 2.0},
    "sinks": {"causal": True, "sinks": (4,)},
    "alibi of sequences": {"alibi": (2, 4)},
    "bias of all": {"bias": (1, 1, 16, 16)},
    "bias of heads": {"bias": (1, 4, 16, 16)},
    "bias of sequences": {"bias": (2, 1, 16, 16)},
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def local_of(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def run(tensors: dict[str, Tensor], packed: Tensor | None, options: dict[str, Any]) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_(name != "alibi") for name, x in tensors.items()}
    if packed is None:
        o, lse = flash_attention(**leaves, **options, return_lse=True)  # type: ignore[call-overload] # options of types that vary
    else:
        o, lse = flash_attention_varlen(  # type: ignore[call-overload]
            **leaves,
            cu_seqlens_q=packed,
            cu_seqlens_k=packed,
            max_seqlen_q=16,
            max_seqlen_k=16,
            **options,
            return_lse=True,
        )
    (o.square().sum() + lse.sin().sum()).backward()
    gradients = {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"o": o.detach(), "lse": lse.detach(), **gradients}


def sharded(tensors: dict[str, Tensor], mesh: DeviceMesh, placement: Any, by: str) -> dict[str, Tensor]:
    """Shard q, k and v; what heads have is sharded with them, else replicated."""
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        like = name in ("q", "k", "v")
        own = Shard(0) if name == "sinks" and by == "heads" else Replicate()
        found[name] = distribute_tensor(x, mesh, [placement if like else own])
    return found


def all_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for name, given in OPTIONS.items():
        options = {key: value for key, value in given.items() if key in ("causal", "window", "softcap")}
        tensors = {"q": draw(0, 2, 4, 16, 8), "k": draw(1, 2, 2, 16, 8), "v": draw(2, 2, 2, 16, 8)}
        tensors |= {key: draw(3, *value) for key, value in given.items() if key in ("sinks", "alibi", "bias")}
        whole = run(tensors, None, options)
        for by, placement in (("batch", Shard(0)), ("heads", Shard(1)), ("tokens", Shard(2)), ("none", Replicate())):
            mine = run(sharded(tensors, mesh, placement, by), None, options)
            found[f"{name} by {by}"] = errors(mine, whole)
            if by in ("batch", "heads"):
                found[f"{name} by {by}"]["stays"] = float(list(mine["o"].placements) != [placement])  # type: ignore[attr-defined] # a DTensor
    starts = torch.tensor([0, 3, 16], dtype=torch.int32)
    tensors = {"q": draw(0, 16, 4, 8), "k": draw(1, 16, 2, 8), "v": draw(2, 16, 2, 8), "sinks": draw(3, 4)}
    whole = run(tensors, starts, {"causal": True})
    for by, placement in (("heads", Shard(1)), ("tokens", Shard(0)), ("none", Replicate())):
        mine = run(sharded(tensors, mesh, placement, by), distribute_tensor(starts, mesh), {"causal": True})
        found[f"packed by {by}"] = errors(mine, whole)
    return found


def errors(mine: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, float]:
    assert mine.keys() == whole.keys()
    assert not any(placement == Partial() for placement in mine["o"].placements)  # type: ignore[attr-defined] # a DTensor
    return {name: float((local_of(x) - whole[name]).abs().max()) for name, x in mine.items()}


def without_lse(rank: int, ranks: int) -> dict[str, Any]:
    """The same inputs with and without the LSE, gradients and dropout, in turn: torch remembers strategies."""
    mesh = init_device_mesh("cpu", (ranks,))
    q = draw(0, 2, 4, 16, 8)
    shard = distribute_tensor(q, mesh, [Shard(1)])
    seed = torch.tensor([1, 2])
    o, lse = flash_attention(q, q, q, softcap=1.0, return_lse=True)
    dropped = flash_attention(q, q, q, dropout_p=0.5, dropout_seed=seed)
    found: dict[str, Any] = {}
    for turn in range(2):
        one = flash_attention(shard, shard, shard, softcap=1.0)
        both = flash_attention(shard, shard, shard, softcap=1.0, return_lse=True)
        other = flash_attention(shard, shard, shard, dropout_p=0.5, dropout_seed=distribute_tensor(seed, mesh))
        found[f"turn {turn}"] = {
            "o": float((local_of(one) - o).abs().max()),
            "o with lse": float((local_of(both[0]) - o).abs().max()),
            "lse": float((local_of(both[1]) - lse).abs().max()),
            "dropout": float((local_of(other) - dropped).abs().max()),
        }
    return found


def refusals(rank: int, ranks: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (ranks,))
    x, weights = draw(0, 4, 8), draw(1, 4, 2)
    cache = draw(2, 2, 16, 2, 8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    starts, table = torch.tensor([0, 2, 4], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    q = distribute_tensor(draw(3, 4, 2, 8), mesh)
    calls: dict[str, Any] = {
        "experts": lambda: fused_moe(
            distribute_tensor(x, mesh),
            draw(4, 3, 12, 8),
            draw(5, 3, 8, 6),
            weights,
            torch.zeros(4, 2, dtype=torch.int32),
        ),
        "cache": lambda: flash_attention_with_kv_cache(
            distribute_tensor(draw(3, 2, 1, 2, 8), mesh), cache, cache, cache_seqlens=lengths
        ),
        "pages": lambda: flash_attention_varlen(q, cache, cache, starts, starts, 2, 2, page_table=table),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except UnsupportedError as error:
            found[name] = str(error)
    return found


def everything(rank: int, ranks: int) -> dict[str, Any]:
    return {"cases": all_cases(rank, ranks) | without_lse(rank, ranks), "refusals": refusals(rank, ranks)}
