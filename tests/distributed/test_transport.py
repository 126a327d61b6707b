"""Symmetric memory: which part of which rank's buffer is read. GPUs do the same in ``test_context_parallel_gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from flashmoe_science.distributed import transport as transports
from flashmoe_science.distributed.copies import widened

from .symmetric import CPU, Machine, patch_symmetric_memory


@pytest.fixture(params=[2, 3])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(request.param)
    patch_symmetric_memory(monkeypatch, found)
    return found


def test_each_rank_reads_its_part_of_every_message(machine: Machine) -> None:
    ranks, dtypes = machine.ranks, (torch.bfloat16, torch.float32)

    def sent(rank: int, turn: int, number: int) -> Tensor:
        return torch.arange(ranks * 15).view(ranks, 5, 3) + 100 * rank + 1000 * number + 10 * turn

    def call(_rank: int, transport: Any) -> list[list[Tensor]]:
        found = []
        for turn in range(2):  # the second time in the same places
            transport.begin(1000, CPU)
            messages = [transport.message((ranks, 5, 3), dtype, CPU) for dtype in dtypes]
            for number, message in enumerate(messages):
                message.copy_(sent(machine.rank(), turn, number))
            found.append([transport.exchange(message) for message in messages])
        return found

    for rank, of_turns in enumerate(machine.run(call)):
        for turn, received in enumerate(of_turns):
            for number, dtype in enumerate(dtypes):
                expected = torch.stack([sent(peer, turn, number)[rank] for peer in range(ranks)]).to(dtype)
                assert torch.equal(received[number], expected)
    assert machine.accesses
    assert not machine.races()


def test_ranks_gather_all_tensors_and_sum_their_own_tokens_in_order(machine: Machine) -> None:
    ranks, make = machine.ranks, torch.Generator().manual_seed(0)
    x = torch.randn(ranks, 5, 16, generator=make).bfloat16()
    ids = torch.randint(0, 9, (ranks, 5, 3), generator=make, dtype=torch.int32)
    partial = torch.randn(ranks, ranks * 5, 16, generator=make).bfloat16()
    weights = torch.randn(ranks, ranks * 5, 2, generator=make)

    def call(rank: int, transport: Any) -> list[Any]:
        return [
            transport.gather([x[rank], ids[rank]]),
            transport.sum([partial[rank], weights[rank]]),
            transport.sum([weights[rank]]),
        ]

    for rank, ((tokens, numbers), (total, of_weights), (again,)) in enumerate(machine.run(call)):
        own = slice(rank * 5, rank * 5 + 5)
        assert torch.equal(tokens, x.flatten(0, 1))
        assert torch.equal(numbers, ids.flatten(0, 1))
        assert torch.equal(total, partial[:, own].float().sum(0).bfloat16())
        assert torch.equal(of_weights, weights[:, own].sum(0))
        assert torch.equal(again, of_weights)
    assert not machine.races()


@pytest.mark.parametrize(("columns", "wide"), [(32, True), (16, True), (12, False)])
def test_wide_copies_keep_every_bit(columns: int, *, wide: bool) -> None:
    bits = torch.randint(-(2**15), 2**15, (3, 4, 32), dtype=torch.int16)  # NaN of all kinds too
    source = bits.view(torch.bfloat16)[..., :columns].transpose(0, 1)
    into = torch.zeros(4, 3, columns, dtype=torch.bfloat16)
    target, given = widened([into, source])
    assert (given.element_size() == 16) == wide
    target.copy_(given)
    assert torch.equal(into.view(torch.int16), bits[..., :columns].transpose(0, 1))


@pytest.mark.parametrize("odd", ["offset", "stride", "columns"])
def test_other_rows_stay_as_they_are(odd: str) -> None:
    x = torch.zeros(4, 40, dtype=torch.bfloat16)
    found = {"offset": x[:, 1:33], "stride": torch.zeros(4, 36, dtype=torch.bfloat16)[:, :32], "columns": x.t()}[odd]
    assert widened([x, found])[1] is found
    assert widened([x])[0].shape == (4, 5)


def test_a_larger_buffer_is_used_once_all_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    patch_symmetric_memory(monkeypatch, machine)
    met = [True, False, True]

    def rendezvous(buffer: Tensor, group: Any) -> Any:
        if not met.pop(0):
            raise ValueError("a rank did not come")
        return machine.meet(buffer, group)

    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)

    def call(_rank: int, transport: Any) -> None:
        transport.begin(1000, CPU)
        assert transport._timeout_ms == 90_000
        small, handle = transport._buffer, transport._handle
        with pytest.raises(ValueError, match="did not come"):
            transport.begin(10**6, CPU)
        assert transport._buffer is small
        assert transport._handle is handle
        transport.begin(10**6, CPU)
        assert transport._buffer.numel() >= 10**6
        assert [before is small for before in transport._before] == [True]  # a CUDA graph may hold its address

    machine.run(call)


def test_buffers_that_are_kept_take_no_more_than_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    patch_symmetric_memory(monkeypatch, machine)

    def call(_rank: int, transport: Any) -> None:
        for step in range(200):
            transport.begin(10_000 * (step + 1), CPU)
        assert sum(x.numel() for x in transport._before) <= transport._buffer.numel() < 2 * 10_000 * 201

    machine.run(call)


def test_gpus_that_all_have_one_number_do_not_read_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each process sees one GPU, all are cuda:0, and symmetric memory of torch refuses them."""

    def gather(places: list[Any], mine: Any, group: Any) -> None:
        places[:] = [mine] * len(places)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group: Any = Machine(2)
    group.size = lambda: 2
    reason = transports._why_unreadable(group)
    assert reason == "a number of its own for each GPU, and ranks 0 and 1 both have cuda:0"
