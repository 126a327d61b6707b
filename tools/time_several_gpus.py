"""Time attention and experts over the GPUs of this host beside one GPU, and beside PyTorch's own context_parallel.

    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1   # where multicast is not allowed
    torchrun --nproc-per-node 2 tools/time_several_gpus.py [causal packed experts] [--tokens 16384 65536] [--out FILE]

GPUs have work queued while the host prepares calls, as in a training step. ``--idle`` times calls that find idle GPUs.

Attention: bf16, 32 query heads, 8 K/V heads, D 128, causal, one sequence or a packed batch. Experts: Mixtral and
Qwen3-30B, 8k tokens a GPU. A time is that of the slowest rank, the median of rounds in which every arm runs once. Rates
are TFLOP/s of each GPU; the share is that of one GPU's rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science import flash_attention, flash_attention_varlen, fused_moe, route
from flashmoe_science.distributed import ContextParallel, ExpertParallel

HEADS, HEADS_KV, D = 32, 8, 128
EXPERTS = {"mixtral": (8, 2, 4096, 14336), "qwen3-30b": (128, 8, 2048, 768)}  # experts, top k, hidden, inter
TOKENS = 8192  # of a GPU, of experts
WARM_UP, ROUNDS = 3, 9
QUEUED = 40_000_000  # cycles of work that GPUs have before a call: about 20 ms
Times = dict[str, float]  # ms, by forward and backward


def draw(seed: int, *shape: int) -> Tensor:
    """Return random numbers of a seed."""
    make = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=make, device="cuda", dtype=torch.bfloat16)


def inputs(tokens: int, *, batched: bool) -> list[Tensor]:
    """Return q, k, v and the gradient of o of all tokens."""
    drawn = [draw(i, tokens, heads, D) for i, heads in enumerate((HEADS, HEADS_KV, HEADS_KV, HEADS))]
    return [x.transpose(0, 1)[None] for x in drawn] if batched else drawn


def arm(call: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Times]:
    """Return what runs a call and its gradients once, and returns the times of the slowest rank."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    do = tensors[3]

    def once() -> Times:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        dist.barrier()
        torch.cuda.synchronize()
        if QUEUED:
            torch.cuda._sleep(QUEUED)  # type: ignore[no-untyped-call]  # noqa: SLF001 - has no public name
            dist.all_reduce(torch.zeros(1, device="cuda"))  # all GPUs begin at once
        events[0].record()
        o = call(q, k, v)
        events[1].record()
        torch.autograd.grad(o, (q, k, v), do)
        events[2].record()
        torch.cuda.synchronize()
        spent = torch.tensor([a.elapsed_time(b) for a, b in itertools.pairwise(events)], device="cuda")
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # the slowest rank
        return dict(zip(("forward", "backward"), spent.tolist(), strict=True))

    return once


def torchs(tokens: int, ranks: int) -> tuple[Any, Callable[..., Tensor]]:
    """Return PyTorch's context, and the call to make in it."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    stack = contextlib.ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    stack.enter_context(context_parallel(mesh, buffers=[torch.zeros(tokens, device="cuda")], buffer_seq_dims=[0]))
    return stack, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def long_tailed(tokens: int) -> list[int]:
    """Lengths of documents, a few of them long: the same on every rank."""
    make = torch.Generator().manual_seed(4)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(torch.empty(1).log_normal_(6.8, 1.2, generator=make)) + 1
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def ways(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the options of every arm of attention."""
    found: dict[str, dict[str, Any]] = {"gather": {"strategy": "gather"}}
    if HEADS_KV % ranks == 0:
        found["heads"] = {"strategy": "heads"}
        for transport in ("collectives", "symmetric"):
            for groups in (1, 2, 4):
                if HEADS_KV // ranks % groups == 0 and (transport, groups) != ("collectives", 1):
                    options = {"strategy": "heads", "head_groups": groups, "transport": transport}
                    found[f"heads, {groups} groups, {transport}"] = options
    return found


def measure_attention(tokens: int, ranks: int, *, packed: bool) -> dict[str, Any]:
    """Return the rates of every arm."""
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    arms: dict[str, Callable[[], Times]] = {}
    lengths = long_tailed(tokens) if packed else [tokens]
    whole = inputs(tokens, batched=not packed)
    if packed:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        arms["one GPU"] = arm(
            lambda q, k, v: flash_attention_varlen(q, k, v, starts, starts, max(lengths), max(lengths), causal=True),
            whole,
        )
    else:
        arms["one GPU"] = arm(lambda q, k, v: flash_attention(q, k, v, causal=True), whole)
    for name, options in ways(ranks).items():
        cp = ContextParallel(mesh, **options)
        if packed:
            plan = cp.plan(lengths)
            local = [cp.shard(x, 0, plan) for x in whole]
            arms[name] = arm(lambda q, k, v, cp=cp, plan=plan: cp.attention_packed(q, k, v, plan, causal=True), local)
        else:
            local = [cp.shard(x.transpose(1, 2), 1).transpose(1, 2) for x in whole]
            arms[name] = arm(lambda q, k, v, cp=cp: cp.attention(q, k, v, causal=True), local)
    found = run_rounds(arms)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return summary(found, 4 * pairs * HEADS * D, 2.5, ranks)


