"""Pairs sorted beside copies: as soon as their ids are there, on a stream of their own.

Tokens that come from other GPUs come later than their ids, and a copy needs no SM. So the place in a stream from which
the ids are there is noted before the copy, and the launches of the sort wait for that place alone. All others wait for
the copy, as for all that their stream does. Without a note, or where it does not fit, the same launches run in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plan import MAX_PAIRS_SORTED_AT_ONCE, most_workspace


class EarlySort(NamedTuple):
    """From where on a call's pairs can be sorted."""

    ids: Tensor  # held, so no other tensor gets their address
    room: Tensor  # for tables of the sort; whatever used this memory before is done when the ids are there
    stream: torch.cuda.Stream  # of the caller
    there: Any  # an event of that stream

    @contextlib.contextmanager
    def beside(self) -> Iterator[int]:
        """Give the stream for launches that need the ids alone. What the caller's stream does next waits for them."""
        side = _side_stream(self.stream.device)
        side.wait_event(self.there)
        try:
            yield side.cuda_stream
        finally:
            self.stream.wait_stream(side)


class _OfThread(threading.local):
    # Of a thread: a stream that another one captures into a graph must not be used.
    def __init__(self) -> None:
        self.noted: EarlySort | None = None
        self.sides: dict[torch.device, torch.cuda.Stream] = {}


_of_thread = _OfThread()


def note_ids(ids: Tensor | None, experts: int) -> None:
    """Note that the current stream has made ``ids``: the next call in this thread, if on them, can sort from here on.

    Args:
        ids: ``[T, K]``, which nobody writes from here on, or None: there are none to note.
        experts: of that call.
    """
    _of_thread.noted = None
    # One launch sorts so few that it takes no longer than two streams that wait for each other.
    if ids is not None and ids.numel() > MAX_PAIRS_SORTED_AT_ONCE and not torch.compiler.is_compiling():
        room = torch.empty(most_workspace(ids.numel(), experts), dtype=torch.int32, device=ids.device)
        stream = torch.cuda.current_stream(ids.device)
        _of_thread.noted = EarlySort(ids, room, stream, stream.record_event())


def take_early_sort(ids: Tensor, workspace: int) -> EarlySort | None:
    """Return what was noted if it is of these ids, with room for so many int32 elements; a note is for one call."""
    noted = _of_thread.noted
    if noted is None:
        return None
    _of_thread.noted = None
    is_same = ids.data_ptr() == noted.ids.data_ptr() and ids.shape == noted.ids.shape
    if not is_same or workspace > noted.room.numel() or torch.cuda.current_stream(ids.device) != noted.stream:
        return None
    return noted


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    sides = _of_thread.sides
    if device not in sides:
        sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return sides[device]
