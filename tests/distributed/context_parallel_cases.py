"""Cases of context parallel attention, which every rank runs beside the same call on one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science import flash_attention, flash_attention_varlen
from flashmoe_science.distributed import ContextParallel, PackedPlan, documents, exchange, plan as plans
from flashmoe_science.distributed.layout import plan_documents

TOKENS = 64
LENGTHS = (1, 21, 3, 15, 24)  # 64 tokens in all

FIXED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (9, 5)},
    "causal window": {"causal": True, "window": (11, -1)},
    "window of no right bound": {"window": (7, -1)},
    "softcap and scale": {"causal": True, "softcap": 3.0, "softmax_scale": 0.4},
    "sinks": {"causal": True, "sinks": True},
    "alibi": {"causal": True, "alibi": True},
}
PACKED = {name: FIXED[name] for name in ("causal", "full", "causal window", "softcap and scale", "sinks", "alibi")}


def _device() -> str:
    return "cuda" if "nccl" in torch.distributed.get_backend_config() else "cpu"


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    make = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=make).to(device=_device(), dtype=dtype)


def make_options(options: dict[str, Any], heads: int) -> dict[str, Any]:
    by_head: dict[str, Any] = {
        name: draw(9, heads).abs().requires_grad_(name == "sinks") for name in ("sinks", "alibi") if name in options
    }
    return {**options, **by_head}


def run_case(
    call: Callable[..., Any], inputs: list[Tensor], gradients: tuple[Tensor, Tensor], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Return o, LSE and gradients, the inputs being leaves."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, lse = call(*leaves, **options, return_lse=True)
    given = [*leaves, *([options["sinks"]] if "sinks" in options else [])]
    found = torch.autograd.grad((o, lse), given, gradients)
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")
    return dict(zip(names, (o.detach(), lse.detach(), *found), strict=False))


def compare(
    mine: dict[str, Tensor], whole: dict[str, Tensor], cut: dict[str, Callable[[Tensor], Tensor]]
) -> dict[str, Any]:
    """Return, by tensor, the largest error as a share of the largest number, and whether the bits are the same."""
    found = {}
    for name, tensor in mine.items():
        if name == "dsinks":
            torch.distributed.all_reduce(tensor)
        expected = cut.get(name, cut["o"])(whole[name])
        assert tensor.shape == expected.shape, name
        error = (tensor.double() - expected.double()).abs().max() / expected.double().abs().max()
        found[name] = [float(error), bool(torch.equal(tensor, expected))]
    return found


@dataclass(frozen=True)
class Sizes:
    heads: int
    heads_kv: int
    columns: int = 16
    columns_v: int = 24
    dtype: torch.dtype = torch.float32

    def draw(self, *axes: int) -> list[Tensor]:
        """Return q, k, v and the gradient of o, ``[*axes, heads, columns]``."""
        shapes = ((self.heads, self.columns), (self.heads_kv, self.columns), (self.heads_kv, self.columns_v))
        return [
            draw(i, *axes, *shape, dtype=self.dtype) for i, shape in enumerate((*shapes, (self.heads, self.columns_v)))
        ]


def fixed(cp: ContextParallel, options: dict[str, Any], tokens: int, sizes: Sizes) -> Any:
    inputs = [x.transpose(1, 2) for x in sizes.draw(2, tokens)]
    dlse = draw(6, 2, sizes.heads, tokens)
    options = make_options(options, sizes.heads)
    whole = run_case(flash_attention, inputs[:3], (inputs[3], dlse), options)
    local = [cp.shard(x, 2) for x in (*inputs, dlse)]
    mine = run_case(cp.attention, local[:3], (local[3], local[4]), options)
    return compare(mine, whole, {"o": lambda x: cp.shard(x, 2), "dsinks": lambda x: x})


def packed(cp: ContextParallel, options: dict[str, Any], lengths: tuple[int, ...], sizes: Sizes) -> Any:
    inputs, dlse = sizes.draw(sum(lengths)), draw(6, sum(lengths), sizes.heads).t()
    options = make_options(options, sizes.heads)
    plan = cp.plan(lengths)
    starts = torch.tensor(plan.starts, dtype=torch.int32, device=inputs[0].device)

    def one(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        return flash_attention_varlen(q, k, v, starts, starts, max(lengths), max(lengths), **given)

    whole = run_case(one, inputs[:3], (inputs[3], dlse), options)
    local = [cp.shard(x, 0, plan) for x in inputs]
    gradients = local[3], cp.shard(dlse, 1, plan)
    mine = run_case(lambda q, k, v, **given: cp.attention_packed(q, k, v, plan, **given), local[:3], gradients, options)
    cut = {"o": lambda x: cp.shard(x, 0, plan), "lse": lambda x: cp.shard(x, 1, plan), "dsinks": lambda x: x}
    return compare(mine, whole, cut)


def copies_and_compares_nothing(cp: ContextParallel) -> bool:
    """Whether a call with another plan than before copies nothing to the device, and compares nothing over ranks."""
    inputs = Sizes(8, 4).draw(TOKENS)[:3]

    def call(plan: PackedPlan) -> Tensor:
        q, k, v = (cp.shard(x, 0, plan) for x in inputs)
        o: Tensor = cp.attention_packed(q, k, v, plan, causal=True)
        return o

    call(cp.plan(LENGTHS))
    later = cp.plan((40, 24))
    refuse = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(plans, "on_device", refuse), mock.patch.object(exchange, "compare", refuse):
        call(later)
    return not refuse.called


def keys_travel(cp: ContextParallel, lengths: tuple[int, ...], *, counted: bool) -> int:
    """Return how often keys of other ranks come for a call of packed documents and its gradients.

    Where operations are ``counted``, autograd has the operator.
    """
    plan = cp.plan(lengths)
    q, k, v = (cp.shard(x, 0, plan).requires_grad_() for x in Sizes(8, 4).draw(sum(lengths))[:3])
    counter = FlopCounterMode(display=False) if counted else contextlib.nullcontext()
    with counter, mock.patch.object(documents, "start_gathering", wraps=exchange.start_gathering) as gathering:
        cp.attention_packed(q, k, v, plan, causal=True).sum().backward()
    return gathering.call_count


def compiled(rank: int, ranks: int) -> dict[str, Any]:
    """Compiled calls beside eager ones: one graph, also for batches of other documents."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    found = _compiled(mesh, ranks, ("heads", 2), ("gather", 1))
    return {**found, "autocast": compiled_under_autocast(ContextParallel(mesh, strategy="heads"))}


