"""Cases of expert parallel layers, which every rank runs beside the same call on one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flashmoe_science import InputError, UnsupportedError, fused_moe, route
from flashmoe_science.distributed import ExpertParallel

EXPERTS, TOP_K, HIDDEN, INTER = 8, 3, 16, 12
CASES: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "without a gate": {"activation": "relu2"},
    "biases": {"bias": True},
    "gpt-oss": {"bias": True, "activation": "swiglu_clamped", "alpha": 1.5, "limit": 3.0, "interleaved": True},
    "one rank's experts alone": {"most": 2},
    "ids of no expert": {"least": -1},
    "no gradient of x": {"frozen": "x"},
    "no gradient of weights of pairs": {"frozen": "topk_weights"},
}


def draw(seed: int, *shape: int, device: str, dtype: torch.dtype) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make).to(device=device, dtype=dtype)


def case(
    ep: ExpertParallel,
    given: dict[str, Any],
    tokens: int,
    sizes: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the largest error of the output and of each gradient, as a share of the largest number."""
    experts, top_k, hidden, inter = sizes
    options = {key: value for key, value in given.items() if key not in ("bias", "most", "least", "frozen")}
    rows = inter if options.get("activation") == "relu2" else 2 * inter
    all_tokens = tokens * ep.ranks
    make = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(given.get("most", experts), generator=make) for _ in range(all_tokens)])
    ids = ids.repeat(1, top_k)[:, :top_k].to(device) + given.get("least", 0)

    def random(seed: int, *shape: int) -> Tensor:
        return draw(seed, *shape, device=device, dtype=dtype)

    by_token = {"x": random(0, all_tokens, hidden), "topk_weights": random(1, all_tokens, top_k).abs()}
    by_expert = {
        "w_gate_up": random(2, experts, rows, hidden) / hidden**0.5,
        "w_down": random(3, experts, hidden, inter) / inter**0.5,
    }
    if "bias" in given:
        by_expert |= {"bias_gate_up": random(4, experts, rows), "bias_down": random(5, experts, hidden)}
    do = random(6, all_tokens, hidden)

    def run(call: Callable[..., Tensor], tensors: dict[str, Tensor], ids: Tensor, do: Tensor) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_(name != given.get("frozen")) for name, x in tensors.items()}
        out = call(**leaves, topk_ids=ids, **options)
        asked = {name: x for name, x in leaves.items() if x.requires_grad}
        found = torch.autograd.grad(out, list(asked.values()), do)
        return {"out": out.detach(), **dict(zip(asked, found, strict=True))}

    mine = slice(ep.rank * tokens, (ep.rank + 1) * tokens)
    whole = run(fused_moe, {**by_token, **by_expert}, ids, do)
    local = {name: x[mine] for name, x in by_token.items()} | {name: ep.shard(x) for name, x in by_expert.items()}
    found = run(ep.fused_moe, local, ids[mine].contiguous(), do[mine])
    errors = {}
    for name, tensor in found.items():
        expected = ep.shard(whole[name]) if name in by_expert else whole[name][mine]
        assert tensor.shape == expected.shape, name
        size = whole[name].double().abs().max().clamp(min=1e-6)
        errors[name] = float((tensor.double() - expected.double()).abs().max() / size)
    return errors


def all_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    sizes = (EXPERTS, TOP_K, HIDDEN, INTER)
    return {
        f"{strategy}, {name}, {tokens} tokens": case(
            ExpertParallel(mesh, strategy=strategy), given, tokens, sizes, "cpu", torch.float32
        )
        for strategy in ("gather", "once")
        for name, given in CASES.items()
        for tokens in (1, 13)
    }


def unusual_rows(rank: int, ranks: int) -> dict[str, Any]:
    """Rows of one element with another stride than 1, and none at all: the gradient of a sum has stride 0."""
    ep = ExpertParallel(init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), strategy="gather")
    up, down = (draw(seed, EXPERTS, *shape, device="cpu", dtype=torch.float32) for seed, shape in enumerate(
        ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    ))  # fmt: skip
    found = {}
    for tokens in (0, 4):
        x = draw(rank, tokens, HIDDEN, device="cpu", dtype=torch.float32).requires_grad_()
        weights, ids = torch.rand(1, tokens).t(), torch.arange(tokens)[:, None] % EXPERTS
        out = ep.fused_moe(x, ep.shard(up), ep.shard(down), weights, ids)
        out.sum().backward()
        difference = out - fused_moe(x, up, down, weights, ids)
        found[str(tokens)] = x.grad is not None and bool(torch.all(difference.abs() < 1e-4))
    return found


