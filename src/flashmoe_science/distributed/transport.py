"""How messages travel between ranks: by collectives of ``torch.distributed``, or by copies over symmetric memory.

A transport has a place to write what is sent, ``[W, ...]`` with part r for rank r, and returns what the ranks sent.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from .exchange import compare
from .faults import collective

Group = dist.ProcessGroup
TRANSPORTS = ("collectives", "symmetric")
_ALIGNMENT = 256  # bytes between messages


class Transport(Protocol):
    """All-to-all of messages. All ranks make the same calls in the same order."""

    name: str

    def begin(self, size: int, device: torch.device) -> None:
        """Make room for messages of ``size`` bytes in all; those before are read."""

    def message(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor for what is sent."""

    def exchange(self, message: Tensor) -> Tensor:
        """Send ``message[r]`` to rank r; return what the ranks sent, by rank: a new tensor."""


class Collectives:
    """The all-to-all of the group's own backend: NCCL or gloo."""

    name = "collectives"

    def __init__(self, group: Group) -> None:
        """Keep the group."""
        self._group = group

    def begin(self, size: int, device: torch.device) -> None:
        """Do nothing: messages are tensors like others."""

    def message(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(shape, dtype=dtype, device=device)

    def exchange(self, message: Tensor) -> Tensor:
        """Exchange."""
        received = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        with collective(self._group, "all-to-all"):
            dist.all_to_all_single(received, message, group=self._group)
        return received


class SymmetricMemory:
    """Each rank reads its part from the memory of the others: copies that take no multiprocessor from kernels.

    Source: ``torch.distributed._symmetric_memory``. Messages lie in one buffer that all ranks can read. A barrier
    before each read says that all have written; one in ``begin`` says that all have read.
    """

    name = "symmetric"

    def __init__(self, group: Group) -> None:
        """Keep the group. The first message makes the buffer."""
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._buffer: Tensor | None = None
        self._before: list[Tensor] = []  # smaller buffers: CUDA graphs may hold their addresses
        self._handle: Any = None
        self._used = 0

    def begin(self, size: int, device: torch.device) -> None:
        """Make room. A larger buffer than before is a collective of the hosts: not while a graph is captured."""
        size += _ALIGNMENT * 64
        if self._buffer is None or self._buffer.numel() < size:
            import torch.distributed._symmetric_memory as symmetric_memory

            self._before += [] if self._buffer is None else [self._buffer]
            with collective(self._group, "rendezvous of symmetric memory"):
                self._buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
                self._handle = symmetric_memory.rendezvous(self._buffer, self._group)
        self._handle.barrier()
        self._used = 0

    def message(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a part of the buffer. It is overwritten after the next ``begin``."""
        assert self._buffer is not None
        assert self._buffer.device == device
        size = math.prod(shape) * dtype.itemsize
        part = self._buffer[self._used : self._used + size].view(dtype).view(*shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part

    def exchange(self, message: Tensor) -> Tensor:
        """Read what each rank has for this one, the next rank first: all links are used at once."""
        received = torch.empty(message.shape, dtype=message.dtype, device=message.device)
        self._handle.barrier()
        for step in range(self._ranks):
            peer = (self._rank + step) % self._ranks
            theirs = message
            if step:
                theirs = self._handle.get_buffer(peer, message.shape, message.dtype, message.storage_offset())
            received[peer].copy_(theirs[self._rank])
        return received


def transport_of(name: str, group: Group, device_type: str) -> Transport:
    """Return the transport of a name.

    Raises:
        InputError: there is none of this name, or ``"symmetric"`` is not asked for on all ranks.
        UnsupportedError: ``"symmetric"`` without CUDA, over several hosts, or where a GPU cannot read another.
    """
    if name not in TRANSPORTS:
        raise InputError(f'transport must be "collectives" or "symmetric", got {shown(name)}')
    if name == "collectives":
        return Collectives(group)
    if device_type != "cuda":
        raise UnsupportedError(f'transport="symmetric" needs CUDA, and the mesh is of {device_type}')
    _refuse_unreadable(group)
    return SymmetricMemory(group)


def _refuse_unreadable(group: Group) -> None:
    compare(lambda: 'a ContextParallel with transport="symmetric"', group)
    mine = (socket.gethostname(), torch.cuda.current_device())
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, mine, group=group)
    for rank, (host, _) in enumerate(places):
        if host != places[0][0]:
            raise UnsupportedError(
                f'transport="symmetric" needs ranks of one host, and rank {rank} is on another than rank 0'
            )
    readable: list[Any] = [None] * group.size()
    others = [gpu for _, gpu in places if gpu != mine[1]]
    dist.all_gather_object(
        readable, all(torch.cuda.can_device_access_peer(mine[1], gpu) for gpu in others), group=group
    )
    for rank, can in enumerate(readable):
        if not can:
            raise UnsupportedError(
                f'transport="symmetric" needs GPUs that read one another, and that of rank {rank} cannot'
            )
