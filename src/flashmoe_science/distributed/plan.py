"""The plan of a packed batch: which rank holds which tokens, and on the device what its calls of attention take."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.inputs import Options
from .calls import Call, on_device, packed_call
from .layout import PackedLayout, Pieces, Span, split_layout
from .named import name

Mask = tuple[bool, tuple[int, int]]  # causal, window


class Place(NamedTuple):
    """Whose tokens a plan gives."""

    rank: int  # within the mesh
    members: tuple[int, ...]  # the ranks of the mesh, as the whole job numbers them
    parts: int  # of what one rank would hold by "gather": as many as divide heads by "heads+gather", else 1


class DocumentCalls(NamedTuple):
    """The calls of a rank by ``"gather"``, and which tokens travel for them."""

    whole: Call | None  # of the documents that this rank has alone: its first tokens
    shared: Call | None  # of its parts of other documents: its last tokens
    alone: int  # how many tokens ``whole`` has
    sent: int  # tokens that each rank sends, some of them padding
    keys: Tensor  # int32: of those that come, which tokens are the keys of ``shared``
    rounds: tuple[tuple[Span, ...], ...]  # the same tokens as spans: the keys of first parts, of second parts, ...
    gaps: tuple[Span, ...]  # of the tokens that come, those that first parts do not need; each of one rank
    keeps: bool  # whether these keys are kept for the gradients, instead of being sent again


class PackedPlan:
    """How a packed batch is split. ``ContextParallel.plan`` makes it once a batch, for all layers.

    It holds where documents start, on the device: calls copy nothing. Any mask is served. One that ``plan`` was not
    told is prepared by its first call, which copies then: not while a CUDA graph is captured.
    """

    def __init__(self, packed: PackedLayout, strategy: str, place: Place, device: torch.device) -> None:
        """Copy where documents start. Use ``ContextParallel.plan``, which compares plans over ranks.

        As many ranks as ``place.parts`` hold together what ``packed`` gives one.
        """
        self.packed, self.strategy, self.place = packed, strategy, place
        self.layout = split_layout(packed.layout, place.parts)  # which tokens each rank holds
        self.number = name(self)
        self.device = device
        self.digest = hashlib.sha256(repr((packed.starts, packed.layout.held)).encode()).hexdigest()[:16]
        self.cu_seqlens = on_device(packed.starts, device)  # [documents + 1] int32, of the whole batch
        self._prepared: dict[Mask, DocumentCalls] = {}
        self._calls: dict[Options, DocumentCalls] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was copied or pickled, under a number of its own: graphs know plans by it."""
        self.__dict__.update(state)
        self.number = name(self)

    @property
    def starts(self) -> tuple[int, ...]:
        """Return where documents start in the batch, and where the last one ends."""
        return self.packed.starts

    def prepare(self, masks: Sequence[Mask]) -> None:
        """Copy what calls of these masks take, by ``"gather"``."""
        for mask in masks:
            self._prepare(mask)

    def whole_call(self, options: Options) -> Call:
        """Return the call of all tokens."""
        longest = self.packed.longest
        starts = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens}
        return Call(options._replace(max_seqlens=(longest, longest)), starts=starts)

    def calls(self, options: Options) -> DocumentCalls:
        """Return the calls of this rank's own tokens."""
        if options not in self._calls:
            made = self._prepare((options.causal, options.window))
            whole, shared = (call and call.with_options(options) for call in (made.whole, made.shared))
            self._calls[options] = made._replace(whole=whole, shared=shared)
        return self._calls[options]

    def _prepare(self, mask: Mask) -> DocumentCalls:
        if mask not in self._prepared:
            packed, rank = self.packed, self.place.rank // self.place.parts
            alone, *rounds = packed.rounds[rank]
            spans = packed.layout.held[rank]
            options = Options(mask[0], window=mask[1])
            both = spans[:alone], spans[alone:]
            whole, shared = (packed.pieces(part, causal=mask[0], window=mask[1]) for part in both)
            needed = iter(shared.keys)
            places = tuple(
                tuple(place for keys in itertools.islice(needed, count) for place in packed.arrivals(keys))
                for count in rounds
            )
            arrivals = [torch.arange(*place, device="cpu") for place in itertools.chain(*places)]
            self._prepared[mask] = DocumentCalls(
                self._call(whole, options),
                self._call(shared, options),
                whole.starts_q[-1],
                packed.sent,
                on_device(torch.cat(arrivals) if arrivals else (), self.device),
                places,
                _gaps(places[0] if places else (), packed.sent, packed.layout.ranks),
                packed.keeps,
            )
        return self._prepared[mask]

    def _call(self, pieces: Pieces, options: Options) -> Call | None:
        if not pieces.keys:
            return None
        starts = {
            "cu_seqlens_q": on_device(pieces.starts_q, self.device),
            "cu_seqlens_k": on_device(pieces.starts_k, self.device),
        }
        return packed_call(pieces, starts, options)


def _gaps(spans: Sequence[Span], sent: int, ranks: int) -> tuple[Span, ...]:
    """Return what ``spans`` leave out of ``sent`` tokens of each rank, in spans that cross no border of ranks."""
    borders = [(number * sent, number * sent) for number in range(ranks + 1)]
    ordered = sorted([*spans, *borders])
    return tuple((one[1], other[0]) for one, other in itertools.pairwise(ordered) if one[1] < other[0])
