"""Symmetric memory: which part of which rank's buffer is read. GPUs do the same in ``test_context_parallel_gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe_science.distributed.transport import SymmetricMemory


class _Group:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class _Handle:
    """What a rendezvous returns, where all ranks are objects of one process."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers

    def barrier(self) -> None:
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
