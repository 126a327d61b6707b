"""Random interleavings of the barriers of activation_gluon_sm90: activation_protocol.py RUNS [without BARRIER].

No overrun of a barrier, no buffer written while it is read or read before it was written, no tile forgotten, and no
deadlock. ``without hand_over`` or ``without take_back`` leaves one out, and has to fail.
"""

import random
import sys

SLOTS = 8  # of the mailbox


class Program:
    """The partitions of one program as generators; each yields where others may run."""

    def __init__(self, rng, tiles, steps, stages, without):
        self.rng, self.tiles, self.steps, self.stages, self.without = rng, tiles, steps, stages, without
        self.bars, self.phases, self.bufs, self.box = {}, {}, {}, {}
        self.finished = []

    def partitions(self):
        return [self.load(), self.multiply(0), self.multiply(1), self.finish()]

    def arrive(self, name, who, threads, total):
        bar = self.bars.setdefault(name, {"who": [], "count": 0, "gen": 0})
        assert who not in bar["who"], f"overrun of {name} by {who}"
        bar["who"].append(who)
        bar["count"] += threads
        assert bar["count"] <= total, f"too many at {name}"
        gen = bar["gen"]
        if bar["count"] == total:
            bar.update(who=[], count=0, gen=gen + 1)
        return bar, gen

    def sync(self, name, who, threads, total):
        bar, gen = self.arrive(name, who, threads, total)
        while bar["gen"] == gen:
            yield

    def pause(self):
        for _ in range(self.rng.randrange(6)):
            yield

    def wait(self, name, parity):
        while self.phases.get(name, 0) & 1 == parity:  # the phase that runs has that parity
            yield

    def write(self, name, tag):
        buf = self.bufs.setdefault(name, {"tag": None, "readers": set()})
        assert not buf["readers"], f"{name} written while {buf['readers']} read it"
        buf["tag"] = tag

    def read(self, name, tag, who):
        buf = self.bufs.get(name, {"tag": None})
        assert buf["tag"] == tag, f"{who} reads {buf['tag']} from {name}, expected {tag}"
        buf["readers"].add(who)
        yield from self.pause()
        assert buf["tag"] == tag, f"{name} was overwritten under {who}"
        buf["readers"].discard(who)

    def tile_of(self, n, who):
        yield from self.wait(("tile", n % SLOTS), n // SLOTS & 1)
        at, rows = self.box[n % SLOTS]
        assert at == n, f"{who} finds tile {at} in place of {n}"
        return rows

    def load(self):
        i = 0
        for n, rows in enumerate([*self.tiles, -1]):
            self.box[n % SLOTS] = (n, rows)
            self.phases["tile", n % SLOTS] = self.phases.get(("tile", n % SLOTS), 0) + 1
            for step in range(self.steps if rows >= 0 else 0):
                yield from self.pause()
                if i >= self.stages:
                    yield from self.sync(("free", i % self.stages), "producer", 64, 320)
                self.write(("ring", i % self.stages), None)
                yield from self.pause()
                self.write(("ring", i % self.stages), (n, step))
                self.phases["ready", i % self.stages] = self.phases.get(("ready", i % self.stages), 0) + 1
                i += 1

    def multiply(self, w):
        i = n = given = 0
        while (rows := (yield from self.tile_of(n, f"multiplier {w}"))) >= 0:
            there = rows > 64 * w
            for step in range(self.steps):
                yield from self.wait(("ready", i % self.stages), i // self.stages & 1)
                if there:
                    yield from self.read(("ring", i % self.stages), (n, step), f"multiplier {w}")
                self.arrive(("free", i % self.stages), f"multiplier {w}", 128, 320)
                i += 1
            if there:
                if given and self.without != "take_back":
                    yield from self.sync(("take_back", w), f"multiplier {w}", 128, 192)
                for chunk in range(4):
                    self.write(("da", w, chunk), n)
                    yield from self.pause()
                if self.without != "hand_over":
                    self.arrive(("hand_over", w), f"multiplier {w}", 128, 192)
                given += 1
            n += 1

    def finish(self):
        n = 0
        while (rows := (yield from self.tile_of(n, "finisher"))) >= 0:
            parts = -(-rows // 16)
            for part in range(parts):
                w, strip = divmod(part, 4)
                if strip == 0 and self.without != "hand_over":
                    yield from self.sync(("hand_over", w), "finisher", 64, 192)
                for chunk in range(4):
                    yield from self.read(("da", w, chunk), n, "finisher")
                    assert self.box[n % SLOTS][0] == n, "the tile's numbers were overwritten"
                if (strip == 3 or part == parts - 1) and self.without != "take_back":
                    self.arrive(("take_back", w), "finisher", 64, 192)
            self.finished.append(n)
            n += 1


def run(seed, without):
    rng = random.Random(seed)
    tiles = [rng.choice((1, 16, 63, 64, 65, 100, 128)) for _ in range(rng.randrange(24))]
    steps, stages = rng.choice(((1, 3), (2, 3), (3, 3), (7, 3), (2, 6), (5, 6)))
    program = Program(rng, tiles, steps, stages, without)
    running = program.partitions()
    speed = [rng.random() + 0.02 for _ in running]
    idle = 0
    while running:
        k = rng.choices(range(len(running)), speed)[0]
        try:
            next(running[k])
        except StopIteration:
            del running[k], speed[k]
            idle = 0
        idle += 1
        assert idle < 200_000, f"deadlock: seed {seed}, {steps} steps, {stages} stages, {tiles}"
    assert program.finished == [*range(len(tiles))]


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        run(number, sys.argv[3] if "without" in sys.argv else None)
    print("nothing found")
