"""One rank of 1,024: its plans and its memory, with collectives that send nothing and tensors without data."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.attention.inputs import Options
from flashmoe_science.distributed import ContextParallel
from flashmoe_science.distributed.calls import ByHead, Inputs
from flashmoe_science.distributed.layout import PackedLayout, documents_in, plan_packed

from ..test_simulate_ranks import simulate_ranks
from .ranks import fake_ranks

RANKS, TOKENS = 1024, 10_485_760
HEADS, HEADS_KV, D = 32, 8, 128


class Memory(TorchDispatchMode):
    """The most bytes that tensors made within held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.held += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
                self.most = max(self.most, self.held)
        return made

    def free(self, size: int) -> None:
        self.held -= size


def documents() -> list[int]:
    """Lengths of at most 16k, ten million tokens in all."""
    make = torch.Generator().manual_seed(0)
    drawn = torch.empty(20_000).log_normal_(6.8, 1.2, generator=make).long().clamp(1, 16384)
    ends = drawn.cumsum(0)
    lengths = drawn[ends < TOKENS].tolist()
    return [*lengths, TOKENS - sum(lengths)]


@pytest.fixture(scope="module")
def packed() -> PackedLayout:
    return plan_packed(documents(), RANKS, 8)


def test_a_plan_of_ten_million_tokens_takes_little_time(packed: PackedLayout) -> None:
    begun = time.process_time()
    with fake_ranks(RANKS, 700):
        cp = ContextParallel(init_device_mesh("cpu", (RANKS,)), strategy="gather")
        plan = cp.plan(documents())
        calls = plan.calls(Options(causal=True))
    assert time.process_time() - begun < 5  # 0.3 s on a machine that does nothing else
    assert plan.layout == packed.layout
    assert sum(call.rows for call in calls) == TOKENS // RANKS
    for call, span in zip(calls, plan.layout.spans(700), strict=True):
        assert call.starts is not None
        queries, keys = (call.starts[name].diff() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        assert int(queries.sum()) == span[1] - span[0]
        assert int(keys.sum()) == call.keys[1] - call.keys[0]
        # The last query of a document's part is its last key, and the first key begins the document.
        held = documents_in(span, plan.starts)
        assert keys.tolist() == [min(end, span[1]) - start for start, end in held]
        assert queries.tolist() == [min(end, span[1]) - max(start, span[0]) for start, end in held]


def test_all_ranks_have_all_tokens_once_and_about_the_same_work(packed: PackedLayout) -> None:
    held = sorted(number for chunks in packed.layout.chunks for number in chunks)
    assert held == list(range(8 * RANKS))
    work = []
    for rank in range(RANKS):
        parts = [
            (max(span[0], start) - start, min(span[1], end) - start)
            for span in packed.layout.spans(rank)
            for start, end in documents_in(span, packed.starts)
        ]
        work.append(sum((last - first) * (last + first) for first, last in parts))
    assert max(work) < 1.1 * sum(work) / RANKS


def test_documents_are_found_where_they_begin_and_end() -> None:
    starts = (0, 3, 4, 9)
    assert documents_in((0, 3), starts) == [(0, 3)]
    assert documents_in((3, 4), starts) == [(3, 4)]
    assert documents_in((2, 5), starts) == [(0, 3), (3, 4), (4, 9)]
    assert documents_in((8, 9), starts) == [(4, 9)]


@pytest.mark.parametrize(("ranks", "strategy"), [(1024, "gather"), (8, "heads")])
def test_a_rank_holds_the_memory_that_is_foreseen(ranks: int, strategy: str) -> None:
    tokens = TOKENS // RANKS
    fake = FakeTensorMode()
    with fake_ranks(ranks, ranks - 3):
        cp = ContextParallel(init_device_mesh("cpu", (ranks,)), strategy=strategy)
        with fake:
            q, k, v, do = (
                torch.empty(1, tokens, heads, D, dtype=torch.bfloat16).transpose(1, 2)
                for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)
            )
        inputs = Inputs(q, k, v, ByHead(None, None))
        recipe = cp.recipe(inputs, Options(causal=True), None)
        with fake, Memory() as memory:
            found = recipe.forward(inputs)
            gradients = recipe.backward(inputs, found, do, None, sinks=False)
    assert [x.shape for x in gradients[:3]] == [x.shape for x in inputs[:3]]
    row = 2 * tokens * D  # bytes of a head of this rank
    if strategy == "gather":
        expected = ranks * tokens * 2 * HEADS_KV * D * simulate_ranks.GATHER_BYTES
        assert expected < memory.most < 1.05 * expected
    else:  # what is kept, and what travels
        assert memory.most < 12 * row * (HEADS + HEADS_KV)
