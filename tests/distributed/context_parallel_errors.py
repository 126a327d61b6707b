"""Calls of context parallelism that are wrong on some ranks, or differ: what each rank is told."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flashmoe_science import InputError, UnsupportedError, flash_attention
from flashmoe_science.distributed import ContextParallel, PackedPlan
from flashmoe_science.distributed.transport import transport_of

from .context_parallel_cases import Sizes, all_cases, draw, mesh_of_two, message, run_case, two_dimensions


def with_errors(rank: int, ranks: int) -> dict[str, Any]:
    return {"errors": errors(rank, ranks), **all_cases(rank, ranks)}


def two_dimensions_with_errors(rank: int, ranks: int) -> dict[str, Any]:
    mesh = mesh_of_two(ranks)
    cp = ContextParallel(mesh, strategy="heads+gather")
    return {"errors": errors_in_two_dimensions(rank, mesh, cp), **two_dimensions(rank, ranks)}


def errors(rank: int, ranks: int) -> dict[str, Any]:
    """Each rank makes a call that is wrong, or another one than the others."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    heads, gather = (ContextParallel(mesh, strategy=strategy) for strategy in ("heads", "gather"))
    q = k = v = draw(0, 1, 4, 8, 16)
    odd = draw(0, 1, 3, 8, 16)
    packed_q = draw(0, 8, 4, 16)
    plan = heads.plan([8 * ranks])
    masks: list[dict[str, Any]] = [{"causal": "no"}, {"windows": (128, 0)}, {"windows": 3}]
    heads.attention_packed(packed_q, packed_q, packed_q, plan)  # what follows is no first call
    return {
        "other options": message(lambda: heads.attention(q, k, v, causal=rank == 0), InputError),
        "other shapes": message(
            lambda: gather.attention(q[:, :, : 8 - 2 * rank], k[:, :, : 8 - 2 * rank], v[:, :, : 8 - 2 * rank]),
            InputError,
        ),
        "bad on one rank": message(lambda: heads.attention(q, k, v if rank else v[:, :, :5]), InputError),
        "heads": message(lambda: heads.attention(odd, odd, odd), InputError),
        "sinks": message(lambda: gather.attention(q, k, v, sinks=torch.zeros(3)), InputError),
        "alibi": message(lambda: gather.attention(q, k, v, alibi=torch.zeros(4)), UnsupportedError),
        "window": message(
            lambda: gather.attention_packed(
                packed_q[:8], packed_q[:8], packed_q[:8], gather.plan([8 * ranks]), window=(3, 3)
            ),
            UnsupportedError,
        ),
        "plan": message(lambda: heads.attention_packed(packed_q[:4], packed_q[:4], packed_q[:4], plan), InputError),
        "plan of the other": message(
            lambda: heads.attention_packed(packed_q, packed_q, packed_q, gather.plan([8 * ranks])), InputError
        ),
        "plan of the other, too": message(
            lambda: gather.attention_packed(packed_q, packed_q, packed_q, heads.plan([8 * ranks])), InputError
        ),
        "dtypes": message(lambda: heads.attention(q.bfloat16(), k, v), InputError),
        "gradient of alibi": message(
            lambda: heads.attention(q, k, v, causal=True, alibi=torch.ones(4, requires_grad=True)), InputError
        ),
        "sinks of one rank": message(
            lambda: gather.attention(q, k, v, sinks=[0.0] * 4 if rank else torch.zeros(4)),  # type: ignore[arg-type]
            InputError,
        ),
        "twice": message(lambda: _differentiate_twice(gather, q), RuntimeError),
        "tokens": message(lambda: gather.shard(draw(0, 2 * ranks + 1), 0), InputError),
        "lengths": message(lambda: gather.plan([8 * ranks + 1]), InputError),
        "no length": message(lambda: gather.plan([] if rank else [8 * ranks]), InputError),
        "other lengths": message(lambda: heads.plan([3, 5] if rank else [8]), InputError),
        "groups": message(lambda: ContextParallel(mesh, strategy="heads", head_groups=0), InputError),
        "heads of groups": message(
            lambda: ContextParallel(mesh, strategy="heads", head_groups=3).attention(q, k, v), InputError
        ),
        "transport": message(lambda: ContextParallel(mesh, strategy="heads", transport="ring"), InputError),
        "symmetric": message(lambda: ContextParallel(mesh, strategy="heads", transport="symmetric"), UnsupportedError),
        "groups of gather": message(lambda: ContextParallel(mesh, strategy="gather", head_groups=2), UnsupportedError),
        "groups of one rank": message(
            lambda: ContextParallel(mesh, strategy="heads", head_groups=1 + rank).attention(q, k, v), InputError
        ),
        "symmetric of one rank": message(
            lambda: (
                transport_of("symmetric", heads.group, "cuda")
                if rank
                else ContextParallel(mesh, strategy="heads").attention(q, k, v)
            ),
            InputError,
        ),
        "autocast of one rank": message(lambda: _under_autocast(heads, q, enabled=rank == 0), InputError),
        "plan of a mesh": message(
            lambda: heads.attention_packed(packed_q, packed_q, packed_q, _moved(plan, members=(5, 6))), InputError
        ),
        "plan of a rank": message(
            lambda: heads.attention_packed(packed_q, packed_q, packed_q, _moved(plan, rank=1 - rank)), InputError
        ),
        "causal of one rank": message(
            lambda: ContextParallel(mesh, heads_kv=2 * ranks).plan([8] * ranks, causal=rank == 0), InputError
        ),
        "unshard": _unshard_unlike(rank, ranks, mesh),
        "unshard with a gradient": message(
            lambda: ContextParallel(mesh, strategy="heads").unshard(q.clone().requires_grad_(rank == 1), 2), InputError
        ),
        "DTensor of one rank": message(
            lambda: ContextParallel(mesh, strategy="gather").attention(
                DTensor.from_local(q, mesh) if rank else q, k, v
            ),
            UnsupportedError,
        ),
        "strategy": message(lambda: ContextParallel(mesh, strategy="ring"), InputError),
        "auto": message(lambda: ContextParallel(mesh), InputError),
        "chosen": [ContextParallel(mesh, heads_kv=heads_kv).strategy for heads_kv in (ranks, ranks + 1)],
        "chosen for documents": [
            ContextParallel(mesh, heads_kv=2 * ranks, head_groups=groups).plan([8 * ranks], causal=causal).strategy
            for groups, causal in ((1, True), (1, False), (2, True))
        ],
        "masks": [message(functools.partial(gather.plan, [8 * ranks], **given), InputError) for given in masks],
        "explained": heads.explain(q, k, v),
        "groups explained": ContextParallel(mesh, strategy="heads", head_groups=2).explain(q, k, v),
        "plan strategy": plan.strategy,
        "documents explained": heads.explain(packed_q, packed_q, packed_q, plan),
        "gradients of outputs of one rank": [outputs_of_one_rank(heads, rank, name) for name in ("lse", "o")],
        "wrong on rank 0": {
            strategy: _wrong_on_rank_0(rank, ContextParallel(mesh, strategy=strategy))
            for strategy in ("heads", "gather")
        },
        "mesh": [
            message(functools.partial(ContextParallel, wrong, strategy="heads"), InputError)  # type: ignore[arg-type]
            for wrong in (None, heads.group)
        ],
        "descending mesh": message(
            lambda: ContextParallel(DeviceMesh("cpu", list(range(ranks))[::-1]), strategy="heads"), InputError
        ),
        "sharded": [
            message(functools.partial(heads.shard, *given), InputError)
            for given in (([1, 2], 0), (q, 4), (packed_q, 0, [8]))
        ],
        "sizes of layouts": [message(functools.partial(heads.layout, size), InputError) for size in (-8, 8.0)],  # type: ignore[arg-type]
        "copied": copy.deepcopy(heads) is heads and copy.deepcopy(plan).number != plan.number,
        "after all": float(heads.attention(q, k, v).sum() * 0),
    }


