"""Random interleavings of the barriers of backward_wide_gluon_sm90: wide_protocol.py RUNS.

As heads up to 256 have them. Heads of a group are walked over one after another, or two together. Not windows, nor heads up to 192 with V beyond 128, whose second warpgroup passes over a
part of dQ.

No overrun of a barrier, no buffer written while it is read, every query tile added to in the order of the key tiles,
and no deadlock.
"""

import random, sys

from barriers import Program, interleave


def run(seed, tiles_m=4, key_tiles=4, heads=2, group=2, together=1, grid=3, sms=2, causal=False):
    rng = random.Random(seed)
    turn, added, drawn = {}, {}, [0]
    order = [(h, n) for n in range(key_tiles) for h in range(heads)]
    def program():
        p = Program(rng)
        arrive, sync, pause, mwait, mdone = p.arrive, p.sync, p.pause, p.mwait, p.mdone
        write, begin, end, buf = p.write, p.begin, p.end, p.buf
        tiles = {}
        def steps_of(hn):
            h, n = hn
            walks = [range(before, before + together) for before in range(0, group, together)]
            return [(h, g, m) for walk in walks for m in range(tiles_m - 1, (n if causal else 0) - 1, -1) for g in reversed(walk)]
        def key_tile(t):
            yield from mwait(("tile", t % 8), (t // 8) & 1)
            return tiles[t % 8]
        def load():
            i = t = 0
            while True:
                yield from pause()
                x = drawn[0]; drawn[0] += 1
                hn = order[x] if x < len(order) else None
                tiles[t % 8] = hn; mdone(("tile", t % 8))
                if hn is None: return
                if t: yield from sync("KV_FREE", "L", 32, 288)
                for w in ("K", "V"):
                    write(w, None); yield from pause(); buf[w]["tag"] = hn; mdone(w)
                for s in steps_of(hn):
                    if i >= 2: yield from sync(("Q_FREE", i % 2), "L", 32, 288)
                    write(("Q", i % 2), None); yield from pause(); buf[("Q", i % 2)]["tag"] = (hn, s)
                    mdone(("Q", i % 2))
                    if i: yield from sync("DO_FREE", "L", 32, 288)
                    write("DO", None); yield from pause(); buf["DO"]["tag"] = (hn, s); mdone("DO")
                    i += 1
                t += 1
        def dq(W, i, half, hn, s):
            who = ("dq", W)
            begin(("DS", i % 2), (hn, s), who); begin("K", hn, who)
            yield from pause()
            end(("DS", i % 2), who); end("K", who)
        def store_dq(W, i, half, hn, s):
            number = 2 * i + half
            yield from mwait("written", (number & 1) ^ 1)
            write(("DQ", W), (hn, s, half)); yield
            arrive(("FULL", half), ("WG", W), 128, 288)
        def flush(W, i, hn, s):
            yield from sync("DS_FULL", W, 128, 256)
            for half in range(2):
                yield from dq(W, i, half, hn, s); yield from store_dq(W, i, half, hn, s)
        def score():
            i = t = 0
            while True:
                hn = yield from key_tile(t)
                if hn is None: return
                yield from mwait("K", t & 1)
                prev = None
                steps = steps_of(hn); per = len(steps) // (group // together)
                for j, s in enumerate(steps):
                    first = j % per == 0
                    yield from mwait(("Q", i % 2), (i // 2) & 1)
                    begin("K", hn, "S"); begin(("Q", i % 2), (hn, s), "S"); yield from pause()
                    if not first: yield from sync("DS_FULL", 0, 128, 256)
                    end("K", "S"); end(("Q", i % 2), "S"); yield from pause()
                    arrive(("Q_FREE", i % 2), 0, 128, 288)
                    if i > 0: yield from sync("P_FREE", 0, 128, 256)
                    write("P", (hn, s)); yield
                    arrive("P_FULL", 0, 128, 256)
                    if not first:
                        yield from dq(0, i - 1, 0, hn, prev); yield from store_dq(0, i - 1, 0, hn, prev)
                        begin(("DS", (i - 1) % 2), (hn, prev), "dq2"); begin("K", hn, "dq2")
                    yield from mwait("DO", i & 1)
                    begin("DO", (hn, s), "dV"); yield from pause()
                    if not first:
                        end(("DS", (i - 1) % 2), "dq2"); end("K", "dq2")
                        yield from store_dq(0, i - 1, 1, hn, prev)
                    yield from pause(); end("DO", "dV"); arrive("DO_FREE", 0, 128, 288)
                    prev = s; i += 1
                    if j % per == per - 1: yield from flush(0, i - 1, hn, s)
                yield from sync("END", 0, 128, 256)
                write("V", "dV"); yield from pause(); arrive("KV_FREE", 0, 128, 288)
                t += 1
        def gradient():
            i = t = 0
            while True:
                hn = yield from key_tile(t)
                if hn is None: return
                yield from mwait("V", t & 1); yield from mwait("K", t & 1)
                prev = None
                steps = steps_of(hn); per = len(steps) // (group // together)
                for j, s in enumerate(steps):
                    first = j % per == 0
                    yield from mwait("DO", i & 1)
                    begin("V", hn, "dP"); begin("DO", (hn, s), "dP"); yield from pause()
                    if not first: yield from sync("DS_FULL", 1, 128, 256)
                    end("V", "dP"); end("DO", "dP")
                    arrive("DO_FREE", 1, 128, 288)
                    if not first:
                        yield from dq(1, i - 1, 0, hn, prev); yield from store_dq(1, i - 1, 0, hn, prev)
                    yield from mwait(("Q", i % 2), (i // 2) & 1)
                    yield from sync("P_FULL", 1, 128, 256)
                    begin("P", (hn, s), "dS"); yield from pause(); end("P", "dS")
                    arrive("P_FREE", 1, 128, 256)
                    write(("DS", i % 2), (hn, s)); yield
                    begin(("Q", i % 2), (hn, s), "dK")
                    if not first:
                        yield from dq(1, i - 1, 1, hn, prev); yield from store_dq(1, i - 1, 1, hn, prev)
                    yield from pause(); end(("Q", i % 2), "dK"); arrive(("Q_FREE", i % 2), 1, 128, 288)
                    prev = s; i += 1
                    if j % per == per - 1: yield from flush(1, i - 1, hn, s)
                yield from sync("END", 1, 128, 256)
                write("K", "dK"); yield from pause(); arrive("KV_FREE", 1, 128, 288)
                t += 1
        def writer(half):
            t = 0
            while True:
                hn = yield from key_tile(t)
                if hn is None: return
                for s in steps_of(hn):
                    while turn.get((s, half), 0) != hn[1]: yield
                    yield from sync(("FULL", half), ("writer", half), 32, 288)
                    for W in (0, 1): begin(("DQ", W), (hn, s, half), "tma")
                    yield from pause()
                    for W in (0, 1): end(("DQ", W), "tma")
                    mdone("written"); yield from pause(6)
                    added.setdefault((s, half), []).append(hn[1]); yield
                    turn[(s, half)] = turn.get((s, half), 0) + 1
                t += 1
        return [load(), score(), gradient(), writer(0), writer(1)]
    interleave(rng, [program() for _ in range(grid)], sms)
    want = {}
    for h, n in order:
        for g in range(group):
            for m in range(n if causal else 0, tiles_m):
                for half in (0, 1): want.setdefault(((h, g, m), half), []).append(n)
    assert added == want, "order"
for seed in range(int(sys.argv[1])):
    rng = random.Random(seed)
    kt = rng.choice((1, 2, 4)); group, together = rng.choice(((1, 1), (2, 1), (2, 2), (4, 2)))
    run(seed, tiles_m=rng.choice((1, 2, 4, 5)) if not seed % 2 else 4, key_tiles=kt, heads=rng.choice((1, 2, 3)), group=group, together=together, grid=rng.choice((1, 3, 4)), sms=rng.choice((1, 2, 3)), causal=bool(seed % 2))
print("right")
