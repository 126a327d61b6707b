"""What the simulations of barriers share: named barriers, mbarriers, who reads a buffer, and programs that run interleaved at random."""


class Program:
    """The barriers and buffers of one program. Its agents are generators: each ``yield`` lets another one go on."""

    def __init__(self, rng):
        self.rng, self.bars, self.phases, self.buf = rng, {}, {}, {}  # buf: name -> dict(tag, readers)

    def arrive(self, name, who, threads, total):
        b = self.bars.setdefault(name, dict(who=[], count=0, gen=0))
        assert who not in b["who"], f"overrun of {name} by {who}"
        b["who"].append(who); b["count"] += threads
        assert b["count"] <= total, f"too many at {name}"
        g = b["gen"]
        if b["count"] == total: b.update(who=[], count=0, gen=g + 1)
        return b, g

    def sync(self, name, who, threads, total):
        b, g = self.arrive(name, who, threads, total)
        while b["gen"] == g: yield

    def pause(self, k=4):
        for _ in range(self.rng.randrange(k)): yield

    def mwait(self, name, parity, phase=None):
        """Wait as an mbarrier does: it passes unless the running phase has this parity; ``phase`` is the one that is meant."""
        while True:
            done = self.phases.get(name, 0)
            if (done & 1) != parity:
                assert phase is None or done == phase + 1, ("aliased", name, done, phase)
                return
            yield

    def mdone(self, name): self.phases[name] = self.phases.get(name, 0) + 1

    def write(self, name, tag):
        b = self.buf.setdefault(name, dict(tag=None, readers=set()))
        assert not b["readers"], f"{name} written while {b['readers']} read"
        b["tag"] = tag

    def begin(self, name, tag, who):
        b = self.buf[name]; assert b["tag"] == tag, (name, b["tag"], tag, who); b["readers"].add(who)

    def end(self, name, who): self.buf[name]["readers"].discard(who)


def interleave(rng, programs, sms):
    """Run lists of agents, ``sms`` lists at a time, one random agent a step; an assertion fails where nobody can go on."""
    waiting, idle = list(programs), 0
    active = [waiting.pop() for _ in range(min(sms, len(waiting)))]
    while active:
        p = rng.choice(active); part = rng.choice(p)
        try: next(part)
        except StopIteration:
            p.remove(part); idle = 0
            if not p:
                active.remove(p)
                if waiting: active.append(waiting.pop())
        idle += 1
        assert idle < 400000, "deadlock"
