"""What turns cost, by counting steps: turns.py

Programs draw key tiles as backward_gluon_sm90 does, and a step takes one unit of time. What a step gives to dQ is added when the key
tile before has added to the same query tile; two steps may be ahead of that. Prints the ideal time, the time of the last program, and their
ratio, with query heads of a group walked over one after another, two and four together, and all. The batch has one sequence; the mask is causal, on 132 SMs.
"""

import heapq

SMS, KEYS, ROWS, GROUP_OF_HEADS, AHEAD = 132, 128, 64, 16, 2


def run(heads_kv: int, group: int, length: int, together: int) -> tuple[float, float]:
    """Return the ideal time, and that of the last program."""
    tiles_m, ratio = length // ROWS, KEYS // ROWS
    starts = range(0, heads_kv, GROUP_OF_HEADS)
    order = [(h, n) for at in starts for n in range(length // KEYS) for h in range(at, min(heads_kv, at + GROUP_OF_HEADS))]
    free, steps_of_all = [0.0] * SMS, 0
    added_by: dict[int, dict[tuple[int, int], float]] = {}  # of a head: when the last key tile added to each query tile
    for head, n in order:
        now = heapq.heappop(free)
        walk = range(tiles_m - 1, n * ratio - 1, -1)
        walks = [range(at, at + together) for at in range(0, group, together)]
        steps = [(m, g) for heads in walks for m in walk for g in heads]
        before, times = added_by.get(head, {}), []
        for j, step in enumerate(steps):
            now += 1
            if j >= AHEAD:
                now = max(now, times[j - AHEAD])
            times.append(max(now, before.get(step, 0.0), times[-1] if times else 0.0))
        added_by[head] = dict(zip(steps, times))
        heapq.heappush(free, max(now, times[-1]))
        steps_of_all += len(steps)
    return steps_of_all / SMS, max(free)


for name, heads_kv, group, length in (
    ("Llama-3-8B, 8k keys: 32 heads on 8", 8, 4, 8192),
    ("Qwen3-30B-A3B, 16k keys: 32 heads on 4", 4, 8, 16384),
    ("Gemma-3-27B, 8k keys: 32 heads on 16", 16, 2, 8192),
    ("16 heads, 16k keys", 16, 1, 16384),
):
    for together in sorted({1, min(2, group), min(4, group), group}):
        ideal, found = run(heads_kv, group, length, together)
        print(f"{name}, {together} together: ideal {ideal:.0f}, found {found:.0f}, {ideal / found:.3f}")
