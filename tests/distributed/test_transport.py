"""Symmetric memory: which part of which rank's buffer is read. GPUs do the same in ``test_context_parallel_gpu``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from flashmoe_science.distributed import transport
from flashmoe_science.distributed.copies import widened
from flashmoe_science.distributed.transport import _IN_TURNS_BYTES, SymmetricMemory, _aligned

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


_LONG = 500  # tokens of an exchange that takes no turns
_STEPS: list[int | str] = [3, 5, 20, "long", "capture", "replay", "fail"]
_PROGRAM = [_STEPS[int(number)] for number in "3200431050551600330053552265040563066003056330660640"]


def _run_program(machine: Machine, program: Sequence[int | str], kind: type[SymmetricMemory] = SymmetricMemory) -> bool:
    """Exchange so many tokens, or what a name says; return whether all sums and tokens were right."""
    ranks = machine.ranks

    def call(rank: int, transport: Any) -> bool:
        fixed, right, replay = torch.zeros(6, 4), [], None
        for number, step in enumerate(program):
            if step == "capture":
                replay = machine.capture(lambda: transport.sum(transport.gather([fixed]))[0])
            elif step == "replay":
                fixed.fill_(10 * rank + number)
                right.append(replay is None or bool((replay() == ranks * fixed).all()))
            elif step == "fail":
                transport.begin(100, CPU)
                transport.message((5,), torch.float32, CPU).fill_(-1)
            else:
                n = _LONG if step == "long" else int(step)
                partial = torch.full((ranks * n, 3), 10.0 * rank + number)
                expected = 10.0 * sum(range(ranks)) + number * ranks
                right += [bool((x == expected).all()) for x in transport.sum([partial, partial.double()])]
                (tokens,) = transport.gather([partial])
                all_sent = [10 * peer + number for peer in range(ranks)]
                right.append(tokens[:: ranks * n, 0].tolist() == all_sent)
                transport.begin(2 * partial.nbytes, CPU)  # a third exchange: the turns of programs differ
                messages = [transport.message((ranks, n, 3), torch.float32, CPU) for _ in range(2)]
                for message in messages:
                    message.copy_(partial.view(ranks, n, 3))
                    right.append(transport.exchange(message)[:, 0, 0].tolist() == all_sent)
        return all(right)

    return all(machine.run(call, kind))


@pytest.fixture
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_IN_TURNS_BYTES", _aligned(17_000))


@pytest.mark.usefixtures("_short_turns")
def test_nothing_is_overwritten_before_all_have_read_it(machine: Machine) -> None:
    assert _run_program(machine, _PROGRAM)
    assert not machine.races()
    make = random.Random(machine.ranks)
    for _ in range(5):
        program = make.choices(_STEPS, k=40)
        assert _run_program(machine, [5, *program])  # larger buffers come on the way
        assert not machine.races()


class _OneRegion(SymmetricMemory):
    def begin(self, size: int, device: torch.device) -> None:
        self._has_met = False
        super().begin(size, device)


class _TurnsAfterFailures(SymmetricMemory):
    def begin(self, size: int, device: torch.device) -> None:
        self._has_met = True
        super().begin(size, device)


class _NoBarrierBeforeReads(SymmetricMemory):
    _begins = False

    def begin(self, size: int, device: torch.device) -> None:
        self._begins = True
        super().begin(size, device)
        self._begins = False

    def _meet(self) -> None:
        if self._begins:
            super()._meet()


class _NoBarrierInBegin(_NoBarrierBeforeReads):
    def _meet(self) -> None:
        if not self._begins:
            SymmetricMemory._meet(self)


@pytest.mark.parametrize("kind", [_OneRegion, _TurnsAfterFailures, _NoBarrierBeforeReads, _NoBarrierInBegin])
@pytest.mark.usefixtures("_short_turns")
def test_reads_of_what_is_overwritten_are_found(machine: Machine, kind: type[SymmetricMemory]) -> None:
    _run_program(machine, _PROGRAM, kind)
    assert machine.races()


@pytest.mark.usefixtures("_short_turns")
def test_replays_in_the_regions_of_turns_are_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_is_captured", lambda _device: False)
    _run_program(machine, _PROGRAM)
    assert machine.races()


@pytest.mark.usefixtures("_short_turns")
def test_short_exchanges_have_one_barrier_and_long_ones_two(machine: Machine) -> None:
    def call(rank: int, transport: Any) -> list[int]:
        found = []
        for n in (_LONG, 5, 5, _LONG, 5):  # the first two make room: that is a meeting, too
            begun = machine.barriers[rank]
            transport.sum([torch.zeros(machine.ranks * n, 3), torch.zeros(machine.ranks * n, 2)])
            found.append(machine.barriers[rank] - begun)
        return found[2:]

    assert machine.run(call) == [[1, 2, 1]] * machine.ranks


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
    met = [True, True, False, True]

    def rendezvous(buffer: Tensor, group: Any) -> Any:
        if not met.pop(0):
            raise ValueError("a rank did not come")
        return machine.meet(buffer, group)

    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)

    def call(_rank: int, transport: Any) -> None:
        transport.begin(1000, CPU)
        small, turns = transport._third, transport._turns
        assert turns.timeout_ms == 90_000
        size = _IN_TURNS_BYTES
        with pytest.raises(ValueError, match="did not come"):
            transport.begin(size, CPU)
        assert transport._third is small
        transport.begin(size, CPU)
        assert transport._third.memory.numel() > size
        assert transport._turns is turns
        assert [before is small for before in transport._before] == [True]  # a CUDA graph may hold its address

    machine.run(call)
