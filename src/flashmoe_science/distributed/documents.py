"""Attention of packed documents that lie on one rank where they can: K and V travel for the others alone.

The forward call of whole documents is given all tokens of a rank. So its outputs have room for those of the parts.
Gradients are made where they belong: both calls write slices of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import Attended, Call, Gradients, Inputs
from .copies import widened
from .exchange import start_all_to_all, start_gathering, sum_ranks_into
from .layout import Span
from .plan import DocumentCalls

Keys = tuple[Tensor, Tensor]  # K and V, [1, HK, keys, columns] each


@dataclass(frozen=True)
class DocumentsRecipe:
    """A call of whole documents, while K and V of the others travel; then a call of parts of those.

    K and V that came are kept for the gradients if they are few (``PackedLayout.keeps``); else they travel again.
    """

    group: dist.ProcessGroup
    calls: DocumentCalls

    def forward(self, inputs: Inputs) -> Attended:
        """Attend: first whole documents, while keys travel."""
        arrive = self._send(inputs)
        whole = self._attend(self.calls.whole, inputs, slice(None), (inputs.k, inputs.v)) if self.calls.whole else None
        keys = arrive()
        kept = [keys] if keys is not None and self.calls.keeps else []
        if self.calls.shared and keys is not None:
            parts = self._attend(self.calls.shared, inputs, self._rows_of_parts, _split(keys, inputs))
            if whole is None:
                return Attended(*parts, kept)
            for into, part in zip(whole, parts, strict=True):
                into[:, :, self._rows_of_parts] = part
        assert whole is not None  # a rank has tokens
        return Attended(*whole, kept)

    def _attend(self, call: Call, inputs: Inputs, rows: slice, keys: Keys) -> tuple[Tensor, Tensor]:
        k, v = keys
        return call.attend({"q": inputs.q[:, :, rows], "k": k, "v": v, **inputs.heads._asdict()})

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return the gradients of the local tokens: first of parts, whose sums then travel."""
        given = {"q": inputs.q, "o": found.o, "lse": found.lse, "do": do, "dlse": dlse}
        wanted = ["q", "k", "v", *(["sinks"] if sinks else [])]
        made = {name: _empty_like(x) for name, x in zip("qkv", inputs[:3], strict=True)}

        def gradients(call: Call, rows: slice, keys: Keys, names: str, *, unrounded: bool = False) -> dict[str, Tensor]:
            k, v = keys
            own = {name: x[:, :, rows] for name, x in given.items() if x is not None}
            out = {name: made[name][:, :, rows] for name in names}
            tensors = {**own, "k": k, "v": v, **inputs.heads.given()}
            return call.gradients(tensors, wanted, unrounded=unrounded, out=out)

        keys = found.kept[0] if found.kept else self._send(inputs)()
        parts, whole = None, None
        if self.calls.shared and keys is not None:
            rows = self._rows_of_parts
            parts = gradients(self.calls.shared, rows, _split(keys, inputs), "q", unrounded=True)
        arrive = self._send_sums(inputs, parts)
        if self.calls.whole:
            rows = slice(0, self.calls.alone)
            whole = gradients(self.calls.whole, rows, (inputs.k[:, :, rows], inputs.v[:, :, rows]), "qkv")
        dsinks = torch.stack([one["sinks"] for one in (whole, parts) if one]).sum(0) if sinks else None
        arrive(made["k"], made["v"])
        return Gradients(made["q"], made["k"], made["v"], dsinks)

    @property
    def _rows_of_parts(self) -> slice:
        return slice(self.calls.alone, None)

    def _send(self, inputs: Inputs) -> Callable[[], Tensor | None]:
        """Begin to send this rank's parts of documents. What is returned waits for the keys of ``shared``.

        Those are K and V side by side, ``[1, HK, keys, D + DV]``. All ranks send and wait, also those that need none.
        """
        if not self.calls.sent:
            return lambda: None
        k, v = (_tokens_first(x)[self._rows_of_parts] for x in (inputs.k, inputs.v))
        columns = k.shape[2]
        message = k.new_empty(self.calls.sent, k.shape[1], columns + v.shape[2])
        own = message[: len(k)]
        wide = widened([k, v, own[..., :columns], own[..., columns:]])
        for x, place in zip(wide[:2], wide[2:], strict=True):
            place.copy_(x)
        gathered, wait = start_gathering(message, self.group)

        def arrive() -> Tensor:
            wait()
            return gathered.index_select(0, self.calls.keys).transpose(0, 1)[None]

        return arrive

    def _send_sums(self, inputs: Inputs, parts: dict[str, Tensor] | None) -> Callable[[Tensor, Tensor], None]:
        """Begin to send what this rank adds to the gradients of keys: ``parts`` has that for the keys of ``shared``.

        What is returned waits, and writes the gradients of K and V of this rank's parts: sums in one order.
        """
        if not self.calls.sent:
            return lambda _dk, _dv: None
        sizes = [self.calls.sent * x.shape[1] * x.shape[3] for x in (inputs.k, inputs.v)]
        # A rank's keys, then its values: so that what is added lies in one piece, which is faster than halves of rows.
        message = torch.empty(self.group.size(), sum(sizes), dtype=torch.float32, device=inputs.k.device)
        if parts is None:
            message.zero_()
        else:
            for name, sums in zip("kv", torch.split(message, sizes, 1), strict=True):
                self._write_sums(torch.unflatten(sums, 1, (self.calls.sent, -1)), _tokens_first(parts[name]))
        received, wait = start_all_to_all(message, self.group)

        def arrive(dk: Tensor, dv: Tensor) -> None:
            wait()
            for into, sums in zip((dk, dv), torch.split(received, sizes, 1), strict=True):
                own = _tokens_first(into)[self._rows_of_parts].flatten(1)
                sum_ranks_into(own, torch.unflatten(sums, 1, (self.calls.sent, -1))[:, : len(own)])

        return arrive

    def _write_sums(self, sums: Tensor, made: Tensor) -> None:
        """Write the sums of gradients of the keys of ``shared`` to ``sums``, ``[W, sent, HK * columns]``.

        Two parts of a document have keys in common: the second parts of all documents are added after the first.
        """

        def place(span: Span) -> Tensor:
            rank, first = divmod(span[0], self.calls.sent)
            return sums[rank, first : first + span[1] - span[0]]

        made, begin = made.flatten(1), 0
        for number, spans in enumerate(self.calls.rounds):
            places, added = [place(span) for span in spans], []
            for start, end in spans:
                added.append(made[begin : begin + end - start])
                begin += end - start
            if number:
                torch._foreach_add_(places, added)
                continue
            torch._foreach_copy_(places, added)
            if self.calls.gaps:  # torch refuses to set nothing to 0
                torch._foreach_zero_([place(gap) for gap in self.calls.gaps])


def _split(keys: Tensor, inputs: Inputs) -> Keys:
    """View keys that came as K and V."""
    columns = inputs.k.shape[3]
    return keys[..., :columns], keys[..., columns:]


def _tokens_first(x: Tensor) -> Tensor:
    """View ``[1, heads, tokens, columns]`` as ``[tokens, heads, columns]``."""
    return x.squeeze(0).transpose(0, 1)


def _empty_like(x: Tensor) -> Tensor:
    """Return room for the gradient of q, k or v; tokens come before heads in memory."""
    return x.new_empty(x.shape[2], x.shape[1], x.shape[3]).transpose(0, 1)[None]
