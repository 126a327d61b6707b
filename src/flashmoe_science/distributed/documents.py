"""Attention of packed documents that lie on one rank where they can: K and V travel for the others alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import Attended, Call, Gradients, Inputs
from .exchange import start_gathering, sum_of_ranks
from .plan import DocumentCalls

Keys = tuple[Tensor, Tensor]  # K and V, [1, HK, keys, columns] each


@dataclass(frozen=True)
class DocumentsRecipe:
    """A call of whole documents, while K and V of the others travel; then a call of parts of those."""

    group: dist.ProcessGroup
    calls: DocumentCalls

    def forward(self, inputs: Inputs) -> Attended:
        """Attend."""
        found = [
            call.attend({"q": inputs.q[:, :, rows], "k": k, "v": v, **inputs.heads._asdict()})
            for call, rows, (k, v) in self._in_turn(inputs)
        ]
        return Attended(_join([o for o, _ in found]), _join([lse for _, lse in found]), [])

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return the gradients of the local tokens."""
        given = {"q": inputs.q, "o": found.o, "lse": found.lse, "do": do, "dlse": dlse}
        wanted = ["q", "k", "v", *(["sinks"] if sinks else [])]
        made = []
        for call, rows, (k, v) in self._in_turn(inputs):
            own = {name: x[:, :, rows] for name, x in given.items() if x is not None}
            made.append(call.gradients({**own, "k": k, "v": v, **inputs.heads.given()}, wanted))
        dq = _join([each["q"] for each in made])
        dsinks = torch.stack([each["sinks"] for each in made]).sum(0) if sinks else None
        of_keys = [(each["k"], each["v"]) for each in made]
        if self.calls.sent:
            shared = of_keys.pop() if self.calls.shared else None
            of_keys.append(self._sum(inputs, shared))
        dk, dv = (_join(parts) for parts in zip(*of_keys, strict=True))
        return Gradients(dq, dk, dv, dsinks)

    def _in_turn(self, inputs: Inputs) -> Iterator[tuple[Call, slice, Keys]]:
        """Send the keys that others need; yield calls, their local rows and their keys, the last once they came."""
        arrive = self._send(inputs) if self.calls.sent else None
        alone = self.calls.alone
        if self.calls.whole:
            yield self.calls.whole, slice(alone), (inputs.k[:, :, :alone], inputs.v[:, :, :alone])
        keys = arrive() if arrive else None  # also where this rank needs none: a collective ends on all ranks
        if self.calls.shared and keys:
            yield self.calls.shared, slice(alone, None), keys

    def _send(self, inputs: Inputs) -> Callable[[], Keys]:
        """Begin to send this rank's parts of documents. What is returned waits for the keys of ``shared``."""
        local = torch.cat([x[:, :, self.calls.alone :].permute(2, 0, 1, 3) for x in (inputs.k, inputs.v)], 3)
        message = local.new_empty(self.calls.sent, *local.shape[1:])
        message[: len(local)] = local
        gathered, wait = start_gathering(message, self.group)

        def arrive() -> Keys:
            wait()
            found = gathered.index_select(0, self.calls.keys).permute(1, 2, 0, 3)
            columns = inputs.k.shape[3]
            return found[..., :columns], found[..., columns:]

        return arrive

    def _sum(self, inputs: Inputs, shared: Keys | None) -> Keys:
        """Return the gradients of K and V of this rank's parts: the sum over ranks, in their order."""
        ranks, (batch, heads, tokens, columns) = self.group.size(), inputs.k.shape
        sums = inputs.k.new_zeros(
            ranks * self.calls.sent, batch, heads, columns + inputs.v.shape[3], dtype=torch.float32
        )
        if shared is not None:
            found = torch.cat([x.permute(2, 0, 1, 3) for x in shared], 3)
            # Two parts of a document have keys in common: the second parts of all documents are added after the first.
            for start, end in itertools.pairwise(self.calls.rounds):
                sums.index_add_(0, self.calls.keys[start:end], found[start:end].float())
        total = sum_of_ranks(torch.unflatten(sums, 0, (ranks, -1)), self.group)[: tokens - self.calls.alone]
        total = total.to(inputs.k.dtype).permute(1, 2, 0, 3)
        return total[..., :columns], total[..., columns:]


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[B, heads, tokens, ...]`` one behind the other; tokens come before heads in memory."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)
