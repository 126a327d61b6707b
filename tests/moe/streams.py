"""Streams without a GPU: what is launched on which, and what comes before what.

An operation comes after those that its stream has seen: all before it on that stream, and all that an event of another
stream brought. Any two others may run at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flashmoe_science.gpu import launch
from flashmoe_science.moe import calls, early

SORT = ("_count_kernel", "_sum_chunks_kernel", "_place_kernel")
MAIN = 7  # the handle of the caller's stream


@dataclass(frozen=True)
class Operation:
    """A launch, or what a test adds, and all that is done before it begins."""

    name: str
    stream: int
    before: frozenset[int]  # numbers of operations
    addresses: tuple[int, ...]
    noted: Any  # the note that the call began with


class Event:
    """What a stream had seen when it was recorded."""

    def __init__(self, seen: frozenset[int]) -> None:
        self.seen = seen


class Stream:
    """A stream of a fake GPU."""

    device = torch.device("cpu")

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream, self.seen = cuda_stream, frozenset[int]()

    def record_event(self) -> Event:
        return Event(self.seen)

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass
class _Thread(threading.local):
    main: Stream = field(default_factory=lambda: Stream(MAIN))
    sides: list[Stream] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    noted: Any = None


class Streams:
    """Streams and operations of each thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_thread = _Thread()
        monkeypatch.setattr(early, "_of_thread", early._OfThread())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.of_thread.main)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: self._side())
        monkeypatch.setattr(calls, "_raw_stream", lambda _index: MAIN)
        monkeypatch.setattr(launch, "prepare_launch", self._prepare)
        take = early.take_early_sort

        def watched(*given: Any) -> Any:
            self.of_thread.noted = take(*given)
            return self.of_thread.noted

        monkeypatch.setattr(calls, "take_early_sort", watched)

    def add(self, name: str, stream: int = MAIN, addresses: tuple[int, ...] = ()) -> None:
        """Add an operation to a stream."""
        here = self.of_thread
        of = next(each for each in (here.main, *here.sides) if each.cuda_stream == stream)
        here.operations.append(Operation(name, stream, of.seen, addresses, here.noted))
        of.seen |= {len(here.operations) - 1}

    def _side(self) -> Stream:
        self.of_thread.sides.append(Stream(100 + len(self.of_thread.sides)))
        return self.of_thread.sides[-1]

    def _prepare(self, source: Any, *_given: Any) -> Any:
        return lambda stream, *addresses: self.add(source.name, stream, addresses)


def check_order(operations: list[Operation]) -> None:
    """Check one call: its sort needs only what is there, and all else comes after the sort."""
    sort = [number for number, each in enumerate(operations) if each.name in SORT]
    for number, each in enumerate(operations):
        if number in sort:
            assert {other for other in sort if other < number} <= each.before
            if each.noted is not None:
                check_addresses(each)
        elif each.name.endswith("_kernel"):
            assert {other for other in sort if other < number} <= each.before, each.name


def check_addresses(operation: Operation) -> None:
    """Check that an early launch reads the ids and writes the room that was there before them."""
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in (operation.noted.ids, operation.noted.room)]
    for address in filter(None, operation.addresses):
        assert any(start <= address < start + size for start, size in places), operation.name
