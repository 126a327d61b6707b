"""Pairs are sorted as soon as their ids are there, and nothing else begins before its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import fused_moe
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import early
from flashmoe_science.moe.backward.autograd import moe_gradients
from flashmoe_science.moe.backward.plan import GRADIENTS, plan_backward
from flashmoe_science.moe.checks import moe_problem_of
from flashmoe_science.moe.early import note_ids
from flashmoe_science.moe.plan import most_workspace, plan_moe, workspace_sizes
from flashmoe_science.moe.problem import Options

from .streams import MAIN, SORT, Streams, check_order

EXPERTS, HIDDEN, INTER, TOP_K = 8, 64, 32, 4
BY_TOKEN = ("x", "topk_weights", "topk_ids")


@pytest.fixture
def streams(as_on_a_gpu, monkeypatch):
    return Streams(monkeypatch)


def make(tokens: int, experts: int = EXPERTS, device: str = "cpu") -> dict[str, Any]:
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random, device=device) / 4).bfloat16()

    ids = torch.rand(tokens, experts, generator=random, device=device).argsort(1)[:, :TOP_K].int().contiguous()
    return {
        "x": draw(tokens, HIDDEN), "w_gate_up": draw(experts, 2 * INTER, HIDDEN),
        "w_down": draw(experts, HIDDEN, INTER), "topk_weights": draw(tokens, TOP_K), "topk_ids": ids,
    }  # fmt: skip


def gradients(tensors: dict[str, Any]) -> dict[str, Tensor]:
    x = tensors["x"]
    product = x.new_zeros(tensors["topk_ids"].numel(), 2 * INTER)
    asked = [name for name in GRADIENTS if name in tensors]
    return moe_gradients(x, (product, x.new_empty(0, 0)), tensors, Options(), asked, "moe_backward_triton")


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "forward": lambda given: fused_moe(**given), "gradients": gradients
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_sort_runs_beside_copies_and_all_else_after_both(streams, call):
    tensors = make(2048)
    note_ids(tensors["topk_ids"], EXPERTS)
    streams.add("copy")
    call(tensors)
    found = streams.of_thread.operations
    check_order(found)
    assert tuple(each.name for each in found[1:4]) == SORT
    for each in found[1:]:
        assert (each.stream != MAIN) == (each.name in SORT)
        assert (0 in each.before) == (each.name not in SORT), each.name
    for _ in range(2):  # a note is of one call
        before = len(found)
        call(tensors)
        check_order(found[before:])
        assert [each.name for each in found[before:]] == [each.name for each in found[1:before]][-len(found) + before :]
        assert all(each.stream == MAIN for each in found[before:])


@pytest.mark.parametrize("why", ["other ids", "fewer ids", "other stream", "little room", "few pairs", "none", "taken"])
def test_a_note_of_something_else_changes_nothing(streams, monkeypatch, why):
    tensors = make(1024 if why == "few pairs" else 2048)
    ids = tensors["topk_ids"]
    if why == "none":
        note_ids(ids, EXPERTS)
        note_ids(None, EXPERTS)
    else:
        noted = {"other ids": ids.clone(), "fewer ids": ids[:2000]}.get(why, ids)
        if why == "little room":
            monkeypatch.setattr(early, "most_workspace", lambda *_sizes: 100)
        note_ids(noted, EXPERTS)
    if why == "other stream":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: object())
    if why == "taken":
        fused_moe(**make(2048))
    before = len(streams.of_thread.operations)
    fused_moe(**tensors)
    found = streams.of_thread.operations[before:]
    assert found
    assert all(each.stream == MAIN for each in found)


def test_the_callers_stream_waits_for_a_sort_that_failed(streams):
    ids = make(2048)["topk_ids"]
    note_ids(ids, EXPERTS)
    taken = early.take_early_sort(ids, 0)
    assert taken is not None

    def fail() -> None:
        with taken.beside() as side:
            streams.add("sort", side)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert streams.of_thread.main.seen == {0}


@pytest.mark.parametrize("experts", [4, 60, 512])
@pytest.mark.parametrize("tokens", [1025, 4097, 65536])
def test_there_is_room_for_the_tables_of_every_plan(tokens, experts):
    tensors = {name: x.expand(tokens, -1) if name in BY_TOKEN else x for name, x in make(1, experts).items()}
    tensors |= {name: tensors[name].contiguous() for name in BY_TOKEN}
    room = most_workspace(tokens * TOP_K, experts)
    for gpu in map(SPECS.__getitem__, ("A100", "H200")):
        problem = moe_problem_of(tensors, keep_product=True)
        for plan in (plan_moe(problem, gpu), plan_backward(problem, gpu, GRADIENTS[:4])):
            assert sum(workspace_sizes(plan).values()) <= room
    assert room <= 7 * tokens * TOP_K + 16 * experts + 4096


@pytest.mark.gpu
def test_bits_are_those_of_a_sort_in_order():
    tensors = make(4096, 64, "cuda")
    ids, do = tensors.pop("topk_ids"), torch.randn(4096, HIDDEN, device="cuda").bfloat16()
    leaves: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    copied = torch.zeros(1 << 26, device="cuda")

    def call(*, beside: bool) -> list[Tensor]:
        def copy_behind_ids(_gradient: Tensor | None = None) -> None:
            note_ids(own if beside else None, 64)
            copied[: 1 << 25].copy_(copied[1 << 25 :])

        own = ids - 0
        copy_behind_ids()
        out = fused_moe(**leaves, topk_ids=own)
        out.register_hook(copy_behind_ids)  # in the thread of the gradients
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = call(beside=False)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        assert all(map(torch.equal, call(beside=True), expected))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(beside=True)
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, captured, expected))
