"""Experts over symmetric memory: pairs are sorted while tokens, or their gradients, are still copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import fused_moe
from flashmoe_science.distributed import ExpertParallel, exchange
from flashmoe_science.moe.backward import autograd

from ..moe.conftest import as_on_a_gpu  # noqa: F401 - a fixture
from ..moe.streams import MAIN, SORT, Operation, Streams, check_order
from .symmetric import Machine, patch_symmetric_memory

RANKS, TOKENS, EXPERTS, HIDDEN, INTER, TOP_K = 2, 1024, 8, 64, 32, 3
NAMES = ("x", "w_gate_up", "w_down", "topk_weights")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(RANKS)
    patch_symmetric_memory(monkeypatch, found)
    monkeypatch.setattr(exchange, "compare", lambda describe, *_groups: describe())
    return found


def experts(machine: Machine, transport: Any) -> ExpertParallel:
    ep = ExpertParallel(SimpleNamespace(ndim=1, get_group=lambda: machine, device_type="cpu"))  # type: ignore[arg-type] # has what is read
    ep._transport = transport
    return ep


def draw(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what all ranks have."""
    make = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=make) / 4).to(dtype)

    return {
        "x": random(tokens, HIDDEN), "w_gate_up": random(EXPERTS, 2 * INTER, HIDDEN),
        "w_down": random(EXPERTS, HIDDEN, INTER), "topk_weights": random(tokens, TOP_K),
        "topk_ids": torch.rand(tokens, EXPERTS, generator=make).argsort(1)[:, :TOP_K].contiguous(),
        "do": random(tokens, HIDDEN),
    }  # fmt: skip


def step(call: Callable[..., Tensor], given: dict[str, Tensor], how: str) -> list[Tensor]:
    """Return the output and the gradients that are wanted."""
    wanted = {"x only": NAMES[:1], "weights only": NAMES[1:3]}.get(how, NAMES)
    leaves = {name: given[name].detach().clone().requires_grad_(name in wanted) for name in NAMES}
    ids = given["topk_ids"]

    def layer(x: Tensor) -> Tensor:
        return call(leaves["w_gate_up"], leaves["w_down"], leaves["topk_weights"], ids, x=x)

    out = checkpoint(layer, leaves["x"], use_reentrant=False) if how == "checkpoint" else layer(leaves["x"])
    if how == "two layers":
        out = layer(out + leaves["x"])
    found = torch.autograd.grad(out, [leaves[name] for name in wanted], given["do"])
    return [out.detach(), *found]


def of_rank(ep: ExpertParallel, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: ep.shard(x) if name.startswith("w_") else x.unflatten(0, (RANKS, -1))[ep.rank].contiguous()
        for name, x in given.items()
    }  # fmt: skip


def call_of(ep: ExpertParallel) -> Callable[..., Tensor]:
    return lambda up, down, weights, ids, *, x: ep.fused_moe(x, up, down, weights, ids)


HOW = ("all", "x only", "weights only", "two layers", "checkpoint", "anomaly", "checks")


@pytest.mark.parametrize("how", HOW)
def test_experts_give_what_one_process_gives(machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("FLASHMOE_CHECK", str(int(how == "checks")))
    given = draw(26, torch.float32)  # so few are sorted in order
    whole = step(lambda up, down, weights, ids, *, x: fused_moe(x, up, down, weights, ids), given, how)

    def call(_rank: int, transport: Any) -> list[Tensor]:
        ep = experts(machine, transport)
        return step(call_of(ep), of_rank(ep, given), how)

    with torch.autograd.set_detect_anomaly(how == "anomaly"):  # of all threads
        found = machine.run(call)
    for number, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([each[number] for each in found]), expected, rtol=1e-4, atol=1e-5)
    assert not machine.races()


