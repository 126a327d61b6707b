"""Random interleavings of the barriers of backward_wide_gluon_sm90: wide_protocol.py RUNS.

As heads up to 256 have them. Heads of a group are walked over one after another, or two together. Not windows, nor
heads up to 192 with V beyond 128, whose second warpgroup passes over a part of dQ.

No overrun of a barrier, no buffer written while it is read, every query tile added to in the order of the key tiles,
and no deadlock.
"""

import random, sys
from dataclasses import dataclass, field

from barriers import Program, interleave


@dataclass(frozen=True)
class Case:
    tiles_m: int
    key_tiles: int
    heads: int
    group: int
    together: int
    causal: bool

    def first(self, n): return n if self.causal else 0

    def order(self): return [(h, n) for n in range(self.key_tiles) for h in range(self.heads)]

    def steps(self, hn):
        h, n = hn
        walks = [range(before, before + self.together) for before in range(0, self.group, self.together)]
        return [(h, g, m) for walk in walks for m in range(self.tiles_m - 1, self.first(n) - 1, -1) for g in reversed(walk)]

    def added(self):
        """Return which key tiles have to be added to each half of a query tile, in order."""
        want = {}
        for h, n in self.order():
            for g in range(self.group):
                for m in range(self.first(n), self.tiles_m):
                    for half in (0, 1): want.setdefault(((h, g, m), half), []).append(n)
        return want


@dataclass
class Launch:
    """What the programs of one launch share."""

    rng: random.Random
    case: Case
    turn: dict = field(default_factory=dict)
    added: dict = field(default_factory=dict)
    drawn: int = 0

    def fetch_next(self):
        order, x = self.case.order(), self.drawn
        self.drawn += 1
        return order[x] if x < len(order) else None


