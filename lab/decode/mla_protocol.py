"""Run the barriers of decode_gluon_sm90 and of ``few_gluon_sm90``, as they are and with ``mla_two_scorers.patch``, in random interleavings.

    python3 lab/decode/mla_protocol.py [SEEDS]

Each warpgroup and the producer are one agent each; of few heads each warp, and the copy engine. It ends with an assertion where a named barrier is overrun, a buffer is written while it is read or holds
another tile than the one that is expected, or nobody can go on. Masks and fences are left out, and cleaning but for few heads.
"""
import pathlib, random, sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "hopper" / "backward"))
from barriers import Program, interleave


def load(p, steps, stages):
    for i in range(steps):
        slot = i % stages
        if i >= stages: yield from p.sync(("FREE", slot), "L", 32, 288)
        yield from p.pause()
        for part in ("K", "L", "R"): p.write((part, slot), None)
        yield from p.pause(8)
        for part in ("K", "L", "R"): p.buf[(part, slot)]["tag"] = i
        p.mdone(("READY", slot))


def keys(p, i, stages): yield from p.mwait(("READY", i % stages), (i // stages) & 1, i // stages)


def read(p, names, tag, who):
    for name in names: p.begin(name, tag, who)
    yield from p.pause(6)
    for name in names: p.end(name, who)


def fold(p, W, i, stages, P):
    """The output product of tile i, whose P lies in ``P`` (None: in registers)."""
    yield from keys(p, i, stages)
    yield from read(p, [("LR"[W], i % stages), *([P, ("factor", P[1])] if P else [])], i, W)


def as_it_is(p, W, steps, stages):
    if W == 0:
        for i in range(steps):
            yield from keys(p, i, stages)
            yield from read(p, [("K", i % stages)], i, W)
            if i: yield from p.sync("P_FREE", W, 128, 256)
            for name in (("P", 0), ("factor", 0)): p.write(name, i)
            p.arrive("P_FULL", W, 128, 256)
            yield from fold(p, W, i, stages, None)
            p.arrive(("FREE", i % stages), W, 128, 288)
        if steps: yield from p.sync("P_FREE", W, 128, 256)
        p.write(("factor", 0), "end")
        p.arrive("P_FULL", W, 128, 256)
    else:
        for i in range(steps):
            yield from p.sync("P_FULL", W, 128, 256)
            yield from fold(p, W, i, stages, ("P", 0))
            p.arrive("P_FREE", W, 128, 256)
            p.arrive(("FREE", i % stages), W, 128, 288)
        yield from p.sync("P_FULL", W, 128, 256)
        yield from read(p, [("factor", 0)], "end", W)


def two_scorers(p, W, steps, stages, broken=None):
    O = 1 - W
    known = None  # the tile up to which the first knows the maximum
    def score(i):
        nonlocal known
        yield from keys(p, i, stages)
        yield from read(p, [("K", i % stages)], i, W)
        if W == 1:
            yield from p.sync(("FULL", 0), W, 128, 256)
            yield from read(p, [("m", 0)], i - 1, W)
        else: assert known == (i - 1 if i else None)
        if i >= 2 and broken != "read": yield from p.sync(("READ", W), W, 128, 256)
        for name in ("P", "factor", "m"): p.write((name, W), i)
        yield from p.pause()
        p.arrive(("FULL", W), W, 128, 256)
        known = i
    def own(i):
        yield from fold(p, W, i, stages, None)
        p.arrive(("FREE", i % stages), W, 128, 288)
    def other(i):
        nonlocal known
        yield from fold(p, W, i, stages, ("P", O))
        if W == 0:
            yield from read(p, [("m", O)], i, W); known = i
        p.arrive(("READ", O), W, 128, 256)
        p.arrive(("FREE", i % stages), W, 128, 288)
    for j in range(steps // 2):
        if W == 0:
            yield from score(2 * j); yield from own(2 * j)
            if broken != "full": yield from p.sync(("FULL", 1), W, 128, 256)
            yield from other(2 * j + 1)
        else:
            yield from score(2 * j + 1); yield from other(2 * j); yield from own(2 * j + 1)
    if steps % 2:
        if W == 0: yield from score(steps - 1); yield from own(steps - 1)
        else: yield from p.sync(("FULL", 0), W, 128, 256); yield from other(steps - 1)
    if W == 0: assert known == (steps - 1 if steps else None)
    end = lambda: p.sync("END", W, 128, 256)
    yield from end()
    if W == 1:
        for b in (0, 1): p.write(("m", b), "end")
    yield from end()
    if W == 0:
        yield from read(p, [("m", 0), ("m", 1)], "end", W)
        p.write(("factor", 0), "end")
    yield from end()
    yield from read(p, [("factor", 0)], "end", W)


def few_heads(p, W, steps, asked, broken=None):
    """One of four warps: it scores 16 keys, writes their P, and multiplies all of P with a part of the columns; the first asks for copies."""
    def barrier(): yield from p.sync("ALL", W, 32, 128)
    if W == 0: asked += range(min(2, steps))
    for i in range(steps):
        slot = i % 2
        yield from p.mwait(("READY", slot), (i // 2) & 1, i // 2)
        yield from read(p, [("K", slot)], i, W)
        p.write(("P", W), i)  # the maximum of all warps needs a barrier, too, which is Triton's
        if i == steps - 1:  # the last tile is cleaned, by all warps
            if broken != "clean": yield from barrier()
            p.write(("K", slot), i)
        yield from p.pause()
        if broken != "full": yield from barrier()
        yield from read(p, [("K", slot), *[("P", w) for w in range(4)]], i, W)
        if broken != "free": yield from barrier()
        if W == 0 and i + 2 < steps: asked.append(i + 2)
    if W == 0: asked.append(None)


def copies(p, asked):
    while True:
        while not asked: yield
        i = asked.pop(0)
        if i is None: return
        yield from p.pause()
        p.write(("K", i % 2), None)
        yield from p.pause(8)
        p.buf[("K", i % 2)]["tag"] = i
        p.mdone(("READY", i % 2))


def run_few_heads(seed, **options):
    rng = random.Random(seed)
    steps, p, asked = rng.randrange(14), Program(rng), []
    interleave(rng, [[*(few_heads(p, W, steps, asked, **options) for W in range(4)), copies(p, asked)]], 1)


def run(seed, attend, stages, **options):
    rng = random.Random(seed)
    steps, p = rng.randrange(14), Program(rng)
    interleave(rng, [[attend(p, 0, steps, stages, **options), attend(p, 1, steps, stages, **options), load(p, steps, stages)]], 1)


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for seed in range(seeds):
        run(seed, as_it_is, 2)
        run(seed, as_it_is, 4)
        run(seed, two_scorers, 4)
        run_few_heads(seed)
    broken_runs = [(b, lambda seed, b=b: run(seed, two_scorers, 4, broken=b)) for b in ("read", "full")]
    broken_runs += [(b, lambda seed, b=b: run_few_heads(seed, broken=b)) for b in ("clean", "full", "free")]
    for broken, attempt in broken_runs:
        failed = 0
        for seed in range(200):
            try: attempt(seed)
            except (AssertionError, KeyError): failed += 1  # or what nobody has written is read
        assert failed, broken
    print(f"{seeds} interleavings of each are right; without a wait they are not")
