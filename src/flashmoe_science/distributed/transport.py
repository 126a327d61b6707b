"""How messages travel between ranks: by collectives of ``torch.distributed``, or by reading one another's memory.

A transport has a place to write what is sent, ``[W, ...]`` with part r for rank r, and returns what the ranks sent.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from .exchange import all_to_all, compare, gather_together, gather_tokens, sum_of_ranks
from .faults import collective
from .layout import straight_layout

Group = dist.ProcessGroup
TRANSPORTS = ("auto", "collectives", "symmetric")
_ALIGNMENT = 256  # bytes between messages
_SMALL_BYTES = 1 << 20  # of what all ranks get: a copy costs less than the start of a message


class Transport(Protocol):
    """Exchanges between ranks. All ranks make the same calls in the same order."""

    name: str

    def begin(self, size: int, device: torch.device) -> None:
        """Make room for messages of ``size`` bytes in all; those before are read."""

    def message(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor for what is sent."""

    def exchange(self, message: Tensor) -> Tensor:
        """Send ``message[r]`` to rank r; return what the ranks sent, by rank: a new tensor."""

    def deliver(self, message: Tensor, write: Callable[[slice, Tensor], None]) -> None:
        """Send ``message[r]`` to rank r; call ``write`` with some ranks and what they sent, until all have come."""

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``[W * n, ...]`` of all ranks, from ``[n, ...]`` of each: one exchange, with its own ``begin``."""

    def sum(self, partials: Sequence[Tensor]) -> list[Tensor]:
        """Return of each ``[W * n, ...]`` the sum over ranks for this one, ``[n, ...]``; likewise.

        Ranks are added in fp32 and in their order: the same bits in every run.
        """


class Collectives:
    """Collectives of the group's own backend: NCCL or gloo."""

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
        return all_to_all(message, self._group)

    def deliver(self, message: Tensor, write: Callable[[slice, Tensor], None]) -> None:
        """Exchange, and write all at once."""
        write(slice(None), self.exchange(message))

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather small tensors by one message."""
        ranks = self._group.size()
        layout = straight_layout(tensors[0].shape[0] * ranks, ranks)
        if sum(x.nbytes for x in tensors) * ranks <= _SMALL_BYTES:
            return list(gather_together(tensors, layout, self._group))
        first, *others = tensors
        found = gather_tokens(first, layout, self._group)
        return [found, *(gather_together(others, layout, self._group) if others else ())]

    def sum(self, partials: Sequence[Tensor]) -> list[Tensor]:
        """Exchange, and add: a message for each."""
        by_rank = [torch.unflatten(x, 0, (self._group.size(), -1)).contiguous() for x in partials]
        return [sum_of_ranks(self.exchange(x)) for x in by_rank]


class SymmetricMemory:
    """Each rank reads what the others have for it: the host starts a few copies, and no collective.

    Source: ``torch.distributed._symmetric_memory``. Messages lie in one buffer that all ranks can read. A barrier
    before each read says that all have written; one in ``begin`` says that all have read. A GPU that waits in one for
    the timeout that the group had when the buffer was made ends in a CUDA error.
    """

    name = "symmetric"

    def __init__(self, group: Group) -> None:
        """Keep the group. The first message makes the buffer."""
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._buffer: Tensor | None = None
        self._before: list[Tensor] = []  # smaller buffers: CUDA graphs may hold their addresses
        self._handle: Any = None
        self._timeout_ms = 0
        self._used = 0
        self._stream: Any = None  # of the call before

    def begin(self, size: int, device: torch.device) -> None:
        """Make room. A larger buffer than before is a collective of the hosts: not while a graph is captured."""
        size += _ALIGNMENT * 64
        if self._buffer is None or self._buffer.numel() < size:
            # At least twice: those before are kept, and take no more than this one then.
            self._grow(max(size, 2 * (0 if self._buffer is None else self._buffer.numel())), device)
        self._follow(device)
        self._handle.barrier(timeout_ms=self._timeout_ms)
        self._used = 0

    def _grow(self, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        timeout = self._group._get_backend(device).options._timeout  # noqa: SLF001 - has no public name
        with collective(self._group, "rendezvous of symmetric memory"):
            buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            # The pads of its barriers are set to 0 on the stream. Behind other work that comes after a rank that is
            # ahead has signalled: the signal is lost, and a barrier waits for ever.
            torch.cuda.synchronize(device)
            self._handle = symmetric_memory.rendezvous(buffer, self._group)
        self._before += [] if self._buffer is None else [self._buffer]
        self._buffer = buffer  # not before all have met: a later call would use it with the handle of another
        self._timeout_ms = max(1, round(timeout.total_seconds() * 1e3))  # 0 would be none

    def message(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a part of the buffer. It is overwritten after the next ``begin``."""
        assert self._buffer is not None
        assert self._buffer.device == device
        size = math.prod(shape) * dtype.itemsize
        part = self._buffer[self._used : self._used + size].view(dtype).view(*shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part

    def exchange(self, message: Tensor) -> Tensor:
        """Read what each rank has for this one."""
        received = torch.empty(message.shape, dtype=message.dtype, device=message.device)

        def write(ranks: slice, part: Tensor) -> None:
            received[ranks].copy_(part)

        self.deliver(message, write)
        return received

    def deliver(self, message: Tensor, write: Callable[[slice, Tensor], None]) -> None:
        """Read what each rank has for this one."""
        for peer, theirs in self._arrived(message):
            write(slice(peer, peer + 1), theirs[self._rank : self._rank + 1])

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Read the tensors of each rank."""
        device, n = tensors[0].device, tensors[0].shape[0]
        messages = self._write(tensors)
        found = [torch.empty((self._ranks * n, *x.shape[1:]), dtype=x.dtype, device=device) for x in tensors]
        for peer, *theirs in self._arrived(*messages):
            for whole, part in zip(found, theirs, strict=True):
                whole[peer * n : (peer + 1) * n].copy_(part)
        return found

    def sum(self, partials: Sequence[Tensor]) -> list[Tensor]:
        """Read what each rank adds to the tokens of this one. Two ranks are added as they are read."""
        by_rank = [torch.unflatten(x, 0, (self._ranks, -1)) for x in partials]
        two = self._ranks == 2
        messages = self._write([x[1 - self._rank] for x in by_rank] if two else by_rank)  # of two, a part stays here
        arrived = self._arrived(*messages)
        if two:
            return [x[self._rank] + theirs for x, theirs in zip(by_rank, arrived[1][1:], strict=True)]
        received = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in messages]
        for peer, *theirs in arrived:
            for whole, part in zip(received, theirs, strict=True):
                whole[peer].copy_(part[self._rank])
        return [sum_of_ranks(x) for x in received]

    def _write(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin, and return messages that hold these tensors."""
        device = tensors[0].device
        self.begin(sum(x.nbytes for x in tensors), device)
        messages = [self.message(x.shape, x.dtype, device) for x in tensors]
        for message, x in zip(messages, tensors, strict=True):
            message.copy_(x)
        return messages

    def _arrived(self, *messages: Tensor) -> list[Any]:
        """Wait until all have written; return each rank and its messages, the next one first: all links are used."""
        self._handle.barrier(timeout_ms=self._timeout_ms)
        found = []
        for step in range(self._ranks):
            peer = (self._rank + step) % self._ranks
            theirs: Sequence[Tensor] = messages
            if step:
                theirs = [self._handle.get_buffer(peer, x.shape, x.dtype, x.storage_offset()) for x in messages]
            found.append((peer, *theirs))
        return found

    def _follow(self, device: torch.device) -> None:
        """Let a call wait for the one before on another stream, which may still read. Graphs order their own."""
        if device.type != "cuda":
            return
        last, self._stream = self._stream, torch.cuda.current_stream(device)
        if last not in (None, self._stream) and not torch.cuda.is_current_stream_capturing():
            self._stream.wait_stream(last)


def transport_of(name: str, group: Group, device_type: str, *further: Group) -> Transport:
    """Return the transport of a name; for ``"auto"`` ``"symmetric"`` where GPUs of one host read one another.

    Names are compared over the ranks of ``further`` groups, too.

    Raises:
        InputError: there is none of this name, or ``"symmetric"`` is not asked for on all ranks.
        UnsupportedError: ``"symmetric"`` without CUDA, over several hosts, or where a GPU cannot read another.
    """
    if name not in TRANSPORTS:
        raise InputError(f'transport must be "auto", "collectives" or "symmetric", got {shown(name)}')
    if name == "collectives" or (name == "auto" and device_type != "cuda"):
        return Collectives(group)
    if device_type != "cuda":
        raise UnsupportedError(f'transport="symmetric" needs CUDA, and the mesh is of {device_type}')
    compare(lambda: f"transport {name}", group, *further)
    reason = _why_unreadable(group)
    for other in further:  # all ranks take one transport
        reasons: list[Any] = [None] * other.size()
        dist.all_gather_object(reasons, reason, group=other)
        reason = next(filter(None, reasons), "")
    if reason and name == "symmetric":
        raise UnsupportedError(f'transport="symmetric" needs {reason}')
    return Collectives(group) if reason else SymmetricMemory(group)


def _why_unreadable(group: Group) -> str:
    """Return what the ranks lack to read one another's memory, the same on all; empty: nothing."""
    mine = (socket.gethostname(), torch.cuda.current_device())
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, mine, group=group)
    for rank, (host, gpu) in enumerate(places):
        if host != places[0][0]:
            return f"ranks of one host, and rank {rank} is on another than rank 0"
        if (first := places.index((host, gpu))) < rank:
            return f"a number of its own for each GPU, and ranks {first} and {rank} both have cuda:{gpu}"
    readable: list[Any] = [None] * group.size()
    others = [gpu for _, gpu in places if gpu != mine[1]]
    dist.all_gather_object(
        readable, all(torch.cuda.can_device_access_peer(mine[1], gpu) for gpu in others), group=group
    )
    for rank, can in enumerate(readable):
        if not can:
            return f"GPUs that read one another, and that of rank {rank} cannot"
    return ""
