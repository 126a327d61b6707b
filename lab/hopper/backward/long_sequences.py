"""Time gradients of long sequences by K/V heads in turns, and by heads that are walked over together.

long_sequences.py warm | time SECONDS. Plans are written as in ``shared_groups.py``, which does the timing.
"""

import sys
import time

import shared_groups as base

base.CASES = [  # query and K/V heads, batch, tokens, head size, and whether causal
    (32, 8, 1, 32768, 128, False), (16, 16, 1, 32768, 128, False), (64, 8, 1, 16384, 128, False),
    (32, 8, 1, 16384, 128, False), (16, 16, 1, 16384, 128, False), (16, 16, 2, 8192, 128, False),
    (32, 8, 1, 32768, 128), (28, 4, 1, 16384, 128), (16, 4, 1, 32768, 64), (64, 8, 1, 16384, 64),
    (16, 4, 1, 32768, 64, False), (32, 32, 1, 16384, 64, False), (16, 16, 1, 32768, 128), (32, 8, 1, 65536, 128),
    (32, 8, 1, 65536, 128, False), (16, 4, 1, 65536, 64), (16, 16, 1, 16384, 128), (32, 2, 1, 32768, 128),
    (28, 4, 1, 32768, 128), (16, 16, 1, 16384, 192, False), (8, 4, 1, 16384, 256, False), (8, 4, 1, 32768, 256),
]  # fmt: skip
_TOGETHER = {1: [(1, 1)], 2: [(1, 1), (1, 2)], 4: [(1, 1), (1, 2), (1, 4), (2, 2)], 7: [(1, 7), (7, 1)]}
_TOGETHER |= {8: [(1, 4), (1, 8), (2, 4)], 16: [(1, 4), (2, 8), (4, 4)]}


def groups_of(group, causal):
    return _TOGETHER[group] if causal else [(1, 1)]


def ways_of(case):
    heads, heads_kv, batch, seqlen, head_dim, causal = base.parts_of(case)
    turns = (2, 4, 8) if seqlen > 32768 or causal else (1, 2, 4, 8, 16)
    found = groups_of(heads // heads_kv, causal)
    return [(s, t, n) for s, t in found for n in turns if n < 2 * heads_kv * batch * s]


base.groups_of, base.ways_of = groups_of, ways_of

if __name__ == "__main__":
    base.warm() if sys.argv[1] == "warm" else base.measure(time.monotonic() + float(sys.argv[2]))
