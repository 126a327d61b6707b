"""Symmetric memory: which part of which rank's buffer is read. GPUs do the same in ``test_context_parallel_gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from flashmoe_science.distributed.copies import widened
from flashmoe_science.distributed.transport import SymmetricMemory


class _Group:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def _get_backend(self, _device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=90)))


class _Handle:
    """What a rendezvous returns, where all ranks are objects of one process."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers

    def barrier(self, *, timeout_ms: int) -> None:
        pass

    def get_buffer(self, peer: int, sizes: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        whole = self._buffers[peer].view(dtype)
        return whole[offset : offset + torch.Size(sizes).numel()].view(*sizes)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_part_of_every_message(ranks: int) -> None:
    buffers = [torch.zeros(2**16, dtype=torch.uint8) for _ in range(ranks)]
    transports: list[Any] = [SymmetricMemory(_Group(rank, ranks)) for rank in range(ranks)]  # type: ignore[arg-type] # has what is read
    for transport, buffer in zip(transports, buffers, strict=True):
        transport._buffer, transport._handle = buffer, _Handle(buffers)
    device = torch.device("cpu")
    for _ in range(2):  # the second time in the same places
        sent: list[list[Tensor]] = []
        for rank, transport in enumerate(transports):
            transport.begin(1000, device)
            messages = [transport.message((ranks, 5, 3), dtype, device) for dtype in (torch.bfloat16, torch.float32)]
            for number, message in enumerate(messages):
                message.copy_(torch.arange(message.numel()).view(message.shape) + 100 * rank + 1000 * number)
            assert messages[0].untyped_storage().data_ptr() == buffers[rank].untyped_storage().data_ptr()
            sent.append(messages)
        for rank, transport in enumerate(transports):
            for number in range(2):
                received = transport.exchange(sent[rank][number])
                expected = torch.stack([sent[peer][number][rank] for peer in range(ranks)])
                assert torch.equal(received, expected)


def _transports(ranks: int) -> list[Any]:
    buffers = [torch.zeros(2**16, dtype=torch.uint8) for _ in range(ranks)]
    found: list[Any] = [SymmetricMemory(_Group(rank, ranks)) for rank in range(ranks)]  # type: ignore[arg-type] # has what is read
    for transport, buffer in zip(found, buffers, strict=True):
        transport._buffer, transport._handle = buffer, _Handle(buffers)
    return found


def _writes_then_reads(transports: list[Any], call: Any) -> list[Any]:
    """Call each rank twice: what it reads the second time, all have written."""
    for rank, transport in enumerate(transports):
        call(rank, transport)
    return [call(rank, transport) for rank, transport in enumerate(transports)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_gather_all_tensors_and_sum_their_own_tokens_in_order(ranks: int) -> None:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(ranks, 5, 16, generator=make).bfloat16()
    ids = torch.randint(0, 9, (ranks, 5, 3), generator=make, dtype=torch.int32)
    for tokens, numbers in _writes_then_reads(_transports(ranks), lambda rank, t: t.gather([x[rank], ids[rank]])):
        assert torch.equal(tokens, x.flatten(0, 1))
        assert torch.equal(numbers, ids.flatten(0, 1))
    partial = torch.randn(ranks, ranks * 5, 16, generator=make).bfloat16()
    found = _writes_then_reads(_transports(ranks), lambda rank, t: t.sum(partial[rank]))
    for rank, total in enumerate(found):
        assert torch.equal(total, partial[:, rank * 5 : rank * 5 + 5].float().sum(0).bfloat16())


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
    met = [True, False, True]

    def rendezvous(buffer: Tensor, _group: Any) -> _Handle:
        if not met.pop(0):
            raise ValueError("a rank did not come")
        return _Handle([buffer, buffer])

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    transport: Any = SymmetricMemory(_Group(0, 2))  # type: ignore[arg-type] # has what is read
    device = torch.device("cpu")
    transport.begin(1000, device)
    assert transport._timeout_ms == 90_000
    small, handle = transport._buffer, transport._handle
    with pytest.raises(ValueError, match="did not come"):
        transport.begin(10**6, device)
    assert transport._buffer is small
    assert transport._handle is handle
    transport.begin(10**6, device)
    assert transport._buffer.numel() >= 10**6
    assert [before is small for before in transport._before] == [True]  # a CUDA graph may hold its address
