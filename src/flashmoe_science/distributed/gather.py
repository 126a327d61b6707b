"""Attention by gathered K and V: each rank attends its own queries."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import Attended, Call, Gradients, Inputs
from .exchange import gather_tokens, reduce_tokens
from .layout import Layout


@dataclass(frozen=True)
class GatherRecipe:
    """K and V of all ranks, gathered again for the gradients: nothing whole is kept."""

    group: dist.ProcessGroup
    layout: Layout
    calls: tuple[Call, ...]

    def forward(self, inputs: Inputs) -> Attended:
        """Attend."""
        q, _, v, heads = inputs
        whole_k, whole_v = self._gather(inputs)
        batch, count, tokens, _ = q.shape
        o = q.new_empty(batch, tokens, count, v.shape[3]).transpose(1, 2)
        lse = torch.empty(batch, tokens, count, dtype=torch.float32, device=q.device).transpose(1, 2)
        for call, rows in zip(self.calls, self._rows(), strict=True):
            keys = slice(*call.keys)
            given = {"q": q[:, :, rows], "k": whole_k[:, :, keys], "v": whole_v[:, :, keys]}
            o[:, :, rows], lse[:, :, rows] = call.attend({**given, **heads._asdict()})
        return Attended(o, lse, [])

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return the gradients of the local tokens."""
        dq, sums, dsinks = self._sum_gradients(inputs, found, do, dlse, sinks=sinks)
        own = reduce_tokens(sums, self.layout, self.group).to(inputs.k.dtype).permute(1, 2, 0, 3)
        columns = inputs.k.shape[3]
        return Gradients(dq, own[..., :columns], own[..., columns:], dsinks)

    def _sum_gradients(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, of K and V of all tokens ``[T, B, HK, D + DV]`` fp32, and of sinks."""
        q, _, v, heads = inputs
        wanted = ["q", "k", "v", *(["sinks"] if sinks else [])]
        whole_k, whole_v = self._gather(inputs)
        batch, heads_kv, tokens, columns = whole_k.shape
        # fp32, as calls of this rank and of others add to the same keys.
        sums = q.new_zeros(tokens, batch, heads_kv, columns + v.shape[3], dtype=torch.float32)
        dq = q.new_empty(batch, q.shape[2], q.shape[1], columns).transpose(1, 2)
        dsinks = []
        for call, rows in zip(self.calls, self._rows(), strict=True):
            keys = slice(*call.keys)
            given = {"q": q[:, :, rows], "k": whole_k[:, :, keys], "v": whole_v[:, :, keys], **heads.given()}
            given |= {"o": found.o[:, :, rows], "lse": found.lse[:, :, rows]}
            given |= {name: x[:, :, rows] for name, x in (("do", do), ("dlse", dlse)) if x is not None}
            its_sums = sums[keys].permute(1, 2, 0, 3)
            given |= {"dk": its_sums[..., :columns], "dv": its_sums[..., columns:]}
            gradients = call.gradients(given, wanted)
            dq[:, :, rows] = gradients["q"]
            dsinks += [gradients["sinks"]] if sinks else []
        return dq, sums, torch.stack(dsinks).sum(0) if sinks else None

    def _gather(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return K and V of all tokens, ``[B, HK, T, D]`` each, from those of this rank."""
        _, k, v, _ = inputs
        local = torch.cat((k, v), 3).permute(2, 0, 1, 3)  # tokens first
        whole = gather_tokens(local, self.layout, self.group).permute(1, 2, 0, 3)
        return whole[..., : k.shape[3]], whole[..., k.shape[3] :]

    def _rows(self) -> list[slice]:
        """Return the local rows of each call."""
        ends = itertools.accumulate((call.rows for call in self.calls), initial=0)
        return [slice(start, end) for start, end in itertools.pairwise(ends)]
