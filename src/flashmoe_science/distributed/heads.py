"""Attention by heads: an all-to-all turns some tokens of all heads into all tokens of some heads, and another back.

Heads travel in groups: while one attends, the next ones are on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calls import Attended, ByHead, Call, CallByRecipe, Gradients, GroupOfHeads, Inputs
from .copies import widened
from .transport import Transport


@dataclass(frozen=True)
class HeadsRecipe:
    """One call of attention for each group of heads, of all tokens."""

    transport: Transport
    call: Call | CallByRecipe
    rank: int
    ranks: int
    groups: int = 1
    return_lse: bool = False

    def forward(self, inputs: Inputs) -> Attended:
        """Attend. Q, K and V of all tokens are kept, and o and LSE of the heads of this rank."""
        q, k, v, heads = inputs
        batch, count, tokens, _ = q.shape
        o = q.new_empty(batch, tokens, count, v.shape[3]).transpose(1, 2)
        lse = torch.empty(batch, tokens, count * self.return_lse, 1, dtype=torch.float32, device=q.device).transpose(
            1, 2
        )
        beside = Beside(q.device, enabled=self.groups > 1)
        self.transport.begin(_bytes(q, k, v, o, lse), q.device)
        coming = [beside.run(self._send_tokens((q, k, v), part)) for part in self._parts()]
        kept, going = [], []
        for part, message in zip(self._parts(), coming, strict=True):
            received = beside.wait(message)
            mine = self._read_tokens(received, (q, k, v))
            found = self.call.attend({**dict(zip("qkv", mine, strict=True)), **heads.of_group(part)._asdict()})
            kept += [received, *found]
            going.append(beside.run(self._send_heads(found[:1], (o,), part)))
            if self.return_lse:
                going.append(beside.run(self._send_heads((found[1][..., None],), (lse,), part)))
        for sent in going:
            beside.wait(sent)
        return Attended(o, lse[..., 0], kept)

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return the gradients of the local tokens."""
        wanted = ["q", "k", "v", *(["sinks"] if sinks else [])]
        # The messages of all ranks are the same, though the loss of one may not use what another's does.
        given = [("do", torch.zeros_like(found.o) if do is None else do)]
        if self.return_lse:  # fp32: a message of its own
            given.append(("dlse", (torch.zeros_like(found.lse) if dlse is None else dlse)[..., None]))
        gradients = [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in inputs[:3]]
        dsinks = torch.zeros_like(inputs.heads.sinks) if sinks and inputs.heads.sinks is not None else None
        beside = Beside(inputs.q.device, enabled=self.groups > 1)
        self.transport.begin(_bytes(*gradients, *(x for _, x in given)), inputs.q.device)
        coming = [[beside.run(self._send_tokens((x,), part)) for _, x in given] for part in self._parts()]
        going = []
        for part, messages in zip(self._parts(), coming, strict=True):
            received, o, lse = found.kept[3 * part.group : 3 * part.group + 3]
            tensors = dict(zip("qkv", self._read_tokens(received, inputs[:3]), strict=True))
            tensors |= {"o": o, "lse": lse, **inputs.heads.of_group(part).given()}
            for (name, x), message in zip(given, messages, strict=True):
                (whole,) = self._read_tokens(beside.wait(message), (x,))
                tensors[name] = whole if name == "do" else whole[..., 0]
            made = self.call.gradients(tensors, wanted)
            going.append(beside.run(self._send_heads([made[name] for name in "qkv"], gradients, part)))
            if dsinks is not None:
                ByHead(dsinks, None).of_group(part).given()["sinks"].copy_(made["sinks"])
        for sent in going:
            beside.wait(sent)
        dq, dk, dv = gradients
        return Gradients(dq, dk, dv, dsinks)

    def _parts(self) -> list[GroupOfHeads]:
        return [GroupOfHeads(self.rank, self.ranks, group, self.groups) for group in range(self.groups)]

    def _send_tokens(self, tensors: Sequence[Tensor], part: GroupOfHeads) -> Callable[[], Tensor]:
        """Write what each rank gets of a group of its heads; return what sends it.

        Args:
            tensors: ``[B, heads, n, columns]`` each.
            part: whose group.
        """
        batch, _, tokens, _ = tensors[0].shape
        wide = widened(tensors)
        by_rank = [_by_group(x, self.ranks, self.groups)[:, :, part.group] for x in wide]  # B, W, heads, n, D
        widths = [x.shape[2] * x.shape[4] for x in by_rank]
        shape = (self.ranks, tokens, batch, sum(widths))
        message = self.transport.message(shape, wide[0].dtype, wide[0].device)
        for x, place in zip(by_rank, torch.split(message, widths, 3), strict=True):
            torch.unflatten(place, 3, (x.shape[2], x.shape[4])).copy_(x.permute(1, 3, 0, 2, 4))
        return lambda: self.transport.exchange(message).view(tensors[0].dtype)

    def _read_tokens(self, received: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return all tokens of a group of heads, ``[B, heads / W / groups, n * W, columns]`` each, views."""
        sizes = [(x.shape[1] // self.ranks // self.groups, x.shape[3]) for x in like]
        parts = torch.split(received.flatten(0, 1), [heads * columns for heads, columns in sizes], 2)
        return [torch.unflatten(x, 2, size).permute(1, 2, 0, 3) for x, size in zip(parts, sizes, strict=True)]

    def _send_heads(self, tensors: Sequence[Tensor], into: Sequence[Tensor], part: GroupOfHeads) -> Callable[[], None]:
        """Write what each rank gets of its tokens, of a group of heads; return what brings that of this rank.

        Args:
            tensors: ``[B, heads of the group, n * W, columns]`` each.
            into: ``[B, heads, n, columns]`` each, the local tokens.
            part: which group.
        """
        both = widened([*tensors, *into])
        wide, targets = both[: len(tensors)], both[len(tensors) :]
        batch, _, tokens, _ = wide[0].shape
        widths = [x.shape[1] * x.shape[3] for x in wide]
        shape = (self.ranks, tokens // self.ranks, batch, sum(widths))
        message = self.transport.message(shape, wide[0].dtype, wide[0].device)
        for x, place in zip(wide, torch.split(message, widths, 3), strict=True):
            by_rank = torch.unflatten(x, 2, (self.ranks, -1)).permute(2, 3, 0, 1, 4)
            torch.unflatten(place, 3, (x.shape[1], x.shape[3])).copy_(by_rank)
        places = [_by_group(x, self.ranks, self.groups)[:, :, part.group] for x in targets]  # B, W, heads, n, columns

        def write(ranks: slice, received: Tensor) -> None:
            for place, x in zip(places, torch.split(received, widths, 3), strict=True):
                place[:, ranks].copy_(torch.unflatten(x, 3, (place.shape[2], -1)).permute(2, 0, 3, 1, 4))

        return functools.partial(self.transport.deliver, message, write)


def _by_group(x: Tensor, ranks: int, groups: int) -> Tensor:
    """View ``[B, heads, n, columns]`` as ``[B, W, groups, heads of one, n, columns]``."""
    return torch.unflatten(x, 1, (ranks, groups, -1))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class _Message:
    exchange: Callable[[], Any]  # holds what is sent until it has been read
    received: Any  # a tensor, or None where the exchange wrote what came
    arrived: Any  # an event of the stream, or None


class Beside:
    """Runs exchanges in their order beside what the caller computes: on a stream of their own on a GPU.

    What they send must be written before ``run``. On a CPU each is done at once.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        """Take the stream of the device, where ``enabled``."""
        self._side = _side_stream(device.index) if enabled and device.type == "cuda" else None
        self._main = None if self._side is None else torch.cuda.current_stream(device)

    def run(self, exchange: Callable[[], Tensor | None]) -> _Message:
        """Begin an exchange, after all that the caller's stream has by now."""
        if self._side is None or self._main is None:
            return _Message(exchange, exchange(), None)
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            received = exchange()
        return _Message(exchange, received, self._side.record_event())

    def wait(self, message: _Message) -> Any:
        """Return what came, once the caller's stream may read it."""
        if self._main is not None and message.arrived is not None:
            self._main.wait_event(message.arrived)
            if message.received is not None:
                message.received.record_stream(self._main)
        return message.received


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    # Its few blocks go first where a kernel of attention leaves room.
    return torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
