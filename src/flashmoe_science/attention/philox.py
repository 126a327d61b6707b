"""The random numbers of dropout, in plain torch: Philox 4x32 with 10 rounds.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11; the constants are those of
Random123. ``tl.philox`` has the same numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by from round to round
_ROUNDS = 10


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random numbers of 32 bits for each counter.

    Args:
        counter: four words, int64 from 0 to 2**32 - 1, of shapes that broadcast.
        key: two words of the same kind.

    Returns:
        Four words of the same kind.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        low_a, high_a = _multiply(c0, _MULTIPLIERS[0])
        low_b, high_b = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the low and the high 32 bits of the product of two words of 32 bits."""
    low, high = (word & 0xFFFF) * factor, (word >> 16) * factor  # of 48 bits: that of 64 would overflow
    middle = high + (low >> 16)
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), middle >> 16


def dropout_keeps(dropout_seed: Tensor, dropout_p: float, *, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return which probabilities are kept: those whose number is at least ``dropout_p`` times 2**32.

    Number n % 4 of the four that a row, n // 4 and a head have is that of key n.

    Args:
        dropout_seed: ``[2]`` int64: the key is the first, the last word of the counter the second modulo 2**32.
        dropout_p: at least 0, less than 1.
        heads: b * H + h of each head, ``[G]`` int64.
        rows: numbers of queries, ``[M]`` int64.
        keys: numbers of keys, ``[N]`` int64.

    Returns:
        ``[G, M, N]`` bool.
    """
    seed, offset = dropout_seed.unbind()
    counter = rows[:, None] & _MASK, keys // 4, heads[:, None, None] & _MASK, offset & _MASK
    numbers = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    least = math.ceil(dropout_p * 2.0**32)
    kept = numbers[0] >= least
    for place, number in enumerate(numbers[1:], 1):
        kept = torch.where(keys % 4 == place, number >= least, kept)
    return kept
