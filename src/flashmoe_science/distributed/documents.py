"""Attention of packed documents that lie on one rank where they can: K and V travel for the others alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import Attended, Call, Gradients, Inputs
from .exchange import start_all_to_all, start_gathering, sum_of_ranks
from .plan import DocumentCalls

Keys = tuple[Tensor, Tensor]  # K and V, [1, HK, keys, columns] each


@dataclass(frozen=True)
class DocumentsRecipe:
    """A call of whole documents, while K and V of the others travel; then a call of parts of those."""

    group: dist.ProcessGroup
    calls: DocumentCalls

    def forward(self, inputs: Inputs) -> Attended:
        """Attend: first whole documents, while keys travel."""
        arrive = self._send(inputs)
        found = []
        if self.calls.whole:
            found.append(self._attend(self.calls.whole, inputs, *self._of_whole(inputs)))
        keys = arrive()
        if self.calls.shared and keys:
            found.append(self._attend(self.calls.shared, inputs, self._rows_of_parts, keys))
        return Attended(_join([o for o, _ in found]), _join([lse for _, lse in found]), [])

    def _attend(self, call: Call, inputs: Inputs, rows: slice, keys: Keys) -> tuple[Tensor, Tensor]:
        k, v = keys
        return call.attend({"q": inputs.q[:, :, rows], "k": k, "v": v, **inputs.heads._asdict()})

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return the gradients of the local tokens: first of parts, whose sums then travel."""
        given = {"q": inputs.q, "o": found.o, "lse": found.lse, "do": do, "dlse": dlse}
        wanted = ["q", "k", "v", *(["sinks"] if sinks else [])]

        def gradients(call: Call, rows: slice, keys: Keys, sums: dict[str, Tensor]) -> dict[str, Tensor]:
            k, v = keys
            own = {name: x[:, :, rows] for name, x in given.items() if x is not None}
            return call.gradients({**own, "k": k, "v": v, **inputs.heads.given(), **sums}, wanted)

        keys = self._send(inputs)()
        made = []
        if self.calls.shared and keys:
            sums = self._zeros(inputs, len(self.calls.keys))
            made.append(gradients(self.calls.shared, self._rows_of_parts, keys, self._by_name(inputs, sums)))
            arrive = self._send_sums(inputs, sums)
        else:
            arrive = self._send_sums(inputs, None)
        if self.calls.whole:
            made.insert(0, gradients(self.calls.whole, *self._of_whole(inputs), {}))
        dsinks = torch.stack([each["sinks"] for each in made]).sum(0) if sinks else None
        dq = _join([each["q"] for each in made])
        of_keys = [(made[0]["k"], made[0]["v"])] if self.calls.whole else []
        dk, dv = (_join(parts) for parts in zip(*of_keys, *arrive(), strict=True))
        return Gradients(dq, dk, dv, dsinks)

    @property
    def _rows_of_parts(self) -> slice:
        return slice(self.calls.alone, None)

    def _of_whole(self, inputs: Inputs) -> tuple[slice, Keys]:
        """Return the rows and the keys of whole documents."""
        rows = slice(self.calls.alone)
        return rows, (inputs.k[:, :, rows], inputs.v[:, :, rows])

    def _send(self, inputs: Inputs) -> Callable[[], Keys | None]:
        """Begin to send this rank's parts of documents. What is returned waits for the keys of ``shared``.

        All ranks send and wait, also those that need no keys.
        """
        if not self.calls.sent:
            return lambda: None
        local = torch.cat([x[:, :, self._rows_of_parts].permute(2, 0, 1, 3) for x in (inputs.k, inputs.v)], 3)
        message = local.new_empty(self.calls.sent, *local.shape[1:])
        message[: len(local)] = local
        gathered, wait = start_gathering(message, self.group)

        def arrive() -> Keys:
            wait()
            found = gathered.index_select(0, self.calls.keys).permute(1, 2, 0, 3)
            columns = inputs.k.shape[3]
            return found[..., :columns], found[..., columns:]

        return arrive

    def _zeros(self, inputs: Inputs, tokens: int) -> Tensor:
        """Return room for sums of gradients of K and V, ``[tokens, B, HK, D + DV]`` fp32."""
        batch, heads, _, columns = inputs.k.shape
        return inputs.k.new_zeros(tokens, batch, heads, columns + inputs.v.shape[3], dtype=torch.float32)

    def _by_name(self, inputs: Inputs, sums: Tensor) -> dict[str, Tensor]:
        both, columns = sums.permute(1, 2, 0, 3), inputs.k.shape[3]
        return {"dk": both[..., :columns], "dv": both[..., columns:]}

    def _send_sums(self, inputs: Inputs, made: Tensor | None) -> Callable[[], list[Keys]]:
        """Begin to send what this rank adds to the gradients of keys, ``made`` for its own keys in fp32.

        What is returned waits, and gives the gradients of K and V of this rank's parts: sums in one order.
        """
        if not self.calls.sent:
            return list
        ranks, tokens, columns = self.group.size(), inputs.k.shape[2], inputs.k.shape[3]
        sums = self._zeros(inputs, ranks * self.calls.sent)
        if made is not None:
            # Two parts of a document have keys in common: the second parts of all documents are added after the first.
            for start, end in itertools.pairwise(self.calls.rounds):
                sums.index_add_(0, self.calls.keys[start:end], made[start:end])
        received, wait = start_all_to_all(torch.unflatten(sums, 0, (ranks, -1)), self.group)

        def arrive() -> list[Keys]:
            wait()
            total = sum_of_ranks(received[:, : tokens - self.calls.alone]).to(inputs.k.dtype).permute(1, 2, 0, 3)
            return [(total[..., :columns], total[..., columns:])]

        return arrive


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return ``[B, heads, tokens, ...]`` one behind the other; tokens come before heads in memory."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)