def capacities(rank: int, ranks: int) -> dict[str, Any]:
    """Room for less than all tokens: enough for these, then too little on one rank."""
    ep = ExpertParallel(init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), strategy="once", capacity=0.5)
    x = draw(rank, 8, HIDDEN, device="cpu", dtype=torch.float32)
    up, down = (draw(seed, EXPERTS, *shape, device="cpu", dtype=torch.float32) for seed, shape in enumerate(
        ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    ))  # fmt: skip
    weights = torch.ones(8, 1)
    ids = torch.arange(8)[:, None] % EXPERTS  # as many for each rank
    found = ep.fused_moe(x, ep.shard(up), ep.shard(down), weights, ids)
    expected = fused_moe(x, up, down, weights, ids)
    skewed = ids if rank != ranks - 1 else torch.zeros_like(ids)  # the last rank's tokens all go to rank 0
    try:
        ep.fused_moe(x, ep.shard(up), ep.shard(down), weights, skewed)
        message = "no error"
    except InputError as error:
        message = str(error).split("\n")[0]
    given: dict[str, Any] = {"x": x, "w_gate_up": ep.shard(up), "w_down": ep.shard(down), "topk_weights": weights}
    leaves: dict[str, Any] = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    buffer = ep._over
    with mock.patch.object(ep, "check_capacity"):  # as on a GPU
        lost = ep.fused_moe(**leaves, topk_ids=skewed)
    gradients = torch.autograd.grad(lost.sum(), list(leaves.values()))
    until_checked = bool(ep._over.any())
    with contextlib.suppress(InputError):
        ep.check_capacity()
    again = ep.fused_moe(x, ep.shard(up), ep.shard(down), weights, ids)
    return {
        "error": float((found - expected).abs().max() / expected.abs().max()),
        "message": message,
        "nan": [bool(x.isnan().all()) for x in (lost, *gradients)],
        "buffer": until_checked and ep._over is buffer and not buffer.any(),
        "again": bool(torch.equal(again, found)),
    }


