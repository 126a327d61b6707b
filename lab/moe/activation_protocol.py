"""Random interleavings of the barriers of activation_gluon_sm90: activation_protocol.py RUNS [without BARRIER].

No overrun of a barrier, no buffer written while it is read or read before it was written, no tile forgotten, and no
deadlock. ``without hand_over`` or ``without take_back`` leaves one out, and has to fail.
"""

import random
import sys

SLOTS = 8  # of the mailbox


def program(rng, tiles, steps, stages, without):
    """Return the partitions of one program as generators; each yields where others may run."""
    bars, phases, bufs, box = {}, {}, {}, {}
    finished = []

    def arrive(name, who, threads, total):
        bar = bars.setdefault(name, {"who": [], "count": 0, "gen": 0})
        assert who not in bar["who"], f"overrun of {name} by {who}"
        bar["who"].append(who)
        bar["count"] += threads
        assert bar["count"] <= total, f"too many at {name}"
        gen = bar["gen"]
        if bar["count"] == total:
            bar.update(who=[], count=0, gen=gen + 1)
        return bar, gen

    def sync(name, who, threads, total):
        bar, gen = arrive(name, who, threads, total)
        while bar["gen"] == gen:
            yield

    def pause():
        for _ in range(rng.randrange(6)):
            yield

    def wait(name, parity):
        while phases.get(name, 0) & 1 == parity:  # the phase that runs has that parity
            yield

    def write(name, tag):
        buf = bufs.setdefault(name, {"tag": None, "readers": set()})
        assert not buf["readers"], f"{name} written while {buf['readers']} read it"
        buf["tag"] = tag

    def read(name, tag, who):
        buf = bufs.get(name, {"tag": None})
        assert buf["tag"] == tag, f"{who} reads {buf['tag']} from {name}, expected {tag}"
        buf["readers"].add(who)
        yield from pause()
        assert buf["tag"] == tag, f"{name} was overwritten under {who}"
        buf["readers"].discard(who)

    def tile_of(n, who):
        yield from wait(("tile", n % SLOTS), n // SLOTS & 1)
        at, rows = box[n % SLOTS]
        assert at == n, f"{who} finds tile {at} in place of {n}"
        return rows

    def load():
        i = 0
        for n, rows in enumerate([*tiles, -1]):
            box[n % SLOTS] = (n, rows)
            phases["tile", n % SLOTS] = phases.get(("tile", n % SLOTS), 0) + 1
            for step in range(steps if rows >= 0 else 0):
                yield from pause()
                if i >= stages:
                    yield from sync(("free", i % stages), "producer", 64, 320)
                write(("ring", i % stages), None)
                yield from pause()
                write(("ring", i % stages), (n, step))
                phases["ready", i % stages] = phases.get(("ready", i % stages), 0) + 1
                i += 1

    def multiply(w):
        i = n = given = 0
        while (rows := (yield from tile_of(n, f"multiplier {w}"))) >= 0:
            there = rows > 64 * w
            for step in range(steps):
                yield from wait(("ready", i % stages), i // stages & 1)
                if there:
                    yield from read(("ring", i % stages), (n, step), f"multiplier {w}")
                arrive(("free", i % stages), f"multiplier {w}", 128, 320)
                i += 1
            if there:
                if given and without != "take_back":
                    yield from sync(("take_back", w), f"multiplier {w}", 128, 192)
                for chunk in range(4):
                    write(("da", w, chunk), n)
                    yield from pause()
                if without != "hand_over":
                    arrive(("hand_over", w), f"multiplier {w}", 128, 192)
                given += 1
            n += 1

    def finish():
        n = 0
        while (rows := (yield from tile_of(n, "finisher"))) >= 0:
            parts = -(-rows // 16)
            for part in range(parts):
                w, strip = divmod(part, 4)
                if strip == 0 and without != "hand_over":
                    yield from sync(("hand_over", w), "finisher", 64, 192)
                for chunk in range(4):
                    yield from read(("da", w, chunk), n, "finisher")
                    assert box[n % SLOTS][0] == n, "the tile's numbers were overwritten"
                if (strip == 3 or part == parts - 1) and without != "take_back":
                    arrive(("take_back", w), "finisher", 64, 192)
            finished.append(n)
            n += 1

    return [load(), multiply(0), multiply(1), finish()], finished


def run(seed, without):
    rng = random.Random(seed)
    tiles = [rng.choice((1, 16, 63, 64, 65, 100, 128)) for _ in range(rng.randrange(24))]
    steps, stages = rng.choice(((1, 3), (2, 3), (3, 3), (7, 3), (2, 6), (5, 6)))
    running, finished = program(rng, tiles, steps, stages, without)
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
    assert finished == [*range(len(tiles))]


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        run(number, sys.argv[3] if "without" in sys.argv else None)
    print("nothing found")