def _unshard_unlike(rank: int, ranks: int, mesh: DeviceMesh) -> list[str]:
    """What ranks are told that put tokens together which differ in dtype, shape, dimension or plan."""
    x, whole = draw(0, 8, 8), ContextParallel(mesh, strategy="gather")
    plans = [whole.plan([8 * ranks]), whole.plan([4 * ranks, 4 * ranks])]
    calls: list[tuple[Tensor, int, PackedPlan | None]] = [
        (x.half() if rank else x.bfloat16(), 0, None),
        (x[: 8 - 4 * rank], 0, None),
        (x, rank, None),
        (x, 0, plans[rank]),
    ]
    return [
        *(
            message(functools.partial(ContextParallel(mesh, strategy="gather").unshard, *each), InputError)
            for each in calls[:3]
        ),
        message(functools.partial(whole.unshard, *calls[3]), InputError),
        message(lambda: ContextParallel(mesh, strategy=("heads", "gather")[rank]).unshard(x, 0), InputError),
    ]


def _wrong_on_rank_0(rank: int, cp: ContextParallel) -> dict[str, str]:
    """What a rank is told of calls that rank 0 gets wrong."""
    right: dict[str, Any] = {"q": draw(0, 2, 4, 8, 16), "k": draw(1, 2, 2, 8, 16), "v": draw(2, 2, 2, 8, 16)}
    q, k, v = right.values()
    wrong: dict[str, dict[str, Any]] = {
        "batch": {"k": k[:1], "v": v[:1]},
        "heads": {"v": q},
        "columns": {"k": k[..., :8]},
        "no heads": {"k": k[:, :0], "v": v[:, :0]},
        "kind": {"q": None},
        "integers": {name: x.int() for name, x in right.items()},
        "causal": {"causal": 1},
        "window": {"window": (3.0, 0)},
        "three numbers": {"window": (3, 0, 0)},
        "no window": {"window": None},
        "softcap": {"softcap": "5"},
        "return_lse": {"return_lse": 1},
    }
    calls = {
        name: functools.partial(cp.attention, **(right | given if rank == 0 else right))
        for name, given in wrong.items()
    }
    plan, x = cp.plan([16]), q[0].transpose(0, 1)
    for given in (None, [8, 8], torch.tensor([0, 8, 16])):
        call = functools.partial(cp.attention_packed, x, x, x, given if rank == 0 else plan)  # type: ignore[arg-type]
        calls[f"plan {type(given).__name__}"] = call
    for lengths in (16, torch.tensor([8, 8]), "88", [8.0, 8]):
        calls[f"lengths {type(lengths).__name__}"] = functools.partial(cp.plan, lengths if rank == 0 else [8, 8])  # type: ignore[arg-type]
    return {name: message(call, InputError) for name, call in calls.items()}


