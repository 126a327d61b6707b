"""A copy within the memory of a GPU: what a call that moves as many bytes takes at the rate of a copy.

Half of them are read and half written. A call that only reads can be faster: the share of the rate can pass 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

FEWEST_BYTES = 512 << 20  # below, a tenth and more of what is written may stay in L2, of 50 to 126 MB, as the copy ends


def bind_copy(nbytes: float, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a call that reads half of ``nbytes`` and writes them elsewhere, so that as many cross the memory's bus.

    The bytes are random: what memory and buses take depends on what they carry.
    """
    half = max(1, round(nbytes / 2))
    generator = torch.Generator(device).manual_seed(0)
    source = torch.empty(half, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty(half, dtype=torch.uint8, device=device)
    return functools.partial(target.copy_, source)


def refuse_copy(nbytes: float) -> str | None:
    """Return why a copy of so few bytes says little about the memory, or None."""
    if nbytes >= FEWEST_BYTES:
        return None
    return f"it is asked for from {FEWEST_BYTES >> 20} MiB on, this case has {nbytes / 2**20:.3g}"
