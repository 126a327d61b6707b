"""The plan of a packed batch: which rank holds which tokens, and on the device what its calls of attention take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.inputs import Options
from .calls import Call, on_device, packed_call
from .layout import Layout, PackedLayout, Piece
from .named import name

Mask = tuple[bool, tuple[int, int]]  # causal, window


class Place(NamedTuple):
    """Whose tokens a plan gives."""

    rank: int  # within the mesh
    members: tuple[int, ...]  # the ranks of the mesh, as the whole job numbers them


class PackedPlan:
    """How a packed batch is split. ``ContextParallel.plan`` makes it once a batch, for all layers.

    It holds where documents start, on the device: calls copy nothing. Any mask is served. One that ``plan`` was not
    told is prepared by its first call, which copies then: not while a CUDA graph is captured.
    """

    def __init__(self, packed: PackedLayout, place: Place, device: torch.device) -> None:
        """Copy where documents start. Use ``ContextParallel.plan``, which compares plans over ranks."""
        self._packed, self.place = packed, place
        self.number = name(self)
        self.device = device
        self.digest = hashlib.sha256(repr((packed.starts, packed.layout.chunks)).encode()).hexdigest()[:16]
        self.cu_seqlens = on_device(packed.starts, device)  # [documents + 1] int32, of the whole batch
        self._pieces: dict[Mask, list[tuple[Piece, dict[str, Tensor]]]] = {}
        self._calls: dict[Options, tuple[Call, ...]] = {}

    @property
    def starts(self) -> tuple[int, ...]:
        """Return where documents start in the batch, and where the last one ends."""
        return self._packed.starts

    @property
    def layout(self) -> Layout:
        """Return which tokens each rank holds."""
        return self._packed.layout

    def prepare(self, masks: Sequence[Mask]) -> None:
        """Copy what calls of these masks take, by ``"gather"``."""
        for mask in masks:
            self._pieces_of(mask)

    def whole_call(self, options: Options) -> Call:
        """Return the call of all tokens."""
        longest = self._packed.longest
        starts = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens}
        return Call(options._replace(max_seqlens=(longest, longest)), starts=starts)

    def calls(self, options: Options) -> tuple[Call, ...]:
        """Return the calls of this rank's own tokens."""
        if options not in self._calls:
            pieces = self._pieces_of((options.causal, options.window))
            self._calls[options] = tuple(packed_call(piece, starts, options) for piece, starts in pieces)
        return self._calls[options]

    def _pieces_of(self, mask: Mask) -> list[tuple[Piece, dict[str, Tensor]]]:
        if mask not in self._pieces:
            pieces = self._packed.pieces(self.place.rank, causal=mask[0], window=mask[1])
            self._pieces[mask] = [(piece, self._starts_of(piece)) for piece in pieces]
        return self._pieces[mask]

    def _starts_of(self, piece: Piece) -> dict[str, Tensor]:
        return {
            "cu_seqlens_q": on_device(piece.starts_q, self.device),
            "cu_seqlens_k": on_device(piece.starts_k, self.device),
        }