def _under_autocast(cp: ContextParallel, x: Tensor, *, enabled: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        cp.attention(x, x, x, softcap=5.0)


def _moved(plan: PackedPlan, **place: Any) -> PackedPlan:
    """Return the plan as another rank, or a rank of another mesh, would have it."""
    moved = copy.copy(plan)
    moved.place = plan.place._replace(**place)
    return moved


def outputs_of_one_rank(cp: ContextParallel, rank: int, unused: str) -> bool:
    """Whether gradients have the bits of one process where the loss of rank 0 does not use an output."""
    inputs = [x.transpose(1, 2) for x in Sizes(4, 4).draw(1, 16)]
    given = {"o": inputs.pop(), "lse": draw(6, 1, 4, 16)}
    given[unused][:, :, :8] = 0  # the tokens of rank 0
    whole = run_case(flash_attention, inputs, (given["o"], given["lse"]), {})
    leaves = [cp.shard(x, 2).requires_grad_() for x in inputs]
    outputs = dict(zip(("o", "lse"), cp.attention(*leaves, return_lse=True), strict=True))
    used = [name for name in outputs if rank or name != unused]
    torch.stack([(outputs[name] * cp.shard(given[name], 2)).sum() for name in used]).sum().backward()
    return all(
        torch.equal(x.grad, cp.shard(whole[name], 2))  # type: ignore[arg-type] # has one
        for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)
    )


