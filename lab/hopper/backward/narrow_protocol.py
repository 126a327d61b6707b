"""Run the barriers of backward_gluon_sm90 and of backward_192_gluon_sm90, with windows, in random interleavings.

    python3 lab/hopper/backward/narrow_protocol.py [SEEDS] [192]

Heads of a group are walked over one after another, two or four together, or all. Each warpgroup, the producer and the
writers are one agent each. It ends with an assertion where a named barrier is overrun, a buffer is written while it is
read, a slot or K is not the one that is expected, turns come out of order, or nobody can go on.
Windows end with whole tiles here, and a key tile is as long as a query tile. Rows' numbers and fences are left out.
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
    left: int | None
    biased: bool  # writers are slow now and then
    is_192: bool

    def first(self, n): return n if self.causal else 0

    def end(self, n): return self.tiles_m if self.left is None else min(self.tiles_m, n + self.left + 1)

    def first_key(self, m): return 0 if self.left is None else max(0, m - self.left)

    def order(self): return [(h, n) for n in range(self.key_tiles) for h in range(self.heads)]

    def steps(self, hn):
        h, n = hn
        walks = [range(before, before + self.together) for before in range(0, self.group, self.together)]
        return [(h, g, m) for walk in walks for m in range(self.end(n) - 1, self.first(n) - 1, -1) for g in reversed(walk)]

    def dq_buf(self, i, w): return ("DQ", w) if self.is_192 else ("DQ", i & 1, w)

    def added(self):
        """Return which key tiles have to be added to each query tile, in order."""
        want = {}
        for h, n in self.order():
            for g in range(self.group):
                for m in range(self.first(n), self.end(n)): want.setdefault((h, g, m), []).append(n)
        return want


@dataclass
class Launch:
    """What the programs of one launch share."""

    rng: random.Random
    case: Case
    turn: dict = field(default_factory=dict)
    added: dict = field(default_factory=dict)
    drawn: int = 0
    most_lag: int = 0

    def fetch_next(self):
        order, x = self.case.order(), self.drawn
        self.drawn += 1
        return order[x] if x < len(order) else None


class Kernel(Program):
    """One program: the producer, two warpgroups and two writers."""

    def __init__(self, launch):
        super().__init__(launch.rng)
        self.launch, self.case = launch, launch.case
        self.tiles, self.read_tiles = {}, {w: -1 for w in range(4)}

    def agents(self):
        kind = Warpgroup192 if self.case.is_192 else Warpgroup
        return [self.load(), kind(self, 0).run(), kind(self, 1).run(), self.writer(0), self.writer(1)]

    def key_tile(self, t, w):
        yield from self.mwait(("tile", t % 8), (t // 8) & 1)
        self.read_tiles[w] = t
        return self.tiles[t % 8]

    def load(self):
        i = t = 0
        while True:
            yield from self.pause()
            hn, slowest = self.launch.fetch_next(), min(self.read_tiles.values())
            self.launch.most_lag = max(self.launch.most_lag, t - slowest)
            assert slowest >= t - 8, "ring of key tiles"
            self.tiles[t % 8] = hn; self.mdone(("tile", t % 8))
            if hn is None: return
            if t: yield from self.sync("KV_FREE", "L", 32, 288)
            for w in ("K", "V"):
                for g in (0, 1): self.write((w, g), None)
                yield from self.pause()
                for g in (0, 1): self.buf[(w, g)]["tag"] = hn
                self.mdone(w)
            for s in self.case.steps(hn):
                if i >= 2: yield from self.sync(("FREE", i % 2), "L", 32, 288)
                yield from self.fill(("Q", i % 2), (hn, s))
                if self.case.is_192:
                    if i: yield from self.sync("DO_FREE", "L", 32, 288)
                    yield from self.fill("DO", (hn, s))
                i += 1
            t += 1

    def fill(self, name, tag):
        self.write(name, None); yield from self.pause(6); self.buf[name]["tag"] = tag; self.mdone(name)

    def writer(self, f):
        case, launch = self.case, self.launch
        read = [case.dq_buf(f, w) for w in (0, 1)] + [("DQ more", w) for w in (0, 1) if case.is_192]
        t = i = 0
        while True:
            if case.biased and self.rng.random() < .5: yield from self.pause(200)
            hn = yield from self.key_tile(t, 2 + f)
            if hn is None: return
            steps = case.steps(hn)
            for j in range((i + f) & 1, len(steps), 2):
                s = steps[j]
                while launch.turn.get(s, 0) != hn[1] - case.first_key(s[2]): yield
                yield from self.sync(("FULL", f), ("writer", f), 32, 288)
                for name in read: self.begin(name, (hn, s), "tma")
                yield from self.pause()
                for name in read: self.end(name, "tma")
                self.mdone("written" if case.is_192 else ("written", f)); yield from self.pause(6)
                launch.added.setdefault(s, []).append(hn[1]); yield
                launch.turn[s] = launch.turn.get(s, 0) + 1
            i += len(steps); t += 1


class Warpgroup:
    """One of the two warpgroups that multiply, for heads up to 128."""

    def __init__(self, kernel, w):
        self.p, self.w, self.case = kernel, w, kernel.case

    def run(self):
        p, w = self.p, self.w
        i = t = 0
        while True:
            hn = yield from p.key_tile(t, w)
            if hn is None: return
            yield from p.mwait("K", t & 1, t); yield from p.mwait("V", t & 1, t)
            steps = self.case.steps(hn); walks = self.case.group // self.case.together; per = len(steps) // walks
            assert per > 0
            for g in range(walks): i = yield from self.walk(i, hn, steps[g * per:(g + 1) * per])
            p.write(("V", w), "dV"); yield
            yield from self.meet(i)
            p.write(("K", w), "dK"); yield from p.pause()
            p.arrive("KV_FREE", w, 128, 288); t += 1; yield

    def walk(self, i, hn, steps):
        p, w, before = self.p, self.w, None
        for s in steps:
            yield from p.mwait(("Q", i % 2), (i // 2) & 1, i // 2)
            p.begin(("Q", i % 2), (hn, s), ("S", w, i)); p.begin(("K", w), hn, ("S", w, i))
            yield from p.pause()
            p.end(("Q", i % 2), ("S", w, i)); p.end(("K", w), ("S", w, i))
            yield from self.step(i, hn, s, before)
            p.arrive(("FREE", i % 2), w, 128, 288)
            before = s; i += 1; yield
        yield from self.await_ds(i - 1)
        yield from self.multiply_dq(i - 1, hn, before)
        yield from self.store_dq(i - 1, hn, before)
        return i

    def await_ds(self, i): yield from self.p.sync(("READY", self.w, i & 1), self.w, 128, 256)

    def pass_ds(self, i): self.p.arrive(("READY", 1 - self.w, i & 1), self.w, 128, 256)

    def multiply_dq(self, i, hn, s, read=None):
        p = self.p
        for w in (0, 1): p.begin(("DS", i % 2, w), (hn, s), ("dq", self.w)); p.begin(("K", w), hn, ("dq", self.w))
        yield from p.pause()
        if read is not None: p.end(("Q", read % 2), ("rest", self.w))
        for w in (0, 1): p.end(("DS", i % 2, w), ("dq", self.w)); p.end(("K", w), ("dq", self.w))

    def step(self, i, hn, s, before):
        p, w = self.p, self.w
        p.begin(("Q", i % 2), (hn, s), ("rest", w)); p.begin(("V", w), hn, ("dp", w))
        yield from p.pause(); p.end(("V", w), ("dp", w))
        if before: yield from self.await_ds(i - 1)
        p.write(("DS", i % 2, w), (hn, s)); yield
        if before: yield from self.multiply_dq(i - 1, hn, before)
        self.pass_ds(i); yield
        yield from p.pause()
        if before: yield from self.store_dq(i - 1, hn, before)
        yield from p.pause(); p.end(("Q", i % 2), ("rest", w))

    def store_dq(self, i, hn, s):
        """Wait until dQ of step ``i`` can be put into shared memory, which has two tiles of it; put it there."""
        yield from self.p.mwait(("written", i & 1), ((i >> 1) & 1) ^ 1, (i >> 1) - 1)
        self.p.write(self.case.dq_buf(i, self.w), (hn, s)); yield
        self.p.arrive(("FULL", i & 1), self.w, 128, 288)

    def meet(self, i):
        """Wait for the other warpgroup before K is written over."""
        yield from self.p.sync("END", self.w, 128, 256)


class Warpgroup192(Warpgroup):
    """The same for heads of 192 columns: one buffer of dO, one tile of dQ, whose last 64 columns come after the others."""

    def step(self, i, hn, s, before):
        p, w = self.p, self.w
        yield from p.mwait("DO", i & 1, i)
        p.begin(("V", w), hn, ("dp", w)); p.begin("DO", (hn, s), ("dp", w))
        yield from p.pause(); p.end(("V", w), ("dp", w)); p.end("DO", ("dp", w))
        p.arrive("DO_FREE", w, 128, 288)
        if before: yield from self.await_ds(i - 1)
        p.write(("DS", i % 2, w), (hn, s)); yield
        p.begin(("Q", i % 2), (hn, s), ("rest", w))
        if before:
            yield from self.multiply_dq(i - 1, hn, before)
            yield from self.store_dq(i - 1, hn, before, i)
        else:
            self.pass_ds(i); yield
            yield from p.pause(); p.end(("Q", i % 2), ("rest", w))

    def store_dq(self, i, hn, s, passing=None):
        yield from self.p.mwait("written", (i & 1) ^ 1, i - 1)
        self.p.write(self.case.dq_buf(i, self.w), (hn, s)); yield
        yield from self.multiply_dq(i, hn, s, passing)  # the other 64 columns
        if passing is not None: self.pass_ds(passing); yield
        self.p.write(("DQ more", self.w), (hn, s)); yield
        self.p.arrive(("FULL", i & 1), self.w, 128, 288)

    def meet(self, i):
        self.pass_ds(i); yield
        yield from self.await_ds(i)


def run(rng, case, grid, sms):
    """Run one launch, and return by how many key tiles the producer was ahead of the slowest reader."""
    launch = Launch(rng, case)
    interleave(rng, [Kernel(launch).agents() for _ in range(grid)], sms)
    assert launch.added == case.added(), "order"
    return launch.most_lag


def draw(seed, is_192):
    """Return a case, the size of its grid, and how many programs run at a time."""
    rng = random.Random(seed)
    key_tiles = rng.choice((1, 2, 4, 12)); left = rng.choice((None, 0, 0, 1, 2)); causal = rng.random() < .5
    tiles_m = rng.choice((1, 2, 4, 5))
    if left is not None or causal: tiles_m = max(tiles_m, key_tiles)
    heads = rng.choice((1, 2, 3))
    group, together = rng.choice(((1, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (8, 4)))
    case = Case(tiles_m, key_tiles, heads, group, together, causal, left, bool(seed % 2), is_192)
    return case, rng.choice((1, 3, 4)), rng.choice((1, 2, 3))


if __name__ == "__main__":
    seeds = range(int(sys.argv[1]) if sys.argv[1:] else 1000)
    lag = max(run(random.Random(seed), *draw(seed, "192" in sys.argv[2:])) for seed in seeds)
    print("right, most key tiles between producer and slowest reader", lag)