def without_tokens(rank: int, ranks: int) -> dict[str, Any]:
    """The shapes of outputs and gradients where no rank has a token, and whether those of weights are 0."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    found = {}
    for strategy in ("gather", "once"):
        shapes = (0, HIDDEN), (4, 2 * INTER, HIDDEN), (4, HIDDEN, INTER), (0, 1)
        leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
        ids = torch.zeros(0, 1, dtype=torch.int32)
        out = ExpertParallel(mesh, strategy=strategy).fused_moe(leaves[0], leaves[1], leaves[2], leaves[3], ids)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found[strategy] = [list(x.shape) for x in (out, *gradients)], not any(x.any() for x in gradients)
    return found


def with_errors(rank: int, ranks: int) -> dict[str, Any]:
    return {
        "errors": errors(rank, ranks), "capacities": capacities(rank, ranks), "cases": all_cases(rank, ranks),
        "without tokens": without_tokens(rank, ranks), "unusual rows": unusual_rows(rank, ranks),
    }  # fmt: skip


def with_capacities(rank: int, ranks: int) -> dict[str, Any]:
    return {
        "capacities": capacities(rank, ranks),
        "unusual rows": unusual_rows(rank, ranks),
        "cases": all_cases(rank, ranks),
    }


def gpu_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    sizes = (16, 4, 512, 256)
    ways = [("gather", "collectives"), ("gather", "symmetric"), ("once", "collectives")]
    found = {}
    for strategy, transport in ways:
        ep = ExpertParallel(mesh, strategy=strategy, transport=transport)
        for name, given in CASES.items():
            for tokens in (1, 700):
                found[f"{strategy}, {transport}, {name}, {tokens} tokens"] = case(
                    ep, given, tokens, sizes, "cuda", torch.bfloat16
                )
    bits = {"bits": float(not same_bits_by_both_transports(mesh))}
    return {**found, "transports": bits, "overflow": overflow(mesh)}


def same_bits_by_both_transports(mesh: Any) -> bool:
    """Whether outputs and gradients are equal, on two streams by turns, with other sizes between, and in a graph."""
    both = [ExpertParallel(mesh, transport=transport) for transport in ("collectives", "symmetric")]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn, tokens in enumerate((64, 700, 64, 1, 1024, 64)):
        make = torch.Generator("cuda").manual_seed(100 * both[0].rank + turn)
        x, up, down, do = (
            torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16) / 8
            for shape in ((tokens, 512), (8, 512, 512), (8, 512, 256), (tokens, 512))
        )
        weights, ids = route(
            torch.randn(tokens, 8 * both[0].ranks, generator=make, device="cuda", dtype=torch.bfloat16), 4
        )
        torch.cuda.synchronize()
        found = []
        for ep in both:
            with torch.cuda.stream(streams[turn % 2]):
                leaves = [each.detach().requires_grad_() for each in (x, up, down, weights)]
                out = ep.fused_moe(leaves[0], leaves[1], leaves[2], leaves[3], ids)
                found.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
            if turn % 2:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
            return False
    with torch.no_grad():  # a first call of its kind compares ranks
        both[1].fused_moe(x, up, down, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = both[1].fused_moe(x, up, down, weights, ids)
    x.mul_(2)
    graph.replay()
    with torch.no_grad():
        return torch.equal(captured, both[0].fused_moe(x, up, down, weights, ids))


def overflow(mesh: Any) -> dict[str, float]:
    """On a GPU the outputs are NaN on all ranks, and the check raises on all; 0 where that is so."""
    ep = ExpertParallel(mesh, strategy="once", capacity=0.25)
    x, up, down = (
        torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((8, 64), (2, 64, 64), (2, 64, 32))
    )
    ids = torch.full((8, 1), 0 if ep.rank == 0 else 2 * ep.ranks, device="cuda")
    weights = torch.ones(8, 1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = ep.fused_moe(x, up, down, weights, ids)
    torch.cuda.current_stream().wait_stream(stream)
    found = {"nan": float(not out.isnan().all()), "message": _misses_overflow(ep)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ep.fused_moe(x, up, down, weights, ids)
    for number in range(2):
        graph.replay()
        found[f"replay {number}"] = _misses_overflow(ep)
    return found


def _misses_overflow(ep: ExpertParallel) -> float:
    try:
        ep.check_capacity()
    except InputError as error:
        return float("rank 0 had 6 tokens more" not in str(error))
    return 1.0


def errors(rank: int, ranks: int) -> dict[str, Any]:
    """Each rank makes a call that is wrong, or another one than the others."""
    ep_mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    ep = ExpertParallel(ep_mesh)
    x, up, down = torch.ones(4, 16), torch.ones(4, 24, 16), torch.ones(4, 16, 12)
    weights, ids = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32)

    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except InputError as error:
            return str(error).split("\n")[0]
        return "no error"

    n = 4 - rank
    right: dict[str, Any] = {"x": x, "w_gate_up": up, "w_down": down, "topk_weights": weights, "topk_ids": ids}
    wrong: dict[str, dict[str, Any]] = {
        "x": {"x": None},
        "w_down": {"w_down": None},
        "topk_ids": {"topk_ids": None},
        "axes of x": {"x": torch.ones(4, 4, 16)},
        "axes of topk_ids": {"topk_ids": ids[:, 0]},
        "columns": {"x": x[:, :8]},
        "bias": {"bias_down": torch.ones(16)},
        "activation": {"activation": ["swiglu"]},
    }
    with torch.inference_mode():
        inferring = ExpertParallel(ep_mesh, strategy="once", capacity=0.5)
    alone = ExpertParallel(init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("others", "ep"))["ep"])
    return {
        "wrong on rank 0": {
            name: message(lambda given=given: ep.fused_moe(**(right | given if rank == 0 else right)))  # type: ignore[misc]
            for name, given in wrong.items()
        },
        "forward-mode tangent": _tangent_on_rank_0(rank, ep, right),
        "list": message(lambda: ep.shard([1, 2])),  # type: ignore[arg-type]
        "copied": copy.deepcopy(ep) is ep,
        "made in inference mode": float(
            inferring.fused_moe(x, up, down, weights, torch.tensor([[0, 1], [0, 1], [4, 5], [4, 5]])).sum() * 0
        ),
        # As wide as an odd number of ids of 8 bytes and weights of 4: what follows in the message is not aligned.
        "one token of one rank": float(alone.fused_moe(x[:1], up, down, weights[:1, :1], ids[:1, :1].long()).sum() * 0),
        "tokens": message(lambda: ep.fused_moe(x[:n], up, down, weights[:n], ids[:n])),
        "rows": message(lambda: ep.fused_moe(x, up, down, weights[:3] if rank else weights, ids)),
        "kind": message(lambda: ep.fused_moe(x, up, down, weights, [1] if rank else ids)),  # type: ignore[arg-type]
        "capacity of one rank": message(
            lambda: ExpertParallel(ep_mesh, strategy="once", capacity=1 - rank / 2).fused_moe(x, up, down, weights, ids)
        ),
        "strategy of one rank": message(
            lambda: ExpertParallel(ep_mesh, strategy="once" if rank else "gather").fused_moe(x, up, down, weights, ids)
        ),
        "activation": message(lambda: ep.fused_moe(x, up, down, weights, ids, activation="tanh")),
        "experts": message(lambda: ep.shard(torch.ones(3))),
        "strategy": message(lambda: ExpertParallel(ep_mesh, strategy="pairs")),
        "capacity": message(lambda: ExpertParallel(ep_mesh, capacity=0.0)),
        "mesh": message(lambda: ExpertParallel(init_device_mesh("cpu", (ranks, 1)))),
        "after all": float(ep.fused_moe(x, up, down, weights, ids).sum() * 0),
    }


def _tangent_on_rank_0(rank: int, ep: ExpertParallel, given: dict[str, Any]) -> str:
    """A valid call that nobody serves, on one rank."""
    with torch.autograd.forward_ad.dual_level():
        x = given["x"]
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) if rank == 0 else x
        try:
            ep.fused_moe(**{**given, "x": dual})
        except UnsupportedError as error:
            return str(error)
    return "no error"