def _differentiate_twice(cp: ContextParallel, x: Tensor) -> None:
    q = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(cp.attention(q, q, q, causal=True).square().sum(), q, create_graph=True)
    first.sum().backward()


def errors_in_two_dimensions(rank: int, mesh: DeviceMesh, cp: ContextParallel) -> dict[str, Any]:
    """One of four ranks, in each place, makes a call that is wrong, or another one than the others."""
    q = k = v = draw(0, 1, 4, 8, 16)
    odd = draw(0, 1, 3, 8, 16)
    line = ContextParallel(init_device_mesh("cpu", (4,)), strategy="gather")
    packed_q = draw(0, 8, 4, 16)
    other_shape = ContextParallel(init_device_mesh("cpu", (4, 1)), strategy="heads+gather")
    reversed_mesh = DeviceMesh("cpu", [[0, 3], [2, 1]])
    make = functools.partial(ContextParallel, strategy="heads+gather")
    return {
        "bad on a rank": [
            message(lambda at=at: cp.attention(q, k, v[:, :, :5] if rank == at else v), InputError)  # type: ignore[misc]
            for at in range(4)
        ],
        "other options": [
            message(lambda at=at: cp.attention(q, k, v, causal=rank == at), InputError)  # type: ignore[misc]
            for at in range(4)
        ],
        "other lengths": message(lambda: cp.plan([12, 4] if rank == 3 else [16]), InputError),
        "heads": message(lambda: cp.attention(odd, odd, odd), InputError),
        "alibi": message(lambda: cp.attention(q, k, v, alibi=torch.zeros(4)), UnsupportedError),
        "window": message(
            lambda: cp.attention_packed(packed_q, packed_q, packed_q, cp.plan([32]), window=(3, 3)), UnsupportedError
        ),
        "plan of the other": message(
            lambda: cp.attention_packed(packed_q, packed_q, packed_q, line.plan([32])), InputError
        ),
        "plan of another shape": message(
            lambda: cp.attention_packed(packed_q, packed_q, packed_q, other_shape.plan([8] * 4)), InputError
        ),
        "tokens": message(lambda: cp.layout(42), InputError),
        "lengths": message(lambda: cp.plan([42]), InputError),
        "one dimension": message(lambda: make(init_device_mesh("cpu", (4,))), InputError),
        "no strategy": message(lambda: ContextParallel(mesh, heads_kv=2), InputError),
        "order": message(lambda: make(reversed_mesh), InputError),
        "transport": message(lambda: make(mesh, transport="symmetric"), UnsupportedError),
        "unlike hosts": _transports_of_unlike_hosts(rank, mesh),
        "explained": cp.explain(q, k, v),
        "documents explained": cp.explain(packed_q, packed_q, packed_q, cp.plan([20, 12])),
        "layout": cp.layout(16).held,
        "after all": float(cp.attention(q, k, v).sum() * 0),
    }


def _transports_of_unlike_hosts(rank: int, mesh: DeviceMesh) -> list[str]:
    """What ranks choose, and are told, where the GPUs of the second host alone cannot read one another."""
    groups = mesh.get_group("heads"), mesh.get_group("gather")
    reason = "GPUs that read one another" if rank > 1 else ""
    with mock.patch("flashmoe_science.distributed.transport._why_unreadable", return_value=reason):
        chosen = type(transport_of("auto", groups[0], "cuda", groups[1])).__name__
        return [chosen, message(lambda: transport_of("symmetric", groups[0], "cuda", groups[1]), UnsupportedError)]
