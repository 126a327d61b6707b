"""The calls of attention that a rank makes of one call on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..attention.backward.autograd import gradients_of
from ..attention.dispatch import attend
from ..attention.inputs import Options
from ..errors import InputError, UnsupportedError
from .layout import Layout, Pieces, Span, keys_of


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

    def of_group(self, part: GroupOfHeads) -> ByHead:
        """Return what the heads of a rank's group have."""
        return ByHead(
            *(None if x is None else x.reshape(part.ranks, part.groups, -1)[part.rank, part.group] for x in self)
        )

    def given(self) -> dict[str, Tensor]:
        """Return those that there are, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


class GroupOfHeads(NamedTuple):
    """Which heads: group ``group`` of ``groups`` of the heads of rank ``rank`` of ``ranks``."""

    rank: int
    ranks: int
    group: int
    groups: int


class Attended(NamedTuple):
    """What a rank has of a call. Axes of tokens come before those of heads in memory."""

    o: Tensor  # [B, H, n, DV]
    lse: Tensor  # [B, H, n] fp32; H is 0 where it is not asked for
    kept: list[Tensor]  # for the gradients, besides the inputs, o and lse


class Inputs(NamedTuple):
    """What a call on all ranks is given."""

    q: Tensor  # [B, H, n, D]
    k: Tensor  # [B, HK, n, D]
    v: Tensor  # [B, HK, n, DV]
    heads: ByHead


class Gradients(NamedTuple):
    """Gradients of the inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None  # the part of this rank


class Recipe(Protocol):
    """How the ranks serve one kind of call."""

    def forward(self, inputs: Inputs) -> Attended:
        """Attend."""

    def backward(
        self, inputs: Inputs, found: Attended, do: Tensor | None, dlse: Tensor | None, *, sinks: bool
    ) -> Gradients:
        """Return gradients; that of sinks where it is asked for."""


@dataclass(frozen=True)
class Call:
    """One call of attention: some queries of this rank, and the keys that they need."""

    options: Options
    rows: int = 0  # queries
    keys: Span = (0, 0)
    starts: Mapping[str, Tensor] | None = None  # cu_seqlens of a packed call

    def with_options(self, options: Options) -> Call:
        """Return the call with other options."""
        return dataclasses.replace(self, options=options._replace(max_seqlens=self.options.max_seqlens))

    def attend(self, tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return o ``[B, H, rows, DV]`` and LSE ``[B, H, rows]`` of q, k, v ``[B, heads, tokens, columns]``."""
        if self.starts is None:
            return attend(tensors, self.options)  # type: ignore[no-any-return]
        o, lse = attend({**_without_batch(tensors), **self.starts}, self.options)
        return o.transpose(0, 1)[None], lse[None]

    def gradients(
        self,
        tensors: Mapping[str, Tensor],
        wanted: Sequence[str],
        *,
        unrounded: bool = False,
        out: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return gradients by name, in the form of ``tensors``, which hold o, lse and their gradients too.

        With dk and dv, fp32, those of k and v are added to them. ``unrounded`` and ``out`` are those of
        ``attention_gradients``.
        """
        if self.starts is None:
            return gradients_of(self.options, tensors, wanted, unrounded=unrounded, out=out)
        given = {**_without_batch(tensors), **self.starts}
        found = gradients_of(self.options, given, wanted, unrounded=unrounded, out=out and _without_batch(out))
        return {name: x if name == "sinks" else x.transpose(0, 1)[None] for name, x in found.items()}


@dataclass(frozen=True)
class CallByRecipe:
    """A call that is served over ranks itself. A tensor is given as ``Call`` takes it."""

    recipe: Recipe

    def attend(self, tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return o and LSE."""
        found = self.recipe.forward(_inputs_of(tensors))
        return found.o, found.lse

    def gradients(self, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return gradients by name."""
        found = Attended(tensors["o"], tensors["lse"], [])
        given = tensors.get("do"), tensors.get("dlse")
        made = self.recipe.backward(_inputs_of(tensors), found, *given, sinks="sinks" in wanted)
        return {name: x for name, x in made._asdict().items() if x is not None}


def _inputs_of(tensors: Mapping[str, Any]) -> Inputs:
    return Inputs(tensors["q"], tensors["k"], tensors["v"], ByHead(tensors.get("sinks"), tensors.get("alibi")))


def _without_batch(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as packed calls take them: ``[tokens, heads, columns]``, LSE ``[heads, tokens]``."""
    found = dict(tensors)
    found |= {
        name: tensors[name][0].transpose(0, 1) for name in ("q", "k", "v", "o", "do", "dk", "dv") if name in tensors
    }
    return found | {name: tensors[name][0] for name in ("lse", "dlse") if name in tensors}


def fixed_call(span: Span, layout: Layout, options: Options) -> Call:
    """Return the call of a span of a sequence's queries."""
    keys = keys_of(span, (0, layout.tokens), causal=options.causal, window=options.window)
    return Call(options._replace(window=keys.window), span[1] - span[0], (keys.start, keys.end))


def packed_call(pieces: Pieces, starts: Mapping[str, Tensor], options: Options) -> Call:
    """Return the call of parts of documents, which start at ``starts`` on the device."""
    return Call(options._replace(max_seqlens=pieces.longest), pieces.starts_q[-1], (0, pieces.starts_k[-1]), starts)


def on_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return numbers as int32 on a device."""
    return torch.as_tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)


def refuse_by_gather(options: Options, heads: ByHead, strategy: str, *, packed: bool) -> None:
    """Raise ``UnsupportedError`` where a call on part of the keys would place its queries elsewhere."""
    if heads.alibi is not None and not options.causal:
        raise UnsupportedError(f'alibi needs causal=True with strategy="{strategy}"')
    if packed and options.window != (-1, -1) and not options.causal:
        raise UnsupportedError(f'a window of packed documents needs causal=True with strategy="{strategy}"')