@pytest.mark.parametrize("how", ["all", "checkpoint"])
def test_a_call_that_is_made_again_keeps_no_ids(machine: Machine, how: str) -> None:
    given = draw(26, torch.float32)

    def call(_rank: int, transport: Any) -> bool:
        ep = experts(machine, transport)
        mine = {name: x.requires_grad_(name == "x") for name, x in of_rank(ep, given).items()}

        def layer(x: Tensor) -> Tensor:
            return ep.fused_moe(x, *(mine[name] for name in (*NAMES[1:], "topk_ids")))

        out = checkpoint(layer, mine["x"], use_reentrant=False) if how == "checkpoint" else layer(mine["x"])
        node: Any = out.grad_fn
        return node.ids() is not None

    assert machine.run(call) == [how == "all"] * RANKS


@pytest.fixture
def streams(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Streams:  # noqa: F811
    monkeypatch.setattr(autograd, "_is_reference", lambda _device, _kernel: False)
    found = Streams(monkeypatch)
    note = machine.note

    def noted(tensor: Tensor, *, writes: bool) -> None:
        before = len(machine.accesses)
        note(tensor, writes=writes)
        if len(machine.accesses) > before and not writes:
            found.add(f"read {tensor.nbytes}")

    monkeypatch.setattr(machine, "note", noted)
    return found


def run(machine: Machine, streams: Streams, how: str, kind: str = "symmetric") -> list[list[Operation]]:
    """Return the operations of each rank. Launches compute nothing, so only their order counts."""
    given = draw(RANKS * TOKENS, torch.bfloat16)

    def call(_rank: int, transport: Any) -> list[Operation]:
        transport.name = kind
        ep = experts(machine, transport)
        step(call_of(ep), of_rank(ep, given), how)
        return streams.of_thread.operations

    return machine.run(call)


@pytest.mark.parametrize("how", [each for each in HOW if each != "anomaly"])  # which looks for NaN
def test_the_sort_needs_the_ids_alone(machine: Machine, streams: Streams, how: str) -> None:
    large = f"read {TOKENS * HIDDEN * 2}"
    for found in run(machine, streams, how):
        check_order(found)
        assert [each.stream for each in found if each.stream != MAIN and each.name not in SORT] == []
        counts = [number for number, each in enumerate(found) if each.name == SORT[0]]
        early = [number for number in counts if found[number].stream != MAIN]
        # A call that is made again is after the gradient has come.
        assert len(counts) == {"two layers": 4, "checkpoint": 3}.get(how, 2)
        assert len(early) == {"two layers": 4, "checkpoint": 2}.get(how, 2)
        for number in early:
            copies = [other for other in range(number) if found[other].name == large][-RANKS:]
            assert not found[number].before & {*copies}, "the sort waits for the copies"
            small = {other for other in range(copies[0]) if found[other].name.startswith("read")}
            assert small <= found[number].before, "the sort begins before its ids are there"
            others = [other for other in range(number, number + 6) if found[other].name not in SORT]
            assert all({*copies} <= found[other].before for other in others)
    assert not machine.races()


def test_of_other_transports_all_is_in_order(machine: Machine, streams: Streams) -> None:
    early, ordered = (run(machine, streams, "all", kind) for kind in ("symmetric", "collectives"))
    for one, other in zip(early, ordered, strict=True):
        assert all(each.stream == MAIN for each in other)
        assert [each.name for each in one] == [each.name for each in other]


def test_all_but_the_first_have_come_before_the_first_is_read(machine: Machine) -> None:
    x = torch.randn(RANKS, 5, 16)
    ids = torch.arange(RANKS * 15).view(RANKS, 5, 3)

    def call(rank: int, transport: Any) -> list[bool]:
        found: list[bool] = []

        def between(reads: Callable[[], int], others: list[Tensor]) -> None:
            found.extend([reads() == RANKS * len(others), all(torch.equal(each, ids.flatten(0, 1)) for each in others)])

        def reads(since: int) -> int:
            return sum(each.rank == rank and not each.writes for each in machine.accesses[since:])

        for tensors in ([x[rank], ids[rank]], [x[rank]]):
            since = len(machine.accesses)
            (tokens, *_) = transport.gather(tensors, functools.partial(between, functools.partial(reads, since)))
            found.append(torch.equal(tokens, x.flatten(0, 1)))
        return found

    assert machine.run(call) == [[True] * 6] * RANKS
    assert not machine.races()
