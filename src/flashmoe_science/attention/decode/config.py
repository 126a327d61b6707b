"""The tile of a kernel that attends to a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile of ``decode_triton`` or ``decode_gluon_sm90``."""

    block_m: int  # rows of one program: the queries of all heads of a K/V head
    block_n: int  # keys of one step
    num_warps: int
    num_stages: int  # tiles of K and V in flight, and the one that is worked on
    blocks_per_sm: int  # resident at a time, at the least
    prefetch: bool = False  # L2 is asked for the first keys and values while the queries are on their way
