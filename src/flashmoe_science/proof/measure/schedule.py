"""How many calls, over how many inputs, in which order: pure functions on numbers, no clock and no GPU.

The sizes follow from two wishes: a sample lasts long enough for the clock that reads it, and a case with slow calls
does not hold the GPU for minutes. All arms of a case have the same number of calls in a graph.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

MIN_INPUT_SETS = 2  # values move from set to set, so that nothing learns what lies at an address
MAX_INPUT_SETS = 64
LONGEST_SAMPLE_S = 0.05  # one block of wall calls, or one replay of a graph; a single call may last longer
LONGEST_REPLAYS_S = 0.25  # all replays of one capture
MIN_WALL_CALLS = 3
KERNEL_CALLS = 5  # calls whose median is one sample of kernel time


def input_set_count(bytes_per_set: int, l2_bytes: int) -> int:
    """Return the fewest sets of inputs that hold at least twice the L2 cache together, from 2 to 64."""
    if bytes_per_set <= 0:
        return MIN_INPUT_SETS
    return max(MIN_INPUT_SETS, min(MAX_INPUT_SETS, math.ceil(2 * l2_bytes / bytes_per_set)))


def graph_call_count(
    seconds_per_call: Sequence[float], input_sets: int, *, graph_seconds: float, graph_calls: int
) -> int:
    """Return how many calls each arm's graph holds, at most ``graph_calls``.

    The fastest arm's replay lasts ``graph_seconds``, every set of inputs is used equally often, and no arm's replay
    lasts longer than ``LONGEST_SAMPLE_S`` unless a single call does.
    """
    fastest, slowest = max(1e-9, min(seconds_per_call)), max(1e-9, *seconds_per_call)
    wanted = math.ceil(graph_seconds / fastest - 1e-9)  # 4e-4 / 8e-6 is 50.000000000000007
    rotations = max(1, min(math.ceil(wanted / input_sets), graph_calls // input_sets))
    affordable = max(1, int(LONGEST_SAMPLE_S / slowest))
    return min(rotations * input_sets, graph_calls, affordable)


def replay_count(seconds_per_replay: float, graph_replays: int) -> int:
    """Return how many replays of one capture are timed: ``graph_replays``, fewer when they are slow, at least one."""
    return max(1, min(graph_replays, int(LONGEST_REPLAYS_S / max(seconds_per_replay, 1e-9))))


def block_call_count(seconds_per_call: float, calls: int, *, at_least: int) -> int:
    """Return how many eager calls make one block: ``calls``, fewer when they are slow, and not below ``at_least``."""
    return max(at_least, min(calls, int(LONGEST_SAMPLE_S / max(seconds_per_call, 1e-9))))


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


def rounds_seed(seed: int | None, case: str, process: int, times: Sequence[str]) -> str:
    """Return the seed of the orders of one case in one process. A verdict draws the same orders from it again."""
    return f"{seed}/{case}/{process}/{'+'.join(times)}"


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
