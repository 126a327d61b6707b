"""What shares of packed sequences gain, by counting steps: packed_turns.py (in the folder of the repository)

Programs draw key tiles as backward_gluon_sm90 does, the longest document first, and a step takes one unit of time; a start, and each
hand-over of dK and dV to the next share, 1.5. What a step gives to dQ is added when the key tile before has added to the same query tile;
two steps may be ahead of that. Prints the ideal time, that of the last program with the plan without shares, and how many times as fast
shares are: s(shares)t(heads together), the mask causal, on 132 SMs.
"""

import heapq
import tomllib

SMS, KEYS, AHEAD, COST = 132, 128, 2, 1.5


def run(lengths, heads_kv, group, shares, together, in_turns, rows=64):
    """Return the ideal time, and that of the last program."""
    free, steps_of_all, heads = [0.0] * SMS, 0, heads_kv * shares
    for length in sorted(lengths, reverse=True):
        added_by, handed_on = {}, {}  # of this document, by head: when each query tile was added; when sums were passed on
        order = [
            (h, n)
            for at in range(0, heads, in_turns)
            for n in range(-(-length // KEYS))
            for h in range(at, min(heads, at + in_turns))
        ]
        for head, n in order:
            now, times, before = heapq.heappop(free) + COST, [], added_by.get(head, {})
            steps = [
                (m, g)
                for at in range(0, group // shares, together)
                for m in range(-(-length // rows) - 1, n * KEYS // rows - 1, -1)
                for g in range(at, at + together)
            ]
            for j, step in enumerate(steps):
                now += 1
                if j >= AHEAD:
                    now = max(now, times[j - AHEAD])
                times.append(max(now, before.get(step, 0.0), times[-1] if times else 0.0))
            added_by[head] = dict(zip(steps, times))
            if shares > 1:
                now = max(now, handed_on.get((head // shares, n), 0.0)) + COST
                handed_on[head // shares, n] = now
            heapq.heappush(free, max(now, times[-1]))
            steps_of_all += len(steps)
    return steps_of_all / SMS, max(free)


def whole(heads):
    return next(n for n in range(8, 0, -1) if heads % n == 0)


suite = tomllib.load(open("src/flashmoe_science/suites/train-packed.toml", "rb"))["cases"]
cases = [
    (c["heads"], c["heads_kv"], c["head_dim"], c["lengths"])
    for c in suite
    if c["heads"] > c["heads_kv"] and c["head_dim"] <= 128 and c["causal"] and "window" not in c
]
usual, short, long = suite[9]["lengths"], suite[3]["lengths"], suite[6]["lengths"]
for heads, heads_kv in ((8, 1), (7, 1), (4, 1), (16, 2), (32, 2), (64, 4)):
    cases += [(heads, heads_kv, 128, lengths) for lengths in (usual, short, long, usual[:7], 4 * usual)]
for heads, heads_kv, head_dim, lengths in cases:
    group, rows = heads // heads_kv, 128 if head_dim == 64 else 64
    in_turns = 32 if head_dim == 64 else 2
    ideal, found = run(lengths, heads_kv, group, 1, whole(group), in_turns, rows)
    ways = []
    for shares in sorted({n for n in (2, 4, 8, group) if group % n == 0 and group > 1}):
        together = whole(group // shares)
        time = run(lengths, heads_kv, group, shares, together, in_turns, rows)[1]
        ways.append(f"s{shares}t{together} {found / time:.2f}")
    print(
        f"{heads} heads on {heads_kv}, D {head_dim}, {len(lengths)} documents up to {max(lengths)}, {sum(lengths)} tokens:",
        f"ideal {ideal:.0f}, found {found:.0f} ({ideal / found:.2f}) |", *ways,
    )  # fmt: skip
