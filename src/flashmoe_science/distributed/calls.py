"""The calls that a rank makes of one call on all ranks, and attention by gathered K and V."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.backward.autograd import gradients_of
from ..attention.dispatch import attend
from ..attention.inputs import Options
from ..errors import InputError, UnsupportedError
from .exchange import gather_tokens, reduce_tokens
from .layout import Layout, PackedPlan, Piece, Span, keys_of


class ByHead(NamedTuple):
    """What a call has for each query head, ``[H]`` each."""

    sinks: Tensor | None
    alibi: Tensor | None

    def check(self, heads: int) -> None:
        """Raise ``InputError`` unless each has one number a head."""
        for name, tensor in self._asdict().items():
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise InputError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
            if tuple(tensor.shape) != (heads,):
                raise InputError(f"{name} must be [H] = [{heads}], got {list(tensor.shape)}")
        if self.alibi is not None and self.alibi.requires_grad and torch.is_grad_enabled():
            raise InputError("alibi must not require grad: there is no gradient of it, got one that does")

    def of_rank(self, rank: int, ranks: int) -> ByHead:
        """Return the part of a rank's heads."""
        return ByHead(*(None if tensor is None else tensor.reshape(ranks, -1)[rank] for tensor in self))


@dataclass(frozen=True)
class Call:
    """One call of attention: some queries of this rank, and the keys that they need."""

    options: Options
    rows: int = 0  # queries
    keys: Span = (0, 0)
    starts: Mapping[str, Tensor] | None = None  # cu_seqlens of a packed call

    def attend(self, tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return o ``[B, H, rows, DV]`` and LSE ``[B, H, rows]`` of q, k, v ``[B, heads, tokens, columns]``."""
        if self.starts is None:
            return attend(tensors, self.options)  # type: ignore[no-any-return]
        o, lse = attend({**_without_batch(tensors), **self.starts}, self.options)
        return o.transpose(0, 1)[None], lse[None]

    def gradients(self, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return gradients by name, in the form of ``tensors``, which hold o, lse and their gradients too."""
        if self.starts is None:
            return gradients_of(self.options, tensors, wanted)
        found = gradients_of(self.options, {**_without_batch(tensors), **self.starts}, wanted)
        return {name: x if name == "sinks" else x.transpose(0, 1)[None] for name, x in found.items()}


def _without_batch(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as packed calls take them: ``[tokens, heads, columns]``, LSE ``[heads, tokens]``."""
    found = dict(tensors)
    found |= {name: tensors[name][0].transpose(0, 1) for name in ("q", "k", "v", "o", "do") if name in tensors}
    return found | {name: tensors[name][0] for name in ("lse", "dlse") if name in tensors}


def fixed_call(span: Span, layout: Layout, options: Options) -> Call:
    """Return the call of a span of a sequence's queries."""
    keys = keys_of(span, (0, layout.tokens), causal=options.causal, window=options.window)
    return Call(options._replace(window=keys.window), span[1] - span[0], (keys.start, keys.end))


def packed_call(piece: Piece, options: Options, device: torch.device) -> Call:
    """Return the call of a piece of a packed batch."""
    starts = {"cu_seqlens_q": on_device(piece.starts_q, device), "cu_seqlens_k": on_device(piece.starts_k, device)}
    options = options._replace(max_seqlens=piece.longest)
    return Call(options, piece.queries[1] - piece.queries[0], piece.keys, starts)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as int32 on a device."""
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def refuse_by_gather(options: Options, heads: ByHead, plan: PackedPlan | None) -> None:
    """Raise ``UnsupportedError`` where a call on part of the keys would place its queries elsewhere."""
    if heads.alibi is not None and not options.causal:
        raise UnsupportedError('alibi needs causal=True with strategy="gather"')
    if plan is not None and options.window != (-1, -1) and not options.causal:
        raise UnsupportedError('a window of packed documents needs causal=True with strategy="gather"')


@dataclass(frozen=True)
class Exchange:
    """How the calls of a rank get their keys."""

    group: dist.ProcessGroup
    layout: Layout
    calls: tuple[Call, ...]

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of all tokens, ``[B, HK, T, D]`` each, from those of this rank."""
        local = torch.cat((k, v), 3).permute(2, 0, 1, 3)  # tokens first
        whole = gather_tokens(local, self.layout, self.group).permute(1, 2, 0, 3)
        return whole[..., : k.shape[3]], whole[..., k.shape[3] :]

    def rows(self) -> list[slice]:
        """Return the local rows of each call."""
        ends = itertools.accumulate((call.rows for call in self.calls), initial=0)
        return [slice(start, end) for start, end in itertools.pairwise(ends)]


class Gathered(torch.autograd.Function):
    """Attention by gathered K and V. They are gathered again for the gradients: nothing whole is kept."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return o and LSE of the local tokens."""
        whole_k, whole_v = exchange.gather(k, v)
        found = []
        for call, rows in zip(exchange.calls, exchange.rows(), strict=True):
            keys = slice(*call.keys)
            given = {"q": q[:, :, rows], "k": whole_k[:, :, keys], "v": whole_v[:, :, keys]}
            found.append(call.attend({**given, "sinks": sinks, "alibi": alibi}))
        o, lse = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        ctx.exchange = exchange
        ctx.save_for_backward(q, k, v, sinks, alibi, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        """Return the gradients of the local tokens."""
        exchange: Exchange = ctx.exchange
        q, k, v, sinks, alibi, o, lse = ctx.saved_tensors
        by_head = {name: x for name, x in (("sinks", sinks), ("alibi", alibi)) if x is not None}
        wanted = ["q", "k", "v", *(["sinks"] if ctx.needs_input_grad[4] else [])]
        whole_k, whole_v = exchange.gather(k, v)
        batch, heads_kv, tokens, columns = whole_k.shape
        # fp32, as calls of this rank and of others add to the same keys.
        sums = q.new_zeros(tokens, batch, heads_kv, columns + v.shape[3], dtype=torch.float32)
        dq, dsinks = [], []
        for call, rows in zip(exchange.calls, exchange.rows(), strict=True):
            keys = slice(*call.keys)
            given = {"q": q[:, :, rows], "k": whole_k[:, :, keys], "v": whole_v[:, :, keys], **by_head}
            given |= {"o": o[:, :, rows], "lse": lse[:, :, rows]}
            given |= {name: x[:, :, rows] for name, x in (("do", do), ("dlse", dlse)) if x is not None}
            found = call.gradients(given, wanted)
            dq.append(found["q"])
            sums[keys, ..., :columns] += found["k"].permute(2, 0, 1, 3)
            sums[keys, ..., columns:] += found["v"].permute(2, 0, 1, 3)
            dsinks += [found["sinks"]] if "sinks" in found else []
        own = reduce_tokens(sums, exchange.layout, exchange.group).to(k.dtype).permute(1, 2, 0, 3)
        return None, torch.cat(dq, 2), own[..., :columns], own[..., columns:], sum(dsinks) if dsinks else None, None