def compiled_under_autocast(cp: ContextParallel) -> bool:
    """Whether inputs of fp32 are cast as eagerly."""
    q, k, v = (cp.shard(x.transpose(1, 2), 2) for x in Sizes(4, 4).draw(1, TOKENS)[:3])
    graph = torch.compile(lambda q, k, v: cp.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [call(q, k, v) for call in (functools.partial(cp.attention, causal=True), graph)]
    return found[0].dtype == torch.bfloat16 and torch.equal(*found)


def compiled_in_two_dimensions(rank: int, ranks: int) -> dict[str, Any]:
    """As ``compiled``."""
    return _compiled(mesh_of_two(ranks), ranks, ("heads+gather", 1), ("heads+gather", 2))


def _compiled(mesh: DeviceMesh, ranks: int, *strategies: tuple[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy, head_groups in strategies:
        cp = ContextParallel(mesh, strategy=strategy, head_groups=head_groups)
        counter = CompileCounterWithBackend("aot_eager")

        def call(
            q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plan: Any, *, cp: ContextParallel = cp
        ) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {"causal": True, "sinks": sinks, "return_lse": True}
            if plan is None:
                o, lse = cp.attention(q, k, v, **options)
            else:
                o, lse = cp.attention_packed(q, k, v, plan, **options)
            return o * 2, lse + 1

        graph = torch.compile(call, backend=counter, fullgraph=True)
        sizes = Sizes(4 * ranks, 2 * ranks)
        plans = [None, *(cp.plan(lengths) for lengths in (LENGTHS, (40, 24), (1, 2, 61)))]
        for number, plan in enumerate(plans):
            inputs = [x if plan else x.transpose(1, 2) for x in sizes.draw(*(() if plan else (2,)), TOKENS)]
            local = [cp.shard(x, 0 if plan else 2, plan) for x in inputs]
            sinks = draw(9, sizes.heads)
            results = []
            runs: list[Any] = [call, graph] if number != 1 else [graph, call]  # a first packed call is compiled, too
            for run in runs:
                leaves = [x.detach().requires_grad_() for x in (*local[:3], sinks)]
                o, lse = run(*leaves, plan)
                gradients = torch.autograd.grad((o.square().sum() + lse.sin().sum()), leaves)
                results.append([o.detach(), lse.detach(), *gradients])
            if runs[0] is graph:
                results.reverse()
            same = all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))
            strides = results[0][0].stride() == results[1][0].stride()
            found[f"{strategy}, {head_groups} groups, {number}"] = same and strides
        found[f"{strategy}, {head_groups} groups, graphs"] = counter.frame_count <= 3  # fixed; packed, then any plan
    return found


def message(call: Callable[[], Any], expected: type[Exception]) -> str:
    try:
        call()
    except expected as error:
        return str(error)
    return "no error"


def all_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    found: dict[str, Any] = {}
    for strategy in ("heads", "gather"):
        cp = ContextParallel(mesh, strategy=strategy)
        for name, options in FIXED.items():
            found[f"{strategy}, {name}"] = fixed(cp, options, TOKENS, Sizes(8, 4))
        for name, options in PACKED.items():
            found[f"{strategy}, packed, {name}"] = packed(cp, options, LENGTHS, Sizes(8, 4))
        other = Sizes(4, 4) if strategy == "heads" else Sizes(6, 3)
        found[f"{strategy}, other heads"] = fixed(cp, FIXED["causal"], TOKENS, other)
        if strategy == "heads":
            grouped = ContextParallel(mesh, strategy=strategy, head_groups=2)
            for name in ("causal", "sinks", "alibi"):
                found[f"heads, 2 groups, {name}"] = fixed(grouped, FIXED[name], TOKENS, Sizes(16, 8))
                found[f"heads, 2 groups, packed, {name}"] = packed(grouped, PACKED[name], LENGTHS, Sizes(16, 8))
        found[f"{strategy}, later plans"] = {"x": [0.0, copies_and_compares_nothing(cp)]}
        if strategy == "gather":
            for lengths in ((TOKENS,), (3 * ranks, 2 * ranks, 3 * ranks), (5, 2, 5, 5, 31, 13, 3)):
                for name in ("causal", "full"):  # of some, a rank needs all keys that come
                    found[f"gather, packed {lengths}, {name}"] = packed(cp, FIXED[name], lengths, Sizes(6, 3))
            batches = (8, *(1,) * 40), (TOKENS,)  # one of a few tokens is split, and one of all
            often = [keys_travel(cp, lengths, counted=counted) for counted in (False, True) for lengths in batches]
            found["gather, keys travel"] = {"x": [0.0, often == [1, 2, 1, 2]]}
        x = draw(1, 3, TOKENS, 2)
        found[f"{strategy}, unshard"] = {"x": [0.0, torch.equal(cp.unshard(cp.shard(x, 1), 1), x)]}
    return found


def mesh_of_two(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("gather", "heads"))


def two_dimensions(_rank: int, ranks: int) -> dict[str, Any]:
    mesh = mesh_of_two(ranks)
    cp = ContextParallel(mesh, strategy="heads+gather")
    grouped = ContextParallel(mesh, strategy="heads+gather", head_groups=2)
    whole_k = Sizes(8, 2).draw(1, TOKENS)[1].transpose(1, 2)
    found: dict[str, Any] = {name: fixed(cp, options, TOKENS, Sizes(8, 2)) for name, options in FIXED.items()}
    found |= {f"packed, {name}": packed(cp, options, LENGTHS, Sizes(8, 2)) for name, options in PACKED.items()}
    found["packed, whole documents"] = packed(cp, PACKED["sinks"], (16, 16, 16, 16), Sizes(8, 2))
    found["sinks and window"] = fixed(cp, {**FIXED["causal window"], "sinks": True}, TOKENS, Sizes(8, 2))
    for name in ("causal", "sinks", "alibi"):
        found[f"2 groups, {name}"] = fixed(grouped, FIXED[name], TOKENS, Sizes(8, 4))
        found[f"2 groups, packed, {name}"] = packed(grouped, PACKED[name], LENGTHS, Sizes(8, 4))
    for shape in ((1, ranks), (ranks, 1)):
        line = ContextParallel(init_device_mesh("cpu", shape), strategy="heads+gather")
        found[f"{shape}"] = fixed(line, FIXED["sinks"], TOKENS, Sizes(8, 4))
        found[f"{shape}, packed"] = packed(line, FIXED["sinks"], LENGTHS, Sizes(8, 4))
    plan = cp.plan(LENGTHS)
    found["later plans"] = {"x": [0.0, copies_and_compares_nothing(cp)]}
    labels = torch.arange(whole_k.shape[2]).to(torch.int16)
    found["int16, unshard"] = {"x": [0.0, torch.equal(cp.unshard(cp.shard(labels, 0), 0), labels)]}
    empty = whole_k[:, :, :0]
    found["no tokens, unshard"] = {"x": [0.0, cp.unshard(cp.shard(empty, 2), 2).shape == empty.shape]}
    found["unshard"] = {"x": [0.0, torch.equal(cp.unshard(cp.shard(whole_k, 2), 2), whole_k)]}
    found["unshard, packed"] = {"x": [0.0, torch.equal(cp.unshard(cp.shard(whole_k, 2, plan), 2, plan), whole_k)]}
    return found


def gpu_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    sizes = Sizes(8, 4, 128, 128, torch.bfloat16)
    found: dict[str, Any] = {}
    for strategy in ("heads", "gather"):
        cp = ContextParallel(mesh, strategy=strategy)
        for name in ("causal", "full", "causal window", "softcap and scale", "sinks"):
            found[f"{strategy}, {name}"] = fixed(cp, FIXED[name], 2048 * ranks, sizes)
        for name in ("causal", "full", "sinks"):
            found[f"{strategy}, packed, {name}"] = packed(cp, FIXED[name], (1, 300, 77, 1024 * ranks, 646), sizes)
        few_split = (512 * ranks, *(64,) * 80 * ranks)
        assert plan_documents(few_split, ranks).keeps
        found[f"{strategy}, packed, few split"] = packed(cp, FIXED["causal"], few_split, sizes)
        found[f"{strategy}, repeats"] = {"same": [0.0, _same_in_repeats(cp, sizes)]}
        n = 512 * ranks
        for name, lengths in (("graph", (n, 2 * n, n)), ("graph, few split,", few_split)):
            found[f"{strategy}, {name} repeats"] = {"same": [0.0, _same_in_graph(cp, sizes, lengths)]}
    sizes = Sizes(8 * ranks, 4 * ranks, 128, 128, torch.bfloat16)
    for transport in ("collectives", "symmetric"):
        for groups in (1, 2, 4):
            cp = ContextParallel(mesh, strategy="heads", transport=transport, head_groups=groups)
            name = f"heads, {transport}, {groups} groups"
            found |= _causal_and_sinks(cp, name, ranks, sizes)
    for shape in [(ranks // 2, 2), (ranks, 1)] if ranks % 2 == 0 else []:
        both = init_device_mesh("cuda", shape, mesh_dim_names=("gather", "heads"))
        for transport in ("collectives", "symmetric")[: shape[1]]:
            for groups in (1, 2):
                cp = ContextParallel(both, strategy="heads+gather", transport=transport, head_groups=groups)
                name = f"both, {shape}, {transport}, {groups} groups"
                found |= _causal_and_sinks(cp, name, ranks, sizes)
    return found


def _same_in_graph(cp: ContextParallel, sizes: Sizes, lengths: tuple[int, ...]) -> bool:
    """Whether a CUDA graph of a packed call and its gradients, replayed on other inputs, gives the bits of the call."""
    plan = cp.plan(lengths)
    held = [cp.shard(x, 0, plan) for x in sizes.draw(sum(lengths))]
    q, k, v = leaves = [x.requires_grad_() for x in held[:3]]
    do = held[3]

    def call() -> list[Tensor]:
        o = cp.attention_packed(q, k, v, plan, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for number in range(5):
        with torch.no_grad():
            for x in held:
                x.mul_(1 + number / 4)
        graph.replay()
        replayed = [x.clone() for x in captured]
        if not all(torch.equal(mine, other) for mine, other in zip(replayed, call(), strict=True)):
            return False
    return True


def _causal_and_sinks(cp: ContextParallel, name: str, ranks: int, sizes: Sizes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in ("causal", "sinks"):
        found[f"{name}, {case}"] = fixed(cp, FIXED[case], 2048 * ranks, sizes)
        found[f"{name}, packed, {case}"] = packed(cp, FIXED[case], (1, 300, 77, 1024 * ranks, 646), sizes)
    found[f"{name}, repeats"] = {"same": [0.0, _same_in_repeats(cp, sizes)]}
    found[f"{name}, graph repeats"] = {
        "same": [0.0, _same_in_graph(cp, sizes, (512 * ranks, 1024 * ranks, 512 * ranks))]
    }
    return found


def _same_in_repeats(cp: ContextParallel, sizes: Sizes) -> bool:
    local = [cp.shard(x.transpose(1, 2), 2) for x in sizes.draw(1, 4096)]
    dlse = draw(6, 1, sizes.heads, local[0].shape[2])
    first = run_case(cp.attention, local[:3], (local[3], dlse), {"causal": True})
    for _ in range(200):
        again = run_case(cp.attention, local[:3], (local[3], dlse), {"causal": True})
        if not all(torch.equal(again[name], first[name]) for name in first):
            return False
    return True
