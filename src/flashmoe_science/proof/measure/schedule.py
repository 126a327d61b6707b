"""How many calls, over how many inputs, in which order: pure functions on numbers, no clock and no GPU.

The sizes follow from two wishes: a sample lasts long enough for the clock that reads it, and a case with slow calls
does not hold the GPU for minutes. All arms of a case have the same number of calls in a graph.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence

MIN_INPUT_SETS = 2
MAX_INPUT_SETS = 64
FEW_INPUT_SETS = 8  # as many as there are however long it takes to write one
SETS_TO_CACHE = 20  # what all sets hold, in sizes of the L2 cache
LONGEST_WRITE_S = 0.25  # new values for all sets
LONGEST_TRUTH_S = 0.1  # an exact answer that takes longer is not worked out in each round
SLOW_TRUTH_S = 0.5  # one that takes longer is worked out in one process of gate bench, which is drawn
LONGEST_SAMPLE_S = 0.05  # one block of wall calls, or one replay of a graph; a single call may last longer
LONGEST_BLOCK_OVER_RANKS_S = 0.1  # of wall calls: ranks that have waited for one another start late
MEMORY_OF_SETS = (
    0.125  # of the GPU, for more sets of calls over ranks than the cache asks for: arms copy some, and make results
)
LONGEST_REPLAYS_S = 0.25  # all replays of one capture
MIN_WALL_CALLS = 3  # in a block; 1 of calls that take longer than ``LONGEST_BLOCK_OVER_RANKS_S``
KERNEL_CALLS = 5  # calls whose median is one sample of kernel time


def input_set_count(
    bytes_per_set: int, l2_bytes: int, seconds_per_set: float, *, at_least: int = MIN_INPUT_SETS
) -> int:
    """Return how many sets of inputs there are, from 2 to 64: as many calls can follow one another on new values.

    They hold 20 times the L2 cache together. Reading that takes some 0.3 ms, so that a replay lasts long enough, and no
    set is still in the cache when its turn comes. Where it takes ``seconds_per_set`` to write a set, they are fewer.
    ``at_least`` is what ``sets_over_ranks`` returned.
    """
    wanted = MAX_INPUT_SETS if bytes_per_set <= 0 else math.ceil(SETS_TO_CACHE * l2_bytes / bytes_per_set)
    affordable = max(FEW_INPUT_SETS, int(LONGEST_WRITE_S / max(seconds_per_set, 1e-9)))
    return max(at_least, min(MAX_INPUT_SETS, wanted, affordable))


def sets_over_ranks(bytes_per_set: int, memory_bytes: int) -> int:
    """Return how many sets there are at least for calls over ranks: 8 where an eighth of the memory holds them.

    With two, a block had two wall calls, and mostly told how long a rank that has waited needs to start.
    """
    room = int(MEMORY_OF_SETS * memory_bytes / max(bytes_per_set, 1))
    return max(MIN_INPUT_SETS, min(FEW_INPUT_SETS, room))


def known_set_counts(bytes_per_set: int, l2_bytes: int, *, method: int, over_ranks: bool = False) -> range:
    """Return how many sets of inputs a record may have; how long it took to write one is not in it.

    Method 1 had the fewest that hold twice the L2 cache; before method 3, ranks had no more than others.
    """
    if method == 1:
        wanted = math.ceil(2 * l2_bytes / bytes_per_set) if bytes_per_set > 0 else MIN_INPUT_SETS
        most = max(MIN_INPUT_SETS, min(MAX_INPUT_SETS, wanted))
        return range(most, most + 1)
    most = input_set_count(bytes_per_set, l2_bytes, 0.0)
    least = min(FEW_INPUT_SETS, most)
    return range(least, (max(FEW_INPUT_SETS, most) if over_ranks and method > 2 else most) + 1)


def graph_call_count(
    seconds_per_call: Sequence[float], input_sets: int, *, graph_seconds: float, graph_calls: int
) -> int:
    """Return how many calls each arm's graph holds: at most ``graph_calls``, and each has a set of inputs of its own.

    The fastest arm's replay lasts ``graph_seconds`` if the sets suffice, and no arm's replay lasts longer than
    ``LONGEST_SAMPLE_S`` unless a single call does.
    """
    fastest, slowest = max(1e-9, min(seconds_per_call)), max(1e-9, *seconds_per_call)
    wanted = math.ceil(graph_seconds / fastest - 1e-9)  # 4e-4 / 8e-6 is 50.000000000000007
    affordable = max(1, int(LONGEST_SAMPLE_S / slowest))
    return max(1, min(wanted, input_sets, graph_calls, affordable))


def replay_count(seconds_per_replay: float, graph_replays: int) -> int:
    """Return how many replays of one capture are timed: ``graph_replays``, fewer when they are slow, at least one."""
    return max(1, min(graph_replays, int(LONGEST_REPLAYS_S / max(seconds_per_replay, 1e-9))))


def block_call_count(seconds_per_call: float, calls: int, *, at_least: int, longest_s: float = LONGEST_SAMPLE_S) -> int:
    """Return how many eager calls make one block: ``calls``, fewer when they are slow, and not below ``at_least``."""
    return max(at_least, min(calls, int(longest_s / max(seconds_per_call, 1e-9))))


def wall_block_count(calls: int, wall_calls: int, seconds_per_call: float, *, seconds_per_set: float) -> int:
    """Return how many blocks of ``calls`` make a sample of wall time: ``wall_calls`` in all, fewer if they are slow."""
    affordable = int(LONGEST_SAMPLE_S / max(seconds_per_call * calls, 1e-9))
    writable = int(LONGEST_WRITE_S / max(seconds_per_set * calls, 1e-9))
    return max(1, min(math.ceil(wall_calls / calls), affordable, writable))


def balanced_orders(names: Sequence[str], rounds: int, *, seed: str) -> list[list[str]]:
    """Return one order of ``names`` for each round, random and balanced; the same ``seed`` gives the same orders.

    Rows of random Williams squares: in each square every name stands once in every place, and (over one square for an
    even number of names, two for an odd one) equally often right after every other name. So neither a drift within a
    round nor the arm before favours anyone.
    """
    generator = random.Random(seed)
    orders: list[list[str]] = []
    while len(orders) < rounds:
        labels = list(names)
        generator.shuffle(labels)
        for square in _williams_squares(len(labels)):
            generator.shuffle(square)
            orders += [[labels[place] for place in row] for row in square]
    return orders[:rounds]


def rounds_seed(seed: int | None, case: str, process: int, times: Sequence[str], *, method: int) -> str:
    """Return the seed of the orders of one case in one process. A verdict draws the same orders from it again.

    The seed of the run does not follow from it: the process that knows it must not know the values to come.
    """
    text = f"{seed}/{case}/{process}/{'+'.join(times)}"
    return text if method == 1 else hashlib.sha256(text.encode()).hexdigest()


def _williams_squares(n: int) -> list[list[list[int]]]:
    """Return the Latin squares of order ``n`` that balance who follows whom: one when ``n`` is even, two when odd."""
    first_row = [(place + 1) // 2 if place % 2 else (n - place // 2) % n for place in range(n)]
    square = [[(entry + shift) % n for entry in first_row] for shift in range(n)]
    return [square] if n % 2 == 0 else [square, [row[::-1] for row in square]]


def derived_seed(*parts: object) -> int:
    """Return a seed below 2**31 that depends on all ``parts`` and on nothing else."""
    return random.Random("/".join(map(str, parts))).getrandbits(31)


def clocks_settled(readings_mhz: Sequence[int | None], *, last: int = 4, tolerance: float = 0.01) -> bool:
    """Return whether the last readings of the SM clock agree. Without readings nothing can be said: False."""
    tail = [reading for reading in readings_mhz[-last:] if reading is not None]
    return len(tail) == last and max(tail) - min(tail) <= tolerance * max(tail)