class Kernel(Program):
    """One program: the producer, the warpgroup of scores, that of gradients, and two writers."""

    def __init__(self, launch):
        super().__init__(launch.rng)
        self.launch, self.case, self.tiles = launch, launch.case, {}

    def agents(self): return [self.load(), self.score(), self.gradient(), self.writer(0), self.writer(1)]

    def key_tile(self, t):
        yield from self.mwait(("tile", t % 8), (t // 8) & 1)
        return self.tiles[t % 8]

    def fill(self, name, tag):
        self.write(name, None); yield from self.pause(); self.buf[name]["tag"] = tag; self.mdone(name)

    def load(self):
        i = t = 0
        while True:
            yield from self.pause()
            hn = self.launch.fetch_next()
            self.tiles[t % 8] = hn; self.mdone(("tile", t % 8))
            if hn is None: return
            if t: yield from self.sync("KV_FREE", "L", 32, 288)
            for w in ("K", "V"): yield from self.fill(w, hn)
            for s in self.case.steps(hn):
                if i >= 2: yield from self.sync(("Q_FREE", i % 2), "L", 32, 288)
                yield from self.fill(("Q", i % 2), (hn, s))
                if i: yield from self.sync("DO_FREE", "L", 32, 288)
                yield from self.fill("DO", (hn, s))
                i += 1
            t += 1

    def walks(self, hn):
        """Yield each step of a key tile, and whether it is the first and the last of its walk."""
        steps = self.case.steps(hn); per = len(steps) // (self.case.group // self.case.together)
        for j, s in enumerate(steps): yield s, j % per == 0, j % per == per - 1

    def add_dq(self, w, i, half, hn, s):
        """Multiply one half of dQ and hand it to its writer."""
        who = ("dq", w)
        self.begin(("DS", i % 2), (hn, s), who); self.begin("K", hn, who)
        yield from self.pause()
        self.end(("DS", i % 2), who); self.end("K", who)
        yield from self.store_dq(w, i, half, hn, s)

    def store_dq(self, w, i, half, hn, s):
        yield from self.mwait("written", ((2 * i + half) & 1) ^ 1)
        self.write(("DQ", w), (hn, s, half)); yield
        self.arrive(("FULL", half), ("WG", w), 128, 288)

    def flush(self, w, i, hn, s):
        yield from self.sync("DS_FULL", w, 128, 256)
        for half in range(2): yield from self.add_dq(w, i, half, hn, s)

    def score(self):
        i = t = 0
        while True:
            hn = yield from self.key_tile(t)
            if hn is None: return
            yield from self.mwait("K", t & 1)
            before = None
            for s, first, last in self.walks(hn):
                yield from self.score_step(i, hn, s, None if first else before)
                before = s; i += 1
                if last: yield from self.flush(0, i - 1, hn, s)
            yield from self.sync("END", 0, 128, 256)
            self.write("V", "dV"); yield from self.pause(); self.arrive("KV_FREE", 0, 128, 288)
            t += 1

    def score_step(self, i, hn, s, before):
        yield from self.mwait(("Q", i % 2), (i // 2) & 1)
        self.begin("K", hn, "S"); self.begin(("Q", i % 2), (hn, s), "S"); yield from self.pause()
        if before: yield from self.sync("DS_FULL", 0, 128, 256)
        self.end("K", "S"); self.end(("Q", i % 2), "S"); yield from self.pause()
        self.arrive(("Q_FREE", i % 2), 0, 128, 288)
        if i > 0: yield from self.sync("P_FREE", 0, 128, 256)
        self.write("P", (hn, s)); yield
        self.arrive("P_FULL", 0, 128, 256)
        if before:
            yield from self.add_dq(0, i - 1, 0, hn, before)
            self.begin(("DS", (i - 1) % 2), (hn, before), "dq2"); self.begin("K", hn, "dq2")
        yield from self.mwait("DO", i & 1)
        self.begin("DO", (hn, s), "dV"); yield from self.pause()
        if before:
            self.end(("DS", (i - 1) % 2), "dq2"); self.end("K", "dq2")
            yield from self.store_dq(0, i - 1, 1, hn, before)
        yield from self.pause(); self.end("DO", "dV"); self.arrive("DO_FREE", 0, 128, 288)

    def gradient(self):
        i = t = 0
        while True:
            hn = yield from self.key_tile(t)
            if hn is None: return
            yield from self.mwait("V", t & 1); yield from self.mwait("K", t & 1)
            before = None
            for s, first, last in self.walks(hn):
                yield from self.gradient_step(i, hn, s, None if first else before)
                before = s; i += 1
                if last: yield from self.flush(1, i - 1, hn, s)
            yield from self.sync("END", 1, 128, 256)
            self.write("K", "dK"); yield from self.pause(); self.arrive("KV_FREE", 1, 128, 288)
            t += 1

    def gradient_step(self, i, hn, s, before):
        yield from self.mwait("DO", i & 1)
        self.begin("V", hn, "dP"); self.begin("DO", (hn, s), "dP"); yield from self.pause()
        if before: yield from self.sync("DS_FULL", 1, 128, 256)
        self.end("V", "dP"); self.end("DO", "dP")
        self.arrive("DO_FREE", 1, 128, 288)
        if before: yield from self.add_dq(1, i - 1, 0, hn, before)
        yield from self.mwait(("Q", i % 2), (i // 2) & 1)
        yield from self.sync("P_FULL", 1, 128, 256)
        self.begin("P", (hn, s), "dS"); yield from self.pause(); self.end("P", "dS")
        self.arrive("P_FREE", 1, 128, 256)
        self.write(("DS", i % 2), (hn, s)); yield
        self.begin(("Q", i % 2), (hn, s), "dK")
        if before: yield from self.add_dq(1, i - 1, 1, hn, before)
        yield from self.pause(); self.end(("Q", i % 2), "dK"); self.arrive(("Q_FREE", i % 2), 1, 128, 288)

    def writer(self, half):
        launch, t = self.launch, 0
        while True:
            hn = yield from self.key_tile(t)
            if hn is None: return
            for s in self.case.steps(hn):
                while launch.turn.get((s, half), 0) != hn[1]: yield
                yield from self.sync(("FULL", half), ("writer", half), 32, 288)
                for w in (0, 1): self.begin(("DQ", w), (hn, s, half), "tma")
                yield from self.pause()
                for w in (0, 1): self.end(("DQ", w), "tma")
                self.mdone("written"); yield from self.pause(6)
                launch.added.setdefault((s, half), []).append(hn[1]); yield
                launch.turn[(s, half)] = launch.turn.get((s, half), 0) + 1
            t += 1


def run(rng, case, grid, sms):
    launch = Launch(rng, case)
    interleave(rng, [Kernel(launch).agents() for _ in range(grid)], sms)
    assert launch.added == case.added(), "order"


def draw(seed):
    """Return a case, the size of its grid, and how many programs run at a time."""
    rng = random.Random(seed)
    key_tiles = rng.choice((1, 2, 4)); group, together = rng.choice(((1, 1), (2, 1), (2, 2), (4, 2)))
    tiles_m = rng.choice((1, 2, 4, 5)) if not seed % 2 else 4
    case = Case(tiles_m, key_tiles, rng.choice((1, 2, 3)), group, together, bool(seed % 2))
    return case, rng.choice((1, 3, 4)), rng.choice((1, 2, 3))


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])): run(random.Random(seed), *draw(seed))
    print("right")
