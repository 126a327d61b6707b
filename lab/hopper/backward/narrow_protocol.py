"""Run the barriers of backward_gluon_sm90 and of backward_192_gluon_sm90, with windows, in random interleavings.

    python3 lab/hopper/backward/narrow_protocol.py [SEEDS] [192]

Heads of a group are walked over one after another, two or four together, or all. Each warpgroup, the producer and the writers are one agent each. It ends with an assertion where a named barrier is overrun, a buffer is written
while it is read, a slot or K is not the one that is expected, turns come out of order, or nobody can go on.
Windows end with whole tiles here, and a key tile is as long as a query tile. Rows' numbers and fences are left out.
"""
import random, sys

from barriers import Program, interleave


def run(seed, tiles_m, key_tiles, heads, group, together, grid, sms, causal, left, biased, is_192):
    rng = random.Random(seed)
    turn, added, drawn = {}, {}, [0]
    order = [(h, n) for n in range(key_tiles) for h in range(heads)]
    def end(n): return tiles_m if left is None else min(tiles_m, n + left + 1)
    def fst(n): return n if causal else 0
    def fk(m): return 0 if left is None else max(0, m - left)
    stats=dict(maxlag=0)
    def program():
        p = Program(rng)
        arrive, sync, pause, mwait, mdone = p.arrive, p.sync, p.pause, p.mwait, p.mdone
        write, begin, fin, buf = p.write, p.begin, p.end, p.buf
        tiles = {}; readt = {w: -1 for w in range(4)}
        def steps_of(hn):
            h, n = hn
            walks = [range(before, before + together) for before in range(0, group, together)]
            return [(h, g, m) for walk in walks for m in range(end(n) - 1, fst(n) - 1, -1) for g in reversed(walk)]
        def dq_buf(i, W): return ("DQ", W) if is_192 else ("DQ", i & 1, W)
        def key_tile(t, w):
            yield from mwait(("tile", t % 8), (t // 8) & 1)
            readt[w] = t; return tiles[t % 8]
        def load():
            i = t = 0
            while True:
                yield from pause()
                x = drawn[0]; drawn[0] += 1
                hn = order[x] if x < len(order) else None
                lag = t - min(readt.values()); stats["maxlag"] = max(stats["maxlag"], lag)
                assert min(readt.values()) >= t - 8, "ring of key tiles"
                tiles[t % 8] = hn; mdone(("tile", t % 8))
                if hn is None: return
                if t: yield from sync("KV_FREE", "L", 32, 288)
                for w in ("K", "V"):
                    for g in (0, 1): write((w, g), None)
                    yield from pause()
                    for g in (0, 1): buf[(w, g)]["tag"] = hn
                    mdone(w)
                for s in steps_of(hn):
                    if i >= 2: yield from sync(("FREE", i % 2), "L", 32, 288)
                    write(("Q", i % 2), None); yield from pause(6); buf[("Q", i % 2)]["tag"] = (hn, s); mdone(("Q", i % 2))
                    if is_192:
                        if i: yield from sync("DO_FREE", "L", 32, 288)
                        write("DO", None); yield from pause(6); buf["DO"]["tag"] = (hn, s); mdone("DO")
                    i += 1
                t += 1
        def wg(W):
            i = t = 0
            def scores(i, hn, s):
                yield from mwait(("Q", i % 2), (i // 2) & 1, i // 2)
                begin(("Q", i % 2), (hn, s), ("S", W, i)); begin(("K", W), hn, ("S", W, i))
            def issue_dq(i, hn, s):
                for w in (0, 1): begin(("DS", i % 2, w), (hn, s), ("dq", W)); begin(("K", w), hn, ("dq", W))
            def end_dq(i):
                for w in (0, 1): fin(("DS", i % 2, w), ("dq", W)); fin(("K", w), ("dq", W))
            def await_ds(i): yield from sync(("READY", W, i & 1), W, 128, 256)
            def pass_ds(i): arrive(("READY", 1 - W, i & 1), W, 128, 256)
            def multiply_dq(i, hn, s, read=None):
                issue_dq(i, hn, s); yield from pause()
                if read is not None: fin(("Q", read % 2), ("rest", W))
                end_dq(i)
            def await_written(i, hn, s):
                """Wait until dQ of step ``i`` can be put into shared memory, which has two tiles of it, or one; put it there."""
                yield from (mwait("written", (i & 1) ^ 1, i - 1) if is_192 else
                            mwait(("written", i & 1), ((i >> 1) & 1) ^ 1, (i >> 1) - 1))
                write(dq_buf(i, W), (hn, s)); yield
            def narrow_step(i, hn, s, prev):
                begin(("Q", i % 2), (hn, s), ("rest", W)); begin(("V", W), hn, ("dp", W))
                yield from pause(); fin(("V", W), ("dp", W))
                if prev: yield from await_ds(i - 1)
                write(("DS", i % 2, W), (hn, s)); yield
                if prev: yield from multiply_dq(i - 1, hn, prev)
                pass_ds(i); yield
                yield from pause()
                if prev: yield from narrow_store(i - 1, hn, prev)
                yield from pause(); fin(("Q", i % 2), ("rest", W))
            def narrow_store(i, hn, s):
                yield from await_written(i, hn, s)
                arrive(("FULL", i & 1), W, 128, 288)
            def step_192(i, hn, s, prev):
                yield from mwait("DO", i & 1, i)
                begin(("V", W), hn, ("dp", W)); begin("DO", (hn, s), ("dp", W))
                yield from pause(); fin(("V", W), ("dp", W)); fin("DO", ("dp", W))
                arrive("DO_FREE", W, 128, 288)
                if prev: yield from await_ds(i - 1)
                write(("DS", i % 2, W), (hn, s)); yield
                begin(("Q", i % 2), (hn, s), ("rest", W))
                if prev:
                    yield from multiply_dq(i - 1, hn, prev)
                    yield from store_192(i - 1, hn, prev, i)
                else:
                    pass_ds(i); yield
                    yield from pause(); fin(("Q", i % 2), ("rest", W))
            def store_192(i, hn, s, passing=None):
                yield from await_written(i, hn, s)
                yield from multiply_dq(i, hn, s, passing)  # the other 64 columns
                if passing is not None: pass_ds(passing); yield
                write(("DQ more", W), (hn, s)); yield
                arrive(("FULL", i & 1), W, 128, 288)
            step, store_dq = (step_192, store_192) if is_192 else (narrow_step, narrow_store)
            while True:
                hn = yield from key_tile(t, W)
                if hn is None: return
                yield from mwait("K", t & 1, t); yield from mwait("V", t & 1, t)
                steps = steps_of(hn); walks = group // together; per = len(steps) // walks
                assert per > 0
                for g in range(walks):
                    mine = steps[g * per:(g + 1) * per]
                    prev = None
                    for s in mine:
                        yield from scores(i, hn, s)
                        yield from pause()
                        fin(("Q", i % 2), ("S", W, i)); fin(("K", W), ("S", W, i))
                        yield from step(i, hn, s, prev)
                        arrive(("FREE", i % 2), W, 128, 288)
                        prev = s; i += 1; yield
                    yield from await_ds(i - 1)
                    yield from multiply_dq(i - 1, hn, prev)
                    yield from store_dq(i - 1, hn, prev)
                write(("V", W), "dV"); yield
                if is_192:
                    pass_ds(i); yield
                    yield from await_ds(i)
                else: yield from sync("END", W, 128, 256)
                write(("K", W), "dK"); yield from pause()
                arrive("KV_FREE", W, 128, 288); t += 1; yield
        def writer(F):
            read = [dq_buf(F, W) for W in (0, 1)] + [("DQ more", W) for W in (0, 1) if is_192]
            t = i = 0
            while True:
                if biased and rng.random() < .5: yield from pause(200)
                hn = yield from key_tile(t, 2 + F)
                if hn is None: return
                st = steps_of(hn)
                for j in range((i + F) & 1, len(st), 2):
                    s = st[j]
                    while turn.get(s, 0) != hn[1] - fk(s[2]): yield
                    yield from sync(("FULL", F), ("writer", F), 32, 288)
                    for name in read: begin(name, (hn, s), "tma")
                    yield from pause()
                    for name in read: fin(name, "tma")
                    mdone("written" if is_192 else ("written", F)); yield from pause(6)
                    added.setdefault(s, []).append(hn[1]); yield
                    turn[s] = turn.get(s, 0) + 1
                i += len(st); t += 1
        return [load(), wg(0), wg(1), writer(0), writer(1)]
    interleave(rng, [program() for _ in range(grid)], sms)
    want = {}
    for h, n in order:
        for g in range(group):
            for m in range(fst(n), end(n)): want.setdefault((h, g, m), []).append(n)
    assert added == want, "order"
    return stats["maxlag"]
lag = 0
for seed in range(int(sys.argv[1]) if sys.argv[1:] else 1000):
    rng = random.Random(seed)
    kt = rng.choice((1, 2, 4, 12)); left = rng.choice((None, 0, 0, 1, 2)); causal = rng.random() < .5
    tm = rng.choice((1, 2, 4, 5))
    if left is not None or causal: tm = max(tm, kt)
    lag = max(lag, run(seed, tm, kt, rng.choice((1, 2, 3)), *rng.choice(((1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (8, 4))), rng.choice((1, 3, 4)), rng.choice((1, 2, 3)), causal, left, seed % 2, "192" in sys.argv[2:]))
print("right, most key tiles between producer and slowest reader", lag)
