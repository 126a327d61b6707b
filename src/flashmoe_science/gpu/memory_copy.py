"""A copy within the memory of a GPU: what a call that moves as many bytes takes at the rate of a copy.

Half of them are read and half written. A call that only reads can be faster: the share of the rate can pass 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

# Copies of 75 to 200 MB reached 0.87 to 0.89 of the rate of large ones (flashmoe show 20261122T164239Z): start and end
# of a kernel are in their time, as in that of a call that moves as many. In smaller copies they would dominate.
FEWEST_BYTES = 64 << 20
# L2 holds 50 to 126 MB of what was written last, and could hold a small copy whole. Calls take turns with parts of so
# much memory: what they find in L2 is not theirs, and has to be written back before.
POOL_BYTES = 512 << 20


def bind_copy(nbytes: float, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a call that reads half of ``nbytes`` and writes them elsewhere, so that as many cross the memory's bus.

    The bytes are random: what memory and buses take depends on what they carry. Each part holds the same ones. It is a
    kernel, which inverts them: a copy node of a CUDA graph took 1.5 times as long of 1 GiB, though not of 256 MiB
    (lab/moe/4_decode_tiles_h200.txt).
    The written bytes, read as fp32, are finite: one bit of the exponent is 0.
    """
    words = max(1, round(nbytes / 2 / 4))
    parts = max(1, round(POOL_BYTES / (8 * words)))
    generator = torch.Generator(device).manual_seed(0)
    source = torch.empty(words, dtype=torch.int32, device=device).random_(generator=generator)
    sources = source.bitwise_or_(1 << 30).repeat(parts, 1)
    targets = torch.empty(sources.shape, dtype=torch.int32, device=device)
    turns = itertools.cycle(range(parts))

    def copy() -> torch.Tensor:
        turn = next(turns)
        return torch.bitwise_not(sources[turn], out=targets[turn]).view(torch.float32)

    return copy


def refuse_copy(nbytes: float) -> str | None:
    """Return why a copy of so few bytes says little about the memory, or None."""
    if nbytes >= FEWEST_BYTES:
        return None
    return f"it is asked for from {FEWEST_BYTES >> 20} MiB on, this case has {nbytes / 2**20:.3g}"
