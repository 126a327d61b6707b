"""One rank of 1,024: its plans and its memory, with collectives that send nothing and tensors without data."""

from __future__ import annotations

import bisect
import itertools
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
from flashmoe_science.distributed.layout import PackedLayout, plan_documents

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
    return plan_documents(documents(), RANKS)


def test_a_plan_of_ten_million_tokens_takes_little_time(packed: PackedLayout) -> None:
    begun = time.process_time()
    with fake_ranks(RANKS, 700):
        cp = ContextParallel(init_device_mesh("cpu", (RANKS,)), strategy="gather")
        plan = cp.plan(documents())
        calls = plan.calls(Options(causal=True))
    assert time.process_time() - begun < 5
    assert plan.layout == packed.layout
    alone = packed.rounds[700][0]
    for call, spans in ((calls.whole, packed.layout.held[700][:alone]), (calls.shared, packed.parts(700))):
        assert call is not None
        assert call.starts is not None
        queries, keys = (call.starts[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        assert queries == [end - start for start, end in spans]
        # The last query of a part is its last key, and the first key begins the document.
        assert keys == [end - document_of(start, packed)[0] for start, end in spans]
    assert calls.whole is not None
    assert calls.shared is not None
    assert calls.alone == calls.whole.rows
    assert calls.whole.rows + calls.shared.rows == TOKENS // RANKS
    assert calls.keys.tolist() == [place for spans in calls.rounds for span in spans for place in range(*span)]
    assert len(calls.keys) == calls.shared.keys[1]


def document_of(token: int, packed: PackedLayout) -> tuple[int, int]:
    behind = bisect.bisect_right(packed.starts, token)
    return packed.starts[behind - 1], packed.starts[behind]


def long_tailed(seed: int, tokens: int) -> list[int]:
    make = torch.Generator().manual_seed(seed)
    drawn = torch.empty(tokens).log_normal_(2.5, 1.4, generator=make).long() + 1
    lengths = drawn[drawn.cumsum(0) < tokens].tolist()
    return [*lengths, tokens - sum(lengths)]


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        *((long_tailed(seed, 40 * ranks), ranks) for seed in range(20) for ranks in (2, 3, 4, 8)),
        ([64], 4), ([1] * 64, 8), ([7, 1, 1, 1, 3, 3], 4), ([1, 1, 126], 8), ([30, 30, 4], 2), ([1, 1], 2),
    ],
)  # fmt: skip
def test_all_tokens_are_held_once_and_keys_arrive_in_their_order(lengths: list[int], ranks: int) -> None:
    packed = plan_documents(lengths, ranks)
    tokens = sum(lengths)
    held = [list(itertools.chain(*(range(*span) for span in spans))) for spans in packed.layout.held]
    assert sorted(itertools.chain(*held)) == list(range(tokens))
    assert {len(tokens_of_rank) for tokens_of_rank in held} == {tokens // ranks}
    sent: list[int] = []
    for rank, spans in enumerate(packed.layout.held):
        assert sum(packed.rounds[rank]) == len(spans)
        alone = packed.rounds[rank][0]
        assert all(span == document_of(span[0], packed) for span in spans[:alone])
        parts = list(itertools.chain(*(range(*span) for span in packed.parts(rank))))
        sent += parts + [-1] * (packed.sent - len(parts))
        rounds = iter(spans[alone:])
        for count in packed.rounds[rank][1:]:  # no document twice in a round
            documents = [document_of(start, packed) for start, _ in itertools.islice(rounds, count)]
            assert len(set(documents)) == count
    for rank in range(ranks):
        for causal, left in ((True, -1), (False, -1), (True, 0), (True, 1), (True, 9)):
            pieces = packed.pieces(packed.parts(rank), causal=causal, window=(left, -1))
            for keys in pieces.keys:
                places = packed.arrivals(keys)
                assert [sent[place] for span in places for place in range(*span)] == list(range(*keys))
                assert all(start < end for start, end in places)  # an empty one may begin behind the last rank


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_documents_stay_whole(count: int) -> None:
    packed = plan_documents([2048] * 4 * count, 4)
    assert packed.sent == 0
    assert packed.rounds == ((count,),) * 4


def test_all_ranks_have_about_the_same_work(packed: PackedLayout) -> None:
    work = []
    for spans in packed.layout.held:
        firsts = [document_of(start, packed)[0] for start, _ in spans]
        work.append(
            sum((end - first) ** 2 - (start - first) ** 2 for first, (start, end) in zip(firsts, spans, strict=True))
        )
    assert max(work) < 1.05 * sum(work) / RANKS
    assert packed.sent < TOKENS // RANKS


@pytest.mark.parametrize(("ranks", "strategy"), [(1024, "gather"), (8, "heads"), (1024, "heads+gather")])
def test_a_rank_holds_the_memory_that_is_foreseen(ranks: int, strategy: str) -> None:
    tokens = TOKENS // RANKS
    fake = FakeTensorMode()
    with fake_ranks(ranks, ranks - 3):
        mesh = init_device_mesh("cpu", (ranks // 8, 8) if strategy == "heads+gather" else (ranks,))
        cp = ContextParallel(mesh, strategy=strategy)
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
    if strategy != "heads":
        hosted = 8 if strategy == "heads+gather" else 1
        expected = ranks * tokens * 2 * HEADS_KV // hosted * D * simulate_ranks.GATHER_BYTES
        assert expected < memory.most < 1.05 * expected
    else:  # what is kept, and what travels
        assert memory.most < 12 * row * (HEADS + HEADS_KV)