def measure_torchs(tokens: int, ranks: int, one: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of PyTorch's context_parallel with cuDNN. It replaces what is global, so it runs last, alone."""
    stack, call = torchs(tokens, ranks)
    with stack:
        chunks = [torch.chunk(x, 2 * ranks, 2) for x in inputs(tokens, batched=True)]
        rank = dist.get_rank()
        once = arm(call, [torch.cat((x[rank], x[2 * ranks - 1 - rank]), 2).contiguous() for x in chunks])
        rounds = [once() for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    found = summary({"torch": rounds}, 2.0 * tokens * (tokens + 1) * HEADS * D, 2.5, ranks)
    found["torch"]["share"] = round(found["torch"]["both"] / one["both"], 3)
    return found


def run_rounds(arms: dict[str, Callable[[], Times]]) -> dict[str, list[Times]]:
    """Run every arm once a round."""
    found: dict[str, list[Times]] = {name: [] for name in arms}
    for turn in range(WARM_UP + ROUNDS):
        for name, once in arms.items():
            times = once()
            if turn >= WARM_UP:
                found[name].append(times)
    return found


def measure_experts(model: str, ranks: int) -> dict[str, Any]:
    """Return the rates of all experts on one GPU's tokens, and of some experts on the tokens of all GPUs."""
    experts, top_k, hidden, inter = EXPERTS[model]
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    ep, once = ExpertParallel(mesh), ExpertParallel(mesh, strategy="once")
    x, do = draw(1 + dist.get_rank(), TOKENS, hidden), draw(2, TOKENS, hidden)
    w_gate_up, w_down = draw(3, experts, 2 * inter, hidden) / hidden**0.5, draw(4, experts, hidden, inter) / inter**0.5
    weights, ids = route(draw(5 + dist.get_rank(), TOKENS, experts), top_k)
    mine = [x, ep.shard(w_gate_up), ep.shard(w_down), do]
    arms = {
        "one GPU": arm(lambda x, up, down: fused_moe(x, up, down, weights, ids), [x, w_gate_up, w_down, do]),
        "experts of each rank": arm(lambda x, up, down: ep.fused_moe(x, up, down, weights, ids), mine),
        "a token once a rank": arm(lambda x, up, down: once.fused_moe(x, up, down, weights, ids), mine),
    }
    return summary(run_rounds(arms), ranks * 6.0 * TOKENS * top_k * hidden * inter, 2.0, ranks, one=1 / ranks)


def summary(
    found: dict[str, list[Times]], flops: float, backward: float, ranks: int, *, one: float = 1.0
) -> dict[str, Any]:
    """Return rates: forward, backward, both, and the share of one GPU's rate.

    Args:
        found: times by arm.
        flops: of the forward on all ranks.
        backward: its work, in units of the forward's.
        ranks: among which the work is split.
        one: the part of the work that the arm of one GPU does.
    """
    rates: dict[str, Any] = {}
    for name, rounds in found.items():
        work = flops * one if name == "one GPU" else flops / ranks
        spent = {key: statistics.median(times[key] for times in rounds) for key in ("forward", "backward")}
        both = (1 + backward) * work / (spent["forward"] + spent["backward"]) / 1e9
        rates[name] = {
            "ms": {key: round(value, 4) for key, value in spent.items()},
            "forward": round(work / spent["forward"] / 1e9, 1),
            "backward": round(backward * work / spent["backward"] / 1e9, 1),
            "both": round(both, 1),
            "share": round(both / rates["one GPU"]["both"], 3) if rates else 1.0,
        }
    return rates


def report(title: str, rates: dict[str, Any], found: dict[str, Any], out: Path | None) -> None:
    """Print the rows of one case, and write all that is known, on rank 0."""
    if dist.get_rank():
        return
    print(title)
    for name, row in rates.items():
        print(f"  {name:32}{row['forward']:8}{row['backward']:8}{row['both']:8}{row['share']:8.1%}", flush=True)
    if out:
        out.write_text(json.dumps(found, indent=1))


def main() -> None:
    """Measure what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="{causal,packed,experts}", help="what to time; default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--out", type=Path, help="write the rates there as JSON")
    parser.add_argument("--idle", action="store_true", help="time calls that find idle GPUs: the host's time counts")
    asked = parser.parse_args()
    asked.what = asked.what or ["causal", "packed", "experts"]
    if unknown := set(asked.what) - {"causal", "packed", "experts"}:
        parser.error(f"what must be causal, packed or experts, got {', '.join(sorted(unknown))}")
    global QUEUED  # noqa: PLW0603 - one process, one way
    QUEUED = 0 if asked.idle else QUEUED
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cuda:nccl,cpu:gloo", device_id=torch.device("cuda", rank))
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "ranks": ranks, "torch": torch.__version__}
    for what in asked.what:
        for case in EXPERTS if what == "experts" else asked.tokens:
            if what == "experts":
                rates = measure_experts(str(case), ranks)
            else:
                rates = measure_attention(int(case), ranks, packed=what == "packed")
            found[f"{what} {case}"] = rates
            torch.cuda.empty_cache()
            report(f"{what} {case}", rates, found, asked.out)
    for case in asked.tokens if "causal" in asked.what else ():
        rates = measure_torchs(case, ranks, found[f"causal {case}"]["one GPU"])
        found[f"context_parallel {case}"] = rates
        report(f"context_parallel, cuDNN {case}", rates, found, asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
