"""Symmetric memory of ranks that are threads of one process, which notes each access, and barriers between them.

A GPU runs what a rank enqueues in order, as a thread does here. All barriers are of all ranks. So two accesses of
different ranks are ordered if a barrier lies between them, and only then: how long each thread takes is no matter.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashmoe_science.distributed.transport import SymmetricMemory

CPU = torch.device("cpu")


class Access(NamedTuple):
    """Bytes of a rank's buffer that a rank reads or writes, after a number of barriers."""

    rank: int
    barriers: int
    start: int
    end: int
    writes: bool


@dataclass
class Machine:
    """Ranks of one host. It is a group to each of them, too."""

    ranks: int
    accesses: list[Access] = field(default_factory=list)
    barriers: list[int] = field(default_factory=list)  # that each rank has passed

    def __post_init__(self) -> None:
        self.barriers = [0] * self.ranks
        self._meeting = threading.Barrier(self.ranks, timeout=60)
        self._rank = threading.local()
        self._buffers: list[dict[int, Tensor]] = []  # by rank, of each meeting: all are kept, as graphs hold them

    def run(self, call: Callable[[int, Any], Any], kind: type[SymmetricMemory] = SymmetricMemory) -> list[Any]:
        """Call each rank with its transport, all at once."""

        def one(rank: int) -> Any:
            self._rank.value = rank
            try:
                with _Watch(self):
                    return call(rank, kind(self))  # type: ignore[arg-type] # has what is read
            except BaseException:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))

    def races(self) -> list[tuple[Access, Access]]:
        """Return accesses to the same bytes by two ranks with no barrier between them, of which one writes."""
        by_barriers: dict[int, list[Access]] = {}
        for each in self.accesses:
            by_barriers.setdefault(each.barriers, []).append(each)
        return [
            (one, other)
            for some in by_barriers.values()
            for one, other in itertools.combinations(some, 2)
            if one.rank != other.rank and (one.writes or other.writes)
            if one.start < other.end and other.start < one.end
        ]

    def note(self, tensor: Tensor, *, writes: bool) -> None:
        """Note an access of this thread to a buffer."""
        rank, start = self._rank.value, tensor.data_ptr()
        for buffer in (each for met in self._buffers for each in met.values()):
            if buffer.data_ptr() <= start < buffer.data_ptr() + buffer.nbytes:
                assert tensor.is_contiguous()
                self.accesses.append(Access(rank, self.barriers[rank], start, start + tensor.nbytes, writes))

    # What a group has.
    def rank(self) -> int:
        return self._rank.value  # type: ignore[no-any-return]

    def size(self) -> int:
        return self.ranks

    def _get_backend(self, _device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=90)))

    # What a rendezvous returns.
    def barrier(self, *, timeout_ms: int) -> None:
        assert timeout_ms == 90_000
        self._meeting.wait()
        self.barriers[self._rank.value] += 1

    def meet(self, buffer: Tensor, _group: Any) -> Any:
        """Return what barriers and reads need, once all ranks have come."""
        if self._meeting.wait() == 0:
            self._buffers.append({})
        self._meeting.wait()
        met = self._buffers[-1]
        met[self._rank.value] = buffer
        self.barrier(timeout_ms=90_000)

        def get_buffer(peer: int, sizes: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
            return met[peer].view(dtype)[offset : offset + torch.Size(sizes).numel()].view(*sizes)

        return SimpleNamespace(barrier=self.barrier, get_buffer=get_buffer)


class _Watch(TorchDispatchMode):
    """Notes what torch reads and writes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            named = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | (kwargs or {})
            for argument in func._schema.arguments:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(named.get(argument.name)):
                    if isinstance(tensor, Tensor):
                        self._machine.note(tensor, writes=writes)
        return func(*args, **(kwargs or {}))


def patch_symmetric_memory(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let transports of this process meet on a machine."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", machine.meet)
